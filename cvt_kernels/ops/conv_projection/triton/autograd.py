"""Autograd function, custom operators and backend functions of the projection's Triton kernels.

In eager mode the autograd function is called directly; a registered operator would cost more host time per
call. Under torch.compile the same launchers run behind opaque operators. This file also has the exchange
between the processes of a group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .... import modes, reference
from ....backends import Record
from ....records import ConvBatchNorm
from ...autograd import gradients_again
from ...graph_operators import graph_operator
from ...triton_launch import accumulator_dtype
from .backward import backward_conv, backward_input, backward_sums, weights_of
from .common import Geometry
from .forward import (
    Running,
    batch_statistics,
    output_shapes,
    projection_forward,
    update_running_statistics,
)
from .sliding import MAX_BRANCHES, has_sliding_kernel

# A batch spread over processes ----------------------------------------------------------------------------


class _Synchronized(NamedTuple):
    """A batch spread over the processes of a group, with its values per channel (branches,)."""

    group: Any
    counts: Tensor

    @classmethod
    def merge(
        cls, mean: Tensor, variance: Tensor, counts: list[int], group: Any
    ) -> tuple[_Synchronized, Tensor, Tensor]:
        """Merges every process's share; returns (this, mean, variance) of the whole batch."""
        local = torch.cat([mean, variance, mean.new_tensor(counts)[:, None]], dim=1)
        shares = local.new_empty(dist.get_world_size(group), *local.shape)
        dist.all_gather(list(shares.unbind()), local, group)
        means, variances, count = shares.split([mean.shape[1], mean.shape[1], 1], dim=2)
        total = count.sum(dim=0)
        mean = (means * count).sum(dim=0) / total
        variance = ((variances + (means - mean) ** 2) * count).sum(dim=0) / total
        return cls(group, total[:, 0]), mean, variance

    def mean_of(self, sums: Tensor) -> Tensor:
        """Returns the mean over the whole batch, from this process's sums (branches, 2, C)."""
        total = sums.clone()
        dist.all_reduce(total, group=self.group)
        return total / self.counts[:, None, None]


# Autograd -------------------------------------------------------------------------------------------------


class _ConvProjection(torch.autograd.Function):
    """The projection as an autograd function.

    It takes (x, geometry, batch_stats, synchronized, *weights, *gammas, *betas, *means, *variances), with one
    tensor per convolution in each of the last five.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, geometry: Geometry, batch_stats: bool, synchronized: _Synchronized | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Saves x, the parameters and the statistics."""
        weights, gammas, betas, means, variances = _divided(tensors, 5)
        ctx.settings = geometry, batch_stats, synchronized
        ctx.save_for_backward(x, *weights, *gammas, *betas, *means, *variances)
        return _project(x, geometry, weights, gammas, betas, means, variances)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients, in three passes over the tokens."""
        x, *tensors = ctx.saved_tensors
        weights, gammas, _, means, variances = _divided(tensors, 5)
        geometry, batch_stats, synchronized = ctx.settings
        if torch.is_grad_enabled():
            formula = functools.partial(_formula, *ctx.settings)
            dx, *others = gradients_again(formula, (x, *tensors), *dys)
            return dx, None, None, None, *others
        dx, *dparameters = _gradients(
            x, geometry, weights, gammas, means, variances, dys, batch_stats, synchronized
        )
        return dx, None, None, None, *dparameters, *[None] * (2 * len(weights))


def _formula(
    geometry: Geometry, batch_stats: bool, synchronized: _Synchronized | None, x: Tensor, *tensors: Any
) -> tuple[Tensor, ...]:
    """Computes a call by PyTorch's operators; ``tensors`` are those of the autograd function."""
    group = None if synchronized is None else synchronized.group
    convs = [
        ConvBatchNorm(
            weight, gamma, beta, None if batch_stats else mean, None if batch_stats else variance,
            stride=stride, padding=padding, dilation=dilation, eps=eps, process_group=group,
        )
        for weight, gamma, beta, mean, variance, (_, stride, padding, dilation), eps in zip(
            *_divided(tensors, 5), geometry.convolutions, geometry.epss, strict=True
        )
    ]  # fmt: skip
    return reference.conv_projection(x, geometry.grid, convs, training=batch_stats)


