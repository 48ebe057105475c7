"""Hugging Face's directories: names of parameters, ``config.json`` and ``preprocessor_config.json``.

Our parameter names are Microsoft's; Hugging Face holds the same tensors under names of its own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save
from torch import Tensor, nn

from cvt_kernels.checks import check_path, dtype_name, shown
from cvt_kernels.messages import stacklevel_of_caller
from cvt_kernels.records import LIMITS

from .card import check_names
from .config import LARGEST_IMAGE, CvTConfig, check_images, default_image_size, preset_of
from .files import filling, making, write_json
from .reading import MOST_JSON, CheckpointError, read_json

_PathLike = str | os.PathLike[str]

#: The field of ``config.json`` that holds the whole :class:`CvTConfig`; Hugging Face's hold a part of it.
OWN_CONFIG = "cvt_config"

#: The best weights in a directory of ``cvt train``.
BEST = "best.pth"
#: The files of a directory's weights, the better format first; ``INDEX`` after it, for one that lists shards.
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"
#: What describes them there.
CONFIGS = ("config.json", "preprocessor_config.json")
# The name of a file that an index lists.
_SHARD = re.compile(r"\w[\w.-]{0,250}")

# Our field → Hugging Face's of the same meaning.
_FIELDS = {
    "in_chans": "num_channels",
    "patch_sizes": "patch_sizes",
    "patch_strides": "patch_stride",
    "patch_paddings": "patch_padding",
    "embed_dims": "embed_dim",
    "num_heads": "num_heads",
    "depths": "depth",
    "mlp_ratio": "mlp_ratio",
    "attn_drop_rate": "attention_drop_rate",
    "drop_rate": "drop_rate",
    "drop_path_rate": "drop_path_rate",
    "qkv_bias": "qkv_bias",
    "cls_token": "cls_token",
    "kernel_size": "kernel_qkv",
    "stride_kv": "stride_kv",
    "stride_q": "stride_q",
}
# Fields of Hugging Face's configuration that change what the weights compute, or their shapes.
_ARCHITECTURE = (
    *(theirs for ours, theirs in _FIELDS.items() if not ours.endswith("rate")),
    "qkv_projection_method",
    "padding_q",
    "padding_kv",
)

#: What the official evaluation does with photographs, for :mod:`cvt.images`: the mean and the standard
#: deviation of ImageNet, and the part of the image that the crop sees; from a size on it sees all.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CROP_FRACTION = 0.875
UNCROPPED_SIZE = 384
_NORMALIZATION = {"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}
_BICUBIC = 3


class Preprocessing(NamedTuple):
    """The preprocessing that a model was trained with, as arguments of :func:`cvt.images.preprocess`.

    Attributes:
        image_size: Pixels of each side; None if unknown.
        crop_fraction: None for the rule of the official evaluation.
        remarks: Sentences about requested steps that ``cvt.images`` does not support.
    """

    image_size: int | None
    crop_fraction: float | None = None
    remarks: tuple[str, ...] = ()


# Directories ----------------------------------------------------------------------------------------------


def save_huggingface(
    model: nn.Module,
    directory: _PathLike,
    *,
    labels: Sequence[str] | None = None,
    image_size: int | None = None,
    crop_fraction: float | None = None,
) -> None:
    """Saves a ``CvT`` as a directory that transformers can load, as a model or a pipeline.

    Warns if the activation is not exact GELU, the only one that Hugging Face's model has: its outputs differ.

    Args:
        model: A ``CvT`` with a head.
        directory: Made if it does not exist; ``config.json``, ``model.safetensors`` and
            ``preprocessor_config.json`` in it are replaced.
        labels: Class names; None for the loaded checkpoint's, if it has any.
        image_size: Side of the images in pixels; None likewise, or else for 224 (384 for ``"cvt_w24"``).
        crop_fraction: As in :func:`cvt.images.preprocess`, for this ``image_size``.

    Raises:
        TypeError: ``model`` is not a classifier.
        ValueError: Hugging Face's CvT cannot express the model, ``labels`` are not one short text per class,
            a size is out of range, or ``directory`` is one of ``cvt train``. Nothing is written then.
        OSError: The directory cannot be written.
    """
    check_path("directory", directory)
    if not isinstance(getattr(model, "head", None), nn.Linear):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvT with a classification head")
    config = _config_of(model)
    obstacle = why_inexpressible(config) or _why_quantized(model)
    if obstacle is not None:
        raise ValueError(f"model: {obstacle}")
    write_model(model, directory, labels=labels, image_size=image_size, crop_fraction=crop_fraction)
    if config.activation != "gelu":
        warnings.warn(
            f"Hugging Face's CvT always computes exact GELU and this model {config.activation}: "
            "outputs will differ",
            stacklevel=stacklevel_of_caller(),
        )


def write_model(
    model: nn.Module,
    directory: _PathLike,
    *,
    labels: Sequence[str] | None = None,
    image_size: int | None = None,
    crop_fraction: float | None = None,
) -> None:
    """Writes a ``CvT`` as :func:`save_huggingface` does, with our own names where theirs cannot express it.

    ``config.json`` has the whole :class:`CvTConfig` in any case. A model without a head has no labels.
    """
    config = _config_of(model)
    labels = _labels_of(model, labels)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    content: dict[str, Any] = {"architectures": ["CvT"]}
    if (why_inexpressible(config) or _why_quantized(model)) is None:
        content = {"architectures": ["CvtForImageClassification"], **architecture(config)}
        tensors = {_to_huggingface(name): tensor for name, tensor in tensors.items()}
    content["id2label"] = {str(i): label for i, label in enumerate(labels)}
    content["label2id"] = {label: i for i, label in enumerate(labels)}
    content["dtype"] = dtype_name(next(model.parameters()).dtype)
    content[OWN_CONFIG] = dataclasses.asdict(config)
    size = len(json.dumps(content, indent=2)) + 1  # write_json ends the line
    if size > MOST_JSON:
        raise ValueError(f"labels: take {size} bytes in config.json, expected at most {MOST_JSON}")
    processor = _preprocessor_config(_preprocessing_of(model, image_size, crop_fraction))
    directory = Path(directory)
    if (directory / BEST).exists():
        raise ValueError(f"{directory}: has the {BEST} of a training, which would be read in place of this")
    with making(directory), filling(directory) as scratch:
        # Written here, since an error of the library's own writing is no OSError.
        (scratch / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
        write_json(scratch / "config.json", content, indent=2)
        # The usual permissions: safetensors writes files that only their owner can read.
        (scratch / "model.safetensors").chmod((scratch / "config.json").stat().st_mode)
        if config.in_chans == 3:
            write_json(scratch / "preprocessor_config.json", processor, indent=2)
    if config.in_chans != 3:  # a file of another model, which was here before
        (directory / "preprocessor_config.json").unlink(missing_ok=True)


def shards(index: Path) -> list[str]:
    """Returns the names of the files that an index of weights lists, which lie beside it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise CheckpointError(
                f"{index}: names {shown(file)}, expected a file of weights in the same folder"
            )
    return sorted(set(weight_map.values()))


