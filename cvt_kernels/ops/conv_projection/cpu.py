"""Depthwise convolution + BatchNorm of tokens on a CPU by the compiled extension (csrc).

One pass over x computes all branches; the summands of a branch are added before they are rounded. Sums and
statistics are in float32 (float64 for float64) until y is rounded. In training a pass before computes the
statistics of the batch. Only x, the parameters and the statistics are saved.

Backward recomputes the convolution in two passes, the first for dβ and dγ, the second for the gradients of x
and of the weights (the formula is in ``triton/backward.py``). Every summand gets the gradient of its sum.

Sums are taken image by image in a fixed order: the same bits every time, whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import machine, modes, reference
from ...backends import Record
from ...records import ConvBatchNorm, flattened, summands, unflattened
from ..autograd import gradients_again
from . import momentum_of_batch

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MAX_KERNEL = 16  # kMaxKernel in csrc/conv_projection/cpu_loops.h
_MAX_PADDING = 64  # more is for rows of many more zeros than tokens
_MAX_SUMMANDS = 4  # kMaxSummands, likewise


class _Conv(NamedTuple):
    """The numbers of a convolution, whether its statistics are constants, and the length of its sum."""

    stride: int
    padding: int
    dilation: int
    eps: float
    is_constant: bool
    summands: int


class _Settings(NamedTuple):
    """The numbers of a call."""

    height: int
    width: int
    convs: list[_Conv]

    def formula(self, x: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        """Computes a call by PyTorch's operators; ``tensors`` are those of the autograd function."""
        count, convs = len(self.convs), list[ConvBatchNorm]()
        for i, own in enumerate(self.convs):
            scale, shift, *statistics = tensors[count + 4 * i : count + 4 * i + 4]
            mean, variance = statistics if own.is_constant else (None, None)
            settings: dict[str, Any] = {name: getattr(own, name) for name in own._fields[:4]}
            convs.append(ConvBatchNorm(tensors[i], scale, shift, mean, variance, **settings))
        branches = unflattened(convs, [own.summands for own in self.convs])
        return reference.conv_projection(x, (self.height, self.width), branches, training=False)


def _geometry(convs: Sequence[_Conv]) -> list[int]:
    """Returns three numbers for each convolution, as the operators take them."""
    return [n for own in convs for n in own[:3]]


def _takes_statistics(conv: ConvBatchNorm, training: bool) -> bool:
    """Returns whether a branch normalizes by the statistics of the batch."""
    return training or conv.running_mean is None


