"""The models that are compared, with the same weights: Hugging Face's as it is and made faster, and ours."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels import accelerate, backends, graphed, graphs
from cvt_kernels.backends import Backend

from ...checkpoints import Checkpoint, read_checkpoint
from ...config import CvTConfig
from ...extras import require
from ...factory import create_model, randomize
from ...huggingface import CheckpointError, save_huggingface, why_inexpressible
from ...model import CvT

#: What ours can be measured beside; Hugging Face's eager model always is, as the one to compare with.
PEERS = {
    "hf": "Hugging Face's model",
    "compile": "the same under torch.compile",
    "compile-max": 'the same under torch.compile(mode="max-autotune")',
    "eager": "the model of cvt in plain PyTorch: backend reference",
}
#: What this project offers instead, measured wherever it can run but for what ``COMPILED`` has.
OURS = {
    "cvt": "the model of cvt",
    "accelerate": "Hugging Face's after cvt_kernels.accelerate(freeze=False)",
    "cvt-frozen": "the model of cvt after cvt_kernels.accelerate(freeze=True)",
    "accelerate-frozen": "Hugging Face's after cvt_kernels.accelerate(freeze=True)",
    "cvt-compile": "the model of cvt under torch.compile",
    "accelerate-compile": "Hugging Face's after accelerate(freeze=False), under torch.compile",
    "accelerate-frozen-compile": "Hugging Face's after accelerate(freeze=True), under torch.compile",
    "cvt-graphed": "the model of cvt, frozen, after cvt_kernels.graphed: replays of a CUDA graph",
    "accelerate-graphed": "Hugging Face's after cvt_kernels.accelerate(freeze=True) and graphed",
}
#: Contenders whose stages are frozen and that are replayed as CUDA graphs.
GRAPHED = ("cvt-graphed", "accelerate-graphed")
#: Contenders whose stages are frozen.
FROZEN = ("cvt-frozen", "accelerate-frozen", "accelerate-frozen-compile", *GRAPHED)
#: Contenders that torch.compile makes, which takes minutes, and its mode.
COMPILED = {
    "compile": None,
    "compile-max": "max-autotune",
    "cvt-compile": None,
    "accelerate-compile": None,
    "accelerate-frozen-compile": None,
}
#: What may be asked for.
CHOICES = (*PEERS, *(key for key in OURS if key in COMPILED))
#: Contenders that are made of Hugging Face's model.
HUGGINGFACE = (
    "hf",
    "compile",
    "compile-max",
    "accelerate",
    "accelerate-frozen",
    "accelerate-compile",
    "accelerate-frozen-compile",
    "accelerate-graphed",
)


class Contender(NamedTuple):
    """A way to run the weights.

    Attributes:
        key: Its name in ``--peers``, tables and files.
        model: Takes images (B, 3, H, W).
        backends: The backends that it asks for.
        has_parts: Whether hooks can tell its parts apart; a graph has no place for them, and a frozen stage
            would run its blocks one by one.
    """

    key: str
    model: nn.Module
    backends: tuple[Backend, ...]
    has_parts: bool

    def step(self, images: Tensor) -> Tensor:
        """Runs a forward, in training mode a forward and a backward; returns the logits."""
        with backends.requesting(*self.backends), torch.set_grad_enabled(self.model.training):
            if not self.model.training:
                return logits_of(self.model(images))
            return training_step(self.model, images).logits

    def why_not_graphed(self, images: Tensor) -> str | None:
        """Says why a contender that is to be replayed as a CUDA graph is not; None for others."""
        if self.key not in GRAPHED:
            return None
        with backends.requesting(*self.backends), torch.no_grad():
            return graphs.why_not_graphed(self.model, images)

    def launched(self) -> Contender:
        """Returns a copy whose kernels are launched one by one, of one that is replayed; itself of others."""
        if self.key not in GRAPHED:
            return self
        return self._replace(model=graphs.ungraphed(copy.deepcopy(self.model)))


def chosen(peers: Sequence[str], device: torch.device, *, train: bool) -> list[str]:
    """Lists the contenders of a measurement: those that are asked for, and ours as far as they can run.

    Args:
        peers: What is asked for besides ``"hf"``: some of ``CHOICES``.
        device: The device. Frozen models are replayed as CUDA graphs on NVIDIA GPUs, and run as they are
            elsewhere.
        train: Whether training steps are measured, for which nothing is frozen.
    """
    with_graphs = device.type == "cuda"

    def runs(key: str) -> bool:
        if key in COMPILED or key in PEERS:
            return (key == "hf" or key in peers) and not (train and key in FROZEN)
        return key not in FROZEN or (not train and (key in GRAPHED) == with_graphs)

    return [key for key in (*PEERS, *OURS) if runs(key)]


class TrainingStep(NamedTuple):
    """The logits (B, K) or another output, and the loss, of a training step, both detached."""

    logits: Tensor
    loss: Tensor


def training_step(model: nn.Module, images: Tensor, autocast: torch.dtype | None = None) -> TrainingStep:
    """Runs a forward and a backward; the parameters then hold the gradients of this step alone.

    Args:
        model: Takes images (B, 3, H, W).
        images: The i-th has class i, modulo the number of classes, or the i-th pixel of the output where each
            has a class; a depth is 0 everywhere.
        autocast: The dtype of autocast in the forward; None runs without it.
    """
    model.zero_grad(set_to_none=True)
    casting: Any = contextlib.nullcontext()
    if autocast is not None:
        casting = torch.autocast(images.device.type, autocast)
    with casting:
        logits = logits_of(model(images))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if has_classes(logits):
            of_each = len(logits), *logits.shape[2:]
            labels = torch.arange(math.prod(of_each), device=logits.device) % logits.shape[1]
            loss = F.cross_entropy(wide, labels.view(of_each))
        else:
            loss = wide.square().mean()
    loss.backward()
    return TrainingStep(logits.detach(), loss.detach())


def logits_of(outputs: Any) -> Tensor:
    """Returns the logits, or the depth, in what a model returns."""
    return getattr(outputs, "logits", getattr(outputs, "predicted_depth", outputs))


def has_classes(logits: Tensor) -> bool:
    """Says whether an output is of classes, of images (B, K) or pixels (B, K, H, W); a depth is (B, H, W)."""
    return logits.ndim != 3


def quiet_transformers() -> Any:
    """Imports transformers, and silences its loading of models.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
    """
    transformers = require("transformers", "bench")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def build_ours(
    model: str | CvTConfig | None, checkpoint: str | Checkpoint | None = None
) -> tuple[str | CvTConfig, CvT]:
    """Builds our model so that Hugging Face's can compute the same.

    It has the activation that Hugging Face runs, and no drop path, which draws random numbers.

    Args:
        model: The CvT; None for what the checkpoint says or looks like, or CvT-13.
        checkpoint: Its weights; None for random ones.

    Returns:
        Which CvT it is, and the model in float32.

    Raises:
        CheckpointError: The file is missing or unusable, or of a model that Hugging Face's cannot be.
    """
    overrides: dict[str, Any] = {"activation": "gelu", "drop_path_rate": 0.0}
    if checkpoint is None:
        chosen = model or "cvt_13"
        built = create_model(chosen, **overrides)
        randomize(built)
        return chosen, built
    loaded = read_checkpoint(checkpoint)
    chosen = model or loaded.architecture()
    obstacle = why_inexpressible(loaded.configuration(chosen, **overrides))
    if obstacle is not None:
        raise CheckpointError(f"{loaded.path}: {obstacle}")
    built = create_model(chosen, checkpoint=loaded, **overrides)
    source = "Hugging Face" if loaded.card is None else "cvt train"
    return model or loaded.preset or f"a CvT of {source}", built


def build_huggingface(ours: CvT) -> nn.Module:
    """Builds Hugging Face's model with the weights of ours.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        save_huggingface(ours, scratch)
        return quiet_transformers().CvtForImageClassification.from_pretrained(scratch)


