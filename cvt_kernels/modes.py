"""Modes around a call: gradients, autocast, function transforms, tracing and counting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    """Returns a size as an int; under ``torch.jit.trace`` it is a tensor."""
    return int(size) if torch.jit.is_tracing() else size


def is_known(condition: Any) -> bool:
    """Returns whether a condition on sizes is true; where sizes are symbolic, whether it is for all of them.

    A plain ``if`` would make the sizes that are traced a condition of the graph.
    """
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def forward_mode_enabled() -> bool:
    """Returns whether forward-mode differentiation is on."""
    # There is no public API; if this attribute is missing, the result is True, the safe side.
    return getattr(forward_ad, "_current_level", 0) >= 0


def may_change(value: Tensor, *others: Tensor | None) -> bool:
    """Returns whether the result of a computation on these tensors may overwrite the first one.

    It may not if autograd may need the first, nor under ``vmap``, which may make the result larger. The
    caller must know that nobody else reads the first again.
    """
    return not (wants_gradient(value, *others) or is_transformed())


def saved_tensors_hooked() -> bool:
    """Returns whether hooks see the tensors that autograd saves, as activation checkpointing's do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_transformed() -> bool:
    """Returns whether a transform of ``torch.func`` is active, such as ``vmap`` or ``grad``."""
    return torch._C._functorch.maybe_current_level() is not None  # there is no public API


def autocast_enabled(x: Tensor) -> bool:
    """Returns whether autocast is on for the device of ``x``."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return False  # which torch.compile cannot trace, and is known sooner
    device_type = x.device.type
    return _has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which autocast is off for the device of ``x``."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else contextlib.nullcontext()


@contextlib.contextmanager
def capturing(gradients: bool) -> Iterator[None]:
    """Runs a capture with or without gradients, and without autocast's cache.

    Cached casts could be in memory that does not outlive the capture.
    """
    is_caching = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()  # a forward may have an autocast of its own that asks for a cache
    try:
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(is_caching)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def convolves_in_tf32(x: Tensor) -> bool:
    """Returns whether PyTorch lets cuDNN round ``x`` to TF32 in a convolution, as it does by default.

    Whether cuDNN does so depends on layout and sizes: on an H200, of three channels with channels last only.
    So another layout than the caller's may lose precision that PyTorch's own convolution has.
    """
    is_float32 = x.is_cuda and x.dtype == torch.float32 and not autocast_enabled(x)
    return is_float32 and convolution_precision() == "tf32"


def convolution_precision() -> str:
    """Returns what cuDNN may round float32 to in convolutions: ``"tf32"``; else ``"ieee"`` or ``"none"``."""
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return str(convolutions.fp32_precision)


def is_exporting() -> bool:
    """Returns whether ``torch.export`` is tracing."""
    return torch.compiler.is_exporting()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype for ``x``; None without autocast, and for float64, which autocast leaves."""
    if autocast_enabled(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None


def dtype_for_layers(x: Tensor) -> torch.dtype | None:
    """Returns autocast's dtype for the layers after a LayerNorm of ``x`` on a GPU; None elsewhere.

    Under autocast, LayerNorm returns float32 there. Passed to ``layer_norm``, this dtype saves the casts.
    """
    return autocast_dtype(x) if x.is_cuda else None


def is_faking() -> bool:
    """Returns whether PyTorch computes shapes alone, by tensors without numbers."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(mode).__name__ == "FakeTensorMode" for mode in _get_current_dispatch_mode_stack())


def is_counted() -> bool:
    """Returns whether a FLOP counter is active, such as PyTorch's FlopCounterMode or one of that name.

    FLOP counters know PyTorch's own operators only.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    classes = (cls for mode in _get_current_dispatch_mode_stack() for cls in type(mode).__mro__)
    return any(cls.__name__.endswith("FlopCounterMode") for cls in classes)


# Constants of a compiled graph; see the end of backends.py. torch.compile of torch 2.11 cannot trace the
# first and takes the second for true; it does not trace the third, enters the transforms that it traces and
# guards those around it, and compiles nothing under a dispatch mode.
_constant: tuple[Any, ...] = _has_autocast, is_exporting, convolution_precision, is_transformed, is_counted
for _function in _constant:
    _function._dynamo_marked_constant = True
