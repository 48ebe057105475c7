"""``cvt quantize``: its files, its figures, which layers it leaves alone, and what it rejects."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import cvt_kernels as ck
from cvt import create_model, read_checkpoint
from cvt.tools.commands import main
from cvt.tools.commands import quantize as command
from cvt.tools.evaluation import Evaluation
from tests.checks import bad, run
from tests.cvt.models import small

PAGE = (Path(__file__).parents[4] / "docs" / "quantize.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Quantizes the model of digits; returns the folder, and what was printed."""
    folder = tmp_path_factory.mktemp("quantized")
    options = ["--checkpoint", "digits", "--calibrate", "digits", "--images", 20, "--batch-size", 10]
    files = ["--output", folder / "q.safetensors", "--json", folder / "q.json"]
    return folder, *run(main, "quantize", *options, *files)


def test_files_and_figures(digits):
    folder, out, err = digits
    assert err == ""
    assert sorted(file.name for file in folder.iterdir()) == ["q.json", "q.safetensors"]
    content = json.loads((folder / "q.json").read_text())
    before, after = content["before"], content["after"]
    assert before["top1"] - after["top1"] <= 0.003
    assert (content["held_out_images"], content["calibration_images"]) == (360, 20)
    assert after["bytes"] == (folder / "q.safetensors").stat().st_size
    assert before["bytes"] == sum(t.nbytes for t in create_model(checkpoint="digits").state_dict().values())
    assert len(content["layers"]) == 18
    for layer in content["layers"]:
        assert (layer["weight"], layer["reason"]) == ("int8", None)
        assert layer["sqnr"] > 30
        assert f"{layer['path']} " in out
        assert f"{layer['sqnr']:.1f} dB" in out
    lines = out.splitlines()
    assert "18 of 18 layers quantized" in lines
    transcript = PAGE.partition("$ cvt quantize ")[2].partition("```")[0].splitlines()
    assert transcript[1].endswith(lines[0].partition("safetensors")[2].replace(" 20 images", " 256 images"))
    assert lines[-7:] == transcript[-7:]


def test_the_file_says_all(digits):
    checkpoint = read_checkpoint(digits[0] / "q.safetensors")
    assert checkpoint.card == read_checkpoint("digits").card
    assert len(checkpoint.quantized) == 18


# Layers that stay in floating point -----------------------------------------------------------------------


@pytest.fixture
def pretend(monkeypatch):
    """Takes a model for right in 9 of 10 images, less with each quantized layer beyond a number."""

    def set_up(good):
        def evaluation(model, batches, title):
            count = sum(type(module) is ck.LinearInt8 for module in model.modules())
            top1 = 0.9 - 0.01 * max(0, count - good)
            return Evaluation(top1, 1.0, 0.5, torch.eye(10, dtype=torch.int64), 1.0, None)

        monkeypatch.setattr(command, "evaluated", evaluation)

    return set_up


def quantize_digits(tmp_path, *options):
    """Runs the command on the model of digits and few images; returns its exit code."""
    files = ["--output", str(tmp_path / "q.safetensors"), "--json", str(tmp_path / "q.json")]
    given = ["--checkpoint", "digits", "--calibrate", "digits", "--images", "5"]
    return main(["quantize", *given, *files, *options])


@pytest.mark.parametrize(("options", "kept"), [([], 6), (["--max-drop", "3"], 3), (["--max-drop", "6"], 0)])
def test_layers_that_lose_most_stay_as_they_are(capsys, pretend, tmp_path, options, kept):
    pretend(12)
    assert quantize_digits(tmp_path, *options) == 0
    out = capsys.readouterr().out
    content = json.loads((tmp_path / "q.json").read_text())
    in_order = sorted(content["layers"], key=lambda layer: layer["sqnr"])
    assert [layer["weight"] for layer in in_order] == ["float"] * kept + ["int8"] * (18 - kept)
    assert content["after"]["top1"] == pytest.approx(0.9 - 0.01 * (6 - kept))
    assert f"{18 - kept} of 18 layers quantized" in out
    assert out.count("for the sake of top-1") == kept
    checkpoint = read_checkpoint(tmp_path / "q.safetensors")
    assert set(checkpoint.quantized) == {layer["path"] for layer in in_order[kept:]}
    model = create_model(checkpoint=checkpoint)
    original = create_model(checkpoint="digits")
    for layer in in_order[:kept]:
        weight = original.get_submodule(layer["path"]).weight
        assert torch.equal(model.get_submodule(layer["path"]).weight, weight.half().float())


