"""Autograd function and backend functions of the projection's Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ....records import ConvBatchNorm
from ...autograd import gradients_again
from .backward import projection_backward
from .common import Geometry, Parameters
from .forward import batch_statistics, projection_forward
from .sliding import why_not_sliding

#: Grid, strides and epsilons of a call.
_Constants = tuple[list[int], list[int], list[float]]


class _ConvProjection(torch.autograd.Function):
    """The projection as an autograd function.

    It takes (x, constants, batch_stats, *parameters), the flat :class:`Parameters`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, constants: _Constants, batch_stats: bool, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Saves x, the parameters and the statistics."""
        ctx.settings = constants, batch_stats
        ctx.save_for_backward(x, *parameters)
        return tuple(projection_forward(x, *constants, list(parameters)))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients, in three passes over the tokens."""
        x, *parameters = ctx.saved_tensors
        (grid, strides, epss), batch_stats = ctx.settings
        if torch.is_grad_enabled():
            formula = functools.partial(_formula, *ctx.settings)
            dx, *others = gradients_again(formula, (x, *parameters), *dys)
            return dx, None, None, *others
        dx, dweights, sums = projection_backward(
            x, grid, strides, epss, parameters, [dy.contiguous() for dy in dys], batch_stats
        )
        dtypes = [gamma.dtype for gamma in Parameters.divided(parameters).gammas]
        dbetas, dgammas = (
            [total.to(dtype) for total, dtype in zip(each.unbind(), dtypes, strict=True)]
            for each in sums.unbind(1)
        )
        return dx, None, None, *dweights.unbind(), *dgammas, *dbetas, *[None] * (2 * len(dys))


def _formula(constants: _Constants, batch_stats: bool, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
    """Computes a call by PyTorch's operators."""
    (height, width), strides, epss = constants
    convs = [
        ConvBatchNorm(
            weight, gamma, beta, None if batch_stats else mean, None if batch_stats else variance,
            stride=stride, padding=1, eps=eps,
        )
        for weight, gamma, beta, mean, variance, stride, eps in zip(
            *Parameters.divided(list(parameters)), strides, epss, strict=True
        )
    ]  # fmt: skip
    return reference.conv_projection(x, (height, width), convs, training=batch_stats)


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, _, convs, training = call
    if (reason := why_not_sliding(convs)) is not None:
        return reason
    if x.numel() == 0:
        return "the batch is empty"
    if x.shape[1] * x.shape[2] >= 2**31:
        return "one image has 2³¹ elements or more"
    if not training:
        mixed = len({conv.running_mean is None for conv in convs}) > 1
        return "some branches have running statistics and some have none" if mixed else None
    buffers = [id(conv.running_mean) for conv in convs if conv.running_mean is not None]
    if len(buffers) > len(set(buffers)):
        return "two branches share their running statistics"
    updated = (t for conv in convs for t in (conv.running_mean, conv.running_var) if t is not None)
    if not all(t.is_contiguous() for t in updated):
        return "running statistics are not contiguous"
    if any(conv.process_group is not None for conv in convs):
        return "does not take the statistics of a batch over processes"
    if any(conv.momentum is None and conv.num_batches_tracked is not None for conv in convs):
        return "a BatchNorm averages over all batches"
    return None


def conv_projection(call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_projection`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it
    computes in autocast's dtype, as a convolution does.
    """
    x, grid, convs, training = call
    constants = list(grid), [conv.stride for conv in convs], [conv.eps for conv in convs]
    x = x.to(modes.autocast_dtype(x) or x.dtype)
    given = Parameters.of(x, convs)
    batch_stats = training or convs[0].running_mean is None
    if batch_stats:
        running = _running(convs if training else (), x.shape[0], grid)
        with torch.no_grad():
            means, variances = batch_statistics(x, constants[0], constants[1], given.weights, *running)
        given = given._replace(means=list(means.unbind()), variances=list(variances.unbind()))
    parameters = given.flat()
    if not modes.wants_gradient(x, *given.weights, *given.gammas, *given.betas):
        # An autograd function takes the host long.
        return tuple(projection_forward(x, *constants, parameters))
    return _ConvProjection.apply(x, constants, batch_stats, *parameters)


def _running(convs: Sequence[ConvBatchNorm], batch: int, grid: tuple[int, int]) -> tuple[Any, ...]:
    """Returns what :func:`batch_statistics` takes of the convolutions that have running statistics."""
    geometry = Geometry.of(grid, [conv.stride for conv in convs])
    counts = [batch * height * width for height, width in geometry.output_grids]
    rows = [i for i, conv in enumerate(convs) if conv.running_mean is not None]
    tracking = [convs[i] for i in rows]
    return (
        rows,
        [conv.running_mean for conv in tracking if conv.running_mean is not None],
        [conv.running_var for conv in tracking if conv.running_var is not None],
        [_tracked(conv) for conv in tracking],
        [float(conv.momentum or 0.0) for conv in tracking],
        [counts[i] / max(counts[i] - 1, 1) for i in rows],
    )


def _tracked(conv: ConvBatchNorm) -> Tensor:
    """Returns a convolution's ``num_batches_tracked``, or a throwaway one."""
    if conv.num_batches_tracked is not None:
        return conv.num_batches_tracked
    return torch.zeros((), dtype=torch.int64, device=conv.weight.device)
