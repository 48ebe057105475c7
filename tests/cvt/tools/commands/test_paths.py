"""Tests of the paths of commands: no output is an input, and reports in JSON."""

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from cvt.checkpoints import PACKAGED
from cvt.tools.commands import main, paths
from cvt.tools.datasets import save_digits
from tests.checks import bad
from tests.cvt.tools.commands.test_absurd_arguments import parsers

#: Every argument that is a path or a name → what it is.
KINDS = {
    **dict.fromkeys(("photos", "labels", "checkpoint", "teacher", "data", "calibrate"), paths.InputPath),
    **dict.fromkeys(("photo", "bench images"), paths.InputPath),
    **dict.fromkeys(("output", "json", "bench plot"), paths.OutputPath),
}


def test_every_path_is_an_input_or_an_output():
    found = set()
    for command, parser in parsers().items():
        for action in parser._actions:
            own = f"{command} {action.dest}"
            name = own if own in KINDS else action.dest
            is_path = action.type in (paths.input_path, paths.output_path)
            assert is_path == (name in KINDS), own
            if is_path:
                assert type(action.type("x")) is KINDS[name], own
                found.add(name)
    assert found == {*KINDS}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a checkpoint as a file and as a folder, digits by class, and links to them."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(PACKAGED["digits"], "digits.safetensors")
    os.mkdir("trained")
    shutil.copy(PACKAGED["digits"], "trained/best.pth")
    for split in ("train", "val"):
        for image in save_digits("images"):
            os.makedirs(f"data/{split}/{image.stem}")
            shutil.copy(image, f"data/{split}/{image.stem}/0.png")
    os.makedirs("elsewhere")
    os.rename("data/val/9", "elsewhere/9")
    os.symlink("../../elsewhere/9", "data/val/9")
    os.symlink("digits.safetensors", "link.safetensors")
    os.link("digits.safetensors", "hard.safetensors")
    os.symlink("loop", "loop")
    Path("labels").write_text("\n".join("abcdefghij"))
    Image.new("RGB", (40, 40)).save("heads.png")
    return tmp_path


_MODEL = "--checkpoint digits.safetensors"
_QUANTIZE = f"quantize {_MODEL} --calibrate data"
_PRUNE = f"prune {_MODEL} --mlp=0.5"
_EVALUATE = f"evaluate {_MODEL} --data=data"


@pytest.mark.parametrize(
    "arguments",
    [
        f"{_QUANTIZE} --output=new.safetensors --json=digits.safetensors",
        f"{_QUANTIZE} --output=new.safetensors --json=data/train/3/0.png",
        f"{_QUANTIZE} --output=hard.safetensors",
        f"{_PRUNE} --output=new.safetensors --json=./link.safetensors",
        f"{_PRUNE} --calibrate data --output=new.safetensors --json=elsewhere/9/0.png",
        "prune --checkpoint=trained --mlp=0.5 --output=new.safetensors --json=trained/best.pth",
        f"{_EVALUATE} --json=digits.safetensors",
        f"{_EVALUATE} --json=data/val/9/0.png",
        f"{_EVALUATE} --labels=labels --json=labels",
        f"export {_MODEL} --format=pt2 --output=digits.safetensors",
        "export --checkpoint=trained --format=pt2 --output=trained/other.pt2 --json=trained/best.pth",
        f"export {_MODEL} --format=pt2 --output=new.pt2 --json=new.pt2",
        f"explain heads.png {_MODEL} --plot --output=.",
        "train --data=digits --checkpoint=trained/best.pth --output=trained --device=cpu",
        "train --data=data --teacher=digits.safetensors --json=link.safetensors --output=new",
        "bench --images heads.png --json=heads.png",
        "bench --images heads.png --plot=heads.png",
        "bench --json=new.png --plot=new.png",
    ],
)
def test_no_output_is_an_input(arguments, capsys, files):
    before = {path: path.read_bytes() for path in files.rglob("*") if path.is_file()}
    assert ", expected " in bad(capsys, main, *arguments.split())
    assert {path: path.read_bytes() for path in files.rglob("*") if path.is_file()} == before


def test_what_is_no_input_may_be_written(files):
    """Files beside the images, a second time too, and files of a folder with weights that are not read."""
    evaluate = parsers()["evaluate"]
    for place in ("report.json", "data/report.json", "trained/report.json"):
        arguments = evaluate.parse_args(["--checkpoint=trained", "--data=data", f"--json={place}"])
        for _ in range(2):
            paths.check_outputs(arguments, {})
            Path(place).write_text("{}")


@pytest.mark.parametrize("command", [_QUANTIZE, f"{_PRUNE} --calibrate data"])
@pytest.mark.parametrize("option", ["--checkpoint", "--output", "--json", "--calibrate"])
def test_a_link_that_leads_to_itself(command, option, capsys, files):
    os.symlink("loop.safetensors", "loop.safetensors")
    output = [] if option == "--output" else ["--output=new.safetensors"]
    bad(capsys, main, *command.split(), option, "loop.safetensors", *output)
    assert not Path("new.safetensors").exists()


def test_a_report_that_cannot_be_written_leaves_no_output(capsys, files):
    output = "--output=new.safetensors"
    assert "No space left on device" in bad(
        capsys, main, *_PRUNE.split(), "--batch-size=1", output, "--json=/dev/full"
    )
    assert not Path("new.safetensors").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "doctor",
        f"export {_MODEL} --format=pt2 --output=new.pt2",
        f"{_PRUNE} --batch-size=1 --output=new.safetensors",
        "train --data=digits --output=run --epochs=1 --warmup-epochs=0 --device=cpu",
    ],
)
@pytest.mark.slow
def test_a_report_on_standard_output(arguments, capsys, files):
    assert main([*arguments.split(), "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert captured.err
    if not arguments.startswith("train"):
        assert main([*arguments.split(), "--json", "report.json"]) == 0
        assert json.loads(Path("report.json").read_text()).keys() == json.loads(captured.out).keys()


def test_every_report_may_go_to_standard_output():
    with_report = {name for name, parser in parsers().items() if "--json" in parser._option_string_actions}
    assert with_report == {*parsers()} - {"classify", "explain"}


def test_without_a_command_all_are_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    for command in parsers():
        assert any(line.split()[:1] == [command] and len(line.split()) > 3 for line in lines)
    assert lines[-1] == "cvt: error: a command is missing"
