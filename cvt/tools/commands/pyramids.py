"""Models of transformers that run on the same kernels as CvT, by name, with the published sizes.

SegFormer is as in Table 6 of Xie et al. 2021 (MLPs four times as wide in every stage, as in its code, and 150
classes as in ADE20K), PVT as in Table 1 of Wang et al. 2021, PVT v2 as in Table 1 of Wang et al. 2022,
GLPN as in Kim et al. 2022, whose encoder is SegFormer's B4. ViT is as in Dosovitskiy et al. 2021 and Touvron
et al. 2021, DINOv2 as in Oquab et al. 2023, and CLIP's image tower as in Radford et al. 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cvt import hub
from cvt.checkpoints import local_place
from cvt.config import default_image_size
from cvt.extras import require
from cvt.factory import randomize

#: The names, for the help of commands.
NAMES = (
    "cvt_13, cvt_21, cvt_w24, segformer_b0 to _b5, pvt_tiny, _small, _medium or _large, pvt_v2_b0 to _b5, "
    "pvt_v2_b2_linear, glpn, vit_s16, vit_b16, dinov2_s14, or clip_b32"
)
#: The help of ``--image-size``.
SIZES = "side of the input images in pixels (default: 224; cvt_w24 384, glpn 480, segformer 512)"


class Pyramid(NamedTuple):
    """A model of transformers: its class, the size of its images, and fields of its configuration."""

    model_class: str
    image_size: int
    sizes: Mapping[str, Any]


_SMALL = {"hidden_size": 384, "num_attention_heads": 6, "num_labels": 1000}

# Depths of SegFormer and PVT v2 from B0 to B5. PVT's from tiny to large are those from B1 to B4.
_DEPTHS = [[2, 2, 2, 2], [2, 2, 2, 2], [3, 4, 6, 3], [3, 4, 18, 3], [3, 8, 27, 3], [3, 6, 40, 3]]
_NARROW, _WIDE = [32, 64, 160, 256], [64, 128, 320, 512]  # channels of B0, and of the others


def _segformer(i: int) -> Pyramid:
    sizes: dict[str, Any] = {"hidden_sizes": _WIDE if i else _NARROW, "depths": _DEPTHS[i]}
    sizes |= {"mlp_ratios": [4] * 4, "decoder_hidden_size": 768 if i > 1 else 256, "num_labels": 150}
    return Pyramid("SegformerForSemanticSegmentation", 512, sizes)


def _pvt(i: int) -> Pyramid:
    sizes = {"hidden_sizes": _WIDE, "depths": _DEPTHS[i], "mlp_ratios": [8, 8, 4, 4], "num_labels": 1000}
    return Pyramid("PvtForImageClassification", 224, sizes)


def _pvt_v2(i: int, *, linear: bool = False) -> Pyramid:
    sizes: dict[str, Any] = {"hidden_sizes": _WIDE if i else _NARROW, "depths": _DEPTHS[i]}
    sizes |= {"mlp_ratios": [4] * 4 if i == 5 else [8, 8, 4, 4]}
    sizes |= {"linear_attention": linear, "num_labels": 1000}
    return Pyramid("PvtV2ForImageClassification", 224, sizes)


_GLPN = {"hidden_sizes": _WIDE, "depths": _DEPTHS[4], "mlp_ratios": [4] * 4, "decoder_hidden_size": 64}
#: The models of transformers by name.
PYRAMIDS = {
    **{f"segformer_b{i}": _segformer(i) for i in range(6)},
    **{f"pvt_{name}": _pvt(i) for i, name in enumerate(("tiny", "small", "medium", "large"), 1)},
    **{f"pvt_v2_b{i}": _pvt_v2(i) for i in range(6)},
    "pvt_v2_b2_linear": _pvt_v2(2, linear=True),
    "glpn": Pyramid("GLPNForDepthEstimation", 480, _GLPN),
    "vit_s16": Pyramid("ViTForImageClassification", 224, _SMALL | {"intermediate_size": 1536}),
    "vit_b16": Pyramid("ViTForImageClassification", 224, {"num_labels": 1000}),
    # Its positions are of 518 × 518, and resized in every call.
    "dinov2_s14": Pyramid("Dinov2ForImageClassification", 224, _SMALL | {"image_size": 518}),
    "clip_b32": Pyramid("CLIPVisionModelWithProjection", 224, {}),
}
# What would draw random numbers in training. Not every configuration has each field.
_RATES = ("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob")


def image_size_of(name: str) -> int:
    """Returns the pixels of a side of a model's own images, of ``PYRAMIDS`` or a CvT."""
    return PYRAMIDS[name].image_size if name in PYRAMIDS else default_image_size(name)


def quiet_transformers() -> Any:
    """Imports transformers, and silences it; raises ModuleNotFoundError if it is not installed."""
    transformers = require("transformers", "bench")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def build_pyramid(name: str, checkpoint: str | None, image_size: int) -> Any:
    """Builds a model of ``PYRAMIDS`` without dropout and drop path, by default with random weights."""
    transformers = quiet_transformers()
    model_class = getattr(transformers, PYRAMIDS[name].model_class, None)
    if model_class is None:
        raise ValueError(
            f"model: {name} is not in transformers {transformers.__version__}, expected 4.39 or newer"
        )
    if checkpoint is not None:
        return _load_pyramid(name, model_class, checkpoint)
    config = model_class.config_class(**PYRAMIDS[name].sizes)
    if config.model_type in ("pvt", "vit", "clip_vision_model"):
        config.image_size = image_size
    model = model_class(_without_chance(config))
    randomize(model)
    return model


def _load_pyramid(name: str, model_class: Any, checkpoint: str) -> Any:
    """Loads the weights of a model of ``PYRAMIDS``, which may be for another number of classes."""
    place = local_place(checkpoint)
    folder = place if isinstance(place, Path) else hub.fetch(place)
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint: {checkpoint} is no folder, expected Hugging Face's of {name}")
    config = quiet_transformers().AutoConfig.from_pretrained(folder)
    kind = model_class.config_class.model_type
    if config.model_type != kind:
        raise ValueError(f"checkpoint: {checkpoint} is of {config.model_type}, expected a model of {kind}")
    for field, expected in PYRAMIDS[name].sizes.items():
        got = getattr(config, field, None)
        if field != "num_labels" and got != (tuple(expected) if isinstance(got, tuple) else expected):
            raise ValueError(f"checkpoint: {checkpoint} has {field} {got}, expected {expected} as {name} has")
    config = _without_chance(config)
    model, loading = model_class.from_pretrained(folder, config=config, output_loading_info=True)
    if lacking := sorted(loading["missing_keys"]):
        raise ValueError(
            f"checkpoint: {checkpoint} lacks {len(lacking)} weights of {name}, such as {lacking[0]}"
        )
    return model.float()


def _without_chance(config: Any) -> Any:
    for name in _RATES:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config
