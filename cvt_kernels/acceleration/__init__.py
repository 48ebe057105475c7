"""Fused forwards for the CvT that people already have: ``accelerate`` and ``restore``.

A supported block changes its class, to a subclass that overrides ``forward`` and nothing else that computes:
parameters, buffers, submodules, hooks and ``state_dict`` stay as they are, and so does the name of the class.

Every call asks again whether the block is what its entry in the table expects; if not, the block's own
forward runs. The parts, each on those before it: ``fused`` (operations on submodules), ``entries`` (of the
table), ``ours``, ``huggingface`` and ``microsoft`` (forwards and entries), ``matching`` (which block is
which), this file (the swap of classes), ``coverage`` and ``verify``.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import Tensor, nn

from ..graphs import cached, change_class, ungraphed
from .matching import (
    TABLE,
    find_blocks,
    is_fused,
    original_class,
    why_mismatched,
    why_not_now,
)

_Model = TypeVar("_Model", bound=nn.Module)


def accelerate(model: _Model) -> _Model:
    """Gives the supported blocks of a CvT fused forwards, in place.

    Supported are Hugging Face's ``CvtModel`` and ``CvtForImageClassification``, Microsoft's ``cls_cvt``
    models and every model that contains their blocks. (``cvt``'s own blocks are fused as they are.) The model
    computes what it computed before, in evaluation and in training, with the same random numbers, gradients
    and BatchNorm statistics, up to rounding. Parameters, ``state_dict``, hooks and class names stay.

    A block that is not as its class is upstream keeps its class, and one that a fused forward would not do
    justice to its own computation, call by call: :func:`coverage` tells which and why. :func:`restore` undoes
    everything. Second derivatives need the reference backend.

    Args:
        model: Any module; wrappers are looked into.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no supported block; it is left as it was.
    """
    blocks = find_blocks(model)
    supported = [(block, entry) for _, block, entry in blocks if why_mismatched(block, entry) is None]
    if not supported:
        path, block, entry = blocks[0]
        raise ValueError(
            f"model: none of the {len(blocks)} blocks of {type(model).__name__} is supported; "
            f"the first, {path or 'itself'}: {why_mismatched(block, entry)}"
        )
    for block, entry in supported:
        if entry.forward is not None and not is_fused(block):
            change_class(block, functools.partial(_fused_class, key=entry.key))
    return model


def restore(model: _Model) -> _Model:
    """Gives the blocks of an accelerated model their own classes back, in place, and drops CUDA graphs.

    Args:
        model: Any module; what was neither accelerated nor graphed stays as it is.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module.
    """
    ungraphed(model)
    for module in model.modules():
        if is_fused(module):
            module.__class__ = original_class(type(module))
    return model


@cached
def _fused_class(original: Any, key: str) -> Any:
    """Returns the subclass of ``original`` with the fused forward of the entry named ``key``."""
    entry = TABLE[key]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if why_not_now(self, entry) is None:
            return entry.forward(self, *args, **kwargs)  # type: ignore[misc]
        return original.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # Pickle finds classes by name, and under this name it would find the original.
        return _new_block, (original, key), object.__reduce_ex__(self, 2)[2]

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "_cvt_kernels_original": original}
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(original, name)
    return type(original.__name__, (original,), members)


def _new_block(original: type[nn.Module], key: str) -> nn.Module:
    """Returns an accelerated block without state, for pickle and ``copy``."""
    fused = _fused_class(original, key)
    return fused.__new__(fused)
