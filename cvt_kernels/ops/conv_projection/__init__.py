"""Depthwise convolution + BatchNorm projection of tokens: y = BatchNorm(conv(x)) for Q, K and V at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes
from ...backends import Record
from ...declaration import extension_kernels, operator, triton_kernels
from ...records import Branch, ConvBatchNorm, flattened, summands, unflattened
from ..cost_classes import first_images, images_within, size_class

_SHAPE, _WEIGHT = "(batch, tokens, channels)", "(channels, 1, k, k)"

_COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SAMPLE = 2**18  # elements


def geometry_of(convs: Sequence[Branch]) -> tuple[tuple[int, ...], ...]:
    """Returns kernel size, stride, padding and dilation of every branch, flat over its summands."""
    return tuple(
        [
            (branch.weight.size(3), branch.stride, branch.padding, branch.dilation)
            if isinstance(branch, ConvBatchNorm)
            else sum(geometry_of(branch), ())
            for branch in convs
        ]
    )


def cost_class_of_projection(call: Record) -> str:
    """Returns the words for a call's kind that describe x, grid and convs."""
    batch, tokens, channels = call.x.shape
    first = flattened(call.convs)[0][0]
    pixels = call.grid[0] * call.grid[1]
    words = f"{size_class(batch)} images of {size_class(pixels)} pixels"
    words += "" if tokens == pixels else " and a class token"
    words += f", {channels} channels, kernel/stride/padding/dilation "
    words += " ".join(map(_words, geometry_of(call.convs)))
    takes_statistics = getattr(call, "training", False) or first.running_mean is None
    words += ", batch statistics" if takes_statistics else ""
    is_mixed = first.bn_weight is not None and first.bn_weight.dtype != call.x.dtype
    words += ", BatchNorm of another dtype" if is_mixed else ""
    return words + ("" if call.x.is_contiguous() else ", strided")


def _words(geometry: tuple[int, ...]) -> str:
    """Returns the words for a branch, from its geometry."""
    summed = (geometry[i : i + 4] for i in range(0, len(geometry), 4))
    return "+".join(f"{k}x{k}/{s}/{p}/{d}" for k, s, p, d in summed)


def sample_of_projection(factor: int, call: Record) -> Record:
    """Returns a call of fewer images, without process groups."""
    # At least two images: one alone may have a single value per channel.
    images = max(2, images_within(_SAMPLE * factor, call.x.shape[0], call.x.numel()))
    convs, lengths = flattened(call.convs)
    alone = unflattened([conv._replace(process_group=None) for conv in convs], lengths)
    return first_images(call, images, "x")._replace(convs=alone)


def _number_of_statistics(call: Record) -> int:
    """Returns in training how many branches do not share their running statistics with another."""
    return len({id(conv.running_mean) for conv in flattened(call.convs)[0]}) if call.training is True else 0


