"""PVT and PVT v2 of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..blocks import HUGGING_FACE, BlockEntry, BlockParts, BypassedParts, Family, RecordedEntry, parts_of_norm
from ..encoders import encode_pvt, encode_pvt_v2
from ..fused import embed_tokens, normalize
from .pyramids import block_entry, common_parts, embeddings_entry, encoder_entry, stage_entry


def _pvt_block(self: Any) -> BlockParts:
    attention, mlp = self.attention.self, self.mlp
    reduces = attention.sequences_reduction_ratio > 1
    return BlockParts(
        **common_parts(self, attention, attention.dropout),
        reduction=(attention.sequence_reduction, attention.layer_norm) if reduces else None,
        proj=self.attention.output.dense,
        drops=(self.attention.output.dropout, mlp.dropout, mlp.dropout),
    )


def _pvt_v2_block(self: Any) -> BlockParts:
    attention, mlp = self.attention, self.mlp
    pooling = reduction = None
    if attention.linear_attention:
        pooling = attention.pool, attention.spatial_reduction, attention.layer_norm, attention.act
    elif attention.spatial_reduction_ratio > 1:
        reduction = attention.spatial_reduction, attention.layer_norm
    return BlockParts(
        **common_parts(self, attention, attention.attn_drop),
        reduction=reduction,
        pooling=pooling,
        proj=attention.proj,
        relu=mlp.relu,
        mix=mlp.dwconv.dwconv,
        drops=(attention.proj_drop, mlp.dropout, mlp.dropout),
    )


def _pvt_embeddings(self: Any, pixel_values: Tensor) -> Any:
    if pixel_values.ndim == 4 and pixel_values.shape[1] != self.num_channels:
        return NotImplemented  # upstream has an error for it
    tokens, height, width = embed_tokens(self.projection, self.layer_norm, pixel_values)
    positions = self.position_embeddings
    if self.cls_token is not None:
        tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
    if positions.shape[1] != tokens.shape[1]:
        raise _no_positions(self, pixel_values, (height, width))
    # Upstream interpolates them from this grid to this grid, which changes nothing.
    return self.dropout(tokens + positions), height, width


def _no_positions(embeddings: Any, pixel_values: Tensor, grid: tuple[int, int]) -> ValueError:
    """Returns the error for images of another size than a PVT has positions for."""
    size = embeddings.image_size
    of_model = tuple(pixels // patch for pixels, patch in zip(size, embeddings.patch_size, strict=True))
    got, patches, expected, positions = (
        "×".join(map(str, pair)) for pair in (pixel_values.shape[2:], grid, size, of_model)
    )
    return ValueError(
        f"pixel_values: got {got} pixels, a grid of {patches} patches, expected {expected} pixels, a grid of "
        f"{positions}: this PVT has position embeddings for images of its config's image_size alone"
    )


def _stage_of_pvt_v2(self: Any, hidden_states: Tensor, output_attentions: Any) -> Any:
    tokens, height, width = self.patch_embedding(hidden_states)
    maps: tuple[Any, ...] = ()
    for block in self.blocks:
        tokens, *others = block(tokens, height, width, output_attentions)
        maps += tuple(others)
    tokens = normalize(self.layer_norm, tokens)
    return ((tokens, maps) if output_attentions else (tokens,)), height, width


_V2_LAYER = block_entry(
    "PvtV2BlockLayer",
    _pvt_v2_block,
    layers=(
        *(f"attention.{word}" for word in ("query", "key", "value", "proj")),
        *("mlp.dense1", "mlp.dense2"),
    ),
)
_ENCODER = encoder_entry(
    "PvtEncoder",
    encode_pvt,
    lambda self: parts_of_norm(self.layer_norm),
    *("patch_embeddings", "block", "layer_norm"),
)
_V2_ENCODER = encoder_entry("PvtV2Encoder", encode_pvt_v2, lambda self: BypassedParts([]), "layers")

FAMILY = Family(
    entries=(
        BlockEntry(
            upstream=HUGGING_FACE,
            name="PvtPatchEmbeddings",
            arguments=("pixel_values",),
            children=frozenset(("position_embeddings", "cls_token", "projection", "layer_norm", "dropout")),
            layers=("projection",),
            forward=_pvt_embeddings,
            parts=lambda self: parts_of_norm(self.layer_norm),
        ),
        block_entry("PvtLayer", _pvt_block),
        embeddings_entry("PvtV2OverlapPatchEmbeddings"),
        _V2_LAYER,
        BlockEntry(
            upstream=HUGGING_FACE,
            name="PvtV2EncoderLayer",
            arguments=("hidden_states", "output_attentions"),
            children=frozenset(("patch_embedding", "blocks", "layer_norm")),
            forward=_stage_of_pvt_v2,
            parts=lambda self: parts_of_norm(self.layer_norm),
        ),
        _ENCODER,
        _V2_ENCODER,
    ),
    stages=(
        stage_entry(
            "PvtV2EncoderLayer",
            _V2_LAYER,
            lambda stage, tokens, grid: ((tokens,), *grid),
            embedding="patch_embedding",
            last_argument="output_attentions",
            tokens=lambda result: result[0][0],
            others=(False,),
        ),
    ),
    recorded=(RecordedEntry(_ENCODER), RecordedEntry(_V2_ENCODER)),
)
