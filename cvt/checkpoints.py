"""Reading and writing of weights: Microsoft's ``.pth``, Hugging Face's, ``.safetensors`` and our own.

Our parameter names are Microsoft's; Hugging Face holds the same tensors under names of its own. Files are
read without running code from them, and a model is changed only once everything is known to fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

from cvt_kernels.checks import dtype_name

from .config import PRESETS, CvTConfig
from .files import filling, replacing, write_json
from .model import CvT, CvTFeatures

_PathLike = str | os.PathLike[str]

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

#: The best weights in a directory of ``cvt train``.
BEST = "best.pth"
#: Models that come with this package, by the names that stand for their files.
PACKAGED = {"digits": Path(__file__).parent / "weights" / "digits.safetensors"}

# Fields of Hugging Face's configuration that change what the weights compute, or their shapes.
_HF_ARCHITECTURE = (
    "num_channels",
    "patch_sizes",
    "patch_stride",
    "patch_padding",
    "embed_dim",
    "num_heads",
    "depth",
    "mlp_ratio",
    "qkv_bias",
    "cls_token",
    "qkv_projection_method",
    "kernel_qkv",
    "padding_kv",
    "stride_kv",
    "padding_q",
    "stride_q",
)


class CheckpointError(ValueError):
    """A file is not a checkpoint that can be read, or not one of this model."""


class ModelCard(NamedTuple):
    """The description of a model and of its images that ``cvt train`` writes beside the weights.

    Attributes:
        config: The architecture.
        labels: Class names.
        image_size: Pixels of each side, as in :func:`cvt.images.preprocess`.
        crop_fraction: Likewise.
    """

    config: CvTConfig
    labels: list[str]
    image_size: int
    crop_fraction: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, which ``torch.load(weights_only=True)`` reads."""
        return {**self._asdict(), "config": dataclasses.asdict(self.config)}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> ModelCard:
        """Builds a card from what :meth:`to_dict` returned."""
        card = cls(**{**content, "config": CvTConfig(**content["config"])})
        if len(card.labels) != card.config.num_classes:
            raise ValueError(f"got {len(card.labels)} labels for {card.config.num_classes} classes")
        return card


class Checkpoint(NamedTuple):
    """The weights of a file, under our names.

    Attributes:
        path: Where they come from.
        tensors: Parameter name → tensor, on the CPU.
        hf_config: ``config.json`` of a Hugging Face directory, else None.
        card: What ``cvt train`` wrote beside the weights, else None.
    """

    path: str
    tensors: dict[str, Tensor]
    hf_config: dict[str, Any] | None = None
    card: ModelCard | None = None

    @property
    def num_classes(self) -> int | None:
        """The number of outputs of the head, or None if there is no head."""
        head = self.tensors.get("head.weight")
        return None if head is None or head.ndim != 2 else head.shape[0]

    @property
    def labels(self) -> list[str] | None:
        """The class names, or None if the checkpoint does not have one for each class."""
        if self.card is not None:
            return self.card.labels
        id2label = (self.hf_config or {}).get("id2label")
        if self.num_classes is None or not isinstance(id2label, dict):
            return None
        if set(id2label) != {str(i) for i in range(self.num_classes)}:
            return None
        return [str(id2label[str(i)]) for i in range(self.num_classes)]

    @property
    def preset(self) -> str | None:
        """The model of the paper that has this many channels and blocks, or None."""
        shape = _dims_and_depths(self.tensors)
        return next((name for name, c in PRESETS.items() if (c.embed_dims, c.depths) == shape), None)

    def architecture(self) -> str | CvTConfig:
        """Returns the architecture that ``cvt train`` wrote beside the weights, else :attr:`preset`.

        Raises:
            CheckpointError: It does not look like any model of the paper.
        """
        architecture = self.card.config if self.card is not None else self.preset
        if architecture is None:
            raise CheckpointError(f"{self.path}: is not a CvT of {', '.join(PRESETS)}")
        return architecture


class LoadReport(NamedTuple):
    """The report of :func:`load_checkpoint` on what it did besides copying tensors.

    Attributes:
        head_replaced: The number of classes differed, so the model kept a head of its own.
        unused: Names in the checkpoint that belong to parts the model does not have.
    """

    head_replaced: bool
    unused: tuple[str, ...]