def test_options(capsys, pretend, tmp_path):
    pretend(99)
    kept = ["--keep-float", "stage0.*", "stage1.blocks.1.mlp.fc1", "--keep-float", "stage1.blocks.0.attn.*"]
    assert quantize_digits(tmp_path, "--embeddings", *kept) == 0
    quantized = read_checkpoint(tmp_path / "q.safetensors").quantized
    blocks = ["0.mlp.fc1", "0.mlp.fc2", "1.attn.proj", "1.attn.proj_k", "1.attn.proj_q", "1.attn.proj_v"]
    names = [f"stage1.blocks.{name}" for name in (*blocks, "1.mlp.fc2")]
    assert sorted(quantized) == [*names, "stage1.patch_embed.proj"]
    layers = json.loads((tmp_path / "q.json").read_text())["layers"]
    reasons = [layer["reason"] for layer in layers if layer["weight"] == "float"]
    assert reasons == 11 * ["is kept by keep_float"]
    for seed, same in (("0", True), ("1", False)):  # which chooses the images
        quantize_digits(tmp_path, "--embeddings", *kept, "--seed", seed)
        assert (json.loads((tmp_path / "q.json").read_text())["layers"] == layers) == same


# Folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def animals(tmp_path):
    """Writes a small model of two classes as a directory, and images of them; returns both folders."""
    model = small(num_classes=2).eval()
    model.save_pretrained(tmp_path / "model", labels=["tench", "goldfish"], image_size=32)
    for name, color in (("n01", 60), ("n02", 200)):
        for i in range(6):
            path = tmp_path / "data" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 50), (color, 40 * i, 100)).save(path)
    return tmp_path / "model", tmp_path / "data"


def test_a_folder_without_parts_and_the_names_of_classes(capsys, animals, tmp_path):
    model, data = animals
    options = ["--max-drop", "100", "--output", str(tmp_path / "q.safetensors")]
    assert main(["quantize", "--checkpoint", str(model), "--calibrate", str(data), *options]) == 0
    assert "calibrated on 8 images of" in (line := capsys.readouterr().out.splitlines()[0])
    assert line.endswith("measured on 4 others")
    card = read_checkpoint(tmp_path / "q.safetensors").card
    assert (card.labels, card.folders, card.image_size) == (["tench", "goldfish"], ["n01", "n02"], 32)
    checkpoint = ["--checkpoint", str(tmp_path / "q.safetensors")]
    assert main(["classify", str(data / "n01" / "0.png"), *checkpoint]) == 0
    assert "goldfish" in capsys.readouterr().out
    for part in ("train", "val"):
        shutil.copytree(data, data.parent / "parted" / part)
    assert main(["evaluate", "--data", str(data.parent / "parted"), *checkpoint]) == 0
    (tmp_path / "names").write_text("a\nb\n")
    options += ["--labels", str(tmp_path / "names")]
    parted = str(data.parent / "parted")
    capsys.readouterr()
    assert main(["quantize", "--checkpoint", str(model), "--calibrate", parted, *options]) == 0
    assert "calibrated on 12 images of" in capsys.readouterr().out
    assert read_checkpoint(tmp_path / "q.safetensors").labels == ["a", "b"]


# Bad input ------------------------------------------------------------------------------------------------


def test_a_drop_that_no_layer_allows(capsys, pretend, tmp_path):
    pretend(0)
    assert quantize_digits(tmp_path) == 2
    assert "--max-drop: top-1 falls below 89.50% even if " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_images_that_cannot_be_used(capsys, animals, tmp_path):
    model, data = animals
    for i in range(1, 5):
        for name in ("n01", "n02"):
            (data / name / f"{i}.png").write_text("hello")
    options = ["--checkpoint", model, "--calibrate", data, "--output", tmp_path / "q.safetensors"]
    assert "1.png: is not a readable image" in bad(capsys, main, "quantize", *options)
    assert "calibration: is empty" in bad(capsys, main, "quantize", *options, "--corrupt", "skip")
    assert not (tmp_path / "q.safetensors").exists()
