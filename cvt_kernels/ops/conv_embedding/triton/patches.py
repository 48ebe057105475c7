"""The kernel that computes convolution, bias and LayerNorm at once, for windows side by side.

A convolution whose stride is its kernel size, without padding, is a product: each pixel is in one window.
With channels last a window is k runs of k · in_channels adjacent elements, one in each of its rows, so the
kernel reads the image in place, once, and writes the normalized tokens once. A tile has whole tokens, whose
sums stay in registers for LayerNorm. It reduces the tokens of keys and values in SegFormer and PVT, and
embeds PVT's patches.

A weight is read as it lies, too: with channels last (OHWI), the order of the windows in memory, or as a
parameter lies, with channels first (OIHW). A step then has a few pixels of a few channels, and the windows
take the weight's order in registers, and no launch copies the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch
from ....launch import formulas, launching
from ....launch.records import Product
from ...linear.triton.common import MAX_NORMALIZED, part_width
from ...triton_launch import grid_dependency_synchronize, padded, product_types
from .common import (
    Parts,
    Vectors,
    add_position,
    channels_of,
    has_class_token,
    layer_norm,
    load_vector,
    within,
)

#: The most pixels of a step with channels first: 16 bytes of the weight are adjacent then, as are 8 channels
#: of the image.
_PIXELS = 8

launch.register(Product, formulas.patches, "conv_embedding_patches")
launch.register(Product, formulas.windows_in_registers, "conv_embedding_patches_oihw")


def why_not_gathered(
    image: Tensor, weight: Tensor, stride: int, padding: int, class_token: Tensor | None
) -> str | None:
    """Returns why ``gather`` should not compute the tokens of an image, or None."""
    _, inputs, kernel_size, _ = weight.shape
    if stride != kernel_size or padding:
        return "windows overlap or are apart"
    if image.stride(3) != inputs or (inputs > 1 and image.stride(1) != 1):
        return "channels are not last"
    tokens = (image.shape[2] // stride) * (image.shape[3] // stride) + (class_token is not None)
    return why_no_tiles(image, weight, image.shape[0] * tokens)


def why_no_tiles(x: Tensor, weight: Tensor, rows: int) -> str | None:
    """Returns why no program should have whole tokens, ``rows`` in all, of windows of x; or None."""
    channels = weight.shape[0]
    if x.dtype == torch.float32:  # so in TF32 where cuDNN takes it, and only there
        return "float32 would need more registers than there are"
    if channels > MAX_NORMALIZED:
        return f"tokens have {channels} channels, more than {MAX_NORMALIZED}"
    if rows >= 2**31 - MAX_NORMALIZED or weight.numel() >= 2**31:
        return "there are too many tokens or weights for 32-bit offsets"
    return None


class Gathering(NamedTuple):
    """The compile-time constants of a kernel besides its parts of rows: ``GATHER`` in the kernel."""

    kernel_size: int  # k, rows and columns of a window
    length: int  # k · in_channels, adjacent elements of a row of a window
    pixels: int  # Pixels of a step, a power of two, for a weight with channels first; 0 for channels last
    # See ``Product``
    block_m: int
    block_k: int
    steps: int  # Steps of block_k elements of a window
    is_whole: bool  # Whether a window fills all of them
    operand: Any  # See :func:`product_types`

    @classmethod
    def of(cls, weight: Tensor, config: Product) -> Gathering:
        """Returns the constants for a weight that is contiguous, with channels first or last."""
        _, inputs, kernel_size, _ = weight.shape
        length, most = kernel_size * inputs, config.block_k
        operand = product_types(weight.dtype)["operand"]
        if has_channels_last(weight):
            block_k = min(most, padded(length))
            steps = kernel_size * -(-length // block_k)
            is_whole = length % block_k == 0
            return cls(kernel_size, length, 0, config.block_m, block_k, steps, is_whole, operand)
        pixels = min(triton.next_power_of_2(kernel_size**2), _PIXELS)
        channels = min(most // pixels, padded(inputs, 16 // pixels))
        steps = -(-(kernel_size**2) // pixels) * -(-inputs // channels)
        is_whole = kernel_size**2 % pixels == 0 and inputs % channels == 0
        block_k = pixels * channels
        return cls(kernel_size, length, pixels, config.block_m, block_k, steps, is_whole, operand)


def configured(
    kernel: str, image: Tensor, weight: Tensor, rows: int
) -> tuple[Product, dict[str, Gathering | Parts]]:
    """Returns the configuration of a kernel for ``rows`` windows, and its constants GATHER and PARTS."""
    channels, chip = weight.shape[0], launching.chip(image.device)
    config: Product = launch.configuration(kernel, image.dtype, (weight[0].numel(), channels), rows, chip)
    width = part_width(channels, config.width, config.parts)
    accumulator = tl.float64 if image.dtype == torch.float64 else tl.float32
    parts = Parts(channels, width, -(-channels // width), accumulator)
    return config, {"GATHER": Gathering.of(weight, config), "PARTS": parts}


def has_channels_last(weight: Tensor) -> bool:
    """Returns whether the windows of a weight lie as those of an image do."""
    return weight.permute(0, 2, 3, 1).is_contiguous()


@triton.jit
def _load_in_order_of_weight(image_ptr, first, row_step, inside, step, GATHER: tl.constexpr):
    """Returns a step of windows, [M, block_k], with the offsets and the mask of its weights, [block_k].

    A step has ``pixels`` of all windows, and of these pixels block_k // pixels channels; pixels are adjacent.
    """
    K: tl.constexpr = GATHER.kernel_size
    LENGTH: tl.constexpr = GATHER.length
    PIXELS: tl.constexpr = GATHER.pixels
    INPUTS: tl.constexpr = GATHER.block_k // PIXELS
    CHANNELS: tl.constexpr = LENGTH // K
    GROUPS: tl.constexpr = (CHANNELS + INPUTS - 1) // INPUTS
    pixel = step // GROUPS * PIXELS
    channel = step % GROUPS * INPUTS
    p = pixel + tl.arange(0, PIXELS)[None, None, :]
    i = channel + tl.arange(0, INPUTS)[None, :, None]
    mask = inside[:, :, None] & (p < K * K) & (i < CHANNELS)
    offsets = first[:, None, None] + (p // K * row_step + p % K * CHANNELS) + i
    x = tl.reshape(tl.load(image_ptr + offsets, mask=mask, other=0.0), (GATHER.block_m, GATHER.block_k))
    k = tl.arange(0, GATHER.block_k)
    p_of_k = pixel + k % PIXELS
    i_of_k = channel + k // PIXELS
    return x, i_of_k * (K * K) + p_of_k, (p_of_k < K * K) & (i_of_k < CHANNELS)


@triton.jit
def _load_in_order_of_image(image_ptr, first, row_step, inside, step, GATHER: tl.constexpr):
    """Returns the same for adjacent elements of a row of the windows."""
    LENGTH: tl.constexpr = GATHER.length
    STEPS: tl.constexpr = (LENGTH + GATHER.block_k - 1) // GATHER.block_k
    y = step // STEPS
    k = step % STEPS * GATHER.block_k + tl.arange(0, GATHER.block_k)
    mask = inside
    if LENGTH % GATHER.block_k != 0:
        mask = mask & (k < LENGTH)[None, :]
    x = tl.load(image_ptr + (first + y * row_step)[:, None] + k[None, :], mask=mask, other=0.0)
    return x, y * LENGTH + k, k < LENGTH


@triton.jit
def normalized_windows(
    image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, eps, row, rows, tokens, out_width,
    image_stride, row_stride, GATHER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Returns the parts of the tokens in ``row``, [block_m, width], after LayerNorm."""
    K: tl.constexpr = GATHER.kernel_size
    LENGTH: tl.constexpr = GATHER.length
    M: tl.constexpr = GATHER.block_m
    STEPS: tl.constexpr = GATHER.steps
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
    WIDTH: tl.constexpr = PARTS.width
    inside = (row < rows)[:, None]
    t = row % tokens
    row_step = tl.cast(row_stride, tl.int64)
    first = (
        (row // tokens).to(tl.int64) * image_stride + t // out_width * K * row_step + t % out_width * LENGTH
    )
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([M, WIDTH], PARTS.accumulator),)
    for step in range(STEPS):
        if GATHER.pixels > 0:
            x, k, valid = _load_in_order_of_weight(image_ptr, first, row_step, inside, step, GATHER)
        else:
            x, k, valid = _load_in_order_of_image(image_ptr, first, row_step, inside, step, GATHER)
        x = x.to(GATHER.operand)
        new_sums = ()
        for part in tl.static_range(COUNT):
            c = channels_of(part, PARTS)
            ptrs = w_ptr + c[:, None] * (K * LENGTH) + k[None, :]
            if C % WIDTH == 0 and GATHER.is_whole:
                weight = tl.load(ptrs)
            else:
                weight = tl.load(ptrs, mask=(c < C)[:, None] & valid[None, :], other=0.0)
            product = tl.dot(x, weight.to(GATHER.operand).T, sums[part], out_dtype=PARTS.accumulator)
            new_sums = new_sums + (product,)
        sums = new_sums
    bias = load_vector(bias_ptr, 0, PARTS)
    gamma = load_vector(gamma_ptr, 0, PARTS)
    beta = load_vector(beta_ptr, 0, PARTS)
    return layer_norm(sums, bias, gamma, beta, eps, PARTS)