def read_checkpoint(path: _PathLike | Checkpoint) -> Checkpoint:
    """Reads weights without running code from the file.

    Args:
        path: One of
            a ``.pth``/``.pt``/``.bin`` file of ``torch.save``: a state_dict, possibly under ``"state_dict"``
            or ``"model"``, possibly with ``module.`` or ``_orig_mod.`` before every name;
            a ``.safetensors`` file;
            a directory of Hugging Face's ``save_pretrained``;
            a directory of ``cvt train``, for its best weights;
            ``"digits"``, if there is no such path, for the model of scanned digits in this package.
            Names may be Microsoft's or Hugging Face's. What this returned before is returned as it is.

    Raises:
        FileNotFoundError: Nothing is there.
        CheckpointError: The content is not weights, or is damaged, or holds pickled code.
    """
    if isinstance(path, Checkpoint):
        return path
    path = Path(path)
    if not path.exists():
        path = PACKAGED.get(str(path), path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint: {path} does not exist")
    hf_config, card = None, None
    if (path / BEST).is_file():
        path /= BEST
    if path.is_dir():
        tensors, hf_config = _read_directory(path)
    elif path.suffix == ".safetensors":
        tensors = _read_safetensors(path)
        with safe_open(path, "pt") as file:
            card = _card(file.metadata(), path)
    else:
        content = load_pickle(path)
        tensors, card = _state_dict(content, path), _card(content, path)
    tensors = {_from_huggingface(name): tensor for name, tensor in tensors.items()}
    return Checkpoint(str(path), tensors, hf_config, card)


def load_checkpoint(model: CvT | CvTFeatures, checkpoint: _PathLike | Checkpoint) -> LoadReport:
    """Loads weights into a ``CvT`` or ``CvTFeatures``; every parameter and buffer must be there and fit.

    A head for another number of classes is not loaded: the model's own stays as it is, with a warning.

    Args:
        model: The model, which is left as it was if this raises.
        checkpoint: A path as for :func:`read_checkpoint`, or what that returned.

    Raises:
        FileNotFoundError: Nothing is there.
        CheckpointError: The file is not a checkpoint of this model.
    """
    checkpoint = read_checkpoint(checkpoint)
    own = model.state_dict()
    _check_hf_config(checkpoint, model.config)
    tensors, unused = _split_unused(checkpoint.tensors, own, stages=len(model.config.embed_dims))
    head_replaced = "head.weight" in own and checkpoint.num_classes not in (None, own["head.weight"].shape[0])
    if head_replaced:
        tensors |= {name: tensor for name, tensor in own.items() if name.startswith("head.")}
    _check_fit(checkpoint, tensors, own)
    model.load_state_dict(tensors, strict=True)
    if head_replaced:
        classes = own["head.weight"].shape[0]
        warnings.warn(
            f"{checkpoint.path} has a head of {checkpoint.num_classes} classes and the model one of "
            f"{classes}: the head was not loaded and keeps the model's own weights",
            stacklevel=2,
        )
    return LoadReport(head_replaced, unused)


def save_huggingface(model: CvT, directory: _PathLike, *, labels: Sequence[str] | None = None) -> None:
    """Writes a ``CvT`` as a directory that ``CvtForImageClassification.from_pretrained`` loads.

    Warns if the activation is not exact GELU, the only one that Hugging Face's model has: its outputs differ.

    Args:
        model: A :class:`CvT` with a head.
        directory: Made if it does not exist; ``config.json`` and ``model.safetensors`` in it are replaced.
        labels: Class names.

    Raises:
        TypeError: ``model`` is not a classifier.
        ValueError: Hugging Face's CvT cannot express the model, or ``labels`` has the wrong length.
            Nothing is written then.
        OSError: The directory cannot be written.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvT with a classification head")
    config = model.config
    _check_expressible(config)
    hf_config = huggingface_config(config, labels=labels)
    if config.activation != "gelu":
        warnings.warn(
            f"Hugging Face's CvT always computes exact GELU and this model {config.activation}: "
            "outputs will differ",
            stacklevel=2,
        )
    tensors = {_to_huggingface(k): t.detach().cpu().contiguous() for k, t in model.state_dict().items()}
    hf_config["dtype"] = dtype_name(head.weight.dtype)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with filling(directory) as scratch:
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        write_json(scratch / "config.json", hf_config, indent=2)


def huggingface_config(config: CvTConfig, *, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the fields of Hugging Face's ``CvtConfig``; what those cannot express is left out.

    Raises:
        TypeError: If ``labels`` are not strings.
        ValueError: If ``labels`` does not have one name per class.
    """
    if labels is None:
        labels = [f"LABEL_{i}" for i in range(config.num_classes)]
    if not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels: got {labels!r}, expected one string per class")
    if len(labels) != config.num_classes:
        raise ValueError(f"labels: got {len(labels)} names, expected {config.num_classes}, one per class")
    stages = len(config.embed_dims)
    return {
        "architectures": ["CvtForImageClassification"],
        "model_type": "cvt",
        "num_channels": config.in_chans,
        "patch_sizes": list(config.patch_sizes),
        "patch_stride": list(config.patch_strides),
        "patch_padding": list(config.patch_paddings),
        "embed_dim": list(config.embed_dims),
        "num_heads": list(config.num_heads),
        "depth": list(config.depths),
        "mlp_ratio": list(config.mlp_ratio),
        "attention_drop_rate": list(config.attn_drop_rate),
        "drop_rate": list(config.drop_rate),
        "drop_path_rate": list(config.drop_path_rate),
        "qkv_bias": list(config.qkv_bias),
        "cls_token": list(config.cls_token),
        "qkv_projection_method": ["dw_bn"] * stages,
        "kernel_qkv": list(config.kernel_size),
        "padding_kv": [k // 2 for k in config.kernel_size],
        "stride_kv": list(config.stride_kv),
        "padding_q": [k // 2 for k in config.kernel_size],
        "stride_q": list(config.stride_q),
        "id2label": {str(i): label for i, label in enumerate(labels)},
        "label2id": {label: i for i, label in enumerate(labels)},
    }


def _check_expressible(config: CvTConfig) -> None:
    obstacles = {
        f"scale={config.scale!r}": config.scale != "embed_dim",
        f"embed_norm={config.embed_norm!r}": config.embed_norm != "layer_norm",
        f"layer_scale={config.layer_scale!r}": config.layer_scale is not None,
        f"pool={config.pool!r}": config.pool != "cls",
        "class token before the last stage": any(config.cls_token[:-1]),
        # It looks up a stage's drop path rate by the stage's number in a list as long as its depth.
        "stage of so few blocks": any(depth <= i for i, depth in enumerate(config.depths)),
    }
    present = [obstacle for obstacle, is_present in obstacles.items() if is_present]
    if present:
        raise ValueError(f"model: Hugging Face's CvT has no {', no '.join(present)}")


# Names ----------------------------------------------------------------------------------------------------


def _translator(pairs: list[tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    def pattern(prefix: str) -> re.Pattern[str]:
        return re.compile(re.escape(prefix).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{j\}", r"(?P<j>\d+)"))

    return [(pattern(source), target) for source, target in pairs]


_OURS_TO_HF = _translator(_PREFIXES)
_HF_TO_OURS = _translator([(theirs, ours) for ours, theirs in _PREFIXES])


def _translate(name: str, translator: list[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, target in translator:
        match = pattern.match(name)
        if match:
            return target.format(**match.groupdict()) + name[match.end() :]
    return None


def _to_huggingface(name: str) -> str:
    translated = _translate(name, _OURS_TO_HF)
    assert translated is not None, name  # every model that passes _check_expressible has only known names
    return translated


def _from_huggingface(name: str) -> str:
    """Translates a name of Hugging Face, with or without the base model's prefix; another name stays."""
    if name.startswith("encoder.stages."):
        name = "cvt." + name
    return _translate(name, _HF_TO_OURS) or name


def _dims_and_depths(tensors: Mapping[str, Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dims: list[int] = []
    depths: list[int] = []
    while (weight := tensors.get(f"stage{len(dims)}.patch_embed.proj.weight")) is not None:
        prefix = f"stage{len(dims)}.blocks."
        depths.append(len({name.split(".")[2] for name in tensors if name.startswith(prefix)}))
        dims.append(weight.shape[0] if weight.ndim else 0)
    return tuple(dims), tuple(depths)


# Files ----------------------------------------------------------------------------------------------------


def _read_directory(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    hf_config = _read_json(directory / "config.json")
    for name, reader in (("model.safetensors", _read_safetensors), ("pytorch_model.bin", _read_pickle)):
        if (directory / name).is_file():
            return reader(directory / name), hf_config
        index = directory / f"{name}.index.json"
        if index.is_file():
            tensors: dict[str, Tensor] = {}
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{index}: has no weight_map")
            for shard in sorted({Path(str(file)).name for file in weight_map.values()}):
                tensors |= reader(directory / shard)
            return tensors, hf_config
    raise CheckpointError(f"{directory}: has neither model.safetensors nor pytorch_model.bin")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: got a JSON {type(content).__name__}, expected an object")
    return content


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return _state_dict(load_file(path), path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: is not a safetensors file, or damaged: {error}") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    return _state_dict(load_pickle(path), path)


def _card(content: Any, path: Path) -> ModelCard | None:
    if not isinstance(content, Mapping) or "card" not in content:
        return None
    card = content["card"]
    try:
        return ModelCard.from_dict(json.loads(card) if isinstance(card, str) else card)
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not of this version of cvt train: {error}") from error


def save_safetensors(checkpoint: Checkpoint, path: _PathLike, **metadata: str) -> None:
    """Writes weights and their card as one file, which :func:`read_checkpoint` reads without pickle.

    Args:
        checkpoint: What :func:`read_checkpoint` returned, such as the best weights of a ``cvt train``.
        path: The file, which ends with ``.safetensors`` and is replaced.
        **metadata: More to say of the weights, such as ``description="Scanned digits"``.

    Raises:
        ValueError: Another ending.
        OSError: The file cannot be written.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"path: got {str(path)!r}, expected a name that ends with .safetensors")
    if checkpoint.card is not None:
        metadata["card"] = json.dumps(checkpoint.card.to_dict())
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
    with replacing(path) as scratch:
        scratch.write_bytes(save(tensors, metadata={"format": "pt", **metadata}))


def load_pickle(path: Path) -> Any:
    """Reads what ``torch.save`` wrote, onto the CPU, without running code from it.

    Raises:
        CheckpointError: The file is damaged, or holds pickled code.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes can raise anything
        unsafe = re.search(r"GLOBAL (\S+)", str(error))
        if unsafe:
            raise CheckpointError(
                f"{path}: holds pickled code or objects ({unsafe[1]}), expected tensors only; not loaded"
            ) from error
        with open(path, "rb") as file:
            start = file.read(16)
        raise CheckpointError(
            f"{path}: is not a file of torch.save, or damaged; it begins with {start!r}"
        ) from error


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """Returns the mapping of names to tensors inside ``content``, without wrappers' prefixes."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path}: got a {type(content).__name__}, expected a state_dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: got {type(value).__name__} under {name!r}, expected tensors only")
    tensors = dict(content)
    for prefix in ("module.", "_orig_mod.", "module."):  # compiled under DDP, and DDP under compiled
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


# Checks before anything is loaded -------------------------------------------------------------------------


def _split_unused(
    tensors: dict[str, Tensor], own: Mapping[str, Tensor], stages: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Sets aside what belongs to parts that this model was built without: late stages, norm, head."""
    parts = {"norm", "head", *(f"stage{i}" for i in range(stages))} - {name.split(".")[0] for name in own}
    unused = tuple(name for name in tensors if name.split(".")[0] in parts)
    return {name: tensor for name, tensor in tensors.items() if name not in unused}, unused


def _check_fit(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    missing = [name for name in own if name not in tensors]
    unexpected = [name for name in tensors if name not in own]
    common = [(name, tensors[name], tensor) for name, tensor in own.items() if name in tensors]
    reshaped = [
        f"{name} {tuple(t.shape)} for {tuple(o.shape)}" for name, t, o in common if t.shape != o.shape
    ]
    of_other_kind = [
        f"{name}, {t.dtype} {t.layout} on {t.device}" for name, t, o in common if not _is_copyable(t, o)
    ]
    problems = [
        f"{len(names)} {what} (first: {names[0]})"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", reshaped),
            ("of another kind", of_other_kind),
        )
        if names
    ]
    if problems:
        guess = f"; it looks like {checkpoint.preset}" if checkpoint.preset else ""
        raise CheckpointError(f"{checkpoint.path}: does not fit this model: {', '.join(problems)}{guess}")


def _is_copyable(source: Tensor, target: Tensor) -> bool:
    """Tells whether ``target.copy_(source)`` keeps the values, but for rounding."""
    is_same_kind = source.is_floating_point() == target.is_floating_point() and not source.is_complex()
    is_dense = source.layout == torch.strided and not source.is_quantized
    return is_same_kind and is_dense and not source.is_meta and not target.is_meta


def _check_hf_config(checkpoint: Checkpoint, config: CvTConfig) -> None:
    """Compares strides, heads and the like, which leave no trace in the shapes."""
    if checkpoint.hf_config is None:
        return
    model_type = checkpoint.hf_config.get("model_type")
    if model_type != "cvt":
        raise CheckpointError(f"{checkpoint.path}: is a model of type {model_type!r}, expected 'cvt'")
    expected, defaults = huggingface_config(config), huggingface_config(PRESETS["cvt_13"])
    for field in _HF_ARCHITECTURE:
        value = checkpoint.hf_config.get(field, defaults[field])
        if value != expected[field]:
            raise CheckpointError(
                f"{checkpoint.path}: config.json has {field} {value}, this model {expected[field]}"
            )
