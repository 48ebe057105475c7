"""The models for ``torch.hub.load``, which takes a copy of the repository without installing it.

Such a copy has no compiled extension, so PyTorch's own operators serve, and Triton's kernels on a GPU.
"""

from typing import Any as _Any

from cvt import CvT as _CvT
from cvt import CvTFeatures as _CvTFeatures
from cvt import create_model as _create_model

dependencies = ["filelock", "numpy", "PIL", "safetensors", "torch", "tqdm"]


def cvt_13(pretrained: bool = False, **options: _Any) -> _CvT | _CvTFeatures:
    """Returns CvT-13, with Microsoft's weights if asked for; options are those of ``cvt.create_model``."""
    return _create_model("cvt_13", pretrained=pretrained, **options)


def cvt_21(pretrained: bool = False, **options: _Any) -> _CvT | _CvTFeatures:
    """Returns CvT-21, with Microsoft's weights if asked for; options are those of ``cvt.create_model``."""
    return _create_model("cvt_21", pretrained=pretrained, **options)


def cvt_w24(pretrained: bool = False, **options: _Any) -> _CvT | _CvTFeatures:
    """Returns CvT-W24, with Microsoft's weights if asked for; options are those of ``cvt.create_model``."""
    return _create_model("cvt_w24", pretrained=pretrained, **options)
