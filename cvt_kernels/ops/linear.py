"""Linear layers by the fastest of PyTorch's own primitives, which on a CPU is not always ``F.linear``.

For inference on a CPU there are three ways to the same product:

- ``linear``: ``F.linear``, that is MKL for float32 and oneDNN for 16 bits.
- ``convolution``: a 1×1 ``F.conv2d`` on the channels-last view, that is oneDNN for float32 too, which is much
  faster than MKL on AMD CPUs with AVX-512.
- ``float32``: 16 bits converted to float32 and back, which helps on a CPU without 16-bit products.

Which one a dtype takes is measured once per process, at its first product, on one problem of CvT-13's size;
another than ``F.linear`` must win by a quarter, so that chance does not decide between equals.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import backends, checks

_MARGIN = 1.25
_PROBE = (784, 192, 768)  # rows, inputs, outputs: the first linear layer of an MLP in stage 2, one image
_ROUNDS = 5
_CHUNK = 1024  # rows that are converted at a time, which bounds the memory beside the result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a linear layer, x · weightᵀ + bias.

    For inference on a CPU it takes the fastest of PyTorch's primitives on this machine, see
    :func:`linear_primitives`; its results may differ from those of ``F.linear`` in the last bits. Everywhere
    else it is ``F.linear``, as under ``torch.use_deterministic_algorithms`` and ``use_backend("reference")``.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``.

    Returns:
        ``(..., outputs)``.

    Raises:
        RuntimeError: Shapes or dtypes that ``F.linear`` does not take.
        ValueError: ``CVT_KERNELS_LINEAR`` holds an unknown name.
    """
    if not _has_choice(x, weight, bias):
        return F.linear(x, weight, bias)
    return _PRIMITIVES[_choose(x.dtype, torch.get_num_threads())](x, weight, bias)


def _has_choice(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.dtype not in _CANDIDATES:
        return False
    if torch.are_deterministic_algorithms_enabled() or backends.requested_backend() == "reference":
        return False
    if torch.is_autocast_enabled("cpu") or checks.wants_gradient(x, weight, bias):
        return False
    given = [t for t in (x, weight, bias) if t is not None]
    # Subclasses, as of quantized weights, know themselves what a product is; so does F.linear what is wrong.
    plain = all(
        type(t) in (Tensor, nn.Parameter) and t.dtype == x.dtype and t.layout == torch.strided for t in given
    )
    fits = x.ndim > 0 and weight.ndim == 2 and weight.shape[1] == x.shape[-1] and x.numel() > 0
    return plain and fits and (bias is None or bias.shape == weight.shape[:1])


def linear_primitives() -> dict[torch.dtype, str]:
    """Returns dtype → the primitive that :func:`linear` takes for inference on this CPU.

    It is ``"linear"``, ``"convolution"`` or ``"float32"``.

    Measures what has not been measured yet, in a second where 16-bit products are slow. The environment
    variable ``CVT_KERNELS_LINEAR``, read at the first product, names one for all dtypes that it can serve.

    Raises:
        ValueError: ``CVT_KERNELS_LINEAR`` holds an unknown name.
    """
    return {dtype: _choose(dtype, torch.get_num_threads()) for dtype in _CANDIDATES}


def _by_convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    image = x.reshape(1, 1, -1, x.shape[-1]).permute(0, 3, 1, 2)
    product = F.conv2d(image, weight[:, :, None, None], bias)
    return product.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def _by_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias = weight.float(), None if bias is None else bias.float()
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    for part, result in zip(rows.split(_CHUNK), out.split(_CHUNK), strict=True):
        result.copy_(F.linear(part.float(), weight, bias))
    return out.view(*x.shape[:-1], -1)


Primitive = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_PRIMITIVES: dict[str, Primitive] = {
    "linear": F.linear,
    "convolution": _by_convolution,
    "float32": _by_float32,
}
_CANDIDATES = {
    torch.float32: ("linear", "convolution"),
    torch.bfloat16: ("linear", "convolution", "float32"),
    torch.float16: ("linear", "convolution", "float32"),
}


@contextlib.contextmanager
def replaced(replace: Callable[[str, Primitive], Primitive]) -> Iterator[None]:
    """Replaces every primitive by ``replace(name, primitive)`` within a block.

    Tools that count, label or time calls need this; it applies to the whole process.
    """
    global _PRIMITIVES
    previous = _PRIMITIVES
    _PRIMITIVES = {name: replace(name, primitive) for name, primitive in previous.items()}
    try:
        yield
    finally:
        _PRIMITIVES = previous


@functools.cache
def _choose(dtype: torch.dtype, threads: int) -> str:
    """Chooses the primitive of a dtype for a number of threads."""
    requested = os.environ.get("CVT_KERNELS_LINEAR") or "auto"
    if requested not in ("auto", *_PRIMITIVES):
        expected = ", ".join(("auto", *_PRIMITIVES))
        raise ValueError(f"CVT_KERNELS_LINEAR: got {requested!r}, expected one of {expected}")
    candidates = _CANDIDATES[dtype]
    if requested != "auto":
        return requested if requested in candidates else "linear"
    seconds = _measure(dtype)
    fastest = min(candidates, key=seconds.__getitem__)
    return fastest if seconds[fastest] * _MARGIN < seconds["linear"] else "linear"


def _measure(dtype: torch.dtype) -> dict[str, float]:
    """Returns the seconds that the candidates take at best, in turns."""
    from .. import measure  # is not needed before the first product

    rows, inputs, outputs = _PROBE
    # Ones need no random numbers, whose state belongs to the user.
    x, weight, bias = (
        torch.ones(shape, dtype=dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,))
    )
    names = _CANDIDATES[dtype]
    calls = [functools.partial(_PRIMITIVES[name], x, weight, bias) for name in names]
    with torch.no_grad():
        seconds = measure.seconds_in_turns(calls, _ROUNDS, "cpu")
    return dict(zip(names, map(min, seconds), strict=True))
