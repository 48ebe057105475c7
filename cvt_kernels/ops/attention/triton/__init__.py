"""Triton kernels of ``attention``: out = softmax(scale · q kᵀ + bias) v, for many queries over few keys.

After FlashAttention (Dao et al. 2022) and FlashAttention-2 (Dao 2023): a tile of queries meets one tile of
keys after the other, and neither scores nor probabilities leave the chip. The difference is the shape: CvT
has 784, 196 or 50 keys, where square tiles of 128 would compute up to 2.5 times what is asked (``forward``).

Layout: q and out (B, Nq, h, D), k and v (B, Nkv, h, D), read with their strides as the linear layers leave
them; results are contiguous. The bias is read with strides of 0 where it broadcasts. D is padded to a power
of two inside the kernels (``BLOCK_D``), with zeros.

Softmax, in float32, works in powers of two: p = 2^(s · scale · log2 e − m), one FMA and one ``exp2``. The
maximum m enters every term of a row as the same number, so its rounding cancels, however large the scores.
Where gradients are needed, the forward saves the ``stats`` of each row, the pair (m, 1/Σ p), from which the
backward computes the probabilities again (``backward``). As one number, m + log2 Σ p, scores of 10⁴ would
leave it an error of 5·10⁻⁴. The pair is (+∞, 1) for a row that the bias excludes, whose probabilities are
thus 0 in the backward too.

On sm_90 a product that runs asynchronously (HGMMA) is waited for at once where the compiler cannot tell that
a loop is entered, or where other code follows it that continues its sums: hence ``tl.assume`` before loops
over queries, and the last, masked tile of keys before the loop over the others.

No atomics; every sum has a fixed order. Launches, in bytes (read + written once, as if what programs share
came from L2; e per element, N = Nq + Nkv and C = h·D):

- forward: 2·B·N·C·e, and 8·B·h·Nq for ``stats``
- backward in one launch: B·(3·Nq + 4·Nkv)·C·e + 12·B·h·Nq; in two: B·(6·Nq + 6·Nkv)·C·e + 24·B·h·Nq
"""

from .autograd import attention, why_unsupported

__all__ = ["attention", "why_unsupported"]
