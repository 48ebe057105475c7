"""Modules that are served as one: which can be, what they are watched for, and their forward.

They are the stages of a CvT and the layers of a SegFormer, PVT, PVT v2 or GLPN. A frozen stage has folded its
biases (``stages``), a frozen layer is an operator of its tensors (``layers``); both hold as long as nothing
within changes. Every call compares what was found at first with what there is: modules, parameters and
buffers by identity, folded tensors by version, memory and layout, settings by value. After a change the
module is examined and folded again.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import checks
from ..classes import original_class
from ..ops.linear_int8.modules import LinearInt8
from ..ops.programs import Programs
from ..records import TransformerBlock
from ..verdicts import stacklevel_of_caller
from . import cvt, pyramids
from .entries import ServedEntry, StageEntry, block_of
from .matching import PLAIN, blocks_in, why_another_forward, why_not_now
from .parts import (
    GELU_VARIANTS,
    BlockParts,
    StageParts,
    Unsupported,
    class_name,
    is_named,
    why_another_class,
    why_convolutions_unsupported,
    why_norms_unsupported,
)
from .stages import FoldedStage, fold, serve, serve_layer
from .watching import Watch, is_only_recorded, is_plain_linear, is_watched, patch_of, why_must_be_called

#: Every entry by its key.
STAGES: dict[str, ServedEntry] = {entry.serving_key: entry for entry in cvt.STAGES}
STAGES |= {entry.serving_key: entry for entry in pyramids.ENTRIES if entry.is_layer}

#: The classes whose work a served module does only where it expects them, and the names of upstream's.
_WORKING = (nn.BatchNorm2d, nn.Conv2d, nn.GELU, nn.LayerNorm, nn.Linear, LinearInt8, nn.SyncBatchNorm)
_WORKING_NAMES = ("LayerScale", *GELU_VARIANTS)


def find_stages(model: nn.Module) -> list[tuple[str, nn.Module, ServedEntry]]:
    """Returns path, module and entry of every stage of a CvT and layer of a pyramid, freezable or not."""
    found = []
    for path, module in model.named_modules():
        layer = pyramids.recognize(module)
        entry = layer if layer is not None and layer.is_layer else cvt.recognize_stage(module)
        if entry is not None:
            found.append((path, module, entry))
    return found


# Whether a module can be served as one --------------------------------------------------------------------


def why_not_freezable(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Says why a stage or a layer cannot be served as one as it is now; None if it can."""
    reason = why_another_forward(stage, block_of(entry))
    if reason is not None:
        return reason
    try:
        parts: StageParts | BlockParts = entry.parts(stage)
    except Unsupported as error:
        return str(error)
    except AttributeError as error:
        return f"is not built as upstream's: {error}"
    if isinstance(parts, BlockParts) and parts.pooling is not None:
        return "its attention is linear, which no operator computes together with the rest of the layer"
    reason = _why_other_modules(stage, entry)
    if reason is None and isinstance(entry, StageEntry):
        reason = entry.why_unsupported(stage)
    return (
        reason
        or (_why_stage_unsupported(parts) if isinstance(parts, StageParts) else _why_layer_unsupported(parts))
        or _why_other_work(stage, parts)
        or _why_tensors_unsupported(stage, parts)
    )


