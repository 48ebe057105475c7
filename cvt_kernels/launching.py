"""Launches of Triton kernels: how they are started, recorded, planned and intercepted."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Chip(NamedTuple):
    """The compute capability of a GPU, 90 for sm_90, and its number of streaming multiprocessors."""

    capability: int
    multiprocessors: int


class Launch(NamedTuple):
    """One launch of a Triton kernel: with parameters by name, constants included, and Triton's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    def start(self) -> None:
        """Starts it on the current GPU and stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


class _Interception(NamedTuple):
    chip: Chip | None
    take: Callable[[Launch], Any]


#: Who gets launches instead of the GPU; None for nobody.
interception: _Interception | None = None


@contextlib.contextmanager
def recorded_launches(chip: Chip) -> Iterator[list[Launch]]:
    """Lists a block's launches of Triton kernels, planned for ``chip``, instead of starting them."""
    launches: list[Launch] = []
    with intercepted_launches(launches.append, chip):
        yield launches


@contextlib.contextmanager
def intercepted_launches(take: Callable[[Launch], Any], chip: Chip | None = None) -> Iterator[None]:
    """Gives a block's launches of Triton kernels to ``take``, which may start them.

    They are planned for ``chip``, or else for the GPU that there is.
    """
    global interception
    previous, interception = interception, _Interception(chip, take)
    try:
        yield
    finally:
        interception = previous


class _Planning(threading.local):
    """A note in each thread of who takes its launches."""

    take: Callable[[Launch], Any] | None = None


_planning = _Planning()


@contextlib.contextmanager
def planned_launches(take: Callable[[Launch], Any]) -> Iterator[None]:
    """Gives a block's launches of Triton kernels by this thread to ``take`` instead of starting them."""
    previous, _planning.take = _planning.take, take
    try:
        yield
    finally:
        _planning.take = previous


def chip(device: torch.device) -> Chip:
    """Returns the GPU of a device; for Triton's interpreter on the CPU, an sm_90 of one multiprocessor."""
    if interception is not None and interception.chip is not None:
        return interception.chip
    return _cuda_chip(device.index) if device.type == "cuda" else Chip(90, 1)


@functools.cache
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, options: dict[str, int], **arguments: Any) -> None:
    """Starts a Triton kernel on the current stream of the device of ``on``, with arguments by name."""
    take = _planning.take if interception is None else interception.take
    if take is not None:
        take(Launch(kernel, grid, arguments, options))
        return
    with current_device_of(on):
        kernel[grid](**arguments, **options)


_NOTHING = contextlib.nullcontext()


def current_device_of(on: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of a tensor the current one; that it mostly is already takes less time to find out."""
    if not on.is_cuda or on.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device_of(on)
