"""Detects replaced modules, parameters and buffers of a model, at every call.

Every call compares hundreds of members, so the loops run in C: by the compiled extension
(``csrc/snapshots``), or without it by Python's own functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import machine

# What many objects are ----------------------------------------------------------------------------------


class InPython:
    """Functions that compare many objects with what they were, where the extension was not built.

    Results are for comparison by ``==``; they need not be those of the extension.
    """

    @staticmethod
    def identities(dicts: Sequence[dict[Any, Any]]) -> Any:
        """Returns the number and the identities of the values of each dict."""
        return [*map(len, dicts)], [*map(id, itertools.chain.from_iterable(map(dict.values, dicts)))]

    @staticmethod
    def classes(objects: Sequence[Any]) -> Any:
        """Returns the class of each object."""
        return [*map(type, objects)]

    @staticmethod
    def sizes(dicts: Sequence[dict[Any, Any]]) -> Any:
        """Returns the number of items of each dict."""
        return [*map(len, dicts)]

    @staticmethod
    def any_full(dicts: Sequence[dict[Any, Any]]) -> bool:
        """Returns whether one of the dicts is not empty."""
        return any(dicts)

    @staticmethod
    def having(dicts: Sequence[dict[Any, Any]], name: str) -> bytes:
        """Returns for each dict whether it has an item of that name."""
        return bytes(map(operator.contains, dicts, itertools.repeat(name)))

    @staticmethod
    def any_item(dicts: Sequence[dict[Any, Any]], name: str) -> bool:
        """Returns whether one of the dicts has a true item of that name."""
        items: Any = map(_item_of, dicts, itertools.repeat(name))
        return any(items)

    @staticmethod
    def same_items(dicts: Sequence[dict[Any, Any]], names: Sequence[str], values: Sequence[Any]) -> bool:
        """Returns whether the items of these names are, or equal, these values; None where there is none."""
        return [*map(_item_of, dicts, names)] == values

    @staticmethod
    def layouts(tensors: Sequence[Tensor]) -> Any:
        """Returns where plain tensors lie: address, dtype, sizes and strides of each."""
        return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]

    @staticmethod
    def contents(tensors: Sequence[Tensor | None]) -> tuple[Any, Any]:
        """Returns version and layout of each tensor or None, and a part of the bytes of each on a CPU.

        The version of an inference tensor, which has none, is -1.
        """
        present = [t for t in tensors if t is not None]
        versions = [None if t is None else -1 if t.is_inference() else t._version for t in tensors]
        samples = [
            _sample_of(tensor, place)
            for place, tensor in enumerate(t for t in present if t.device.type == "cpu")
        ]
        return (versions, InPython.layouts(present)), samples


_item_of: Callable[..., Any] = dict.get
_forward_of: Callable[[Any], Any] = operator.attrgetter("forward")

#: The bytes of a line, the lines that are read of a tensor, and the numbers of one with gaps between them, as
#: in ``csrc/snapshots/sample.h``.
_LINE, _LINES, _SINGLES = 64, 8, 64


def _sample_of(tensor: Tensor, place: int) -> list[bytes]:
    """Returns a part of a tensor's bytes; ``place`` differs from tensor to tensor."""
    address, item, count = tensor.data_ptr(), tensor.element_size(), tensor.numel()
    if not address or not count:
        return []
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if extent != count:
        offsets = (_offset_of(n, tensor) for n in _places(place, _SINGLES, count))
        return [ctypes.string_at(address + offset * item, item) for offset in offsets]
    if count * item <= _LINES * _LINE:
        return [ctypes.string_at(address, count * item)]
    return [
        ctypes.string_at(address + offset, _LINE)
        for offset in _places(place, _LINES, count * item - _LINE + 1)
    ]


def _places(place: int, most: int, count: int) -> list[int]:
    """Returns the first of some places, the last, and one in each of equal parts between them."""
    if count <= most:
        return list(range(count))
    between = most - 2
    fractions = (math.modf((place + 1) * (part + 1) * _GOLDEN)[0] for part in range(between))
    return [0, *(int((part + at) * count / between) for part, at in enumerate(fractions)), count - 1]


_GOLDEN = (math.sqrt(5) - 1) / 2


def _offset_of(number: int, tensor: Tensor) -> int:
    offset = 0
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        number, index = divmod(number, size)
        offset += index * step
    return offset


@functools.cache
def looks() -> Any:
    """Returns the functions of :class:`InPython`, by the extension if it is there and knows this torch."""
    try:
        if not machine.has_extension():
            return InPython
        extension = machine.load_extension()
    except machine.ExtensionError:  # which every other use of the extension reports
        return InPython
    with _disable_current_modes(), _no_trace():  # or the first look within one would be at a fake tensor
        tensor = torch.empty(0, device="cpu")
        is_known = torch.ops.cvt_kernels.holds_pointer(tensor._cdata, tensor)
    return extension if is_known else InPython


@contextlib.contextmanager
def _no_trace() -> Iterator[None]:
    """Lets ``torch.jit.trace`` record nothing within a block.

    Without a trace its state stays as it is: PyTorch lets no custom operator of a compiled graph set it.
    """
    functions: Any = torch._C
    tracing = functions._get_tracing_state()
    if tracing is None:
        yield
        return
    functions._set_tracing_state(None)
    try:
        yield
    finally:
        functions._set_tracing_state(tracing)


# A model ------------------------------------------------------------------------------------------------


class Structure:
    """A snapshot of the modules, parameters and buffers of a module, for comparison with later ones.

    It refers to inner modules, but not to the owner, which it must not keep alive.
    """

    def __init__(self, owner: nn.Module, modules: Sequence[nn.Module]):
        self.modules = list(modules)
        self.spaces = [vars(module) for module in modules]
        every = (owner, *modules)
        self._members = [m for each in every for m in (each._modules, each._parameters, each._buffers)]
        classes = {cls for each in every for cls in type(each).__mro__}
        self._classes = [cls for cls in classes if hasattr(cls, "forward")]
        self._found = self._find()

    def _find(self) -> tuple[Any, ...]:
        look = looks()
        return (
            look.identities(self._members),
            look.classes(self.modules),
            [*map(_forward_of, self._classes)],
        )

    def is_changed(self) -> bool:
        """Returns whether a member, a class or the forward of a class has been replaced."""
        return bool(self._find() != self._found)

    def is_training(self) -> bool:
        """Returns whether an inner module is in training mode."""
        return bool(looks().any_item(self.spaces, "training"))

    def has_own_forward(self) -> bool:
        """Returns whether an inner module has a forward of its own on the object."""
        return 1 in looks().having(self.spaces, "forward")
