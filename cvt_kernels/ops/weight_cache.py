"""Packed copies of weights that kernels cache, until the weights change (``changes``)."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import modes
from ..changes import State, is_fake, states
from ..records import Linear

_Packed = TypeVar("_Packed")


class _Copy(State):
    """A packed copy of a weight, and of other tensors packed with it; ``place`` is its key in ``_known``."""

    stream: torch.cuda.Stream | None = None

    def __init__(self, place: tuple[int, Hashable], tensors: Sequence[Tensor | None]):
        super().__init__(tensors)
        self.place = place
        self.made: Any = None

    def outdate(self) -> None:
        super().outdate()
        if _known.get(self.place) is self:
            _known.pop(self.place, None)


_known: dict[tuple[int, Hashable], _Copy] = {}  # by the address of the weight
_lock = threading.RLock()


class Uses:
    """The packed copies read within :func:`noted_uses`, kept alive."""

    def __init__(self) -> None:
        self._uses: list[tuple[_Copy, Any, list[Tensor | None]]] = []

    def note(self, copy: _Copy, tensors: Sequence[Tensor | None]) -> None:
        """Notes that a copy of some tensors was read."""
        aliases = [None if t is None else t.detach() for t in tensors]
        self._uses.append((copy, copy.made, aliases))

    def hold(self) -> bool:
        """Returns whether all copies are still up to date."""
        return all(copy.holds(tensors) for copy, _, tensors in self._uses)

    def hold_for_same_tensors(self) -> bool:
        """Returns whether all copies are up to date if none of their tensors has visibly changed."""
        return not any(copy.is_outdated for copy, _, _ in self._uses)


class _Thread(threading.local):
    uses: Uses | None = None
    is_frozen = False


_thread = _Thread()


def is_noting() -> bool:
    """Returns whether this thread is within :func:`noted_uses`."""
    return _thread.uses is not None


@contextlib.contextmanager
def noted_uses() -> Iterator[Uses]:
    """Records the copies that this thread reads within a block, since a CUDA graph of it reads them again."""
    previous, uses = _thread.uses, Uses()
    _thread.uses = uses
    try:
        yield uses
    finally:
        _thread.uses = previous


@contextlib.contextmanager
def kept_on_gpu() -> Iterator[None]:
    """Keeps packed copies on a GPU within a block, whose weights change only where PyTorch counts it."""
    before, _thread.is_frozen = _thread.is_frozen, True
    try:
        yield
    finally:
        _thread.is_frozen = before


def stream_of(made: Any) -> torch.cuda.Stream | None:
    """Waits until this stream of a GPU has written what it made, so that any may read it; returns it."""
    device = next((t.device for t in pytree.tree_leaves(made) if isinstance(t, Tensor) and t.is_cuda), None)
    if device is None or torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    return stream


def note_read(made: Any, stream: torch.cuda.Stream | None) -> None:
    """Lets the memory of what was made on a stream be used again only after this stream has read it too."""
    if stream is None or torch.cuda.is_current_stream_capturing():
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)


def packed(
    weight: Tensor, key: Hashable, make: Callable[[], _Packed], others: Sequence[Tensor | None] = ()
) -> _Packed:
    """Returns the packed copy that ``make`` makes of a weight, cached until the weight changes or dies.

    On a GPU, where the sample could not be read without waiting, it is packed in every call but those of
    frozen models (:func:`kept_on_gpu`), and in a CUDA graph of the user's in every replay: it would read a
    cached copy for ever. ``graphed`` asks for its copies (:func:`noted_uses`), but keeps none that is made
    during a capture, which computes nothing.

    Args:
        weight: A tensor.
        key: The kind of copy, which tells the copies of a weight apart.
        make: Makes the copy, which must not refer to the tensors.
        others: Other tensors packed with it, whose changes count too.
    """
    uses = _thread.uses
    is_capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if (is_capturing and uses is None) or (weight.is_cuda and not _thread.is_frozen):
        return make()
    tensors, place = (weight, *others), (weight.data_ptr(), key)
    copy = _known.get(place)
    if copy is None or not copy.holds(tensors):
        copy = _Copy(place, tensors)
    if copy.made is None:
        if is_capturing:
            return make()
        copy = _pack(copy, tensors, make)
    note_read(copy.made, copy.stream)
    if uses is not None:
        uses.note(copy, tensors)
    return copy.made


def packed_linears(layers: Sequence[tuple[Tensor, Tensor | None]]) -> Linear:
    """Returns linear layers as one, their weights and biases below one another, packed until one changes."""
    weights, biases = [weight for weight, _ in layers], [bias for _, bias in layers]

    def pack() -> Linear:
        if all(bias is None for bias in biases):
            return Linear(torch.cat(weights))
        given = [
            weight.new_zeros(len(weight)) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return Linear(torch.cat(weights), torch.cat(given))

    return packed(weights[0], f"{len(layers)} layers side by side", pack, [*weights[1:], *biases])


def vector(given: Tensor | None, size: int, absent: float = 0.0) -> Tensor:
    """Returns a parameter as kernels of a CPU read it, contiguous in float32; a constant for None."""
    return torch.full((size,), absent) if given is None else given.detach().float().contiguous()


def why_unpackable(x: Tensor, *others: Tensor | None) -> str | None:
    """Returns why a CPU kernel for inference, which packs weights, cannot serve these tensors, or None."""
    if torch.compiler.is_compiling():
        return "is not for torch.compile, which cannot trace what keeps packed weights"
    plain = all(type(tensor) in (Tensor, nn.Parameter) for tensor in (x, *others) if tensor is not None)
    if not plain or modes.is_faking():
        return "packs plain tensors only"
    if x.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    if modes.autocast_enabled(x):
        return "is not for autocast: convert the model to bfloat16 instead"
    return "has no gradients" if modes.wants_gradient(x, *others) else None


def _pack(copy: _Copy, tensors: Sequence[Tensor | None], make: Callable[[], Any]) -> _Copy:
    """Makes a copy under the lock, and returns the cached one."""
    with _lock:
        found = _known.get(copy.place)
        if found is not None and found.holds(tensors):
            return found
        # Copies made in inference mode could not be used outside it.
        with torch.inference_mode(False), torch.no_grad():
            copy.made = make()
        if is_fake(copy.made):
            return copy
        copy.stream = stream_of(copy.made)
        _known[copy.place] = copy
        return copy


def release_memory() -> None:
    """Frees the memory that CPU kernels keep between calls: packed weights and workspaces.

    Later calls rebuild them. A copy is freed with its weight anyway; this is for a process that keeps a model
    but no longer runs it, or runs it on another device. With glibc, free memory of the process goes back to
    the system.
    """
    with _lock:
        for state in states():
            state.release()
        _known.clear()
    extension = sys.modules.get("cvt_kernels._C")
    if extension is not None:
        extension.release_workspace()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
