"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import APPROXIMATE, BOTH, COMMON, GRID, MANY_PIXELS, MAP, ODD_MAP, TINY_MAP, WIDE, Card


def _depthwise_conv_gelu(m: Any) -> Any:
    x = m.activation(m.batch, m.height * m.width, m.channels)
    weight = m.parameter(m.channels, 1, 3, 3, scale=1 / 3)
    return (x, (m.height, m.width), weight, m.optional(m.channels)), {"approximate": m.approximate}


CARDS = {
    "depthwise_conv_gelu": Card(
        call=_depthwise_conv_gelu,
        choices=COMMON | GRID | {"channels": WIDE, "bare": BOTH} | APPROXIMATE,
        examples={
            "usual": MAP,
            "odd": ODD_MAP,
            "empty": MAP | {"batch": 0},
            "many": MANY_PIXELS,
            "tiny": TINY_MAP,
            "bare": MAP | {"bare": True},
            "tanh": MAP | {"approximate": "tanh"},
            "quick": MAP | {"approximate": "quick"},
        },
    ),
}
