"""Triton kernels of 8-bit linear layers and of the quantization of activations.

- ``quantize_rows``: values = round(x · limit / max |x|), scales = max |x| / limit, row by row
- ``layer_norm_quantize``: the same of layer_norm(x + shift)
- ``gelu_quantize``: the same of gelu(x + bias)
- ``linear_int8``: y = (values · weightᵀ) · scales · weight_scale + bias, then GELU, then + residual

The limit is 127 for int8 and 448 for float8_e4m3fn. Layout: x (..., K) and the weight (N, K) as PyTorch has
them; dimensions before the last are M rows. Inputs that are not contiguous are copied first; results are
contiguous.

Rounding: a program holds several short rows in registers, from one read of x to one write of the values.
Results of LayerNorm and GELU stay in float32 until they are rounded. The largest number of a row is found by
comparing the bits without the sign as integers, where NaN > infinity > all other numbers. Multiplication and
rounding must not be fused, which would round ties differently from the reference; these kernels are therefore
compiled without FMA contraction.

Products: int8 is summed in int32, exactly, by IGMMA on sm_90 and IMMA elsewhere. (On sm_100 the compiler has
no integer products for its fifth-generation tensor cores; its fastest products are float8.) float8 takes
QMMA on sm_89, QGMMA on sm_90 and UTCQMMA on sm_100; older chips have none. sm_90 sums in 14 bits, so partial
sums of 128 products are added up in float32. Tiles, descriptors and the persistent loop come from
``ops/linear/triton``; scales, bias, GELU and residual are in float32, before the one rounding of the result.

A floating-point x is rounded by a launch of its own before the product. Scales of all rows (``scale``,
``input_scale``) are read by the kernels, so that nothing waits for the GPU.

No atomics; every sum has a fixed order. There are no gradients. Bytes per launch, with e per element of x, of
the residual and of the result, the weight's N·K apart:

- ``quantize_rows``, ``layer_norm_quantize``, ``gelu_quantize``: M·K·(e + 1) + 4·M
- ``linear_int8``: M·K + M·N·e + 4·M, and M·N·e for the residual
"""
