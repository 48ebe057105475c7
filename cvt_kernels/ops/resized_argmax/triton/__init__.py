"""Triton kernels of ``resized_argmax``: argmax over the classes of logits that are resized bilinearly.

Layout: logits (B, K, h, w) with any strides, best with adjacent classes; the result (B, H, W), int64.

``pixel_classes`` finds the largest class of each pixel of the logits, or −1 where a logit is not finite. In
``resized_argmax`` a program has a rectangle of pixels of the result. A class that is the largest in all four
neighbors of a pixel is the largest in between, since bilinear weights are not negative. If that holds for all
its pixels, a program is done; else it interpolates the classes of its pixels in float32, some at a time, and
keeps the largest in registers. What a pixel gets does not depend on the others of its program.

Bytes per launch: the logits once and 4·B·h·w written; then 4·B·h·w, 8·B·H·W written, and of the logits what
lies around pixels whose neighbors differ. The resized logits, K numbers for each of B·H·W pixels, are never
in memory. Nothing is saved: there is no gradient. Float64 is left to PyTorch.
"""
