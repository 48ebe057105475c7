"""Argument checks that the public functions share."""

from __future__ import annotations

import math
import operator
import os
import reprlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import modes

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


#: Whether cached functions check at every call that their backend can serve it: the tests set the variable.
CHECKS_CACHED = os.environ.get("CVT_KERNELS_CHECK_CACHED", "0") not in ("", "0")

_DENSE = torch.strided
_FLOAT_NAMES = ", ".join(map(dtype_name, _FLOAT_DTYPES))


# The most characters of a value in a message.
_LONGEST = 80
_PLAIN = (type(None), bool, int, float, complex, str, np.generic, torch.dtype)


class _Shown(reprlib.Repr):
    """A repr for messages, bounded for values of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = 60
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        repr(x)  # raises for thousands of digits, of which Python 3.14 would show an address instead
        return super().repr_int(x, level)

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x) if isinstance(x, _PLAIN) else type(x).__name__


def shown(value: object) -> str:
    """Returns a value for a message: its repr if it is plain and short, else the name of its type."""
    name = type(value).__name__[:_LONGEST]
    try:
        text = _Shown().repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return name
    return text if len(text) <= _LONGEST else name


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor is neither sparse nor nested, nor in a layout of oneDNN's."""
    return tensor.layout is _DENSE and not tensor.is_nested


def check_tensor(name: str, value: Any, shape: str) -> None:
    """Raises TypeError unless ``value`` is a dense tensor; ``shape`` is for the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor {shape}")
    if not is_dense(value):
        kind = "a nested tensor" if value.is_nested else f"a tensor of {value.layout}"
        raise TypeError(f"{name}: got {kind}, expected a dense one {shape}")


def check_float_tensor(name: str, value: Any, shape: str) -> None:
    """Raises TypeError unless ``value`` is a dense tensor of a floating dtype."""
    # Inlined from check_tensor, because small operators are called with many tensors.
    is_float = isinstance(value, Tensor) and value.dtype in _FLOAT_DTYPES
    if is_float and value.layout is _DENSE and not value.is_nested:
        return
    check_tensor(name, value, shape)
    raise TypeError(f"{name}: got dtype {dtype_name(value.dtype)}, expected one of {_FLOAT_NAMES}")


def check_dimensions(name: str, value: Any, rank: int, shape: str) -> None:
    """Raises TypeError unless ``value`` is a dense floating tensor, ValueError for another ``rank``."""
    check_float_tensor(name, value, shape)
    check_rank(name, value, rank, shape)


def check_dtype(name: str, value: Any, shape: str, *dtypes: torch.dtype) -> None:
    """Raises TypeError unless ``value`` is a dense tensor of one of ``dtypes``."""
    check_tensor(name, value, shape)
    if value.dtype not in dtypes:
        expected = " or ".join(map(dtype_name, dtypes))
        raise TypeError(f"{name}: got dtype {dtype_name(value.dtype)}, expected {expected}")


def check_float_dtype(name: str, dtype: object) -> None:
    """Raises TypeError unless ``dtype`` is a floating dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in _FLOAT_DTYPES:
        raise TypeError(f"{name}: got {shown(dtype)}, expected one of {_FLOAT_NAMES}")


