"""CvT models built on the operators of cvt_kernels. See README.md for an overview."""

from cvt_kernels import __version__

from .checkpoints import load_checkpoint, read_checkpoint
from .config import PRESETS, CvTConfig
from .factory import create_model, list_models
from .huggingface import CheckpointError, save_huggingface
from .model import CvT, CvTFeatures
from .segmentation import CvTSegmenter
from .tiles import segment_in_tiles
from .weight_pruning import prune_weights

__all__ = [
    "PRESETS",
    "CheckpointError",
    "CvT",
    "CvTConfig",
    "CvTFeatures",
    "CvTSegmenter",
    "__version__",
    "create_model",
    "list_models",
    "load_checkpoint",
    "prune_weights",
    "read_checkpoint",
    "save_huggingface",
    "segment_in_tiles",
]
