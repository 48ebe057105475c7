"""Detects replaced modules, parameters and buffers of a model, at every call.

Every call compares hundreds of members, so the loops run in C: by the compiled extension
(``csrc/snapshots``), or without it by Python's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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
    def versions(tensors: Sequence[Tensor]) -> Any:
        """Returns the version counter of each tensor.

        Raises:
            RuntimeError: An inference tensor, which has none.
        """
        return [*map(_version_of, tensors)]

    @staticmethod
    def layouts(tensors: Sequence[Tensor]) -> Any:
        """Returns where plain tensors lie: address, dtype, sizes and strides of each."""
        return [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]


_item_of: Callable[..., Any] = dict.get
_version_of: Callable[[Any], Any] = operator.attrgetter("_version")
_forward_of: Callable[[Any], Any] = operator.attrgetter("forward")


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
