"""Packed copies of weights, made once for as long as a weight lives and is not changed.

A weight is known by its identity, and a change of it by its version, its address, its shape, its strides and
its dtype. The storage is kept with the copy, so that the address of one that has been replaced is not that of
another.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

_Packed = TypeVar("_Packed")


class _Copy(NamedTuple):
    """A packed copy of a weight as it was.

    Attributes:
        weight: The weight.
        stamps: Count of changes in place, address, shape, strides and dtype of the weight, and of the others
            with it.
        storages: What holds their numbers.
        made: What was packed.
    """

    weight: weakref.ref[Tensor]
    stamps: list[Any]
    storages: list[Any]
    made: Any


_known: dict[tuple[int, Hashable], _Copy] = {}  # by the weight's identity: equal tensors are not the same
_lock = threading.RLock()


def packed(
    weight: Tensor, key: Hashable, make: Callable[[], _Packed], others: Sequence[Tensor | None] = ()
) -> _Packed:
    """Returns what ``make`` has made of a weight: a copy that is kept until the weight changes or dies.

    A weight of inference mode is packed at every call, since its changes are not counted.

    Args:
        weight: A tensor. A change of its values in place through ``.data`` is not noticed.
        key: What is made: it tells the copies of a weight apart.
        make: Makes the copy, which must not refer to the tensors.
        others: What else goes into it, and is watched alike; it should live as long as the weight.
    """
    try:
        stamps = [None if t is None else _stamp_of(t) for t in (weight, *others)]
    except RuntimeError:  # of inference mode
        return make()
    copy = _known.get((id(weight), key))
    if copy is not None and copy.weight() is weight and copy.stamps == stamps:
        return copy.made
    with _lock:
        copy = _known.get((id(weight), key))  # of several threads, one packs
        if copy is None or copy.weight() is not weight or copy.stamps != stamps:
            place = id(weight), key
            reference = weakref.ref(weight, lambda dead: _forget(place, dead))
            storages = [t.untyped_storage() for t in (weight, *others) if t is not None]
            copy = _known[place] = _Copy(reference, stamps, storages, make())
        return copy.made


def _stamp_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _forget(place: tuple[int, Hashable], dead: weakref.ref[Tensor]) -> None:
    """Drops the copy of a weight that has died, unless another tensor has taken its place."""
    copy = _known.get(place)
    if copy is not None and copy.weight is dead:
        _known.pop(place, None)


def packed_bytes() -> int:
    """Returns the bytes of all packed copies, as far as they are tensors or sequences of them."""
    with _lock:
        return sum(_bytes_of(copy.made) for copy in _known.values())


def _bytes_of(made: Any) -> int:
    if isinstance(made, Tensor):
        return made.untyped_storage().nbytes() if not made.is_mkldnn else made.numel() * made.element_size()
    return sum(map(_bytes_of, made)) if isinstance(made, list | tuple) else 0


def release_memory() -> None:
    """Frees what kernels keep on a CPU between calls: packed copies of weights, and the memory they work in.

    Later calls make them anew. Copies are freed by themselves when their weight is; this is for a process
    that keeps a model and serves it no more, or on another device.
    """
    with _lock:
        _known.clear()
    extension = sys.modules.get("cvt_kernels._C")
    if extension is not None:
        extension.release_workspace()
