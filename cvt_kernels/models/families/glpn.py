"""GLPN of transformers, whose blocks are copies of SegFormer's of transformers 4."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..blocks import LAYER_NORMS, BypassedParts, Family, why_norms_unsupported
from ..encoders import encode_glpn
from ..heads import DEPTH_ENTRIES
from .pyramids import block_entry, embeddings_entry, encoder_entry
from .segformer import block_of_4


def _norms(self: Any) -> BypassedParts:
    norms = self.layer_norm
    bypassed = [(norms, (nn.ModuleList,)), *((norm, LAYER_NORMS) for norm in norms)]
    return BypassedParts(bypassed, why_norms_unsupported(*norms))


_ENCODER = encoder_entry("GLPNEncoder", encode_glpn, _norms, "patch_embeddings", "block", "layer_norm")

FAMILY = Family(
    models=("GLPN (of transformers)",),
    entries=(
        embeddings_entry("GLPNOverlapPatchEmbeddings"),
        block_entry("GLPNLayer", block_of_4),
        _ENCODER,
        *DEPTH_ENTRIES,
    ),
)
