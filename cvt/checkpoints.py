"""Loading of checkpoints: Microsoft's ``.pth``, Hugging Face's, ``.safetensors``, our own, and the Hub's.

Parameter names are converted to Microsoft's. No code from a file is run, and a model is changed only after
everything has been checked to fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn

from cvt_kernels.checks import check_path, shown
from cvt_kernels.messages import stacklevel_of_caller
from cvt_kernels.records import LIMITS
from cvt_kernels.reference import resize_table

from . import hub
from .card import ModelCard
from .config import MOST_STAGES, PRESETS, CvTConfig, Head, preset_of, resolve_config
from .files import replacing
from .huggingface import (
    BEST,
    INDEX,
    WEIGHTS,
    Preprocessing,
    config_of_huggingface,
    from_huggingface,
    labels_of_huggingface,
    made_up_labels,
    own_config,
    preprocessing_of_huggingface,
    shards,
    why_another_architecture,
)
from .quantized import install_layers, quantized_layers, why_damaged
from .reading import CheckpointError, is_plain, load_pickle, read_json, read_safetensors

_PathLike = str | os.PathLike[str]
_Module = TypeVar("_Module", bound=nn.Module)

#: Models that come with this package, by the names that stand for their files.
PACKAGED = {"digits": Path(__file__).parent / "weights" / "digits.safetensors"}

# The first part of a name of ours or of Hugging Face's; before it stand the names of wrappers.
_FIRST_PART = re.compile(
    r"(?:^|(?<=\.))(?:stage\d+|norm|head|decoder|(?:cvt\.)?encoder\.stages|layernorm|classifier)\."
)

# The types of weights that come without scales.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Parts that a model may have and its weights not: biases by position, and the dilated convolutions of hybrid
# mixing. A part of the names of their tensors → the fields of the configuration that decide on them.
_TABLE = ".attn.position_bias"
_SIZES = ("patch_sizes", "patch_strides", "patch_paddings", "stride_kv")
_ADDED = {
    _TABLE: ("position_bias", "position_bias_size", *_SIZES),
    ".dilated_": ("mixing",),
}
# The modules besides the stages that a model has for its head, and the layer whose outputs are the classes.
_HEADS: dict[Head, tuple[str, ...]] = {"classify": ("norm", "head"), "segment": ("decoder",)}
_LAST_LAYERS: dict[Head, str] = {"classify": "head", "segment": "decoder.classifier"}


@contextlib.contextmanager
def _naming(path: object) -> Iterator[None]:
    """Turns a ValueError of the block into a CheckpointError that begins with the path."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


