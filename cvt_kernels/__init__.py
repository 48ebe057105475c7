"""Fast, exact and easy CvT operators for PyTorch. See README.md for the tour."""

from . import reference
from .accelerate import accelerate, coverage, restore
from .attention import AttentionMap, attention, attention_map
from .conv_projection import conv_projection
from .layer_norm_gelu import add_layer_norm, bias_gelu, gelu, layer_norm, layer_norm_gelu
from .linear import linear, linear_primitives
from .reference import ConvBatchNorm
from .runtime import BackendUnavailable, doctor, step_downs, use_backend
from .verify import verify

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
    "gelu",
    "layer_norm",
    "layer_norm_gelu",
    "linear",
    "linear_primitives",
    "reference",
    "restore",
    "step_downs",
    "use_backend",
    "verify",
]
