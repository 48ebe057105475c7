"""Depthwise convolution + BatchNorm projection of tokens: y = BatchNorm(conv(x)) for Q, K and V at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import backends, checks, dispatch, reference
from ...declaration import facts_of, facts_of_tensor, operator
from ...reference import Branch, ConvBatchNorm, flattened, summands
from ..registration import images_within, register_native, register_triton, size_class

_SHAPE, _WEIGHT = "(batch, tokens, channels)", "(channels, 1, k, k)"

_COUNTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SAMPLE = 2**18  # elements


def _signature(
    x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], *, training: bool
) -> tuple[Any, ...]:
    flat = flattened(convs)[0]
    # To list them takes longer than all else here.
    parameters = (
        [t for conv in flat for t in (conv.weight, conv.bn_weight, conv.bn_bias)]
        if torch.is_grad_enabled()
        else ()
    )
    statistics = training or flat[0].running_mean is None
    scale = flat[0].bn_weight
    mixed = scale is not None and scale.dtype != x.dtype
    gradient = checks.wants_gradient(x, *parameters)
    return gradient, x.shape, grid, x.is_contiguous(), statistics, mixed, geometry_of(convs)


def geometry_of(convs: Sequence[Branch]) -> tuple[tuple[int, ...], ...]:
    """Returns kernel size, stride, padding and dilation of every branch, those of its summands in a row."""
    return tuple(
        [
            (branch.weight.size(3), branch.stride, branch.padding, branch.dilation)
            if isinstance(branch, ConvBatchNorm)
            else sum(geometry_of(branch), ())
            for branch in convs
        ]
    )


def shape_class(
    gradient: bool,
    shape: Sequence[int],
    grid: tuple[int, int],
    contiguous: bool,
    statistics: bool,
    mixed: bool,
    geometry: Sequence[tuple[int, ...]],
) -> str:
    """Returns the words for all calls that share a verdict, from their signature."""
    batch, tokens, channels = shape
    pixels = grid[0] * grid[1]
    class_token = "" if tokens == pixels else " and a class token"
    branches = " ".join(map(_words, geometry))
    words = f"{size_class(batch)} images of {size_class(pixels)} pixels{class_token}, {channels} channels"
    words += f", kernel/stride/padding/dilation {branches}"
    words += (", batch statistics" if statistics else "") + (", BatchNorm of another dtype" if mixed else "")
    return words + ("" if contiguous else ", strided")


def _words(geometry: tuple[int, ...]) -> str:
    """Returns the words for a branch, from its geometry."""
    summed = (geometry[i : i + 4] for i in range(0, len(geometry), 4))
    return "+".join(f"{k}x{k}/{s}/{p}/{d}" for k, s, p, d in summed)


def _sample(
    factor: int, x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], *, training: bool
) -> tuple[Any, dict[str, Any]]:
    # At least two images: one alone may have a single value per channel.
    images = max(2, images_within(_SAMPLE * factor, x.shape[0], x.numel()))
    alone = [tuple(conv._replace(process_group=None) for conv in summands(branch)) for branch in convs]
    return (x[:images], grid, tuple(map(_branch, alone))), {"training": training}


def _branch(parts: tuple[ConvBatchNorm, ...]) -> Branch:
    return parts[0] if len(parts) == 1 else parts


register_triton("conv_projection", __name__)
register_native("conv_projection", __name__)
backends.describe("conv_projection", backends.Operator(_signature, shape_class, _sample))


_facts_of_conv = facts_of(ConvBatchNorm, "num_batches_tracked", "process_group")


def facts_of_convs(convs: tuple[Branch, ...], grad: bool, training: bool = False) -> tuple[Any, ...]:
    """Returns the part that branches have of a key; TypeError where nothing is remembered of them."""
    if convs.__class__ is not tuple:
        raise TypeError
    facts = tuple([_facts_of_branch(branch, grad) for branch in convs])
    return (facts, _facts_of_training(convs)) if training else facts


def _facts_of_branch(branch: Branch, grad: bool) -> tuple[Any, ...]:
    if branch.__class__ is tuple:
        return tuple([_facts_of_conv(conv, grad) for conv in branch])
    return _facts_of_conv(branch, grad)


def _facts_of_training(convs: tuple[Branch, ...]) -> tuple[Any, ...]:
    """Returns what training reads besides: counts of batches, and whether branches share statistics."""
    flat = flattened(convs)[0]
    if any(conv.process_group is not None for conv in flat):  # the processes agree on what serves
        raise TypeError
    counts = tuple([facts_of_tensor(conv.num_batches_tracked, False) for conv in flat])
    return len({id(conv.running_mean) for conv in flat}), counts


def _with_tuple(call: Any) -> Any:
    return call._replace(convs=checks.as_tuple("convs", call.convs, "a sequence of ConvBatchNorm"))


def _instead(call: Any) -> Callable[..., Any] | None:
    """Returns what serves a call whose batch is spread over processes; None for others."""
    groups = (conv.process_group for conv in flattened(call.convs)[0])
    group = next((group for group in groups if group is not None), None)
    if not call.training or group is None:
        return None
    shared = call.x.shape[2], geometry_of(call.convs)
    return functools.partial(dispatch.call_in_group, group, shared, "conv_projection")


@operator(
    arguments=_with_tuple,
    check=lambda call: check_arguments(*call),
    instead=_instead,
    facts={"convs": (facts_of_convs, "training")},
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
            the sum of their results, which must have the same grid. The class token is in it once.
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
    return reference.conv_projection(x, grid, convs, training=training)


def check_arguments(x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], training: bool) -> None:
    """Raises TypeError or ValueError for wrong arguments of a projection."""
    checks.check_float_tensor("x", x, _SHAPE)
    checks.check_rank("x", x, 3, _SHAPE)
    checks.check_flag("training", training)
    checks.check_grid("grid", grid)
    height, width = grid
    if height < 1 or width < 1 or x.shape[1] - height * width not in (0, 1):
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
    checks.check_float_tensor(f"{name}.weight", conv.weight, _WEIGHT)
    checks.check_rank(f"{name}.weight", conv.weight, 4, _WEIGHT)
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
    if out_height < 1 or out_width < 1:
        raise ValueError(f"{name}: output of the {grid[0]}×{grid[1]} grid is empty")
    synchronizes = training and conv.process_group is not None
    if synchronizes and x.shape[0] == 0:
        raise ValueError("x: got an empty batch, expected at least one image to synchronize statistics over")
    batch_statistics = training or conv.running_mean is None
    if batch_statistics and not synchronizes and x.shape[0] * out_height * out_width == 1:
        raise ValueError(f"{name}: expected more than 1 value per channel when training")


def _check_conv(name: str, conv: ConvBatchNorm, x: Tensor) -> None:
    checks.check_kind(name, conv, ConvBatchNorm)
    channels = x.shape[2]
    weight = conv.weight
    checks.check_float_tensor(f"{name}.weight", weight, _WEIGHT)
    checks.check_rank(f"{name}.weight", weight, 4, _WEIGHT)
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
    """Raises TypeError or ValueError for a wrong process group or count, which training alone reads.

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