def _gradients(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    means: Sequence[Tensor], variances: Sequence[Tensor], dys: Sequence[Tensor],
    batch_stats: bool, synchronized: _Synchronized | None = None,
) -> list[Tensor]:  # fmt: skip
    """Returns [dx, *dweights, *dgammas, *dbetas]; parameters' gradients are this process's share."""
    dys = [dy.contiguous() for dy in dys]
    sums = backward_sums(x, geometry, weights, means, variances, dys)
    all_sums, counts = sums, [float(n) for n in _counts(x.shape[0], geometry)]
    if batch_stats and synchronized is not None:
        all_sums, counts = synchronized.mean_of(sums), [1.0] * len(weights)
    dx, dweights = _of_convolutions(
        x, geometry, weights, gammas, means, variances, dys, all_sums if batch_stats else None, counts
    )
    own = weights_of(dweights, geometry.kernel_sizes)
    dgammas = [total.to(gamma.dtype) for total, gamma in zip(sums[:, 1].unbind(), gammas, strict=True)]
    dbetas = [total.to(gamma.dtype) for total, gamma in zip(sums[:, 0].unbind(), gammas, strict=True)]
    return [dx, *own, *dgammas, *dbetas]


def _project(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    betas: Sequence[Tensor], means: Sequence[Tensor], variances: Sequence[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(projection_forward(x, geometry, weights, gammas, betas, means, variances))


def _of_convolutions(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], gammas: Sequence[Tensor],
    means: Sequence[Tensor], variances: Sequence[Tensor], dys: Sequence[Tensor], sums: Tensor | None,
    counts: Sequence[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of x, and of all weights in one tensor."""
    dconvs, dweights = backward_conv(
        x, geometry, weights, gammas, means, variances, dys, sums, counts
    )  # fmt: skip
    return backward_input(geometry, weights, dconvs, dys), dweights


def _counts(batch: int, geometry: Geometry) -> list[int]:
    """Returns the values per channel of every branch's output."""
    return [batch * height * width for height, width in geometry.output_grids]


def _divided(sequence: Sequence[Any], parts: int) -> list[Sequence[Any]]:
    """Returns equally long parts of a sequence."""
    size = len(sequence) // parts
    return [sequence[i * size : (i + 1) * size] for i in range(parts)]


# Operators of torch.compile -------------------------------------------------------------------------------


def _pack_geometry(geometry: Geometry) -> list[int]:
    """Returns a geometry as the integers that an operator takes; its epsilons are a separate argument."""
    grid, *columns, _ = geometry
    return [*grid, *(number for column in columns for number in column)]


def _unpack_geometry(numbers: Sequence[int], epss: Sequence[float]) -> Geometry:
    height, width, *columns = numbers
    kernel_sizes, strides, paddings, dilations = map(tuple, _divided(columns, 4))
    return Geometry((height, width), kernel_sizes, strides, paddings, dilations, tuple(epss))


#: What changes the running statistics writes to.
_WRITTEN = "running_means", "running_vars", "tracked"


def _shapes(x, weights, gammas, betas, means, variances, geometry, epss, batch_stats):
    return [x.new_empty(*shape) for shape in output_shapes(x, _unpack_geometry(geometry, epss))]


@graph_operator("conv_projection", _shapes)
def _forward_op(
    x: Tensor, weights: list[Tensor], gammas: list[Tensor], betas: list[Tensor], means: list[Tensor],
    variances: list[Tensor], geometry: list[int], epss: list[float], batch_stats: bool,
) -> list[Tensor]:  # fmt: skip
    return [*_project(x, _unpack_geometry(geometry, epss), weights, gammas, betas, means, variances)]


def _gradient_shapes(x, weights, gammas, means, variances, dys, geometry, epss, batch_stats):
    dweights = weights[0].new_empty(sum(weight.numel() for weight in weights))
    sums = x.new_empty(len(weights), 2, x.shape[2], dtype=accumulator_dtype(x))
    return [x.new_empty(x.shape), dweights, sums]


@graph_operator("conv_projection_backward", _gradient_shapes)
def _backward_op(
    x: Tensor, weights: list[Tensor], gammas: list[Tensor], means: list[Tensor], variances: list[Tensor],
    dys: list[Tensor], geometry: list[int], epss: list[float], batch_stats: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of x, of all weights, and of all norms: outputs may not share memory."""
    unpacked = _unpack_geometry(geometry, epss)
    dys = [dy.contiguous() for dy in dys]
    sums = backward_sums(x, unpacked, weights, means, variances, dys)
    counts = [float(n) for n in _counts(x.shape[0], unpacked)]
    used = sums if batch_stats else None
    return [*_of_convolutions(x, unpacked, weights, gammas, means, variances, dys, used, counts), sums]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, gammas, _, means, variances, geometry, epss, batch_stats = inputs
    ctx.save_for_backward(x, *weights, *gammas, *means, *variances)
    ctx.constants = geometry, epss, batch_stats


def _backward_of_op(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    x, *tensors = ctx.saved_tensors
    weights, gammas, means, variances = map(list, _divided(tensors, 4))
    dx, dweights, sums = _backward_op(x, weights, gammas, means, variances, list(dys), *ctx.constants)
    own = weights_of(dweights, [weight.shape[-1] for weight in weights])
    dbetas, dgammas = (
        [total.to(gamma.dtype) for total, gamma in zip(each.unbind(), gammas, strict=True)]
        for each in sums.unbind(1)
    )
    none = [None] * len(weights)
    return dx, own, dgammas, dbetas, none, none, None, None, None


torch.library.register_autograd("cvt_kernels::conv_projection", _backward_of_op, setup_context=_setup_context)


def _statistics_like(x, weights, *_):
    like = x.new_empty(len(weights), x.shape[2], dtype=accumulator_dtype(x))
    return like, torch.empty_like(like)


@graph_operator("conv_projection_statistics", _statistics_like, mutates=_WRITTEN)
def _statistics_op(
    x: Tensor, weights: list[Tensor], geometry: list[int], epss: list[float], rows: list[int],
    running_means: list[Tensor], running_vars: list[Tensor], tracked: list[Tensor], momenta: list[float],
    corrections: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    running = Running(rows, running_means, running_vars, tracked, momenta, corrections)
    return batch_statistics(x, _unpack_geometry(geometry, epss), weights, running)


@graph_operator("update_running_statistics", mutates=_WRITTEN)
def _update_op(
    mean: Tensor, variance: Tensor, rows: list[int], running_means: list[Tensor], running_vars: list[Tensor],
    tracked: list[Tensor], momenta: list[float], corrections: list[float],
) -> None:  # fmt: skip
    running = Running(rows, running_means, running_vars, tracked, momenta, corrections)
    update_running_statistics(mean, variance, running)


# The backend ----------------------------------------------------------------------------------------------


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, grid, convs, training = call
    if any(type(conv) is not ConvBatchNorm for conv in convs):
        return "a branch is a sum of convolutions"
    if not has_sliding_kernel(Geometry.of(grid, convs)):
        return f"serves at most {MAX_BRANCHES} convolutions of 3×3 with padding 1 and stride 1 or 2"
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
    if any(conv.process_group is not convs[0].process_group for conv in convs):
        return "the branches synchronize over different process groups"
    if convs[0].process_group is not None and torch.compiler.is_compiling():
        return "torch.compile does not trace the exchange between processes"
    return None


def conv_projection(call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_projection`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it
    computes in autocast's dtype, as a convolution does.
    """
    x, grid, convs, training = call
    geometry = Geometry.of(grid, convs)
    weights = [conv.weight for conv in convs]
    if (dtype := modes.autocast_dtype(x)) is not None:
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    gammas = [conv.bn_weight if conv.bn_weight is not None else x.new_ones(x.shape[2]) for conv in convs]
    betas = [conv.bn_bias if conv.bn_bias is not None else x.new_zeros(x.shape[2]) for conv in convs]
    weights, gammas, betas = _contiguous(weights), _contiguous(gammas), _contiguous(betas)
    batch_stats, synchronized = training or convs[0].running_mean is None, None
    if batch_stats:
        with torch.no_grad():
            means, variances, synchronized = _statistics(x, geometry, weights, convs, training)
    else:
        means = _contiguous([conv.running_mean for conv in convs])
        variances = _contiguous([conv.running_var for conv in convs])
    if torch.compiler.is_compiling():
        constants = _pack_geometry(geometry), list(geometry.epss)
        return tuple(_forward_op(x, weights, gammas, betas, means, variances, *constants, batch_stats))
    if not modes.wants_gradient(x, *weights, *gammas, *betas):  # an autograd function takes the host long
        return tuple(projection_forward(x, geometry, weights, gammas, betas, means, variances))
    return _ConvProjection.apply(
        x, geometry, batch_stats, synchronized, *weights, *gammas, *betas, *means, *variances
    )


def _contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Returns contiguous tensors; None must not occur."""
    return [tensor.contiguous() for tensor in tensors if tensor is not None]


def _statistics(
    x: Tensor, geometry: Geometry, weights: Sequence[Tensor], convs: Sequence[ConvBatchNorm], training: bool
) -> tuple[list[Tensor], list[Tensor], _Synchronized | None]:
    """Returns (means, variances, synchronization); in training it updates the running statistics.

    They are updated by the launch that merges the batch's, unless momentum is None or processes exchange
    theirs first.
    """
    compiling, group = torch.compiler.is_compiling(), convs[0].process_group if training else None
    counts, synchronized = _counts(x.shape[0], geometry), None
    running = _running(convs, counts) if training else Running()
    merges = group is None and min(running.momenta, default=0.0) >= 0
    given = running if merges else Running()
    if compiling:
        constants = _pack_geometry(geometry), list(geometry.epss)
        mean, variance = _statistics_op(x, list(weights), *constants, *map(list, given))
    else:
        mean, variance = batch_statistics(x, geometry, weights, given)
    unbiased = variance
    if group is not None:
        synchronized, mean, variance = _Synchronized.merge(mean, variance, counts, group)
        total = synchronized.counts[:, None]
        unbiased = variance * (total / (total - 1))
        running = running._replace(corrections=[1.0] * len(running.rows))
    if running.rows and not merges:
        if compiling:
            _update_op(mean, unbiased, *map(list, running))
        else:
            update_running_statistics(mean, unbiased, running)
    if running.rows and not compiling:  # operators tell autograd by themselves
        torch.autograd.graph.increment_version((*running.means, *running.variances))
    return list(mean.unbind()), list(variance.unbind()), synchronized


def _running(convs: Sequence[ConvBatchNorm], counts: Sequence[int]) -> Running:
    """Returns the running statistics of the convolutions that have such."""
    rows = [i for i, conv in enumerate(convs) if conv.running_mean is not None]
    tracking = [convs[i] for i in rows]
    return Running(
        rows,
        [conv.running_mean for conv in tracking if conv.running_mean is not None],
        [conv.running_var for conv in tracking if conv.running_var is not None],
        [_tracked(conv) for conv in tracking],
        [_momentum(conv) for conv in tracking],
        [counts[i] / max(counts[i] - 1, 1) for i in rows],
    )


def _tracked(conv: ConvBatchNorm) -> Tensor:
    """Returns a convolution's ``num_batches_tracked``, or a throwaway one."""
    if conv.num_batches_tracked is not None:
        return conv.num_batches_tracked
    return torch.zeros((), dtype=torch.int64, device=conv.weight.device)


def _momentum(conv: ConvBatchNorm) -> float:
    """Returns a convolution's momentum; −1 for the average over all batches."""
    if conv.momentum is None:
        return -1.0 if conv.num_batches_tracked is not None else 0.0
    return float(conv.momentum)
