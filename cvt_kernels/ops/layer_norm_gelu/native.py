"""LayerNorm and GELU by the compiled extension (csrc), on CPUs and NVIDIA GPUs.

With x̂ = (h − mean) · rstd, u = x̂ · weight + bias and an activation f, ``out = f(u)``; f is the identity but
for ``layer_norm_gelu``. Backward saves h, mean and rstd (float32; float64 for float64) and no activation:
``g = dout · f'(u)``, ``dbias = Σ g``, ``dweight = Σ g · x̂`` and, with ``g ← g · weight``,
``dh = rstd · (g − mean(g) − x̂ · mean(g · x̂))``. GELU saves its input and bias.

Sums over rows are taken in a fixed order: the same bits every time, whatever the number of threads. Inputs
that are not contiguous are copied first; results are contiguous.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ... import checks, machine

machine.load_extension()
_ops = torch.ops.cvt_kernels


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Applies PyTorch's decorator of the name only where a graph of the gradients is asked for.

    Elsewhere its cost, which small calls feel, is saved.
    """
    checked = once_differentiable(backward)

    @functools.wraps(backward)
    def choose(*args: Any) -> Any:
        return checked(*args) if torch.is_grad_enabled() else backward(*args)

    return choose


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
    ) -> Tensor:
        out, mean, rstd = _ops.layer_norm.default(x, weight, bias, eps, activation)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.activation = activation
        return out

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dout, None), None, None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        h, out, mean, rstd = _ops.add_layer_norm.default(x, residual, weight, bias, eps)
        ctx.save_for_backward(h, weight, bias, mean, rstd)
        ctx.activation = "identity"
        ctx.set_materialize_grads(False)  # often only one of the two outputs is used
        return h, out

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return dh, dh, None, None, None
        dx, dweight, dbias = _gradients(ctx, dout, dh)
        return dx, dx, dweight, dbias, None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return _ops.gelu.default(x, bias, approximate)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = _ops.gelu_backward.default(dout, x, bias, ctx.approximate)
        return dx, None if bias is None else dbias, None


def _gradients(ctx: Any, dout: Tensor, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients of h, weight and bias."""
    h, weight, bias, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = _ops.layer_norm_backward.default(
        dout, dh, h, mean, rstd, weight, bias, ctx.activation
    )
    return dx, None if weight is None else dweight, None if bias is None else dbias


# Shapes for torch.compile, which traces through the functions above ----------------------------------------


def _statistics_like(x: Tensor) -> Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape[:-1], dtype=dtype)


def _gradient_like(x: Tensor, parameter: Tensor | None) -> Tensor:
    return x.new_empty(0) if parameter is None else parameter.new_empty(parameter.shape)


@torch.library.register_fake("cvt_kernels::layer_norm")
def _(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), _statistics_like(x), _statistics_like(x)


@torch.library.register_fake("cvt_kernels::add_layer_norm")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape), _statistics_like(x), _statistics_like(x)


@torch.library.register_fake("cvt_kernels::layer_norm_inference")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("cvt_kernels::add_layer_norm_inference")
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("cvt_kernels::layer_norm_backward")
def _(
    dout: Tensor, dh: Tensor | None, h: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, activation: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return h.new_empty(h.shape), _gradient_like(mean, weight), _gradient_like(mean, bias)


@torch.library.register_fake("cvt_kernels::gelu")
def _(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("cvt_kernels::gelu_backward")
def _(dout: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), _gradient_like(_statistics_like(x), bias)


# The backend: the public functions of the same names, whose checks it relies on ----------------------------
#
# Under autocast the dtypes are those of PyTorch: a sum is promoted, F.gelu keeps what it gets, and so does
# F.layer_norm on the CPU; on a GPU it computes in float32. Where no gradient is wanted the operators are
# called without autograd's bookkeeping, which costs as much as a small call, and without statistics.


def _as_autocast_normalizes(x: Tensor) -> Tensor:
    return x.float() if x.is_cuda and torch.is_autocast_enabled("cuda") else x


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """Computes ``cvt_kernels.layer_norm``."""
    return _normalize(x, weight, bias, eps, "identity")


def layer_norm_gelu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, approximate: str
) -> Tensor:
    """Computes ``cvt_kernels.layer_norm_gelu``."""
    return _normalize(x, weight, bias, eps, approximate)


def _normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str) -> Tensor:
    x = _as_autocast_normalizes(x)
    if checks.wants_gradient(x, weight, bias):
        return _LayerNorm.apply(x, weight, bias, eps, activation)
    return _ops.layer_norm_inference.default(x, weight, bias, eps, activation)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Computes ``cvt_kernels.add_layer_norm``."""
    if x.dtype != residual.dtype:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(dtype), residual.to(dtype)
    if _as_autocast_normalizes(x) is not x:
        h = x + residual
        return h, _normalize(h, weight, bias, eps, "identity")
    if checks.wants_gradient(x, residual, weight, bias):
        return _AddLayerNorm.apply(x, residual, weight, bias, eps)
    return _ops.add_layer_norm_inference.default(x, residual, weight, bias, eps)


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """Computes ``cvt_kernels.gelu``."""
    return _gelu(x, None, approximate)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    """Computes ``cvt_kernels.bias_gelu``."""
    return _gelu(x.to(torch.promote_types(x.dtype, bias.dtype)), bias, approximate)


def _gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    if checks.wants_gradient(x, bias):
        return _Gelu.apply(x, bias, approximate)
    return _ops.gelu.default(x, bias, approximate)
