"""The launch configurations that ship: what was measured, by GPU.

To add one, add a line to the table of the GPU's generation, or a table under the GPU's name, which comes
first: the kernel, its numbers, the sizes, the rows at which it was measured, and the configuration. A call
of the same kernel, numbers and sizes takes the entry with the nearest number of rows, on a scale of powers,
if it is not more than ``REACH`` times as large or as small; else a formula's.

Numbers, sizes and rows are those of ``formulas.Need``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .records import ConvLinear, Product, Sliding

#: The factor of rows up to which an entry serves.
REACH = 8


class Entry(NamedTuple):
    """An entry: calls, and the configuration that is best for them."""

    kernel: str
    numbers: str
    sizes: tuple[int, ...]
    rows: int
    config: Any


def numbers_of(dtype: torch.dtype) -> str:
    """Returns the name of the numbers that a kernel multiplies: half or single."""
    return "half" if dtype.itemsize == 2 else "single"


# Few configurations serve many sizes, so that a model compiles few kernels. They are within 8 % of the best
# that were timed on an H200, at the sizes of CvT-13 in batches of 1, 8, 32 and 256.
_WIDE = Product(block_m=128, width=128, block_k=64, num_warps=4, num_stages=2)
_TALL = Product(block_m=128, width=64, block_k=64, num_warps=4, num_stages=3)
_TALL_PERSISTENT = Product(block_m=128, width=64, block_k=64, num_warps=4, num_stages=4, programs=2)
_SMALL = Product(block_m=64, width=32, block_k=256, num_warps=4, num_stages=4)
_SMALL_SHORT = Product(block_m=64, width=32, block_k=256, num_warps=4, num_stages=3)
_DEEP = Product(block_m=64, width=128, block_k=128, num_warps=4, num_stages=4)
_ROWS_192 = Product(block_m=64, width=64, parts=3, block_k=64, num_warps=4, num_stages=2)
_ROWS_192_FEW = Product(block_m=16, width=64, parts=3, block_k=64, num_warps=4, num_stages=2)
_ROWS_384 = Product(block_m=64, width=128, parts=3, block_k=64, num_warps=4, num_stages=2)
_ROWS_384_TALL = Product(block_m=128, width=128, parts=3, block_k=64, num_warps=8, num_stages=3)
_ROWS_384_FEW = Product(block_m=16, width=128, parts=3, block_k=128, num_warps=8, num_stages=2)
_CONV_64 = ConvLinear(tokens=64, branches=1, outputs=64, chunk=64, num_warps=4, registers=128)
_CONV_64_FEW = ConvLinear(tokens=32, branches=1, outputs=64, chunk=64, num_warps=4, registers=128)
_CONV = ConvLinear(tokens=64, branches=1, outputs=128, chunk=64, num_warps=4, registers=255)
_CONV_384 = ConvLinear(tokens=64, branches=1, outputs=128, chunk=64, num_warps=8, registers=255)
_CONV_FEW = ConvLinear(tokens=32, branches=1, outputs=128, chunk=64, num_warps=8, registers=255)

_TAPS = Sliding(pairs=1, channels=64, registers=255, resident_warps=8)
_TAPS_14 = Sliding(pairs=4, channels=64, registers=255, resident_warps=16)

SM_90 = (
    Entry("linear_gelu", "half", (192, 768), 784, _TALL),
    Entry("linear_gelu", "half", (192, 768), 6272, _WIDE),
    Entry("linear_gelu", "half", (192, 768), 25088, _TALL_PERSISTENT),
    Entry("linear_gelu", "half", (192, 768), 200704, _TALL_PERSISTENT),
    Entry("linear_gelu", "half", (384, 1536), 197, _TALL),
    Entry("linear_gelu", "half", (384, 1536), 1576, _TALL),
    Entry("linear_gelu", "half", (384, 1536), 6304, _TALL_PERSISTENT),
    Entry("linear_gelu", "half", (384, 1536), 50432, _TALL_PERSISTENT),
    Entry("linear_add", "half", (768, 192), 784, _SMALL_SHORT),
    Entry("linear_add", "half", (768, 192), 6272, _TALL),
    Entry("linear_add", "half", (768, 192), 25088, _TALL),
    Entry("linear_add", "half", (768, 192), 200704, _TALL),
    Entry("linear_add", "half", (1536, 384), 197, _SMALL),
    Entry("linear_add", "half", (1536, 384), 1576, _DEEP),
    Entry("linear_add", "half", (1536, 384), 6304, _TALL),
    Entry("linear_add", "half", (1536, 384), 50432, _ROWS_384_TALL),
    Entry("linear_add_layer_norm", "half", (192, 192), 784, _ROWS_192_FEW),
    Entry("linear_add_layer_norm", "half", (192, 192), 6272, _ROWS_192_FEW),
    Entry("linear_add_layer_norm", "half", (192, 192), 25088, _ROWS_192),
    Entry("linear_add_layer_norm", "half", (192, 192), 200704, _ROWS_192),
    Entry("linear_add_layer_norm", "half", (384, 384), 197, _ROWS_384_FEW),
    Entry("linear_add_layer_norm", "half", (384, 384), 1576, _ROWS_384_FEW),
    Entry("linear_add_layer_norm", "half", (384, 384), 6304, _ROWS_384),
    Entry("linear_add_layer_norm", "half", (384, 384), 50432, _ROWS_384),
    Entry("conv_linear", "half", (64,), 3136, _CONV_64_FEW),
    Entry("conv_linear", "half", (64,), 25088, _CONV_64),
    Entry("conv_linear", "half", (64,), 802816, _CONV_64),
    Entry("conv_linear", "half", (192,), 784, _CONV_FEW),
    Entry("conv_linear", "half", (192,), 6272, _CONV),
    Entry("conv_linear", "half", (192,), 200704, _CONV),
    Entry("conv_linear", "half", (384,), 197, _CONV_384),
    Entry("conv_linear", "half", (384,), 6304, _CONV_384),
    Entry("conv_linear", "half", (384,), 50432, _CONV_384),
    Entry("conv_projection_sliding_bwd_conv", "half", (64,), 802816, _TAPS),
    Entry("conv_projection_sliding_bwd_conv", "half", (192,), 200704, _TAPS),
    Entry("conv_projection_sliding_bwd_conv", "half", (384,), 50432, _TAPS_14),
)

#: By the name of a GPU or its generation.
TABLES: dict[str | int, tuple[Entry, ...]] = {90: SM_90}
