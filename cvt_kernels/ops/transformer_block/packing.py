"""Packed copies of weights, made once for as long as a weight lives and is not changed.

A weight is known by its identity, and a change of it by its version, its address and its strides. The storage
is kept with the copies, so that the address of one that has been replaced is not that of another.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

_Packed = TypeVar("_Packed")


class _Copies(NamedTuple):
    """The packed copies of a weight as it was.

    Attributes:
        weight: The weight.
        version: Its count of changes in place.
        address: Where its numbers lie.
        strides: How they lie there.
        storage: What holds them.
        made: What was packed, by its key.
    """

    weight: weakref.ref[Tensor]
    version: int
    address: int
    strides: tuple[int, ...]
    storage: Any
    made: dict[Hashable, Any]


_known: dict[int, _Copies] = {}  # by the identity of the weight; a tensor has no hash by which it is equal
_lock = threading.RLock()


def packed(weight: Tensor, key: Hashable, make: Callable[[], _Packed]) -> _Packed:
    """Returns what ``make`` has made of a weight: a copy that is kept until the weight changes or dies.

    A weight of inference mode is packed at every call, since its changes are not counted.

    Args:
        weight: A tensor. A change through ``.data`` that keeps its address is not noticed.
        key: What is made: it tells the copies of a weight apart.
        make: Makes the copy, which must not refer to the weight.
    """
    try:
        version = weight._version
    except RuntimeError:  # of inference mode
        return make()
    copies = _known.get(id(weight))
    if copies is None or not _are_of(copies, weight, version) or key not in copies.made:
        return _pack(weight, key, make)
    return copies.made[key]


def _are_of(copies: _Copies, weight: Tensor, version: int) -> bool:
    """Says whether copies are those of a weight as it is."""
    is_same = copies.weight() is weight and copies.version == version
    return is_same and copies.address == weight.data_ptr() and copies.strides == weight.stride()


def _pack(weight: Tensor, key: Hashable, make: Callable[[], _Packed]) -> _Packed:
    with _lock:  # of several threads, one packs
        number = id(weight)
        copies = _known.get(number)
        if copies is None or not _are_of(copies, weight, weight._version):
            reference = weakref.ref(weight, lambda dead: _forget(number, dead))
            address, strides = weight.data_ptr(), weight.stride()
            copies = _Copies(reference, weight._version, address, strides, weight.untyped_storage(), {})
            _known[number] = copies
        if key not in copies.made:
            copies.made[key] = make()
        return copies.made[key]


def _forget(number: int, dead: weakref.ref[Tensor]) -> None:
    """Drops the copies of a weight that has died, unless another tensor has taken its place."""
    copies = _known.get(number)
    if copies is not None and copies.weight is dead:
        _known.pop(number, None)


def release_memory() -> None:
    """Frees what kernels keep on a CPU between calls: packed copies of weights. Later calls make them anew.

    Copies are freed by themselves when their weight is; this is for a process that keeps a model and serves
    it no more, or on another device.
    """
    with _lock:
        _known.clear()
