"""The Triton kernels of ``depthwise_conv_gelu``: y = gelu(conv(x) + bias), a 3×3 convolution of each channel.

x and y are tokens (B, H·W, C), channels contiguous, in row-major order; weight is (C, 1, 3, 3).

The kernels walk, as those of ``conv_projection`` do (its ``walk.py``): a program goes down a strip of rows of
some images, two rows at a time, and each row that it loads is converted once and serves the three rows of
outputs that it reaches. The taps stay in registers, halved, so that a sum is the half of the argument that
GELU begins with.

Launches and their bytes, in units of one activation B·H·W·C of e bytes per element, halos apart:

- ``fwd``: x is read once and y written once, 2 units. PyTorch's convolution and GELU move 4, and more where
  they turn tokens into maps and back.
- the backward: ``bwd_conv`` computes the argument of GELU again from x and reads dy, writes the gradient of
  the convolution's output, and has the gradients of the taps and of the bias in registers: 3 units. A walk of
  ``conv_projection`` then turns that into dx, 2 units. Only x is saved, which the linear layer before it has
  made; one activation is alive between the two launches.

The partial sums of taps and bias, 10 · regions · C of 4 bytes, are added up in a fixed order: no atomics,
equal bits every time. Where the gradient of x is not needed, its launch is left out.
"""

from .autograd import depthwise_conv_gelu, why_unsupported

__all__ = ["depthwise_conv_gelu", "why_unsupported"]