def _why_other_modules(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Says which module within a stage is not what upstream has there; None if all are."""
    for path, block, block_entry in blocks_in(stage):
        reason = why_another_forward(block, block_entry) or why_not_now(block, block_entry)
        if reason is not None:
            return f"{path} is not as upstream has it: {reason}" if path else reason
    for path, module in itertools.islice(stage.named_modules(), 1, None):
        kind = original_class(type(module))
        if kind not in PLAIN and not is_named(kind, entry.classes):
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
    """Says which module within a stage does work that the served stage would not do; None if none does."""
    known = set(parts.modules())
    for path, module in stage.named_modules():
        if module not in known and (isinstance(module, _WORKING) or type(module).__name__ in _WORKING_NAMES):
            return f"{path} is a {class_name(type(module))}, which upstream does not have there"
    return None


def _why_stage_unsupported(parts: StageParts) -> str | None:
    norms = [parts.norm, *(norm for block in parts.blocks for norm in (block.norm1, block.norm2))]
    for norm in norms:
        if (reason := why_norms_unsupported(norm)) is not None:
            return reason
    for block in parts.blocks:
        if (reason := why_convolutions_unsupported(block.pairs())) is not None:
            return reason
        if any(bn.running_mean is None for _, bn in block.pairs()):
            return "a BatchNorm has no running statistics"
        if any(type(layer) not in (nn.Linear, LinearInt8) or is_watched(layer) for layer in block.layers()):
            return "a linear layer is not a plain nn.Linear or LinearInt8"
    conv, batch_norm = parts.conv, parts.batch_norm
    if type(conv) is not nn.Conv2d:
        return f"the convolution of the embedding {why_another_class(conv, 'Conv2d')}"
    if batch_norm is not None and batch_norm.running_mean is None:
        return "a BatchNorm has no running statistics"
    settings = (conv.kernel_size, conv.stride, conv.padding)
    square = not isinstance(conv.padding, str) and all(len(set(setting)) == 1 for setting in settings)
    if not square or conv.groups != 1 or set(conv.dilation) != {1} or conv.padding_mode != "zeros":
        return (
            "the convolution of the embedding is not the same in both directions, dense and padded by zeros"
        )
    return None


#: Names for the linear layers.
_LINEARS = ("Q", "K", "V", "the projection", "the first layer of the MLP", "the second layer of the MLP")


def _why_layer_unsupported(parts: BlockParts) -> str | None:
    for name, layer in zip(_LINEARS, parts.layers(), strict=True):
        if not is_plain_linear(layer):
            return f"the linear layer of {name} {why_another_class(layer, 'a plain nn.Linear')}"
    return None


def _why_tensors_unsupported(stage: nn.Module, parts: StageParts | BlockParts) -> str | None:
    """Says why the tensors cannot be folded; None if they can."""
    quantized = [b for m in stage.modules() if isinstance(m, LinearInt8) for b in m.buffers()]
    others = set(stage.buffers()).difference(quantized)  # scales are float32 whatever the dtype
    tensors = [*stage.parameters(), *(b for b in others if b.is_floating_point())]
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in (*tensors, *quantized)}) > 1:
        return "its parameters and buffers are of several dtypes or on several devices"
    if any(t.is_inference() for t in _folded_of(parts)):
        return "its parameters were made in inference mode, where changes cannot be noticed"
    return None


def _folded_of(parts: StageParts | BlockParts) -> list[Tensor]:
    """Returns the tensors of which what is served has copies, or sums."""
    return parts.folded() if isinstance(parts, StageParts) else []


# What is served ----------------------------------------------------------------------------------------


class _Frozen(NamedTuple):
    """A stage or a layer as it is served.

    Attributes:
        folded: The stage, or the layer.
        watch: What it is watched for.
        number: A number that no other folding has.
        programs: Its operators as they serve calls like earlier ones.
    """

    folded: FoldedStage | TransformerBlock
    watch: Watch
    number: int
    programs: Programs


_numbers = itertools.count()


_frozen: weakref.WeakKeyDictionary[nn.Module, _Frozen] = weakref.WeakKeyDictionary()


def _frozen_or_why_not(stage: nn.Module, entry: ServedEntry) -> _Frozen | str:
    """Returns a stage as it is served, folded again after a change; or why it cannot be."""
    known = _frozen.get(stage)
    if known is None or known.watch.is_changed():
        _frozen.pop(stage, None)
        reason = why_not_freezable(stage, entry)
        if reason is not None:
            return reason
        parts: Any = entry.parts(stage)
        modules = list(itertools.islice(stage.modules(), 1, None))
        watch = Watch(stage, modules, _folded_of(parts))  # first: what changes while it folds is noticed
        known = _frozen[stage] = _Frozen(_fold(parts), watch, next(_numbers), Programs())
    if known.watch.is_training():
        return "a module within it is in training mode"
    return known


def why_not_served(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Says why a frozen stage or layer would not be served as one now; None if it would."""
    if stage.training:
        return "is in training mode"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    found = _frozen_or_why_not(stage, entry)
    return found if isinstance(found, str) else None


# The forward ----------------------------------------------------------------------------------------------


def try_to_serve(stage: nn.Module, entry: ServedEntry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes a call of a frozen stage or layer; None where its own forward has to.

    Raises:
        RuntimeError: It is in training mode.
    """
    refuse_to_train(stage)
    call = entry.call_of(args, kwargs)
    if call is None:
        return None
    if has_gradient(stage, call[0]):
        warnings.warn(
            "cvt_kernels: a frozen model was called where gradients are recorded, so that its blocks run one "
            "by one; call it within torch.inference_mode() or torch.no_grad()",
            RuntimeWarning,
            stacklevel=stacklevel_of_caller(),
        )
        return None
    served = tokens_served(stage, entry, *call)
    return None if served is None else entry.result(*served)


def try_to_serve_in_evaluation(
    stage: nn.Module, entry: ServedEntry, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Computes a call of a stage or layer on a CPU without gradients; None where its own forward has to."""
    call = entry.call_of(args, kwargs)
    if call is None or call[0].device.type != "cpu" or has_gradient(stage, call[0]):
        return None
    served = tokens_served(stage, entry, *call)
    return None if served is None else entry.result(*served)


def is_serving(module: nn.Module) -> bool:
    """Says whether the class of a module is that of a stage or layer that is served as one in evaluation."""
    return hasattr(type(module), "_cvt_kernels_serves")


def refuse_to_train(stage: nn.Module) -> None:
    """Raises RuntimeError for a stage in training mode."""
    if stage.training:
        raise RuntimeError(
            f"{type(stage).__name__} is frozen for serving and cannot train: call "
            "cvt_kernels.restore(model) first, or model.eval() to serve"
        )


def tokens_served(
    stage: nn.Module, entry: ServedEntry, x: Any, grid: Any = None
) -> tuple[Tensor, tuple[int, int]] | None:
    """Computes the tokens of a frozen stage or layer and their grid; None where its own forward has to."""
    if torch_module._has_any_global_hook() or checks.autocast_enabled(x) or checks.is_transformed():
        return None
    found = _frozen_or_why_not(stage, entry)
    if isinstance(found, str):
        return None
    folded = found.folded
    if isinstance(folded, TransformerBlock):
        return serve_layer(folded, x, grid, found.programs)
    return _serve_stage(folded, x, found.programs)


def _fold(parts: StageParts | BlockParts) -> FoldedStage | TransformerBlock:
    return (
        parts.as_operator() if isinstance(parts, BlockParts) else fold(parts, parts.conv.weight.device.type)
    )


def _serve_stage(
    folded: FoldedStage, image: Tensor, programs: Programs
) -> tuple[Tensor, tuple[int, int]] | None:
    weight = folded.conv_weight
    differs = image.dtype != weight.dtype or image.device != weight.device
    if differs or image.ndim != 4 or image.shape[1] != weight.shape[1]:
        return None  # its own forward says what is wrong
    return serve(folded, image, programs)


def has_gradient(stage: nn.Module, x: Any) -> bool:
    """Says whether autograd has to record a call of a stage or a layer."""
    if checks.forward_mode_enabled():
        return True
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in stage.parameters())


def graph_key(stage: nn.Module, entry: ServedEntry) -> Any:
    """Returns what tells apart the states in which a captured graph of a frozen module is right."""
    found = _frozen_or_why_not(stage, entry)
    return found if isinstance(found, str) else found.number
