"""Triton kernels of ``conv_embedding``: tokens = LayerNorm(convolution of an image), behind a class token."""

from .operator import conv_embedding, why_unsupported

__all__ = ["conv_embedding", "why_unsupported"]
