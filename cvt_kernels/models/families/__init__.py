"""Entries of models: a file per family says which module is which part, in a :class:`~..blocks.Family`.

The tables of all families are here. A new family is a file and its name in ``FAMILIES``.
"""

from __future__ import annotations

from torch import nn

from ..blocks import BlockEntry, ServedEntry, StageEntry
from . import cvt, glpn, pvt, segformer, timm, vit

FAMILIES = tuple(family.FAMILY for family in (cvt, segformer, glpn, pvt, vit, timm))

_ENTRIES = tuple(entry for family in FAMILIES for entry in family.entries)
_RECOGNIZED = [family.recognize for family in FAMILIES if family.recognize is not None]
_STAGES_RECOGNIZED = [family.recognize_stage for family in FAMILIES if family.recognize_stage is not None]
_NAMED = [entry for family in FAMILIES if family.recognize is None for entry in family.entries]
#: Class name → entries, several for a name with variants.
_BY_NAME = {each.name: [entry for entry in _NAMED if entry.name == each.name] for each in _NAMED}
_NAMED_STAGES = {
    entry.name: entry for family in FAMILIES if family.recognize_stage is None for entry in family.stages
}

#: The models that have blocks with an entry, for messages.
MODELS = ", ".join(model for family in FAMILIES for model in family.models)
#: Every entry of a block, an embedding or a head, by its key.
TABLE: dict[str, BlockEntry] = {entry.key: entry for entry in _ENTRIES}
#: Every entry of what is served as one, by its key: stages, and layers of pyramids.
SERVED: dict[str, ServedEntry] = {
    entry.serving_key: entry
    for entry in (
        *(stage for family in FAMILIES for stage in family.stages),
        *(entry for entry in _ENTRIES if entry.is_layer),
    )
}
#: The entries of other projects' classifiers by the names of their classes.
CLASSIFIERS = {entry.name: entry for family in FAMILIES for entry in family.classifiers}


def recognize(module: nn.Module, parent: nn.Module | None) -> BlockEntry | None:
    """Returns the entry of a module, which may depend on the module that it is in; None for others.

    A module that has the name only gets an entry too, with which it will not agree.
    """
    for recognized in _RECOGNIZED:
        if (entry := recognized(module, parent)) is not None:
            return entry
    names = (cls.__name__ for cls in type(module).__mro__)
    variants = next((_BY_NAME[name] for name in names if name in _BY_NAME), ())
    alike = (entry for entry in variants if not entry.variant or entry.variant in module._modules)
    return next(alike, variants[0] if variants else None)


def recognize_stage(module: nn.Module) -> StageEntry | None:
    """Returns the entry of a stage; None for other modules."""
    named = (_NAMED_STAGES.get(cls.__name__) for cls in type(module).__mro__)
    found = (recognized(module) for recognized in _STAGES_RECOGNIZED)
    return next(filter(None, (*named, *found)), None)
