"""Triton kernels, specialized for a launch and compiled for a GPU that need not be here."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.cache import get_cache_manager

from cvt_kernels import launching

from .dependencies import overwritten, unordered
from .resources import Resources, run_tool, usages_of


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
        resources = Resources.of(
            usage,
            self.arch,
            32 * facts.num_warps,
            dynamic_shared=facts.shared,
            tensor_memory=getattr(facts, "tmem_size", None) or 0,
        )
        ptx = compiled.asm["ptx"]
        messages = unordered(ptx) if facts.launch_pdl else ()
        if "wgmma" in ptx:
            messages += messages_of(self._log(compiled, log.getvalue())) + overwritten(sass)
        return resources._replace(messages=messages)

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
