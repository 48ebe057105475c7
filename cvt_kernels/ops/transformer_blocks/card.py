"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import ABSENT, BOTH, MANY_PIXELS, ODD_MAP, TINY_MAP, Card
from ..transformer_block.card import BLOCK, CHOICES, PYRAMID, _transformer_block


def _transformer_blocks(m: Any) -> Any:
    m.count, m.scores = 0, "none"
    (x, grid, block), settings = _transformer_block(m)
    others = (_transformer_block(m)[0][2] for _ in range(m.depth - 1))
    return (x, grid, (block, *others)), settings


CARDS = {
    "transformer_blocks": Card(
        call=_transformer_blocks,
        choices=CHOICES
        | {
            "depth": (1, 2, 3),
            "kernel": (1, 3, 5),
            "stride": (1, 2, 3),
            "class_token": BOTH,
            "mixed": BOTH,
            **ABSENT,
            "one_scale": ("none", "0.05"),
            "quantized_layers": ("none", "all", "0", "1", "2", "3", "4", "5"),
            "reduce": ("convolutions", "squares", "nothing"),
            "ratio": (1, 2, 3, 4, 8),
            "mixes": BOTH,
        },
        examples={
            "usual": BLOCK | {"class_token": True, "stride": 2, "depth": 2},
            "odd": BLOCK | ODD_MAP | {"heads": 1, "head_dim": 7},
            "empty": BLOCK | {"batch": 0},
            "many": BLOCK | MANY_PIXELS,
            "tiny": BLOCK | TINY_MAP | {"head_dim": 2, "hidden": 4},
            "bare": BLOCK | {"bare": True, "approximate": "quick", "depth": 2},
            "SegFormer": PYRAMID | {"mixes": True, "depth": 2},
            "inplace=True": BLOCK | {"inplace": True, "depth": 2},
        },
        without_gradients=("gluon",),
        normalizes=True,
    ),
}
