"""Triton kernels of ``selective_fusion``.

They compute x · a + up · b for up = upsample(other) and (a, b) = sigmoid(conv(second(first(x, up)))).

Layout: x (B, H, W, C), other (B, H/2, W/2, C), the result (B, H, W, C), all contiguous; maps with other
orders in memory are copied first. There are four launches:

1. ``fusion_starts`` writes ``up``; both convolutions' weights with their taps outermost (9, outputs, inputs),
   180 KB for GLPN, so that products read runs of inputs; and of their biases and BatchNorms a factor and a
   summand for each output, in float32.
2. ``fusion_conv`` for ``first``: a product for each tap, whose rows are the pixels shifted by the tap. It
   reads x and ``up`` where they lie: their concatenation is not written. Then factor, summand and ReLU.
3. ``fusion_conv`` for ``second``, of one map.
4. ``fusion_sum``: the last convolution to two channels, by multiply-adds in float32 without tensor cores,
   sigmoid, and the weighted sum.

With 64 and 32 channels, an image of 120×160 pixels in bfloat16 has 2.5 MB in each map of 64 channels. The
launches read and write 8.3 such maps, 20 MB, and multiply 3.5 GFLOP. Nothing is folded or kept, so live and
frozen models run alike.

There are no gradients, and nothing is saved. Float64 is left to PyTorch.
"""

from .forward import selective_fusion, why_unsupported

__all__ = ["selective_fusion", "why_unsupported"]
