"""The kernels as compiled for a GPU, in the emulator: their results and every access."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.emulator.calls import CALLS, SMOKE
from tests.emulator.program import Program, Region
from tests.emulator.ptx import UnsupportedError

ROOT = Path(__file__).parents[2]
#: Reverses 64 numbers through shared memory, and stores the first 60.
COPY = """
.visible .entry copy(.param .u64 x, .param .u64 y)
.reqntid 64
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .reg .pred %p<2>;
    ld.param.b64 %rd1, [x];
    ld.param.b64 %rd2, [y];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.b32 %r2, [%rd4];
    shl.b32 %r3, %r1, 2;
    st.shared.b32 [%r3], %r2;
    bar.sync 0;
    xor.b32 %r4, %r3, 252;
    ld.shared.b32 %r5, [%r4];
    setp.lt.u32 %p1, %r1, 60;
    @%p1 st.global.b32 [%rd5], %r5;
    ret;
}
"""


def _reverse(ptx):
    """Runs COPY, which reverses 64 numbers and stores 60; returns what it stored and the faults."""
    x, y = np.arange(64, dtype=np.int32), np.zeros(60, np.int32)
    regions = [Region(each.ctypes.data, np.ones(each.nbytes, np.uint8)) for each in (x, y)]
    arguments = [struct.pack("q", each.ctypes.data) for each in (x, y)]
    return y, Program(ptx).run((1,), arguments, regions, 256).faults


def test_a_kernel_without_faults_runs():
    y, faults = _reverse(COPY)
    assert y.tolist() == list(range(63, 3, -1))
    assert faults == []


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("bar.sync 0;", "", "read without a barrier since another thread wrote"),
        ("@%p1 st", "st", "outside of all tensors or of shared memory"),
        ("st.shared.b32 [%r3], %r2;", "", "shared memory that nothing wrote is read"),
        ("bar.sync 0;", "setp.lt.u32 %p1, %r1, 8;\n@%p1 bar.sync 0;", "not all lanes of a warp take part"),
    ],
    ids=["race", "bounds", "uninitialized", "divergent"],
)
def test_a_fault_is_found(old, new, kind):
    assert kind in {fault.kind for fault in _reverse(COPY.replace(old, new))[1]}


def test_unknown_ptx_raises_with_its_line():
    with pytest.raises(UnsupportedError, match=r"line 19: unheard\.of %r5"):
        Program(COPY.replace("ld.shared.b32 %r5, [%r4]", "unheard.of %r5"))


def _emulate(*options):
    """Returns the process of ``python -m tests.emulator``, and what it said of each call."""
    command = [sys.executable, "-m", "tests.emulator", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    child = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    lines = [line for line in child.stdout.splitlines() if not line.startswith(" ")]
    return child, {name: rest for name, _, rest in (line.partition(": ") for line in lines)}


def _assert_good(options, names):
    child, told = _emulate(*options)
    assert set(told) == set(names), child.stderr[-2000:]
    assert child.returncode == 0, child.stdout


def test_smoke_part_of_the_calls_is_right():
    _assert_good(SMOKE, SMOKE)


@pytest.mark.slow
def test_all_calls_are_right():
    _assert_good([], CALLS)
