"""The choice of loops by csrc/common/cpu.h where a build has some instruction sets only."""

import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import torch

from cvt_kernels.machine.toolkit import CPU_SETS, cpu_sets_here
from tests.checks import compiled, compiler, not_built

ROOT = Path(__file__).parents[2]
INCLUDES = "-I", str(ROOT / "csrc"), "-isystem", str(Path(torch.__file__).parent / "include")

pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler")


def builds():
    """Returns every list of sets that a build may have."""
    return [list(names) for count in range(1, 1 + len(CPU_SETS)) for names in combinations(CPU_SETS, count)]


@pytest.fixture(scope="module")
def chosen():
    """Returns what a build of some sets takes, for every value of CVT_KERNELS_CPU and without one."""
    headers = [ROOT / f"csrc/common/{name}.h" for name in ("cpu", "checks", "instruction_sets")]
    source = Path(__file__).with_name("instruction_sets.cpp")
    command = [*compiler(), "-std=c++20", "-DTORCH_TARGET_VERSION=0x020b000000000000", *INCLUDES, str(source)]
    program = compiled(command, [source, *headers])
    asked = [(" ".join(sets), name) for sets in builds() for name in ("", *CPU_SETS)]
    lines = "".join(f" {sets} \n{name}\n" for sets, name in asked)
    answers = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout
    named = (list(CPU_SETS)[int(each)] if each.isdigit() else each for each in answers.splitlines())
    return dict(zip(asked, named, strict=True))


def test_the_best_set_that_the_cpu_and_the_build_have(chosen):
    for sets in builds():
        able = [name for name in cpu_sets_here() if name in sets]
        expected = "expected an instruction set of this CPU in the build of the extension"
        refusal = f"CVT_KERNELS_CPU_SETS: got ' {' '.join(sets)} ', {expected}"
        assert chosen[" ".join(sets), ""] == (able[-1] if able else refusal)


def test_a_set_that_is_asked_for_by_name(chosen):
    """One that the build or the CPU lacks is refused, and the message says which of them."""
    for sets in builds():
        for name in CPU_SETS:
            answer = chosen[" ".join(sets), name]
            if name not in cpu_sets_here():
                assert answer.startswith(f"CVT_KERNELS_CPU: got '{name}', expected plain, or avx2, ")
                assert answer.endswith("on a CPU that has it")
            elif name not in sets:
                expected = "expected an instruction set that the extension was built for, which are"
                assert answer.startswith(f"CVT_KERNELS_CPU: got '{name}', {expected} {' '.join(sets)} here; ")
                assert answer.endswith("CVT_KERNELS_CPU_SETS=all builds it for all")
            else:
                assert answer == name
