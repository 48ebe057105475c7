"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

from .. import cards
from ..transformer_block.card import BLOCK, CHOICES, PYRAMID, block_of, make_block


def _transformer_blocks(m: Any) -> Any:
    m.count, m.scores = 0, "none"
    (x, grid, block), settings = make_block(m)
    others = (make_block(m)[0][2] for _ in range(m.depth - 1))
    return (x, grid, (block, *others)), settings


def _transformer_blocks_stage(step: cards.Step) -> None:
    """Runs three blocks of CvT, the first, an inner and the last, by the kernels for sm_90."""
    blocks = [block_of(step) for _ in range(3)]
    step.call("transformer_blocks", step.x(), step.stage.grid, blocks, backend="gluon")


def _attention_add(arguments: dict[str, Any]) -> cards.Work:
    q, k, out = (arguments[f"{name}_ptr"] for name in ("q", "k", "out"))
    names = "q k v w residual out sums"
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
    products = 4 * batch * heads * queries * keys * head_dim
    moved = (arguments[f"{name}_ptr"] for name in names.split())
    return cards.Work(cards.bytes_of(*moved), products + 2 * out.numel() * heads * head_dim)


CARDS = {
    "transformer_blocks": cards.Card(
        call=_transformer_blocks,
        choices=CHOICES | {"depth": (1, 2, 3)},
        examples={
            "usual": BLOCK | {"class_token": True, "stride": 2, "depth": 2},
            "odd": BLOCK | cards.ODD_MAP | {"heads": 1, "head_dim": 7},
            "empty": BLOCK | {"batch": 0},
            "many": BLOCK | cards.MANY_PIXELS,
            "tiny": BLOCK | cards.TINY_MAP | {"head_dim": 2, "hidden": 4},
            "bare": BLOCK | {"bare": True, "approximate": "quick", "depth": 2},
            "SegFormer": PYRAMID | {"mixes": True, "depth": 2},
            "inplace=True": BLOCK | {"inplace": True, "depth": 2},
        },
        without_gradients=("gluon",),
        normalizes=True,
        stages={"transformer_blocks": cards.Launches(_transformer_blocks_stage)},
        work={"attention_add": _attention_add},
        uncounted={"attention_add": "bias"},
    )
}
