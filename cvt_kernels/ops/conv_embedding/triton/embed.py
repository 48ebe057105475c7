"""The kernel that computes convolution, bias and LayerNorm at once, for few values in a convolution's window.

The window of a token, k rows of each input channel, is read as segments: up to 8 adjacent elements of a row
of the image. With channels first, a row has the pixels of one channel; with channels last, of all channels.
Several segments side by side are a factor of a matrix product, whose other factor, the weights, is read once
for all the tiles of a program.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import machine
from ....launch import launching
from ...triton_launch import grid_dependency_synchronize, product_types
from .common import (
    MOST_EMBEDDED,
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

#: Elements of a segment, and of a row of a factor of a product. Tensor cores take 16-bit factors in pairs, of
#: which a warp has four side by side: with 8 elements, each lane loads just what it multiplies.
_SEGMENT, _CHUNK = 8, 64
#: The most products of a tile: the windows of all are in registers at once.
_MAX_CHUNKS = 4
#: The most bytes of weights, padding included: on most chips, shared memory holds the weights of two
#: programs. Windows of so few values take few instructions, about 3 / 256 clocks of a multiprocessor for each
#: value of a token, where to write a convolution's result and to read it again takes 4 C bytes, at about 18
#: bytes per clock. Beyond, PyTorch's convolution is the better one.
_MAX_WEIGHT_BYTES = 80 * 1024


def why_not_embedded(image: Tensor, weight: Tensor, stride: int, padding: int) -> str | None:
    """Returns why ``embed`` should not compute the tokens of an image, or None."""
    channels, _, kernel_size, _ = weight.shape
    if channels > MOST_EMBEDDED[min(image.element_size(), 4)]:
        return f"there is no configuration for {channels} channels"
    window, parts = Window.of(image, kernel_size, stride, padding, has_bias=False), parts_of(channels, image)
    if image.dtype == torch.float32:  # so in TF32 where cuDNN takes it, and only there
        return "float32 would need more registers than there are"
    padded = window.chunks * _CHUNK * parts.width * parts.count
    if window.chunks > _MAX_CHUNKS or padded * min(image.element_size(), 4) > _MAX_WEIGHT_BYTES:
        return "the convolution's window has many values"
    height, width = (size + 2 * padding for size in image.shape[2:])
    reach = image.shape[1] * image.stride(1) + height * image.stride(2) + width * image.stride(3)
    out_width = (width - kernel_size) // stride + 1
    if max(reach, height * out_width**2) >= 2**31:
        return "the image is too large for 32-bit offsets"
    return None


def parts_of(channels: int, image: Tensor) -> Parts:
    """Returns the parts of tokens: products have 16 to 128 columns."""
    return Parts.of(channels, image, least=16, most=128)


class Window(NamedTuple):
    """The compile-time constants of a convolution's window over an image, cut into segments."""

    # The convolution's
    kernel_size: int
    stride: int
    padding: int
    inner: int  # Adjacent channels in a row of the image: all channels with channels last, else 1
    planes: int  # Input channels that are planes of their own
    word: int  # Elements of the image that are loaded as one, 1 or 2
    segment: int  # Elements of a segment, a power of two
    pieces: int  # Segments of a row of the window
    chunk: int  # Segments of a factor of a product, a power of two
    # Whether the first element behind the window is 1 and its weight the bias, which saves registers and the
    # addition. It needs a 16-bit bias and room behind the window.
    has_one: bool
    # See :func:`product_types`
    element: Any
    operand: Any
    has_assembly: bool  # Whether inline assembly may be used; Triton's interpreter does not take it

    @classmethod
    def of(cls, image: Tensor, kernel_size: int, stride: int, padding: int, *, has_bias: bool) -> Window:
        """Returns the window for an image's strides."""
        channels = image.shape[1]
        inner = channels if image.stride(1) == 1 and image.stride(3) == channels else 1
        segment = min(triton.next_power_of_2(kernel_size * inner), _SEGMENT)
        pieces, chunk = -(-kernel_size * inner // segment), _CHUNK // segment
        has_room = channels // inner * kernel_size * pieces % chunk > 0
        word = 2 if _has_pairs(image, inner, stride, padding) else 1
        types = product_types(image.dtype)
        return cls(
            kernel_size=kernel_size, stride=stride, padding=padding, inner=inner, planes=channels // inner,
            word=word, segment=segment, pieces=pieces, chunk=chunk,
            has_one=has_bias and has_room and image.element_size() == 2, element=types["element"],
            operand=types["operand"], has_assembly=not machine.INTERPRETING,
        )  # fmt: skip

    @property
    def chunks(self) -> int:
        """The number of products of a token."""
        return -(-self.planes * self.kernel_size * self.pieces // self.chunk)


def _has_pairs(image: Tensor, inner: int, stride: int, padding: int) -> bool:
    """Returns whether all windows and rows of an image consist of whole, aligned pairs of 16-bit elements."""
    if image.element_size() != 2 or (inner == 1 and image.stride(3) != 1):
        return False
    numbers = (
        image.data_ptr() // 2, image.stride(0), 0 if inner > 1 else image.stride(1), image.stride(2),
        image.shape[3] * inner, stride * inner, padding * inner,
    )  # fmt: skip
    return all(number % 2 == 0 for number in numbers)


@triton.jit
def _load_weights(
    w_ptr, bias_ptr, first, part, STRIDES: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Returns the weights [chunk · segment, width] of the segments from ``first`` on, for a part's channels.

    With ``has_one`` the bias is the weight of the first element behind the window.
    """
    K: tl.constexpr = WINDOW.kernel_size
    k = tl.arange(0, WINDOW.chunk * WINDOW.segment)
    number = first + k // WINDOW.segment
    row = number // WINDOW.pieces
    element = number % WINDOW.pieces * WINDOW.segment + k % WINDOW.segment
    plane = row // K
    channel = plane + element % WINDOW.inner
    offset = channel * STRIDES[1] + row % K * STRIDES[2] + element // WINDOW.inner * STRIDES[3]
    valid = (plane < WINDOW.planes) & (element < K * WINDOW.inner)
    c = channels_of(part, PARTS)
    weights = tl.load(
        w_ptr + offset[:, None] + (c * STRIDES[0])[None, :],
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
    image_ptr, offset, x, rows, first, row_length, STRIDES: tl.constexpr, WINDOW: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Returns the segments [M, chunk · segment] of M windows, from the segment ``first`` on.

    ``offset`` [M] is the offset of a window's first word, which is word ``x`` [M] of its row; the bits of
    ``rows`` [M] mark the rows of the window that lie in the image.
    """
    K: tl.constexpr = WINDOW.kernel_size
    WORD: tl.constexpr = WINDOW.word
    WORDS: tl.constexpr = WINDOW.segment // WORD
    CHUNK: tl.constexpr = WINDOW.chunk
    LENGTH: tl.constexpr = K * WINDOW.inner
    SEGMENTS: tl.constexpr = WINDOW.planes * K * WINDOW.pieces
    ONE: tl.constexpr = 0x3C00 if WINDOW.element == tl.float16 else 0x3F80
    M: tl.constexpr = WARPS * 16
    # Segments are the first dimension: then neighboring lanes have neighboring tokens, and what depends on
    # the segment is the same for all lanes.
    number = (first + tl.arange(0, CHUNK))[:, None, None]
    word = number % WINDOW.pieces * WORDS + tl.arange(0, WORDS)[None, None, :]
    row = number // WINDOW.pieces
    plane = row // K
    x = x[None, :, None] + word
    inside = (x >= 0) & (x < row_length) & (word * WORD < LENGTH) & (plane < WINDOW.planes)
    valid = (tl.where(inside, rows[None, :, None], 0) & (1 << row % K)) != 0
    ptrs = image_ptr + (plane * STRIDES[0] + row % K * STRIDES[1] + word * STRIDES[2])
    words = tl.load(ptrs + offset[None, :, None], mask=valid, other=0)
    if WORD == 2:
        if LENGTH % 2 == 1:
            words &= tl.where(word * WORD + 1 == LENGTH, 0xFFFF, 0xFFFFFFFF).to(tl.uint32)
        if WINDOW.has_one:
            words |= tl.where((number == SEGMENTS) & (word == 0), ONE, 0).to(tl.uint32)
        words = _unpacked(words, WINDOW)
    elif WINDOW.has_one:
        words = tl.where((number == SEGMENTS) & (word == 0), 1.0, words.to(WINDOW.operand))
    values = tl.reshape(words, (CHUNK, 2, WARPS, 8, WINDOW.segment))
    values = tl.reshape(tl.permute(values, (2, 1, 3, 0, 4)), (M, CHUNK * WINDOW.segment))
    if WORD == 2:
        values = values.to(WINDOW.element, bitcast=True)
    return values.to(WINDOW.operand)


@triton.jit
def _conv_embedding_embed_kernel(
    image_ptr, w_ptr, bias_ptr, gamma_ptr, beta_ptr, class_token_ptr, positions_ptr, out_ptr, eps,
    height, row_length, tokens, out_width, reciprocal, tiles, splits,
    image_stride, STRIDES: tl.constexpr, WEIGHT_STRIDES: tl.constexpr,
    WARPS: tl.constexpr, CHUNKS: tl.constexpr,
    WINDOW: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes every ``splits``-th tile of 16 · WARPS tokens of an image, and with the first the class token.

    ``row_length``, ``image_stride`` and STRIDES, which are of planes, rows and words, are in words. STRIDES
    are constants because offsets of segments then are parts of instructions, not registers; so each size of
    images is compiled for.
    """
    grid_dependency_synchronize()
    K: tl.constexpr = WINDOW.kernel_size
    M: tl.constexpr = WARPS * 16
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
    image_ptr += image * image_stride - WINDOW.padding * STRIDES[1] - MARGIN * STRIDES[2]
    out_ptr += image * tokens * C
    if class_token_ptr is not None:
        out_ptr += image * C
        if split == 0:
            store_class_token(out_ptr, class_token_ptr, positions_ptr, PARTS)
        out_ptr += C
        if positions_ptr is not None:
            positions_ptr += C
    weights = ()
    for i in tl.static_range(CHUNKS):
        for part in tl.static_range(COUNT):
            weights = weights + (
                _load_weights(w_ptr, bias_ptr, i * WINDOW.chunk, part, WEIGHT_STRIDES, WINDOW, PARTS),
            )
    bias = load_vector(None if WINDOW.has_one else bias_ptr, 0, PARTS)
    gamma = load_vector(gamma_ptr, 0, PARTS)
    beta = load_vector(beta_ptr, 0, PARTS)
    for tile in range(split, tiles, splits):
        # Loads go by lanes (8), warps and registers (2), rows of a product by lanes, registers and warps:
        # each thread loads the tokens whose row it has, and windows need no exchange.
        place = tl.arange(0, M)
        t = tile * M + place // 8 % WARPS * 16 + place // (8 * WARPS) * 8 + place % 8
        # Division by multiplication: out_y is t // out_width.
        out_y = tl.umulhi(2 * t.to(tl.uint32), tl.cast(reciprocal, tl.uint32)).to(tl.int32)
        out_x = t - out_y * out_width
        y = out_y * WINDOW.stride - WINDOW.padding
        above = tl.minimum(tl.maximum(-y, 0), K)
        below = tl.where(t < tokens, tl.maximum(tl.minimum(height - y, K), 0), 0)
        rows = ((1 << below) - 1) & -(1 << above)
        offset = out_y * WINDOW.stride * STRIDES[1] + out_x * STEP * STRIDES[2]
        offset = offset.to(tl.uint32).to(tl.int64)  # it is not negative, which saves extending its sign
        segments = ()
        for i in tl.static_range(CHUNKS):  # all loads before the first product
            segments = segments + (_load_segments(
                image_ptr, offset, out_x * STEP - MARGIN, rows, i * WINDOW.chunk, row_length,
                STRIDES, WINDOW, WARPS,
            ),)  # fmt: skip
        accs = ()
        for _ in tl.static_range(COUNT):
            accs = accs + (tl.zeros([M, WIDTH], SUM),)
        for i in tl.static_range(CHUNKS):
            updated = ()
            for part in tl.static_range(COUNT):
                product = tl.dot(segments[i], weights[i * COUNT + part], accs[part], out_dtype=SUM)
                updated = updated + (product,)
            accs = updated
        ys = layer_norm(accs, bias, gamma, beta, eps, PARTS)
        t = tile * M + tl.arange(0, M)
        for part in tl.static_range(COUNT):
            mask = within(part, (t < tokens)[:, None], PARTS)
            offsets = t[:, None] * C + channels_of(part, PARTS)[None, :]
            y = add_position(ys[part], positions_ptr, offsets, mask, PARTS)
            tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _splits(batch: int, tiles: int, programs: int) -> int:
    """Returns the programs among which an image's tiles are divided, where ``programs`` run at a time.

    Starting a program costs as many instructions as one and a half tiles.
    """

    def cost(splits: int) -> float:
        return -(-batch * splits // programs) * (-(-tiles // splits) + 1.5)

    return min(range(1, tiles + 1), key=cost)


def embed(
    image: Tensor, weight: Tensor, vectors: Vectors, stride: int, padding: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Returns the tokens of an image, read with its strides, in ``dtype``."""
    batch, _, height, width = image.shape
    channels, _, kernel_size, _ = weight.shape
    stride, padding = int(stride), int(padding)  # Triton takes no integers of NumPy
    out_height, out_width = ((n + 2 * padding - kernel_size) // stride + 1 for n in (height, width))
    tokens = out_height * out_width
    window = Window.of(image, kernel_size, stride, padding, has_bias=vectors["bias_ptr"] is not None)
    parts = parts_of(channels, image)
    config = configuration("embed", channels, image)
    options = config.options
    if config.registers is not None and image.element_size() == 2 and window.word == 1:
        options["maxnreg"] = max(config.registers, 168)  # which single elements take
    tiles = -(-tokens // (16 * config.num_warps))
    programs = config.resident_programs * launching.chip(image.device).multiprocessors
    splits = _splits(batch, tiles, programs)
    out = image.new_empty(batch, tokens + has_class_token(vectors), channels, dtype=dtype)
    strides = [stride // window.word for stride in image.stride()]
    if window.inner > 1 or window.word > 1:
        strides[3] = 1
    launching.launch(
        _conv_embedding_embed_kernel, (batch * splits,), on=image, options=options,
        image_ptr=image, w_ptr=weight, **vectors, out_ptr=out, eps=eps, height=height,
        row_length=width * window.inner // window.word, tokens=tokens, out_width=out_width,
        reciprocal=2**31 // out_width + 1, tiles=tiles, splits=splits,
        image_stride=strides[0], STRIDES=tuple(strides[1:]), WEIGHT_STRIDES=weight.stride(),
        WARPS=config.num_warps, CHUNKS=window.chunks, WINDOW=window, PARTS=parts,
    )  # fmt: skip
    return out
