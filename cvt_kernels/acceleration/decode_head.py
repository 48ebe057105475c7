"""SegFormer's decode head without its concatenated maps: the same sum, in the order that costs least.

Upstream projects the map of each stage to D channels, resizes it to the size of the first, concatenates all
and fuses them by a 1×1 convolution. Both layers act on channels only, and resizing on pixels only, so they
commute: here each map goes through its part of the fusion at its own size, and is resized and added then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checks
from ..ops.linear import linear
from .fused import as_map, drop
from .parts import class_name
from .watching import is_watched

#: The 1×1 convolutions whose work is done without calling them.
POINTWISE_LAYERS = "linear_fuse", "classifier"


def decode(head: Any, projections: Any, states: Sequence[Tensor]) -> Any:
    """Computes the logits (B, labels, H, W) of the maps (B, C, H, W) of all stages, the largest first."""
    if len(states) != len(projections) or any(state.ndim != 4 for state in states):
        return NotImplemented
    linears = [projection.proj for projection in projections]
    folds = _can_fold(head.batch_norm)
    parts, bias = _parts_of_fusion(head, linears, folds)
    size = states[0].shape[2:]
    total: Any = None
    # The largest is last, since its product can be added to the others in place.
    for state, layer, part in reversed(list(zip(states, linears, parts, strict=True))):
        tokens = _tokens_of(state)
        if state.shape[2:] == size:
            total = _through_both(tokens, layer.weight, part, bias, total)
        else:
            image = as_map(_through_both(tokens, layer.weight, part, bias), state.shape[2:])
            image = F.interpolate(image, size=size, mode="bilinear", align_corners=False)
            total = _tokens_of(image) if total is None else _add(total, _tokens_of(image))
        bias = None  # of the first, since resizing keeps constants
    return _classify(head, as_map(total, size), folds)


def _classify(head: Any, image: Tensor, folds: bool) -> Tensor:
    """Computes what follows the fusion: BatchNorm unless it is in there, activation, dropout, classifier."""
    if not folds:
        # For a batch of one upstream's map has its channels first, in which order PyTorch's sums over pixels
        # have smaller errors.
        image = head.batch_norm(image.contiguous() if image.shape[0] == 1 else image)
    activation = head.activation
    # A map that BatchNorm has returned may be kept by its hooks.
    in_place = folds and type(activation) is nn.ReLU and not is_watched(activation)
    image = image.relu_() if in_place and not checks.wants_gradient(image) else activation(image)
    layer = head.classifier
    logits = linear(_tokens_of(drop(head.dropout, image)), layer.weight.flatten(1), layer.bias)
    return as_map(logits, image.shape[2:])


def _can_fold(norm: Any) -> bool:
    """Says whether a BatchNorm is only a factor and a summand of every channel now."""
    has_statistics = norm.running_mean is not None and norm.running_var is not None
    return type(norm) is nn.BatchNorm2d and not norm.training and has_statistics and not is_watched(norm)


def _parts_of_fusion(head: Any, linears: list[Any], folds: bool) -> tuple[list[Tensor], Tensor | None]:
    """Returns the part (D, D) of the fusion for each stage, and the bias of the sum, in float32 at least.

    With ``folds`` the BatchNorm after it is in them.
    """
    weight, norm = head.linear_fuse.weight, head.batch_norm
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with checks.without_autocast(weight):
        fusion, shift = weight.flatten(1).to(dtype), None
        if folds:
            scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
            scale = scale if norm.weight is None else scale * norm.weight.to(dtype)
            fusion, shift = fusion * scale[:, None], -scale * norm.running_mean.to(dtype)
            shift = shift if norm.bias is None else shift + norm.bias.to(dtype)
        # Upstream concatenates the last stage first.
        parts = list(fusion.chunk(len(linears), dim=1))[::-1]
        for layer, part in zip(linears, parts, strict=True):
            if layer.bias is not None:
                bias = part @ layer.bias.to(dtype)
                shift = bias if shift is None else shift + bias
    return parts, shift


def _through_both(
    tokens: Tensor, weight: Tensor, part: Tensor, bias: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Applies a projection and a part of the fusion: as one layer, or one after the other if that is less.

    The result is added to ``total``, if there is one.
    """
    dtype = weight.dtype
    if tokens.shape[0] * tokens.shape[1] > weight.shape[1]:
        with checks.without_autocast(tokens):
            part = part @ weight.to(part.dtype)
    else:
        tokens = linear(tokens, weight)
    part, bias = part.to(dtype), None if bias is None else bias.to(dtype)
    if bias is None and total is not None and _can_multiply_into(total, tokens, part):
        return total.flatten(0, 1).addmm_(tokens.flatten(0, 1), part.t()).view_as(total)
    tokens = linear(tokens, part, bias)
    return tokens if total is None else _add(total, tokens)


def _can_multiply_into(total: Tensor, tokens: Tensor, part: Tensor) -> bool:
    same = total.dtype == tokens.dtype == part.dtype and not checks.autocast_enabled(total)
    return same and total.is_contiguous() and checks.may_change(total, tokens, part)


def _add(total: Tensor, tokens: Tensor) -> Tensor:
    # Of the first nobody else has a reference.
    return total.add_(tokens) if checks.may_change(total, tokens) else total + tokens


def _tokens_of(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(1, 2)


# Reasons --------------------------------------------------------------------------------------------------


def why_head_unsupported(head: Any, projections: Any) -> str | None:
    """Says why a decode head is not the sum that is computed here; None if it is."""
    for name in POINTWISE_LAYERS:
        conv = head._modules[name]
        geometry = conv.kernel_size, conv.stride, conv.padding, conv.groups
        if geometry != ((1, 1), (1, 1), (0, 0), 1):
            return f"{name} is not a 1×1 convolution"
    if head.linear_fuse.bias is not None:
        return "linear_fuse has a bias"
    if type(projections) is not nn.ModuleList:
        return f"the projections are a {class_name(type(projections))}, expected a ModuleList"
    return None
