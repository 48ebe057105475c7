"""The parts that attention's Triton kernels share: launch arguments, device functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .... import launch
from ....launch import formulas, launching
from ....launch.records import Attention
from ...triton_launch import padded, product_types

#: The most channels of a head; there is no configuration for more.
MAX_HEAD_DIM = 128

launch.register(
    Attention, formulas.attention, *(f"attention_{kernel}" for kernel in formulas.ATTENTION_KERNELS)
)


def configuration_for(kernel: str, q: Tensor) -> Attention:
    """Returns the configuration of a kernel for a tensor (B, N, h, D), on its device."""
    batch, tokens, heads, head_dim = q.shape
    name = f"attention_{kernel}"
    return launch.configuration(name, q.dtype, (head_dim,), batch * tokens * heads, launching.chip(q.device))


def tail_width(keys: int, block_kv: int, element_size: int) -> int:
    """Returns the width of the last, partial tile of keys; 0 if whole tiles hold all keys.

    In float32 it is as wide as the others and joins their loop: separate code would double the registers.
    """
    if keys % block_kv == 0:
        return 0
    return padded(keys % block_kv) if element_size == 2 else block_kv


class KernelSpec(NamedTuple):
    """The compile-time constants of a kernel besides its tiles."""

    head_dim: int  # D
    block_d: int  # D padded to a power of two of at least 16
    # See :func:`product_types`
    element: Any
    operand: Any
    accumulator: Any
    precision: str

    @classmethod
    def of(cls, q: Tensor) -> KernelSpec:
        """Returns the specification for queries ``q`` (B, Nq, h, D) and PyTorch's TF32 setting."""
        tf32 = q.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return cls(
            head_dim=q.shape[3], block_d=padded(q.shape[3]), **product_types(q.dtype, tf32=tf32, exact=True)
        )


_LOG2E = 1.4426950408889634
_SMALLEST = torch.finfo(torch.float32).tiny


def token_strides(x: Tensor) -> tuple[int, ...]:
    """Returns the strides (image, token, head) of a tensor (B, N, h, D) whose last dimension is adjacent."""
    return x.stride()[:3]


def launch_arguments(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Any]:
    """Returns the arguments shared by all launches of one call; the scale is not negative.

    A tensor whose strides the kernels cannot read is copied.
    """
    q, k, v = map(maybe_contiguous, (q, k, v))
    _, queries, heads, _ = q.shape
    return {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        # Plain tuples, which the kernels unpack: a NamedTuple costs Triton 2 µs per launch.
        "strides": (token_strides(q), token_strides(k), token_strides(v)),
        "scale": scale,
        # It makes scores exponents of two. 0 would turn a masked key's −∞ into NaN.
        "log2_scale": max(scale * _LOG2E, _SMALLEST),
        "heads": heads,
        "queries": queries,
        "keys": k.shape[1],
        "SPEC": KernelSpec.of(q),
    }


def maybe_contiguous(x: Tensor) -> Tensor:
    """Returns ``x`` (B, N, h, D) itself if its last dimension is adjacent, else a copy.

    The other strides are free, as long as the offsets within one image fit 32 bits.
    """
    _, tokens, heads, head_dim = x.shape
    _, token, head, channel = x.stride()
    reach = (tokens - 1) * token + (heads - 1) * head + head_dim - 1
    return x if (channel == 1 or head_dim == 1) and reach < 2**31 else x.contiguous()


# Device functions -----------------------------------------------------------------------------------------
#
# Offsets of an image's head are int64, those within it int32.


class Place(NamedTuple):
    """The place of a program's work."""

    # Their indices, int64
    image: tl.tensor
    head: tl.tensor
    plane: tl.tensor  # Both in one number, int64
    block: tl.tensor  # The index of the block of queries or keys within the head


class Rows(NamedTuple):
    """One head's tokens: a pointer to the first, their stride and their number."""

    ptr: tl.tensor
    stride: tl.tensor
    count: tl.tensor


class Head(NamedTuple):
    """One head's inputs: its tokens, and the factor that makes scores exponents of two."""

    q: Rows
    k: Rows
    v: Rows
    log2_scale: tl.tensor


@triton.jit
def locate(blocks, heads):
    """Returns this program's Place; blocks of one head are neighbors."""
    plane = tl.program_id(0) // blocks
    return Place(
        image=(plane // heads).to(tl.int64),
        head=(plane % heads).to(tl.int64),
        plane=plane.to(tl.int64),
        block=tl.program_id(0) % blocks,
    )


@triton.jit
def strided_rows(ptr, strides, place, count):
    """Returns the Rows of one head of a tensor with ``token_strides``."""
    image_stride, token_stride, head_stride = strides
    start = place.image * image_stride + place.head * head_stride
    return Rows(ptr=ptr + start, stride=token_stride, count=count)


@triton.jit
def contiguous_rows(ptr, place, count, heads, SPEC: tl.constexpr):
    """Returns the Rows of one head of a contiguous tensor."""
    start = (place.image * count * heads + place.head) * SPEC.head_dim
    return Rows(ptr=ptr + start, stride=heads * SPEC.head_dim, count=count)


@triton.jit
def rows_from(rows, first):
    """Returns the Rows that begin at the token ``first``."""
    return Rows(ptr=rows.ptr + first * rows.stride, stride=rows.stride, count=rows.count - first)


@triton.jit
def head_at(place, q_ptr, k_ptr, v_ptr, strides, log2_scale, queries, keys, SPEC: tl.constexpr):
    """Returns the Head at a Place, without loading anything."""
    q_strides, k_strides, v_strides = strides
    return Head(
        q=strided_rows(q_ptr, q_strides, place, queries),
        k=strided_rows(k_ptr, k_strides, place, keys),
        v=strided_rows(v_ptr, v_strides, place, keys),
        log2_scale=log2_scale,
    )


@triton.jit
def load_rows(rows, row, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Returns the tokens ``row``, [rows, block_d]; zeros beyond the last channel and, if MASKED, token."""
    d = tl.arange(0, SPEC.block_d)
    ptrs = rows.ptr + row[:, None] * rows.stride + d[None, :]
    if SPEC.block_d > SPEC.head_dim:
        return tl.load(ptrs, mask=(row < rows.count)[:, None] & (d < SPEC.head_dim)[None, :], other=0.0)
    if MASKED:
        return tl.load(ptrs, mask=(row < rows.count)[:, None], other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_rows(rows, row, values, SPEC: tl.constexpr):
    """Stores the tokens ``row`` in the tensor's dtype, masked beyond the last token and channel."""
    d = tl.arange(0, SPEC.block_d)
    mask = (row < rows.count)[:, None] & (d < SPEC.head_dim)[None, :]
    ptrs = rows.ptr + row[:, None] * rows.stride + d[None, :]
    tl.store(ptrs, values.to(rows.ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, SPEC: tl.constexpr):
    """Returns the matrix product of ``a`` and ``b``, both rounded to the dtype of q first."""
    return tl.dot(
        a.to(SPEC.element).to(SPEC.operand), b.to(SPEC.element).to(SPEC.operand),
        input_precision=SPEC.precision, out_dtype=SPEC.accumulator,
    )  # fmt: skip


@triton.jit
def scores_of(a, b, key, head, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """Returns the scores a·b, −∞ beyond the last key if MASKED.

    The factor ``head.log2_scale`` that makes them exponents of two, which is positive, is left to the FMA
    before ``exp2``. ``key`` are indices that broadcast to the tile, (queries, keys) or transposed.
    """
    scores = dot(a, b, SPEC)
    if MASKED:
        scores = tl.where(key < head.k.count, scores, float("-inf"))
    return scores
