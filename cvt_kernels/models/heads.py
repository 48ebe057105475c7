"""The heads: SegFormer's decode head by the public operators, and GLPN's depth.

Of GLPN the last two upsamplings of its decoder and its head are one operator, in evaluation. While a model
runs, its decoder knows that only the head reads its last map, leaves out the two upsamplings, and hands the
map to the head. Called by itself, or with hooks on one of them, each runs its own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import choose, modes
from ..changes import is_plain
from ..classes import is_fused, original_class
from ..ops import weight_cache
from ..ops.conv_embedding import needs_channels_first
from ..ops.depth_head import depth_head
from ..ops.linear import linear
from ..ops.segmentation_head import segmentation_head
from ..records import written_of
from .blocks import (
    HUGGING_FACE,
    NO_SQUARE,
    BlockEntry,
    BypassedParts,
    Kinds,
    Unsupported,
    class_name,
    is_square,
)
from .forward import as_map, drop, tokens_of
from .watching import Told, is_watched


def _is_one_operator(name: str, tensors: Sequence[Tensor | None]) -> bool:
    """Returns whether an operator may serve a call with these tensors: untraced, and without gradients."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or modes.is_transformed():
        return False
    present = [tensor for tensor in tensors if tensor is not None]
    if len({tensor.dtype for tensor in present}) > 1:
        return False
    ours = choose.may_be_ours(name, present[0].device.type, gradient=False)
    return ours and weight_cache.why_unpackable(*present) is None


# SegFormer's decode head ----------------------------------------------------------------------------------

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
    """Returns whether one operator serves the call, with nothing watched."""
    activation, dropout, layer = head.activation, head.dropout, head.classifier
    plain = type(activation) is nn.ReLU and type(dropout) is nn.Dropout and not dropout.training
    if not plain or is_watched(activation) or is_watched(dropout):
        return False
    return _is_one_operator("segmentation_head", (*states, *tensors, layer.weight, layer.bias))


def _serve(head: Any, linears: list[Any], tensors: list[Any], states: Sequence[Tensor]) -> Tensor:
    fusion, *others = tensors
    fold = functools.partial(_fold, head, linears)
    key = "decode head", head.batch_norm.eps
    others += written_of(head.batch_norm)
    (weight, *weights), bias = weight_cache.packed(fusion, key, fold, others)
    pairs, layer = tuple(zip(states[1:], weights, strict=True)), head.classifier
    logits = segmentation_head(states[0], weight, bias, pairs, layer.weight.flatten(1), layer.bias)
    return as_map(logits, states[0].shape[2:])


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
    if total is None or bias is not None or not modes.may_change(total, tokens, part):
        tokens = linear(tokens, part, bias)
        return tokens if total is None else _add(total, tokens)
    same = total.dtype == tokens.dtype == part.dtype and not modes.autocast_enabled(total)
    if not (same and total.is_contiguous()):
        return _add(total, linear(tokens, part))
    return total.flatten(0, 1).addmm_(tokens.flatten(0, 1), part.t()).view_as(total)


def _add(total: Tensor, tokens: Tensor) -> Tensor:
    # Of the first nobody else has a reference.
    return total.add_(tokens) if modes.may_change(total, tokens) else total + tokens


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


# GLPN's depth ---------------------------------------------------------------------------------------------

#: The decoder that may hand its map over, and the head that gets it, of the model that runs.
_handing = Told()


