"""Bilinear interpolation in Triton kernels, as F.interpolate has it without align_corners."""

from __future__ import annotations

import triton
import triton.language as tl


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
