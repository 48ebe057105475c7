"""Calibration: runs images through a model to find input scales and errors of its layers."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..backends import requesting
from ..ops.linear_int8.modules import QuantizedLayer
from ..records import LIMITS

#: A layer stays dynamic if one scale for all of its inputs would cost it more, in dB.
MOST_LOSS = 10.0

_PERCENTILE = 0.999  # of the absolute values: the other candidate for a scale beside the largest one
_IMAGES = 32  # that are run at a time if they come as one tensor
_LEAST, _PER_OCTAVE, _OCTAVES = -64, 32, 128  # the bins of a histogram, by powers of two


class Choice(NamedTuple):
    """The decision on a layer.

    Attributes:
        input_scale: The scale of all of its inputs; None for one per row.
        sqnr: In dB, if it is known.
        reason: Why it is dynamic although one scale was requested, or None.
    """

    input_scale: float | None
    sqnr: float | None
    reason: str | None


#: The layers by their paths, each with the quantized one that is to take its place.
_Pairs = Mapping[str, tuple[nn.Module, QuantizedLayer]]


def calibrate(
    model: nn.Module,
    pairs: _Pairs,
    calibration: Tensor | Iterable[Any],
    *,
    static: bool,
    progress: bool,
) -> dict[str, Choice]:
    """Runs images through a model, and decides on the scales of its layers; the model stays as it is.

    ``static`` allows inputs one scale per layer; ``progress`` shows a bar.

    Raises:
        TypeError: ``calibration`` is neither a tensor nor an iterable.
        ValueError: There are no images, or they do not fit the model, or a layer got NaN or infinities.
    """
    batches = _batches(calibration, again=static)
    ranges = {path: _Range() for path in pairs}
    if static:
        _run(model, pairs, ranges, batches, "scales" if progress else None)
    errors = {path: _Errors(made, ranges[path]) for path, (_, made) in pairs.items()}
    _run(model, pairs, errors, batches, "errors" if progress else None)
    return {path: each.choice(static) for path, each in errors.items()}


# What is noted of a layer ---------------------------------------------------------------------------------


class _Range:
    """The largest absolute value of all inputs of a layer, and a histogram of their absolute values."""

    def __init__(self) -> None:
        self.largest: Tensor | float = 0.0
        self.counts: Tensor | None = None

    def see(self, x: Tensor, y: Tensor) -> None:
        size = x.detach().float().abs().flatten()
        self.largest = size.max().clamp_min(self.largest)
        bins = (size.clamp_min_(2.0**_LEAST).log2_() - _LEAST) * _PER_OCTAVE
        bins = bins.nan_to_num_().clamp_max_(_PER_OCTAVE * _OCTAVES - 1)
        counts = torch.bincount(bins.long(), minlength=_PER_OCTAVE * _OCTAVES)
        self.counts = counts if self.counts is None else self.counts + counts

    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    def candidates(self, limit: float) -> list[float]:
        """Returns the scales that are tried: for the largest value, and for the percentile if it is less."""
        largest = float(self.largest)
        if self.counts is None or largest / limit < torch.finfo(torch.float32).tiny:
            return []
        below = self.counts.cumsum(0)
        bins = int((below < _PERCENTILE * below[-1]).sum())
        percentile = 2.0 ** ((bins + 1) / _PER_OCTAVE + _LEAST)
        return [size / limit for size in (largest, percentile) if size <= largest]


class _Errors:
    """The sums of squares of a layer's outputs, and of the errors with each of the scales that are tried."""

    def __init__(self, made: QuantizedLayer, known: _Range):
        self.made = made
        device = made.weight.device
        candidates = known.candidates(LIMITS[made.weight.dtype])
        self.scales = [None, *(torch.tensor(scale, device=device) for scale in candidates)]
        self.signal: Tensor | float = 0.0
        self.noise: list[Tensor | float] = [0.0] * len(self.scales)

    def see(self, x: Tensor, y: Tensor) -> None:
        y = y.detach()
        self.signal = self.signal + _sum_of_squares(y)
        for i, scale in enumerate(self.scales):
            self.made.input_scale = scale
            with requesting(
                "cpu", "int_mm", "scaled_mm", "reference"
            ):  # others may not round what they multiply
                out = self.made(x)
            self.noise[i] = self.noise[i] + _sum_of_squares(out - y)

    def is_finite(self) -> bool:
        return all(math.isfinite(float(each)) for each in (self.signal, *self.noise))

    def choice(self, static: bool) -> Choice:
        """Returns the scale of the smallest error; none if it is much worse than one scale per row."""
        if isinstance(self.signal, float):
            return Choice(None, None, "was not called by the calibration")
        dynamic, *others = (_decibels(float(self.signal), float(noise)) for noise in self.noise)
        if not static:
            return Choice(None, dynamic, None)
        if not others:
            return Choice(None, dynamic, "got nothing but zeros in the calibration")
        best = max(others)
        if best < dynamic - MOST_LOSS:
            return Choice(None, dynamic, f"one scale for all of its inputs would leave {best:.1f} dB")
        scale: Any = self.scales[1 + others.index(best)]
        return Choice(scale.item(), best, None)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


# The runs -------------------------------------------------------------------------------------------------


def _batches(calibration: Any, *, again: bool) -> Iterable[Any]:
    """Returns batches; such as can be read ``again`` if need be."""
    if isinstance(calibration, Tensor):
        _check_images("calibration", calibration)
        return calibration.split(_IMAGES)
    if not isinstance(calibration, Iterable) or isinstance(calibration, Mapping | str):
        raise TypeError(
            f"calibration: got {type(calibration).__name__}, expected images or an iterable of batches"
        )
    return list(calibration) if again and iter(calibration) is calibration else calibration


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


def _run(
    model: nn.Module,
    pairs: _Pairs,
    observers: Mapping[str, _Range] | Mapping[str, _Errors],
    batches: Iterable[Any],
    title: str | None,
) -> None:
    """Runs batches through a model, and shows the observers what their layers get and return."""
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    index = -1
    with _evaluating(model), _observed(pairs, observers):
        for index, batch in enumerate(_with_bar(batches, title)):
            images = _images_of(batch, index)
            _call(model, images if like is None else images.to(like.device, like.dtype), index)
    if index < 0:
        raise ValueError("calibration: is empty, expected at least one batch of images")
    for path, observer in observers.items():
        if not observer.is_finite():
            raise ValueError(f"calibration: layer {path} got or returned NaN or infinities")


def _with_bar(batches: Iterable[Any], title: str | None) -> Iterable[Any]:
    if title is None:
        return batches
    from tqdm import tqdm  # not needed where no bar is shown

    return tqdm(batches, desc=title, unit="batch", leave=False, disable=None)


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
def _observed(pairs: _Pairs, observers: Mapping[str, Any]) -> Iterator[None]:
    """Lets observers see what their layers get and return."""

    def hook(see: Callable[[Tensor, Tensor], None]) -> Callable[..., None]:
        return lambda module, args, output: see(args[0], output)

    with contextlib.ExitStack() as stack:
        for path, (module, _) in pairs.items():
            handle = module.register_forward_hook(hook(observers[path].see))
            stack.callback(handle.remove)
        yield


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