def _estimate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a model whose decoder may hand its map to the head."""
    if torch.compiler.is_compiling() or model.training:
        return NotImplemented
    decoder, head = model.decoder, model.head
    if torch.is_grad_enabled() or modes.forward_mode_enabled():
        return NotImplemented
    if not is_fused(decoder) or not is_fused(head) or len(decoder.stages) < 2:
        return NotImplemented
    conv, _, last = head.head
    is_last_read = head.config.head_in_index in (-1, len(decoder.stages) - 1)
    tensors = conv.weight, conv.bias, last.weight, last.bias
    if not is_last_read or not _is_one_operator("depth_head", tensors):
        return NotImplemented
    with _handing.within(decoder, head):
        return original_class(type(model)).forward(model, *args, **kwargs)


def _decode(decoder: Any, hidden_states: Sequence[Tensor]) -> Any:
    """Computes the maps of all stages, the last one not upsampled."""
    if torch.compiler.is_compiling():
        return NotImplemented
    if needs_channels_first(hidden_states[-1], next(decoder.parameters(), None)):
        # Upstream's maps have them first, in which order PyTorch's sums over pixels have smaller errors.
        hidden_states = [state.contiguous() for state in hidden_states]
        return original_class(type(decoder)).forward(decoder, hidden_states)
    if decoder not in _handing:
        return NotImplemented
    *stages, last = decoder.stages
    if len(hidden_states) != len(stages) + 1:
        return NotImplemented
    states: list[Any] = []
    for hidden, stage in zip(hidden_states[:0:-1], stages, strict=True):
        states.append(stage(hidden, states[-1] if states else None))
    return [*states, last.fusion(last.convolution(hidden_states[0]), states[-1])]


def _compute_depth(head: Any, states: Sequence[Tensor]) -> Any:
    """Computes the depth of every pixel of a map that the decoder has handed over.

    Such a map is as large as the map of the stage before, or, if that was not upsampled either, twice as
    high; an upsampled one is four times as high.
    """
    if torch.compiler.is_compiling() or head not in _handing:
        return NotImplemented
    if states[-1].shape[2] > 2 * states[-2].shape[2]:
        return NotImplemented
    conv, _, last = head.head
    return depth_head(states[-1], conv.weight, conv.bias, last.weight, last.bias, head.config.max_depth)


def _parts_of_decoder(decoder: Any) -> BypassedParts:
    if type(decoder.stages) is not nn.ModuleList or len(decoder.stages) == 0:
        raise Unsupported("its stages are not a list")
    stage = decoder.stages[-1]
    upsamplings = stage.upsample, decoder.final_upsample
    kinds: Kinds = ("transformers.models.glpn.modeling_glpn.GLPNDecoderStage",)
    modules: list[tuple[Any, Kinds]] = [(decoder.stages, (nn.ModuleList,)), (stage, kinds)]
    modules += [(upsampling, (nn.Upsample,)) for upsampling in upsamplings]
    settings = {
        (each.size, each.scale_factor, each.mode, bool(each.align_corners), bool(each.recompute_scale_factor))
        for each in upsamplings
        if isinstance(each, nn.Upsample)
    }
    is_doubling = settings == {(None, 2.0, "bilinear", False, False)}
    return BypassedParts(modules, None if is_doubling else "upsampling is not bilinear by two")


def _parts_of_depth_head(head: Any) -> BypassedParts:
    if type(head.head) is not nn.Sequential or len(head.head) != 3:
        raise Unsupported("its head is not two convolutions with ReLU between them")
    conv, activation, last = head.head
    modules: list[tuple[Any, Kinds]] = [(head.head, (nn.Sequential,)), (activation, (nn.ReLU,))]
    modules += [(each, (nn.Conv2d,)) for each in (conv, last)]
    reason = None
    if not is_square(conv, 3) or not is_square(last, 3):
        reason = f"a convolution {NO_SQUARE}"
    elif last.out_channels != 1:
        reason = "the last convolution has more than one channel"
    return BypassedParts(modules, reason)


def _parts_of_model(model: Any) -> BypassedParts:
    parts = _parts_of_decoder(model.decoder), _parts_of_depth_head(model.head)
    modules: list[tuple[Any, Kinds]] = [
        (model.decoder, ("GLPNDecoder",)),
        (model.head, ("GLPNDepthEstimationHead",)),
    ]
    modules += [each for part in parts for each in part.modules]
    return BypassedParts(modules, next((part.reason for part in parts if part.reason), None))


#: The entries of GLPN's model, decoder and head.
DEPTH_ENTRIES = (
    BlockEntry(
        *(HUGGING_FACE, "GLPNForDepthEstimation", _parts_of_model),
        ("pixel_values", "labels", "output_attentions", "output_hidden_states", "return_dict"),
        frozenset(("glpn", "decoder", "head")),
        forward=_estimate,
        may_take=("kwargs",),
    ),
    BlockEntry(
        *(HUGGING_FACE, "GLPNDecoder", _parts_of_decoder, ("hidden_states",)),
        frozenset(("stages", "final_upsample")),
        forward=_decode,
    ),
    BlockEntry(
        *(HUGGING_FACE, "GLPNDepthEstimationHead", _parts_of_depth_head, ("hidden_states",)),
        frozenset(("head",)),
        forward=_compute_depth,
    ),
)
