"""Modes around a call: gradients, autocast, function transforms, tracing and counting."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def wants_gradient(*values: object) -> bool:
    """Returns whether autograd has to record a computation on these arguments, in reverse or forward mode."""
    if forward_mode_enabled():
        return True
    if torch.is_grad_enabled():
        for value in values:  # a loop, since a generator costs as much as a small operator's other checks
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def plain_size(size: int) -> int:
    """Returns a size as a plain number, which it is not where ``torch.jit.trace`` records."""
    return int(size) if torch.jit.is_tracing() else size


def forward_mode_enabled() -> bool:
    """Returns whether forward-mode differentiation is on."""
    # There is no public way to ask; without this one, the answer is on the safe side.
    return getattr(forward_ad, "_current_level", 0) >= 0


def may_change(value: Tensor, *others: Tensor | None) -> bool:
    """Returns whether the result of a computation on all of these may overwrite the first.

    That nobody else reads the first again is up to the caller. It may not where autograd may need it, nor
    under ``vmap``, which may make the result larger.
    """
    return not (wants_gradient(value, *others) or is_transformed())


def is_transformed() -> bool:
    """Returns whether a transform of ``torch.func`` is under way, such as ``vmap`` or ``grad``."""
    return torch._C._functorch.maybe_current_level() is not None  # there is no public way to ask


def autocast_enabled(x: Tensor) -> bool:
    """Returns whether autocast is on for the device of ``x``."""
    device_type = x.device.type
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which autocast is off for the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else contextlib.nullcontext()


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def is_exporting() -> bool:
    """Returns whether ``torch.export`` traces."""
    return torch.compiler.is_exporting()


# backends.py.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Dynamo can trace none of this, but enters the transforms that it traces, and guards those around it.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast gives ``x``; None without autocast and for float64, which it leaves."""
    if autocast_enabled(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None


def dtype_for_layers(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype on a GPU, where a LayerNorm of ``x`` gives float32 by itself; None elsewhere.

    The layers after a LayerNorm compute in it. Named to ``layer_norm``, it saves their casts.
    """
    return autocast_dtype(x) if x.is_cuda else None


def is_counted() -> bool:
    """Returns whether a counter of floating-point operations watches, such as PyTorch's FlopCounterMode.

    Such tools know the costs of PyTorch's own operators only. ptflops and others have a class of this name
    too.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    classes = (cls for mode in _get_current_dispatch_mode_stack() for cls in type(mode).__mro__)
    return any(cls.__name__.endswith("FlopCounterMode") for cls in classes)


# Nothing is compiled where a mode is on; see the end of backends.py.
is_counted._dynamo_marked_constant = True  # type: ignore[attr-defined]
