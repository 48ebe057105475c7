"""The Triton kernels of ``depthwise_conv_gelu``: y = gelu(conv(x) + bias), a 3×3 convolution of each channel.

x and y are tokens (B, H·W, C), channels contiguous, in row-major order; weight is (C, 1, 3, 3). The kernels
walk, as those of ``conv_projection`` do (its ``walk.py``). The taps stay in registers, halved, so that a sum
is the half of the argument that GELU begins with.

Launches and their bytes, in units of one activation B·H·W·C of e bytes per element, halos apart:

- ``fwd``: x is read once and y written once, 2 units, where PyTorch's convolution and GELU move 4 or more.
- backward: ``bwd_conv`` computes the argument of GELU again from x and reads dy, writes the gradient of the
  convolution's output, and sums those of the taps and of the bias in registers: 3 units. A walk of
  ``conv_projection`` then makes dx of that, if it is needed: 2 units. Only x is saved.

Partial sums are added up in a fixed order: no atomics, equal bits every time.
"""

from .autograd import depthwise_conv_gelu, why_unsupported

__all__ = ["depthwise_conv_gelu", "why_unsupported"]
