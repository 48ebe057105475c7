"""GLPN's depth: the last two upsamplings of its decoder and its head as one operator, in evaluation.

While a model runs, its decoder knows that only the head reads its last map, leaves out the two upsamplings,
and hands the map to the head. Where our kernels may serve, the fusion of a stage's map is one operator too,
with the upsampling of the map before. Called by itself, or with hooks on one of them, each runs its own
forward.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import backends, checks, dispatch, modes
from ..classes import is_fused, original_class
from ..ops import weight_cache
from ..ops.conv_embedding import needs_channels_first
from ..ops.depth_head import depth_head
from ..ops.linear import linear
from ..ops.selective_fusion import selective_fusion
from ..records import NormalizedConv
from .blocks import HUGGING_FACE, BlockEntry, BypassedParts, Kinds, Unsupported, is_named
from .fused import as_map, tokens_of
from .watching import Examined, Watch, is_watched, known_of


class _Handing(threading.local):
    """The decoder that may hand its map over, and the head that gets it, of this thread's model."""

    modules: tuple[Any, ...] = ()


_handing = _Handing()


def is_handing(module: Any) -> bool:
    """Returns whether a decoder may hand over its last map as it is, or a head may get such a one."""
    return any(each is module for each in _handing.modules)


def _estimate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a model whose decoder may hand its map to the head."""
    if not _is_served(model):
        return NotImplemented
    before, _handing.modules = _handing.modules, (model.decoder, model.head)
    try:
        return original_class(type(model)).forward(model, *args, **kwargs)
    finally:
        _handing.modules = before


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
    ours = dispatch.may_be_ours("depth_head", first.device.type, gradient=False)
    return ours and weight_cache.why_unpackable(*tensors) is None


def _decode(decoder: Any, hidden_states: Sequence[Tensor]) -> Any:
    """Computes the maps of all stages, the last one not upsampled."""
    if torch.compiler.is_compiling():
        return NotImplemented
    if needs_channels_first(hidden_states[-1], next(decoder.parameters(), None)):
        # Upstream's maps have them first, in which order PyTorch's sums over pixels have smaller errors.
        hidden_states = [state.contiguous() for state in hidden_states]
        return original_class(type(decoder)).forward(decoder, hidden_states)
    if not is_handing(decoder):
        return NotImplemented
    *stages, last = decoder.stages
    if len(hidden_states) != len(stages) + 1:
        return NotImplemented
    if served := _stages_of(decoder, hidden_states):
        return _fuse(served, hidden_states)
    states: list[Any] = []
    for hidden, stage in zip(hidden_states[:0:-1], stages, strict=True):
        states.append(stage(hidden, states[-1] if states else None))
    return [*states, last.fusion(last.convolution(hidden_states[0]), states[-1])]


def _compute_depth(head: Any, states: Sequence[Tensor]) -> Any:
    """Computes the depth of every pixel of a map that the decoder has handed over.

    Such a map is as large as the map of the stage before, or, if that was not upsampled either, twice as
    high; an upsampled one is four times as high. That does not depend on whether a recording of the decoder
    ran.
    """
    if torch.compiler.is_compiling() or not is_handing(head):
        return NotImplemented
    if states[-1].shape[2] > 2 * states[-2].shape[2]:
        return NotImplemented
    conv, _, last = head.head
    depth, weight = head.config.max_depth, conv.weight
    # Kernels of CPUs pack weights by themselves.
    if weight.device.type != "cpu" or "triton" in backends.requested_backends():
        weight = weight_cache.packed(weight, "taps first", functools.partial(_with_taps_first, weight))
    return depth_head(states[-1], weight, conv.bias, last.weight, last.bias, depth)


@torch.inference_mode(False)  # copies made in inference mode could not be used outside it
@torch.no_grad()
def _with_taps_first(weight: Tensor) -> Tensor:
    """Returns a copy of a weight (D, C, 3, 3) that lies in memory as the operator's product reads it."""
    return weight.permute(2, 3, 0, 1).clone(memory_format=torch.contiguous_format).permute(2, 3, 0, 1)


# The fusion of a stage's map with the one before ----------------------------------------------------------


class _Stage(NamedTuple):
    """The layers of a stage of a decoder.

    Attributes:
        projection: Weight and bias of the 1×1 convolution; None for none.
        fusion: What ``selective_fusion`` takes besides the maps; empty for the first stage.
    """

    projection: tuple[Tensor, Tensor | None] | None
    fusion: tuple[Any, ...]