@triton.jit(do_not_specialize=["rows", "tokens", "out_width"])
def _conv_embedding_patches_kernel(
    image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, class_token_ptr, positions_ptr, out_ptr, eps,
    rows, tokens, out_width, image_stride, row_stride, GATHER: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes block_m tokens. Weights are contiguous, (channels, k, k, in_channels) without ``pixels``.

    There are ``rows`` windows, ``tokens`` of an image. A class token is one more token of an image, without a
    window.
    """
    grid_dependency_synchronize()
    M: tl.constexpr = GATHER.block_m
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
    row = tl.program_id(0) * M + tl.arange(0, M)
    window = row
    t = row % tokens
    written = rows
    if class_token_ptr is not None:
        t = row % (tokens + 1)
        window = tl.where(t > 0, row - row // (tokens + 1) - 1, rows)
        written += rows // tokens
    ys = normalized_windows(
        image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, eps, window, rows, tokens, out_width,
        image_stride, row_stride, GATHER, PARTS,
    )  # fmt: skip
    class_token = load_vector(class_token_ptr, 0, PARTS)
    inside = (row < written)[:, None]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * C
    for part in tl.static_range(COUNT):
        c = channels_of(part, PARTS)
        mask = within(part, inside, PARTS)
        y = ys[part]
        if class_token_ptr is not None:
            y = tl.where((t == 0)[:, None], class_token[part][None, :], y)
        y = add_position(y, positions_ptr, t[:, None] * C + c[None, :], mask, PARTS)
        tl.store(out_ptrs + c[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def gather(image: Tensor, weight: Tensor, vectors: Vectors, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns the tokens of an image, read in place, in ``dtype``.

    A weight is read in place too, with channels last or first.
    """
    batch, _, height, width = image.shape
    channels, kernel_size = weight.shape[0], weight.shape[3]
    out_width = width // kernel_size
    tokens = height // kernel_size * out_width
    rows = batch * tokens
    if not has_channels_last(weight):
        weight = weight.contiguous()
    name = "conv_embedding_patches" + ("" if has_channels_last(weight) else "_oihw")
    config, constants = configured(name, image, weight, rows)
    out = image.new_empty(batch, tokens + has_class_token(vectors), channels, dtype=dtype)
    launching.launch(
        _conv_embedding_patches_kernel, (-(-batch * out.shape[1] // config.block_m),), on=image,
        options=config.options, image_ptr=image, w_ptr=weight, **vectors, out_ptr=out, eps=eps, rows=rows,
        tokens=tokens, out_width=out_width, image_stride=image.stride(0),
        row_stride=image.stride(2), **constants,
    )  # fmt: skip
    return out
