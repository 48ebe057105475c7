"""The model that is measured: a CvT, or one of transformers that runs on the same kernels."""

from __future__ import annotations

import copy
import tempfile
from typing import Any, NamedTuple

from torch import nn

from cvt.checkpoints import Checkpoint, read_checkpoint
from cvt.config import PRESETS
from cvt.factory import SEED, create_model, randomize
from cvt.huggingface import CheckpointError, save_huggingface, why_inexpressible
from cvt.model import CvT

from ...evaluation import cost, count_operations
from ..pyramids import PYRAMIDS, build_pyramid, image_size_of, quiet_transformers


class Subject(NamedTuple):
    """The model that is measured, in float32 and on the CPU: Hugging Face's, and ``ours`` with its weights.

    Either may be None, where transformers or ``cvt`` has no such model. ``operations`` are those of products
    and convolutions in a forward of one image, a sum being one too. ``is_judged`` says whether errors tell
    what is wrong: not where tokens are dropped by their scores.
    """

    name: str
    weights: str
    hf: nn.Module | None
    ours: CvT | None
    image_size: int
    operations: int
    is_judged: bool = True

    @property
    def plain(self) -> nn.Module:
        """The model in plain PyTorch, by which the others are judged."""
        model = self.hf or self.ours
        assert model is not None
        return model

    @property
    def output(self) -> str:
        """The kind of the output's elements: ``"logit"`` or ``"depth"``."""
        return "depth" if "DepthEstimation" in type(self.plain).__name__ else "logit"


def build_subject(model: str | None, checkpoint: str | None, image_size: int | None) -> Subject:
    """Builds the model that is to be measured; the arguments are options of ``cvt bench``."""
    if model is not None and model not in (*PRESETS, *PYRAMIDS):
        raise ValueError(f"model: got {model!r}, expected one of {', '.join((*PRESETS, *PYRAMIDS))}")
    weights = f"random weights (seed {SEED})" if checkpoint is None else str(checkpoint)
    if model in PYRAMIDS:
        size = image_size or image_size_of(model)
        hf = build_pyramid(model, checkpoint, size)
        return Subject(model, weights, hf, None, size, operations(model, hf, size))
    transformers = quiet_transformers()  # what is not installed fails before the weights are read
    loaded = None if checkpoint is None else read_checkpoint(checkpoint)
    if loaded is not None and model is None:
        _check_no_pyramid(loaded)
    name, ours = build_ours(model, loaded)
    size = image_size or image_size_of(name)
    count = 2 * cost(ours.config, size).multiply_adds
    with tempfile.TemporaryDirectory() as scratch:
        save_huggingface(ours, scratch)
        hf = transformers.CvtForImageClassification.from_pretrained(scratch)
    return Subject(name, weights, hf, ours, size, count)


def build_ours(model: str | None, checkpoint: Checkpoint | None) -> tuple[str, CvT]:
    """Returns our model's name, and the model with Hugging Face's activation and without drop path."""
    overrides: dict[str, Any] = {"activation": "gelu", "drop_path_rate": 0.0}
    if checkpoint is None:
        built = create_model(model or "cvt_13", **overrides)
        randomize(built)
        return model or "cvt_13", built
    chosen = model or checkpoint.architecture()
    obstacle = why_inexpressible(checkpoint.configuration(chosen, **overrides))
    if obstacle is not None:
        raise CheckpointError(f"{checkpoint.path}: {obstacle}")
    source = "Hugging Face" if checkpoint.card is None else "cvt train"
    name = model or checkpoint.preset or f"a CvT of {source}"
    return name, create_model(chosen, checkpoint=checkpoint, **overrides)


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


def operations(name: str, model: nn.Module, image_size: int) -> int:
    """Counts the operations of a forward of one image with torch's own counter, a sum being one too."""
    try:
        return count_operations(copy.deepcopy(model).to("meta").eval(), 1, 3, image_size, image_size)
    except RuntimeError as error:
        raise ValueError(f"image_size: got {image_size}, which {name} does not take: {error}") from error
