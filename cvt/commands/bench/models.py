"""The models that ``cvt bench`` knows by name: CvT, and others of transformers that run on the same kernels.

The latter have the published sizes: SegFormer as in Table 6 of Xie et al. 2021 (MLPs four
times as wide in every stage, as in its code, and 150 classes as in ADE20K), PVT as in Table 1 of Wang et
al. 2021, PVT v2 as in Table 1 of Wang et al. 2022, and GLPN as in Kim et al. 2022, whose encoder is
SegFormer's B4.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn

from ... import hub
from ...checkpoints import Checkpoint, local_place, read_checkpoint
from ...config import PRESETS, default_image_size
from ...evaluation import cost
from ...factory import SEED, randomize
from ...files import filling, making
from ...huggingface import CheckpointError, save_huggingface
from ...model import CvT
from .contenders import build_huggingface, build_ours, quiet_transformers


class Pyramid(NamedTuple):
    """A model of transformers: its class, the size of its images, and fields of its configuration."""

    model_class: str
    image_size: int
    sizes: Mapping[str, Any]


# Depths of SegFormer and PVT v2 from B0 to B5. PVT's from tiny to large are those from B1 to B4.
_DEPTHS = [[2, 2, 2, 2], [2, 2, 2, 2], [3, 4, 6, 3], [3, 4, 18, 3], [3, 8, 27, 3], [3, 6, 40, 3]]
_NARROW, _WIDE = [32, 64, 160, 256], [64, 128, 320, 512]  # channels of B0, and of the others


def _segformer(i: int) -> Pyramid:
    sizes = {
        "hidden_sizes": _WIDE if i else _NARROW,
        "depths": _DEPTHS[i],
        "mlp_ratios": [4, 4, 4, 4],
        "decoder_hidden_size": 768 if i > 1 else 256,
        "num_labels": 150,
    }
    return Pyramid("SegformerForSemanticSegmentation", 512, sizes)


def _pvt(i: int) -> Pyramid:
    sizes = {"hidden_sizes": _WIDE, "depths": _DEPTHS[i], "mlp_ratios": [8, 8, 4, 4], "num_labels": 1000}
    return Pyramid("PvtForImageClassification", 224, sizes)


def _pvt_v2(i: int, *, linear: bool = False) -> Pyramid:
    sizes = {
        "hidden_sizes": _WIDE if i else _NARROW,
        "depths": _DEPTHS[i],
        "mlp_ratios": [4, 4, 4, 4] if i == 5 else [8, 8, 4, 4],
        "linear_attention": linear,
        "num_labels": 1000,
    }
    return Pyramid("PvtV2ForImageClassification", 224, sizes)


#: The models of transformers by name.
PYRAMIDS = {
    **{f"segformer_b{i}": _segformer(i) for i in range(6)},
    **{f"pvt_{name}": _pvt(i) for i, name in enumerate(("tiny", "small", "medium", "large"), 1)},
    **{f"pvt_v2_b{i}": _pvt_v2(i) for i in range(6)},
    "pvt_v2_b2_linear": _pvt_v2(2, linear=True),
    "glpn": Pyramid(
        "GLPNForDepthEstimation",
        480,
        {"hidden_sizes": _WIDE, "depths": _DEPTHS[4], "mlp_ratios": [4] * 4, "decoder_hidden_size": 64},
    ),
}
# What would draw random numbers in training. Not every configuration has each field.
_RATES = ("drop_path_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob")


class Subject(NamedTuple):
    """The model that is measured, in float32 and on the CPU.

    Attributes:
        weights: Where its weights are from.
        hf: Hugging Face's model.
        ours: The model of ``cvt`` with the same weights; None where there is no such model.
        depths: The number of blocks of each stage.
        operations: Of the products and convolutions of a forward of one image, a sum being an operation too.
    """

    name: str
    weights: str
    hf: nn.Module
    ours: CvT | None
    image_size: int
    depths: list[int]
    operations: int

    @property
    def output(self) -> str:
        """The kind of the output's elements: ``"logit"`` or ``"depth"``."""
        return "depth" if "DepthEstimation" in type(self.hf).__name__ else "logit"

    def save(self, directory: Any) -> None:
        """Saves the weights as a directory of Hugging Face."""
        if self.ours is not None:
            save_huggingface(self.ours, directory)
            return
        with making(directory), filling(directory) as scratch:
            try:
                self.hf.save_pretrained(scratch)  # type: ignore[operator]
            except SafetensorError as error:  # such as of a full disk
                raise OSError(f"{directory}: cannot be written to: {error}") from error


