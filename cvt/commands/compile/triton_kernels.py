"""Triton kernels, specialized for a launch and compiled for a GPU that need not be here."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from cvt_kernels import machine

from .resources import Resources, Usage, usages_of

_TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
}


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
            attributes = self.launch_attributes(kernel.params)
            source = ASTSource(kernel, self.signature, self.constants, attributes)
            return triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=self.options)
        except Exception as error:  # Triton's own do not all survive the way back to the parent
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error

    def launch_attributes(self, parameters: Sequence[Any]) -> dict[tuple[int, ...], list[list[Any]]]:
        """Returns the attributes as a launch of Triton 3.7 writes them into its cache key.

        Constants, and numbers and addresses that 16 does not divide, have an empty list.
        """
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}

        def visit(kind: Any, path: tuple[int, ...], *, specialized: bool) -> None:
            if isinstance(kind, tuple):
                for i, part in enumerate(kind):
                    visit(part, (*path, i), specialized=True)
            elif kind == "constexpr":
                if len(path) == 1:
                    attributes[path] = []
            elif specialized and (kind.startswith("*") or kind in ("i32", "i64")):
                attributes[path] = self.attributes.get(path, [])

        for i, parameter in enumerate(parameters):
            visit(self.signature[parameter.name], (i,), specialized=not parameter.do_not_specialize)
        return attributes

    def examine(self) -> Resources:
        """Compiles the kernel and returns what it takes of the GPU.

        Raises:
            RuntimeError: It does not compile.
        """
        compiled = self.compile()
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "kernel.cubin")
            path.write_bytes(compiled.asm["cubin"])
            (usage,) = usages_of(path).values()
        return self.resources(compiled, usage)

    def resources(self, compiled: CompiledKernel, usage: Usage) -> Resources:
        """Returns the resources of the compiled kernel, whose function has this usage."""
        facts = compiled.metadata
        return Resources.of(
            usage,
            self.arch,
            32 * facts.num_warps,
            dynamic_shared=facts.shared,
            tensor_memory=getattr(facts, "tmem_size", None) or 0,
        )


def specialize(launch: machine.Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments.

    An integer of 1 becomes a constant, and the code may rely on it where 16 divides an integer or an address.
    Neither holds for a parameter that the kernel names in ``do_not_specialize``, and the latter does not for
    one in ``do_not_specialize_on_alignment``; elements of a tuple are specialized whatever these say.
    """
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], *, specialized: bool, aligned: bool) -> Any:
        if isinstance(value, tuple):
            parts = [
                describe(part, (*path, i), specialized=True, aligned=True) for i, part in enumerate(value)
            ]
            # A NamedTuple stays one, since its kernel reads the fields.
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if value is None or (type(value) is int and value == 1 and specialized):
            constants[path] = value
            return "constexpr"
        if isinstance(value, bool):
            return "u1"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{_TRITON_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        is_tensor = isinstance(value, Tensor)
        number = value.storage_offset() * value.element_size() if is_tensor else value
        if number % 16 == 0 and specialized and aligned:
            attributes[path] = [["tt.divisibility", 16]]
        if is_tensor:
            return f"*{_TRITON_TYPES[value.dtype]}"
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        else:
            signature[parameter.name] = describe(
                value,
                (i,),
                specialized=not parameter.do_not_specialize,
                aligned=not parameter.do_not_specialize_on_alignment,
            )
    kernel = launch.kernel
    return TritonKernel(
        arch, kernel.__module__, kernel.__name__, signature, constants, attributes, launch.options
    )
