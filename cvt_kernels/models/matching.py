"""Finds the blocks, stages and layers of a model that have an entry, and says why they differ from it."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .. import checks, modes
from ..classes import UNFUSED, original_class
from ..ops.linear_int8.modules import LinearInt8
from ..records import FROZEN_BATCH_NORMS
from .blocks import (
    GELU_VARIANTS,
    BlockEntry,
    BlockParts,
    BypassedParts,
    Entry,
    Parts,
    ServedEntry,
    StageEntry,
    StageParts,
    Unsupported,
    class_name,
    is_at_home,
    is_named,
    why_another_class,
    why_norms_unsupported,
)
from .class_token import ClassifierEntry
from .families import CLASSIFIERS, MODELS, recognize, recognize_stage
from .families.cvt import MODULE
from .forward import is_plain_embedding
from .watching import (
    BYPASSED,
    Examined,
    is_watched,
    known_of,
    patch_of,
    why_must_be_called,
    why_tensors_not_plain,
)

#: The classes that a block may consist of, besides upstream's.
_PLAIN = frozenset((*BYPASSED, nn.Identity, nn.ModuleList, nn.Sequential))
#: The classes whose work a served module does only where it expects them, and the names of upstream's.
_WORKING = tuple(cls for cls in BYPASSED if cls is not nn.Dropout)
_WORKING_NAMES = ("LayerScale", *GELU_VARIANTS)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module, BlockEntry]]:
    """Returns path, block and entry of all blocks that may be fused; ValueError if there is none."""
    found = blocks_in(model)
    if not found:
        raise ValueError(
            f"model: got {model_name(model)}, expected a model with blocks of one of these: {MODELS}"
        )
    return found


def model_name(model: nn.Module) -> str:
    """Returns the name of a model's class with that of the project whose it is."""
    cls = original_class(type(model))
    return f"{cls.__name__} of {cls.__module__.partition('.')[0]}"


def blocks_in(model: nn.Module) -> list[tuple[str, nn.Module, BlockEntry]]:
    """Returns the blocks of :func:`find_blocks`, or an empty list."""
    checks.check_kind("model", model, nn.Module)
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    found = []
    for path, module in model.named_modules():
        entry = recognize(module, parents.get(id(module)))
        if entry is not None:
            found.append((path, module, entry))
    return found


def find_stages(model: nn.Module) -> list[tuple[str, nn.Module, ServedEntry]]:
    """Returns path, module and entry of every stage and of every layer of a pyramid, freezable or not."""
    found = []
    for path, module in model.named_modules():
        layer = recognize(module, None)
        entry = layer if layer is not None and layer.is_layer else recognize_stage(module)
        if entry is not None:
            found.append((path, module, entry))
    return found


def classifier_of(module: nn.Module) -> ClassifierEntry | None:
    """Returns the entry of a classifier that has upstream's forward; None for other modules."""
    owner = _owner_of_forward(module)
    entry = CLASSIFIERS.get(owner.__name__)
    if entry is None or not is_at_home(owner, entry.upstream) or _replaced_method(module, owner) is not None:
        return None
    arguments = tuple(inspect.signature(owner.forward).parameters)[1 : 1 + len(entry.arguments)]
    return entry if arguments == entry.arguments else None


# Whether a block is of the class that its entry describes -------------------------------------------------


def why_mismatched(block: nn.Module, entry: BlockEntry) -> str | None:
    """Returns why a block does not match its entry, or None."""
    reason = why_another_forward(block, entry)
    if reason is not None:
        return reason
    parts = parts_or_why_not(block, entry)
    return parts if isinstance(parts, str) else _why_another_holder(block, entry, parts)


