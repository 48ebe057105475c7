"""Calibration: runs images through a model to find the errors of its layers where they are quantized."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..backends import requesting
from ..ops.linear_int8.modules import QuantizedLayer

_IMAGES = 32  # that are run at a time if they come as one tensor


def sqnr_of_layers(
    model: nn.Module,
    pairs: Mapping[str, tuple[nn.Module, QuantizedLayer]],
    calibration: Tensor | Iterable[Any],
    *,
    progress: bool,
) -> dict[str, float | None]:
    """Runs images through a model, which stays as it is, and returns the SQNR of its layers in dB.

    It is None for a layer that was not called. ``pairs`` are the layers by their paths, each with the one
    that is to take its place; ``progress`` shows a bar.
    """
    errors = {path: _Errors(made) for path, (_, made) in pairs.items()}
    batches, index = _batches(calibration), -1
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    with _evaluating(model), contextlib.ExitStack() as hooks:
        for path, (module, _) in pairs.items():
            hooks.enter_context(module.register_forward_hook(errors[path].see))
        for index, batch in enumerate(_with_bar(batches) if progress else batches):
            images = _images_of(batch, index)
            _call(model, images if like is None else images.to(like.device, like.dtype), index)
    if index < 0:
        raise ValueError("calibration: is empty, expected at least one batch of images")
    for path, each in errors.items():
        if not each.is_finite():
            raise ValueError(f"calibration: layer {path} got or returned NaN or infinities")
    return {path: each.sqnr() for path, each in errors.items()}


class _Errors:
    """The sums of squares of a layer's outputs, and of their errors where it is quantized."""

    def __init__(self, made: QuantizedLayer):
        self.made = made
        self.signal: Tensor | float = 0.0
        self.noise: Tensor | float = 0.0

    def see(self, module: nn.Module, args: Any, y: Tensor) -> None:
        y = y.detach()
        with requesting("cpu", "int_mm", "scaled_mm", "reference"):  # others may not round what they multiply
            out = self.made(args[0])
        self.signal = self.signal + _sum_of_squares(y)
        self.noise = self.noise + _sum_of_squares(out - y)

    def is_finite(self) -> bool:
        return math.isfinite(float(self.signal)) and math.isfinite(float(self.noise))

    def sqnr(self) -> float | None:
        if isinstance(self.signal, float):
            return None
        signal, noise = float(self.signal), float(self.noise)
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal else -math.inf


def _sum_of_squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


# The runs -------------------------------------------------------------------------------------------------


def _batches(calibration: Any) -> Iterable[Any]:
    if isinstance(calibration, Tensor):
        _check_images("calibration", calibration)
        return calibration.split(_IMAGES)
    if not isinstance(calibration, Iterable) or isinstance(calibration, Mapping | str):
        raise TypeError(
            f"calibration: got {type(calibration).__name__}, expected images or an iterable of batches"
        )
    return calibration


def _images_of(batch: Any, index: int) -> Tensor:
    """Returns the images of a batch, which may have labels beside them."""
    if isinstance(batch, Mapping):
        batch = batch.get("pixel_values")
    elif isinstance(batch, tuple | list) and batch:
        batch = batch[0]
    _check_images(f"calibration: batch {index}", batch)
    return batch


def _check_images(name: str, images: object) -> None:
    if not isinstance(images, Tensor):
        raise TypeError(
            f"{name}: got {type(images).__name__}, expected a tensor, a dict with pixel_values or a tuple"
        )
    if images.ndim != 4 or not images.numel() or not images.is_floating_point():
        raise ValueError(
            f"{name}: got {images.dtype} of shape {tuple(images.shape)}, "
            "expected floating-point images (batch, channels, height, width)"
        )


def _with_bar(batches: Iterable[Any]) -> Iterable[Any]:
    from tqdm import tqdm  # not needed where no bar is shown

    return tqdm(batches, desc="errors", unit="batch", leave=False, disable=None)


def _call(model: nn.Module, images: Tensor, index: int) -> None:
    try:
        model(images)
    except (RuntimeError, TypeError, ValueError) as error:
        from ..tuning.tuner import is_out_of_memory  # takes time to import, and is needed for nothing else

        if is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"calibration: batch {index} of shape {tuple(images.shape)} does not fit the model: {reason}"
        ) from error


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module of a model into evaluation mode for a while, and lets nothing of it run compiled."""
    modes = [(module, module.training) for module in model.modules()]
    # A compiled model does not look for hooks. Where dynamo was never imported, nothing is compiled.
    compiled = "torch._dynamo" in sys.modules
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
