"""Recognition: which blocks of a model the table knows, and whether a block is what its entry expects.

Blocks are recognized by the names and the structure of their classes; nothing upstream is imported. Two
questions follow: :func:`why_mismatched`, once for all, and :func:`why_not_now`, in every call, since a
submodule may have been replaced or got a hook in between.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from types import NoneType
from typing import Any

from torch import nn

from ..graphs import UNGRAPHED, cached, ungraphed_class, with_bases
from . import huggingface, microsoft, ours, pvt, segformer
from .entries import BlockEntry, BypassedPart, why_another_class
from .fused import is_watched, patch_of, why_must_be_called

_PYRAMIDS = segformer, pvt

#: Every entry by its key.
TABLE: dict[str, BlockEntry] = {
    entry.key: entry for upstream in (huggingface, microsoft, ours) for entry in upstream.ENTRIES.values()
} | {entry.key: entry for upstream in _PYRAMIDS for each in upstream.ENTRIES.values() for entry in each}


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module, BlockEntry]]:
    """Returns path, block and table entry of everything in a model that may be fused, in the model's order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: There is no such block.
    """
    found = blocks_in(model)
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no block of a CvT, SegFormer, PVT, PVT v2 or GLPN; models of "
            "transformers that take attention by name can have ours by cvt_kernels.register_attention"
        )
    return found


def blocks_in(model: nn.Module) -> list[tuple[str, nn.Module, BlockEntry]]:
    """Returns what :func:`find_blocks` does, or an empty list.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_module(model)
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    found = []
    for path, module in model.named_modules():
        entry = recognize(module, parents.get(id(module)))
        if entry is not None:
            found.append((path, module, entry))
    return found


def check_module(model: object) -> None:
    """Raises TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")


def recognize(module: nn.Module, parent: nn.Module | None) -> BlockEntry | None:
    """Returns the entry of a module, which may depend on the module that it is in; None for others."""
    if ours.own_class(type(module)) is not None:
        return ours.recognize(module)
    for upstream in (huggingface, *_PYRAMIDS):
        entry = upstream.recognize(module)
        if entry is not None:
            return entry
    return microsoft.recognize(module, parent)


# Whether a block is of the class that its entry describes -------------------------------------------------


def why_mismatched(block: nn.Module, entry: BlockEntry) -> str | None:
    """Says why a block is not of the class whose work the fused forward does; None if it is."""
    owner = next(cls for cls in original_class(type(block)).__mro__ if "forward" in vars(cls))
    if owner.__name__ != entry.name:
        return f"{owner.__qualname__} has a forward of its own, not that of {entry.upstream}'s {entry.name}"
    if not entry.arguments:  # of cvt's blocks nothing more is said
        return None if owner.__module__ == ours.MODULE else f"{owner.__qualname__} has a forward of its own"
    replaced = _replaced_method(block, owner)
    if replaced is not None:
        return f"{replaced} is not that of {entry.upstream}'s {entry.name}"
    arguments = tuple(inspect.signature(owner.forward).parameters)[1:]
    if arguments != entry.arguments:
        return f"forward takes {', '.join(arguments)}; expected {', '.join(entry.arguments)}"
    members = {**block._modules, **block._parameters, **block._buffers}
    unknown = sorted(set(members) - entry.children)
    if unknown:
        return f"has {', '.join(unknown)}, which {entry.upstream}'s {entry.name} has not"
    return _why_parts_unsupported(block, entry)


def _replaced_method(block: nn.Module, owner: type) -> str | None:
    """Returns a method of ``owner`` that is patched, or overridden by the block or a class of it, or None."""
    patch = patch_of(owner)
    if patch is not None:
        return f"forward, patched by {patch},"
    public = (name for name, value in vars(owner).items() if inspect.isfunction(value) and name[0] != "_")
    mro = original_class(type(block)).__mro__
    overriding = [vars(block), *(vars(cls) for cls in mro[: mro.index(owner)])]
    # A forward set on the object is seen by coverage, since it may come and go.
    replaced = (
        name for name in public if name != "forward" and any(name in members for members in overriding)
    )
    return next(replaced, None)


# Whether the fused forward does justice to the submodules that it does not call ---------------------------


def _why_parts_unsupported(block: nn.Module, entry: BlockEntry) -> str | None:
    for part in entry.parts:
        module = _part_of(block, part)
        reason = _why_another_kind(module, part)
        if reason is not None:
            return f"{'.'.join(part.path)} {reason}"
        patch = None if module is None else patch_of(type(module))
        if patch is not None:
            return f"the forward of {'.'.join(part.path)} is patched by {patch}"
    return entry.why_unsupported(block)


def why_not_now(block: nn.Module, entry: BlockEntry) -> str | None:
    """Says why a block that was of the right class cannot run fused at the moment; None if it can."""
    if not _are_parts_bypassable(block, entry.parts):
        for part in entry.parts:
            module = _part_of(block, part)
            reason = _why_another_kind(module, part)
            if reason is None and module is not None:
                reason = why_must_be_called(module)
            if reason is not None:
                return f"{'.'.join(part.path)} {reason}"
    return entry.why_unsupported(block) or entry.why_not_now(block)


def _are_parts_bypassable(block: nn.Module, parts: tuple[BypassedPart, ...]) -> bool:
    """Says whether all parts are of their kinds and unwatched, sooner than the reason is found.

    Every call asks. False may also mean that only :func:`_part_of` finds a part.
    """
    for path, kinds in parts:
        module = block
        for name in path:
            found = module._modules.get(name)
            if found is None:
                break
            module = found
        if found is None:
            if NoneType in kinds:
                continue
            return False
        kind = type(module)
        if (kind not in kinds and not is_named(kind, kinds)) or is_watched(module):
            return False
    return True


def _part_of(block: nn.Module, part: BypassedPart) -> Any:
    module: Any = block
    for name in part.path:
        children = module._modules
        if name in children:
            module = children[name]
        elif name.isdigit() and int(name) < len(children):
            module = list(children.values())[int(name)]
        else:
            return None
    return module


def _why_another_kind(module: nn.Module | None, part: BypassedPart) -> str | None:
    kind = type(module)
    if kind in part.kinds or is_named(kind, part.kinds):
        return None
    kinds = [k for k in part.kinds if k is not NoneType]
    expected = " or ".join(k if isinstance(k, str) else k.__name__ for k in kinds)
    return f"is missing, expected {expected}" if module is None else why_another_class(module, expected)


def is_named(kind: type, names: Collection[Any]) -> bool:
    """Says whether the name of a class, with or without its module, is among some names."""
    return kind.__name__ in names or f"{kind.__module__}.{kind.__name__}" in names


# Classes without fused forwards ---------------------------------------------------------------------------


@cached
def original_class(cls: Any) -> Any:
    """Returns a class without fused forwards and CUDA graphs, its own or its bases'."""
    for mark in (UNGRAPHED, "_cvt_kernels_original"):
        if mark in vars(cls):
            return original_class(vars(cls)[mark])
    # fully_shard derives from ours
    return with_bases(cls, tuple(map(original_class, cls.__bases__)))


def is_fused(block: nn.Module) -> bool:
    """Says whether the class of a block has a fused forward."""
    return original_class(type(block)) is not ungraphed_class(type(block))
