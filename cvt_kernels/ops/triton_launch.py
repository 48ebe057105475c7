"""Helpers of several families of Triton kernels: their start, dtypes, factors in TF32, resizing."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import checks, machine, modes
from ..backends import Record


def _is_overlapping(_semantic: Any = None) -> tl.constexpr:
    """Returns, within a kernel, whether its launch overlaps the kernel before (``launching.overlaps``)."""
    options = None if _semantic is None else _semantic.builder.options  # None in Triton's interpreter
    return tl.constexpr(getattr(options, "launch_pdl", False))


_is_overlapping.__triton_builtin__ = True  # type: ignore[attr-defined]  # so that Triton passes _semantic


@triton.jit
def grid_dependency_synchronize():  # type: ignore[no-untyped-def]  # Triton reads it
    """Waits for the kernel before on the stream, if the launch overlaps it; every kernel begins with it.

    It stands before the first access to global memory, and before every return, so that a kernel ends after
    the one before has: then waiting for one kernel is waiting for all before it. What that one has written is
    visible afterwards, and what it has read may be overwritten.

    Then it lets the next kernel start. Its programs come once all of this kernel's run, and take only what
    these leave of registers and shared memory; they wait here without issuing instructions.
    """
    if _is_overlapping():
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """Returns the accumulator's dtype for tensors like ``x``: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


#: Triton's dtype of activations.
ELEMENTS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def product_types(dtype: torch.dtype, *, tf32: bool = False, exact: bool = False) -> dict[str, Any]:
    """Returns the constants of a matrix product of activations of a dtype, in TF32 if PyTorch allows it.

    If ``exact``, a product in TF32 is the sum of three, of what the factors are in TF32 and of the rest: as
    exact as float32. The constants are ``element``, Triton's dtype of the activations; ``operand``, of the
    factors: ``element``, but float32 for bfloat16 in Triton's interpreter, whose product of bfloat16 is
    wrong; ``accumulator``, of sums; ``precision``, the ``input_precision`` of ``tl.dot``.
    """
    element = ELEMENTS[dtype]
    upcast = machine.INTERPRETING and dtype == torch.bfloat16
    return {
        "element": element,
        "operand": tl.float32 if upcast else element,
        "accumulator": tl.float64 if dtype == torch.float64 else tl.float32,
        "precision": ("tf32x3" if exact else "tf32") if tf32 else "ieee",
    }


_HAS_ASSEMBLY = tl.constexpr(not machine.INTERPRETING)


@triton.jit
def rounded(factor, SPEC: tl.constexpr):  # type: ignore[no-untyped-def]
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


@triton.jit
def source(place, ratio, size):  # type: ignore[no-untyped-def]  # Triton reads it
    """Returns for pixels of one side their first and second source of ``size``, and the second one's weight.

    ``ratio`` is ``size`` by the number of pixels. Where nothing is resized both sources are the same, so that
    a neighbor that is not finite does not reach a pixel by a weight of 0.
    """
    at = tl.maximum((place.to(tl.float32) + 0.5) * ratio - 0.5, 0.0)
    first = tl.minimum(at.to(tl.int32), size - 1)
    second = tl.where(ratio == 1.0, first, tl.minimum(first + 1, size - 1))
    return first, second, at - first.to(tl.float32)


def padded(size: int, least: int = 16) -> int:
    """Returns the least tile width that holds ``size``: a power of two, at least 16 for ``tl.dot``."""
    return max(triton.next_power_of_2(size), least)


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Returns ``tensor.contiguous()``; None for None."""
    return None if tensor is None else tensor.contiguous()


def why_not_for_inference(call: Record) -> str | None:
    """Returns why kernels for inference in one dtype of 16 or 32 bits cannot serve a call, or None."""
    x = call.x
    if modes.wants_gradient(*checks.tensors_of(call)):
        return "gradients are not computed"
    if torch.compiler.is_compiling():
        return "is not for torch.compile"
    if modes.autocast_enabled(x):
        return "is not for autocast: convert the model to half precision instead"
    if x.shape[0] == 0:
        return "the batch is empty"
    if x.dtype == torch.float64:
        return "serves float32, bfloat16 and float16"
    return None
