"""The layers of a model that can be quantized, and their replacements."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.blocks import why_another_class
from ..models.families import MODELS
from ..models.matching import blocks_in, model_name, why_mismatched
from ..models.watching import why_must_be_called
from ..ops.linear_int8 import MOST_INPUTS
from ..ops.linear_int8.modules import ConvInt8, LinearInt8, QuantizedLayer


class Layer(NamedTuple):
    """A layer of a block, its path in the model, and why it cannot be quantized; None if it can."""

    path: str
    module: nn.Module
    reason: str | None


def find_layers(model: nn.Module, *, embeddings: bool) -> list[Layer]:
    """Returns the linear layers of a model's blocks, with ``embeddings`` also their convolutions.

    The convolution of an embedding that reads images is none of them.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no block with such a layer.
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
            why_not = _why_no_plain_convolution if entry.is_embedding else _why_no_plain_linear
            where = f"{path}.{name}" if path else name
            found.append(Layer(where, module, reason or why_not(module)))
    if not found:
        raise ValueError(
            f"model: got {model_name(model)}, expected a model with linear layers in blocks of one of these: "
            f"{MODELS}"
        )
    return found


def _why_no_plain_linear(module: Any) -> str | None:
    if type(module) is not nn.Linear:
        return why_another_class(module, "nn.Linear")
    return why_must_be_called(module) or _why_weight_unsupported(module.weight)


def _why_no_plain_convolution(module: Any) -> str | None:
    if type(module) is not nn.Conv2d:
        return why_another_class(module, "nn.Conv2d")
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return "is not a dense convolution padded by a number of zeros"
    return why_must_be_called(module) or _why_weight_unsupported(module.weight)


def _why_weight_unsupported(weight: Tensor) -> str | None:
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        return f"its weight is a {type(weight).__name__} of {weight.dtype}, expected floating point"
    if weight[0].numel() > MOST_INPUTS:
        return f"has {weight[0].numel()} inputs, expected at most {MOST_INPUTS}"
    return None


def quantized(layer: Layer, dtype: torch.dtype) -> QuantizedLayer:
    """Returns the quantized replacement of a layer.

    Raises:
        TypeError: ``dtype`` is not one of 8 bits.
        ValueError: Its weight has NaN or infinities.
    """
    module: Any = layer.module
    kind = LinearInt8 if type(module) is nn.Linear else ConvInt8
    try:
        return kind.from_float(module, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"model: {layer.path}.{error}") from error
