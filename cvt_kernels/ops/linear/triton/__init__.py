"""Triton kernels of linear layers fused with GELU, or with a residual sum and LayerNorm.

- ``linear_gelu``: y = gelu(x · weightᵀ + bias)
- ``linear_add``: h = residual + x · weightᵀ + bias, out of place or in place
- ``linear_add_layer_norm``: the same h, and y = layer_norm(h + shift) · norm_weight + norm_bias

Layout: x (..., K) and the weight (N, K) as PyTorch has them; dimensions before the last are M rows. Inputs
that are not contiguous are copied first; results are contiguous.

A program computes a tile of rows by columns, with float32 sums that stay in registers until GELU, residual or
LayerNorm are applied and the results written. For LayerNorm a tile is as wide as its rows, in up to four
parts whose widths waste little: 192 = 3 · 64, 384 = 3 · 128. Its statistics are computed from the unrounded
h, in two passes over the registers. Tiles side by side are computed at the same time, so that x comes from
memory once, and from L2 for all but the first of them; weights are small enough to stay in L2.

On sm_90 and sm_100, tensor descriptors (TMA) load and store tiles where 16-bit rows begin at multiples of 16
bytes. Everywhere else, masked pointers do, pipelined too. ``linear_gelu`` is persistent with descriptors:
what a program loads for its next tile is under way while it activates and stores this one. In place, each
element is read and written by one program only.

GELU takes one special instruction (MUFU) per output, see ``triton_gelu``. A call of erf would take three
times the instructions after the products, which nothing hides.

``linear``, ``linear_gelu`` and ``linear_add`` have gradients, see ``backward``; for these, the forward of
``linear_gelu`` also writes GELU's input ``pre``. No atomics; every sum has a fixed order. Bytes per launch,
with e per element, the weight's N·K·e apart:

- ``linear_gelu``: (M·K + M·N)·e, and M·N·e for ``pre``
- ``linear_add``: (M·K + 2·M·N)·e; with gradients (M·K + M·N)·e by PyTorch, then 3·M·N·e
- ``linear_add_layer_norm``: (M·K + 3·M·N)·e
"""
