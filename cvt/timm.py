"""Registration of CvT with timm: after ``import cvt.timm``, ``timm.create_model("cvt_13")`` builds it.

The names are ``cvt_13``, ``cvt_21`` and ``cvt_w24``. Their tags stand for the weights that Microsoft
published, which timm fetches for ``pretrained=True``; ``timm.list_models("cvt*", pretrained=True)`` lists
them. Keywords are timm's (``num_classes``, ``in_chans``, ``global_pool``, ``features_only``, ``out_indices``)
and the fields of :class:`CvTConfig`; its ``drop_rate`` is dropout within the stages, not before the head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .extras import require
from .factory import create_model
from .hub import MICROSOFT
from .huggingface import CROP_FRACTION, IMAGENET_MEAN, IMAGENET_STD, UNCROPPED_SIZE, from_huggingface
from .model import CvT, CvTFeatures

_models = require("timm.models", "timm")

#: timm's names of what the head reads.
_POOLS = {"token": "cls", "avg": "avg"}


def _published(hub_id: str) -> tuple[str, dict[str, Any]]:
    """Returns timm's name and description of weights that Microsoft published on Hugging Face's hub."""
    _, model, *training = hub_id.split("-")
    data = "in22k_ft_in1k" if "22k" in training else "in1k"
    is_large = "384" in training
    image_size = UNCROPPED_SIZE if is_large else 224
    description = {
        "hf_hub_id": hub_id,
        "input_size": (3, image_size, image_size),
        "crop_pct": 1.0 if is_large else CROP_FRACTION,
        "crop_mode": "squash" if is_large else "center",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "first_conv": "stage0.patch_embed.proj",
        "classifier": "head",
        "paper_ids": "arXiv:2103.15808",
        "paper_name": "CvT: Introducing Convolutions to Vision Transformers",
    }
    return f"cvt_{model}.msft_{data}{'_384' if is_large else ''}", description


default_cfgs = _models.generate_default_cfgs(dict(map(_published, MICROSOFT)))


@_models.register_model
def cvt_13(pretrained: bool = False, **kwargs: Any) -> CvT | CvTFeatures:
    """CvT-13 of the paper; takes the arguments of ``timm.create_model``."""
    return _build("cvt_13", pretrained, **kwargs)


@_models.register_model
def cvt_21(pretrained: bool = False, **kwargs: Any) -> CvT | CvTFeatures:
    """CvT-21 of the paper; takes the arguments of ``timm.create_model``."""
    return _build("cvt_21", pretrained, **kwargs)


@_models.register_model
def cvt_w24(pretrained: bool = False, **kwargs: Any) -> CvT | CvTFeatures:
    """CvT-W24 of the paper; takes the arguments of ``timm.create_model``."""
    return _build("cvt_w24", pretrained, **kwargs)


def _build(name: str, pretrained: bool, **kwargs: Any) -> CvT | CvTFeatures:
    def build_classifier(*, global_pool: str | None = None, **overrides: Any) -> CvT:
        if global_pool is not None:
            if global_pool not in _POOLS:
                raise ValueError(f"global_pool: got {global_pool!r}, expected one of {', '.join(_POOLS)}")
            overrides["pool"] = _POOLS[global_pool]
        return create_model(name, **overrides)

    return _models.build_model_with_cfg(
        build_classifier,
        name,
        pretrained,
        pretrained_filter_fn=_with_our_names,
        feature_cfg={"out_indices": (0, 1, 2), "feature_cls": _features_of},
        **kwargs,
    )


def _with_our_names(state_dict: dict[str, Tensor], model: CvT) -> dict[str, Tensor]:
    """Returns weights of Microsoft's or Hugging Face's under the names that our model has for them."""
    return {from_huggingface(name): tensor for name, tensor in state_dict.items()}


def _features_of(model: CvT, out_indices: int | tuple[int, ...]) -> CvTFeatures:
    """Returns the stages of a classifier as a feature extractor, described by timm's ``FeatureInfo``."""
    info = _models.FeatureInfo([dict(stage) for stage in model.feature_info], out_indices)
    features = CvTFeatures(model.config, info.out_indices)
    for name, _ in features.named_children():
        features.add_module(name, model.get_submodule(name))
    features.feature_info = info
    return features
