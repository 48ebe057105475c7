"""The file of choices: what is written, read and refused; and the machine key that names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import choose, machine
from cvt_kernels.tuning import choices
from cvt_kernels.tuning import key as machine_key
from cvt_kernels.tuning.choices import Entry

CPU = torch.device("cpu")
ENTRY = Entry("cpu", {"triton": "wrong: output 0 is off by nan"})


def in_another_process() -> dict[str, Entry]:
    choices.forget()
    return dict(choices.entries(CPU))


def written() -> Path:
    """Writes a file of one choice, and returns its path."""
    assert choices.remember(CPU, {"a": ENTRY}) is None
    return choices.path(CPU)


def test_a_choice_is_remembered_and_others_stay():
    choices.remember(CPU, {"a": ENTRY})
    choices.remember(CPU, {"b": ENTRY, "a": ENTRY._replace(chosen="reference")})
    assert in_another_process() == {"a": ENTRY._replace(chosen="reference"), "b": ENTRY}
    assert {path.suffix for path in choices.path(CPU).parent.iterdir()} == {".json", ".lock"}


def test_choices_of_another_process_are_kept():
    choices.remember(CPU, {"a": ENTRY})
    content = json.loads(choices.path(CPU).read_text())
    content["choices"]["theirs"] = content["choices"]["a"]
    choices.path(CPU).write_text(json.dumps(content))
    choices.remember(CPU, {"b": ENTRY})
    assert in_another_process().keys() == {"a", "b", "theirs"}


def test_a_call_writes_nothing_and_neither_does_a_flaw_that_may_pass():
    ck.gelu(torch.randn(2, 3))
    assert not choices.cache_directory().exists()
    passing = Entry("reference", {"cpu": "fails here: OSError: disk full"})
    assert choices.remember(CPU, {"a": passing}) is None
    assert choices.entries(CPU) == {"a": passing}
    assert in_another_process() == {}


def _changed(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text("{"), "Expecting property name"),
        (lambda path: path.write_text("[" * 100_000), "it is damaged: RecursionError"),
        (lambda path: path.write_bytes(b"\xff"), "utf-8"),
        (lambda path: path.write_text("[]"), "it is damaged: TypeError"),
        (lambda path: path.write_text("{}"), "it is damaged: KeyError: 'schema'"),
        (lambda path: _changed(path, version=7), "it is no file of choices of this version"),
        (lambda path: _changed(path, schema="x"), "it is no file of choices of this version"),
        (lambda path: _changed(path, machine={"device": "cpu"}), "made for another machine .*torch: None in"),
        (lambda path: _changed(path, choices={"a": {"chosen": "cpu"}}), "it is damaged: TypeError"),
        (lambda path: _changed(path, choices={"a": {"chosen": 1, "flaws": {}}}), "a choice or a flaw is no"),
        (lambda path: _changed(path, choices={"a": {"chosen": "cpu", "flaws": []}}), "it is damaged: Attr"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(damage, reason):
    damage(written())
    choices.forget()
    with pytest.warns(RuntimeWarning, match=f"this file of choices is ignored: .*{reason}") as caught:
        assert [choices.entries(CPU), choices.entries(CPU)] == [{}, {}]
    assert len(caught) == 1


def test_files_that_are_given_come_first_and_are_never_written(monkeypatch, tmp_path):
    path = written()
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    for each, chosen in ((one, "reference"), (other, "sdpa")):
        content = json.loads(path.read_text())
        content["choices"]["a"]["chosen"] = chosen
        content["choices"][each.name] = content["choices"]["a"]
        each.write_text(json.dumps(content))
    monkeypatch.setenv("CVT_KERNELS_TUNED", os.pathsep.join(map(str, (one, other))))
    assert {name: entry.chosen for name, entry in in_another_process().items()} == {
        "a": "reference", "one.json": "reference", "other.json": "sdpa",
    }  # fmt: skip
    before = one.read_bytes()
    choices.remember(CPU, {"b": ENTRY})
    assert one.read_bytes() == before
    monkeypatch.setenv("CVT_KERNELS_TUNED", str(tmp_path / "missing.json"))
    with pytest.warns(RuntimeWarning, match="CVT_KERNELS_TUNED: .*missing.json: this file of choices is ign"):
        assert in_another_process().keys() == {"a", "b"}


@pytest.mark.parametrize("home", [None, "relative"])
def test_the_folder_without_a_cache_directory(monkeypatch, home, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME") if home is None else monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert choices.cache_directory() == tmp_path / ".cache" / "cvt_kernels"


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing():
    code = (
        "import sys, torch\n"
        "from cvt_kernels.tuning import choices\n"
        "entry = choices.Entry('cpu', {})\n"
        "for i in range(10):\n"
        "    assert choices.remember(torch.device('cpu'), {f'{sys.argv[1]} {i}': entry}) is None\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(choices.read_file(choices.path(CPU), machine_key.machine_key(CPU))) == 30


# The machine key ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _forgotten():
    """Forgets the key of a machine that a test has made up."""
    machine_key.machine_key.cache_clear()
    yield
    machine_key.machine_key.cache_clear()


def test_key_of_the_cpu(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(machine, "cpu_sets", lambda: frozenset(("plain", "avx2")))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    key = machine_key.machine_key(CPU)
    assert key == json.loads(json.dumps(key))
    expected = {
        "torch": torch.__version__,
        "instruction sets": "avx2, plain",
        "name": machine.cpu_name(),
        "cuDNN": "not usable",
    }
    assert key.items() >= expected.items()


def test_key_depends_on_every_file_of_the_package(monkeypatch):
    package = Path(machine.__file__).parents[1]
    before, read = machine_key._build(), Path.read_bytes
    for edited in (package / "ops/linear/primitives.py", package / "choose.py", *package.glob("_C.*")):
        with monkeypatch.context() as patch:
            patch.setattr(
                Path, "read_bytes", lambda path, edited=edited: read(path) + b"#" * (path == edited)
            )
            assert machine_key._build() != before, edited


def test_key_of_a_gpu(monkeypatch):
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release\nGCC 12.3.0"
    read = Path.read_text
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(machine, "cuda_driver_version", lambda: 13_000)
    monkeypatch.setattr(
        Path, "read_text", lambda path, **how: version if path.name == "version" else read(path, **how)
    )
    key = machine_key.machine_key(torch.device("cuda"))
    assert key["driver"] == "550.54.15, CUDA 13.0"
    assert (key["name"], key["capability"], key["multiprocessors"]) == ("NVIDIA H200", "9.0", 132)
    assert choose.cache_key("gelu", torch.ones(2), approximate="none").startswith("gelu, forward, float32, ")


def test_threads_do_not_change_a_choice():
    before, threads = machine_key.machine_key(CPU), torch.get_num_threads()
    machine_key.machine_key.cache_clear()
    torch.set_num_threads(threads + 1)
    try:
        assert machine_key.machine_key(CPU) == before
    finally:
        torch.set_num_threads(threads)
