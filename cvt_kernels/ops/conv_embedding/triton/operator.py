"""The kernel behind PyTorch's convolution without bias, the choice among the kernels, and the backend."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .... import modes
from ....backends import Record
from ....launch import launching
from ...graph_operators import launcher
from ...triton_launch import contiguous, grid_dependency_synchronize
from .common import (
    MAX_CHANNELS,
    Parts,
    Vectors,
    add_position,
    channels_of,
    configuration,
    has_class_token,
    layer_norm,
    load_vector,
    store_class_token,
    within,
)
from .embed import embed, why_not_embedded
from .patches import gather, why_not_gathered


@triton.jit
def _conv_embedding_normalize_kernel(
    x_ptr, bias_ptr, gamma_ptr, beta_ptr, class_token_ptr, positions_ptr, out_ptr, eps, tokens, tiles,
    REPEATS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes a tile of REPEATS · ROWS tokens of x (B, T, C), and with an image's first the class token."""
    grid_dependency_synchronize()
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
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
        x = tl.load(x_ptr + t * C + c, mask=within(part, t < tokens, PARTS), other=0.0)
        xs = xs + (x.to(PARTS.accumulator),)
    zeros = tl.zeros([1, ROWS, 1], tl.int32)
    bias = load_vector(bias_ptr, zeros, PARTS)
    gamma = load_vector(gamma_ptr, zeros, PARTS)
    beta = load_vector(beta_ptr, zeros, PARTS)
    ys = layer_norm(xs, bias, gamma, beta, eps, PARTS)
    for part in tl.static_range(COUNT):
        mask = within(part, t < tokens, PARTS)
        c = channels_of(part, PARTS)[None, None, :]
        y = add_position(ys[part], positions_ptr, t * C + c, mask, PARTS)
        tl.store(out_ptr + t * C + c, y.to(out_ptr.dtype.element_ty), mask=mask)


def _normalize(x: Tensor, vectors: Vectors, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns the tokens, in ``dtype``, of a convolution's result (B, T, C), contiguous and without bias."""
    batch, tokens, channels = x.shape
    parts = Parts.of(channels, x, least=1, most=MAX_CHANNELS)
    config = configuration("normalize", channels, x)
    vector = 16 // x.element_size()
    rows = max(32 * config.num_warps * vector // parts.width, 1)
    repeats = max(config.elements // triton.next_power_of_2(rows * parts.width * parts.count), 1)
    tiles = -(-tokens // (rows * repeats))
    out = x.new_empty(batch, tokens + has_class_token(vectors), channels, dtype=dtype)
    launching.launch(
        _conv_embedding_normalize_kernel, (batch * tiles,), on=x, options=config.options,
        x_ptr=x, **vectors, out_ptr=out, eps=eps, tokens=tokens, tiles=tiles,
        REPEATS=repeats, ROWS=rows, PARTS=parts,
    )  # fmt: skip
    return out


def _tokens(
    image: Tensor, weight: Tensor, bias: Any, norm_weight: Any, norm_bias: Any, stride: int, padding: int,
    eps: float, class_token: Tensor | None, positions: Any, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    height, width = ((n + 2 * padding - weight.shape[3]) // stride + 1 for n in image.shape[2:])
    tokens = height * width + (class_token is not None)
    return image.new_empty(image.shape[0], tokens, weight.shape[0], dtype=dtype)


@launcher("conv_embedding", _tokens)
def _embedding(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    stride: int, padding: int, eps: float, class_token: Tensor | None, positions: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the tokens of an image, by one kernel or by PyTorch's convolution and one kernel."""
    names = "bias_ptr", "gamma_ptr", "beta_ptr", "class_token_ptr", "positions_ptr"
    given = map(contiguous, (bias, norm_weight, norm_bias, class_token, positions))
    vectors = dict(zip(names, given, strict=True))
    if why_not_gathered(image, weight, stride, padding, class_token) is None:
        return gather(image, weight, vectors, eps, dtype)
    if why_not_embedded(image, weight, stride, padding) is None:
        return embed(image, weight, vectors, stride, padding, eps, dtype)
    if not modes.convolves_in_tf32(image):
        image = image.contiguous(memory_format=torch.channels_last)
    x = F.conv2d(image, weight, None, stride, padding)
    x = x.permute(0, 2, 3, 1).contiguous().flatten(1, 2)
    return _normalize(x, vectors, eps, dtype)


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    image, weight, bias, norm_weight, norm_bias, stride, padding, _, class_token, positions = call
    batch, _, height, width = image.shape
    channels, kernel_size = weight.shape[0], weight.shape[3]
    if modes.wants_gradient(image, weight, bias, norm_weight, norm_bias, class_token, positions):
        return "gradients are not computed"
    if batch == 0:
        return "the batch is empty"
    if image.is_cuda and image.dtype == torch.float64:
        return "float64 is computed in Triton's interpreter only"
    if channels > MAX_CHANNELS:
        return f"tokens have {channels} channels, more than {MAX_CHANNELS}"
    rows, columns = ((n + 2 * padding - kernel_size) // stride + 1 for n in (height, width))
    if rows * columns * channels >= 2**31:
        return "the tokens of one image have 2³¹ elements or more"
    return None


def conv_embedding(call: Record) -> Tensor:
    """Computes ``cvt_kernels.conv_embedding`` for checked arguments.

    Under autocast it convolves in autocast's dtype, as a convolution does, and the tokens have the dtype of
    ``F.layer_norm``, which is float32 on a GPU.
    """
    image, weight, bias, *others = call
    dtype: torch.dtype = image.dtype
    if (lower := modes.autocast_dtype(image)) is not None:
        image, weight, bias = image.to(lower), weight.to(lower), None if bias is None else bias.to(lower)
        dtype = torch.float32 if image.is_cuda else lower
    return _embedding(image, weight, bias, *[*others, dtype])
