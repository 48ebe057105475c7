"""The parts that all Triton kernels share: replaced configurations, budgets, dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from .. import backends, machine

Config = TypeVar("Config")


class Overrides(Generic[Config]):
    """The launch configurations that stand in for the shipped ones of an operator, one set for the process.

    Args:
        kernels: The names that the operator's kernels have in its table of configurations.
    """

    def __init__(self, kernels: Collection[str]) -> None:
        self._kernels = kernels
        self._configs: dict[str, Config] = {}

    def get(self, kernel: str) -> Config | None:
        """Returns the configuration that replaces the shipped one of a kernel; None if none does."""
        return self._configs.get(kernel)

    @contextlib.contextmanager
    def replaced(self, kernel: str, config: Config) -> Iterator[None]:
        """Replaces the configuration of one kernel within a ``with`` statement, on every chip, for tuning.

        Raises:
            ValueError: There is no such kernel.
        """
        if kernel not in self._kernels:
            raise ValueError(f"kernel: got {kernel!r}, expected one of {', '.join(self._kernels)}")
        outer, self._configs = self._configs, self._configs | {kernel: config}
        backends.forget()  # the launches that are planned
        try:
            yield
        finally:
            self._configs = outer
            backends.forget()


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that the machine code of a kernel may take, by ``benchmarks.machine_code``; None for no limit.

    Attributes:
        instructions_per_output: Instructions that a thread executes for one element of the output.
        instructions_per_tile: Instructions that each of 4 warps executes for 64 × 64 attention scores, within
            the kernel's loops.
        registers: Registers of a thread.
    """

    instructions_per_output: float | None = None
    instructions_per_tile: float | None = None
    registers: int | None = None

    @property
    def limits_instructions(self) -> bool:
        """Returns whether there is a limit on instructions."""
        return self.instructions_per_output is not None or self.instructions_per_tile is not None


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which sums over tensors like ``x`` are taken: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


#: Triton's dtype of activations.
ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def product_types(dtype: torch.dtype, *, tf32: bool) -> dict[str, Any]:
    """Returns the constants of a matrix product of activations of a dtype.

    Args:
        dtype: The dtype.
        tf32: Whether it is float32 that PyTorch lets be rounded to TF32.

    Returns:
        ``element``, Triton's dtype of the activations; ``operand``, that of the factors: ``element``, but
        float32 for bfloat16 in Triton's interpreter, whose product of bfloat16 is wrong; ``accumulator``,
        that of sums; ``precision``, the ``input_precision`` of ``tl.dot``.
    """
    element = ELEMENTS[dtype]
    upcast = machine.INTERPRETING and dtype == torch.bfloat16
    return {
        "element": element,
        "operand": tl.float32 if upcast else element,
        "accumulator": tl.float64 if dtype == torch.float64 else tl.float32,
        "precision": "tf32" if tf32 else "ieee",
    }


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Returns a contiguous tensor of the same numbers; None for None."""
    return None if tensor is None else tensor.contiguous()