def why_another_forward(block: nn.Module, entry: Entry) -> str | None:
    """Returns why the forward and the members of a block are not upstream's, or are unserved, or None."""
    if entry.why_unserved:
        return entry.why_unserved
    owner = _owner_of_forward(block)
    if owner.__name__ != entry.name or not is_at_home(owner, entry.upstream):
        name = f"{owner.__module__}.{owner.__qualname__}"
        return f"{name} has a forward of its own, not that of {entry.upstream}'s {entry.name}"
    if not entry.arguments:  # of cvt's blocks nothing more is said
        return None if owner.__module__ == MODULE else f"{owner.__qualname__} has a forward of its own"
    replaced = _replaced_method(block, owner)
    if replaced is not None:
        return f"{replaced} is not that of {entry.upstream}'s {entry.name}"
    arguments = tuple(inspect.signature(owner.forward).parameters)[1:]
    if tuple(name for name in arguments if name not in entry.may_take) != entry.arguments:
        return f"forward takes {', '.join(arguments)}; expected {', '.join(entry.arguments)}"
    members = {**block._modules, **block._parameters, **block._buffers}
    unknown = sorted(set(members) - entry.children)
    if unknown:
        return f"has {', '.join(unknown)}, which {entry.upstream}'s {entry.name} has not"
    return None


def _owner_of_forward(module: nn.Module) -> Any:
    return next(cls for cls in original_class(type(module)).__mro__ if "forward" in vars(cls))


def _replaced_method(module: nn.Module, owner: Any) -> str | None:
    """Returns a method of ``owner`` that is patched, or overridden by a module or its class, or None."""
    patch = patch_of(owner)
    if patch is not None:
        return f"forward, patched by {patch},"
    public = (name for name, value in vars(owner).items() if inspect.isfunction(value) and name[0] != "_")
    mro = original_class(type(module)).__mro__
    overriding = [vars(module), *(vars(cls) for cls in mro[: mro.index(owner)])]
    # A forward set on the object is seen by coverage, since it may come and go.
    others = (name for name in public if name != "forward")
    return next((name for name in others if any(name in members for members in overriding)), None)


