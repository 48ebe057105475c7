"""Finds the stages and layers that can be served as one, and says why others cannot."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from ..classes import original_class
from ..ops.linear_int8.modules import LinearInt8
from ..records import FROZEN_BATCH_NORMS
from .blocks import (
    GELU_VARIANTS,
    BlockParts,
    ServedEntry,
    StageEntry,
    StageParts,
    block_of,
    class_name,
    is_named,
    why_another_class,
    why_norms_unsupported,
)
from .families import recognize, recognize_stage
from .matching import PLAIN, blocks_in, built_parts, why_another_forward, why_not_now
from .watching import (
    BYPASSED,
    is_only_recorded,
    is_watched,
    patch_of,
    why_must_be_called,
    why_tensors_not_plain,
)

#: The classes whose work a served module does only where it expects them, and the names of upstream's.
_WORKING = tuple(cls for cls in BYPASSED if cls is not nn.Dropout)
_WORKING_NAMES = ("LayerScale", *GELU_VARIANTS)


def find_stages(model: nn.Module) -> list[tuple[str, nn.Module, ServedEntry]]:
    """Returns path, module and entry of every stage and of every layer of a pyramid, freezable or not."""
    found = []
    for path, module in model.named_modules():
        layer = recognize(module, None)
        entry = layer if layer is not None and layer.is_layer else recognize_stage(module)
        if entry is not None:
            found.append((path, module, entry))
    return found


def why_not_freezable(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Returns why a stage or a layer cannot run as one now, or None."""
    reason = why_another_forward(stage, block_of(entry))
    if reason is None and block_of(entry).is_only_served:
        reason = _why_elsewhere(stage)
    if reason is not None:
        return reason
    parts = built_parts(stage, entry)
    if isinstance(parts, str):
        return parts
    blocks = [parts] if isinstance(parts, BlockParts) else parts.blocks
    if any(block.pooling is not None for block in blocks):
        return "its attention is linear, which no operator computes together with the rest of the layer"
    reason = _why_other_modules(stage, entry)
    if reason is None and isinstance(entry, StageEntry):
        reason = entry.why_unsupported(stage)
    return (
        reason
        or (_why_stage_unsupported(parts) if isinstance(parts, StageParts) else _why_layer_unsupported(parts))
        or _why_other_work(stage, parts)
        or _why_tensors_unsupported(stage)
    )


def _why_elsewhere(block: nn.Module) -> str | None:
    if all(parameter.device.type in ("cpu", "meta") for parameter in block.parameters()):
        return None
    return "is served on a CPU only, not on a GPU"


def _why_other_modules(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Returns which module within a stage is not what upstream has there, or None."""
    for path, block, block_entry in blocks_in(stage):
        reason = why_another_forward(block, block_entry) or why_not_now(block, block_entry)
        if reason is not None:
            return f"{path} is not as upstream has it: {reason}" if path else reason
    for path, module in itertools.islice(stage.named_modules(), 1, None):
        kind = original_class(type(module))
        if kind not in PLAIN and not is_named(kind, entry.classes | FROZEN_BATCH_NORMS):
            return f"{path} {why_another_class(module)}"
        has_forward = kind.forward is not nn.Module.forward
        if has_forward and kind not in PLAIN and (patch := patch_of(kind)) is not None:
            return f"the forward of {path} is patched by {patch}"
        if (reason := why_must_be_called(module)) is not None and not is_only_recorded(module):
            return f"{path} {reason}"
    for path, module in stage.named_modules():
        for name in (*module._parameters, *module._buffers, *module._modules):
            if name in vars(module):
                return f"{path}.{name}".lstrip(".") + " is shadowed by an attribute of the module"
    return None


def _why_other_work(stage: nn.Module, parts: StageParts | BlockParts) -> str | None:
    """Returns which module within a stage does work that the served stage would not do, or None."""
    known = set(parts.modules())
    for path, module in stage.named_modules():
        if module not in known and (isinstance(module, _WORKING) or type(module).__name__ in _WORKING_NAMES):
            return f"{path} is a {class_name(type(module))}, which upstream does not have there"
    return None


def _why_stage_unsupported(parts: StageParts) -> str | None:
    """Returns why a stage of supported blocks is not supported itself, or None."""
    norms = [parts.batch_norm, *(norm for block in parts.blocks for _, norm in block.pairs())]
    if any(norm is not None and norm.running_mean is None for norm in norms):
        return "a BatchNorm has no running statistics"
    reason = None if parts.last_norm is None else why_norms_unsupported(parts.last_norm)
    if reason is not None:
        return reason
    layers = [layer for block in parts.blocks for layer in block.layers()]
    if not all(map(_is_plain_layer, layers)):
        return "a linear layer is not a plain nn.Linear or LinearInt8"
    conv = parts.conv
    if type(conv) is not nn.Conv2d:
        return f"the convolution of the embedding {why_another_class(conv, 'Conv2d')}"
    settings = (conv.kernel_size, conv.stride, conv.padding)
    square = not isinstance(conv.padding, str) and all(len(set(setting)) == 1 for setting in settings)
    if not square or conv.groups != 1 or set(conv.dilation) != {1} or conv.padding_mode != "zeros":
        return (
            "the convolution of the embedding is not the same in both directions, dense and padded by zeros"
        )
    return None


def _is_plain_layer(layer: Any) -> bool:
    return type(layer) in (nn.Linear, LinearInt8) and not is_watched(layer)


#: Names for the linear layers: those of heads by their number, and the others.
_HEADS = {1: ("Q, K and V",), 2: ("Q", "K and V"), 3: ("Q", "K", "V")}
_LINEARS = ("the projection", "the first layer of the MLP", "the second layer of the MLP")


def _why_layer_unsupported(parts: BlockParts) -> str | None:
    for name, layer in zip((*_HEADS[len(parts.linears)], *_LINEARS), parts.layers(), strict=True):
        if not _is_plain_layer(layer):
            return f"the linear layer of {name} {why_another_class(layer, 'a plain nn.Linear or LinearInt8')}"
    return None


def _why_tensors_unsupported(stage: nn.Module) -> str | None:
    """Returns why the tensors cannot be folded, or None."""
    for path, module in stage.named_modules():
        if (reason := why_tensors_not_plain(module)) is not None:
            return f"{path} {reason}".lstrip()
    quantized = [b for m in stage.modules() if isinstance(m, LinearInt8) for b in m.buffers()]
    others = set(stage.buffers()).difference(quantized)  # scales are float32 whatever the dtype
    tensors = [*stage.parameters(), *(b for b in others if b.is_floating_point())]
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in (*tensors, *quantized)}) > 1:
        return "its parameters and buffers are of several dtypes or on several devices"
    if any(t.is_cuda and t.is_inference() for t in tensors):
        return "its parameters were made in inference mode, where changes on a GPU cannot be noticed"
    return None
