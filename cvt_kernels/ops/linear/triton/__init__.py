"""Triton kernels of linear layers with what follows them."""

from .autograd import linear_add, linear_add_layer_norm, linear_gelu, why_unsupported

__all__ = ["linear_add", "linear_add_layer_norm", "linear_gelu", "why_unsupported"]