def build_contender(key: str, hf: nn.Module | None, ours: nn.Module | None) -> Contender:
    """Makes a contender of models that are where, of the dtype and in the mode in which they are to run.

    Args:
        key: One of ``PEERS`` or ``OURS``.
        hf: Hugging Face's model; None for contenders that are not in ``HUGGINGFACE``.
        ours: Our model; None for contenders that are in ``HUGGINGFACE``.

    Raises:
        ValueError: The model cannot be accelerated or frozen.
    """
    requested = ("reference",) if key in PEERS else backends.requested_backends()
    model: Any = hf if key in HUGGINGFACE else ours
    is_accelerated = key in FROZEN or key.startswith("accelerate")
    if is_accelerated or key in COMPILED:
        model = copy.deepcopy(model)
    if is_accelerated:
        accelerate(model, freeze=key in FROZEN)
    if key in GRAPHED:
        model = graphed(model)
    if key in COMPILED:
        # Every batch size gets code of its own, as the peer's users would have it.
        model = torch.compile(model, mode=COMPILED[key], dynamic=False)
    return Contender(key, model, requested, has_parts=key not in (*COMPILED, *FROZEN))


def freezing() -> tuple[Any, str]:
    """Lets torch.compile fold the weights in, and says so; its ``options`` would not reach dynamo.

    Returns:
        A context manager within which models are to be compiled, and words about it.
    """
    settings: Any = None
    with contextlib.suppress(ImportError):
        settings = importlib.import_module("torch._inductor.config")
    if not hasattr(settings, "freezing"):
        return contextlib.nullcontext(), ", without freezing, which this torch does not have"
    return settings.patch(freezing=True), ", with freezing"
