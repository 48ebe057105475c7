"""Stages that are served as one: which can be, what they are watched for, and their forward.

A frozen stage has folded its biases (``stages``), which holds as long as nothing of it changes. Every call
compares what it was folded from with what there is: modules, parameters and buffers by identity, folded
tensors by version and memory, settings by value. After a change it is examined and folded again.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import checks
from ..ops.linear_int8.modules import LinearInt8
from ..verdicts import stacklevel_of_caller
from . import huggingface, microsoft, ours
from .entries import StageEntry, why_convolutions_unsupported, why_norms_unsupported
from .fused import is_watched, patch_of, why_must_be_called
from .matching import find_blocks, is_named, original_class, why_mismatched, why_not_now
from .stages import FoldedStage, StageParts, fold, operators_of, serve

#: Every entry by its key.
STAGES: dict[str, StageEntry] = {each.key: each for each in (huggingface.STAGE, microsoft.STAGE, ours.STAGE)}

#: The classes that a frozen stage may consist of, besides upstream's: those of torch.nn, and LinearInt8.
_PLAIN = frozenset(
    (
        nn.BatchNorm2d,
        nn.Conv2d,
        nn.Dropout,
        nn.GELU,
        nn.Identity,
        nn.LayerNorm,
        nn.Linear,
        LinearInt8,
        nn.ModuleList,
        nn.Sequential,
        nn.SyncBatchNorm,
    )
)


#: The classes whose work a served stage does only where it expects them, and the names of upstream's.
_WORKING = (nn.BatchNorm2d, nn.Conv2d, nn.GELU, nn.LayerNorm, nn.Linear, LinearInt8, nn.SyncBatchNorm)
_WORKING_NAMES = ("LayerScale", "QuickGELU")


def find_stages(model: nn.Module) -> list[tuple[str, nn.Module, StageEntry]]:
    """Returns path, stage and entry of every stage of a model, whether it can be frozen or not."""
    found = []
    for path, module in model.named_modules():
        entry = _recognize(module)
        if entry is not None:
            found.append((path, module, entry))
    return found


def _recognize(module: nn.Module) -> StageEntry | None:
    """Returns the entry of a module by the names of its classes and what it consists of; None for others."""
    names = {cls.__name__ for cls in type(module).__mro__}
    if ours.own_class(type(module)) is not None:
        return ours.STAGE if ours.STAGE.block.name in names else None
    if huggingface.STAGE.block.name in names:
        return huggingface.STAGE
    # Other transformers have a class of this name too.
    is_stage = microsoft.STAGE.block.name in names and microsoft.is_stage(module)
    return microsoft.STAGE if is_stage else None


# Whether a stage can be served as one ---------------------------------------------------------------------


def why_not_freezable(stage: nn.Module, entry: StageEntry) -> str | None:
    """Says why a stage cannot be served as one as it is now; None if it can."""
    reason = why_mismatched(stage, entry.block) or _why_other_modules(stage, entry)
    if reason is not None:
        return reason
    try:
        parts = entry.parts(stage)
    except (AttributeError, KeyError) as error:
        return f"is not built as upstream's: {error}"
    return (
        _why_parts_unsupported(parts)
        or _why_other_work(stage, parts)
        or _why_tensors_unsupported(stage, parts)
    )


def _why_other_modules(stage: nn.Module, entry: StageEntry) -> str | None:
    """Says which module within a stage is not what upstream has there; None if all are."""
    for path, block, block_entry in find_blocks(stage):
        reason = why_mismatched(block, block_entry)
        if reason is None:
            reason = why_not_now(block, block_entry)
        if reason is not None:
            return f"{path} is not as upstream has it: {reason}"
    for path, module in itertools.islice(stage.named_modules(), 1, None):
        kind = original_class(type(module))
        if kind not in _PLAIN and not is_named(kind, entry.classes):
            return f"{path} is a {kind.__qualname__}"
        has_forward = kind.forward is not nn.Module.forward
        if has_forward and kind not in _PLAIN and (patch := patch_of(kind)) is not None:
            return f"the forward of {path} is patched by {patch}"
        if (reason := why_must_be_called(module)) is not None:
            return f"{path} {reason}"
    return None


def _why_other_work(stage: nn.Module, parts: StageParts) -> str | None:
    """Says which module within a stage does work that the served stage would not do; None if none does."""
    known = set(parts.modules())
    for path, module in stage.named_modules():
        if module not in known and (isinstance(module, _WORKING) or type(module).__name__ in _WORKING_NAMES):
            return f"{path} is a {type(module).__qualname__}, which upstream does not have there"
    return None


def _why_parts_unsupported(parts: StageParts) -> str | None:
    norms = [parts.norm, *(norm for block in parts.blocks for norm in (block.norm1, block.norm2))]
    for norm in norms:
        if (reason := why_norms_unsupported(norm)) is not None:
            return reason
    for block in parts.blocks:
        if (reason := why_convolutions_unsupported(block.branches)) is not None:
            return reason
        if any(bn.running_mean is None for _, bn in block.branches):
            return "a BatchNorm has no running statistics"
        if any(type(layer) not in (nn.Linear, LinearInt8) or is_watched(layer) for layer in block.layers()):
            return "a linear layer is not a plain nn.Linear or LinearInt8"
    conv, batch_norm = parts.conv, parts.batch_norm
    if type(conv) is not nn.Conv2d:
        return f"the embedding has a {type(conv).__qualname__}, expected Conv2d"
    if batch_norm is not None and batch_norm.running_mean is None:
        return "a BatchNorm has no running statistics"
    settings = (conv.kernel_size, conv.stride, conv.padding)
    square = not isinstance(conv.padding, str) and all(len(set(setting)) == 1 for setting in settings)
    if not square or conv.groups != 1 or set(conv.dilation) != {1} or conv.padding_mode != "zeros":
        return (
            "the convolution of the embedding is not the same in both directions, dense and padded by zeros"
        )
    return None


def _why_tensors_unsupported(stage: nn.Module, parts: StageParts) -> str | None:
    """Says why the tensors cannot be folded; None if they can."""
    quantized = [b for m in stage.modules() if isinstance(m, LinearInt8) for b in m.buffers()]
    others = set(stage.buffers()).difference(quantized)  # scales are float32 whatever the dtype
    tensors = [*stage.parameters(), *(b for b in others if b.is_floating_point())]
    if len({t.dtype for t in tensors}) > 1 or len({t.device for t in (*tensors, *quantized)}) > 1:
        return "its parameters and buffers are of several dtypes or on several devices"
    if any(t.is_inference() for t in parts.folded()):
        return "its parameters were made in inference mode, where changes cannot be noticed"
    return None


# What a frozen stage is watched for -----------------------------------------------------------------------


#: The numbers and names that the work of the stage or of a module depends on, besides those of convolutions.
_SETTINGS = (
    "eps",
    "num_heads",
    "scale",
    "approximate",
    "token_keep",
    "token_keep_bounds",
    "pool",
    "stride_kv",
)


class _Watch:
    """Everything that a stage was folded from, to be compared with what it is.

    It refers to the modules within the stage, not to the stage itself, which it must not keep alive.
    """

    def __init__(self, stage: nn.Module, parts: StageParts):
        modules = list(itertools.islice(stage.modules(), 1, None))
        self._modules = modules
        self._spaces = [vars(module) for module in modules]
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._classes = {type(module) for module in modules}
        self._hooks = [getattr(module, kind) for module in modules for kind in kinds]
        # Empty ones are left out: what is added to a leaf has an effect only if something else changes too.
        spaces = [vars(stage), *self._spaces]
        names = ("_modules", "_parameters", "_buffers")
        self._members_of = [space[name] for space in spaces for name in names if space[name]]
        self._folded = parts.folded()
        self._settings = [(space, name) for space in spaces for name in _SETTINGS if name in space]
        self._with_stride = [module for module in modules if isinstance(module, nn.Conv2d)]
        self._before = self._state()

    def _state(self) -> tuple[Any, ...]:
        return (
            [id(member) for members in self._members_of for member in members.values()],
            [module.__class__ for module in self._modules],
            [cls.forward for cls in self._classes],
            [(tensor._version, tensor.untyped_storage()._cdata) for tensor in self._folded],
            [space.get(name) for space, name in self._settings],
            [(conv.stride, conv.padding, conv.dilation) for conv in self._with_stride],
        )

    def is_changed(self) -> bool:
        """Says whether the stage has to be examined again."""
        if any(self._hooks) or any("forward" in space for space in self._spaces):
            return True
        return self._state() != self._before

    def is_training(self) -> bool:
        """Says whether a module within the stage is in training mode."""
        return any(space["training"] for space in self._spaces)


class _Frozen(NamedTuple):
    """A stage as it is served, what it is watched for, and a number that no other folding has."""

    folded: FoldedStage
    watch: _Watch
    number: int


_numbers = itertools.count()


_frozen: weakref.WeakKeyDictionary[nn.Module, _Frozen] = weakref.WeakKeyDictionary()


def _frozen_or_why_not(stage: nn.Module, entry: StageEntry) -> _Frozen | str:
    """Returns a stage as it is served, folded again after a change; or why it cannot be."""
    known = _frozen.get(stage)
    if known is None or known.watch.is_changed():
        _frozen.pop(stage, None)
        reason = why_not_freezable(stage, entry)
        if reason is not None:
            return reason
        parts = entry.parts(stage)
        folded = fold(parts, parts.conv.weight.device.type)
        known = _frozen[stage] = _Frozen(folded, _Watch(stage, parts), next(_numbers))
    if known.watch.is_training():
        return "a module within it is in training mode"
    return known


def why_not_served(stage: nn.Module, entry: StageEntry) -> str | None:
    """Says why a frozen stage would not be served as one now; None if it would."""
    if stage.training:
        return "is in training mode"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    found = _frozen_or_why_not(stage, entry)
    return found if isinstance(found, str) else None


def operators_served(stage: nn.Module, entry: StageEntry, device_type: str) -> tuple[str, ...]:
    """Returns the public operators, but ``linear``, that a frozen stage calls on a type of device."""
    return operators_of(entry.parts(stage), device_type)


# The forward ----------------------------------------------------------------------------------------------


def try_to_serve(stage: nn.Module, entry: StageEntry, image: Tensor) -> Any:
    """Computes a frozen stage; None where its own forward has to.

    Raises:
        RuntimeError: The stage is in training mode.
    """
    refuse_to_train(stage)
    if has_gradient(stage, image):
        warnings.warn(
            "cvt_kernels: a frozen model was called where gradients are recorded, so that its blocks run one "
            "by one; call it within torch.inference_mode() or torch.no_grad()",
            RuntimeWarning,
            stacklevel=stacklevel_of_caller(),
        )
        return None
    served = tokens_served(stage, entry, image)
    return None if served is None else entry.result(*served)


def refuse_to_train(stage: nn.Module) -> None:
    """Raises RuntimeError for a stage in training mode."""
    if stage.training:
        raise RuntimeError(
            f"{type(stage).__name__} is frozen for serving and cannot train: call "
            "cvt_kernels.restore(model) first, or model.eval() to serve"
        )


def tokens_served(
    stage: nn.Module, entry: StageEntry, image: Tensor
) -> tuple[Tensor, tuple[int, int]] | None:
    """Computes the tokens of a frozen stage and their grid; None where its own forward has to."""
    if torch_module._has_any_global_hook() or checks.autocast_enabled(image):
        return None
    found = _frozen_or_why_not(stage, entry)
    if isinstance(found, str):
        return None
    weight = found.folded.conv_weight
    differs = image.dtype != weight.dtype or image.device != weight.device
    if differs or image.ndim != 4 or image.shape[1] != weight.shape[1]:
        return None  # its own forward says what is wrong
    return serve(found.folded, image)


def has_gradient(stage: nn.Module, image: Tensor) -> bool:
    """Says whether autograd has to record a call of a stage."""
    if checks.forward_mode_enabled():
        return True
    if not torch.is_grad_enabled():
        return False
    return image.requires_grad or any(parameter.requires_grad for parameter in stage.parameters())


def graph_key(stage: nn.Module, entry: StageEntry) -> Any:
    """Returns what tells apart the states in which a captured graph of a frozen stage is right."""
    found = _frozen_or_why_not(stage, entry)
    return found if isinstance(found, str) else found.number
