"""Helpers of all Triton kernels: overrides of launch configurations, dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any, Generic, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from .. import backends, machine

Config = TypeVar("Config")


class Overrides(Generic[Config]):
    """Overrides of an operator's shipped launch configurations, process-wide.

    Args:
        kernels: The names of the operator's kernels in its table of configurations.
    """

    def __init__(self, kernels: Collection[str]) -> None:
        self._kernels = kernels
        self._configs: dict[str, Config] = {}

    def get(self, kernel: str) -> Config | None:
        """Returns the override of a kernel's configuration, or None."""
        return self._configs.get(kernel)

    @contextlib.contextmanager
    def replaced(self, kernel: str, config: Config) -> Iterator[None]:
        """Replaces the configuration of one kernel within a ``with`` statement, on every chip, for tuning.

        Raises:
            ValueError: An unknown kernel.
        """
        if kernel not in self._kernels:
            raise ValueError(f"kernel: got {kernel!r}, expected one of {', '.join(self._kernels)}")
        outer, self._configs = self._configs, self._configs | {kernel: config}
        backends.forget()  # planned launches
        try:
            yield
        finally:
            self._configs = outer
            backends.forget()


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Returns the accumulator's dtype for tensors like ``x``: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


#: Triton's dtype of activations.
ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def product_types(dtype: torch.dtype, *, tf32: bool = False, exact: bool = False) -> dict[str, Any]:
    """Returns the constants of a matrix product of activations of a dtype.

    Args:
        dtype: The dtype.
        tf32: Whether PyTorch allows TF32 for float32.
        exact: Whether a product in TF32 is the sum of three, of what the factors are in TF32 and of the rest:
            as exact as float32.

    Returns:
        ``element``, Triton's dtype of the activations; ``operand``, of the factors: ``element``, but float32
        for bfloat16 in Triton's interpreter, whose product of bfloat16 is wrong; ``accumulator``, of sums;
        ``precision``, the ``input_precision`` of ``tl.dot``.
    """
    element = ELEMENTS[dtype]
    upcast = machine.INTERPRETING and dtype == torch.bfloat16
    return {
        "element": element,
        "operand": tl.float32 if upcast else element,
        "accumulator": tl.float64 if dtype == torch.float64 else tl.float32,
        "precision": ("tf32x3" if exact else "tf32") if tf32 else "ieee",
    }


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Returns ``tensor.contiguous()``; None for None."""
    return None if tensor is None else tensor.contiguous()
