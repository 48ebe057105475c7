"""GLPN of transformers, whose blocks are copies of SegFormer's of transformers 4."""

from __future__ import annotations

from ..blocks import HUGGING_FACE, BlockEntry, BypassedParts, Family, RecordedEntry
from .pyramids import block_entry, embeddings_entry, encoder_entry
from .segformer import block_of_4

FAMILY = Family(
    entries=(embeddings_entry("GLPNOverlapPatchEmbeddings"), block_entry("GLPNLayer", block_of_4)),
    recorded=(
        encoder_entry("GLPNEncoder", "patch_embeddings", "block", "layer_norm"),
        RecordedEntry(
            BlockEntry(
                upstream=HUGGING_FACE,
                name="GLPNDecoder",
                arguments=("hidden_states",),
                children=frozenset(("stages", "final_upsample")),
                parts=lambda self: BypassedParts([]),
            ),
            classes=frozenset(("GLPNDecoderStage", "GLPNSelectiveFeatureFusion")),
        ),
    ),
)
