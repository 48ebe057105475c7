"""CvT models built on the operators of cvt_kernels. See README.md for an overview."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cvt_kernels import __version__

    from .checkpoints import load_checkpoint, read_checkpoint
    from .config import PRESETS, CvTConfig
    from .factory import create_model
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
    "load_checkpoint",
    "prune_weights",
    "read_checkpoint",
    "save_huggingface",
    "segment_in_tiles",
]

# Imported at first use: `cvt --help` imports this package and would wait for PyTorch.
_PLACES = {
    "cvt_kernels": ("__version__",),
    ".checkpoints": ("load_checkpoint", "read_checkpoint"),
    ".config": ("PRESETS", "CvTConfig"),
    ".factory": ("create_model",),
    ".huggingface": ("CheckpointError", "save_huggingface"),
    ".model": ("CvT", "CvTFeatures"),
    ".segmentation": ("CvTSegmenter",),
    ".tiles": ("segment_in_tiles",),
    ".weight_pruning": ("prune_weights",),
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(place, __name__), name)
            return value
        if place == f".{name}":  # a file, as in `import cvt` with `cvt.tiles` after it
            return importlib.import_module(place, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