def parts_or_why_not(block: nn.Module, entry: BlockEntry, *, in_call: bool = False) -> Parts | str:
    """Returns the parts of a block, or why it has none for a fused forward, before a call or within one."""
    parts: Any = _built_parts(block, entry)
    if isinstance(parts, str):
        return parts
    for module, kinds in parts.bypassed():
        if type(module) not in kinds and not is_named(type(module), kinds):
            names = (kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
            expected = " or ".join(dict.fromkeys(names))
            missing = f"is missing, expected {expected}" if module is None else None
            return f"{_path_of(block, module)} {missing or why_another_class(module, expected)}"
        if (reason := why_tensors_not_plain(module, may_be_sharded=not in_call)) is not None:
            return f"{_path_of(block, module)} {reason}"
    return parts.why_unsupported() or parts


def _built_parts(module: nn.Module, entry: Entry) -> Any:
    try:
        return entry.parts(module)
    except Unsupported as error:
        return str(error)
    except AttributeError as error:
        return f"is not built as upstream's: {error}"


def _why_another_holder(block: nn.Module, entry: BlockEntry, parts: Parts) -> str | None:
    for module in _holders(block, parts):
        owner = _owner_of_forward(module)
        if type(module) not in _PLAIN and not _is_upstreams(owner, entry):
            return f"{_path_of(block, module)} {why_another_class(module)}"
        replaced = None if type(module) in _PLAIN else _replaced_method(module, owner)
        if replaced is not None:
            return (
                f"{replaced} of {_path_of(block, module)} is not that of {entry.upstream}'s {owner.__name__}"
            )
    return None


def _is_upstreams(kind: type, entry: Entry) -> bool:
    """Returns whether a class is one of those within a block or a stage, where upstream has it."""
    return is_named(kind, entry.classes) and is_at_home(kind, entry.upstream)


def _holders(block: nn.Module, parts: Parts) -> list[nn.Module]:
    """Returns the modules within a block that hold its parts, and are called neither."""
    if isinstance(parts, BypassedParts):
        return []
    known = {id(module) for module, _ in parts.bypassed()} | {id(block)}
    known.update(id(inner) for module in parts.called() for inner in module.modules())
    return [module for module in block.modules() if id(module) not in known]


def _path_of(block: nn.Module, wanted: Any) -> str:
    return next((path for path, module in block.named_modules() if module is wanted), "a module")


# Whether it runs fused now --------------------------------------------------------------------------------


class ExaminedBlock(Examined):
    """A block that was called, with its parts; without, if it does not run fused."""

    parts: Parts | None = None


def parts_if_fused(block: nn.Module, entry: BlockEntry) -> Any:
    """Returns the parts of a block if its fused forward may run now, or None.

    It runs at every call, or when ``torch.compile`` traces.
    """
    if torch.compiler.is_compiling():
        parts = _parts_if_traced(block, entry)
    elif torch_module._has_any_global_hook():
        return None
    else:
        known = known_of(block, ExaminedBlock)
        if known is None:
            known = examine(block, entry)
            # A transform and a mode have put tensors in the places of parameters, which must not be kept.
            if not modes.is_transformed() and not torch._C._len_torch_dispatch_stack():
                known.keep()
        parts = known.parts
    if isinstance(parts, BlockParts) and not parts.drops_probabilities and parts.dropout_p() > 0:
        return None
    return parts


def examine(block: nn.Module, entry: BlockEntry) -> ExaminedBlock:
    """Examines a block, without keeping the result."""
    parts = parts_or_why_not(block, entry, in_call=True)
    modules = list(itertools.islice(block.modules(), 1, None))
    if isinstance(parts, BypassedParts):
        modules = [module for module, _ in parts.modules]
    known = ExaminedBlock(block, modules)  # first: what changes meanwhile is noticed
    if (
        not isinstance(parts, str)
        and (why_another_forward(block, entry) or _why_other_parts(block, entry, parts)) is None
    ):
        known.parts = parts.prepared()
    return known


def _parts_if_traced(block: nn.Module, entry: BlockEntry) -> Parts | None:
    """Returns the parts, or None, by checks that ``torch.compile`` can trace and guard."""
    forward = getattr(type(block), UNFUSED, type(block)).forward
    parts = parts_or_why_not(block, entry, in_call=True)
    if isinstance(parts, str) or _why_another_forward(block, entry, forward) is not None:
        return None
    modules = [module for module, _ in parts.bypassed()]
    if isinstance(parts, BlockParts):
        modules += [
            module for module in block.modules() if type(module) not in _CALLED and module is not block
        ]
    if any(is_watched(module) and why_must_be_called(module) is not None for module in modules):
        return None
    return parts.prepared()


def _why_another_forward(block: nn.Module, entry: BlockEntry, forward: Any) -> str | None:
    """Returns :func:`why_another_forward`, asked once for each forward that the class has."""
    return why_another_forward(block, entry)


_why_another_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]

#: The classes whose modules are called where somebody watches them.
_CALLED = nn.Linear, nn.Dropout, nn.Identity, LinearInt8


def why_not_now(block: nn.Module, entry: BlockEntry) -> str | None:
    """Returns why a block that matches its entry cannot run fused now, or None."""
    parts = parts_or_why_not(block, entry)
    if isinstance(parts, str):
        return parts
    reason = _why_other_parts(block, entry, parts)
    if reason is None and isinstance(parts, BlockParts):
        reason = parts.why_dropout_active()
    return reason


def _why_other_parts(block: nn.Module, entry: BlockEntry, parts: Parts) -> str | None:
    modules = [module for module, _ in parts.bypassed()] + _holders(block, parts)
    reasons = (_why_noticed(block, module) for module in modules)
    return (
        next(filter(None, reasons), None)
        or _why_shadowed(block, ("_modules",))
        or _why_another_holder(block, entry, parts)
    )


def _why_noticed(root: nn.Module, module: nn.Module) -> str | None:
    """Returns why somebody would notice that a module within another one is not called, or None."""
    if (reason := why_must_be_called(module)) is not None:
        return f"{_path_of(root, module)} {reason}"
    kind = original_class(type(module))
    if kind in _PLAIN or kind.forward is nn.Module.forward or (patch := patch_of(kind)) is None:
        return None
    return f"the forward of {_path_of(root, module)} is patched by {patch}"


