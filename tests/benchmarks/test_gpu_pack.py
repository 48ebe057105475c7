"""Tests of what ``make gpu-pack`` packs, and of what ``benchmarks/run.py`` makes of it."""

import json
import os
import platform
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks import gpu_pack, run

HERE = platform.python_version().rpartition(".")[0]


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with a tiny Triton, cut down, and a kernel."""
    original, folder = tmp_path / "original" / "triton", tmp_path / "folder"
    for name in ("__init__.py", "backends/nvidia/bin/ptxas", "backends/nvidia/bin/ptxas-blackwell"):
        (original / name).parent.mkdir(parents=True, exist_ok=True)
        (original / name).write_text("")
    (original.parent / "triton-9.9.dist-info").mkdir()
    (original.parent / "triton-9.9.dist-info" / "METADATA").write_text("Version: 9.9")
    gpu_pack.cut_triton(original, folder / "site" / "triton")
    (folder / "triton" / "KEY").mkdir(parents=True)
    (folder / "triton" / "KEY" / "kernel.cubin").write_bytes(b"code")
    return folder


@pytest.fixture
def built(tmp_path):
    file = tmp_path / "_C.cpython-399-x86_64-linux-gnu.so"
    file.write_bytes(os.urandom(2**16))
    return file


def test_a_pack_has_the_commit_the_extension_a_cut_triton_and_kernels(folder, built, tmp_path):
    path = tmp_path / "packs" / "pack.tar.xz"
    assert gpu_pack.write(path, folder, built, limit=64, preset=0) == path.stat().st_size / 2**20
    with tarfile.open(path) as pack:
        names = set(pack.getnames())
        facts = json.load(pack.extractfile("cvt-kernels/build/gpu-pack/pack.json"))
    assert {
        "cvt-kernels/benchmarks/run.py",
        f"cvt-kernels/cvt_kernels/{built.name}",
        "cvt-kernels/build/gpu-pack/site/triton/backends/nvidia/bin/ptxas",
        "cvt-kernels/build/gpu-pack/site/triton-9.9.dist-info/METADATA",
        "cvt-kernels/build/gpu-pack/triton/KEY/kernel.cubin",
    } <= names
    assert not any("blackwell" in name for name in names)
    assert (len(facts["commit"]), facts["python"]) == (40, HERE)


def test_a_pack_that_is_too_large_is_not_written(folder, built, tmp_path, capsys):
    path = tmp_path / "packs" / "pack.tar.xz"
    assert gpu_pack.write(path, folder, built, limit=0.01, preset=0) > 0.01
    assert not list(path.parent.iterdir())
    assert "more than 0.01 (pack.json 0 MiB before compression" in capsys.readouterr().err


def test_what_cannot_be_packed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_pack, "ROOT", tmp_path)
    triton = tmp_path / "triton"
    triton.mkdir()
    assert gpu_pack.main([str(tmp_path / "p.tar.xz"), "--triton", str(triton), "--no-kernels"]) == 2
    assert "*.so is missing: run setup.py build_ext --inplace first" in capsys.readouterr().err


def test_a_run_uses_the_pack_that_lies_beside_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PACK", folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("PYTHONPATH", "TRITON_STORE_BINARY_ONLY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert run.pack() == {}
    (folder / "pack.json").write_text(json.dumps({"commit": "abc", "python": HERE}))
    run.use_pack(run.pack())
    assert sys.path[0] == os.environ["PYTHONPATH"] == str(folder / "site")
    run.restore([folder])
    assert (tmp_path / "cache" / "KEY" / "kernel.cubin").read_bytes() == b"code"
    with pytest.raises(ValueError, match=r"is for Python 2.7, and this is"):
        run.use_pack({"python": "2.7"})


def test_the_folder_of_the_pack_is_where_a_run_looks():
    assert run.PACK.relative_to(run.ROOT) == Path(gpu_pack.PACK)
