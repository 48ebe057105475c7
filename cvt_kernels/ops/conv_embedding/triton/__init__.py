"""Triton kernels of ``conv_embedding``: LayerNorm(convolution + bias) as tokens, behind a class token.

Layout: images (B, in_channels, H, W) with any strides, tokens (B, T, C), contiguous; the kernels write the
class token too, and add positions (T, C) before they round. There are no gradients, and nothing is saved.

``embed`` is one kernel for everything, for windows of few values, as 7 × 7 × 3 in CvT's first stage: it reads
the image once from memory (neighboring windows share it in L1) and writes the tokens once. In 16 bits,
windows go straight to the registers that the tensor cores read; on sm_100, by way of shared memory.

``patches`` is one kernel too, a product over windows side by side (stride k, no padding) of an image with
channels last: it reads the image once and writes the tokens once.

``normalize`` runs behind PyTorch's convolution without bias, of an image with channels last: it reads the
convolution's result once and writes the tokens once, where PyTorch would run a kernel for the bias, one for
LayerNorm, one for the class token and one for positions.

``patches.why_not_gathered`` and ``embed.why_not_embedded`` choose among them. Float64 is for Triton's
interpreter only.
"""