def _why_shadowed(root: nn.Module, members: tuple[str, ...]) -> str | None:
    """Returns which member of a module within another one has an attribute in its place, or None."""
    for path, module in root.named_modules():
        for name in itertools.chain.from_iterable(getattr(module, kind) for kind in members):
            if name in vars(module):
                return f"{path}.{name}".lstrip(".") + " is shadowed by an attribute of the module"
    return None


# Whether a stage or a layer can run as one ----------------------------------------------------------------


def why_not_freezable(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Returns why a stage or a layer cannot run as one now, or None."""
    if (reason := why_another_forward(stage, entry)) is not None:
        return reason
    if entry.is_only_served and not all(p.device.type in ("cpu", "meta") for p in stage.parameters()):
        return "is served on a CPU only, not on a GPU"
    parts: Any = _built_parts(stage, entry)
    if isinstance(parts, str):
        return parts
    blocks = [parts] if isinstance(parts, BlockParts) else parts.blocks
    if any(each.pooling is not None for each in blocks):
        return "its attention is linear, which no operator computes together with the rest of the layer"
    reason = _why_other_modules(stage, entry)
    if reason is None and isinstance(entry, StageEntry):
        reason = entry.why_unsupported(stage)
    return (
        reason
        or next(filter(None, (_why_linears_unsupported(stage, each) for each in blocks)), None)
        or _why_other_work(stage, parts)
        or _why_tensors_unsupported(stage)
        or (_why_stage_unsupported(parts) if isinstance(parts, StageParts) else None)
    )


def _why_other_modules(stage: nn.Module, entry: ServedEntry) -> str | None:
    for path, block, block_entry in blocks_in(stage):
        reason = why_another_forward(block, block_entry) or why_not_now(block, block_entry)
        if reason is not None:
            return f"{path} is not as upstream has it: {reason}" if path else reason
    for module in itertools.islice(stage.modules(), 1, None):
        kind = original_class(type(module))
        if not (kind in _PLAIN or _is_upstreams(kind, entry) or is_named(kind, FROZEN_BATCH_NORMS)):
            return f"{_path_of(stage, module)} {why_another_class(module)}"
        if (reason := _why_noticed(stage, module)) is not None:
            return reason
    return _why_shadowed(stage, ("_parameters", "_buffers", "_modules"))


def _why_other_work(stage: nn.Module, parts: StageParts | BlockParts) -> str | None:
    """Returns which module within a stage does work that the served stage would not do, or None."""
    known = set(parts.modules())
    for path, module in stage.named_modules():
        if module not in known and (isinstance(module, _WORKING) or type(module).__name__ in _WORKING_NAMES):
            return f"{path} is a {class_name(type(module))}, which upstream does not have there"
    return None


def _why_stage_unsupported(parts: StageParts) -> str | None:
    norms = [parts.batch_norm, *(norm for block in parts.blocks for _, norm in block.pairs())]
    if any(norm is not None and norm.running_mean is None for norm in norms):
        return "a BatchNorm has no running statistics"
    reason = None if parts.last_norm is None else why_norms_unsupported(parts.last_norm)
    if reason is not None:
        return reason
    if type(parts.conv) is not nn.Conv2d:
        return f"the convolution of the embedding {why_another_class(parts.conv, 'Conv2d')}"
    if not is_plain_embedding(parts.conv):
        return (
            "the convolution of the embedding is not the same in both directions, dense and padded by zeros"
        )
    return None


def _why_linears_unsupported(stage: nn.Module, parts: BlockParts) -> str | None:
    for layer in parts.layers():
        if type(layer) not in (nn.Linear, LinearInt8) or is_watched(layer):
            return f"{_path_of(stage, layer)} {why_another_class(layer, 'a plain nn.Linear or LinearInt8')}"
    return None


def _why_tensors_unsupported(stage: nn.Module) -> str | None:
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
