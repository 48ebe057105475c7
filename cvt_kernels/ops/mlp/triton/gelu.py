"""GELU as a device function, with one instruction of the unit for special functions (MUFU) per element."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_2 = tl.constexpr(1.4142135623730951)
# √(2/π) · (x + 0.044715 · x³) in h
_TANH_LINEAR, _TANH_CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.285419265090401)

# Φ(x) = (1 + tanh(h · P(h²))) / 2 with h = x / 2, as far as |h| = 3, beyond which both are 0 or 1: the
# polynomial of degree 2 for which the largest error of x · Φ(x) is smallest, 2.6e-5.
_EXACT_LINEAR, _EXACT_CUBIC = tl.constexpr(1.59501573), tl.constexpr(0.29604534)
_EXACT_QUINTIC = tl.constexpr(-0.01124869)
_LARGEST_SQUARE = tl.constexpr(9.0)


@triton.jit
def activate(x, APPROXIMATE: tl.constexpr, FAST: tl.constexpr):
    """Returns gelu(x), float32 or float64.

    FAST takes tanh from the GPU's own approximation, whose relative error of 2^-11 is that of 16 bits.
    """
    return activate_half(x * 0.5, APPROXIMATE, FAST)


@triton.jit
def activate_half(h, APPROXIMATE: tl.constexpr, FAST: tl.constexpr):
    """Returns gelu(2 · h), as ``activate`` does: h + h · tanh(u), where u is 0.851 · x in the quick form."""
    if APPROXIMATE == "none" and not FAST:
        return h + h * tl.erf(h * _SQRT_2)
    if APPROXIMATE == "none":
        square = tl.minimum(h * h, _LARGEST_SQUARE)
        u = h * (_EXACT_LINEAR + square * (_EXACT_CUBIC + square * _EXACT_QUINTIC))
    elif APPROXIMATE == "tanh":
        u = h * (_TANH_LINEAR + _TANH_CUBIC * (h * h))
    else:
        u = h * 1.702
    return h + h * _tanh(u, FAST)


@triton.jit
def _tanh(u, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    # exp of a number that is never positive, which cannot overflow
    e = tl.exp(-2.0 * tl.abs(u))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(u < 0, -t, t)
