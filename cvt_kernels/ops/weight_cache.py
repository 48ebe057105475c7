"""Packed copies of weights that kernels cache, invalidated when the weights change.

Most changes show in the tensors: the version counter, or another address, shape, layout or dtype. Writes that
do not bump the counter, as those through ``.data``, show in a sample of the numbers of each tensor on a CPU
(``csrc/snapshots/sample.h``). Reported to :func:`note_written` are optimizer steps, which may change few
numbers and, if fused, bump no counter, and what the user reports by :func:`refresh`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from .. import modes
from ..structure import looks

_Packed = TypeVar("_Packed")

# Noticing changes -----------------------------------------------------------------------------------------


class Snapshot:
    """The state of tensors from which something was derived, to detect later changes.

    It keeps neither the tensors nor their memory alive. It refers only to storages: a weak reference to a
    tensor would make ``torch.utils.swap_tensors`` fail.

    Args:
        tensors: The tensors.
    """

    def __init__(self, tensors: Sequence[Tensor | None]):
        self.is_outdated = False
        self._facts, self._sample = _contents_of(tensors)
        for storage in {id(s): s for s in (t.untyped_storage() for t in tensors if t is not None)}.values():
            _dependents_of(storage).add(self)

    def holds(self, tensors: Sequence[Tensor | None]) -> bool:
        """Returns whether these are the same tensors, unchanged.

        Where only the sample has changed, everything derived from any of them is outdated, since such a write
        reaches many tensors at a time, and the sample may miss it in some.
        """
        if self.is_outdated:
            return False
        facts, sample = _contents_of(tensors)
        if facts == self._facts and sample != self._sample:
            note_written(t for t in tensors if t is not None)
        return bool(facts == self._facts) and bool(sample == self._sample)

    def outdate(self) -> None:
        """Marks the snapshot as outdated: a tensor was written, or its memory is gone."""
        self.is_outdated = True

    def release(self) -> None:
        """Frees what can be rebuilt."""


def _contents_of(tensors: Sequence[Tensor | None]) -> tuple[Any, Any]:
    """Returns what changes visibly with tensors, and a sample of their numbers where these can be read."""
    kinds = {*map(_kind, tensors)}
    if all(map(_has_memory, kinds)):
        facts, sample = looks().contents(tensors if type(tensors) is list else [*tensors])
        return facts, sample
    facts, sample = looks().contents([t if _has_memory(_kind(t)) else None for t in tensors])
    others = [t for t in tensors if t is not None and not _has_memory(_kind(t))]
    versions = [t.is_inference() or t._version for t in others]
    # Fake tensors have no address.
    layouts = [(t.untyped_storage()._cdata, t.shape, t.stride(), t.dtype) for t in others]
    return (facts, versions, layouts), sample


_kind: Callable[[Any], Any] = type
_PLAIN = {Tensor, nn.Parameter, NoneType}


def is_plain(tensor: Tensor | None) -> bool:
    """Returns whether a tensor is none that computes in its own way, such as a quantized or a sharded one.

    Fake tensors, which stand for plain ones, count too.
    """
    return type(tensor) in _PLAIN or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def is_fake(made: Any) -> bool:
    """Returns whether something was made of fake tensors, in whose mode a real model may run."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(leaf).__name__ in ("FakeTensor", "FunctionalTensor") for leaf in pytree.tree_leaves(made))


@functools.cache
def _has_memory(kind: Any) -> bool:
    """Returns whether tensors of a class, or None, have the memory that they say, unlike fake tensors."""
    return kind is NoneType or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


#: The snapshots that depend on a storage, by its identity: its Python object lives as long as the memory.
_dependents: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.WeakSet[Snapshot]]] = {}


def _dependents_of(storage: torch.UntypedStorage) -> weakref.WeakSet[Snapshot]:
    _notice_optimizers()
    known = _dependents.get(id(storage))
    if known is None:
        place = id(storage)
        reference = weakref.ref(storage, lambda dead: _outdate(_dependents.pop(place)[1]))
        known = _dependents[place] = reference, weakref.WeakSet()
    return known[1]


def note_written(tensors: Iterable[Tensor]) -> None:
    """Invalidates everything derived from the memory of some tensors."""
    for tensor in tensors:
        known = _dependents.get(id(tensor.untyped_storage()))
        if known is not None:
            _outdate(known[1])


