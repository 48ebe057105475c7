"""LayerNorm and GELU by the compiled extension (csrc), on CPUs and NVIDIA GPUs.

With x̂ = (h − mean) · rstd, u = x̂ · weight + bias and an activation f, ``out = f(u)``; f is the identity but
for ``layer_norm_gelu``. Backward saves h, mean and rstd (float32; float64 for float64), but no activation:
``g = dout · f'(u)``, ``dbias = Σ g``, ``dweight = Σ g · x̂`` and, with ``g ← g · weight``,
``dh = rstd · (g − mean(g) − x̂ · mean(g · x̂))``. GELU saves its input and bias.

On a GPU under autocast, where a float32 stream meets 16-bit branches, LayerNorm reads and writes each tensor
in its own dtype. A shift is added to x in registers, without rounding; where a gradient is required, PyTorch
adds it first.

Sums over rows are taken in a fixed order: the same bits every time, whatever the number of threads. Inputs
that are not contiguous are copied first; results are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import machine, modes, reference
from ...backends import Record, bound_by
from ..autograd import gradients_again

machine.load_extension()
_ops = torch.ops.cvt_kernels
_Tensors = tuple[Tensor, ...]


class _LayerNorm(torch.autograd.Function):
    """Autograd function of h, which is x or x + residual, and of its LayerNorm with an activation.

    Where h is used too, the kernel adds its other gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
        activation: str, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if residual is None:
            h = x
            out, mean, rstd = _ops.layer_norm.default(x, weight, bias, eps, activation, dtype)
        else:
            h, out, mean, rstd = _ops.add_layer_norm.default(x, residual, weight, bias, eps, dtype)
        ctx.save_for_backward(h, weight, bias, mean, rstd)
        ctx.activation, ctx.eps = activation, eps
        ctx.branch_dtype, ctx.differs = None if residual is None else x.dtype, x.dtype != h.dtype
        ctx.set_materialize_grads(False)  # often only one of the two outputs is used
        return h if h is not x else x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            dx, dweight, dbias = dh, None, None
            dbranch = dh if dh is None or ctx.branch_dtype is None else dh.to(ctx.branch_dtype)
        else:  # checkpointing lets saved tensors be read only once, which _gradients does
            dx, dbranch, dweight, dbias = _gradients(ctx, dout, dh, with_dbranch=ctx.differs)
        of_rows = (dx, None) if ctx.branch_dtype is None else (dbranch, dx)
        return *of_rows, dweight, dbias, None, None, None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return _ops.gelu.default(x, bias, approximate)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        if torch.is_grad_enabled():

            def formula(x: Tensor, bias: Tensor | None) -> Tensor:
                return reference.gelu(x if bias is None else x + bias, approximate=ctx.approximate)

            return *gradients_again(formula, (x, bias), dout), None
        dx, dbias = _ops.gelu_backward.default(dout, x, bias, ctx.approximate)
        return dx, None if bias is None else dbias, None


