"""Post-training quantization of the linear layers in transformer blocks to 8 bits: ``quantize``.

LayerNorm, softmax, other convolutions, the first embedding and the head stay in floating point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import checks
from ..messages import aligned
from ..models.blocks import why_another_class
from ..models.families import MODELS
from ..models.matching import blocks_in, model_name, why_mismatched
from ..models.watching import why_must_be_called
from ..ops.linear_int8 import MOST_INPUTS, check_format
from ..ops.linear_int8.modules import (
    ConvInt8,
    LinearInt8,
    QuantizedLayer,
    put_back,
    refuse_to_save,
    replace,
)
from .calibration import sqnr_of_layers

__all__ = ["QuantizationReport", "QuantizedLayerReport", "quantize", "unquantize"]

_Model = TypeVar("_Model", bound=nn.Module)


class QuantizedLayerReport(NamedTuple):
    """A row of the report: one layer.

    Attributes:
        path: Its name in ``model.named_modules()``.
        weight: ``"int8"`` or ``"float8_e4m3fn"``, or ``"float"`` if it stays as it is.
        sqnr: The ratio in dB of its output to the error of this output, for inputs of the model in floating
            point on the calibration's images; None without calibration.
        reason: Why it stays as it is or has no SQNR, or None.
    """

    path: str
    weight: str
    sqnr: float | None
    reason: str | None


class QuantizationReport(list[QuantizedLayerReport]):
    """The rows of a report, in the order of the model; as a string, a table of them."""

    def worst(self) -> list[QuantizedLayerReport]:
        """Returns the rows that have an SQNR, the lowest first."""
        measured = [(row.sqnr, row) for row in self if row.sqnr is not None]
        return [row for _, row in sorted(measured, key=lambda pair: pair[0])]

    def __str__(self) -> str:
        table = [("layer", "weight", "SQNR", "remark")]
        for row in self:
            sqnr = "–" if row.sqnr is None else f"{row.sqnr:.1f} dB"
            table.append((row.path, row.weight, sqnr, row.reason or ""))
        done = sum(row.weight != "float" for row in self)
        return "\n".join([*aligned(table, right=(2,)), "", f"{done} of {len(self)} layers quantized"])


@torch.inference_mode(False)  # in which changes of tensors would not be counted
@torch.no_grad()
def quantize(
    model: nn.Module,
    calibration: Tensor | Iterable[Any] | None = None,
    *,
    keep_float: Sequence[str] = (),
    min_sqnr: float = 20.0,
    embeddings: bool = False,
    dtype: torch.dtype = torch.int8,
    progress: bool = False,
) -> QuantizationReport:
    """Replaces the linear layers of a model's blocks by :class:`cvt_kernels.LinearInt8`, in place.

    It finds the blocks that :func:`cvt_kernels.accelerate` supports, accelerated or not. Each layer keeps its
    name; ``state_dict`` has an 8-bit ``qweight`` and a ``weight_scale`` instead of ``weight``. The original
    layers are kept: :func:`cvt_kernels.restore` puts all back, :func:`unquantize` some. ``save_pretrained``
    of a quantized model of transformers raises ValueError, because ``from_pretrained`` could not read it.

    Args:
        model: Any module in evaluation mode; wrappers are looked into.
        calibration: Images (batch, channels, height, width), or an iterable of batches: such tensors, dicts
            with ``pixel_values``, or tuples that begin with one. They are run through the model as it is, for
            the SQNR of every layer in the report.
        keep_float: Names of layers, or patterns as of ``fnmatch``, that stay as they are.
        min_sqnr: The least SQNR in dB. With calibration, layers below it stay as they are.
        embeddings: Whether to quantize the convolutions of all embeddings but the first one too.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        progress: Show a bar over the batches on stderr, if that is a terminal.

    Returns:
        A list of what was done to every layer; print it.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: The model is in training mode, has no such block or nothing to quantize in them, or is
            quantized already; a weight or a layer's input is not finite; a pattern matches no layer; the
            calibration is empty, does not fit the model, or finds all layers below ``min_sqnr``. The model is
            left as it was.
    """
    _check_names("keep_float", keep_float, "a sequence of names")
    check_format(dtype)
    checks.check_number("min_sqnr", min_sqnr, "a number of dB")
    checks.check_flag("embeddings", embeddings)
    checks.check_flag("progress", progress)
    layers = _find_layers(model, embeddings=embeddings)
    _check_state(model)
    layers = _without(layers, keep_float)
    made = {layer.path: _quantized(layer, dtype) for layer in layers if layer.reason is None}
    _check_any(layers)
    measured: dict[str, float | None] = {}
    if calibration is not None:
        pairs = {layer.path: (layer.module, made[layer.path]) for layer in layers if layer.path in made}
        measured = sqnr_of_layers(model, pairs, calibration, progress=progress)
        layers = [_unless_worse(layer, measured, min_sqnr) for layer in layers]
        _check_any(layers)
    for layer in layers:
        if layer.reason is None:
            replace(model, layer.module, made[layer.path])
    refuse_to_save(model)
    return QuantizationReport(_row(layer, measured, dtype) for layer in layers)


def _check_any(layers: list[_Layer]) -> None:
    if all(layer.reason is not None for layer in layers):
        raise ValueError(
            f"model: none of its {len(layers)} layers can be quantized; "
            f"the first, {layers[0].path}: {layers[0].reason}"
        )


def _unless_worse(layer: _Layer, measured: Mapping[str, float | None], least: float) -> _Layer:
    """Returns a layer, with the reason that it stays if its SQNR is less than ``least``."""
    sqnr = None if layer.reason is not None else measured[layer.path]
    if sqnr is None or sqnr >= least:
        return layer
    return layer._replace(reason=f"is kept, since {sqnr:.1f} dB would be less than min_sqnr, {least:g}")


def _check_names(argument: str, names: object, expected: str) -> None:
    if isinstance(names, str) or not isinstance(names, Collection):
        got = f"the string {checks.shown(names)}" if isinstance(names, str) else checks.shown(names)
        raise TypeError(f"{argument}: got {got}, expected {expected}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument}: got {checks.shown(name)} among others, expected {expected}")


def _check_state(model: nn.Module) -> None:
    if model.training:
        raise ValueError("model: is in training mode, expected model.eval() before it is quantized")
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            hint = "; cvt_kernels.restore(model) puts the layers back that it was made of"
            raise ValueError(
                f"model: is quantized already (layer {path}), expected one in floating point"
                + ("" if module.float_layer is None else hint)
            )


def _without(layers: list[_Layer], patterns: Sequence[str]) -> list[_Layer]:
    """Returns the layers, those that match a pattern with the reason that they stay."""
    for pattern in patterns:
        if not any(fnmatchcase(layer.path, pattern) for layer in layers):
            raise ValueError(
                f"keep_float: {pattern!r} matches none of the {len(layers)} layers, such as {layers[0].path}"
            )
    kept = {layer.path for layer in layers for pattern in patterns if fnmatchcase(layer.path, pattern)}
    return [
        layer._replace(reason="is kept by keep_float") if layer.path in kept else layer for layer in layers
    ]


def _row(layer: _Layer, measured: Mapping[str, float | None], dtype: torch.dtype) -> QuantizedLayerReport:
    if layer.reason is not None:
        return QuantizedLayerReport(layer.path, "float", None, layer.reason)
    sqnr = measured.get(layer.path)
    reason = "was not called by the calibration" if layer.path in measured and sqnr is None else None
    return QuantizedLayerReport(layer.path, checks.dtype_name(dtype), sqnr, reason)


def unquantize(model: _Model, paths: Iterable[str]) -> _Model:
    """Puts some layers back into floating point, in place: the modules that were there before.

    Args:
        model: A model that :func:`quantize` has changed.
        paths: Names of quantized layers, as in the report.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is no module, or ``paths`` are no names, or a single one.
        ValueError: A name is no quantized layer's, or a layer was loaded as a quantized one; the model is
            left as it was.
    """
    checks.check_kind("model", model, nn.Module)
    paths = paths if isinstance(paths, str) else checks.as_tuple("paths", paths, "names of layers")
    _check_names("paths", paths, "names of layers")
    layers = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        layer = layers.get(path)
        if not isinstance(layer, QuantizedLayer):
            kind = "nothing" if layer is None else f"a {type(layer).__name__}"
            raise ValueError(f"paths: {path!r} is {kind}, expected a quantized layer")
        if layer.float_layer is None:
            raise ValueError(f"paths: {path!r} was loaded as it is, expected a layer that quantize has made")
    put_back(model, [layers[path] for path in paths])
    return model


# Layers ---------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """A layer of a block, its path in the model, and why it cannot be quantized; None if it can."""

    path: str
    module: nn.Module
    reason: str | None


def _find_layers(model: nn.Module, *, embeddings: bool) -> list[_Layer]:
    """Returns the linear layers of a model's blocks, with ``embeddings`` also their convolutions.

    The convolution of an embedding that reads images is none of them.
    """
    found, channels = [], None
    for path, block, entry in blocks_in(model):
        reason = why_mismatched(block, entry)
        for name in entry.layers:
            try:
                module = block.get_submodule(name)
            except AttributeError:
                continue
            if entry.is_embedding:
                of_images = getattr(module, "in_channels", None)
                channels = of_images if channels is None else channels
                if not embeddings or of_images == channels:
                    continue
            why_not = reason or _why_not_plain(module, nn.Conv2d if entry.is_embedding else nn.Linear)
            found.append(_Layer(f"{path}.{name}".lstrip("."), module, why_not))
    if not found:
        raise ValueError(
            f"model: got {model_name(model)}, expected a model with linear layers in blocks of one of these: "
            f"{MODELS}"
        )
    return found


def _why_not_plain(module: Any, kind: Any) -> str | None:
    """Returns why a layer is no plain linear one or dense convolution that can be quantized, or None."""
    if type(module) is not kind:
        return why_another_class(module, f"nn.{kind.__name__}")
    if kind is nn.Conv2d and (
        module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
    ):
        return "is not a dense convolution padded by a number of zeros"
    if (reason := why_must_be_called(module)) is not None:
        return reason
    weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        return f"its weight is a {type(weight).__name__} of {weight.dtype}, expected floating point"
    if weight[0].numel() > MOST_INPUTS:
        return f"has {weight[0].numel()} inputs, expected at most {MOST_INPUTS}"
    return None


def _quantized(layer: _Layer, dtype: torch.dtype) -> QuantizedLayer:
    """Returns the quantized replacement of a layer."""
    module: Any = layer.module
    kind = LinearInt8 if type(module) is nn.Linear else ConvInt8
    try:
        return kind.from_float(module, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"model: {layer.path}.{error}") from error