def check_rank(name: str, tensor: Tensor, rank: int, shape: str) -> None:
    """Raises ValueError unless ``tensor`` has ``rank`` dimensions."""
    if tensor.ndim != rank:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {rank} dimensions {shape}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless ``tensor.shape == expected``."""
    if tensor.shape != expected:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(expected)} {meaning}")


def check_device(name: str, tensor: Tensor, x_name: str, x: Tensor) -> None:
    """Raises ValueError unless ``tensor`` is on the device of ``x``."""
    if tensor.device != x.device:
        raise ValueError(f"{name}: is on {tensor.device}, expected {x.device} as {x_name}")


def check_like(name: str, tensor: Tensor, x_name: str, x: Tensor, also: tuple[torch.dtype, ...] = ()) -> None:
    """Raises ValueError for another device than that of ``x``, TypeError for a dtype not its own or ``also``.

    Under autocast the dtypes may differ, except for float64, as with PyTorch's own operators.
    """
    if tensor.device != x.device:  # compared here first, since a call takes as long as the rest
        check_device(name, tensor, x_name, x)
    if tensor.dtype == x.dtype or tensor.dtype in also:
        return
    if torch.float64 in (tensor.dtype, x.dtype) or not modes.autocast_enabled(x):
        raise TypeError(
            f"{name}: has dtype {dtype_name(tensor.dtype)}, expected {dtype_name(x.dtype)} as {x_name}"
        )


def check_tensor_like(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    meaning: str,
    x: Tensor,
    also: tuple[torch.dtype, ...] = (),
    x_name: str = "x",
) -> None:
    """Raises TypeError or ValueError unless a tensor has ``shape`` and is like ``x`` (:func:`check_like`)."""
    check_float_tensor(name, tensor, meaning)
    if tensor.shape != shape:  # compared here first, like the next, since calls take as long as the rest
        check_shape(name, tensor, shape, meaning)
    if tensor.dtype != x.dtype or tensor.device != x.device:
        check_like(name, tensor, x_name, x, also)


def check_vector(
    name: str,
    vector: Tensor | None,
    size: int,
    x: Tensor,
    meaning: str = "(channels,)",
    also: tuple[torch.dtype, ...] = (),
    x_name: str = "x",
) -> None:
    """Raises as :func:`check_tensor_like` unless a vector that may be left out has ``size`` elements."""
    if vector is not None:
        check_tensor_like(name, vector, (size,), meaning, x, also, x_name)


def check_kind(name: str, part: object, *kinds: type) -> None:
    """Raises TypeError unless ``part`` is an instance of one of ``kinds``."""
    if not isinstance(part, kinds):
        classes = (type(part), *kinds)
        names = [kind.__name__ for kind in classes]
        got, *expected = (  # with their modules, where two have the same name
            f"{kind.__module__}.{own}" if names.count(own) > 1 else own
            for kind, own in zip(classes, names, strict=True)
        )
        raise TypeError(f"{name}: got {got}, expected {' or '.join(expected)}")


def check_flag(name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is True or False."""
    if value is not True and value is not False and not isinstance(value, torch.SymBool):
        raise TypeError(f"{name}: got {shown(value)}, expected True or False")


_LARGEST = sys.float_info.max


def check_number(name: str, value: Any, expected: str = "a finite number") -> None:
    """Raises unless ``value`` is a finite real number: of Python, of NumPy, symbolic, or a scalar tensor.

    It raises ValueError for NaN and infinities. A bool is no number, nor a tensor that requires a gradient.
    """
    if type(value) is not float and not _is_number(value):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")
    # torch.compile cannot trace math.isfinite. Large integers are finite, but do not fit a float.
    if not -math.inf < value < math.inf or (type(value) is int and abs(value) > _LARGEST):
        raise ValueError(f"{name}: got {shown(value)}, expected {expected}")


def check_positive(name: str, value: Any) -> None:
    """Raises as :func:`check_number`, and ValueError unless the number is above 0."""
    if type(value) is float and 0.0 < value < math.inf:
        return
    check_number(name, value, "a positive number")
    if not value > 0:
        raise ValueError(f"{name}: got {shown(value)}, expected a positive number")


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        real = not value.is_complex() and value.dtype != torch.bool
        return value.ndim == 0 and real and not value.requires_grad
    numbers = int | float | torch.SymInt | torch.SymFloat | np.integer | np.floating
    return isinstance(value, numbers) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises TypeError unless ``value`` is an integer, and ValueError unless it is within its bounds."""
    if not isinstance(value, int | torch.SymInt | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name}: got {shown(value)}, expected an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name}: got {shown(value)}, expected an integer of at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}: got {shown(value)}, expected an integer of at most {most}")


def check_grid(name: str, grid: Any, kinds: Any = tuple) -> None:
    """Raises TypeError unless ``grid`` is a pair of integers; their range is checked elsewhere."""
    if not isinstance(grid, kinds) or len(grid) != 2 or not all(_is_size(n) for n in grid):
        expected = "a tuple (H, W) of integers, of 32 or 64 bits where they are not Python's"
        raise TypeError(f"{name}: got {shown(grid)}, expected {expected}")


def _is_size(value: Any) -> bool:
    """Returns whether a value is a signed integer with enough bits for computing with sizes."""
    if isinstance(value, np.integer):
        return isinstance(value, np.signedinteger) and value.itemsize >= 4
    if isinstance(value, Tensor) and value.dtype not in (torch.int32, torch.int64):
        return False
    return _is_index(value)


def _is_index(value: Any) -> bool:
    """Returns whether a value is an integer: of Python, of NumPy, symbolic, or a scalar tensor."""
    if isinstance(value, int | torch.SymInt):
        return not isinstance(value, bool)
    if not isinstance(value, np.integer | Tensor) or value.dtype == torch.bool:
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def indices(name: str, value: Any) -> list[int]:
    """Returns an integer or a sequence of integers as a list; raises TypeError for anything else."""
    expected = "an integer or a sequence of them"
    each = (value,) if _is_index(value) else as_tuple(name, value, expected)
    if not all(_is_index(index) for index in each):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")
    return [operator.index(index) for index in each]


def as_tuple(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    """Returns an iterable as a tuple; raises TypeError for anything else."""
    try:
        return tuple(value)
    except TypeError as error:
        raise TypeError(f"{name}: got {type(value).__name__}, expected {expected}") from error


def check_path(name: str, value: Any, expected: str = "a path") -> None:
    """Raises TypeError unless ``value`` is a path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: got {shown(value)}, expected {expected}")


