"""GLPN's blocks, transformers/models/glpn/modeling_glpn.py: those of SegFormer before transformers 5."""

from __future__ import annotations

from typing import Any

from torch import nn

from .entries import BlockEntry, recognize_variant, variants_by_name
from .parts import BlockParts
from .segformer import entries_of_4, parts_of_4

ENTRIES = variants_by_name(*entries_of_4("GLPN"))


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module by the name of its class or of a base of it; None for others."""
    return recognize_variant(module, ENTRIES)


def parts(layer: Any) -> BlockParts:
    """Returns the parts of a ``GLPNLayer``."""
    return parts_of_4(layer)
