"""GELU for Triton kernels, with one special-function instruction (MUFU) per element.

GELU is h + h · tanh(u) with h = x / 2. The tanh and quick variants are so by definition; erf is, up to 16-bit
accuracy, a tanh of a polynomial. A call of erf would take three times the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_2, _SQRT_2_OVER_PI = tl.constexpr(1.4142135623730951), tl.constexpr(0.7978845608028654)
_LOG2_E = tl.constexpr(1.4426950408889634)
# √(2/π) · (x + 0.044715 · x³) in h
TANH_LINEAR, TANH_CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.285419265090401)

# erf(√2 · h) as the tanh of a polynomial in h, as far as |h| = 3, beyond which both are −1 or 1: the one of
# degree 5 for which the largest error of GELU is smallest, 2.6e-5.
ERF_LINEAR, ERF_CUBIC = tl.constexpr(1.59501573), tl.constexpr(0.29604534)
ERF_QUINTIC = tl.constexpr(-0.01124869)
LARGEST_SQUARE = tl.constexpr(9.0)


@triton.jit
def activate(x, APPROXIMATE: tl.constexpr, IS_HALF: tl.constexpr, HARDWARE_TANH: tl.constexpr):
    """Returns gelu(x) of float32 or float64.

    APPROXIMATE is the variant. IS_HALF allows an approximate erf, for a result of 16 bits, and HARDWARE_TANH
    the GPU's tanh instruction, with a relative error of 2^-11, as of 16 bits.
    """
    return activate_half(x * 0.5, APPROXIMATE, IS_HALF, HARDWARE_TANH)


@triton.jit
def activate_half(h, APPROXIMATE: tl.constexpr, IS_HALF: tl.constexpr, HARDWARE_TANH: tl.constexpr):
    """Returns gelu(2 · h), as :func:`activate` does."""
    if APPROXIMATE == "none" and not IS_HALF:
        return h + h * tl.erf(h * _SQRT_2)
    if APPROXIMATE == "none":
        square = tl.minimum(h * h, LARGEST_SQUARE)
        u = h * (ERF_LINEAR + square * (ERF_CUBIC + square * ERF_QUINTIC))
    elif APPROXIMATE == "tanh":
        u = h * (TANH_LINEAR + TANH_CUBIC * (h * h))
    else:
        u = h * 1.702
    if HARDWARE_TANH:
        tanh = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
        return h + h * tanh
    power = tl.exp(-2.0 * tl.abs(u))  # 1 at most
    return 2.0 * h * tl.where(u < 0.0, power, 1.0) / (1.0 + power)


@triton.jit
def derivative_half(h, APPROXIMATE: tl.constexpr, IS_HALF: tl.constexpr, HARDWARE: tl.constexpr):
    """Returns gelu'(2 · h) of float32 or float64; for the constants see :func:`activate`.

    With x = 2 · h it is Φ(x) + x · Φ'(x). Φ is the sigmoid of 2 · u, with u as above, and Φ' its derivative;
    but exact GELU uses the normal density, which takes fewer instructions than the polynomial's derivative.
    HARDWARE allows the GPU's instructions for powers and reciprocals. Unlike its tanh, these have float32
    accuracy; the slope of tanh would have twice tanh's error.
    """
    if APPROXIMATE == "none" and not IS_HALF:
        return 0.5 + 0.5 * tl.erf(h * _SQRT_2) + h * _SQRT_2_OVER_PI * tl.exp(-2.0 * (h * h))
    square = h * h
    if APPROXIMATE == "none":
        least = tl.minimum(square, LARGEST_SQUARE)
        cdf = _sigmoid(h * (ERF_LINEAR + least * (ERF_CUBIC + least * ERF_QUINTIC)), HARDWARE)
        return cdf + h * _SQRT_2_OVER_PI * _power(square * (-2.0 * _LOG2_E), HARDWARE)
    if APPROXIMATE == "tanh":
        u = h * (TANH_LINEAR + TANH_CUBIC * square)
        slope = h * (2.0 * TANH_LINEAR + 6.0 * TANH_CUBIC * square)
    else:
        u = h * 1.702
        slope = h * 3.404
    cdf = _sigmoid(u, HARDWARE)
    return cdf + slope * (cdf - cdf * cdf)


@triton.jit
def _power(x, HARDWARE: tl.constexpr):
    """Returns 2^x."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _sigmoid(u, HARDWARE: tl.constexpr):
    """Returns 1 / (1 + exp(-2 · u))."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + _power(u * (-2.0 * _LOG2_E), True)],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return 1.0 / (1.0 + tl.exp(tl.minimum(-2.0 * u, 80.0)))
