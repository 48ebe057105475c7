"""Triton kernels, specialized for a launch and compiled for a GPU that need not be here."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cvt_kernels import machine

from . import machine_code
from .resources import Resources

_TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
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

    def examine(self) -> dict[str, Resources]:
        """Compiles the kernel and returns the resources of its one function, by name.

        Raises:
            RuntimeError: It does not compile.
        """
        kernel = getattr(importlib.import_module(self.module), self.name)
        try:
            compiled = triton.compile(
                ASTSource(kernel, self.signature, self.constants, self.attributes),
                target=GPUTarget("cuda", self.arch, 32),
                options=self.options,
            )
        except Exception as error:  # Triton's own do not all survive the way back to the parent
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error
        facts = compiled.metadata
        return {
            name: Resources.of(
                code,
                self.arch,
                32 * facts.num_warps,
                dynamic_shared=facts.shared,
                tensor_memory=getattr(facts, "tmem_size", None) or 0,
            )
            for name, code in machine_code.read(compiled.asm["cubin"]).items()
        }


def specialize(launch: machine.Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = [describe(part, (*path, i)) for i, part in enumerate(value)]
            # A NamedTuple stays one, since its kernel reads the fields.
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, Tensor):
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return f"*{_TRITON_TYPES[value.dtype]}"
        if isinstance(value, float):
            return "fp32"
        if value == 1:
            constants[path] = 1
            return "constexpr"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if value < 2**31 else "i64"

    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        else:
            signature[parameter.name] = describe(value, (i,))
    kernel = launch.kernel
    return TritonKernel(
        arch, kernel.__module__, kernel.__name__, signature, constants, attributes, launch.options
    )