def check_pair(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError unless ``value`` is a pair of integers of at least ``least``."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{name}: got {shown(value)}, expected a pair of integers")
    for each in value:
        check_int(name, each, least)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: got {shown(value)}, expected one of {', '.join(choices)}")


#: The largest stride, padding and dilation of a convolution: kernels count with 32 bits.
_MOST_STEPS = 2**20
_MOST_PIXELS = 2**31 - 1
# A padding of up to this is accepted for all sizes.
_LEAST_MOST_PADDING = 64


def check_geometry(
    prefix: str, kernel: int, sizes: Sequence[int], stride: Any, padding: Any, dilation: Any = 1
) -> tuple[int, ...]:
    """Returns the height and width of a convolution's output; raises TypeError or ValueError.

    A height or width below 1 means that the output is empty. A padding far beyond the map and the kernel is
    refused, since it would only add zeros. ``prefix`` comes before names in messages; ``sizes`` are the
    height and width of the map. Where they are symbolic, only what is wrong for all of them raises.
    """
    # Compared here first, because the checks by name cost as much as a small operator's others together.
    plain = type(stride) is type(padding) is type(dilation) is int
    most = _MOST_STEPS
    if not (plain and 0 < stride <= most and 0 <= padding <= most and 0 < dilation <= most):
        stride, padding, dilation = check_steps(prefix, stride, padding, dilation)
    reach = dilation * (kernel - 1)
    rows, columns = sizes
    if padding > _LEAST_MOST_PADDING and padding > rows + reach and padding > columns + reach:
        raise ValueError(
            f"{prefix}padding: got {padding}, expected at most "
            f"{max(*sizes, _LEAST_MOST_PADDING - reach) + reach}, for a map of {rows}×{columns}"
        )
    more = 2 * padding - reach - 1
    height, width = (rows + more) // stride + 1, (columns + more) // stride + 1
    if modes.is_known(height * width > _MOST_PIXELS) and height > 0 and width > 0:
        raise ValueError(
            f"{prefix}padding: got {padding}, which makes {height}×{width} pixels, expected fewer than 2**31"
        )
    return height, width


def check_steps(prefix: str, stride: Any, padding: Any, dilation: Any) -> list[Any]:
    """Returns the settings of a convolution with NumPy's integers, which may overflow, as Python's.

    Raises TypeError or ValueError for settings that are invalid for every map.
    """
    steps = []
    for name, value, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        check_int(f"{prefix}{name}", value, least, _MOST_STEPS)
        steps.append(int(value) if isinstance(value, np.integer) else value)
    return steps


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in a tensor, or in nested tuples and lists, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in tensors_of(each)]
    return []


def check_row_values(
    name: str, rows: Tensor, tokens: int, *, ascending: bool = False, class_token: bool = False
) -> None:
    """Raises ValueError for rows out of range, where reading their values needs no synchronization.

    It checks on a CPU only, and not where torch.compile, torch.export or torch.func trace. Rows (B, K) are
    int64; a negative one stands for no token. With ``ascending`` they must ascend, with -1 at the end; with
    ``class_token`` the first must be 0.
    """
    if torch.compiler.is_compiling() or type(rows) is not Tensor or rows.device.type != "cpu":
        return
    if rows.dtype != torch.int64 or rows.ndim != 2 or not is_dense(rows):  # refused elsewhere
        return
    if rows.numel() == 0 or modes.is_transformed():
        return
    if torch._C._len_torch_dispatch_stack():  # a mode counts operators, or computes shapes only
        return
    values = rows.numpy()  # ten times as fast as PyTorch for tensors this small
    largest = values.max()
    if largest >= tokens:
        raise ValueError(f"{name}: got {largest}, expected the tokens 0 to {tokens - 1}, or -1 for none")
    before, after = values[:, :-1], values[:, 1:]
    if ascending and not ((after == -1) | ((before >= 0) & (after > before))).all():
        raise ValueError(f"{name}: do not ascend, expected each token once, in order, then -1")
    if class_token and values[:, 0].any():
        raise ValueError(f"{name}: begin with another token, expected the class token, 0, as the first")
