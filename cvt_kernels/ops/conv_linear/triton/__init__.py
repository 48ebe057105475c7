"""Triton kernel of ``conv_linear``: y = linear(BatchNorm(depthwise_conv(x))), all branches in one launch.

Layout: x (B, T, C) and every yᵢ (B, Tᵢ, outputs), channels contiguous, spatial tokens row-major, class token
first. There are no gradients.

BatchNorm is folded, in float32, into the taps and the initial value of each sum. A program takes tiles of
tokens of the branches of one group: a branch of stride 1, or up to two of stride 2, which share their pixels.
It computes the convolutions of a chunk of channels, multiplies them by the weights of the linear layers, and
adds up the chunks: no convolution leaves the chip. A few programs multiply the class tokens first.

A lane has two adjacent channels (of 16 bits, one access of 4 bytes) of strips of outputs: R rows of two
adjacent columns where the stride is 1, of one where it is 2. A row of pixels that it loads serves all outputs
of the strip that it reaches, in all branches of the group.

Bytes, in units of one B·T·C activation, for CvT's q (stride 1), k and v (stride 2): 1 + 1.5. The groups read
x one after the other, and every program reads the linear weights; both should hit L2.
"""
