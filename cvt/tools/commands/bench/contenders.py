"""The contenders, all with the same weights: Hugging Face's model, sped-up forms of it, and ours."""

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

from cvt.checkpoints import Checkpoint, read_checkpoint
from cvt.config import CvTConfig
from cvt.factory import create_model, randomize
from cvt.huggingface import CheckpointError, save_huggingface, why_inexpressible
from cvt.model import CvT
from cvt_kernels import accelerate, backends, graphed, graphs, quantize
from cvt_kernels.backends import Backend

from ..pyramids import quiet_transformers

#: Peers that ours can be compared with; Hugging Face's eager model is always measured, as the baseline.
PEERS = {
    "hf": "Hugging Face's model",
    "compile": "the same under torch.compile",
    "compile-max": 'the same under torch.compile(mode="max-autotune")',
    "eager": "the model of cvt in plain PyTorch: backend reference",
    "openvino": "Hugging Face's in OpenVINO, with the hint LATENCY",
    "openvino-int8": "Hugging Face's in OpenVINO, quantized by NNCF",
    "onnxruntime": "Hugging Face's in ONNX Runtime",
}
#: This project's contenders, measured where they can run; those in ``COMPILED`` and ``INT8`` on request only.
OURS = {
    "cvt": "the model of cvt",
    "accelerate": "Hugging Face's after cvt_kernels.accelerate(freeze=False)",
    "cvt-frozen": "the model of cvt after cvt_kernels.accelerate(freeze=True)",
    "accelerate-frozen": "Hugging Face's after cvt_kernels.accelerate(freeze=True)",
    "accelerate-int8": "Hugging Face's after cvt_kernels.quantize and accelerate(freeze=True)",
    "cvt-compile": "the model of cvt under torch.compile",
    "accelerate-compile": "Hugging Face's after accelerate(freeze=False), under torch.compile",
    "accelerate-frozen-compile": "Hugging Face's after accelerate(freeze=True), under torch.compile",
    "cvt-graphed": "the model of cvt, frozen, after cvt_kernels.graphed: replays of a CUDA graph",
    "accelerate-graphed": "Hugging Face's after cvt_kernels.accelerate(freeze=True) and graphed",
}
#: Contenders whose stages are frozen and that are replayed as CUDA graphs.
GRAPHED = ("cvt-graphed", "accelerate-graphed")
#: Contenders with linear layers of 8-bit integers. Their errors are reported and not judged.
INT8 = ("openvino-int8", "accelerate-int8")
#: Contenders whose stages are frozen.
FROZEN = (*(key for key in OURS if "frozen" in key), "accelerate-int8", *GRAPHED)
#: Contenders that torch.compile makes, which takes minutes, and its mode.
COMPILED = {
    "compile": None,
    "compile-max": "max-autotune",
    "cvt-compile": None,
    "accelerate-compile": None,
    "accelerate-frozen-compile": None,
}
#: What may be asked for.
CHOICES = (*PEERS, *(key for key in OURS if key in COMPILED or key in INT8))
#: Contenders that are made of Hugging Face's model.
HUGGINGFACE = (
    *("hf", "compile", "compile-max", "openvino", "openvino-int8", "onnxruntime"),
    *(key for key in OURS if key.startswith("accelerate")),
)


class Contender(NamedTuple):
    """A way to run the weights.

    Attributes:
        key: Its name in ``--peers``, tables and files.
        model: Takes images (B, 3, H, W).
        backends: The backends that it requests.
        has_parts: Whether hooks can tell its parts apart: not in a graph, nor in a frozen stage.
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
        """Returns why a contender of ``GRAPHED`` is not replayed as a CUDA graph; None for others."""
        if self.key not in GRAPHED:
            return None
        with backends.requesting(*self.backends), torch.no_grad():
            return graphs.why_not_graphed(self.model, images)

    def launched(self) -> Contender:
        """Returns a copy without its CUDA graph; a contender that has none returns itself."""
        if self.key not in GRAPHED:
            return self
        return self._replace(model=graphs.ungraphed(copy.deepcopy(self.model)))


def chosen(peers: Sequence[str], device: torch.device, *, train: bool) -> list[str]:
    """Lists the contenders of a measurement: ``"hf"``, the ``peers``, and ours, if they can run.

    Frozen models are replayed as CUDA graphs on a GPU; nothing is frozen for training steps.
    """
    with_graphs = device.type == "cuda"

    def runs(key: str) -> bool:
        if key in COMPILED or key in PEERS or key in INT8:
            return (key == "hf" or key in peers) and not (train and key in FROZEN)
        return key not in FROZEN or (not train and (key in GRAPHED) == with_graphs)

    return [key for key in (*PEERS, *OURS) if runs(key)]


class TrainingStep(NamedTuple):
    """The output, such as logits (B, K), and the loss of a training step, both detached."""

    logits: Tensor
    loss: Tensor


def training_step(model: nn.Module, images: Tensor, autocast: torch.dtype | None = None) -> TrainingStep:
    """Runs a forward, under autocast if its dtype is given, and a backward, for the gradients of this step.

    Image i has class i, modulo the number of classes; where every pixel has a class, pixel i of the output
    has. A depth is 0 everywhere.
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
    """Returns whether an output has classes, (B, K) or (B, K, H, W); a depth is (B, H, W)."""
    return logits.ndim != 3


def build_ours(
    model: str | CvTConfig | None, checkpoint: str | Checkpoint | None = None
) -> tuple[str | CvTConfig, CvT]:
    """Builds our model with Hugging Face's activation and without drop path; returns its name and the model.

    Args:
        model: The CvT; None for what the checkpoint says or looks like, or CvT-13.
        checkpoint: Its weights; None for random ones.

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
    """Builds Hugging Face's model with the weights of ours; it needs the ``bench`` extra."""
    with tempfile.TemporaryDirectory() as scratch:
        save_huggingface(ours, scratch)
        return quiet_transformers().CvtForImageClassification.from_pretrained(scratch)


def build_contender(key: str, hf: nn.Module | None, ours: nn.Module | None) -> Contender:
    """Makes a contender of Hugging Face's model or, where it is not in ``HUGGINGFACE``, of ours.

    The models have the device, dtype and mode in which they are to run, and may be changed.

    Raises:
        ValueError: The model cannot be accelerated or frozen.
    """
    requested = ("reference",) if key in PEERS else backends.requested_backends()
    model: Any = hf if key in HUGGINGFACE else ours
    is_accelerated = key in FROZEN or key.startswith("accelerate")
    if key in INT8:
        quantize(model)
    if is_accelerated:
        accelerate(model, freeze=key in FROZEN)
    if key in GRAPHED:
        model = graphed(model)
    if key in COMPILED:
        # Every batch size gets code of its own, as the peer's users would have it.
        model = torch.compile(model, mode=COMPILED[key], dynamic=False)
    return Contender(key, model, requested, has_parts=key not in (*COMPILED, *FROZEN))


def freezing() -> tuple[Any, str]:
    """Returns a context in which torch.compile folds the weights in, and words that say so."""
    settings: Any = None
    with contextlib.suppress(ImportError):
        settings = importlib.import_module("torch._inductor.config")
    if not hasattr(settings, "freezing"):
        return contextlib.nullcontext(), ", without freezing, which this torch does not have"
    return settings.patch(freezing=True), ", with freezing"
