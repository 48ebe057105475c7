"""The Triton kernel of ``layer_norm_mlp``, and ``mlp_add`` by kernels of linear layers (``training``).

The kernel computes out = x + fc2(gelu(fc1(layer_norm(x + shift)))) of narrow stages, whose weights stay on
the chip: with C = 64 and 256 hidden features they are 64 KiB in 16 bits. x and out are rows of C, fc1's
weight is (hidden, C) and fc2's (C, hidden), all contiguous.

A program takes one tile of rows after another. It normalizes a tile in registers, in float32, and goes
through the hidden features in chunks: the product with fc1, the GELU, rounded to the dtype of the operands,
and the product with fc2 added to the result. The hidden activation, four times as large as x, never leaves
the chip. There are two ways to the weights:

- resident (sm_90, 16 bits): loaded into shared memory once per program, where the tensor cores read them.
  Two things then cost no instruction of a thread per element: the biases, which are products with a column
  of ones, and the sum with x, from which the accumulator of the second product starts (x of float32, under
  autocast, is added last). fc1 is kept as its half, so that its product is the half of the argument that GELU
  begins with.
- streamed (elsewhere): loaded for every tile, from L2.

Bytes: 2·M·C·e for M rows of e bytes per element, and the weights once per program. Operations: 4·M·C·hidden,
and with resident weights 5/32 more for the biases at C = 64. No atomics, no gradients.
"""
