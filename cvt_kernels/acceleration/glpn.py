"""GLPN's blocks, transformers/models/glpn/modeling_glpn.py: those of SegFormer in transformers 4."""

from __future__ import annotations

from typing import Any

from .pyramid import PyramidParts
from .segformer import parts_of_4


def parts(layer: Any) -> PyramidParts:
    """Returns the parts of a ``GLPNLayer``."""
    return parts_of_4(layer)
