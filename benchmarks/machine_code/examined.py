"""A compiled kernel: its machine code, its resources, and what the assembler says of it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from triton import knobs
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import CompiledKernel, make_backend

from cvt.commands.compile.resources import Resources
from cvt.commands.compile.triton_kernels import TritonKernel

from . import disassembly
from .disassembly import MachineCode

#: Instructions of the tensor cores: up to Ada and on consumer Blackwell, on Hopper, on Blackwell.
_MMA = (
    "HMMA", "DMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA",
    "UTCOMMA",
)  # fmt: skip


class KeyInstructions(NamedTuple):
    """The instructions of a kernel that the report names.

    Attributes:
        spill_loads, spill_stores: Instruction → how often it stands in the code, of local memory.
        loads, stores: Instruction → how often it stands in the code, of global memory.
        tensor_cores: Instruction → how often it stands in the code.
        waits: Waits for asynchronous products (HGMMA) that stand in the code.
    """

    spill_loads: dict[str, int]
    spill_stores: dict[str, int]
    loads: dict[str, int]
    stores: dict[str, int]
    tensor_cores: dict[str, int]
    waits: int

    @classmethod
    def of(cls, code: MachineCode) -> KeyInstructions:
        """Returns the key instructions of machine code."""

        def select(*prefixes: str) -> dict[str, int]:
            return {name: count for name, count in code.counts.items() if name.startswith(prefixes)}

        return cls(
            spill_loads=select("LDL"),
            spill_stores=select("STL"),
            loads=select("LDG"),
            stores=select("STG"),
            tensor_cores=select(*_MMA),
            waits=sum(select("WARPGROUP.DEPBAR").values()),
        )

    def flaws(self) -> list[str]:
        """Returns the flaws of the code: register spills."""
        loads, stores = (sum(spills.values()) for spills in (self.spill_loads, self.spill_stores))
        return [f"spills: {loads} loads, {stores} stores"] if loads or stores else []


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

    @property
    def instructions(self) -> KeyInstructions:
        """The instructions that the report names."""
        return KeyInstructions.of(self.code)


def examine(kernel: TritonKernel) -> dict[str, Compiled]:
    """Compiles a Triton kernel and returns its one function, by name.

    Raises:
        RuntimeError: It does not compile.
    """
    with _printed_log() as log:
        compiled = kernel.compile()
    target = GPUTarget("cuda", kernel.arch, 32)
    messages = parse_messages(_assembler_log(compiled, log.getvalue(), target, kernel.options))
    return {
        name: Compiled(code, kernel.resources(compiled, code.usage), messages)
        for name, code in disassembly.read(compiled.asm["cubin"]).items()
    }


@contextlib.contextmanager
def _printed_log() -> Iterator[io.StringIO]:
    """Gathers what Triton prints; that includes the assembler's log of each kernel that it assembles."""
    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        yield printed


def _assembler_log(compiled: CompiledKernel, printed: str, target: GPUTarget, options: dict[str, int]) -> str:
    """Returns the assembler's log of a kernel: the one just printed, or the one that was kept.

    A kernel that Triton's cache had before has neither, and is assembled again, once.
    """

    def make() -> bytes:
        if "ptxas info" in printed:
            return printed.encode()
        backend = make_backend(target)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, backend.parse_options(options), Language.TRITON)
        with _printed_log() as log:
            stages["cubin"](compiled.asm["ptx"], {})
        return log.getvalue().encode()

    key = [compiled.asm["ptx"].encode(), repr((target, options)).encode()]
    return disassembly.cached("assembler.log", key, make).decode()


def parse_messages(log: str) -> list[str]:
    """Returns the messages C75xx of the assembler's log, which are about asynchronous products (wgmma).

    Each is the code and the text of the message, without the function that it is about.
    """
    found = re.findall(r"\((C75\d\d)\) (.*?)(?: in (?:the )?function '.*?')?\s*$", log, flags=re.MULTILINE)
    return list(dict.fromkeys(f"{code}: {text}" for code, text in found))
