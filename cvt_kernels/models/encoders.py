"""The forwards of the encoders of PVT, PVT v2 and GLPN, whose maps between stages are views of tokens.

Upstream copies each map so that channels are first in memory, and the next convolution copies it back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .forward import as_map, normalize

#: What a stage makes of an image or a map: tokens, and their height and width.
_Stage = Callable[[Tensor], tuple[Tensor, int, int]]


def encode_pvt(
    self: Any,
    pixel_values: Tensor,
    output_attentions: Any = False,
    output_hidden_states: Any = False,
    return_dict: Any = True,
) -> Any:
    """Runs a ``PvtEncoder``, whose last stage has a class token."""
    if _is_left_to_upstream(output_attentions):
        return NotImplemented
    x, states = pixel_values, []
    last = len(self.block) - 1
    for number, (embeddings, blocks) in enumerate(zip(self.patch_embeddings, self.block, strict=True)):
        x, *grid = embeddings(x)
        for block in blocks:
            x = block(x, *grid, output_attentions)[0]
            states.append(x)
        if number < last:
            x = as_map(x, grid)
            # Who gets the tokens may write to them.
            x = x.contiguous() if output_hidden_states and torch.is_grad_enabled() else x
    x = normalize(self.layer_norm, x)
    return _result(x, [*states, x], output_hidden_states, return_dict)


def encode_pvt_v2(
    self: Any,
    pixel_values: Tensor,
    output_attentions: Any = False,
    output_hidden_states: Any = False,
    return_dict: Any = True,
) -> Any:
    """Runs a ``PvtV2Encoder``."""
    if _is_left_to_upstream(output_attentions):
        return NotImplemented

    def run(layer: Any, image: Tensor) -> tuple[Tensor, int, int]:
        (tokens, *_), height, width = layer(image, output_attentions)
        return tokens, height, width

    states = _maps(pixel_values, [functools.partial(run, layer) for layer in self.layers])
    return _result(states[-1], states, output_hidden_states, return_dict)


def encode_glpn(
    self: Any,
    pixel_values: Tensor,
    output_attentions: Any = False,
    output_hidden_states: Any = False,
    return_dict: Any = True,
) -> Any:
    """Runs a ``GLPNEncoder``."""
    if _is_left_to_upstream(output_attentions):
        return NotImplemented

    def run(stage: tuple[Any, Any, Any], image: Tensor) -> tuple[Tensor, int, int]:
        embeddings, blocks, norm = stage
        tokens, height, width = embeddings(image)
        for block in blocks:
            tokens = block(tokens, height, width, output_attentions)[0]
        return normalize(norm, tokens), height, width

    stages = zip(self.patch_embeddings, self.block, self.layer_norm, strict=True)
    states = _maps(pixel_values, [functools.partial(run, stage) for stage in stages])
    return _result(states[-1], states, output_hidden_states, return_dict)


def _is_left_to_upstream(output_attentions: Any) -> bool:
    """Returns whether upstream's forward runs; under torch.compile copies become part of other kernels."""
    return bool(output_attentions) or torch.compiler.is_compiling()


def _maps(image: Tensor, stages: Sequence[_Stage]) -> list[Tensor]:
    """Returns the map (B, C, H, W) behind each stage, channels last in memory."""
    states: list[Tensor] = []
    for stage in stages:
        tokens, *grid = stage(states[-1] if states else image)
        states.append(as_map(tokens, grid))
    return states


def _result(last: Tensor, states: Sequence[Tensor], output_hidden_states: Any, return_dict: Any) -> Any:
    hidden = tuple(states) if output_hidden_states else None
    if not return_dict:
        return (last,) if hidden is None else (last, hidden)
    # Imported where the encoder is.
    record = sys.modules["transformers.modeling_outputs"].BaseModelOutput
    return record(last_hidden_state=last, hidden_states=hidden, attentions=None)
