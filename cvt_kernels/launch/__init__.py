"""Launch configurations: the tiles, warps and pipeline stages with which a kernel serves a call.

A configuration is one of the records of ``records``. It is found by the kernel, the numbers that it
multiplies, the sizes of its weights, its rows and the GPU: in the table that ships (``tables``), under the
GPU's name or generation, else by a formula (``formulas``), which needs the GPU's number of multiprocessors
and its shared memory only. :func:`register` says which kernel has which formula, in the file that asks for
the configuration. :func:`overridden` replaces it for a while.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .. import backends
from . import tables
from .formulas import Need, generation_of
from .launching import Chip
from .tables import numbers_of

__all__ = ["configuration", "generation_of", "kernels", "overridden", "register", "shipped"]


class Kernel(NamedTuple):
    """A kernel: the record of its configurations, and their formula."""

    record: type
    formula: Callable[[Need], Any]


_kernels: dict[str, Kernel] = {}
_overrides: dict[str, Any] = {}


def register(record: type, formula: Callable[[Need], Any], *names: str) -> None:
    """Registers kernels by name, with the record of their configurations and their formula."""
    _kernels.update(dict.fromkeys(names, Kernel(record, formula)))


def kernels() -> Mapping[str, Kernel]:
    """Returns all kernels; it imports the Triton kernels of every operator."""
    for known in backends.implementations.values():
        if "triton" in known:
            known["triton"].load()
    return _kernels


@contextlib.contextmanager
def overridden(kernel: str, config: Any) -> Iterator[None]:
    """Replaces the configuration of one kernel within a ``with`` statement, for all calls of the process."""
    global _overrides
    if kernel not in _kernels and kernel not in kernels():
        raise ValueError(f"kernel: got {kernel!r}, expected one of {', '.join(sorted(_kernels))}")
    expected = _kernels[kernel].record
    if not isinstance(config, expected):
        raise TypeError(
            f"config: got {type(config).__name__}, expected {expected.__name__}, as {kernel} takes it"
        )
    outer, _overrides = _overrides, _overrides | {kernel: config}
    backends.forget()  # launch plans
    try:
        yield
    finally:
        _overrides = outer
        backends.forget()


def configuration(kernel: str, dtype: torch.dtype, sizes: tuple[int, ...], rows: int, chip: Chip) -> Any:
    """Returns the configuration of a kernel for a call that multiplies numbers of ``dtype``; see ``Need``."""
    return _overrides.get(kernel) or _configuration(Need(kernel, numbers_of(dtype), sizes, rows, chip))


@functools.lru_cache(maxsize=4096)
def _configuration(need: Need) -> Any:
    return shipped(need) or _kernels[need.kernel].formula(need)


def shipped(need: Need) -> Any:
    """Returns the configuration of the nearest entry that ships for a need, or None."""
    for gpu in (need.chip.name, generation_of(need.chip.capability)):
        entries = [each for each in tables.TABLES.get(gpu, ()) if each[:3] == need[:3]]
        distances = {_ratio(need.rows, each.rows): each for each in entries}
        if distances and min(distances) <= tables.REACH:
            return distances[min(distances)].config
    return None


def _ratio(*rows: int) -> float:
    """Returns how many times as large the larger number of rows is."""
    return max(rows) / max(1, min(rows))
