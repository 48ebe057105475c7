"""Checks of arguments that the public functions share, and what autograd and autocast ask of a call."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


_FLOAT_NAMES = ", ".join(map(dtype_name, _FLOAT_DTYPES))


def check_float_tensor(name: str, value: object, shape: str) -> None:
    """Raises TypeError unless ``value`` is a tensor of a floating dtype; ``shape`` is for the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor {shape}")
    if value.dtype not in _FLOAT_DTYPES:
        raise TypeError(f"{name}: got dtype {dtype_name(value.dtype)}, expected one of {_FLOAT_NAMES}")


def check_float_dtype(name: str, dtype: object) -> None:
    """Raises TypeError unless ``dtype`` is a floating dtype."""
    if dtype not in _FLOAT_DTYPES:
        raise TypeError(f"{name}: got {dtype!r}, expected one of {_FLOAT_NAMES}")


def check_rank(name: str, tensor: Tensor, rank: int, shape: str) -> None:
    """Raises ValueError unless ``tensor`` has ``rank`` dimensions."""
    if tensor.ndim != rank:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {rank} dimensions {shape}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless ``tensor.shape == expected``."""
    if tensor.shape != expected:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(expected)} {meaning}")


def check_like(name: str, tensor: Tensor, x_name: str, x: Tensor, also: tuple[torch.dtype, ...] = ()) -> None:
    """Raises unless ``tensor`` is on the device of ``x`` and has its dtype (or one in ``also``).

    Under autocast the dtypes may differ, but for float64, as with PyTorch's own operators.

    Raises:
        ValueError: Another device.
        TypeError: Another dtype.
    """
    if tensor.device != x.device:
        raise ValueError(f"{name}: is on {tensor.device}, expected {x.device} as {x_name}")
    if tensor.dtype == x.dtype or tensor.dtype in also:
        return
    if torch.float64 in (tensor.dtype, x.dtype) or not autocast_enabled(x):
        raise TypeError(
            f"{name}: has dtype {dtype_name(tensor.dtype)}, expected {dtype_name(x.dtype)} as {x_name}"
        )


def check_tensor_like(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str, x: Tensor) -> None:
    """Raises TypeError or ValueError unless a tensor has a shape, and the dtype and device of ``x``."""
    check_float_tensor(name, tensor, meaning)
    check_shape(name, tensor, shape, meaning)
    check_like(name, tensor, "x", x)


def check_kind(name: str, part: object, *kinds: type) -> None:
    """Raises TypeError unless ``part`` is of one of some types."""
    if not isinstance(part, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name}: got {type(part).__name__}, expected {expected}")


def wants_gradient(*values: object) -> bool:
    """Returns whether autograd has to record a computation on these arguments, in reverse or forward mode."""
    if forward_mode_enabled():
        return True
    if torch.is_grad_enabled():
        for value in values:  # a loop, since a generator costs as much as a small operator's other checks
            if isinstance(value, Tensor) and value.requires_grad:
                return True
    return False


def forward_mode_enabled() -> bool:
    """Returns whether forward-mode differentiation is on."""
    # There is no public way to ask; without this one, the answer is on the safe side.
    return getattr(forward_ad, "_current_level", 0) >= 0


def may_change(value: Tensor, *others: Tensor | None) -> bool:
    """Returns whether what is computed of all these may be put in the place of the first, of no further use.

    Autograd may need it, and of a ``vmap`` over the others alone it cannot take the results.
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


# torch.compile of torch 2.11 cannot trace the first and takes the second for true; see the end of
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


def check_row_values(
    name: str, rows: Tensor, tokens: int, *, ascending: bool = False, class_token: bool = False
) -> None:
    """Raises ValueError for rows that the tokens do not have, where their values can be seen without a wait.

    That is on a CPU, and not where torch.compile, torch.export or torch.func trace.

    Args:
        name: The argument, for the message.
        rows: (B, K) int64, tokens, or negative for none.
        tokens: Number of tokens.
        ascending: Whether they have to ascend, with -1 at the end.
        class_token: Whether the first has to be 0.
    """
    if torch.compiler.is_compiling() or type(rows) is not Tensor or rows.device.type != "cpu":
        return
    if rows.numel() == 0 or torch._C._functorch.maybe_current_level() is not None:
        return
    if torch._C._len_torch_dispatch_stack():  # somebody counts operators, or computes shapes only
        return
    values = rows.numpy()  # whose arithmetic takes a tenth of the time of tensors' so small
    largest = values.max()
    if largest >= tokens:
        raise ValueError(f"{name}: got {largest}, expected the tokens 0 to {tokens - 1}, or -1 for none")
    before, after = values[:, :-1], values[:, 1:]
    if ascending and not ((after == -1) | ((before >= 0) & (after > before))).all():
        raise ValueError(f"{name}: do not ascend, expected each token once, in order, then -1")
    if class_token and values[:, 0].any():
        raise ValueError(f"{name}: begin with another token, expected the class token, 0, as the first")