class _ConvProjection(torch.autograd.Function):
    """Autograd function of the projection; ``norms`` has scale, shift, mean and variance per convolution.

    Unless mean and variance are constants, they are batch statistics, and gradients flow through them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: _Settings, *tensors: Any) -> tuple[Tensor, ...]:
        ctx.settings = settings
        ctx.save_for_backward(x, *tensors)
        ctx.set_materialize_grads(False)  # an output that is not used costs nothing
        count = len(settings.convs)
        return tuple(_infer(x, settings, tensors[:count], tensors[count:]))

    @staticmethod
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx, *others = gradients_again(ctx.settings.formula, (x, *tensors), *douts)
            return dx, None, *others
        height, width, convs = ctx.settings
        count = len(convs)
        weights, norms = tensors[:count], [tensors[i : i + 4] for i in range(count, 5 * count, 4)]
        lengths = [own.summands for own in convs if own.summands]
        of_convs = [dout for dout, length in zip(douts, lengths, strict=True) for _ in range(length)]
        used = [i for i, dout in enumerate(of_convs) if dout is not None]
        own = [convs[i] for i in used]
        dx, *gradients = _ops.conv_projection_gradients.default(
            [of_convs[i] for i in used], x, height, width, [weights[i] for i in used],
            [t for i in used for t in (norms[i][0], *norms[i][2:])], _geometry(own), [c.eps for c in own],
            [int(c.is_constant) for c in own], [c.summands for c in own],
        )  # fmt: skip
        dweights: list[Tensor | None] = [None] * count
        dnorms: list[Tensor | None] = [None] * (4 * count)
        for i, dweight, dscale, dshift in zip(used, *gradients, strict=True):
            scale, shift = norms[i][:2]
            dweights[i] = dweight
            dnorms[4 * i : 4 * i + 2] = None if scale is None else dscale, None if shift is None else dshift
        return dx, None, *dweights, *dnorms


def _infer(
    x: Tensor, settings: _Settings, weights: Sequence[Tensor], norms: Sequence[Tensor | None]
) -> list[Tensor]:
    height, width, convs = settings
    eps, summands = [own.eps for own in convs], [own.summands for own in convs]
    geometry = _geometry(convs)
    return _ops.conv_projection_inference.default(x, height, width, weights, norms, geometry, eps, summands)


# Shapes for torch.compile
@torch.library.register_fake("cvt_kernels::conv_projection_inference")
def _(
    x: Tensor, height: int, width: int, weights: list[Tensor], norms: list[Tensor | None],
    geometry: list[int], eps: list[float], summands: Sequence[int] = (),
) -> list[Tensor]:  # fmt: skip
    class_tokens = x.shape[1] - height * width
    outs = []
    for i, weight in enumerate(weights):
        if summands and not summands[i]:
            continue
        stride, padding, dilation = geometry[3 * i : 3 * i + 3]
        reach = dilation * (weight.shape[3] - 1) + 1
        rows, columns = ((n + 2 * padding - reach) // stride + 1 for n in (height, width))
        outs.append(x.new_empty(x.shape[0], class_tokens + rows * columns, x.shape[2]))
    return outs


@torch.library.register_fake("cvt_kernels::conv_projection_moments")
def _(
    x: Tensor, height: int, width: int, weights: list[Tensor], geometry: list[int]
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    dtype = _accumulator(x)
    means, variances = ([x.new_empty(x.shape[2], dtype=dtype) for _ in weights] for _ in range(2))
    return means, variances


@torch.library.register_fake("cvt_kernels::conv_projection_gradients")
def _(
    douts: list[Tensor], x: Tensor, height: int, width: int, weights: list[Tensor],
    norms: list[Tensor | None], geometry: list[int], eps: list[float], constant: list[int],
    summands: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    dweights = [weight.new_empty(weight.shape) for weight in weights]
    dscales, dshifts = ([x.new_empty(x.shape[2], dtype=_accumulator(x)) for _ in weights] for _ in range(2))
    return x.new_empty(x.shape), dweights, dscales, dshifts


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, _, convs, training = call
    longest = max(len(summands(branch)) for branch in convs)
    if longest > _MAX_SUMMANDS:
        return f"sums up to {_MAX_SUMMANDS} convolutions, not {longest}"
    if any(len({conv.stride for conv in summands(branch)}) > 1 for branch in convs):
        return "sums convolutions of one stride, not of different ones"
    convs, _ = flattened(convs)
    kernel = max(conv.weight.shape[3] for conv in convs)
    if kernel > _MAX_KERNEL:
        return f"has kernels of up to {_MAX_KERNEL}×{_MAX_KERNEL}, not {kernel}×{kernel}"
    padding = max(conv.padding for conv in convs)
    if padding > _MAX_PADDING:
        return f"has paddings of up to {_MAX_PADDING}, not {padding}"
    if training and any(conv.process_group is not None for conv in convs):
        return "does not take the statistics of a batch over processes"
    if x.shape[0] == 0 and (_wants_gradient(x, convs) or any(_takes_statistics(c, training) for c in convs)):
        return "the batch is empty"
    return None


def _wants_gradient(x: Tensor, convs: Sequence[ConvBatchNorm]) -> bool:
    if not (torch.is_grad_enabled() or modes.forward_mode_enabled()):
        return False  # before nine tensors become arguments
    return modes.wants_gradient(x, *[t for conv in convs for t in conv[:3]])


def conv_projection(call: Record) -> tuple[Tensor, ...]:
    """Computes ``cvt_kernels.conv_projection`` for checked arguments.

    ``x`` is read in place if its channels are contiguous; otherwise it is copied first. Under autocast it is
    computed in autocast's dtype, as convolutions are.
    """
    x, grid, convs, training = call
    convs, lengths = flattened(convs)
    wants_gradient = _wants_gradient(x, convs)
    numbers = [
        _Conv(*conv[6:9], conv.eps, not _takes_statistics(conv, training), length)
        for conv, length in zip(convs, lengths, strict=True)
    ]
    settings = _Settings(grid[0], grid[1], numbers)
    weights = [conv.weight for conv in convs]
    if (dtype := modes.autocast_dtype(x)) is not None:
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    if not wants_gradient and all(own.is_constant for own in numbers):
        return tuple(_infer(x, settings, weights, [t for conv in convs for t in conv[1:5]]))
    norms = _norms(x, settings, weights, convs)
    if training:
        _update_running_statistics(x, grid, convs, norms)
    if wants_gradient:
        return _ConvProjection.apply(x, settings, *weights, *norms)
    return tuple(_infer(x, settings, weights, norms))


def _norms(
    x: Tensor, settings: _Settings, weights: Sequence[Tensor], convs: Sequence[ConvBatchNorm]
) -> list[Tensor | None]:
    """Returns scale, shift, mean and variance of each convolution, in the accumulators' dtype."""
    taking = [i for i, own in enumerate(settings.convs) if not own.is_constant]
    statistics: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    if taking:
        with torch.no_grad():
            geometry, of_taking = _geometry([settings.convs[i] for i in taking]), [weights[i] for i in taking]
            means, variances = _ops.conv_projection_moments.default(x, *settings[:2], of_taking, geometry)
        statistics = dict(zip(taking, zip(means, variances, strict=True), strict=True))
    norms: list[Tensor | None] = []
    for i, conv in enumerate(convs):
        mean, variance = statistics.get(i, (conv.running_mean, conv.running_var))
        norms += (conv.bn_weight, conv.bn_bias, mean, variance)
    return [None if tensor is None else tensor.to(_accumulator(x)) for tensor in norms]


@torch.no_grad()
def _update_running_statistics(
    x: Tensor, grid: tuple[int, int], convs: Sequence[ConvBatchNorm], norms: Sequence[Tensor | None]
) -> None:
    """Updates the running statistics by the batch statistics, as BatchNorm does."""
    for i, conv in enumerate(convs):
        if conv.running_mean is None or conv.running_var is None:
            continue
        momentum = momentum_of_batch(conv) or 0.0
        height, width = conv.output_grid(grid)
        values = x.shape[0] * height * width
        _move(conv.running_mean, norms[4 * i + 2], momentum)
        _move(conv.running_var, norms[4 * i + 3], momentum, values / (values - 1))


def _move(running: Tensor, batch: Tensor | None, momentum: float, correction: float = 1.0) -> None:
    assert batch is not None
    running.copy_(torch.lerp(running.to(batch.dtype), batch * correction, momentum))
