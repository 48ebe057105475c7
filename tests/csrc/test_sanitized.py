"""The contract's calls by CPU kernels, in an extension that is built with AddressSanitizer and UBSan."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cvt_kernels.machine.toolkit import cpu_sets_here
from tests.checks import BUILD, TRAPS, compiled, compiler, needs_avx2, needs_extension

ROOT = Path(__file__).parents[2]
#: An option by which csrc/common/tiles.h takes emulated instructions.
TILES = f'-DKERNELS_TILES="{Path(__file__).with_name("emulated_tiles.h")}"'
#: Instruction sets, and options: vectors of other widths, and products in pairs or tiles, which are emulated.
BUILDS = {
    "plain": ("plain", ""),
    "tiles": ("plain", f"-DKERNELS_VECTOR_BYTES=64 {shlex.quote(TILES)}"),
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
from cvt_kernels import backends
from tests.contract.examples import EXAMPLES, run
from tests.contract.test_sizes import SIZES, check, check_all, lines

ran = set()

def in_new_memory(made):
    ck.release_memory()
    ran.add(made.operator)
    return run(made)

for threads in (1, 3):
    torch.set_num_threads(threads)
    check_all(in_new_memory, {name for examples in EXAMPLES.values() for name in examples if name != "empty"})
    for operator, by_backend in SIZES.items():
        for words in lines(by_backend.get("cpu", "")):
            check(operator, "cpu", words, run=in_new_memory)
assert ran == {operator for operator, known in backends.implementations.items() if "cpu" in known}
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
        # New memory holds NaN.
        "ASAN_OPTIONS": f"detect_leaks=0:max_malloc_fill_size={2**30}:malloc_fill_byte=255",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-8000:]


needs_amx = pytest.mark.skipif("amx_bf16" not in cpu_sets_here(), reason="this CPU has no AMX")


@needs_extension
@pytest.mark.parametrize(
    "flags",
    [[TILES], pytest.param(["-mamx-tile", "-mamx-bf16", "-mamx-int8"], marks=needs_amx)],
    ids=["emulated", "amx"],
)
def test_emulated_tiles_compute_as_those_of_amx(flags):
    here = Path(__file__).parent
    sources = [here / "tiles.cpp", here / "emulated_tiles.h", ROOT / "csrc/common/tiles.h"]
    command = [*compiler(), "-std=c++20", "-O1", *flags, "-I", str(ROOT / "csrc"), str(sources[0])]
    assert subprocess.run([compiled(command, sources)], capture_output=True, check=True).stdout == b""
