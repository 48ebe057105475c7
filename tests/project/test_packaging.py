"""The packages that are built from this folder: what is in them, and what they say of themselves."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cvt
import cvt_kernels as ck

ROOT = Path(__file__).parents[2]
BUILD = "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


@pytest.fixture(scope="module")
def tracked():
    """Returns the names of the files that Git has."""
    if not (ROOT / ".git").exists():
        pytest.skip("this folder is not a checkout of Git's")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def dist(tracked, tmp_path_factory):
    """Returns a folder with the packages, without the extension, built from a copy of what Git has."""
    copy = tmp_path_factory.mktemp("packages") / "copy"
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    environment = {**os.environ, "CXX": "no-such-compiler", "CVT_KERNELS_CUDA": "0"}
    command = [sys.executable, "-W", "ignore", "-c", BUILD]
    subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=True)
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    """Returns the names in the wheel and its metadata."""
    [path] = dist.glob("*.whl")
    with zipfile.ZipFile(path) as file:
        [metadata] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return set(file.namelist()), email.message_from_bytes(file.read(metadata))


def test_the_source_distribution_has_what_git_has(dist, tracked):
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {member.name.partition("/")[2] for member in file.getmembers() if member.isfile()}
    added = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert names - added == tracked


def test_the_wheel_has_every_file_of_the_packages(wheel, tracked):
    names, _ = wheel
    packaged = {name for name in tracked if name.startswith(("cvt/", "cvt_kernels/"))}
    assert {"cvt/py.typed", "cvt_kernels/py.typed"} < packaged
    assert {name for name in names if ".dist-info/" not in name} == packaged


def test_the_metadata(wheel):
    """Triton and upstreams are optional."""
    _, metadata = wheel
    assert metadata["Version"] == ck.__version__ == cvt.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    needed = metadata.get_all("Requires-Dist")
    always = {re.match(r"[\w-]+", line)[0] for line in needed if "extra ==" not in line}
    assert {"torch", "numpy", "safetensors"} <= always
    assert not always & {"triton", "transformers", "huggingface_hub", "matplotlib"}
    assert any(re.match(r"triton.*Linux.*extra == .gpu.", line) for line in needed)


def test_wheels_are_built_for_every_python_and_with_the_documented_toolkit():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 does not read TOML")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    built = project["tool"]["cibuildwheel"]
    minors = re.search(r"cp3\{([\d,]+)\}", built["build"])[1].split(",")
    named = [re.search(r"Python :: 3\.(\d+)$", line) for line in project["project"]["classifiers"]]
    assert minors == [match[1] for match in named if match]
    toolkit = re.findall(r"'(nvidia-[^']+)'", " ".join(built["before-build"]))
    assert toolkit == re.findall(r"'(nvidia-[^']+)'", (ROOT / "docs/start.md").read_text("utf-8"))
    assert (ROOT / built["test-command"].rpartition("{project}/")[2]).is_file()
