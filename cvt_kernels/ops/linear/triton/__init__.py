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
a loop goes over the steps of all tiles of a program, and what it loads for the next tile is under way while
it activates and stores this one. Products of 16 bits are added to the residual, rather than it to them, so
that its loads are waited for once, at the start. In place, each element is read and written by one program
only.

GELU takes one special instruction (MUFU) per output. In 16 bits it is h + h · tanh(u) with h = x/2 and the
chip's own tanh, whose error of 2⁻¹¹ is within the rounding of the largest results. That holds for all three
variants: erf is a tanh of a polynomial, with a much smaller error. A call of erf would take three times
the instructions after the products, which nothing hides.

Gradients: ``linear``, ``linear_gelu`` and ``linear_add`` have them. The products of the backward are
PyTorch's, as are those of the forward of ``linear`` and ``linear_add``; ``backward`` has the kernels around
them. The forward of ``linear_gelu`` also writes ``pre``, GELU's input, in the same pass; the backward needs
only ``pre``, not y.

No atomics; every sum has a fixed order. Bytes per launch, with e per element, the weight's N·K·e apart:

- ``linear_gelu``: (M·K + M·N)·e, and M·N·e for ``pre``
- ``linear_add``: (M·K + 2·M·N)·e; with gradients (M·K + M·N)·e by PyTorch, then 3·M·N·e
- ``linear_add_layer_norm``: (M·K + 3·M·N)·e
"""
