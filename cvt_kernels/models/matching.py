"""Finds the blocks of a model that have an entry in the table, and checks that they match it."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .. import checks, modes
from ..classes import original_class
from ..ops.linear_int8.modules import LinearInt8
from .blocks import (
    BlockEntry,
    BlockParts,
    BypassedParts,
    Kinds,
    Parts,
    StageEntry,
    Unsupported,
    is_named,
    why_another_class,
)
from .class_token import ClassifierEntry
from .families import CLASSIFIERS, MODELS, recognize
from .families.cvt import MODULE
from .watching import (
    BYPASSED,
    Examined,
    is_only_recorded,
    is_watched,
    known_of,
    patch_of,
    why_must_be_called,
    why_tensors_not_plain,
)

#: The classes that a block may consist of, besides upstream's.
PLAIN = frozenset((*BYPASSED, nn.Identity, nn.ModuleList, nn.Sequential))


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module, BlockEntry]]:
    """Returns path, block and entry of all blocks that may be fused, in the model's order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: There is no such block.
    """
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
    """Returns the blocks of :func:`find_blocks`, or an empty list.

    Raises:
        TypeError: ``model`` is not a module.
    """
    checks.check_kind("model", model, nn.Module)
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    found = []
    for path, module in model.named_modules():
        entry = recognize(module, parents.get(id(module)))
        if entry is not None:
            found.append((path, module, entry))
    return found


def classifier_of(module: nn.Module) -> ClassifierEntry | None:
    """Returns the entry of a classifier that has upstream's forward; None for other modules."""
    owner = _owner_of_forward(module)
    entry = CLASSIFIERS.get(owner.__name__)
    if entry is None or _replaced_method(module, owner) is not None:
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


def why_another_forward(block: nn.Module, entry: BlockEntry) -> str | None:
    """Returns why the forward and the members of a block are not upstream's, or are unserved, or None."""
    if entry.why_unserved:
        return entry.why_unserved
    owner = _owner_of_forward(block)
    if owner.__name__ != entry.name:
        return f"{owner.__qualname__} has a forward of its own, not that of {entry.upstream}'s {entry.name}"
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


def parts_or_why_not(block: nn.Module, entry: BlockEntry) -> Parts | str:
    """Returns the parts of a block, or why it has none for a fused forward."""
    parts = built_parts(block, entry)
    if isinstance(parts, str):
        return parts
    for module, kinds in parts.bypassed():
        if type(module) not in kinds and not is_named(type(module), kinds):
            return f"{_path_of(block, module)} {_why_another_kind(module, kinds)}"
        if (reason := why_tensors_not_plain(module)) is not None:
            return f"{_path_of(block, module)} {reason}"
    return parts.why_unsupported() or parts


def built_parts(module: nn.Module, entry: BlockEntry | StageEntry) -> Any:
    """Returns the parts of a block or a stage, or why it is not built like upstream's."""
    try:
        return entry.parts(module)
    except Unsupported as error:
        return str(error)
    except AttributeError as error:
        return f"is not built as upstream's: {error}"


def _why_another_kind(module: Any, kinds: Kinds) -> str:
    names = (kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
    expected = " or ".join(dict.fromkeys(names))
    return f"is missing, expected {expected}" if module is None else why_another_class(module, expected)


def _why_another_holder(block: nn.Module, entry: BlockEntry, parts: Parts) -> str | None:
    """Returns which module around a block's parts is not upstream's, or None."""
    for module in _holders(block, parts):
        owner = _owner_of_forward(module)
        if type(module) not in PLAIN and not is_named(owner, entry.classes):
            return f"{_path_of(block, module)} {why_another_class(module)}"
        replaced = None if type(module) in PLAIN else _replaced_method(module, owner)
        if replaced is not None:
            return (
                f"{replaced} of {_path_of(block, module)} is not that of {entry.upstream}'s {owner.__name__}"
            )
    return None


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
    """A block that was called.

    Attributes:
        parts: Its parts; None if it does not run fused.
    """

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
        parts = _examined(block, entry).parts
    if isinstance(parts, BlockParts) and not parts.drops_probabilities and parts.dropout_p() > 0:
        return None
    return parts


def _examined(block: nn.Module, entry: BlockEntry) -> ExaminedBlock:
    """Examines a block if it has changed."""
    known = known_of(block, ExaminedBlock)
    if known is None:
        known = examine(block, entry)
        # A transform and a mode have put tensors in the places of parameters, which must not be kept.
        if not modes.is_transformed() and not torch._C._len_torch_dispatch_stack():
            known.keep()
    return known


def examine(block: nn.Module, entry: BlockEntry) -> ExaminedBlock:
    """Examines a block, without keeping the result."""
    parts = parts_or_why_not(block, entry)
    modules = list(itertools.islice(block.modules(), 1, None))
    if isinstance(parts, BypassedParts):
        modules = [module for module, _ in parts.modules]
    known = ExaminedBlock(block, modules)  # first: what changes meanwhile is noticed
    if not isinstance(parts, str) and _why_other_parts(block, entry, parts) is None:
        known.parts = parts.prepared()
    return known


def _parts_if_traced(block: nn.Module, entry: BlockEntry) -> Parts | None:
    """Returns the parts, or None, by checks that ``torch.compile`` can trace and guard."""
    parts = parts_or_why_not(block, entry)
    if isinstance(parts, str):
        return None
    modules = [module for module, _ in parts.bypassed()]
    if isinstance(parts, BlockParts):
        modules += [
            module for module in block.modules() if type(module) not in _CALLED and module is not block
        ]
    if any(is_watched(module) and not is_only_recorded(module) for module in modules):
        return None
    return parts.prepared()


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
    """Returns which module is not upstream's, or must be called, or None."""
    for module in (*(module for module, _ in parts.bypassed()), *_holders(block, parts)):
        reason = why_must_be_called(module)
        if reason is not None and not is_only_recorded(module):
            return f"{_path_of(block, module)} {reason}"
        if type(module) not in PLAIN and (patch := patch_of(original_class(type(module)))) is not None:
            return f"the forward of {_path_of(block, module)} is patched by {patch}"
    for path, module in block.named_modules():
        for name in module._modules.keys() & vars(module).keys():
            return f"{path}.{name}".lstrip(".") + " is shadowed by an attribute of the module"
    return _why_another_holder(block, entry, parts)