class _ExaminedStages(Examined):
    """The stages of a decoder.

    Attributes:
        stages: Their layers, the one of the smallest map first; empty if they are not as upstream has written
            them, or a hook watches them.
        tensors: All tensors of the layers.
    """

    attribute = "_cvt_kernels_stages"

    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder, Watch(decoder, list(itertools.islice(decoder.modules(), 1, None))))
        stages = decoder.stages
        as_written = all(map(_is_as_written, stages)) and stages[0].fusion is None
        as_written = as_written and all(_is_fusion_as_written(stage.fusion) for stage in stages[1:])
        is_known = as_written and self.watch.identity() is not None
        self.stages = [*map(_layers_of, stages)] if is_known else []
        self.tensors = checks.tensors_of(self.stages)


def _stages_of(decoder: Any, states: Sequence[Tensor]) -> Sequence[_Stage]:
    """Returns the layers of a decoder's stages if our kernels may serve the fusion of these maps now."""
    first = states[-1]
    if not dispatch.may_be_ours("selective_fusion", first.device.type, gradient=False):
        return ()
    known = known_of(decoder, _ExaminedStages)
    if known is None:
        known = _ExaminedStages(decoder)
        if not torch._C._len_torch_dispatch_stack():  # a mode may have replaced parameters
            vars(decoder)[known.attribute] = known
    if known.watch.is_training():  # a BatchNorm may normalize by the batch
        return ()
    sizes = [state.shape[2:] for state in reversed(states)]
    if any((2 * small[0], 2 * small[1]) != tuple(large) for small, large in itertools.pairwise(sizes)):
        return ()
    used = *states, *known.tensors
    served = {tensor.dtype for tensor in used} == {first.dtype} and weight_cache.why_unpackable(*used) is None
    return known.stages if served else ()


def _is_as_written(stage: Any) -> bool:
    """Returns whether a stage's own steps are upstream's: a 1×1 convolution or nothing, and an upsampling."""
    conv, upsampling = stage.convolution, stage.upsample
    if type(conv) is nn.Conv2d:
        geometry = conv.kernel_size, conv.stride, conv.padding, conv.groups
        if geometry != ((1, 1), (1, 1), (0, 0), 1):
            return False
    elif type(conv) is not nn.Identity:
        return False
    if not is_named(type(stage), ("GLPNDecoderStage",)) or type(upsampling) is not nn.Upsample:
        return False
    doubles = _settings_of(upsampling) == _DOUBLING
    return doubles and not any(map(is_watched, (stage, conv, upsampling)))


def _is_fusion_as_written(fusion: Any) -> bool:
    if fusion is None or not is_named(type(fusion), ("GLPNSelectiveFeatureFusion",)):
        return False
    pairs, last = (fusion.convolutional_layer1, fusion.convolutional_layer2), fusion.convolutional_layer3
    for pair in pairs:
        kinds = [*map(type, pair)] if type(pair) is nn.Sequential else []
        if kinds != [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]:
            return False
        if pair[1].running_mean is None or pair[1].running_var is None:
            return False
    if type(last) is not nn.Conv2d or type(fusion.sigmoid) is not nn.Sigmoid:
        return False
    if _why_not_3x3(*(pair[0] for pair in pairs), last) is not None or last.out_channels != 2:
        return False
    return not any(map(is_watched, fusion.modules()))


def _layers_of(stage: Any) -> _Stage:
    conv, fusion = stage.convolution, stage.fusion
    projection = (conv.weight, conv.bias) if type(conv) is nn.Conv2d else None
    if fusion is None:
        return _Stage(projection, ())
    last = fusion.convolutional_layer3
    convs = map(_normalized, (fusion.convolutional_layer1, fusion.convolutional_layer2))
    return _Stage(projection, (*convs, last.weight, last.bias))


def _normalized(pair: Any) -> NormalizedConv:
    conv, bn, _ = pair
    statistics = bn.running_mean, bn.running_var
    return NormalizedConv(conv.weight, conv.bias, bn.weight, bn.bias, *statistics, bn.eps)


def _fuse(stages: Sequence[_Stage], states: Sequence[Tensor]) -> list[Tensor]:
    """Computes the maps of all stages, none of them upsampled."""
    maps: list[Tensor] = []
    for x, stage in zip(reversed(states), stages, strict=True):
        if stage.projection is not None:
            weight, bias = stage.projection
            x = as_map(linear(tokens_of(x), weight.flatten(1), bias), x.shape[2:])
        if stage.fusion:
            x = as_map(selective_fusion(x, maps[-1], *stage.fusion), x.shape[2:])
        maps.append(x)
    return maps


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
    if (reason := _why_not_3x3(*convs)) is not None:
        return reason
    return None if convs[-1].out_channels == 1 else "the last convolution has more than one channel"


def _why_not_3x3(*convs: Any) -> str | None:
    for conv in convs:
        geometry = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
        if geometry != ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros"):
            return "a convolution is not one of 3×3 with stride 1, padded by one zero on each side"
    return None


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
