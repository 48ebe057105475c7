"""The loops of the CPU kernels on small inputs, with AddressSanitizer and UBSan."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.checks import TRAPS, compiler, needs_avx2

HERE, CSRC = Path(__file__).parent, Path(__file__).parents[2] / "csrc"
WIDE = "-DKERNELS_VECTOR_BYTES=64"
TILES = f"{WIDE} -DKERNELS_TILES"
AVX2 = "-mavx2 -mfma -mf16c"
#: The compiler's options for a family's loops; without any for those that are not here.
FLAGS = {
    # Without any, all but float64 and biases are run as a part of the transformer block.
    "attention": [pytest.param(f"{AVX2} -DKERNELS_PAIRS", marks=needs_avx2), TILES],
    "layer_norm_gelu": ["", pytest.param(AVX2, marks=needs_avx2)],
    "transformer_block": ["", TILES],
    "depth_head": [WIDE],
    "conv_embedding": [TILES],
    "linear": [TILES],
    "linear_int8": [TILES],
    "segmentation_head": [TILES],
    "transformer_block_pyramids": [TILES],
}
SOURCES = {path.stem.removesuffix("_sanitized"): path for path in sorted(HERE.glob("*_sanitized.cpp"))}


def loops_of(family: str) -> set[str]:
    """Returns the loops that a family's program runs: those whose header, a ``cpu_loops.h``, it includes."""
    text = SOURCES[family].read_text(encoding="utf-8")
    return set(re.findall(r'^#include "(\w+/\w*cpu_loops).h"$', text, re.MULTILINE))


def test_all_loops_are_run():
    found = {str(path.relative_to(CSRC).with_suffix("")) for path in CSRC.glob("*/*cpu_loops.cpp")}
    assert set().union(*map(loops_of, SOURCES)) == found


def run(family: str, program: Path, flags: str) -> subprocess.CompletedProcess[str]:
    """Compiles a family's program and runs it."""
    sources = [SOURCES[family], *(CSRC / f"{name}.cpp" for name in sorted(loops_of(family)))]
    sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all"
    options = shlex.split(f"-std=c++20 -O0 -g1 -Wno-psabi {sanitizers} {flags} -DKERNELS=kernels_plain")
    files = map(str, ["-I", CSRC, *sources, "-o", program])
    subprocess.run([*compiler(), *options, *files], check=True)
    return subprocess.run([str(program)], capture_output=True, text=True)


@pytest.mark.sanitized
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(("family", "flags"), [
    pytest.param(family, *getattr(flags, "values", [flags]), marks=getattr(flags, "marks", ()))
    for family in SOURCES for flags in FLAGS.get(family, [""])
])  # fmt: skip
def test_loops_are_right_and_stay_within_their_buffers(family, flags, tmp_path):
    """UBSan ends the program by a signal, which is compiled in two thirds of the time that messages take."""
    result = run(family, tmp_path / "program", f"{TRAPS} {flags}")
    if (result.returncode, result.stdout) != (0, "done\n"):
        told = run(family, tmp_path / "program", flags)  # with messages
        pytest.fail(f"{result.returncode}: {result.stdout}{result.stderr}{told.stdout}{told.stderr}")
