"""The contenders: Hugging Face's model, sped-up forms of it, and ours, all with the same weights."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels import accelerate, graphed, quantize

#: From this number of images on, the time on a GPU hides the host's, and CUDA graphs only cost memory.
_MANY = 64


class Contender(NamedTuple):
    """What a contender is made of, in the order in which it is made.

    Attributes:
        about: What it is, in words.
        model: ``"hf"``, Hugging Face's, or ``"cvt"``.
        is_ours: Whether it is of this project, or a peer.
        quantize: The dtype of its linear layers of 8-bit numbers, whose errors are not judged.
        freeze: The argument of ``accelerate``; None where that is not called.
        graphed: Whether it is replayed as CUDA graphs.
        compile: The mode of torch.compile, which takes minutes; ``"best"`` is chosen for the batch size.
        runtime: The other runtime that it runs in, whose errors are not judged either.
        asked: Whether it is measured only if it is asked for.
    """

    about: str
    model: str = "hf"
    is_ours: bool = True
    quantize: torch.dtype | None = None
    freeze: bool | None = None
    graphed: bool = False
    compile: str | None = None
    runtime: str | None = None
    asked: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether its errors have to be those that the accuracy rule allows."""
        return self.quantize is None and self.runtime is None

    def why_not(self, device: torch.device, *, train: bool) -> str | None:
        """Returns why it cannot run in this way, or None; a ``runtime`` says more."""
        if self.freeze and train:
            return "nothing is frozen in training"
        if self.graphed and device.type != "cuda":
            return "CUDA graphs need an NVIDIA GPU"
        if self.quantize == torch.float8_e4m3fn and device.type != "cuda":
            return "products of float8 need an NVIDIA GPU"
        return None


_FROZEN, _LIVE = "accelerate(freeze=True)", "accelerate(freeze=False)"

#: By the name in ``--peers``, tables and files. The ones on a GPU are replayed as CUDA graphs where frozen.
CONTENDERS = {
    "hf": Contender("Hugging Face's model", is_ours=False),
    "compile": Contender(
        "the same under torch.compile in its best mode", is_ours=False, compile="best", asked=True
    ),
    "compile-max": Contender(
        'the same under torch.compile(mode="max-autotune")', is_ours=False, compile="max-autotune", asked=True
    ),
    "eager": Contender(
        "the model of cvt in plain PyTorch: backend reference", "cvt", is_ours=False, asked=True
    ),
    "openvino": Contender(
        "Hugging Face's in OpenVINO, with the hint LATENCY", is_ours=False, runtime="openvino", asked=True
    ),
    "openvino-int8": Contender(
        "Hugging Face's in OpenVINO, quantized by NNCF", is_ours=False, runtime="openvino-int8", asked=True
    ),
    "onnxruntime": Contender(
        "Hugging Face's in ONNX Runtime", is_ours=False, runtime="onnxruntime", asked=True
    ),
    "cvt": Contender("the model of cvt", "cvt"),
    "accelerate": Contender(f"Hugging Face's after {_LIVE}", freeze=False),
    "cvt-frozen": Contender(f"the model of cvt after {_FROZEN}", "cvt", freeze=True),
    "accelerate-frozen": Contender(f"Hugging Face's after {_FROZEN}", freeze=True),
    "accelerate-int8": Contender(
        f"Hugging Face's after quantize and {_FROZEN}", quantize=torch.int8, freeze=True, asked=True
    ),
    "cvt-compile": Contender("the model of cvt under torch.compile", "cvt", compile="best", asked=True),
    "accelerate-compile": Contender(
        f"Hugging Face's after {_LIVE}, under torch.compile", freeze=False, compile="best", asked=True
    ),
    "accelerate-frozen-compile": Contender(
        f"Hugging Face's after {_FROZEN}, under torch.compile", freeze=True, compile="best", asked=True
    ),
    "cvt-graphed": Contender(
        f"the model of cvt after {_FROZEN} and graphed", "cvt", freeze=True, graphed=True
    ),
    "accelerate-graphed": Contender(f"Hugging Face's after {_FROZEN} and graphed", freeze=True, graphed=True),
    "accelerate-live-graphed": Contender(
        f"Hugging Face's after {_LIVE} and graphed", freeze=False, graphed=True, asked=True
    ),
    "accelerate-int8-graphed": Contender(
        f"Hugging Face's after quantize, {_FROZEN} and graphed",
        quantize=torch.int8,
        freeze=True,
        graphed=True,
        asked=True,
    ),
    "accelerate-float8-graphed": Contender(
        f"Hugging Face's after quantize(dtype=torch.float8_e4m3fn), {_FROZEN} and graphed",
        quantize=torch.float8_e4m3fn,
        freeze=True,
        graphed=True,
        asked=True,
    ),
}


def chosen(peers: Sequence[str], device: torch.device, *, train: bool) -> list[str]:
    """Lists ``"hf"``, the ``peers``, and those of ours that need not be asked for.

    Frozen models are replayed as CUDA graphs on a GPU; nothing is frozen for training steps.
    """

    def unasked(contender: Contender) -> bool:
        served = contender.graphed == (device.type == "cuda") and not train
        return not contender.asked and (not contender.freeze or served)

    unknown = [peer for peer in peers if peer not in CONTENDERS]
    if unknown:
        raise ValueError(f"peers: got {unknown[0]!r}, expected {', '.join(CONTENDERS)}")
    return [key for key, contender in CONTENDERS.items() if key in peers or unasked(contender)]


def made(contender: Contender, model: Any) -> Any:
    """Makes a contender of its model, which is changed, all but the compiling.

    Raises:
        ValueError: The model cannot be accelerated or frozen.
    """
    if contender.quantize is not None:
        quantize(model, dtype=contender.quantize)
    if contender.freeze is not None:
        accelerate(model, freeze=contender.freeze)
    return graphed(model) if contender.graphed else model


def mode_of(contender: Contender, batch_size: int, device: torch.device, *, train: bool) -> str | None:
    """Returns the mode of torch.compile for a batch size."""
    if contender.compile != "best":
        return contender.compile
    return "reduce-overhead" if device.type == "cuda" and batch_size < _MANY and not train else None


def freezing() -> tuple[Any, str]:
    """Returns a context in which torch.compile folds the weights in, and words that say so."""
    settings: Any = None
    with contextlib.suppress(ImportError):
        settings = importlib.import_module("torch._inductor.config")
    if not hasattr(settings, "freezing"):
        return contextlib.nullcontext(), ", without freezing, which this torch does not have"
    return settings.patch(freezing=True), ", with freezing"


# Steps ----------------------------------------------------------------------------------------------------


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