def _gradients(
    ctx: Any, dout: Tensor, dh: Tensor | None, *, with_dbranch: bool = False
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of h, of h in the dtype of ``dout`` if requested, of weight and of bias."""
    h, weight, bias, mean, rstd = ctx.saved_tensors
    if torch.is_grad_enabled():

        def formula(h: Tensor, *parameters: Any) -> tuple[Tensor, Tensor]:
            out = reference.layer_norm(h, *parameters, eps=ctx.eps)
            return h, out if ctx.activation == "identity" else reference.gelu(out, approximate=ctx.activation)

        dx, dweight, dbias = gradients_again(formula, (h, weight, bias), dh, dout)
        return dx, dx if dx is None else dx.to(dout.dtype), dweight, dbias
    dx, dbranch, dweight, dbias = _ops.layer_norm_backward.default(
        dout, dh, h, mean, rstd, weight, bias, ctx.activation, with_dbranch
    )
    return (
        dx,
        dbranch if with_dbranch else dx,
        None if weight is None else dweight,
        None if bias is None else dbias,
    )


# Shapes for torch.compile, which traces through the functions above ----------------------------------------


def _statistics_like(x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[:-1], dtype=dtype)


def _gradient_like(x: Tensor, parameter: Tensor | None) -> Tensor:
    return x.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)


def _normalized_like(x: Tensor, weight: Any, bias: Any, eps: float, activation: str, dtype: Any) -> _Tensors:
    return x.new_empty(x.shape, dtype=dtype), _statistics_like(x), _statistics_like(x)


def _gradients_like(
    dout: Tensor, dh: Any, h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    activation: str, with_dbranch: bool,
) -> _Tensors:  # fmt: skip
    dbranch = dout.new_empty(h.shape if with_dbranch else 0)
    return h.new_empty(h.shape), dbranch, _gradient_like(mean, weight), _gradient_like(mean, bias)


_SHAPES: dict[str, Any] = {
    "layer_norm": _normalized_like,
    "layer_norm_inference": lambda *args: _normalized_like(*args[:6])[0],
    "add_layer_norm": lambda x, h, weight, bias, eps, dtype: (
        h.new_empty(h.shape),
        *_normalized_like(h, weight, bias, eps, "identity", dtype),
    ),
    "add_layer_norm_inference": lambda x, h, weight, bias, eps, dtype: (
        h.new_empty(h.shape),
        h.new_empty(h.shape, dtype=dtype),
    ),
    "layer_norm_backward": _gradients_like,
    "gelu": lambda x, *_: x.new_empty(x.shape),
    "gelu_backward": lambda dout, x, bias, _: (
        x.new_empty(x.shape),
        _gradient_like(_statistics_like(x), bias),
    ),
}
for _name, _shapes in _SHAPES.items():
    torch.library.register_fake(f"cvt_kernels::{_name}", _shapes)


# The backend: the public functions of the same names, for checked arguments -------------------------------
#
# Under autocast the dtypes are PyTorch's, unless the caller names the result's: a sum is promoted, F.gelu
# keeps its input's dtype, and so does F.layer_norm on the CPU; on a GPU it computes in float32. Where no
# gradient is required, the operators are called without autograd's bookkeeping, which costs as much as a
# small call, and without statistics.


def _result_dtype(device: torch.device, rows: torch.dtype, named: torch.dtype | None) -> torch.dtype:
    """Returns the LayerNorm's result dtype for rows of a dtype: the ``named`` one or the default."""
    if rows == torch.float64:
        return rows
    if named is not None:
        return named
    return torch.float32 if device.type == "cuda" and torch.is_autocast_enabled("cuda") else rows


def _bind(call: Record) -> Callable[[Tensor], Tensor]:
    """Binds a LayerNorm of a served stage to its parameters."""
    x, weight, bias, eps, dtype, shift = call
    result = _result_dtype(x.device, x.dtype, dtype)
    arguments = weight, bias, eps, "identity", result, shift, True
    return lambda x: _ops.layer_norm_inference.default(x, *arguments)


@bound_by(_bind)
def layer_norm(call: Record) -> Tensor:
    """Computes ``cvt_kernels.layer_norm``."""
    x, weight, bias, eps, dtype, shift = call
    if shift is not None and modes.wants_gradient(x, weight, bias, shift):
        x, shift = (x + shift).to(x.dtype), None
    return _normalize(x, weight, bias, eps, _result_dtype(x.device, x.dtype, dtype), shift)[1]


def layer_norm_gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.layer_norm_gelu``."""
    x, weight, bias, eps, approximate = call
    x = x.to(_result_dtype(x.device, x.dtype, None))
    return _normalize(x, weight, bias, eps, x.dtype, activation=approximate)[1]


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype,
    shift: Tensor | None = None, activation: str = "identity",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns x and its LayerNorm in a dtype; without a shift where a gradient is wanted."""
    is_written = dtype == x.dtype or (
        x.is_cuda and torch.float32 in (x.dtype, dtype) and dtype != torch.float64
    )
    own = dtype if is_written else x.dtype
    if modes.wants_gradient(x, weight, bias):
        x, out = _LayerNorm.apply(x, None, weight, bias, eps, activation, own)
    else:
        out = _ops.layer_norm_inference.default(x, weight, bias, eps, activation, own, shift)
    return x, out if is_written else out.to(dtype)


def add_layer_norm(call: Record) -> tuple[Tensor, Tensor]:
    """Computes ``cvt_kernels.add_layer_norm``."""
    x, residual, weight, bias, eps, dtype = call
    if residual is None:
        return _normalize(x, weight, bias, eps, _result_dtype(x.device, x.dtype, dtype))
    stream = x.dtype if x.dtype == residual.dtype else torch.promote_types(x.dtype, residual.dtype)
    result = _result_dtype(x.device, stream, dtype)
    # A kernel adds a 16-bit branch to a float32 stream and writes 16 bits.
    if not (x.is_cuda and residual.dtype == torch.float32 and x.dtype == result):
        x, residual = x.to(stream), residual.to(stream)
        if result != stream:
            return _normalize(x + residual, weight, bias, eps, result)
    if modes.wants_gradient(x, residual, weight, bias):
        return _LayerNorm.apply(x, residual, weight, bias, eps, "identity", result)
    return _ops.add_layer_norm_inference.default(x, residual, weight, bias, eps, result)


def gelu(call: Record) -> Tensor:
    """Computes ``cvt_kernels.gelu``."""
    x, bias, approximate = call
    x = x if bias is None else x.to(torch.promote_types(x.dtype, bias.dtype))
    if modes.wants_gradient(x, bias):
        return _Gelu.apply(x, bias, approximate)
    return _ops.gelu.default(x, bias, approximate)
