"""The compiled kernel, and the resources of a GPU that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .gpus import RESERVED_SHARED, max_block_shared, occupancy
from .machine_code import MachineCode

#: Instructions of the tensor cores: up to Ada and on consumer Blackwell, on Hopper, on Blackwell.
_MMA = (
    "HMMA", "DMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA",
    "UTCOMMA",
)  # fmt: skip


class Resources(NamedTuple):
    """The resources that one kernel takes.

    Attributes:
        threads: Threads of a block.
        registers: Registers of a thread.
        stack: Bytes of local memory of a thread.
        spill_loads, spill_stores: Instruction → how often it stands in the code, of local memory.
        static_shared, dynamic_shared: Bytes of shared memory of a block.
        tensor_memory: Columns of tensor memory of a block, on sm_100.
        occupancy: The part of a multiprocessor's warps that the kernel can fill: what registers, shared and
            tensor memory and the number of blocks allow.
        loads, stores: Instruction → how often it stands in the code, of global memory.
        tensor_cores: Instruction → how often it stands in the code.
        waits: Waits for asynchronous products (HGMMA) that stand in the code.
    """

    threads: int
    registers: int
    stack: int
    spill_loads: dict[str, int]
    spill_stores: dict[str, int]
    static_shared: int
    dynamic_shared: int
    tensor_memory: int
    occupancy: float
    loads: dict[str, int]
    stores: dict[str, int]
    tensor_cores: dict[str, int]
    waits: int

    @classmethod
    def of(
        cls, code: MachineCode, arch: int, threads: int, *, dynamic_shared: int = 0, tensor_memory: int = 0
    ) -> Resources:
        """Returns the resources of machine code, with what the launch adds to it.

        Args:
            code: The machine code.
            arch: Compute capability, 90 for sm_90.
            threads: Threads of a block.
            dynamic_shared: Bytes of dynamic shared memory of a block.
            tensor_memory: Columns of tensor memory of a block.
        """
        # From Hopper on the assembler counts what the system takes.
        static_shared = max(code.shared - (RESERVED_SHARED if arch >= 90 else 0), 0)

        def select(*prefixes: str) -> dict[str, int]:
            return {name: count for name, count in code.counts.items() if name.startswith(prefixes)}

        return cls(
            threads=threads,
            registers=code.registers,
            stack=max(code.stack, code.local),
            spill_loads=select("LDL"),
            spill_stores=select("STL"),
            static_shared=static_shared,
            dynamic_shared=dynamic_shared,
            tensor_memory=tensor_memory,
            occupancy=occupancy(arch, threads, code.registers, static_shared + dynamic_shared, tensor_memory),
            loads=select("LDG"),
            stores=select("STG"),
            tensor_cores=select(*_MMA),
            waits=sum(select("WARPGROUP.DEPBAR").values()),
        )

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block, static and dynamic."""
        return self.static_shared + self.dynamic_shared

    def flaws(self, arch: int) -> list[str]:
        """Returns what must not be: registers in memory, or more of something than a block may have."""
        flaws = []
        loads, stores = (sum(spills.values()) for spills in (self.spill_loads, self.spill_stores))
        if self.stack or loads or stores:
            flaws.append(f"spills: {self.stack} bytes, {loads} loads, {stores} stores")
        if self.shared > max_block_shared(arch):
            flaws.append(f"shared memory: {self.shared} bytes, a block may have {max_block_shared(arch)}")
        elif self.occupancy == 0:
            flaws.append(f"a block of {self.threads} threads × {self.registers} registers does not fit")
        return flaws


class Compiled(NamedTuple):
    """A compiled kernel.

    Attributes:
        code: Its machine code.
        resources: What it takes of a GPU.
        messages: What the assembler says about its performance, such as ``C7515: …``.
    """

    code: MachineCode
    resources: Resources
    messages: Sequence[str] = ()
