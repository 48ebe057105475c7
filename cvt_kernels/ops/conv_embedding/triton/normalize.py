"""The kernel that turns a convolution's result into tokens, behind PyTorch's own convolution without bias."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....launch import launching
from ...triton_launch import grid_dependency_synchronize
from .common import (
    MAX_CHANNELS,
    Parts,
    add_position,
    channels_of,
    configuration,
    layer_norm,
    load_vector,
    store_class_token,
)


@triton.jit
def _conv_embedding_normalize_kernel(
    x_ptr, bias_ptr, gamma_ptr, beta_ptr, class_token_ptr, positions_ptr, out_ptr, eps, tokens, tiles,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of REPEATS · ROWS tokens of x (B, T, C), and with an image's first the class token."""
    grid_dependency_synchronize()
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
    WIDTH: tl.constexpr = PARTS.width
    image = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    x_ptr += image * tokens * C
    out_ptr += image * tokens * C
    if class_token_ptr is not None:
        out_ptr += image * C
        if tile == 0:
            store_class_token(out_ptr, class_token_ptr, positions_ptr, PARTS)
        out_ptr += C
        if positions_ptr is not None:
            positions_ptr += C
    # The last two dimensions have one vector of each thread, the first its rows: they share γ, β and bias.
    row = tl.arange(0, REPEATS)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, :, None]
    t = tile * (REPEATS * ROWS) + row
    xs = ()
    for part in tl.static_range(COUNT):
        c = channels_of(part, PARTS)[None, None, :]
        mask = t < tokens
        if (part + 1) * WIDTH > C:
            mask = mask & (c < C)
        xs = xs + (tl.load(x_ptr + t * C + c, mask=mask, other=0.0).to(PARTS.accumulator),)
    zeros = tl.zeros([1, ROWS, 1], tl.int32)
    bias = load_vector(bias_ptr, zeros, PARTS)
    gamma = load_vector(gamma_ptr, zeros, PARTS)
    beta = load_vector(beta_ptr, zeros, PARTS)
    ys = layer_norm(xs, bias, gamma, beta, eps, PARTS)
    for part in tl.static_range(COUNT):
        c = channels_of(part, PARTS)[None, None, :]
        mask = t < tokens
        if (part + 1) * WIDTH > C:
            mask = mask & (c < C)
        y = add_position(ys[part], positions_ptr, t * C + c, mask, PARTS)
        tl.store(out_ptr + t * C + c, y.to(out_ptr.dtype.element_ty), mask=mask)


def normalize(
    x: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    class_token: Tensor | None, positions: Tensor | None, *, eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the tokens, in ``dtype``, of a convolution's result (B, T, C), contiguous and without bias."""
    batch, tokens, channels = x.shape
    parts = Parts.of(channels, x, least=1, most=MAX_CHANNELS)
    config = configuration("normalize", channels, x)
    vector = 16 // x.element_size()
    rows = max(32 * config.num_warps * vector // parts.width, 1)
    repeats = max(config.elements // triton.next_power_of_2(rows * parts.width * parts.count), 1)
    tiles = -(-tokens // (rows * repeats))
    out = x.new_empty(batch, tokens + (class_token is not None), channels, dtype=dtype)
    launching.launch(
        _conv_embedding_normalize_kernel, (batch * tiles,), on=x, options=config.options,
        x_ptr=x, bias_ptr=bias, gamma_ptr=norm_weight, beta_ptr=norm_bias, class_token_ptr=class_token,
        positions_ptr=positions, out_ptr=out, eps=eps, tokens=tokens, tiles=tiles,
        REPEATS=repeats, ROWS=rows, PARTS=parts,
    )  # fmt: skip
    return out
