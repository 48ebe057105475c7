"""GELU as a function of Triton's kernels, with one instruction of the unit for special functions (MUFU) each.

GELU is h + h · tanh(u) with h = x / 2. In the tanh and the quick variant that is their definition; erf is, as
exactly as 16 bits can tell, a tanh of a polynomial. A call of erf would take three times the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_2 = tl.constexpr(1.4142135623730951)
# √(2/π) · (x + 0.044715 · x³) in h
_TANH_LINEAR, _TANH_CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.285419265090401)

# erf(√2 · h) as the tanh of a polynomial in h, as far as |h| = 3, beyond which both are −1 or 1: the one of
# degree 5 for which the largest error of GELU is smallest, 2.6e-5.
_ERF_LINEAR, _ERF_CUBIC = tl.constexpr(1.59501573), tl.constexpr(0.29604534)
_ERF_QUINTIC = tl.constexpr(-0.01124869)
_LARGEST_SQUARE = tl.constexpr(9.0)


@triton.jit
def activate(x, APPROXIMATE: tl.constexpr, IS_HALF: tl.constexpr, HARDWARE_TANH: tl.constexpr):
    """Returns gelu(x) of float32 or float64.

    Args:
        x: A tile.
        APPROXIMATE: The variant, as ``cvt_kernels.gelu`` names it.
        IS_HALF: Whether the result will be rounded to 16 bits, so that erf may be approximated.
        HARDWARE_TANH: Whether tanh is the GPU's own instruction, whose relative error of 2^-11 is that of 16
            bits.
    """
    return activate_half(x * 0.5, APPROXIMATE, IS_HALF, HARDWARE_TANH)


@triton.jit
def activate_half(h, APPROXIMATE: tl.constexpr, IS_HALF: tl.constexpr, HARDWARE_TANH: tl.constexpr):
    """Returns gelu(2 · h), as :func:`activate` does."""
    if APPROXIMATE == "none" and not IS_HALF:
        return h + h * tl.erf(h * _SQRT_2)
    if APPROXIMATE == "none":
        square = tl.minimum(h * h, _LARGEST_SQUARE)
        u = h * (_ERF_LINEAR + square * (_ERF_CUBIC + square * _ERF_QUINTIC))
    elif APPROXIMATE == "tanh":
        u = h * (_TANH_LINEAR + _TANH_CUBIC * (h * h))
    else:
        u = h * 1.702
    if HARDWARE_TANH:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        return h + h * tanh
    power = tl.exp(-2.0 * tl.abs(u))  # 1 at most
    return 2.0 * h * tl.where(u < 0.0, power, 1.0) / (1.0 + power)
