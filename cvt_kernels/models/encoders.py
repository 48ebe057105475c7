"""The forwards of the encoders of PVT, PVT v2 and GLPN, whose maps between stages are views of tokens.

Upstream copies each map so that channels are first in memory, and the next convolution copies it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .forward import as_map, normalize


def _encoder(states_of: Callable[[Any, Tensor, bool], list[Tensor]]) -> Callable[..., Any]:
    """Returns the forward of an encoder, by a function that returns its hidden states, the result last.

    The function takes the encoder, images, and whether the caller gets the hidden states.
    """

    def forward(
        self: Any,
        pixel_values: Tensor,
        output_attentions: Any = False,
        output_hidden_states: Any = False,
        return_dict: Any = True,
    ) -> Any:
        # Under torch.compile copies become part of other kernels.
        if output_attentions or torch.compiler.is_compiling():
            return NotImplemented
        *_, last = states = states_of(self, pixel_values, bool(output_hidden_states))
        hidden = tuple(states) if output_hidden_states else None
        if not return_dict:
            return (last,) if hidden is None else (last, hidden)
        # Imported where the encoder is.
        record = sys.modules["transformers.modeling_outputs"].BaseModelOutput
        return record(last_hidden_state=last, hidden_states=hidden, attentions=None)

    return forward


@_encoder
def encode_pvt(self: Any, x: Tensor, are_shown: bool) -> list[Tensor]:
    """Runs a ``PvtEncoder``, whose last stage has a class token."""
    states, last = list[Tensor](), len(self.block) - 1
    for number, (embeddings, blocks) in enumerate(zip(self.patch_embeddings, self.block, strict=True)):
        x, *grid = embeddings(x)
        for block in blocks:
            x = block(x, *grid, False)[0]
            states.append(x)
        if number < last:
            x = as_map(x, grid)
            # Who gets the tokens may write to them.
            x = x.contiguous() if are_shown and torch.is_grad_enabled() else x
    return [*states, normalize(self.layer_norm, x)]


@_encoder
def encode_pvt_v2(self: Any, x: Tensor, are_shown: bool) -> list[Tensor]:
    """Runs a ``PvtV2Encoder``."""
    states = [x]
    for layer in self.layers:
        (tokens, *_), *grid = layer(states[-1], False)
        states.append(as_map(tokens, grid))
    return states[1:]


@_encoder
def encode_glpn(self: Any, x: Tensor, are_shown: bool) -> list[Tensor]:
    """Runs a ``GLPNEncoder``."""
    states = [x]
    for embeddings, blocks, norm in zip(self.patch_embeddings, self.block, self.layer_norm, strict=True):
        tokens, *grid = embeddings(states[-1])
        for block in blocks:
            tokens = block(tokens, *grid, False)[0]
        states.append(as_map(normalize(norm, tokens), grid))
    return states[1:]
