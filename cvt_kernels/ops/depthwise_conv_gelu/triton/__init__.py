"""The Triton kernels of ``depthwise_conv_gelu``: y = gelu(conv(x) + bias), a 3×3 convolution of each channel.

x and y are tokens (B, H·W, C), channels contiguous, in row-major order; weight is (C, 1, 3, 3). The kernels
are sliding-row kernels, as in ``conv_projection`` (its ``sliding.py``). The taps stay in registers, halved,
so that a sum is half of GELU's argument, as GELU needs it.

Launches and their bytes, in units of one activation B·H·W·C of e bytes per element, halos apart:

- ``fwd``: x is read once and y written once, 2 units, where PyTorch's convolution and GELU move 4 or more.
- backward: ``bwd_conv`` recomputes GELU's argument from x, reads dy, writes the gradient of the convolution's
  output, and sums the gradients of taps and bias in registers: 3 units. A sliding-row kernel of
  ``conv_projection`` then computes dx from it, if needed: 2 units. Only x is saved.

Partial sums are added up in a fixed order: no atomics, equal bits every time.
"""
