"""The kernels as compiled for a GPU, in the emulator: their results and every access."""

import re
import struct

import numpy as np
import pytest
import torch

from tests.emulator.calls import CALLS, SMOKE, SMOKE_90
from tests.emulator.program import Program, Region, tensor_map
from tests.emulator.ptx import UnsupportedError
from tests.processes import run_python

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


def _pointer(address):
    return struct.pack("q", address)


def _copy(ptx, overlaps=False):
    """Runs COPY; returns the numbers and the result."""
    x, y = torch.arange(64, dtype=torch.int32), torch.zeros(60, dtype=torch.int32)
    addresses = [each.data_ptr() for each in (x, y)]
    regions = [
        Region(address, np.ones(4 * size, np.uint8))
        for address, size in zip(addresses, (64, 60), strict=True)
    ]
    result = Program(ptx).run((1,), list(map(_pointer, addresses)), regions, 256, overlaps=overlaps)
    return y.tolist(), result


def _kinds(result):
    return {fault.kind for fault in result.faults}


def test_a_kernel_without_faults_runs():
    numbers, result = _copy(COPY)
    assert numbers == list(range(63, 3, -1))
    assert result.faults == []


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
    assert kind in _kinds(_copy(COPY.replace(old, new))[1])


_WAIT = "griddepcontrol.wait;"
_EARLY, _UNORDERED = (
    "global memory is touched before griddepcontrol.wait",
    "a program ends without griddepcontrol.wait",
)


@pytest.mark.parametrize(
    ("before", "kinds"),
    [
        ("ld.global.b32 %r2", set()),
        ("st.shared.b32", {_EARLY}),  # the load comes first
        ("bar.sync", {_EARLY}),
        (None, {_EARLY, _UNORDERED}),
    ],
)
def test_a_launch_that_overlaps_waits(before, kinds):
    ptx = COPY.replace(before, f"{_WAIT} griddepcontrol.launch_dependents; {before}") if before else COPY
    numbers, result = _copy(ptx, overlaps=True)
    assert numbers == list(range(63, 3, -1))
    assert _kinds(result) == kinds
    assert _kinds(_copy(ptx)[1]) == set()


@pytest.mark.parametrize(("barrier", "kinds"), [("bar.sync 0;", set()), ("", {_EARLY})])
def test_one_warp_waits_for_all(barrier, kinds):
    """A barrier lets the second warp go on where the first one alone waits."""
    wait = f"setp.gt.u32 %p1, %r1, 31; @%p1 bra on; {_WAIT} on: {barrier} "
    found = _kinds(_copy(COPY.replace("ld.global.b32 %r2", f"{wait} ld.global.b32 %r2"), overlaps=True)[1])
    assert found == kinds


#: The first warp asks for 16 rows of 32 numbers, and all wait; each thread stores the first of a row.
BOX = """
.visible .entry box(.param .align 64 .b8 map[128], .param .u64 y)
.reqntid 64
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .reg .pred %p<9>;
    mov.b64 %rd1, map;
    cvta.param.u64 %rd2, %rd1;
    ld.param.b64 %rd3, [y];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, 0;
    mov.b32 %r3, 2048;
    setp.eq.s32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 2048;
    elect.sync %r4|%p2, -1;
    setp.lt.u32 %p3, %r1, 32;
    and.pred %p4, %p2, %p3;
    @%p4 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r2], [%rd2, {%r2, %r2}], [%r3];
again:
    mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r3], %r2;
    @!%p5 bra again;
    shl.b32 %r5, %r1, 7;
    setp.lt.u32 %p6, %r1, 16;
    @%p6 ld.shared.b32 %r6, [%r5];
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd3, %rd4;
    @%p6 st.global.b32 [%rd5], %r6;
    ret;
}
"""


def _first_of_rows(ptx):
    """Runs BOX on 12 rows of 64 numbers, fewer than the box has; returns what it stored and the result."""
    x, y = torch.arange(1, 1 + 12 * 64, dtype=torch.int32).view(12, 64), torch.full((16,), -1).int()
    regions = [Region(each.data_ptr(), np.ones(each.nbytes, np.uint8)) for each in (x, y)]
    arguments = [tensor_map(x, [16, 32], swizzle=0), _pointer(y.data_ptr())]
    result = Program(ptx).run((1,), arguments, regions, 2056)
    return y.tolist(), result


def test_a_bulk_copy_fills_its_box():
    numbers, result = _first_of_rows(BOX)
    assert result.faults == []
    assert numbers == [*range(1, 1 + 12 * 64, 64), 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("@!%p5 bra again;", "", None),  # it waits at once, as long as it must
        (
            "mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r3], %r2;",
            "setp.eq.s32 %p5, %r2, 0;",
            "still writes",
        ),
        ("setp.lt.u32 %p3, %r1, 32;", "setp.lt.u32 %p3, %r1, 0;", "does not end"),
        ("_, [%r3], 2048;", "_, [%r3], 4096;", "does not end"),
        ("mov.b32 %r2, 0;", "mov.b32 %r2, 64;", "not aligned"),
    ],
    ids=["wait", "no wait", "no copy", "too many bytes", "unaligned"],
)
def test_a_fault_of_a_bulk_copy_is_found(old, new, kind):
    kinds = " ".join(_kinds(_first_of_rows(BOX.replace(old, new))[1]))
    assert kind in kinds if kind else not kinds


def test_unknown_ptx_raises_with_its_line():
    with pytest.raises(UnsupportedError, match=r"line 19: unheard\.of %r5"):
        Program(COPY.replace("ld.shared.b32 %r5, [%r4]", "unheard.of %r5"))


def _emulate(*options):
    """Returns the process of ``python -m tests.emulator``."""
    code = f"from tests.emulator import __main__ as it; it.sys.argv[1:] = {options!r}; it.sys.exit(it.main())"
    return run_python(code, TRITON_INTERPRET="0")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (SMOKE, SMOKE),
        pytest.param(["--arch", "90", *SMOKE_90], SMOKE_90, marks=pytest.mark.slow),
        pytest.param([], CALLS, marks=pytest.mark.slow),
        pytest.param(["--arch", "90"], CALLS, marks=pytest.mark.slow),
    ],
    ids=["smoke", "smoke of sm_90", "all", "all of sm_90"],
)
def test_calls_are_right(options, names):
    child = _emulate(*options)
    told = re.findall(r"^(\S.*?): (?:ok|FAILED|unsupported): ", child.stdout, re.MULTILINE)
    assert set(told) == set(names), child.stderr[-2000:]
    assert child.returncode == 0, child.stdout
