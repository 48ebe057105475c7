"""The kernel that computes convolution, bias and LayerNorm at once, for few values in a convolution's window.

The window of a token, k rows of each input channel, is read as segments: up to 8 adjacent elements of a row
of the image. In an image with its channels first a row has the pixels of one channel; with channels last,
those of all channels. Several segments side by side are a factor of a matrix product, whose other factor, the
weights, is read once for all the tiles of a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import machine
from .common import (
    ELEMENTS,
    Parts,
    channels_of,
    configuration,
    layer_norm,
    load_vector,
    store_class_token,
)

#: Elements of a segment, and of a row of a factor of a product, for which the tensor cores' 16-bit operands are
#: made: then each lane loads what it multiplies.
_SEGMENT, _CHUNK = 8, 64
#: The most products of a tile; the factors of all are in registers at once.
_MAX_CHUNKS = 4
#: The most bytes of weights, padding included, which shared memory holds for two programs of a
#: multiprocessor. Where the weights are more, a window has so many values that PyTorch's convolution, and a
#: kernel that reads and writes its result once more, are the better way: the tokens' extra way to memory takes
#: about 4 · C / 18 clocks of a multiprocessor per token, the loads of a window about 3 / 256 clocks per value.
_MAX_WEIGHT_BYTES = 80 * 1024


def why_not_embedded(image: Tensor, weight: Tensor, stride: int, padding: int) -> str | None:
    """Says why ``embed`` is not the way to the tokens of an image; None if it is."""
    channels, _, kernel_size, _ = weight.shape
    window, parts = Window.of(image, kernel_size, stride, padding, bias=False), parts_of(channels, image)
    padded = window.chunks * _CHUNK * parts.width * parts.count
    if configuration("embed", channels, image) is None:
        return f"there is no configuration for {channels} channels"
    if window.chunks > _MAX_CHUNKS or padded * min(image.element_size(), 4) > _MAX_WEIGHT_BYTES:
        return "the convolution's window has many values"
    height, width = image.shape[2:]
    reach = (image.shape[1] - 1) * image.stride(1)
    reach += (height + 2 * padding) * image.stride(2) + (width + 2 * padding) * image.stride(3)
    out_width = (width + 2 * padding - kernel_size) // stride + 1
    if max(reach, (height + padding) * out_width * out_width) >= 2**31:
        return "the image is too large for 32-bit offsets"
    return None


def parts_of(channels: int, image: Tensor) -> Parts:
    """Returns the parts of tokens: products have 16 to 128 columns."""
    return Parts.of(channels, image, least=16, most=128)


class Window(NamedTuple):
    """The constants of a convolution's window over an image, cut into segments.

    Attributes:
        kernel_size, stride, padding: Those of the convolution.
        inner: Channels that are adjacent in a row of the image: all of them with channels last, else 1.
        planes: Input channels that are not, each a plane of its own.
        word: Elements of the image that are loaded as one, 1 or 2.
        segment: Elements of a segment, a power of two.
        pieces: Segments of a row of the window.
        chunk: Segments of a factor of a product, a power of two.
        has_one: Whether the first element behind the window is 1, whose weight is the bias: where there is a
            bias of 16 bits and room for it, which saves registers and the addition.
        element: Triton's dtype of the image.
        operand: Triton's dtype of the factors of a product: ``element``, but float32 for bfloat16 in Triton's
            interpreter, whose product of bfloat16 is wrong.
        precision: ``input_precision`` of ``tl.dot``.
        has_assembly: Whether there may be assembly, which Triton's interpreter does not take.
    """

    kernel_size: int
    stride: int
    padding: int
    inner: int
    planes: int
    word: int
    segment: int
    pieces: int
    chunk: int
    has_one: bool
    element: Any
    operand: Any
    precision: str
    has_assembly: bool

    @classmethod
    def of(cls, image: Tensor, kernel_size: int, stride: int, padding: int, *, bias: bool) -> Window:
        """Returns the window for an image as it lies, and for PyTorch's setting of TF32."""
        channels = image.shape[1]
        inner = channels if image.stride(1) == 1 and image.stride(3) == channels else 1
        row = kernel_size * inner
        segment = min(triton.next_power_of_2(row), _SEGMENT)
        pieces, chunk = -(-row // segment), _CHUNK // segment
        word = 2 if _has_pairs(image, inner, stride, padding) else 1
        upcast = machine.INTERPRETING and image.dtype == torch.bfloat16
        tf32 = image.dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32"
        return cls(
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            inner=inner,
            planes=channels // inner,
            word=word,
            segment=segment,
            pieces=pieces,
            chunk=chunk,
            has_one=bias and image.element_size() == 2 and channels // inner * kernel_size * pieces % chunk > 0,
            element=ELEMENTS[image.dtype],
            operand=tl.float32 if upcast else ELEMENTS[image.dtype],
            precision="tf32" if tf32 else "ieee",
            has_assembly=not machine.INTERPRETING,
        )

    @property
    def chunks(self) -> int:
        """The number of products of a token."""
        return -(-self.planes * self.kernel_size * self.pieces // self.chunk)


def _has_pairs(image: Tensor, inner: int, stride: int, padding: int) -> bool:
    """Says whether every window and row of an image begins and ends between pairs of 16-bit elements."""
    if image.element_size() != 2 or (inner == 1 and image.stride(3) != 1):
        return False
    numbers = (
        image.data_ptr() // 2, image.stride(0), 0 if inner > 1 else image.stride(1), image.stride(2),
        image.shape[3] * inner, stride * inner, padding * inner,
    )  # fmt: skip
    return all(number % 2 == 0 for number in numbers)


@triton.jit
def _load_weights(
    w_ptr, bias_ptr, strides, first, part, WINDOW: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Returns the weights [chunk · segment, width] of the segments from ``first`` on, for a part's channels.

    With ``has_one`` the bias is the weight of the first element behind the window.
    """
    out_stride, in_stride, row_stride, col_stride = strides
    K: tl.constexpr = WINDOW.kernel_size
    k = tl.arange(0, WINDOW.chunk * WINDOW.segment)
    number = first + k // WINDOW.segment
    row = number // WINDOW.pieces
    element = number % WINDOW.pieces * WINDOW.segment + k % WINDOW.segment
    plane = row // K
    channel = plane + element % WINDOW.inner
    offset = channel * in_stride + row % K * row_stride + element // WINDOW.inner * col_stride
    valid = (plane < WINDOW.planes) & (element < K * WINDOW.inner)
    c = channels_of(part, PARTS)
    weights = tl.load(
        w_ptr + offset[:, None] + (c * out_stride)[None, :],
        mask=valid[:, None] & (c < PARTS.channels)[None, :],
        other=0.0,
    )
    if WINDOW.has_one:
        bias = tl.load(bias_ptr + c, mask=c < PARTS.channels, other=0.0)
        one = (plane == WINDOW.planes) & (row % K == 0) & (element == 0)
        weights = tl.where(one[:, None], bias[None, :], weights)
    return weights.to(WINDOW.operand)


@triton.jit
def _unpacked(words, WINDOW: tl.constexpr):
    """Returns both halves of words, the lower first, as a last dimension."""
    if WINDOW.has_assembly:  # shifts would be instructions, and these are none
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(tl.uint16, tl.uint16), is_pure=True, pack=1
        )
        return tl.join(low, high)
    return tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))


@triton.jit
def _load_segments(
    image_ptr, offset, x, rows, first, row_length, plane_stride, row_stride, word_stride, WINDOW: tl.constexpr,
    GROUPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Returns the segments [M, chunk · segment] of M windows, from the segment ``first`` on.

    ``offset`` [M] is that of a window's first word, which is word ``x`` [M] of its row; bits of ``rows`` [M]
    say which rows of the window lie in the image.
    """
    K: tl.constexpr = WINDOW.kernel_size
    WORD: tl.constexpr = WINDOW.word
    WORDS: tl.constexpr = WINDOW.segment // WORD
    CHUNK: tl.constexpr = WINDOW.chunk
    LENGTH: tl.constexpr = K * WINDOW.inner
    SEGMENTS: tl.constexpr = WINDOW.planes * K * WINDOW.pieces
    ONE: tl.constexpr = 0x3C00 if WINDOW.element == tl.float16 else 0x3F80
    M: tl.constexpr = GROUPS * WARPS * 16
    # Segments are the first dimension: then neighboring lanes have neighboring tokens, and what depends on
    # the segment is the same for all lanes.
    number = (first + tl.arange(0, CHUNK))[:, None, None]
    word = number % WINDOW.pieces * WORDS + tl.arange(0, WORDS)[None, None, :]
    row = number // WINDOW.pieces
    plane = row // K
    x = x[None, :, None] + word
    inside = (x >= 0) & (x < row_length) & (word * WORD < LENGTH) & (plane < WINDOW.planes)
    valid = (tl.where(inside, rows[None, :, None], 0) & (1 << row % K)) != 0
    ptrs = image_ptr + (plane * plane_stride + row % K * row_stride + word * word_stride)
    words = tl.load(ptrs + offset[None, :, None], mask=valid, other=0)
    if WORD == 2:
        if LENGTH % 2 == 1:
            words &= tl.where(word * WORD + 1 == LENGTH, 0xFFFF, 0xFFFFFFFF).to(tl.uint32)
        if WINDOW.has_one:
            words |= tl.where((number == SEGMENTS) & (word == 0), ONE, 0).to(tl.uint32)
        words = _unpacked(words, WINDOW)
    elif WINDOW.has_one:
        words = tl.where((number == SEGMENTS) & (word == 0), 1.0, words.to(WINDOW.operand))
    values = tl.reshape(words, (CHUNK, GROUPS, 2, WARPS, 8, WINDOW.segment))
    values = tl.reshape(tl.permute(values, (1, 3, 2, 4, 0, 5)), (M, CHUNK * WINDOW.segment))
    if WORD == 2:
        values = values.to(WINDOW.element, bitcast=True)
    return values.to(WINDOW.operand)


@triton.jit
def _conv_embedding_embed_kernel(
    image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, class_token_ptr, out_ptr, eps,
    height, row_length, tokens, out_width, reciprocal, tiles, splits,
    image_stride, plane_stride: tl.constexpr, row_stride: tl.constexpr, word_stride: tl.constexpr, weight_strides,
    GROUPS: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes every ``splits``-th tile of M tokens of an image, and with the first the class token."""
    K: tl.constexpr = WINDOW.kernel_size
    M: tl.constexpr = GROUPS * WARPS * 16
    STEP: tl.constexpr = WINDOW.stride * WINDOW.inner // WINDOW.word
    MARGIN: tl.constexpr = WINDOW.padding * WINDOW.inner // WINDOW.word
    C: tl.constexpr = PARTS.channels
    COUNT: tl.constexpr = PARTS.count
    WIDTH: tl.constexpr = PARTS.width
    SUM: tl.constexpr = PARTS.accumulator
    image = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    if WINDOW.word == 2:
        image_ptr = image_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    image_ptr += image * image_stride - WINDOW.padding * row_stride - MARGIN * word_stride
    out_ptr += image * tokens * C
    if class_token_ptr is not None:
        out_ptr += image * C
        if split == 0:
            store_class_token(out_ptr, class_token_ptr, PARTS)
        out_ptr += C
    weights = ()
    for i in tl.static_range(CHUNKS):
        for part in tl.static_range(COUNT):
            weights = weights + (
                _load_weights(w_ptr, bias_ptr, weight_strides, i * WINDOW.chunk, part, WINDOW, PARTS),
            )
    bias = load_vector(None if WINDOW.has_one else bias_ptr, 0, PARTS)
    gamma = load_vector(gamma_ptr, 0, PARTS)
    beta = load_vector(beta_ptr, 0, PARTS)
    for tile in range(split, tiles, splits):
        # Lanes and warps load the tokens whose row of the product they have.
        p = tl.arange(0, M)
        t = tile * M + p // (16 * WARPS) * (16 * WARPS) + p // 8 % WARPS * 16 + p // (8 * WARPS) % 2 * 8 + p % 8
        out_y = tl.umulhi(2 * t.to(tl.uint32), reciprocal.to(tl.uint32)).to(tl.int32)
        out_x = t - out_y * out_width
        y = out_y * WINDOW.stride - WINDOW.padding
        above = tl.minimum(tl.maximum(-y, 0), K)
        below = tl.where(t < tokens, tl.maximum(tl.minimum(height - y, K), 0), 0)
        rows = ((1 << below) - 1) & -(1 << above)
        offset = (out_y * WINDOW.stride * row_stride + out_x * STEP * word_stride).to(tl.uint32).to(tl.int64)
        segments = ()
        for i in tl.static_range(CHUNKS):  # all loads before the first product
            segments = segments + (_load_segments(
                image_ptr, offset, out_x * STEP - MARGIN, rows, i * WINDOW.chunk,
                row_length, plane_stride, row_stride, word_stride, WINDOW, GROUPS, WARPS,
            ),)  # fmt: skip
        accs = ()
        for part in tl.static_range(COUNT):
            accs = accs + (tl.zeros([M, WIDTH], SUM),)
        for i in tl.static_range(CHUNKS):
            updated = ()
            for part in tl.static_range(COUNT):
                product = tl.dot(
                    segments[i], weights[i * COUNT + part], accs[part], input_precision=WINDOW.precision,
                    out_dtype=SUM,
                )  # fmt: skip
                updated = updated + (product,)
            accs = updated
        ys = layer_norm(accs, bias, gamma, beta, eps, PARTS)
        t = tile * M + tl.arange(0, M)
        for part in tl.static_range(COUNT):
            c = channels_of(part, PARTS)
            mask = (t < tokens)[:, None]
            if (part + 1) * WIDTH > C:
                mask = mask & (c < C)[None, :]
            tl.store(
                out_ptr + t[:, None] * C + c[None, :], ys[part].to(out_ptr.dtype.element_ty), mask=mask
            )


@functools.cache
def _splits(batch: int, tiles: int, programs: int) -> int:
    """Returns the programs among which an image's tiles are divided, where ``programs`` run at a time.

    To start a program costs as many instructions as one and a half tiles.
    """

    def cost(splits: int) -> float:
        return -(-batch * splits // programs) * (-(-tiles // splits) + 1.5)

    return min(range(1, tiles + 1), key=cost)


def embed(
    image: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_bias: Tensor | None,
    class_token: Tensor | None, *, stride: int, padding: int, eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns the tokens of an image that is read as it lies, in ``dtype``."""
    batch, _, height, width = image.shape
    channels, _, kernel_size, _ = weight.shape
    out_height, out_width = ((n + 2 * padding - kernel_size) // stride + 1 for n in (height, width))
    tokens = out_height * out_width
    window = Window.of(image, kernel_size, stride, padding, bias=bias is not None)
    word = window.word
    parts = parts_of(channels, image)
    config = configuration("embed", channels, image)
    assert config is not None
    group = 16 * config.num_warps
    groups = max(config.elements // (parts.width * parts.count * group), 1)
    tiles = -(-tokens // (groups * group))
    programs = config.resident_programs * machine.chip(image.device).multiprocessors
    splits = _splits(batch, tiles, programs)
    out = image.new_empty(batch, tokens + (class_token is not None), channels, dtype=dtype)
    image_stride, channel_stride, row_stride, pixel_stride = image.stride()
    machine.launch(
        _conv_embedding_embed_kernel, (batch * splits,), on=image, options=config.options,
        image_ptr=image, w_ptr=weight, bias_ptr=bias, gamma_ptr=norm_weight, beta_ptr=norm_bias,
        class_token_ptr=class_token, out_ptr=out, eps=eps,
        height=height, row_length=width * window.inner // word, tokens=tokens, out_width=out_width,
        reciprocal=2**31 // out_width + 1, tiles=tiles, splits=splits,
        image_stride=image_stride // word, plane_stride=channel_stride // word,
        row_stride=row_stride // word, word_stride=pixel_stride if window.inner == word == 1 else 1,
        weight_strides=weight.stride(),
        GROUPS=groups, WARPS=config.num_warps, CHUNKS=window.chunks, WINDOW=window, PARTS=parts,
    )  # fmt: skip
    return out
