"""Triton kernels of ``attention``: out = softmax(scale · q kᵀ + bias) v, for many queries over few keys.

After FlashAttention (Dao et al. 2022) and FlashAttention-2 (Dao 2023): neither scores nor probabilities leave
the chip. Tiles of keys fit CvT's 784, 196 or 50 keys (``forward``). q, k and v are read with their strides;
results are contiguous. D is padded to a power of two inside the kernels, with zeros. A bias of the scores is
left to PyTorch's attention.

Softmax, in float32, works in powers of two: p = 2^(s · scale · log2 e − m), one FMA and one ``exp2``. Where
gradients are needed, the forward saves the ``stats`` of each row, the pair (m, 1/Σ p), from which the
backward computes the probabilities again. One number, m + log2 Σ p, would round off too much of large scores.

On sm_90 the compiler waits at once for an asynchronous product (HGMMA) where it cannot tell that a loop is
entered, or where other code continues its sums: hence ``tl.assume`` before loops over queries, and the last,
masked tile of keys before the loop over the others.

No atomics; every sum has a fixed order. Launches, in bytes (read + written once, as if what programs share
came from L2; e per element, N = Nq + Nkv and C = h·D):

- forward: 2·B·N·C·e, and 8·B·h·Nq for ``stats``
- backward in one launch: B·(3·Nq + 4·Nkv)·C·e + 12·B·h·Nq; in two: B·(6·Nq + 6·Nkv)·C·e + 24·B·h·Nq
"""