class Checkpoint(NamedTuple):
    """A loaded checkpoint, with our parameter names.

    Attributes:
        path: Where the weights come from, for messages.
        tensors: Parameter name → tensor, on the CPU.
        hf_config: ``config.json`` of a Hugging Face directory, else None.
        card: The description that ``cvt train`` wrote beside the weights, else None.
        hf_preprocessor: ``preprocessor_config.json`` of a Hugging Face directory, else None.
        repository: ``owner/name`` on the Hugging Face Hub, else None.
    """

    path: str
    tensors: dict[str, Tensor]
    hf_config: dict[str, Any] | None = None
    card: ModelCard | None = None
    hf_preprocessor: dict[str, Any] | None = None
    repository: str | None = None

    @property
    def num_classes(self) -> int | None:
        """The number of classes of the head, or None if there is no head."""
        return _head_and_classes(self.tensors)[1]

    @property
    def head(self) -> Head | None:
        """The kind of head that the weights have, as ``head`` of :class:`CvTConfig`, or None."""
        return _head_and_classes(self.tensors)[0]

    @property
    def quantized(self) -> list[str]:
        """The names of the quantized layers; see ``cvt_kernels.quantize``."""
        return quantized_layers(self.tensors)

    @property
    def labels(self) -> list[str] | None:
        """The class names, or None if they are incomplete or made up by transformers."""
        labels: list[str] | None = None
        if self.card is not None:
            labels = self.card.labels
        elif self.hf_config is not None and self.num_classes is not None:
            labels = labels_of_huggingface(self.hf_config, self.num_classes)
        return None if labels is None or labels == made_up_labels(len(labels)) else labels

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The preprocessing that the weights were trained with, or None if unknown."""
        if self.card is not None:
            return Preprocessing(self.card.image_size, self.card.crop_fraction)
        return None if self.hf_preprocessor is None else preprocessing_of_huggingface(self.hf_preprocessor)

    @property
    def preset(self) -> str | None:
        """The name of the paper's model with this many channels and blocks, or None."""
        return preset_of(*_dims_and_depths(self.tensors))

    @property
    def config(self) -> CvTConfig | None:
        """The configuration that this package wrote beside the weights, or None."""
        return own_config(self.hf_config) if self.card is None else self.card.config

    @property
    def activation(self) -> str | None:
        """The activation to run the weights with, or None if unknown.

        Hugging Face runs exact GELU, with which models of the Hub are trained, except Microsoft's.
        A directory is taken for one of Microsoft's.
        """
        if self.config is not None:
            return self.config.activation
        if self.hf_config is None:
            return None
        return "quick_gelu" if self.repository in (None, *hub.MICROSOFT) else "gelu"

    def architecture(self) -> str | CvTConfig:
        """Returns :attr:`config`, or else :attr:`preset`, or else what ``config.json`` says."""
        if self.config is not None:
            return self.config
        preset, hf_config = self.preset, self.hf_config
        if preset is not None and (
            hf_config is None or why_another_architecture(hf_config, PRESETS[preset]) is None
        ):
            return preset
        if hf_config is None:
            raise CheckpointError(f"{self.path}: is not a CvT of {', '.join(PRESETS)}")
        with _naming(self.path):
            config = config_of_huggingface(hf_config, **self._known_fields())
            self._check_blocks(config)
        return config

    def check(self) -> None:
        """Raises CheckpointError unless everything saved with the weights is valid and agrees with them."""
        with _naming(self.path):
            reason = why_damaged(self.tensors) or why_not_finite(self.tensors)
            if reason is not None:
                raise CheckpointError(reason)
            if self.hf_config is not None and self.num_classes is not None:
                labels_of_huggingface(self.hf_config, self.num_classes)
            if self.config is not None:
                self._check_blocks(self.config)

    def _check_blocks(self, config: CvTConfig) -> None:
        """Raises if the sizes of a configuration differ from the weights'."""
        dims, depths = _dims_and_depths(self.tensors)
        for field, told, found in (
            ("embed_dims", config.embed_dims, dims),
            ("depths", config.depths, depths),
            ("head", config.head, self.head or config.head),
            ("num_classes", config.num_classes, self.num_classes or 0),
        ):
            if told != found:
                raise CheckpointError(f"is said to have {field} {told}, but its weights {found}")

    def configuration(self, model: str | CvTConfig | None = None, **overrides: Any) -> CvTConfig:
        """Returns the configuration of a model for these weights.

        Args:
            model: A configuration; or the name of a model of the paper, whose choices are overridden by
                the ones saved with the weights; or None for :meth:`architecture`.
            **overrides: Fields of :class:`CvTConfig` to change.
        """
        if isinstance(model, CvTConfig):
            return resolve_config(model, **overrides)
        base = resolve_config(self.architecture() if model is None else model)
        known = self.config
        if known is not None and (known.embed_dims, known.depths) == (base.embed_dims, base.depths):
            return resolve_config(known, **overrides)
        with _naming(self.path):
            base = resolve_config(base, **self._known_fields())
        return resolve_config(base, **overrides)

    def _known_fields(self) -> dict[str, Any]:
        """Returns the fields of :class:`CvTConfig` that come with the weights, whatever their model."""
        fields: dict[str, Any] = {"activation": self.activation, "num_classes": self.num_classes}
        if self.head == "segment" and self.num_classes is not None:
            fields |= {"head": self.head, "decoder_dim": self.tensors["decoder.classifier.weight"].shape[1]}
        return {name: value for name, value in fields.items() if value is not None}


def warn_of_activation(checkpoint: Checkpoint) -> None:
    """Warns if :attr:`Checkpoint.activation` may be the wrong one."""
    known = checkpoint.repository in hub.MICROSOFT or checkpoint.config is not None
    if known or checkpoint.hf_config is None:
        return
    ours = "; this one runs quick_gelu, with which the published weights were trained"
    if checkpoint.repository is not None:
        ours = ", and so does this one"
    told = f"{checkpoint.path} is a Hugging Face model, which runs exact GELU{ours}"
    warnings.warn(f"{told}; choose by activation='gelu' or 'quick_gelu'", stacklevel=stacklevel_of_caller())


