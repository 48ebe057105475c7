"""PVT and PVT v2 of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import backends, modes
from ..blocks import HUGGING_FACE, BlockEntry, BlockParts, BypassedParts, Family, parts_of_norm
from ..encoders import encode_pvt, encode_pvt_v2
from ..forward import check_images, embed_tokens, is_one_embedding, normalize, output_grid
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
    check_images("pixel_values", pixel_values, self.projection)
    if pixel_values.shape[1] != self.num_channels:
        return NotImplemented  # upstream has an error for it
    embedding, class_token = (self.projection, self.layer_norm, pixel_values), self.cls_token
    # Upstream interpolates them from this grid to this grid, which changes nothing.
    positions = self.position_embeddings
    if is_one_embedding(*embedding, class_token, positions) and _is_for_kernels(self, pixel_values):
        _check_positions(self, pixel_values, output_grid(pixel_values, self.projection))
        class_token = None if class_token is None else class_token[0, 0]
        tokens, height, width = embed_tokens(*embedding, class_token, positions[0])
    else:
        tokens, height, width = embed_tokens(*embedding)
        _check_positions(self, pixel_values, (height, width))
        if class_token is not None:
            tokens = torch.cat((class_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
        tokens = tokens + positions
    return self.dropout(tokens), height, width


def _is_for_kernels(embeddings: Any, image: Tensor) -> bool:
    """Returns whether an embedding should add positions itself: where kernels do, which have no gradients.

    On a CPU PyTorch adds them, unless Triton is asked for. Under autocast its LayerNorm there is of 16 bits,
    but upstream's sums are of float32.
    """
    convolution, norm = embeddings.projection, embeddings.layer_norm
    parameters = convolution.weight, convolution.bias, norm.weight, norm.bias
    added = embeddings.cls_token, embeddings.position_embeddings
    if modes.wants_gradient(image, *parameters, *added):
        return False
    if image.device.type != "cpu":
        return True
    return "triton" in backends.requested_backends() and not modes.autocast_enabled(image)


def _check_positions(embeddings: Any, pixel_values: Tensor, grid: tuple[int, int]) -> None:
    """Raises ValueError for images of another size than a PVT has positions for."""
    tokens = grid[0] * grid[1] + (embeddings.cls_token is not None)
    if embeddings.position_embeddings.shape[1] == tokens:
        return
    size = embeddings.image_size
    of_model = tuple(pixels // patch for pixels, patch in zip(size, embeddings.patch_size, strict=True))
    got, patches, expected, positions = (
        "×".join(map(str, pair)) for pair in (pixel_values.shape[2:], grid, size, of_model)
    )
    raise ValueError(
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
    models=("PVT (of transformers)", "PVT v2 (of transformers)"),
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
            others=lambda grid: (False,),
        ),
    ),
)
