"""The contract's calls by CPU kernels, in an extension that is built with AddressSanitizer and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks import BUILD, TRAPS, compiler, needs_avx2, needs_extension

ROOT = Path(__file__).parents[2]
#: Instruction sets, and options: vectors of other widths, and products in pairs or tiles, which are emulated.
BUILDS = {
    "plain": ("plain", ""),
    "tiles": ("plain", "-DKERNELS_VECTOR_BYTES=64 -DKERNELS_TILES"),
    "pairs": ("avx2", "-DKERNELS_PAIRS"),
}
#: Each tensor ends where its memory does, and each call has new memory to work in.
CODE = """
import importlib.util, sys
import torch

spec = importlib.util.spec_from_file_location("cvt_kernels._C", EXTENSION)
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

import cvt_kernels as ck
from tests.contract.examples import EXAMPLES, run
from tests.contract.test_sizes import SIZES, check, check_all, lines

def in_new_memory(made):
    ck.release_memory()
    return run(made)

for threads in (1, 3):
    torch.set_num_threads(threads)
    check_all(in_new_memory, {name for examples in EXAMPLES.values() for name in examples if name != "empty"})
    for operator, by_backend in SIZES.items():
        for words in lines(by_backend.get("cpu", "")):
            check(operator, "cpu", words, run=in_new_memory)
print("done")
"""


def built(name: str, sets: str, flags: str) -> Path:
    """Returns the extension for some instruction sets, with both sanitizers."""
    folder = BUILD / f"sanitized_{name}"
    options = f"-fsanitize=address,undefined -fno-sanitize-recover=all {TRAPS} -g1 {flags}"
    settings = {
        "CXX": f"{' '.join(compiler())} {options}",
        "CVT_KERNELS_CPU_SETS": sets,
        "CVT_KERNELS_CUDA": "0",
    }
    places = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    command = [sys.executable, "setup.py", "-q", "build_ext", *places]
    subprocess.run(command, cwd=ROOT, env=os.environ | settings, check=True)
    (extension,) = (folder / "lib").glob("cvt_kernels/_C*.so")
    return extension


def library(name: str) -> str:
    """Returns the path of a library of the compiler."""
    command = [*compiler(), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.sanitized
@needs_extension
@pytest.mark.parametrize("name", ["plain", "tiles", pytest.param("pairs", marks=needs_avx2)])
def test_operators_stay_within_their_memory(name):
    """UBSan ends the process by a signal; compiled without TRAPS, it says where."""
    code = CODE.replace("EXTENSION", repr(str(built(name, *BUILDS[name]))))
    settings = {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-8000:]
