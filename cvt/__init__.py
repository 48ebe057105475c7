"""A thin CvT on the operators of cvt_kernels. See README.md for the tour."""

from cvt_kernels import __version__

from .checkpoints import CheckpointError, load_checkpoint, read_checkpoint, save_huggingface
from .config import PRESETS, CvTConfig
from .factory import create_model
from .model import CvT, CvTFeatures

__all__ = [
    "PRESETS",
    "CheckpointError",
    "CvT",
    "CvTConfig",
    "CvTFeatures",
    "__version__",
    "create_model",
    "load_checkpoint",
    "read_checkpoint",
    "save_huggingface",
]