def build_subject(model: str | None, checkpoint: str | None, image_size: int | None) -> Subject:
    """Builds the model that is to be measured; the arguments are options of ``cvt bench``.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
        FileNotFoundError, OSError, CheckpointError: The weights are missing or unusable.
        ValueError: An unknown name, weights of another model, or images that the model does not take.
    """
    if model is not None and model not in (*PRESETS, *PYRAMIDS):
        raise ValueError(f"model: got {model!r}, expected one of {', '.join((*PRESETS, *PYRAMIDS))}")
    weights = f"random weights (seed {SEED})" if checkpoint is None else str(checkpoint)
    if model in PYRAMIDS:
        size = image_size or PYRAMIDS[model].image_size
        hf = build_pyramid(model, checkpoint, size)
        return Subject(model, weights, hf, None, size, list(hf.config.depths), operations(model, hf, size))
    quiet_transformers()  # what is not installed fails before the weights are read
    loaded = None if checkpoint is None else read_checkpoint(checkpoint)
    if loaded is not None and model is None:
        _check_no_pyramid(loaded)
    name, ours = build_ours(model, loaded)
    size = image_size or default_image_size(name)
    count = 2 * cost(ours.config, size).multiply_adds
    return Subject(str(name), weights, build_huggingface(ours), ours, size, list(ours.config.depths), count)


def _check_no_pyramid(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if weights are of a model of ``PYRAMIDS``, which has to be named."""
    kind = (checkpoint.hf_config or {}).get("model_type")
    if kind in (None, "cvt"):
        return
    transformers = quiet_transformers()
    classes = {name: getattr(transformers, each.model_class, None) for name, each in PYRAMIDS.items()}
    names = [
        name for name, each in classes.items() if each is not None and each.config_class.model_type == kind
    ]
    if names:
        raise CheckpointError(f"{checkpoint.path}: is of {kind}; give --model, one of {', '.join(names)}")


def build_pyramid(name: str, checkpoint: str | None, image_size: int) -> Any:
    """Builds a model of ``PYRAMIDS`` without dropout and drop path, by default with random weights.

    Raises:
        ValueError: There is no such model in this version of transformers, or the weights are of another one.
        OSError: The weights are missing or unusable.
    """
    transformers = quiet_transformers()
    model_class = getattr(transformers, PYRAMIDS[name].model_class, None)
    if model_class is None:
        raise ValueError(
            f"model: {name} is not in transformers {transformers.__version__}, expected 4.39 or newer"
        )
    if checkpoint is not None:
        return _load_pyramid(name, model_class, checkpoint)
    config = model_class.config_class(**PYRAMIDS[name].sizes)
    if config.model_type == "pvt":
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


def operations(name: str, model: nn.Module, image_size: int) -> int:
    """Counts the operations of a forward of one image with torch's own counter, a sum being one too.

    Raises:
        ValueError: The model does not take images of that size.
    """
    from torch.utils.flop_counter import FlopCounterMode  # 0.2 s, which other commands need not wait for

    computing_nothing = copy.deepcopy(model).to("meta").eval()
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            computing_nothing(torch.empty(1, 3, image_size, image_size, device="meta"))
    except RuntimeError as error:
        raise ValueError(f"image_size: got {image_size}, which {name} does not take: {error}") from error
    return int(counter.get_total_flops())
