"""Fast, exact and easy CvT operators for PyTorch. See README.md for the tour."""

from . import reference
from .acceleration import accelerate, restore
from .acceleration.coverage import coverage
from .acceleration.verify import verify
from .backends import BackendUnavailable, fallbacks, use_backend
from .diagnosis import doctor
from .ops.attention import attention
from .ops.attention.maps import AttentionMap, attention_map
from .ops.conv_projection import conv_projection
from .ops.layer_norm_gelu import add_layer_norm, bias_gelu, gelu, layer_norm, layer_norm_gelu
from .ops.linear import linear, linear_primitives
from .reference import ConvBatchNorm

__version__ = "0.1.0"

__all__ = [
    "AttentionMap",
    "BackendUnavailable",
    "ConvBatchNorm",
    "__version__",
    "accelerate",
    "add_layer_norm",
    "attention",
    "attention_map",
    "bias_gelu",
    "conv_projection",
    "coverage",
    "doctor",
    "fallbacks",
    "gelu",
    "layer_norm",
    "layer_norm_gelu",
    "linear",
    "linear_primitives",
    "reference",
    "restore",
    "use_backend",
    "verify",
]
