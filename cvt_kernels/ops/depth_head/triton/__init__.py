"""Triton kernels of ``depth_head``.

They compute max_depth · sigmoid(conv(relu(conv(upsample(upsample(x)))))) for a map x (B, C, H, W).

A product over channels and an interpolation between pixels commute. cuBLAS multiplies x, at its own size,
by the nine taps of the first convolution: products (B, H, W, 9, D) of the dtype of x. ``depth_head``
interpolates them. A program has one row of the upsampled map and some columns of x, four pixels of the row
each. Upsampled twice, a pixel is a weighted sum of three neighbors on each side; the weights depend on its
place in the four, its phase. So a program adds the taps and neighbors of each column over the rows first,
and then these sums over the columns for four phases: 20 loads for a number of the large map, fewer where
weights are 0. A tap beyond the border of the upsampled map adds nothing. After bias and ReLU, tensor cores
multiply the channels by the nine taps of the last convolution. The nine sums of each pixel, (B, 4·H, 4, 9,
W) in float32, are written. ``depth_sums`` adds the nine that belong to a pixel of the result, and applies
sigmoid.

At 480×640 and 64 channels, an image in bfloat16 has 22 MB of products and 11 MB of sums, each written once
and read from memory once. PyTorch's operators move about 250 MB.

There are no gradients, and nothing is saved. Float64 is left to PyTorch, since pixels are interpolated in
float32.
"""
