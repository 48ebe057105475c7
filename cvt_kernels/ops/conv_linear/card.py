"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import COMMON, K3X3, MANY_PIXELS, MAP, ODD_MAP, OUTPUTS, TINY_MAP, Card
from ..conv_projection.card import PROJECTION, _conv_projection


def _conv_linear(m: Any) -> Any:
    (x, grid, convs), _ = _conv_projection(m)
    return (x, grid, convs, tuple(tuple(m.linear(m.outputs, m.channels)) for _ in convs)), {}


CARDS = {
    "conv_linear": Card(
        call=_conv_linear,
        choices=COMMON | PROJECTION | OUTPUTS,
        examples={
            "usual": MAP | K3X3 | {"branches": 2, "outputs": 33, "class_token": True},
            "odd": ODD_MAP | K3X3 | {"outputs": 5},
            "empty": MAP | K3X3 | {"batch": 0, "outputs": 33},
            "many": MANY_PIXELS | K3X3 | {"outputs": 33},
            "tiny": TINY_MAP | K3X3 | {"outputs": 4, "branches": 2, "class_token": True},
            "bare": MAP | K3X3 | {"outputs": 33, "bare": True},
        },
        without_gradients=(
            "gluon",
            "triton",
        ),
    ),
}
