"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import BOTH, COMMON, CONV, GRID, K3X3, MANY_PIXELS, MAP, NORM, ODD_MAP, TINY_MAP, WIDE, Card

PROJECTION = GRID | CONV | {
    "channels": WIDE, "class_token": BOTH, "branches": (1, 2, 3), "summands": (1, 2, 3), "mixed": BOTH,
    "statistics": ("running", "none", "averaged"), **NORM,
}  # fmt: skip


def _convs(m: Any) -> tuple[Any, ...]:
    """Returns the branches: the second and third of other strides, summands of larger kernels."""
    branches = []
    # PyTorch 2.13 crashes in 16 bits where a kernel of 1×1 or an image of width 1 has a dilation.
    dilation = 1 if m.kernel == 1 or m.width == 1 else m.dilation
    reach = dilation * (m.kernel - 1) + 1
    padding = max(m.padding, -((min(m.height, m.width) - reach) // 2))  # so that there is an output
    for i in range(m.branches):
        parts = tuple(
            m.conv(m.channels, m.kernel + 2 * j, m.stride + i, padding + dilation * j, dilation)
            for j in range(m.summands)
        )
        branches.append(parts[0] if len(parts) == 1 else parts)
    return tuple(branches)


def _conv_projection(m: Any) -> Any:
    tokens = m.height * m.width + m.class_token
    x = m.activation(m.batch, tokens, m.channels)
    return (x, (m.height, m.width), _convs(m)), {"training": m.training}


CARDS = {
    "conv_projection": Card(
        call=_conv_projection,
        choices=COMMON | PROJECTION | {"training": BOTH},
        examples={
            "usual": MAP | K3X3 | {"branches": 2, "class_token": True},
            "odd": ODD_MAP | K3X3,
            "empty": MAP | K3X3 | {"batch": 0},
            "many": MANY_PIXELS | K3X3 | {"branches": 2, "class_token": True},
            "tiny": TINY_MAP | K3X3 | {"branches": 2, "class_token": True},
            "5x5": MAP | {"kernel": 5, "padding": 2, "stride": 2, "bare": True},
            "sums": MAP | K3X3 | {"summands": 2, "branches": 2},
            "training": MAP | K3X3 | {"branches": 2, "class_token": True, "training": True},
            "mixed": MAP | K3X3 | {"mixed": True},
        },
    ),
}
