"""Factors of products in TF32 for Triton kernels, as exact as cuBLAS takes them."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import machine

_HAS_ASSEMBLY = tl.constexpr(not machine.INTERPRETING)


@triton.jit
def rounded(factor, SPEC: tl.constexpr):
    """Returns a factor of a product, rounded to TF32 if that is the precision of SPEC.

    Tensor cores would cut off what TF32 has no bits for, with errors of two and a half times the size. It is
    rounded as by cuBLAS: to nearest, halves away from zero.
    """
    if SPEC.precision == "tf32":
        if _HAS_ASSEMBLY:
            factor = tl.inline_asm_elementwise(
                "cvt.rna.tf32.f32 $0, $1;", "=r,r", [factor], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            bits = factor.to(tl.uint32, bitcast=True)
            is_finite = (bits & 0x7F800000) != 0x7F800000
            bits = tl.where(is_finite, (bits + 0x1000) & 0xFFFFE000, bits)
            factor = bits.to(tl.float32, bitcast=True)
    return factor
