"""The decode head of SegFormer (models/segformer of transformers), by the public operators."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import choose, modes
from ..changes import is_plain
from ..ops import weight_cache
from ..ops.linear import linear
from ..ops.segmentation_head import segmentation_head
from ..records import written_of
from .blocks import class_name, is_square
from .forward import as_map, drop, tokens_of
from .watching import is_watched

#: The 1×1 convolutions whose work is done without calling them.
POINTWISE_LAYERS = "linear_fuse", "classifier"


def decode(head: Any, projections: Any, states: Sequence[Tensor]) -> Any:
    """Computes the logits (B, labels, H, W) of the maps (B, C, H, W) of all stages, the largest first."""
    if len(states) != len(projections) or any(state.ndim != 4 for state in states):
        return NotImplemented
    linears = [projection.proj for projection in projections]
    folds = _can_fold(head.batch_norm)
    if folds and _is_served(head, tensors := _tensors_of(head, linears), states):
        return _serve(head, linears, tensors, states)
    parts, bias = _parts_of_fusion(head, linears, folds)
    size = states[0].shape[2:]
    total: Any = None
    # The largest is last, since its product can be added to the others in place.
    for state, layer, part in reversed(list(zip(states, linears, parts, strict=True))):
        tokens = tokens_of(state)
        if modes.is_known(state.shape[2] == size[0]) and modes.is_known(state.shape[3] == size[1]):
            total = _through_both(tokens, layer.weight, part, bias, total)
        else:
            image = as_map(_through_both(tokens, layer.weight, part, bias), state.shape[2:])
            # Autocast would write float32. The fusion's result has 16 bits upstream too.
            with modes.without_autocast(image):
                image = F.interpolate(image, size=size, mode="bilinear", align_corners=False)
            total = tokens_of(image) if total is None else _add(total, tokens_of(image))
        bias = None  # of the first, since resizing keeps constants
    return _classify(head, as_map(total, size), folds)


def _is_served(head: Any, tensors: list[Any], states: Sequence[Tensor]) -> bool:
    """Returns whether one operator serves the call: without gradients, and with nothing watched."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or modes.is_transformed():
        return False
    activation, dropout, layer, first = head.activation, head.dropout, head.classifier, states[0]
    plain = type(activation) is nn.ReLU and type(dropout) is nn.Dropout and not dropout.training
    if not plain or is_watched(activation) or is_watched(dropout):
        return False
    all_tensors = *states, *tensors, layer.weight, layer.bias
    if {tensor.dtype for tensor in all_tensors if tensor is not None} != {first.dtype}:
        return False
    ours = choose.may_be_ours("segmentation_head", first.device.type, gradient=False)
    return ours and weight_cache.why_unpackable(*all_tensors) is None


def _serve(head: Any, linears: list[Any], tensors: list[Any], states: Sequence[Tensor]) -> Tensor:
    fusion, *others = tensors
    fold = functools.partial(_fold, head, linears)
    key = "decode head", head.batch_norm.eps
    others += written_of(head.batch_norm)
    (weight, *weights), bias = weight_cache.packed(fusion, key, fold, others)
    pairs, layer = tuple(zip(states[1:], weights, strict=True)), head.classifier
    logits = segmentation_head(states[0], weight, bias, pairs, layer.weight.flatten(1), layer.bias)
    return as_map(logits, states[0].shape[2:])


@torch.inference_mode(False)  # copies made in inference mode could not be used outside it
@torch.no_grad()
def _fold(head: Any, linears: list[Any]) -> tuple[list[Tensor], Tensor | None]:
    """Returns the weight for each map that all layers up to the sum make, and its bias."""
    parts, bias = _parts_of_fusion(head, linears, True)
    dtype = head.linear_fuse.weight.dtype
    products = (part @ layer.weight.to(part.dtype) for layer, part in zip(linears, parts, strict=True))
    return [product.to(dtype) for product in products], None if bias is None else bias.to(dtype)


def _tensors_of(head: Any, linears: list[Any]) -> list[Any]:
    norm = head.batch_norm
    own = head.linear_fuse.weight, norm.running_mean, norm.running_var, norm.weight, norm.bias
    return [*own, *(tensor for layer in linears for tensor in (layer.weight, layer.bias))]


def _classify(head: Any, image: Tensor, folds: bool) -> Tensor:
    """Computes what follows the fusion: BatchNorm unless it is in there, activation, dropout, classifier."""
    if not folds:
        # For a batch of one upstream's map has its channels first, in which order PyTorch's sums over pixels
        # have smaller errors.
        image = head.batch_norm(image.contiguous() if modes.is_known(image.shape[0] == 1) else image)
    activation = head.activation
    # A map that BatchNorm has returned may be kept by its hooks.
    in_place = folds and type(activation) is nn.ReLU and not is_watched(activation)
    image = image.relu_() if in_place and not modes.wants_gradient(image) else activation(image)
    layer = head.classifier
    logits = linear(tokens_of(drop(head.dropout, image)), layer.weight.flatten(1), layer.bias)
    return as_map(logits, image.shape[2:])


def _can_fold(norm: Any) -> bool:
    """Returns whether a BatchNorm is only a factor and a summand of every channel now."""
    if type(norm) is not nn.BatchNorm2d or norm.training or is_watched(norm):
        return False
    if not is_plain(norm.weight) or not is_plain(norm.bias):
        return False
    return norm.running_mean is not None and norm.running_var is not None


def _parts_of_fusion(head: Any, linears: list[Any], folds: bool) -> tuple[list[Tensor], Tensor | None]:
    """Returns the part (D, D) of the fusion for each stage, and the bias of the sum, in float32 at least.

    With ``folds`` the BatchNorm after it is in them.
    """
    weight, norm = head.linear_fuse.weight, head.batch_norm
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with modes.without_autocast(weight):
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
    """Adds a projection and a part of the fusion to ``total``: as one layer, or as two if that is less.

    One layer is right for sizes that are symbolic.
    """
    dtype = weight.dtype
    if not modes.is_known(tokens.shape[0] * tokens.shape[1] <= weight.shape[1]):
        with modes.without_autocast(tokens):
            part = part @ weight.to(part.dtype)
    else:
        tokens = linear(tokens, weight)
    part, bias = part.to(dtype), None if bias is None else bias.to(dtype)
    if bias is None and total is not None and _can_multiply_into(total, tokens, part):
        return total.flatten(0, 1).addmm_(tokens.flatten(0, 1), part.t()).view_as(total)
    tokens = linear(tokens, part, bias)
    return tokens if total is None else _add(total, tokens)


def _can_multiply_into(total: Tensor, tokens: Tensor, part: Tensor) -> bool:
    same = total.dtype == tokens.dtype == part.dtype and not modes.autocast_enabled(total)
    return same and total.is_contiguous() and modes.may_change(total, tokens, part)


def _add(total: Tensor, tokens: Tensor) -> Tensor:
    # Of the first nobody else has a reference.
    return total.add_(tokens) if modes.may_change(total, tokens) else total + tokens


# Reasons --------------------------------------------------------------------------------------------------


def why_head_unsupported(head: Any, projections: Any) -> str | None:
    """Returns why a decode head is not the sum that is computed here, or None."""
    for name in POINTWISE_LAYERS:
        if not is_square(head._modules[name], 1):
            return f"{name} is not a 1×1 convolution"
    if head.linear_fuse.bias is not None:
        return "linear_fuse has a bias"
    if type(projections) is not nn.ModuleList:
        return f"the projections are a {class_name(type(projections))}, expected a ModuleList"
    return None
