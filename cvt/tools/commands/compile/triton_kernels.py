"""Triton kernels, compiled for a GPU that need not be here, and what they take of it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import Language
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.cache import get_cache_manager

from cvt_kernels.launch.launching import TritonKernel

from .dependencies import overwritten
from .gpus import RESERVED_SHARED, max_block_shared, occupancy


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
        cls,
        arch: int,
        threads: int,
        usage: Mapping[str, int],
        dynamic_shared: int = 0,
        tensor_memory: int = 0,
    ) -> Resources:
        """Returns the resources of a function, by its line of cuobjdump and what the launch adds to it."""
        # From Hopper on the assembler counts what the system takes.
        static = max(usage["SHARED"] - (RESERVED_SHARED if arch >= 90 else 0), 0)
        filled = occupancy(arch, threads, usage["REG"], static + dynamic_shared, tensor_memory)
        stack = max(usage["STACK"], usage["LOCAL"])
        return cls(threads, usage["REG"], stack, static, dynamic_shared, tensor_memory, filled)

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


def examine(kernel: TritonKernel) -> Resources:
    """Compiles a kernel into Triton's cache, and returns what it takes of the GPU."""
    with _printed_log() as log:
        compiled = kernel.compile()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(compiled.asm["cubin"])
        found = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _run_tool("cuobjdump", "-res-usage", path))
        sass = _run_tool("nvdisasm", "-c", path) if "wgmma" in compiled.asm["ptx"] else ""
    facts, usage = compiled.metadata, {name: int(number) for name, number in found}
    tensor_memory = getattr(facts, "tmem_size", None) or 0
    resources = Resources.of(kernel.arch, 32 * facts.num_warps, usage, facts.shared, tensor_memory)
    if not sass:
        return resources
    told = messages_of(_assembler_log(kernel, compiled, log.getvalue()))
    return resources._replace(messages=told + overwritten(sass))


def _run_tool(name: str, *arguments: str | Path) -> str:
    """Runs a program that Triton ships, and returns what it prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _assembler_log(kernel: TritonKernel, compiled: CompiledKernel, printed: str) -> str:
    """Returns the assembler's log: the one just printed, or the one that Triton's cache keeps.

    A kernel that the cache had before has neither, and is assembled again, once.
    """
    key = "\0".join([compiled.asm["ptx"], str(kernel.arch), repr(kernel.options)])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    kept = cache.get_file("assembler.log")
    if kept is not None:
        return Path(kept).read_text(encoding="utf-8")
    if "ptxas info" not in printed:
        backend = make_backend(kernel.target())
        stages: dict[str, Any] = {}
        backend.add_stages(stages, backend.parse_options(kernel.options), Language.TRITON)
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
