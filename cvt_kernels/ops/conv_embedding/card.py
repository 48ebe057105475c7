"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import BOTH, COMMON, GRID, K3X3, MANY_PIXELS, MAP, NORM, ODD_MAP, TINY_MAP, WIDE, Card, image_of


def _conv_embedding(m: Any) -> Any:
    image = image_of(m, m.inputs, m.height, m.width)
    weight = m.parameter(m.channels, m.inputs, m.kernel, m.kernel, scale=(m.inputs * m.kernel**2) ** -0.5)
    token = m.parameter(m.channels) if m.class_token else None
    padding = max(m.padding, -((min(m.height, m.width) - m.kernel) // 2))  # so that there is an output
    args = (image, weight, m.optional(m.channels), *m.norm(m.channels)[:2])
    return args, {"stride": m.stride, "padding": padding, "eps": m.eps, "class_token": token}


CARDS = {
    "conv_embedding": Card(
        call=_conv_embedding,
        choices=COMMON
        | GRID
        | NORM
        | {
            "inputs": (1, 2, 3, 5, 8, 17, 64),
            "channels": WIDE,
            "kernel": (1, 2, 3, 4, 7),
            "stride": (1, 2, 3, 4),
            "padding": (0, 1, 2, 3),
            "class_token": BOTH,
            "channels_last": BOTH,
        },
        examples={
            "usual": MAP | K3X3 | {"inputs": 5, "stride": 2, "class_token": True},
            "odd": ODD_MAP | K3X3 | {"inputs": 1},
            "empty": MAP | K3X3 | {"inputs": 3, "batch": 0},
            "many": MANY_PIXELS | K3X3 | {"inputs": 8},
            "tiny": TINY_MAP | K3X3 | {"inputs": 2, "stride": 2, "class_token": True},
            "first stage": {
                "batch": 2,
                "height": 14,
                "width": 17,
                "inputs": 3,
                "channels": 64,
                "kernel": 7,
                "stride": 4,
                "padding": 2,
                "class_token": True,
            },
            "later stage": MAP | K3X3 | {"inputs": 40, "stride": 2, "class_token": True},
            "bare": MAP | K3X3 | {"inputs": 5, "stride": 2, "bare": True},
            "channels last": MAP | K3X3 | {"inputs": 5, "stride": 2, "channels_last": True},
        },
        without_gradients=(
            "cpu",
            "triton",
        ),
        normalizes=True,
    ),
}
