"""The rates of NVIDIA's GPUs, which bound a kernel."""

from __future__ import annotations

from typing import NamedTuple


class Rates(NamedTuple):
    """The rates of a GPU that bound a kernel; all but the clock are of one multiprocessor.

    Attributes:
        clock: Clocks of a microsecond.
        dram_bytes: Bytes of global memory in a clock, read or written.
        tensor_flops: Operations of its tensor cores in a clock, in half precision.
        mufu: Results of its unit for special functions (MUFU) in a clock, each of one thread.
        issue: Instructions in a clock, each of one warp.
    """

    clock: float
    dram_bytes: float
    tensor_flops: float
    mufu: int = 16
    issue: int = 4


#: Rates per compute capability: of A100 (80 GB), H200 and B200, which have the multiprocessors of ``LIMITS``.
#: Those of memory and tensor cores are what a program reaches: an H200 copied 4.3 of the 4.8 TB/s and
#: multiplied at 790 of the 989 TFLOP/s of its data sheet; the others have the same shares of theirs (2.04
#: TB/s and 312 TFLOP/s, 8 TB/s and 2250 TFLOP/s). Clocks are those at which the tensor cores reach these
#: numbers, at 2048, 4096 and 8192 operations per clock. Issue and MUFU rates are those of the CUDA
#: Programming Guide ("Throughput of Native Arithmetic Instructions").
RATES = {
    80: Rates(clock=1410, dram_bytes=12.0, tensor_flops=1640),
    90: Rates(clock=1830, dram_bytes=17.8, tensor_flops=3270),
    100: Rates(clock=1850, dram_bytes=26.2, tensor_flops=6560),
}
