"""Triton kernel of ``segmentation_head``.

It computes logits = classifier(relu(weight · x + bias + Σ resize(weightᵢ · mapᵢ))).

Layout: x (B, C, H, W) with any strides, logits (B, H·W, L), contiguous. cuBLAS multiplies every other map at
its own size, with a result (B, Hᵢ, Wᵢ, D) of the dtype of x. The kernel does all the rest: it reads x, the
products and the weights, and writes the logits only. No map of D channels at the size of x is in memory.

A program has a rectangle of pixels, so that the pixels which it reads from the products are neighbors too.
For a chunk of the D channels it adds four pixels of every product, by their bilinear weights, in float32;
tensor cores add the product of x and its weights. ReLU is applied in registers, and the result is a factor of
the classifier's product, whose sums stay in registers over all chunks. Programs side by side have up to 256
classes each, and each of them computes the sums before ReLU.

There are no gradients, and nothing is saved. Float64 is left to PyTorch, since pixels are interpolated in
float32.
"""
