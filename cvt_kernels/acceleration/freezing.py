"""Modules that are served as one: which can be, what they are watched for, and their forward.

They are the stages of a CvT and the layers of a SegFormer, PVT, PVT v2 or GLPN. A frozen stage has folded its
biases (``stages``), a frozen layer is an operator of its tensors (``layers``); both hold as long as nothing
within changes. Every call compares what was found at first with what there is: modules, parameters and
buffers by identity, folded tensors by version, memory and layout, settings by value. After a change the
module is examined and folded again.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import checks
from ..ops.linear_int8.modules import LinearInt8
from ..ops.packing import Snapshot
from ..ops.programs import Programs
from ..records import TransformerBlock
from ..verdicts import stacklevel_of_caller
from . import huggingface, layers, microsoft, ours
from .entries import class_name, why_another_class, why_convolutions_unsupported, why_norms_unsupported
from .fused import GELU_VARIANTS, is_watched, patch_of, why_must_be_called
from .layers import FrozenEntry, LayerEntry
from .matching import find_blocks, is_named, original_class, recognize, why_mismatched, why_not_now
from .parts import BlockParts, StageParts
from .stages import FoldedStage, fold, serve

#: Every entry by its key.
STAGES: dict[str, FrozenEntry] = {
    **{each.key: each for each in (huggingface.STAGE, microsoft.STAGE, ours.STAGE)},
    **layers.LAYERS,
}

#: The classes that a frozen module may consist of, besides upstream's: those of torch.nn, and LinearInt8.
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


#: The classes whose work a served module does only where it expects them, and the names of upstream's.
_WORKING = (nn.BatchNorm2d, nn.Conv2d, nn.GELU, nn.LayerNorm, nn.Linear, LinearInt8, nn.SyncBatchNorm)
_WORKING_NAMES = ("LayerScale", *GELU_VARIANTS)


def find_stages(model: nn.Module) -> list[tuple[str, nn.Module, FrozenEntry]]:
    """Returns path, module and entry of every stage of a CvT and layer of a pyramid, freezable or not."""
    found = []
    for path, module in model.named_modules():
        entry = _recognize(module)
        if entry is not None:
            found.append((path, module, entry))
    return found


def _recognize(module: nn.Module) -> FrozenEntry | None:
    """Returns the entry of a module by the names of its classes and what it consists of; None for others."""
    block = recognize(module, None)
    if block is not None:
        return layers.entry_of(block)
    names = {cls.__name__ for cls in type(module).__mro__}
    if ours.own_class(type(module)) is not None:
        return ours.STAGE if ours.STAGE.block.name in names else None
    if huggingface.STAGE.block.name in names:
        return huggingface.STAGE
    # Other transformers have a class of this name too.
    is_stage = microsoft.STAGE.block.name in names and microsoft.is_stage(module)
    return microsoft.STAGE if is_stage else None


class _Kind(NamedTuple):
    """The differences between stages and layers.

    Attributes:
        why_parts_unsupported: Says why parts of upstream's structure cannot be served as one.
        fold: Returns parts as they are served.
        serve: Computes the result's tokens and grid from what is served, a tensor, its grid, and the programs
            of earlier calls; None for a tensor that is not as expected.
    """

    why_parts_unsupported: Callable[[Any], str | None]
    fold: Callable[[Any], Any]
    serve: Callable[[Any, Any, Any, Programs], tuple[Tensor, tuple[int, int]] | None]


def _kind_of(entry: FrozenEntry) -> _Kind:
    return _LAYER if isinstance(entry, LayerEntry) else _STAGE


# Whether a module can be served as one --------------------------------------------------------------------


def why_not_freezable(stage: nn.Module, entry: FrozenEntry) -> str | None:
    """Says why a stage or a layer cannot be served as one as it is now; None if it can."""
    reason = why_mismatched(stage, entry.block) or _why_other_modules(stage, entry)
    if reason is not None:
        return reason
    try:
        parts: Any = entry.parts(stage)
    except (AttributeError, KeyError) as error:
        return f"is not built as upstream's: {error}"
    return (
        _kind_of(entry).why_parts_unsupported(parts)
        or _why_other_work(stage, parts)
        or _why_tensors_unsupported(stage, parts)
    )


def _why_other_modules(stage: nn.Module, entry: FrozenEntry) -> str | None:
    """Says which module within a stage is not what upstream has there; None if all are."""
    for path, block, block_entry in find_blocks(stage):
        reason = why_mismatched(block, block_entry)
        if reason is None:
            reason = why_not_now(block, block_entry)
        if reason is not None:
            return f"{path} is not as upstream has it: {reason}" if path else reason
    for path, module in itertools.islice(stage.named_modules(), 1, None):
        kind = original_class(type(module))
        if kind not in _PLAIN and not is_named(kind, entry.classes):
            return f"{path} {why_another_class(module)}"
        has_forward = kind.forward is not nn.Module.forward
        if has_forward and kind not in _PLAIN and (patch := patch_of(kind)) is not None:
            return f"the forward of {path} is patched by {patch}"
        if (reason := why_must_be_called(module)) is not None and not _is_only_recorded(module):
            return f"{path} {reason}"
    for path, module in stage.named_modules():
        for name in (*module._parameters, *module._buffers, *module._modules):
            if name in vars(module):
                return f"{path}.{name}".lstrip(".") + " is shadowed by an attribute of the module"
    return None


def _is_only_recorded(module: nn.Module) -> bool:
    """Says whether only a recorder, which gets nothing of it, would notice that a module is not called."""
    others = module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if any(others) or torch_module._has_any_global_hook() or "forward" in vars(module):
        return False
    return not _is_noticed(module._forward_hooks)


def _is_noticed(hooks: Mapping[int, Any]) -> bool:
    """Says whether there is a hook, other than those by which transformers records attention maps.

    These stay in a model once any outputs have been recorded. They find no maps where attention makes none,
    and attention that makes some is not frozen.
    """
    for hook in hooks.values():
        if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
            return True
        held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "key" not in held or held["key"].cell_contents != "attentions":
            return True
    return False


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
        if (reason := why_convolutions_unsupported(block.branches)) is not None:
            return reason
        if any(bn.running_mean is None for _, bn in block.branches):
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


# What a frozen module is watched for ----------------------------------------------------------------------


#: The numbers and names that the work of the stage or of a module depends on, besides those of convolutions.
_SETTINGS = (
    "eps",
    "num_heads",
    "num_attention_heads",
    "attention_head_size",
    "head_dim",
    "scale",
    "scaling",
    "approximate",
    "act",
    "token_keep",
    "token_keep_bounds",
    "pool",
    "stride_kv",
    "linear_attention",
    "sequence_reduction_ratio",
    "sequences_reduction_ratio",
    "spatial_reduction_ratio",
    "sr_ratio",
)


_CONVOLUTION = ("stride", "padding", "dilation", "groups", "padding_mode")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Watch:
    """Everything that a stage was folded from, to be compared with what it is.

    It refers to the modules within the stage, not to the stage itself, which it must not keep alive. Every
    call compares about a thousand members, so that loops are left to C.
    """

    def __init__(self, stage: nn.Module, parts: StageParts | BlockParts):
        modules = list(itertools.islice(stage.modules(), 1, None))
        self._modules = modules
        self._spaces = [vars(module) for module in modules]
        self._classes = list({type(module) for module in modules})
        self._hooks = [space[kind] for space in self._spaces for kind in _HOOKS]
        # Empty ones are left out: what is added to a leaf has an effect only if something else changes too.
        spaces = [vars(stage), *self._spaces]
        names = ("_modules", "_parameters", "_buffers")
        self._members_of = [space[name] for space in spaces for name in names if space[name]]
        self._folded = _folded_of(parts)
        self._snapshot = Snapshot(self._folded)
        settings = [(space, name) for space in spaces for name in _SETTINGS if name in space]
        settings += [(vars(m), name) for m in modules if isinstance(m, nn.Conv2d) for name in _CONVOLUTION]
        self._settings_of, self._settings = [space for space, _ in settings], [name for _, name in settings]
        self._configs = [space["config"] for space in spaces if "config" in space]
        self._before = self._state()

    def _state(self) -> tuple[Any, ...]:
        members = itertools.chain.from_iterable(map(dict.values, self._members_of))
        return (
            [*map(id, members)],
            [*map(len, self._spaces)],  # an attribute may shadow a parameter
            [*map(type, self._modules)],
            [*map(_forward_of, self._classes)],
            [*map(dict.get, self._settings_of, self._settings)],
            [getattr(config, "_attn_implementation", None) for config in self._configs],
        )

    def is_changed(self) -> bool:
        """Says whether the stage has to be examined again."""
        if any(self._hooks) and any(map(_is_noticed, filter(None, self._hooks))):
            return True
        if any(map(operator.contains, self._spaces, itertools.repeat("forward"))):
            return True
        return not self._snapshot.holds(self._folded) or self._state() != self._before

    def is_training(self) -> bool:
        """Says whether a module within the stage is in training mode."""
        return any(map(_training_of, self._spaces))


_forward_of, _training_of = operator.attrgetter("forward"), operator.itemgetter("training")


class _Frozen(NamedTuple):
    """A stage or a layer as it is served.

    Attributes:
        folded: The stage, or the layer.
        watch: What it is watched for.
        number: A number that no other folding has.
        programs: Its operators as they serve calls like earlier ones.
    """

    folded: FoldedStage | TransformerBlock
    watch: _Watch
    number: int
    programs: Programs


_numbers = itertools.count()


_frozen: weakref.WeakKeyDictionary[nn.Module, _Frozen] = weakref.WeakKeyDictionary()


def _frozen_or_why_not(stage: nn.Module, entry: FrozenEntry) -> _Frozen | str:
    """Returns a stage as it is served, folded again after a change; or why it cannot be."""
    known = _frozen.get(stage)
    if known is None or known.watch.is_changed():
        _frozen.pop(stage, None)
        reason = why_not_freezable(stage, entry)
        if reason is not None:
            return reason
        parts: Any = entry.parts(stage)
        watch = _Watch(stage, parts)  # first: what changes while it folds is noticed
        known = _frozen[stage] = _Frozen(_kind_of(entry).fold(parts), watch, next(_numbers), Programs())
    if known.watch.is_training():
        return "a module within it is in training mode"
    return known


def why_not_served(stage: nn.Module, entry: FrozenEntry) -> str | None:
    """Says why a frozen stage or layer would not be served as one now; None if it would."""
    if stage.training:
        return "is in training mode"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    found = _frozen_or_why_not(stage, entry)
    return found if isinstance(found, str) else None


# The forward ----------------------------------------------------------------------------------------------


def try_to_serve(stage: nn.Module, entry: FrozenEntry, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
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
    stage: nn.Module, entry: FrozenEntry, args: Sequence[Any], kwargs: Mapping[str, Any]
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
    stage: nn.Module, entry: FrozenEntry, x: Any, grid: Any = None
) -> tuple[Tensor, tuple[int, int]] | None:
    """Computes the tokens of a frozen stage or layer and their grid; None where its own forward has to."""
    if torch_module._has_any_global_hook() or checks.autocast_enabled(x) or checks.is_transformed():
        return None
    found = _frozen_or_why_not(stage, entry)
    if isinstance(found, str):
        return None
    return _kind_of(entry).serve(found.folded, x, grid, found.programs)


def _fold_stage(parts: StageParts) -> FoldedStage:
    return fold(parts, parts.conv.weight.device.type)


def _serve_stage(
    folded: FoldedStage, image: Tensor, grid: None, programs: Programs
) -> tuple[Tensor, tuple[int, int]] | None:
    weight = folded.conv_weight
    differs = image.dtype != weight.dtype or image.device != weight.device
    if differs or image.ndim != 4 or image.shape[1] != weight.shape[1]:
        return None  # its own forward says what is wrong
    return serve(folded, image, programs)


_STAGE = _Kind(_why_stage_unsupported, _fold_stage, _serve_stage)
_LAYER = _Kind(layers.why_parts_unsupported, BlockParts.as_operator, layers.serve)


def has_gradient(stage: nn.Module, x: Any) -> bool:
    """Says whether autograd has to record a call of a stage or a layer."""
    if checks.forward_mode_enabled():
        return True
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in stage.parameters())


def graph_key(stage: nn.Module, entry: FrozenEntry) -> Any:
    """Returns what tells apart the states in which a captured graph of a frozen module is right."""
    found = _frozen_or_why_not(stage, entry)
    return found if isinstance(found, str) else found.number