def build_fitting(checkpoint: Checkpoint, build: Callable[[], _Module]) -> _Module:
    """Builds a model for a checkpoint; checks that the weights fit before it allocates memory.

    They are not loaded. The model gets quantized layers where the weights have some.
    """
    try:
        with torch.device("meta"):
            sketch: Any = build()
    except RuntimeError as error:  # more elements than can be counted
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{checkpoint.path}: does not fit this model: {reason}") from error
    with _naming(checkpoint.path), torch.device("meta"):
        install_layers(sketch, checkpoint.tensors)
    shapes = sketch.state_dict().items()
    own = {name: torch.empty((), dtype=tensor.dtype).expand(tensor.shape) for name, tensor in shapes}
    with _naming(checkpoint.path):
        _fitting(checkpoint, own, sketch.config)
    model = build()
    install_layers(model, checkpoint.tensors)
    return model


class LoadReport(NamedTuple):
    """The report of :func:`load_checkpoint`.

    Attributes:
        head_replaced: The kind of head or the number of classes differed: the model kept its own head.
        unused: Names in the checkpoint that belong to parts the model does not have.
    """

    head_replaced: bool
    unused: tuple[str, ...]


def read_checkpoint(path: _PathLike | Checkpoint, **download: Any) -> Checkpoint:
    """Reads a checkpoint without running code from the file.

    Args:
        path: One of
            a ``.pth``/``.pt``/``.bin``/``.ckpt`` file of ``torch.save``: a state_dict, possibly under
            ``"state_dict"`` or ``"model"``, possibly with prefixes of wrappers before every name, such as
            ``module.`` (DDP), ``_orig_mod.`` (torch.compile) or ``model.`` (Lightning);
            a ``.safetensors`` file;
            a directory of ``save_pretrained``, Hugging Face's or ours;
            a directory of ``cvt train``, for its best weights;
            ``"digits"``, if there is no such path, for the model of scanned digits in this package;
            ``"owner/name"`` of a model on the Hugging Face Hub, also ``"owner/name@revision"``, if there is
            no such path, and ``"hf-hub:owner/name"`` in any case; it is downloaded unless cached.
            Names may be Microsoft's or Hugging Face's. A :class:`Checkpoint` is returned as it is.
        **download: Arguments of ``huggingface_hub.hf_hub_download``, such as ``revision``, ``token``,
            ``cache_dir`` and ``local_files_only``.

    Raises:
        FileNotFoundError: Nothing is there.
        CheckpointError: The content is not weights, or is damaged, or holds pickled code, or the Hub refuses.
    """
    if isinstance(path, Checkpoint):
        return path
    check_path("path", path, "a path, a name on the Hub or a Checkpoint")
    place, model = local_place(path), None
    if isinstance(place, hub.HubModel):
        model = place._replace(revision=download.pop("revision", None) or place.revision)
        place = hub.fetch(model, **download)
    elif not place.exists():
        raise FileNotFoundError(f"checkpoint: {place} does not exist")
    hf_config, hf_preprocessor, card = None, None, None
    if (place / BEST).is_file():
        place /= BEST
    if place.is_dir():
        if not (place / "config.json").exists():
            raise CheckpointError(f"{place}: is a directory with neither config.json nor {BEST}")
        hf_config = read_json(place / "config.json")
        if (place / "preprocessor_config.json").exists():
            hf_preprocessor = read_json(place / "preprocessor_config.json")
        tensors = _read_directory(place)
    else:
        tensors, card = _read_file(place)
    tensors = {from_huggingface(key): tensor for key, tensor in tensors.items()}
    name, repository = (str(place), None) if model is None else (str(model), model.name)
    checkpoint = Checkpoint(name, tensors, hf_config, card, hf_preprocessor, repository)
    checkpoint.check()
    return checkpoint


def local_place(given: _PathLike) -> Path | hub.HubModel:
    """Returns the path that a user means, which need not exist, or the model of the Hub."""
    path = Path(given)
    model = hub.parse(given) if isinstance(given, str) else None
    if path.exists():
        return path
    return PACKAGED.get(str(path), path) if model is None else model


def load_checkpoint(model: nn.Module, checkpoint: _PathLike | Checkpoint) -> LoadReport:
    """Loads weights into a model of this package; every parameter and buffer must be present and fit.

    A head for another number of classes, or of another kind, is skipped with a warning, and the model keeps
    its own. The model gets the ``labels`` and ``preprocessing`` of the checkpoint.

    Args:
        model: The model, which is left as it was if this raises.
        checkpoint: A path or name as for :func:`read_checkpoint`, or what that returned.

    Raises:
        TypeError: ``model`` is of another package.
        FileNotFoundError: Nothing is there.
        CheckpointError: The file is not a checkpoint of this model.
    """
    target: Any = model
    config = getattr(model, "config", None)
    if not isinstance(config, CvTConfig):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvT or CvTFeatures")
    checkpoint = read_checkpoint(checkpoint)
    own = model.state_dict()
    with _naming(checkpoint.path):
        tensors, report = _fitting(checkpoint, own, config)
    model.load_state_dict(tensors, strict=True)
    head, classes = _head_and_classes(own)
    target.labels = None if head is None or report.head_replaced else checkpoint.labels
    target.preprocessing = checkpoint.preprocessing
    if report.head_replaced:
        if checkpoint.head == head:
            difference = f"a head of {checkpoint.num_classes} classes and the model one of {classes}"
        else:
            theirs = f"a head to {checkpoint.head}" if checkpoint.head else "no head"
            difference = f"{theirs} and the model one to {head}"
        warnings.warn(
            f"{checkpoint.path} has {difference}: the head was not loaded and keeps the model's own weights",
            stacklevel=stacklevel_of_caller(),
        )
    return report


