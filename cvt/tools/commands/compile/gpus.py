"""The limits of NVIDIA's GPUs, and how many warps of a kernel a multiprocessor holds."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """The shared memory (KiB), blocks and warps of a multiprocessor, and the multiprocessors of the GPU."""

    shared_kib: int
    blocks: int
    warps: int
    multiprocessors: int


#: Limits per compute capability, as in CUDA 13.0 (``cuda_occupancy.h``; CCCL's
#: ``cuda/__device/arch_traits.h``). The numbers of multiprocessors are for A100, RTX 3090, RTX 4090, H100,
#: B200 and RTX 5090.
LIMITS = {
    80: Limits(164, 32, 64, 108),
    86: Limits(100, 16, 48, 82),
    89: Limits(100, 24, 48, 128),
    90: Limits(228, 32, 64, 132),
    100: Limits(228, 32, 64, 148),
    120: Limits(100, 24, 48, 170),
}

#: Bytes of shared memory that the system takes of every block.
RESERVED_SHARED = 1024

_SHARED_UNIT = 128  # bytes
_REGISTERS, _REGISTERS_OF_UNIT, _PARTITIONS = 65536, 256, 4  # of a multiprocessor; given to warps in units
_TENSOR_MEMORY = 512  # columns of a multiprocessor's tensor memory, sm_100


def max_block_shared(arch: int) -> int:
    """Returns how many bytes of shared memory a block can have on a GPU, 90 for sm_90."""
    return LIMITS[arch].shared_kib * 1024 - RESERVED_SHARED


def occupancy(arch: int, threads: int, registers: int, shared: int, tensor_memory: int = 0) -> float:
    """Returns the part of a multiprocessor's warps that a kernel can fill; 0 if not even one block fits."""
    limits = LIMITS[arch]
    if shared > max_block_shared(arch):
        return 0.0
    warps = -(-threads // 32)
    warp_registers = _round_up(registers * 32, _REGISTERS_OF_UNIT)
    fitting_warps = _REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS
    blocks = min(
        limits.blocks,
        limits.warps // warps,
        fitting_warps // warps,
        limits.shared_kib * 1024 // _round_up(shared + RESERVED_SHARED, _SHARED_UNIT),
    )
    if tensor_memory:
        blocks = min(blocks, _TENSOR_MEMORY // tensor_memory)
    return blocks * warps / limits.warps


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
