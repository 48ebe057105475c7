"""The contenders: Hugging Face's model, sped-up forms of it, and ours, all with the same weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cvt_kernels import accelerate, graphed, quantize

from .peers import RUNTIMES, logits_of

#: From this number of images on, the time on a GPU hides the host's, and CUDA graphs only cost memory.
_MANY = 64


class Contender(NamedTuple):
    """The parts of a contender, in the order in which it is made.

    Attributes:
        model: ``"hf"``, Hugging Face's, or ``"cvt"``.
        is_ours: Whether it is of this project, or a peer, which our kernels do not serve.
        quantize: The dtype of its linear layers of 8-bit numbers, whose errors are not judged.
        freeze: The argument of ``accelerate``; None where that is not called.
        graphed: Whether it is replayed as CUDA graphs.
        compile: The mode of torch.compile, which takes minutes; ``"best"`` is chosen for the batch size.
        runtime: The other runtime that it runs in, whose errors are not judged either.
    """

    model: str = "hf"
    is_ours: bool = False
    quantize: torch.dtype | None = None
    freeze: bool | None = None
    graphed: bool = False
    compile: str | None = None
    runtime: str | None = None

    @property
    def about(self) -> str:
        """A description in words."""
        words = ["Hugging Face's model" if self.model == "hf" else "the model of cvt"]
        if self.model == "cvt" and not self.is_ours:
            words.append("in plain PyTorch: backend reference")
        calls = [] if self.quantize is None else [f"quantize(dtype={self.quantize})"]
        calls += [] if self.freeze is None else [f"accelerate(freeze={self.freeze})"]
        calls += ["graphed"] if self.graphed else []
        words += [f"after {' and '.join(calls)}"] if calls else []
        words += [] if self.compile is None else [f"under torch.compile, mode {self.compile}"]
        words += [] if self.runtime is None else [f"in {RUNTIMES[self.runtime].__name__}"]
        return " ".join(words)

    @property
    def is_judged(self) -> bool:
        """True if its errors have to be those that the accuracy rule allows."""
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


_OURS = Contender(is_ours=True)
_CVT, _LIVE, _FROZEN = _OURS._replace(model="cvt"), _OURS._replace(freeze=False), _OURS._replace(freeze=True)
_GRAPHED = _FROZEN._replace(graphed=True)

#: By the name in ``--peers``, tables and files.
CONTENDERS = {
    "hf": Contender(),
    "compile": Contender(compile="best"),
    "compile-max": Contender(compile="max-autotune"),
    "eager": Contender("cvt"),
    "openvino": Contender(runtime="openvino"),
    "openvino-int8": Contender(runtime="openvino-int8"),
    "onnxruntime": Contender(runtime="onnxruntime"),
    "cvt": _CVT,
    "accelerate": _LIVE,
    "cvt-frozen": _CVT._replace(freeze=True),
    "accelerate-frozen": _FROZEN,
    "accelerate-int8": _FROZEN._replace(quantize=torch.int8),
    "cvt-compile": _CVT._replace(compile="best"),
    "accelerate-compile": _LIVE._replace(compile="best"),
    "accelerate-frozen-compile": _FROZEN._replace(compile="best"),
    "cvt-graphed": _GRAPHED._replace(model="cvt"),
    "accelerate-graphed": _GRAPHED,
    "accelerate-live-graphed": _LIVE._replace(graphed=True),
    "accelerate-int8-graphed": _GRAPHED._replace(quantize=torch.int8),
    "accelerate-float8-graphed": _GRAPHED._replace(quantize=torch.float8_e4m3fn),
}


def chosen(peers: Sequence[str], device: torch.device, *, train: bool) -> list[str]:
    """Lists the ``peers``, and those that are measured without being asked for.

    Frozen models are replayed as CUDA graphs on a GPU; nothing is frozen for training steps.
    """
    unknown = [peer for peer in peers if peer not in CONTENDERS]
    if unknown:
        raise ValueError(f"peers: got {unknown[0]!r}, expected {', '.join(CONTENDERS)}")
    ways = ["", *([] if train else ["-graphed" if device.type == "cuda" else "-frozen"])]
    always = {"hf", *(f"{name}{way}" for name in ("cvt", "accelerate") for way in ways)}
    return [key for key in CONTENDERS if key in always | set(peers)]


def made(contender: Contender, model: Any) -> Any:
    """Makes a contender of its model, which is changed, all but the compiling."""
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


def training_step(model: Any, images: Tensor, dtype: torch.dtype) -> Tensor:
    """Runs a forward, under autocast in a dtype of 16 bits, and a backward; returns the logits, detached.

    Image i has class i, modulo the number of classes; where every pixel has a class, pixel i of the output
    has. A depth is 0 everywhere.
    """
    model.zero_grad(set_to_none=True)
    with torch.autocast(images.device.type, dtype) if dtype.itemsize == 2 else contextlib.nullcontext():
        logits = logits_of(model(images))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if has_classes(logits):
            of_each = len(logits), *logits.shape[2:]
            labels = torch.arange(math.prod(of_each), device=logits.device) % logits.shape[1]
            loss = F.cross_entropy(wide, labels.view(of_each))
        else:
            loss = wide.square().mean()
    loss.backward()
    return logits.detach()


def has_classes(logits: Tensor) -> bool:
    """Returns whether an output has classes, (B, K) or (B, K, H, W); a depth is (B, H, W)."""
    return logits.ndim != 3
