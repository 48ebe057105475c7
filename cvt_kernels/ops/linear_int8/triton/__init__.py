"""Triton kernels of the quantization of activations.

- ``quantize_rows``: values = round(x · limit / max |x|), scales = max |x| / limit, row by row
- ``layer_norm_quantize``: the same of layer_norm(x + shift)
- ``gelu_quantize``: the same of gelu(x + bias)

The limit is 127 for int8 and 448 for float8_e4m3fn. Layout: x (..., K) as PyTorch has
it; dimensions before the last are M rows. Inputs that are not contiguous are copied first; results are
contiguous.

Rounding: a program holds several short rows in registers, from one read of x to one write of the values.
Results of LayerNorm and GELU stay in float32 until they are rounded. The largest number of a row is found by
comparing the bits without the sign as integers, where NaN > infinity > all other numbers. Multiplication and
rounding must not be fused, which would round ties differently from the reference; these kernels are therefore
compiled without FMA contraction.

Products of such rows are PyTorch's. There are no gradients. Bytes per launch, with e per element of x:
M·K·(e + 1) + 4·M.
"""
