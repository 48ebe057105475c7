"""Launch configurations: the tiles, warps and pipeline stages with which a kernel serves a call.

A configuration is one of the records of ``records``. It is found by the kernel, the numbers that it
multiplies, the sizes of its weights, its rows and the GPU: in the table that ships (``tables``), under the
GPU's name or generation, else by a formula (``formulas``), which needs the GPU's number of multiprocessors
and its shared memory only. :func:`overridden` replaces it for a while.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from .. import backends
from ..launching import Chip
from . import tables
from .formulas import KERNELS, Need, generation_of
from .tables import Entry, numbers_of

__all__ = ["configuration", "generation_of", "overridden", "shipped"]

_overrides: dict[str, Any] = {}


@contextlib.contextmanager
def overridden(kernel: str, config: Any) -> Iterator[None]:
    """Replaces the configuration of one kernel within a ``with`` statement, for all calls of the process.

    Raises:
        ValueError: An unknown kernel.
        TypeError: A configuration of other kernels.
    """
    global _overrides
    if kernel not in KERNELS:
        raise ValueError(f"kernel: got {kernel!r}, expected one of {', '.join(KERNELS)}")
    if not isinstance(config, KERNELS[kernel].records):
        expected = " or ".join(record.__name__ for record in KERNELS[kernel].records)
        raise TypeError(f"config: got {type(config).__name__}, expected {expected}, as {kernel} takes it")
    outer, _overrides = _overrides, _overrides | {kernel: config}
    backends.forget()  # planned launches
    try:
        yield
    finally:
        _overrides = outer
        backends.forget()


def configuration(kernel: str, dtype: torch.dtype, sizes: tuple[int, ...], rows: int, chip: Chip) -> Any:
    """Returns the configuration of a kernel for a call.

    Args:
        kernel: Its name in ``KERNELS``.
        dtype: The dtype of the numbers that it multiplies.
        sizes: As in the entries of ``tables``: K and N of a product, or channels.
        rows: The rows of the call.
        chip: The GPU.
    """
    return _overrides.get(kernel) or _configuration(Need(kernel, numbers_of(dtype), sizes, rows, chip))


@functools.lru_cache(maxsize=4096)
def _configuration(need: Need) -> Any:
    return shipped(need) or KERNELS[need.kernel].ranked(need)[0]


def shipped(need: Need) -> Any:
    """Returns the configuration of the nearest entry that ships for a need, or None."""
    for gpu in (need.chip.name, generation_of(need.chip.capability)):
        distances = {
            _ratio(need.rows, each): each for each in tables.TABLES.get(gpu, ()) if each[:3] == need[:3]
        }
        if distances and min(distances) <= tables.REACH:
            return distances[min(distances)].config
    return None


def _ratio(rows: int, entry: Entry) -> float:
    """Returns how many times as large the larger number of rows is."""
    return max(rows, entry.rows) / max(1, min(rows, entry.rows))
