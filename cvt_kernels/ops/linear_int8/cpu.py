"""Linear layers of 8-bit integers and their quantization on a CPU, by the compiled extension (csrc).

The weight is packed once for this CPU. A tile of rows is rounded in a thread's own memory, multiplied with
the packed weight and finished in float32 while the sums are in the cache: x is read once, the result written
once, and nothing else goes through memory. Sums of products are exact, so results do not depend on the number
of threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks, machine
from ...backends import Record
from ...records import QuantizedRows
from .. import weight_cache
from ..graph_operators import launcher

machine.load_extension()
_ops = torch.ops.cvt_kernels

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_rows_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot round rows, or None."""
    x, dtype = call.x, call.dtype
    if dtype != torch.int8:
        return f"rounds to int8 only, not to {checks.dtype_name(dtype)}"
    return None if x.dtype in _DTYPES else "serves float32, bfloat16 and float16"


def quantize_rows(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.quantize_rows`` for checked arguments."""
    return QuantizedRows(*_ops.quantize_rows.default(call.x))


def layer_norm_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.layer_norm_quantize`` for checked arguments."""
    x, weight, bias, eps, shift, _ = call
    return QuantizedRows(
        *_ops.layer_norm_quantize.default(x, _vector(weight), _vector(bias), eps, _vector(shift))
    )


def gelu_quantize(call: Record) -> QuantizedRows:
    """Computes ``cvt_kernels.gelu_quantize`` for checked arguments."""
    x, bias, approximate, _ = call
    return QuantizedRows(*_ops.gelu_quantize.default(x, _vector(bias), approximate))


def _vector(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.detach().float().contiguous()


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot compute a linear layer, or None."""
    x, weight, weight_scale, _, x_scales, _, residual, dtype = call
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (x, weight, weight_scale)):
        return "packs plain tensors only"
    if weight.dtype != torch.int8:
        return f"multiplies int8 only, not {checks.dtype_name(weight.dtype)}"
    if x.dtype not in (_DTYPES if x_scales is None else (torch.int8,)) or dtype not in _DTYPES:
        return "serves float32, bfloat16 and float16"
    if residual is not None and residual.dtype != dtype:
        return f"adds a residual of the dtype of the result only, not {checks.dtype_name(residual.dtype)}"
    return None if weight.numel() else "packs no weight that is empty"


class _Packed(NamedTuple):
    """A weight packed for this CPU, with its scales and bias in float32."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def _shape_of(x: Tensor, x_scales: Any, weight: Any, weight_scale: Tensor, *others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_scale.shape[0]), dtype=others[-1])


@launcher("linear_int8", _shape_of)  # it packs when it runs
@torch.no_grad()
def _run(
    x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scale: Tensor, bias: Tensor | None,
    residual: Tensor | None, activation: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    def pack() -> _Packed:
        packed = _ops.pack_linear_int8.default(weight)
        return _Packed(packed, weight_scale.contiguous(), _vector(bias))

    packed = weight_cache.packed(weight, "linear_int8", pack, (weight_scale, bias))
    return _ops.linear_int8_packed.default(
        x, x_scales, packed.weight, packed.scale, packed.bias, residual, activation, dtype
    )


@torch.library.register_fake("cvt_kernels::quantize_rows")
@torch.library.register_fake("cvt_kernels::layer_norm_quantize")
@torch.library.register_fake("cvt_kernels::gelu_quantize")
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    values = x.new_empty(x.shape, dtype=torch.int8)
    return values, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


torch.library.register_fake("cvt_kernels::linear_int8_packed", _shape_of)


def linear_int8(call: Record) -> Tensor:
    """Computes ``cvt_kernels.linear_int8`` for checked arguments."""
    x, weight, weight_scale, bias, x_scales, approximate, residual, dtype = call
    activation = "identity" if approximate is None else approximate
    return _run(x, x_scales, weight, weight_scale, bias, residual, activation, dtype)
