"""The kernel that computes convolution, bias and LayerNorm at once, for windows side by side.

A convolution whose stride is its kernel size, without padding, is a product: each pixel is in one window.
With channels last a window is k runs of k · in_channels adjacent elements, one in each of its rows, so the
kernel reads the image in place, once, and writes the normalized tokens once. A tile has whole tokens, whose
sums stay in registers for LayerNorm. It reduces the tokens of keys and values in SegFormer and PVT, and
embeds PVT's patches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch, launching
from ....launch import formulas
from ....launch.records import Product
from ...linear.triton.common import MAX_NORMALIZED, padded, part_width
from ...triton_launch import grid_dependency_synchronize, product_types
from .common import Parts, channels_of, layer_norm, load_vector

launch.register(Product, formulas.patches, "conv_embedding_patches")


def why_not_gathered(
    image: Tensor, weight: Tensor, stride: int, padding: int, class_token: Tensor | None
) -> str | None:
    """Returns why ``gather`` should not compute the tokens of an image, or None."""
    channels, inputs, kernel_size, _ = weight.shape
    if stride != kernel_size or padding:
        return "windows overlap or are apart"
    if image.stride(3) != inputs or (inputs > 1 and image.stride(1) != 1):
        return "channels are not last"
    if image.dtype == torch.float32:  # so in TF32 where cuDNN takes it, and only there
        return "float32 would need more registers than there are"
    if channels > MAX_NORMALIZED:
        return f"tokens have {channels} channels, more than {MAX_NORMALIZED}"
    if class_token is not None:
        return "there is a class token"
    tokens = (image.shape[2] // stride) * (image.shape[3] // stride)
    if image.shape[0] * tokens >= 2**31 - MAX_NORMALIZED or weight.numel() >= 2**31:
        return "there are too many tokens or weights for 32-bit offsets"
    return None


class Gathering(NamedTuple):
    """The compile-time constants of a kernel besides its parts of rows: ``GATHER`` in the kernel.

    Attributes:
        kernel_size: k, rows and columns of a window.
        length: k · in_channels, adjacent elements of a row of a window.
        block_m, block_k: See ``Product``.
        operand: See :func:`product_types`.
    """

    kernel_size: int
    length: int
    block_m: int
    block_k: int
    operand: Any


@triton.jit(do_not_specialize=["rows", "tokens", "out_width"])
def _conv_embedding_patches_kernel(
    image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, out_ptr, eps, rows, tokens, out_width,
    image_stride, row_stride, GATHER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes block_m tokens. Weights are (channels, k, k, in_channels), contiguous."""
    grid_dependency_synchronize()
    K: tl.constexpr = GATHER.kernel_size
    LENGTH: tl.constexpr = GATHER.length
    M: tl.constexpr = GATHER.block_m
    BLOCK_K: tl.constexpr = GATHER.block_k
    STEPS: tl.constexpr = (LENGTH + BLOCK_K - 1) // BLOCK_K
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
    WIDTH: tl.constexpr = PARTS.width
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < rows)[:, None]
    t = row % tokens
    row_step = tl.cast(row_stride, tl.int64)
    first = (
        (row // tokens).to(tl.int64) * image_stride + t // out_width * K * row_step + t % out_width * LENGTH
    )
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([M, WIDTH], PARTS.accumulator),)
    for step in range(K * STEPS):
        y = step // STEPS
        k = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = inside
        if LENGTH % BLOCK_K != 0:
            mask = mask & (k < LENGTH)[None, :]
        x = tl.load(image_ptr + (first + y * row_step)[:, None] + k[None, :], mask=mask, other=0.0)
        x = x.to(GATHER.operand)
        new_sums = ()
        for part in tl.static_range(COUNT):
            c = channels_of(part, PARTS)
            ptrs = w_ptr + c[:, None] * (K * LENGTH) + (y * LENGTH + k)[None, :]
            if C % WIDTH == 0 and LENGTH % BLOCK_K == 0:
                weight = tl.load(ptrs)
            else:
                weight = tl.load(ptrs, mask=(c < C)[:, None] & (k < LENGTH)[None, :], other=0.0)
            product = tl.dot(x, weight.to(GATHER.operand).T, sums[part], out_dtype=PARTS.accumulator)
            new_sums = new_sums + (product,)
        sums = new_sums
    bias = load_vector(bias_ptr, 0, PARTS)
    gamma = load_vector(gamma_ptr, 0, PARTS)
    beta = load_vector(beta_ptr, 0, PARTS)
    ys = layer_norm(sums, bias, gamma, beta, eps, PARTS)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * C
    for part in tl.static_range(COUNT):
        c = channels_of(part, PARTS)
        mask = inside
        if (part + 1) * WIDTH > C:
            mask = mask & (c < C)[None, :]
        tl.store(out_ptrs + c[None, :], ys[part].to(out_ptr.dtype.element_ty), mask=mask)


def gather(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    *, eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the tokens of an image, read in place, in ``dtype``.

    A weight with channels last is read in place too.
    """
    batch, inputs, height, width = image.shape
    channels, kernel_size = weight.shape[0], weight.shape[3]
    out_width, length = width // kernel_size, kernel_size * inputs
    tokens = height // kernel_size * out_width
    rows, sizes = batch * tokens, (kernel_size * length, channels)
    config: Product = launch.configuration(
        "conv_embedding_patches", image.dtype, sizes, rows, launching.chip(image.device)
    )
    part = part_width(channels, config.width, config.parts)
    accumulator = tl.float64 if image.dtype == torch.float64 else tl.float32
    constants = Gathering(
        kernel_size, length, config.block_m, min(config.block_k, padded(length)),
        product_types(image.dtype)["operand"],
    )  # fmt: skip
    out = image.new_empty(batch, tokens, channels, dtype=dtype)
    launching.launch(
        _conv_embedding_patches_kernel, (-(-rows // config.block_m),), on=image, options=config.options,
        image_ptr=image, w_ptr=weight.permute(0, 2, 3, 1).contiguous(), bias_ptr=bias, gamma_ptr=norm_weight,
        beta_ptr=norm_bias, out_ptr=out, eps=eps, rows=rows, tokens=tokens, out_width=out_width,
        image_stride=image.stride(0), row_stride=image.stride(2), GATHER=constants,
        PARTS=Parts(channels, part, -(-channels // part), accumulator),
    )  # fmt: skip
    return out
