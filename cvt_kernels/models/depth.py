"""GLPN's depth: the last two upsamplings of its decoder and its head as one operator, in evaluation.

While a model runs, its decoder knows that only the head reads its last map, leaves out the two upsamplings,
and hands the map to the head. Called by itself, or with hooks on one of them, each runs its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import choose, modes
from ..classes import is_fused, original_class
from ..ops import weight_cache
from ..ops.conv_embedding import needs_channels_first
from ..ops.depth_head import depth_head
from .blocks import HUGGING_FACE, NO_SQUARE, BlockEntry, BypassedParts, Kinds, Unsupported, is_square
from .told import Told

#: The decoder that may hand its map over, and the head that gets it, of the model that runs.
_handing = Told()


def _estimate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a model whose decoder may hand its map to the head."""
    if not _is_served(model):
        return NotImplemented
    with _handing.within(model.decoder, model.head):
        return original_class(type(model)).forward(model, *args, **kwargs)


def _is_served(model: Any) -> bool:
    """Returns whether one operator may serve a call: without gradients, by kernels of this project."""
    if model.training or torch.is_grad_enabled() or modes.forward_mode_enabled():
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or modes.is_transformed():
        return False
    decoder, head = model.decoder, model.head
    if not is_fused(decoder) or not is_fused(head) or len(decoder.stages) < 2:
        return False
    if head.config.head_in_index not in (-1, len(decoder.stages) - 1):
        return False
    conv, _, last = head.head
    tensors = conv.weight, conv.bias, last.weight, last.bias
    first = conv.weight
    if any(tensor is not None and tensor.dtype != first.dtype for tensor in tensors):
        return False
    ours = choose.may_be_ours("depth_head", first.device.type, gradient=False)
    return ours and weight_cache.why_unpackable(*tensors) is None


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


# Entries --------------------------------------------------------------------------------------------------


def _parts_of_decoder(decoder: Any) -> BypassedParts:
    if type(decoder.stages) is not nn.ModuleList or len(decoder.stages) == 0:
        raise Unsupported("its stages are not a list")
    stage = decoder.stages[-1]
    upsamplings = stage.upsample, decoder.final_upsample
    modules: list[tuple[Any, Kinds]] = [(decoder.stages, (nn.ModuleList,)), (stage, ("GLPNDecoderStage",))]
    modules += [(upsampling, (nn.Upsample,)) for upsampling in upsamplings]
    settings = {_settings_of(each) for each in upsamplings if isinstance(each, nn.Upsample)}
    return BypassedParts(modules, None if settings == {_DOUBLING} else "upsampling is not bilinear by two")


_DOUBLING = None, 2.0, "bilinear", False, False


def _settings_of(each: nn.Upsample) -> tuple[Any, ...]:
    flags = bool(each.align_corners), bool(each.recompute_scale_factor)
    return each.size, each.scale_factor, each.mode, *flags


def _parts_of_head(head: Any) -> BypassedParts:
    if type(head.head) is not nn.Sequential or len(head.head) != 3:
        raise Unsupported("its head is not two convolutions with ReLU between them")
    conv, activation, last = head.head
    modules: list[tuple[Any, Kinds]] = [(head.head, (nn.Sequential,)), (activation, (nn.ReLU,))]
    return BypassedParts([*modules, (conv, (nn.Conv2d,)), (last, (nn.Conv2d,))], _why_unsupported(conv, last))


def _why_unsupported(*convs: Any) -> str | None:
    if not all(is_square(conv, 3) for conv in convs):
        return f"a convolution {NO_SQUARE}"
    return None if convs[-1].out_channels == 1 else "the last convolution has more than one channel"


def _parts_of_model(model: Any) -> BypassedParts:
    parts = _parts_of_decoder(model.decoder), _parts_of_head(model.head)
    modules: list[tuple[Any, Kinds]] = [
        (model.decoder, ("GLPNDecoder",)),
        (model.head, ("GLPNDepthEstimationHead",)),
    ]
    modules += [each for part in parts for each in part.modules]
    return BypassedParts(modules, next((part.reason for part in parts if part.reason), None))


#: The entries of GLPN's model, decoder and head.
ENTRIES = (
    BlockEntry(
        upstream=HUGGING_FACE,
        name="GLPNForDepthEstimation",
        arguments=("pixel_values", "labels", "output_attentions", "output_hidden_states", "return_dict"),
        may_take=("kwargs",),
        children=frozenset(("glpn", "decoder", "head")),
        forward=_estimate,
        parts=_parts_of_model,
    ),
    BlockEntry(
        upstream=HUGGING_FACE,
        name="GLPNDecoder",
        arguments=("hidden_states",),
        children=frozenset(("stages", "final_upsample")),
        forward=_decode,
        parts=_parts_of_decoder,
    ),
    BlockEntry(
        upstream=HUGGING_FACE,
        name="GLPNDepthEstimationHead",
        arguments=("hidden_states",),
        children=frozenset(("head",)),
        forward=_compute_depth,
        parts=_parts_of_head,
    ),
)
