"""Triton kernels of ``gather_rows``, ``gather_add_layer_norm`` and ``scatter_rows``, with their gradients.

- ``gather_rows``: out = x[rows], 0 where a row is negative
- ``gather_add_layer_norm``: h = x[rows] + branch, y = (h − mean) / √(variance + ε) · γ + β
- ``scatter_rows``: out = x, but out[rows] = values + branch

Layout: x (B, T, C) with any strides but between channels, rows (B, K), all others (B, K, C) and contiguous.
A program holds some short rows in registers, of one image, from one read to one write. Sums are in float32
(float64 for float64). An index out of range counts as −1: nothing outside of x is read or written.

A scatter goes over the T tokens of x once and takes each from x or from the values, by the inverse of the
index, which a small kernel writes first, with one program per image. In place it writes K rows.

The backward saves rows, h and γ. It recomputes mean and variance, since it reads h anyway:
``g = dy · γ``, ``dh += (g − mean(g) − x̂ · mean(g · x̂)) / √(variance + ε)``; each program sums dγ and dβ of
its rows, and these sums are added in their order. The gradient of a gather is a scatter into zeros; a
scatter's are a gather and a scatter of zeros. No atomics: the same bits every time.

Bytes per launch, with e per element and the index's 8·B·K apart:

- gather: 2·B·K·C·e; with the sum and LayerNorm 4·B·K·C·e
- inverse of the index: 4·B·T
- scatter: B·(T − K)·C·e of x, B·K·C·e of the values, as many of the branch, 4·B·T, and B·T·C·e written
- scatter in place: B·K·C·e of the values, as many of the branch, and as many written
- backward of LayerNorm: B·K·C·e of each of dy, dh and h, and as many written
"""
