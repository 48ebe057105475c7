"""The parts that the host code of all Triton kernels shares: replaced configurations, the dtype of sums."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

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
        """Replaces the configuration of one kernel within a ``with`` statement.

        Raises:
            ValueError: There is no such kernel.
        """
        if kernel not in self._kernels:
            raise ValueError(f"kernel: got {kernel!r}, expected one of {', '.join(self._kernels)}")
        outer, self._configs = self._configs, self._configs | {kernel: config}
        try:
            yield
        finally:
            self._configs = outer


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which sums over tensors like ``x`` are taken: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
