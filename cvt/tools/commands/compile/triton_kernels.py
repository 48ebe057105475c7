"""Triton kernels, specialized for a launch and compiled for a GPU that need not be here."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.cache import get_cache_manager

from cvt_kernels.launch import launching

from .dependencies import overwritten
from .gpus import RESERVED_SHARED, max_block_shared, occupancy


class Usage(NamedTuple):
    """The registers and bytes of a thread and, ``shared``, of a block, as the assembler notes them."""

    registers: int
    stack: int
    shared: int
    local: int


def usages_of(cubin: Path) -> dict[str, Usage]:
    """Returns the usage of each function of a cubin, by name."""
    text = run_tool("cuobjdump", "-res-usage", cubin)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    return {name: Usage(*map(int, numbers)) for name, *numbers in found}


def run_tool(name: str, *arguments: object) -> str:
    """Runs a program that Triton ships, and returns what it prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = list(map(str, (path, *arguments)))
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Resources(NamedTuple):
    """The resources that one kernel takes.

    Threads and bytes of shared memory are a block's; registers a thread's, as are the bytes of ``stack``, in
    local memory, for those that spill. ``tensor_memory`` has the columns of a block on sm_100; ``occupancy``
    is the part of a multiprocessor's warps that the kernel can fill. ``messages`` are the assembler's C75xx,
    by which it waits for each asynchronous product (wgmma), and what writes a register of a product before
    the wait for it.
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
        static = max(usage.shared - (RESERVED_SHARED if arch >= 90 else 0), 0)
        filled = occupancy(arch, threads, usage.registers, static + dynamic_shared, tensor_memory)
        taken = threads, usage.registers, max(usage.stack, usage.local)
        return cls(*taken, static, dynamic_shared, tensor_memory, filled)

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


class TritonKernel(launching.TritonKernel):
    """A specialized Triton kernel that can be examined."""

    @property
    def label(self) -> str:
        """The kernel's name in reports."""
        return self.name.strip("_").removesuffix("_kernel")

    def examine(self) -> Resources:
        """Compiles the kernel, as :meth:`compile` does, and returns what it takes of the GPU."""
        with _printed_log() as log:
            compiled = self.compile()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "kernel.cubin")
            path.write_bytes(compiled.asm["cubin"])
            (usage,) = usages_of(path).values()
            sass = run_tool("nvdisasm", "-c", path) if "wgmma" in compiled.asm["ptx"] else ""
        facts = compiled.metadata
        memory = {"dynamic_shared": facts.shared, "tensor_memory": getattr(facts, "tmem_size", None) or 0}
        resources = Resources.of(usage, self.arch, 32 * facts.num_warps, **memory)
        if not sass:
            return resources
        told = messages_of(self._log(compiled, log.getvalue()))
        return resources._replace(messages=told + overwritten(sass))

    def _log(self, compiled: CompiledKernel, printed: str) -> str:
        """Returns the assembler's log: the one just printed, or the one that Triton's cache keeps.

        A kernel that the cache had before has neither, and is assembled again, once.
        """
        key = "\0".join([compiled.asm["ptx"], str(self.arch), repr(self.options)])
        cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        kept = cache.get_file("assembler.log")
        if kept is not None:
            return Path(kept).read_text(encoding="utf-8")
        if "ptxas info" not in printed:
            backend = make_backend(GPUTarget("cuda", self.arch, 32))
            stages: dict[str, Any] = {}
            backend.add_stages(stages, backend.parse_options(self.options), Language.TRITON)
            with _printed_log() as log:
                stages["cubin"](compiled.asm["ptx"], {})
            printed = log.getvalue()
        cache.put(printed, "assembler.log", binary=False)
        return printed


@contextlib.contextmanager
def _printed_log() -> Iterator[io.StringIO]:
    """Gathers what Triton prints; that includes the assembler's log of each kernel that it assembles."""
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def messages_of(log: str) -> tuple[str, ...]:
    """Returns the messages C75xx of the assembler's log, without the functions that they are about."""
    found = re.findall(r"\((C75\d\d)\) (.*?)(?: in (?:the )?function '.*?')?\s*$", log, flags=re.MULTILINE)
    return tuple(dict.fromkeys(f"{code}: {text}" for code, text in found))


def specialize(launch: launching.Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments."""
    return TritonKernel(*launching.specialize(launch, arch))