def _head_and_classes(tensors: Mapping[str, Tensor]) -> tuple[Head | None, int | None]:
    """Returns the kind of head that the weights have and its number of classes, or None."""
    for head, layer in _LAST_LAYERS.items():
        weight = tensors.get(f"{layer}.weight")
        if weight is not None:
            return head, weight.shape[0] if weight.ndim == 2 else None
    return None, None


def _dims_and_depths(tensors: Mapping[str, Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    dims: list[int] = []
    depths: list[int] = []
    for i in range(MOST_STAGES + 1):  # one more, which is found to be too many
        layer = f"stage{i}.patch_embed.proj"
        weight = tensors.get(f"{layer}.weight", tensors.get(f"{layer}.qweight"))
        if weight is None:
            break
        prefix = f"stage{i}.blocks."
        depths.append(len({name.split(".")[2] for name in tensors if name.startswith(prefix)}))
        dims.append(weight.shape[0] if weight.ndim else 0)
    return tuple(dims), tuple(depths)


def why_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Returns which floating-point weight has NaN or infinite values, or None."""
    for name, tensor in tensors.items():
        if tensor.dtype in _FLOATS and is_plain(tensor) and tensor.numel():
            least, most = tensor.aminmax()
            if not (least.isfinite() and most.isfinite()):
                return f"{name}: has numbers that are NaN or infinite"
    return None


# Files ----------------------------------------------------------------------------------------------------


def _read_directory(directory: Path) -> dict[str, Tensor]:
    for name in WEIGHTS:
        if (directory / name).exists():
            return _read_file(directory / name)[0]
        index = directory / (name + INDEX)
        if index.exists():
            tensors: dict[str, Tensor] = {}
            for shard in shards(index):
                tensors |= _read_file(directory / shard)[0]
            return tensors
    raise CheckpointError(f"{directory}: has neither {' nor '.join(WEIGHTS)}")


def _read_file(path: Path) -> tuple[dict[str, Tensor], ModelCard | None]:
    content: Any
    if path.suffix == ".safetensors":
        content, described = read_safetensors(path)
    else:
        content = described = load_pickle(path)
    with _naming(path):
        tensors = _state_dict(content)
        if not isinstance(described, Mapping) or "card" not in described:
            return tensors, None
        card = described["card"]
        try:
            return tensors, ModelCard.from_dict(json.loads(card) if isinstance(card, str) else card)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"is not of this version of cvt train: {error}") from error


def save_safetensors(checkpoint: Checkpoint, path: _PathLike, **metadata: str) -> None:
    """Saves weights and their card as one ``.safetensors`` file.

    Args:
        checkpoint: What :func:`read_checkpoint` returned, such as the best weights of a ``cvt train``.
        path: The file, which ends with ``.safetensors`` and is replaced.
        **metadata: More metadata, such as ``description="Scanned digits"``.

    Raises:
        ValueError: Another ending.
        OSError: The file cannot be written.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"path: got {str(path)!r}, expected a name that ends with .safetensors")
    if checkpoint.card is not None:
        metadata["card"] = json.dumps(checkpoint.card.to_dict())
    with replacing(path) as scratch:
        scratch.write_bytes(save(_apart(checkpoint.tensors), metadata={"format": "pt", **metadata}))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as safetensors takes them: contiguous, and none in the memory of another."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        apart[name] = tensor.contiguous()
        if is_plain(tensor):
            place = apart[name].untyped_storage().data_ptr()
            apart[name] = apart[name].clone() if place in taken else apart[name]
            taken.add(place)
    return apart


def _state_dict(content: Any) -> dict[str, Tensor]:
    """Returns the tensors by name inside the content of a file, without prefixes of wrappers."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"got a {type(content).__name__}, expected a state_dict")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"got {type(value).__name__} under {shown(name)}, expected tensors only")
    first_part = _FIRST_PART.search(next(iter(content)))
    wrappers = first_part.string[: first_part.start()] if first_part else ""
    if not all(name.startswith(wrappers) for name in content):
        return dict(content)
    return {name.removeprefix(wrappers): tensor for name, tensor in content.items()}


# Checks before anything is loaded -------------------------------------------------------------------------


def _fitting(
    checkpoint: Checkpoint, own: Mapping[str, Tensor], config: CvTConfig
) -> tuple[dict[str, Tensor], LoadReport]:
    """Returns the tensors that fit a model whose own are ``own``, or raises."""
    hf_config = checkpoint.hf_config
    difference = None if hf_config is None else why_another_architecture(hf_config, config)
    tensors, unused = _split_unused(checkpoint.tensors, own, stages=len(config.embed_dims))
    difference = difference or _why_quantized_otherwise(tensors, own)
    if difference is not None:
        raise CheckpointError(difference)
    tensors |= _added(tensors, own, checkpoint.config, config)
    kept = tuple(f"{part}." for part in _own_parts(checkpoint, own))
    tensors |= {name: tensor for name, tensor in own.items() if name.startswith(kept)}
    _check_fit(checkpoint, tensors, own)
    return tensors, LoadReport(bool(kept), unused)


def _own_parts(checkpoint: Checkpoint, own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Returns the modules of the head that are not loaded, since the weights are for other classes."""
    head, classes = _head_and_classes(own)
    if head is None:
        return ()
    is_of_another_kind = checkpoint.head != head and (head == "segment" or checkpoint.head is not None)
    if is_of_another_kind:
        return _HEADS[head]
    return (_LAST_LAYERS[head],) if checkpoint.num_classes not in (None, classes) else ()


def _split_unused(
    tensors: dict[str, Tensor], own: Mapping[str, Tensor], stages: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Sets aside what belongs to parts that this model was built without: late stages and heads."""
    heads = {part for parts in _HEADS.values() for part in parts}
    parts = {*heads, *(f"stage{i}" for i in range(stages))} - {name.split(".")[0] for name in own}
    unused = tuple(name for name in tensors if name.split(".")[0] in parts)
    return {name: tensor for name, tensor in tensors.items() if name.split(".")[0] not in parts}, unused


def _added(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], known: CvTConfig | None, config: CvTConfig
) -> dict[str, Tensor]:
    """Returns tensors for parts that the weights lack, or have for images of another size.

    With them the model computes as without these parts; tables of biases by position are interpolated.
    Where ``known``, the configuration beside the weights, has the same parts, nothing is added.
    """
    parts = [
        part
        for part, fields in _ADDED.items()
        if known is None or any(getattr(known, field) != getattr(config, field) for field in fields)
    ]
    added = {}
    for name, tensor in own.items():
        table = tensors.get(name)
        if not any(part in name for part in parts):
            continue
        if table is None:
            starts_at_zero = name.endswith((".position_bias", "bn.weight"))
            added[name] = torch.zeros(tensor.shape) if starts_at_zero else tensor
        elif name.endswith(_TABLE) and _is_table(table) and table.shape[1:] != tensor.shape[1:]:
            table = table.to(torch.promote_types(table.dtype, torch.float32))
            added[name] = resize_table(table, (tensor.shape[1], tensor.shape[2]))
    return added


def _is_table(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.ndim == 3 and tensor.is_floating_point() and tensor.numel() > 0


def _why_quantized_otherwise(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str | None:
    """Returns which layer is quantized in the weights but not in the model, or the reverse."""
    theirs, ours = quantized_layers(tensors), quantized_layers(own)
    for layer in theirs:
        if layer not in ours and f"{layer}.weight" in own:
            return f"is quantized ({layer}), the model is not; build it by create_model(checkpoint=…)"
    for layer in ours:
        if layer not in theirs and f"{layer}.weight" in tensors:
            return f"is not quantized ({layer}), the model is; expected a model in floating point"
    return None


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
        raise CheckpointError(f"does not fit this model: {', '.join(problems)}{guess}")


def _is_copyable(source: Tensor, target: Tensor) -> bool:
    """Returns whether ``target.copy_(source)`` keeps the values, but for rounding."""
    if source.dtype in LIMITS or target.dtype in LIMITS:
        is_same_kind = source.dtype == target.dtype
    else:
        is_same_kind = source.is_floating_point() == target.is_floating_point() and not source.is_complex()
    is_known = not source.is_floating_point() or source.dtype in (*_FLOATS, *LIMITS)
    return is_same_kind and is_known and is_plain(source) and not target.is_meta