def _config_of(model: nn.Module) -> CvTConfig:
    config = getattr(model, "config", None)
    if not isinstance(config, CvTConfig):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvT")
    return config


def _labels_of(model: nn.Module, labels: Sequence[str] | None) -> list[str]:
    """Returns ``labels``, or those that came with the model's weights, or made-up ones, after checks."""
    classes = _config_of(model).num_classes
    if labels is None:
        known = getattr(model, "labels", None)
        labels = known if known and len(known) == classes else made_up_labels(classes)
    names = labels if isinstance(labels, str) or not isinstance(labels, Sequence) else list(labels)
    check_names("labels", names, classes)
    return list(names)


def made_up_labels(classes: int) -> list[str]:
    """Returns the class names that transformers gives a model without any."""
    return [f"LABEL_{i}" for i in range(classes)]


# config.json ----------------------------------------------------------------------------------------------


def architecture(config: CvTConfig) -> dict[str, Any]:
    """Returns the fields of Hugging Face's ``CvtConfig`` but for the classes."""
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
    paddings = [size // 2 for size in config.kernel_size]
    return {
        "model_type": "cvt",
        **{theirs: own[ours] for ours, theirs in _FIELDS.items()},
        "qkv_projection_method": ["dw_bn"] * len(config.embed_dims),
        "padding_q": paddings,
        "padding_kv": paddings,
    }


def config_of_huggingface(content: Mapping[str, Any], **changes: Any) -> CvTConfig:
    """Returns what Hugging Face's fields of a ``config.json`` describe, with changes of other fields."""
    if (kind := content.get("model_type")) != "cvt":  # the fields of others may have the same names
        raise CheckpointError(f"is a model of type {shown(kind)}, expected 'cvt'")
    fields = {ours: content[theirs] for ours, theirs in _FIELDS.items() if theirs in content}
    tokens = fields.get("cls_token") or [True]
    pool = "cls" if isinstance(tokens, list) and tokens[-1] else "avg"
    try:
        config = CvTConfig(**{**fields, "pool": pool, **changes})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from error
    difference = why_another_architecture(content, config)
    if difference is not None:
        raise CheckpointError(difference)
    return config


def own_config(content: Mapping[str, Any] | None) -> CvTConfig | None:
    """Returns the whole :class:`CvTConfig` that a ``config.json`` holds, or None.

    What transformers has written again holds for what it ran, which is in its own fields.
    """
    if content is None or OWN_CONFIG not in content or "transformers_version" in content:
        return None
    try:
        return CvTConfig.from_dict(content[OWN_CONFIG])
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {OWN_CONFIG} is not of this version: {error}") from error


def why_another_architecture(content: Mapping[str, Any], config: CvTConfig) -> str | None:
    """Returns how a ``config.json`` contradicts a model, even where shapes agree, or None."""
    recorded = own_config(content)
    theirs = content if recorded is None else architecture(recorded)
    if theirs.get("model_type") != "cvt":
        return f"is a model of type {shown(theirs.get('model_type'))}, expected 'cvt'"
    expected, defaults = architecture(config), architecture(CvTConfig())
    for field in _ARCHITECTURE:
        value = theirs.get(field, defaults[field])
        if value != expected[field]:
            return f"config.json has {field} {shown(value)}, this model {expected[field]}"
    return None


def labels_of_huggingface(content: Mapping[str, Any], classes: int) -> list[str] | None:
    """Returns the class names of a ``config.json``, or None if it does not have one for each class."""
    id2label = content.get("id2label")
    if not isinstance(id2label, dict) or len(id2label) != classes:
        return None
    if set(id2label) != {str(i) for i in range(classes)}:
        return None
    names = [id2label[str(i)] for i in range(classes)]
    labels = [str(name) if type(name) is int else name for name in names]  # transformers takes these, too
    try:
        check_names("id2label", labels, classes)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from error
    return labels


def why_inexpressible(config: CvTConfig) -> str | None:
    """Returns which feature of a model Hugging Face's CvT lacks, or None."""
    obstacles = {
        "model without a head": not config.num_classes,
        f"pool={config.pool!r}": config.pool != "cls",
        f"head={config.head!r}": config.head != "classify",
        **_obstacles_of_stages(config),
    }
    return _sentence_of(obstacles)


def why_stages_inexpressible(model: nn.Module) -> str | None:
    """Returns which feature of a model's stages Hugging Face's CvT lacks, or None."""
    return _sentence_of(_obstacles_of_stages(_config_of(model))) or _why_quantized(model)


def _obstacles_of_stages(config: CvTConfig) -> dict[str, bool]:
    """Returns features that Hugging Face's CvT lacks, and whether the stages of a model have them."""
    return {
        f"scale={config.scale!r}": config.scale != "embed_dim",
        f"embed_norm={config.embed_norm!r}": config.embed_norm != "layer_norm",
        f"layer_scale={config.layer_scale!r}": config.layer_scale is not None,
        "heads that do not fill the width of their stage": any(
            stage.num_heads * stage.head_dim != stage.embed_dim for stage in config.stages
        ),
        f"mixing={config.mixing!r}": config.mixing != "plain",
        "position_bias": config.position_bias,
        f"token_keep={config.token_keep!r}": any(keep != 1 for keep in config.stages[-1].token_keep),
        # It makes every class token as wide as the last stage.
        "class token before the last stage": any(config.cls_token[:-1]),
        # It looks up a stage's drop path rate by the stage's number in a list as long as its depth.
        "stage of so few blocks": any(depth <= i for i, depth in enumerate(config.depths)),
    }


def _sentence_of(obstacles: Mapping[str, bool]) -> str | None:
    present = [obstacle for obstacle, is_present in obstacles.items() if is_present]
    return f"Hugging Face's CvT has no {', no '.join(present)}" if present else None


def _why_quantized(model: nn.Module) -> str | None:
    """Returns that Hugging Face's CvT has no quantized layers, or None."""
    is_quantized = any(tensor.dtype in LIMITS for tensor in model.state_dict().values())
    return "Hugging Face's CvT has no linear layers of 8-bit numbers" if is_quantized else None


# preprocessor_config.json ---------------------------------------------------------------------------------


def preprocessing_of_huggingface(content: Mapping[str, Any]) -> Preprocessing:
    """Returns what a ``preprocessor_config.json`` asks for, as far as :mod:`cvt.images` can do it."""
    does = {
        **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
        "resample": _BICUBIC,
        "rescale_factor": 1 / 255,
        **_NORMALIZATION,
    }
    wanted = {field: content[field] for field, ours in does.items() if content.get(field, ours) != ours}
    size, crop_fraction = _size_and_crop(content)
    if size is None:
        wanted |= {name: content[name] for name in ("size", "crop_pct", "crop_size") if name in content}
    if not wanted:
        return Preprocessing(size, crop_fraction)
    asked = ", ".join(f"{field} {shown(value)}" for field, value in wanted.items())
    remark = (
        f"preprocessor_config.json asks for {asked}, which cvt does not do: images are resized bicubically "
        "and normalized by ImageNet's mean and standard deviation, as in the official evaluation"
    )
    return Preprocessing(size, crop_fraction, (remark,))


def _size_and_crop(content: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Returns ``image_size`` and ``crop_fraction``; (None, None) if those cannot say it."""
    size, crop = content.get("size"), content.get("crop_size")
    kind = str(content.get("image_processor_type") or content.get("feature_extractor_type") or "ConvNext")
    is_convnext = kind.startswith("ConvNext")
    square: Any
    shortest: Any
    if isinstance(size, Mapping):
        square, shortest = _square(size), size.get("shortest_edge")
    else:
        square, shortest = (None, size) if is_convnext else (size, None)
    if content.get("do_center_crop"):
        crop = _square(crop) if isinstance(crop, Mapping) else crop
        if not _is_size(crop) or not _is_size(shortest) or crop > shortest:
            return None, None
        # Below the quotient, so that crop / crop_fraction is not rounded down to a pixel less than shortest.
        return crop, math.nextafter(crop / shortest, 0.0)
    if _is_size(square):
        return square, 1.0
    if not is_convnext or not _is_size(shortest):
        return None, None
    fraction = content.get("crop_pct") or CROP_FRACTION
    if shortest >= UNCROPPED_SIZE or fraction == CROP_FRACTION:
        return shortest, None
    is_part = isinstance(fraction, float) and shortest / LARGEST_IMAGE <= fraction < 1
    return (shortest, fraction) if is_part else (None, None)


def _square(size: Mapping[str, Any]) -> Any:
    return size.get("height") if size.get("height") == size.get("width") else None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST_IMAGE


def _preprocessing_of(
    model: nn.Module, image_size: int | None, crop_fraction: float | None
) -> tuple[int, float]:
    """Returns the size and the crop fraction of a model's images: as told, as loaded, or else as usual."""
    known = getattr(model, "preprocessing", None)
    if image_size is None and known is not None:
        image_size = known.image_size
        crop_fraction = known.crop_fraction if crop_fraction is None else crop_fraction
    if image_size is None:
        config = _config_of(model)
        image_size = default_image_size(preset_of(config.embed_dims, config.depths) or config)
    if crop_fraction is None:
        check_images(image_size, None)
        crop_fraction = CROP_FRACTION if image_size < UNCROPPED_SIZE else 1.0
    check_images(image_size, crop_fraction)
    return image_size, crop_fraction


def _preprocessor_config(images: tuple[int, float]) -> dict[str, Any]:
    """Returns the settings of Hugging Face's image processor for CvT, or of another that can do it."""
    image_size, crop_fraction = images
    square, shortest = {"height": image_size, "width": image_size}, {"shortest_edge": image_size}
    resizing: dict[str, Any]
    if (crop_fraction == 1.0) == (image_size >= UNCROPPED_SIZE):
        processor, resizing = "ConvNextImageProcessor", {"size": shortest, "crop_pct": crop_fraction}
    elif crop_fraction == 1.0:
        processor, resizing = "ViTImageProcessor", {"size": square}
    else:
        size = {"shortest_edge": int(image_size / crop_fraction)}
        processor, resizing = "BitImageProcessor", {"size": size, "do_center_crop": True, "crop_size": square}
    return {
        "image_processor_type": processor,
        **resizing,
        "do_resize": True,
        "resample": _BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        **_NORMALIZATION,
    }


# Names ----------------------------------------------------------------------------------------------------

# (our prefix, Hugging Face's prefix) of every parameter; i is the stage, j the block.
_EMBEDDING = "cvt.encoder.stages.{i}.embedding.convolution_embeddings."
_LAYER = "cvt.encoder.stages.{i}.layers.{j}."
_PREFIXES = [
    ("stage{i}.cls_token", "cvt.encoder.stages.{i}.cls_token"),
    ("stage{i}.patch_embed.proj.", _EMBEDDING + "projection."),
    ("stage{i}.patch_embed.norm.", _EMBEDDING + "normalization."),
    ("stage{i}.blocks.{j}.norm1.", _LAYER + "layernorm_before."),
    ("stage{i}.blocks.{j}.norm2.", _LAYER + "layernorm_after."),
    ("stage{i}.blocks.{j}.attn.proj.", _LAYER + "attention.output.dense."),
    ("stage{i}.blocks.{j}.mlp.fc1.", _LAYER + "intermediate.dense."),
    ("stage{i}.blocks.{j}.mlp.fc2.", _LAYER + "output.dense."),
    ("norm.", "layernorm."),
    ("head.", "classifier."),
]
for _letter, _word in (("q", "query"), ("k", "key"), ("v", "value")):
    _ours, _theirs = "stage{i}.blocks.{j}.attn.", _LAYER + "attention.attention."
    _conv = f"convolution_projection_{_word}.convolution_projection."
    _PREFIXES += [
        (f"{_ours}proj_{_letter}.", f"{_theirs}projection_{_word}."),
        (f"{_ours}conv_proj_{_letter}.conv.", f"{_theirs}{_conv}convolution."),
        (f"{_ours}conv_proj_{_letter}.bn.", f"{_theirs}{_conv}normalization."),
    ]


def _translator(pairs: list[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    def pattern(prefix: str) -> re.Pattern[str]:
        return re.compile(re.escape(prefix).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)"))

    return [(pattern(source), target) for source, target in pairs]


_OURS_TO_HF = _translator(_PREFIXES)
_HF_TO_OURS = _translator([(theirs, ours) for ours, theirs in _PREFIXES])


def _translate(name: str, translator: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in translator:
        if match := pattern.match(name):
            return target.format(**match.groupdict()) + name[match.end() :]
    return None


def stages_to_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a model's stages by the names of Hugging Face's model without a head."""
    return {
        _to_huggingface(name).removeprefix("cvt."): tensor
        for name, tensor in tensors.items()
        if name.startswith("stage")
    }


def _to_huggingface(name: str) -> str:
    translated = _translate(name, _OURS_TO_HF)
    assert translated is not None, name  # why_inexpressible knows every other
    return translated


def from_huggingface(name: str) -> str:
    """Translates a name of Hugging Face, with or without the base model's prefix; another name stays."""
    if name.startswith("encoder.stages."):
        name = "cvt." + name
    return _translate(name, _HF_TO_OURS) or name
