"""Fast, exact and easy CvT operators for PyTorch. See README.md for the tour."""

import importlib
from typing import TYPE_CHECKING, Any

from . import reference
from .backends import BackendUnavailable, fallbacks, use_backend
from .changes import refresh
from .graphs import graphed
from .kernelized.registration import register_layers
from .models import accelerate, restore
from .models.coverage import coverage
from .ops.attention import attention
from .ops.attention.maps import AttentionMap, attention_map
from .ops.conv_embedding import conv_embedding
from .ops.conv_linear import conv_linear
from .ops.conv_projection import conv_projection
from .ops.conv_projection.merging import merge_convolutions
from .ops.depth_head import depth_head
from .ops.depthwise_conv_gelu import depthwise_conv_gelu
from .ops.layer_norm_gelu import add_layer_norm, gelu, layer_norm, layer_norm_gelu
from .ops.linear import linear, linear_add, linear_add_layer_norm, linear_gelu
from .ops.linear_int8 import gelu_quantize, layer_norm_quantize, linear_int8, quantize_rows
from .ops.linear_int8.modules import LinearInt8
from .ops.mlp import layer_norm_mlp, mlp_add
from .ops.resized_argmax import resized_argmax
from .ops.segmentation_head import segmentation_head
from .ops.weight_cache import release_memory
from .quantization import quantize
from .records import ConvBatchNorm, PositionBias, QuantizedRows

if TYPE_CHECKING:
    from .models.verify import verify
    from .tuning.diagnosis import doctor
    from .tuning.run import tune

__version__ = "0.1.0"

__all__ = [
    "AttentionMap",
    "BackendUnavailable",
    "ConvBatchNorm",
    "LinearInt8",
    "PositionBias",
    "QuantizedRows",
    "__version__",
    "accelerate",
    "add_layer_norm",
    "attention",
    "attention_map",
    "conv_embedding",
    "conv_linear",
    "conv_projection",
    "coverage",
    "depth_head",
    "depthwise_conv_gelu",
    "doctor",
    "fallbacks",
    "gelu",
    "gelu_quantize",
    "graphed",
    "layer_norm",
    "layer_norm_gelu",
    "layer_norm_mlp",
    "layer_norm_quantize",
    "linear",
    "linear_add",
    "linear_add_layer_norm",
    "linear_gelu",
    "linear_int8",
    "merge_convolutions",
    "mlp_add",
    "quantize",
    "quantize_rows",
    "reference",
    "refresh",
    "register_layers",
    "release_memory",
    "resized_argmax",
    "restore",
    "segmentation_head",
    "tune",
    "use_backend",
    "verify",
]

# These are imported at first use: the import of the package would take a fifth longer with them.
_AT_FIRST_USE = {"doctor": ".tuning.diagnosis", "tune": ".tuning.run", "verify": ".models.verify"}


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_AT_FIRST_USE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
