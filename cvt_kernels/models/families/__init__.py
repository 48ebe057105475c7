"""Entries of models: a file per family says which module is which part, in a :class:`~..blocks.Family`.

The tables of all families are here. A new family is a file and its name in ``FAMILIES``.
"""

from __future__ import annotations

from torch import nn

from ..blocks import BlockEntry, ServedEntry, StageEntry, named, recognize_by_name
from . import cvt, glpn, pvt, segformer, timm, vit

FAMILIES = tuple(family.FAMILY for family in (cvt, segformer, glpn, pvt, vit, timm))

_ENTRIES = tuple(entry for family in FAMILIES for entry in family.entries)
_RECOGNIZED = [family.recognize for family in FAMILIES if family.recognize is not None]
_STAGES_RECOGNIZED = [family.recognize_stage for family in FAMILIES if family.recognize_stage is not None]
_NAMED = named(*(entry for family in FAMILIES if family.recognize is None for entry in family.entries))
_NAMED_STAGES = {
    entry.block.name: entry
    for family in FAMILIES
    if family.recognize_stage is None
    for entry in family.stages
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
    """Returns the entry of a module, which may depend on the module that it is in; None for others."""
    found = (recognized(module, parent) for recognized in _RECOGNIZED)
    return next(filter(None, found), None) or recognize_by_name(module, _NAMED)


def recognize_stage(module: nn.Module) -> StageEntry | None:
    """Returns the entry of a stage; None for other modules."""
    named = (_NAMED_STAGES.get(cls.__name__) for cls in type(module).__mro__)
    found = (recognized(module) for recognized in _STAGES_RECOGNIZED)
    return next(filter(None, (*named, *found)), None)
