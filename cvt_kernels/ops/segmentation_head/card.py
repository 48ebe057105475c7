"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import BOTH, COMMON, GRID, MANY_PIXELS, MAP, ODD_MAP, OUTPUTS, TINY_MAP, WIDE, Card, image_of


def _segmentation_head(m: Any) -> Any:
    x = image_of(m, m.inputs, m.height, m.width)
    others = []
    for i in range(m.others):
        sizes = [(-(-size // 2), -(-size // 3), size, 2 * size + 1)[i] for size in (m.height, m.width)]
        inputs = m.inputs + 3 * i
        others.append((image_of(m, inputs, *sizes), m.matrix(m.channels, inputs)))
    args = (x, m.matrix(m.channels, m.inputs), m.optional(m.channels), tuple(others))
    return (*args, *m.linear(m.outputs, m.channels)), {}


CARDS = {
    "segmentation_head": Card(
        call=_segmentation_head,
        choices=COMMON
        | GRID
        | OUTPUTS
        | {
            "inputs": (1, 2, 3, 5, 8, 17, 64),
            "channels": WIDE,
            "others": (3, 2, 1, 0, 4),
            "bare": BOTH,
            "channels_last": BOTH,
        },
        examples={
            "usual": MAP | {"inputs": 9, "outputs": 33},
            "odd": ODD_MAP | {"inputs": 1, "outputs": 5},
            "empty": MAP | {"inputs": 9, "outputs": 33, "batch": 0},
            "many": MANY_PIXELS | {"inputs": 8, "outputs": 33},
            "tiny": TINY_MAP | {"inputs": 2, "outputs": 4},
            "bare": MAP | {"inputs": 9, "outputs": 33, "bare": True},
            "one map": MAP | {"inputs": 9, "outputs": 33, "others": 0},
            "channels last": MAP | {"inputs": 9, "outputs": 33, "channels_last": True},
        },
        without_gradients=(
            "cpu",
            "triton",
        ),
    ),
}