@operator(
    backends={"triton": triton_kernels("triton.autograd"), "cpu": extension_kernels("cpu")},
    cost_class=cost_class_of_projection,
    sample=sample_of_projection,
    sequences={"convs": "a sequence of ConvBatchNorm"},
    check=lambda call: check_arguments(*call),
    key_also=_number_of_statistics,
)
def conv_projection(
    x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], *, training: bool
) -> tuple[Tensor, ...]:
    """Computes BatchNorm(depthwise_conv(x)) for each of ``convs``, on tokens.

    The convolutional projection of CvT (Wu et al. 2021, section 3.2) before its linear layers; upstream
    ``Attention.forward_conv`` in Microsoft's ``cls_cvt.py``.

    Args:
        x: Tokens ``(B, T, C)``; float16, bfloat16, float32 or float64. ``T`` is ``H·W``, or ``H·W + 1`` if
            token 0 is a class token, which is copied to every output.
        grid: ``(H, W)`` of the spatial tokens, which lie in row-major order.
        convs: One branch per output (Q, K and V in CvT). A branch that is a tuple of several convolutions is
            the sum of their results, which must have the same grid; the class token counts once.
        training: Normalize by the statistics of the batch and update the running statistics in place,
            exactly as ``nn.BatchNorm2d`` does (``nn.SyncBatchNorm``, for a branch with a process group;
            every process must then take the same backend); otherwise normalize by the running statistics.

    Returns:
        One contiguous ``(B, Hᵢ·Wᵢ (+ 1), C)`` per branch, ``(Hᵢ, Wᵢ)`` being ``convs[i].output_grid(grid)``.

    Raises:
        TypeError: An argument of the wrong type or dtype. BatchNorm's tensors may all be float32 beside an
            ``x`` of half precision; under autocast dtypes may differ as they may for PyTorch's operators.
        ValueError: A wrong shape or device, an invalid stride, padding or dilation, an empty output, summands
            of different grids, or training with a single value per channel. Nothing has been updated then.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    height, width = grid
    tokens, channels = x.shape[1], modes.plain_size(x.shape[2])
    class_token, spatial = x.split([tokens - height * width, height * width], dim=1)
    # In this order: for B = 1, the strides that transpose and unflatten would leave make the CPU's
    # batch_norm compute wrong gradients in evaluation (seen in torch 2.13).
    image = spatial.unflatten(1, (height, width)).permute(0, 3, 1, 2)  # (B, C, H, W), channels last in memory
    outputs = []
    for branch in convs:
        maps = []
        for conv in summands(branch):
            y = F.conv2d(image, conv.weight, None, conv.stride, conv.padding, conv.dilation, groups=channels)
            maps.append(_batch_norm(y, conv, training))
        y = functools.reduce(torch.add, maps).permute(0, 2, 3, 1).flatten(1, 2)
        if tokens > height * width:
            outputs.append(torch.cat([class_token.to(y.dtype), y], dim=1))  # the dtype of autocast for all
        else:
            outputs.append(y.contiguous())
    return tuple(outputs)


def _batch_norm(y: Tensor, conv: ConvBatchNorm, training: bool) -> Tensor:
    """Computes ``nn.BatchNorm2d.forward`` on the tensors of ``conv``."""
    tracked = conv.running_mean is not None
    momentum = momentum_of_batch(conv) if training and tracked else conv.momentum
    if modes.is_transformed():
        y = y.contiguous()  # within vmap, cuDNN's BatchNorm cannot ask for channels last
    if training and conv.process_group is not None:
        return _synchronized_batch_norm(y, conv, momentum)
    return F.batch_norm(
        y,
        conv.running_mean,
        conv.running_var,
        conv.bn_weight,
        conv.bn_bias,
        training=training or not tracked,
        momentum=0.0 if momentum is None else momentum,
        eps=conv.eps,
    )


def momentum_of_batch(conv: ConvBatchNorm) -> float | None:
    """Counts a batch of training; returns the weight of its statistics."""
    momentum, count = conv.momentum, conv.num_batches_tracked
    if count is not None:
        count.add_(1)
        momentum = 1.0 / count.item() if momentum is None else momentum
    return momentum


class _SumOverProcesses(torch.autograd.Function):
    """Sum over processes. Every output depends on every input, so the gradients are summed likewise."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the sum, which is equal in every process."""
        ctx.group = group
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients."""
        return _SumOverProcesses.apply(gradient.contiguous(), ctx.group), None


def _synchronized_batch_norm(y: Tensor, conv: ConvBatchNorm, momentum: float | None) -> Tensor:
    """Normalizes this process's share y (B, C, H, W) by the statistics of the whole batch of the group."""
    dtype = y.dtype
    y = y.to(torch.promote_types(dtype, torch.float32))
    group, dims = conv.process_group, (0, 2, 3)
    count = _SumOverProcesses.apply(y.new_tensor(y.numel() // y.shape[1]), group)
    mean = _SumOverProcesses.apply(y.sum(dims), group) / count
    deviation = y - mean[:, None, None]
    variance = _SumOverProcesses.apply((deviation**2).sum(dims), group) / count
    if conv.running_mean is not None and conv.running_var is not None:
        with torch.no_grad():
            for running, batch in (
                (conv.running_mean, mean),
                (conv.running_var, variance * count / (count - 1)),
            ):
                running.copy_(running + (momentum or 0.0) * (batch - running))
    y = deviation * (variance + conv.eps).rsqrt()[:, None, None]
    if conv.bn_weight is not None:
        y = y * conv.bn_weight[:, None, None]
    if conv.bn_bias is not None:
        y = y + conv.bn_bias[:, None, None]
    return y.to(dtype)


# Checks ---------------------------------------------------------------------------------------------------


def check_arguments(x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], training: bool) -> None:
    """Raises TypeError or ValueError for wrong arguments of a projection."""
    checks.check_dimensions("x", x, 3, _SHAPE)
    checks.check_flag("training", training)
    checks.check_grid("grid", grid)
    height, width = grid
    class_tokens = x.shape[1] - height * width
    if any(map(modes.is_known, (height < 1, width < 1, class_tokens < 0, class_tokens > 1))):
        raise ValueError(
            f"grid: got {height}×{width} for {x.shape[1]} tokens, "
            "expected tokens = H·W, or H·W + 1 with a class token"
        )
    if not convs:
        raise ValueError("convs: got none, expected at least one branch")
    for i, branch in enumerate(convs):
        parts: dict[str, Any] = {f"convs[{i}]": branch}
        if type(branch) is tuple:
            parts = {f"convs[{i}][{j}]": conv for j, conv in enumerate(branch)}
        if not parts:
            raise ValueError(f"convs[{i}]: got an empty tuple, expected at least one convolution to sum")
        for name, conv in parts.items():
            _check_branch(name, conv, x, grid, training)
        (first, own), *others = ((name, conv.output_grid(grid)) for name, conv in parts.items())
        for name, other in others:
            if other != own:
                raise ValueError(
                    f"{name}: gives a grid of {other[0]}×{other[1]}, expected that of {first}, "
                    f"{own[0]}×{own[1]}, to sum them"
                )


def check_settings(name: str, conv: ConvBatchNorm) -> None:
    """Raises TypeError or ValueError for a convolution that is wrong whatever the tokens."""
    checks.check_kind(name, conv, ConvBatchNorm)
    checks.check_dimensions(f"{name}.weight", conv.weight, 4, _WEIGHT)
    _check_conv(name, conv, conv.weight.new_empty(0, 0, conv.weight.shape[0]))
    checks.check_steps(f"{name}.", conv.stride, conv.padding, conv.dilation)


def _check_branch(name: str, conv: ConvBatchNorm, x: Tensor, grid: tuple[int, int], training: bool) -> None:
    _check_conv(name, conv, x)
    if training:
        _check_training(name, conv, x)
    kernel = conv.weight.shape[3]
    out_height, out_width = checks.check_geometry(
        f"{name}.", kernel, grid, conv.stride, conv.padding, conv.dilation
    )
    if modes.is_known(out_height < 1) or modes.is_known(out_width < 1):
        raise ValueError(f"{name}: output of the {grid[0]}×{grid[1]} grid is empty")
    synchronizes = training and conv.process_group is not None
    if synchronizes and x.shape[0] == 0:
        raise ValueError("x: got an empty batch, expected at least one image to synchronize statistics over")
    batch_statistics = training or conv.running_mean is None
    is_alone = modes.is_known(x.shape[0] * out_height * out_width == 1)
    if batch_statistics and not synchronizes and is_alone:
        raise ValueError(f"{name}: expected more than 1 value per channel when training")


def _check_conv(name: str, conv: ConvBatchNorm, x: Tensor) -> None:
    checks.check_kind(name, conv, ConvBatchNorm)
    channels = x.shape[2]
    weight = conv.weight
    checks.check_dimensions(f"{name}.weight", weight, 4, _WEIGHT)
    k = weight.shape[3]
    checks.check_shape(f"{name}.weight", weight, (channels, 1, k, k), "(depthwise, square)")
    checks.check_like(f"{name}.weight", weight, "x", x)
    if k < 1:
        raise ValueError(f"{name}.weight: got shape {tuple(weight.shape)}, expected a kernel of at least 1×1")
    _check_batch_norm(name, conv, x)
    if (conv.running_mean is None) != (conv.running_var is None):
        raise ValueError(f"{name}: running_mean and running_var must both be given or both be None")
    checks.check_positive(f"{name}.eps", conv.eps)


def _check_batch_norm(name: str, conv: ConvBatchNorm, x: Tensor) -> None:
    fields = ("bn_weight", "bn_bias", "running_mean", "running_var")
    tensors = [(f"{name}.{field}", getattr(conv, field)) for field in fields]
    tensors = [(field, tensor) for field, tensor in tensors if tensor is not None]
    half = x.dtype in (torch.float16, torch.bfloat16)
    for field, tensor in tensors:
        checks.check_float_tensor(field, tensor, "(channels,)")
        checks.check_shape(field, tensor, (x.shape[2],), "(channels,)")
        checks.check_like(field, tensor, "x", x, also=(torch.float32,) if half else ())
        if tensor.dtype != tensors[0][1].dtype:
            raise TypeError(f"{field}: has dtype {tensor.dtype}, {tensors[0][0]} {tensors[0][1].dtype}")
    if conv.momentum is not None:
        checks.check_number(f"{name}.momentum", conv.momentum, "a number in [0, 1] or None")
        if not 0 <= conv.momentum <= 1:
            raise ValueError(f"{name}.momentum: got {conv.momentum}, expected a number in [0, 1] or None")


def _check_training(name: str, conv: ConvBatchNorm, x: Tensor) -> None:
    """Raises TypeError or ValueError for a wrong process group or batch count, which only training reads.

    The count of batches may be on the CPU beside an x elsewhere.
    """
    group, count = conv.process_group, conv.num_batches_tracked
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name}.process_group: got {type(group).__name__}, expected a ProcessGroup or None")
    if count is None:
        return
    name = f"{name}.num_batches_tracked"
    checks.check_tensor(name, count, "with one integer")
    if count.numel() != 1 or count.dtype not in _COUNTS:
        got = f"{checks.dtype_name(count.dtype)} of shape {tuple(count.shape)}"
        raise TypeError(f"{name}: got {got}, expected an integer scalar")
    if count.device.type not in ("cpu", x.device.type):
        raise ValueError(f"{name}: is on {count.device}, expected {x.device} as x")
