"""The resources of a GPU that a compiled kernel takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import triton

from .gpus import RESERVED_SHARED, max_block_shared, occupancy


class Usage(NamedTuple):
    """The registers and bytes of one function, as the assembler notes them.

    ``shared`` is the static shared memory of a block, the others are of a thread.
    """

    registers: int
    stack: int
    shared: int
    local: int


def usages_of(cubin: Path) -> dict[str, Usage]:
    """Returns the usage of each function of a cubin, by name."""
    text = run_tool("cuobjdump", "-res-usage", cubin)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    return {name: Usage(*map(int, numbers)) for name, *numbers in found}


def run_tool(name: str, *arguments: object, directory: str | None = None) -> str:
    """Runs a program that Triton ships, in ``directory`` if given, and returns what it prints.

    Raises:
        CalledProcessError: It fails.
    """
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = list(map(str, (path, *arguments)))
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory).stdout


class Resources(NamedTuple):
    """The resources that one kernel takes.

    Attributes:
        threads: Threads of a block.
        registers: Registers of a thread.
        stack: Bytes of local memory of a thread, which hold the registers that spill.
        static_shared, dynamic_shared: Bytes of shared memory of a block.
        tensor_memory: Columns of tensor memory of a block, on sm_100.
        occupancy: The part of a multiprocessor's warps that the kernel can fill: what registers, shared and
            tensor memory and the number of blocks allow.
        messages: The assembler's messages C75xx, by which it waits for each asynchronous product (wgmma);
            what a kernel does before it waits for the kernel before; what writes a register of a product
            before the wait for it.
    """

    threads: int
    registers: int
    stack: int
    static_shared: int
    dynamic_shared: int
    tensor_memory: int
    occupancy: float
    messages: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, usage: Usage, arch: int, threads: int, *, dynamic_shared: int = 0, tensor_memory: int = 0
    ) -> Resources:
        """Returns the resources of a function, with what the launch adds to it; ``arch`` is 90 for sm_90."""
        # From Hopper on the assembler counts what the system takes.
        static_shared = max(usage.shared - (RESERVED_SHARED if arch >= 90 else 0), 0)
        shared = static_shared + dynamic_shared
        return cls(
            threads=threads,
            registers=usage.registers,
            stack=max(usage.stack, usage.local),
            static_shared=static_shared,
            dynamic_shared=dynamic_shared,
            tensor_memory=tensor_memory,
            occupancy=occupancy(arch, threads, usage.registers, shared, tensor_memory),
        )

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block, static and dynamic."""
        return self.static_shared + self.dynamic_shared

    def flaws(self, arch: int) -> list[str]:
        """Returns the flaws: spilled registers, serialized products, or more than a block may have."""
        flaws = list(self.messages)
        if self.stack:
            flaws.append(f"spills: {self.stack} bytes")
        if self.shared > max_block_shared(arch):
            flaws.append(f"shared memory: {self.shared} bytes, a block may have {max_block_shared(arch)}")
        elif self.occupancy == 0:
            flaws.append(f"a block of {self.threads} threads × {self.registers} registers does not fit")
        return flaws
