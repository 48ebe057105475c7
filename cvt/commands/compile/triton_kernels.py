"""Triton kernels, specialized for a launch and compiled for a GPU that need not be here."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature

from cvt_kernels import launching

from .resources import Resources, usages_of


class TritonKernel(NamedTuple):
    """A Triton kernel specialized for some arguments; plain data, which can go to another process.

    Attributes:
        arch: Compute capability, 90 for sm_90.
        module: The module of the kernel.
        name: The name of the kernel in its module.
        signature, constants, attributes: Triton's description of the arguments, the last two by the path to
            an argument: its index, then indices within tuples.
        options: Triton's options, such as ``num_warps``.
    """

    arch: int
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    @property
    def label(self) -> str:
        """The kernel's name in reports."""
        return self.name.strip("_").removesuffix("_kernel")

    def compile(self) -> CompiledKernel:
        """Compiles the kernel into Triton's cache, under the key that a launch looks for, or finds it there.

        Raises:
            RuntimeError: It does not compile.
        """
        kernel = getattr(importlib.import_module(self.module), self.name)
        try:
            source = source_of(kernel, self.signature, self.constants, self.attributes)
            return triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=self.options)
        except Exception as error:  # Triton's own do not all survive the way back to the parent
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error

    def examine(self) -> Resources:
        """Compiles the kernel, as :meth:`compile` does, and returns what it takes of the GPU."""
        with _printed_log() as log:
            compiled = self.compile()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "kernel.cubin")
            path.write_bytes(compiled.asm["cubin"])
            (usage,) = usages_of(path).values()
        facts = compiled.metadata
        resources = Resources.of(
            usage,
            self.arch,
            32 * facts.num_warps,
            dynamic_shared=facts.shared,
            tensor_memory=getattr(facts, "tmem_size", None) or 0,
        )
        if "wgmma" not in compiled.asm["ptx"]:
            return resources
        return resources._replace(messages=messages_of(self._log(compiled, log.getvalue())))

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


def source_of(kernel: Any, *facts: dict[Any, Any]) -> ASTSource:
    """Returns the source of a kernel in Triton or Gluon, by its signature, constants and attributes."""
    if not kernel.is_gluon():
        return ASTSource(kernel, *facts)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(kernel, *facts)


def specialize(launch: launching.Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments."""
    kernel, backend = launch.kernel, make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(
        backend, launch.options, bound, specialization, {}
    )
    names = kernel.__module__, kernel.__name__
    return TritonKernel(arch, *names, signature, constants, attributes, launch.options)