def _outdate(snapshots: Iterable[Snapshot]) -> None:
    for snapshot in list(snapshots):
        snapshot.outdate()


@functools.cache
def _notice_optimizers() -> None:
    """Registers a hook on optimizer steps, once, at the first snapshot."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizer hook: invalidates everything derived from the optimizer's parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(_is_sharded, parameters)):
        note_written(parameters)
        return
    for _, snapshots in list(_dependents.values()):
        _outdate(snapshots)


# Like torch.compiler.disable, without importing Dynamo: a compiled step ends with it.
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_sharded(parameter: Tensor) -> bool:
    """Returns whether modules compute with a gathered copy of a parameter; FSDP writes it without a count."""
    return type(parameter) not in (Tensor, nn.Parameter) or hasattr(parameter, "_fsdp_flattened")


def refresh(model: nn.Module) -> None:
    """Makes kernels reread the weights of a model in its next call.

    Kernels keep packed and folded copies of weights. Changes through PyTorch are noticed: assignments,
    ``load_state_dict``, operations in place, steps of any optimizer. Other writes, such as those through
    ``tensor.data`` or NumPy, show in a sample of the numbers on a CPU. Call this after one that changed few
    numbers, and on a GPU after any of a model that is frozen.

    Args:
        model: Any module, accelerated or not. Copies of other tensors that share its memory are rebuilt too.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__qualname__}, expected a torch.nn.Module")
    note_written(t for t in itertools.chain(model.parameters(), model.buffers()) if not _is_sharded(t))


# Packed copies --------------------------------------------------------------------------------------------


class _Copy(Snapshot):
    """A packed copy of a weight.

    Args:
        place: Its key in ``_known``.
        tensors: The weight, and the other tensors packed with it.

    Attributes:
        place: Its key in ``_known``.
        made: The packed copy; None until it is made.
        stream: Where it was made on a GPU.
    """

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


_noted = threading.local()


def is_noting() -> bool:
    """Returns whether this thread is within :func:`noted_uses`."""
    return getattr(_noted, "uses", None) is not None


@contextlib.contextmanager
def noted_uses() -> Iterator[Uses]:
    """Records the copies that this thread reads within a block, since a CUDA graph of it reads them again."""
    previous, uses = getattr(_noted, "uses", None), Uses()
    _noted.uses = uses
    try:
        yield uses
    finally:
        _noted.uses = previous


class _Frozen(threading.local):
    is_on = False


_frozen = _Frozen()


@contextlib.contextmanager
def kept_on_gpu() -> Iterator[None]:
    """Keeps packed copies on a GPU within a block, whose weights change only where PyTorch counts it."""
    before, _frozen.is_on = _frozen.is_on, True
    try:
        yield
    finally:
        _frozen.is_on = before


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
    uses: Uses | None = getattr(_noted, "uses", None)
    is_capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    if (is_capturing and uses is None) or (weight.is_cuda and not _frozen.is_on):
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


def why_unpackable(x: Tensor, *others: Tensor | None) -> str | None:
    """Returns why a CPU kernel for inference, which packs weights, cannot serve a call, or None.

    Args:
        x: The first tensor of the call.
        others: All others.
    """
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
        copy.made = make()
        if is_fake(copy.made):
            return copy
        copy.stream = stream_of(copy.made)
        _known[copy.place] = copy
        return copy


def packed_bytes() -> int:
    """Returns the bytes of all packed copies that are tensors or sequences of tensors."""
    with _lock:
        return sum(_bytes_of(copy.made) for copy in _known.values())


def _bytes_of(made: Any) -> int:
    if isinstance(made, Tensor):
        return made.untyped_storage().nbytes() if not made.is_mkldnn else made.numel() * made.element_size()
    return sum(map(_bytes_of, made)) if isinstance(made, list | tuple) else 0


def release_memory() -> None:
    """Frees the memory that CPU kernels keep between calls: packed weights and workspaces.

    Later calls rebuild them. A copy is freed with its weight anyway; this is for a process that keeps a model
    but no longer runs it, or runs it on another device. With glibc, free memory of the process goes back to
    the system.
    """
    with _lock:
        for _, snapshots in list(_dependents.values()):
            for snapshot in list(snapshots):
                snapshot.release()
        _known.clear()
    extension = sys.modules.get("cvt_kernels._C")
    if extension is not None:
        extension.release_workspace()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
