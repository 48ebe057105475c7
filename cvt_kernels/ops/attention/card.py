"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

import math
from typing import Any

from ...cards import ABSENT, BOTH, COMMON, FEW, WIDE, Card
from ...records import PositionBias


def _attention(m: Any) -> Any:
    queries, keys = m.queries, m.keys
    position = None
    if m.position != "none":
        class_tokens = int(m.class_token)
        tokens = m.height * m.width + class_tokens
        keys = m.key_height * m.key_width + class_tokens
        queries = tokens if m.position == "table" else min(queries, tokens)
        sizes = m.height + m.stride * (m.key_height - 1), m.width + m.stride * (m.key_width - 1)
        rows = None
        if m.position == "rows":
            rows = m.index(m.batch, tokens, queries)
            m.ignored = rows < 0
        table = m.parameter(m.heads, *sizes)
        position = PositionBias(table, (m.height, m.width), (m.key_height, m.key_width), m.stride, rows)
    q = m.activation(m.batch, queries, m.heads, m.channels)
    k, v = (m.activation(m.batch, keys, m.heads, m.channels) for _ in range(2))
    bias = None
    if m.bias != "none":
        shape = {
            "full": (m.batch, m.heads, queries, keys), "matrix": (queries, keys), "heads": (m.heads, 1, 1),
            "keys": (m.batch, 1, 1, keys), "queries": (1, m.heads, queries, 1),
        }[m.bias]  # fmt: skip
        bias = m.parameter(*shape).detach()
        least = {"none": math.inf, "some": 0.5, "most": -1.5, "all": -math.inf, "block": math.inf}[m.excluded]
        excluded = bias > least
        if m.excluded == "block":
            excluded[..., : -(-bias.shape[-1] // 2)] = True
        bias = bias.masked_fill(excluded, -math.inf).requires_grad_(m.gradient == "all")
    scale = m.scale
    return (q, k, v), {"scale": scale, "bias": bias, "dropout_p": 0.0, "position": position}


CARDS = {
    "attention": Card(
        call=_attention,
        choices=COMMON
        | {
            "batch": FEW,
            "queries": WIDE,
            "keys": (*WIDE, 223, 224, 225, 257),
            "heads": (1, 2, 3),
            "channels": (*WIDE, 255, 256, 257),
            "scale": (None, 0.0, 0.1, -1.0, 10.0, 1e-30),
            "bias": ("none", "full", "matrix", "keys", "heads", "queries"),
            "excluded": ("none", "some", "most", "block", "all"),
            "position": ("none", "table", "rows"),
            "height": (1, 2, 3, 4, 5, 7),
            "width": (1, 2, 3, 4, 5, 8),
            "key_height": (1, 2, 3, 4),
            "key_width": (1, 2, 3, 5),
            "stride": (1, 2, 3),
            "class_token": BOTH,
            **ABSENT,
        },
        examples={
            "usual": {"batch": 2, "queries": 17, "keys": 9, "heads": 2, "channels": 24},
            "odd": {"batch": 1, "queries": 1, "keys": 1, "channels": 7},
            "empty": {"batch": 0, "queries": 5, "keys": 3, "channels": 8},
            "many": {"batch": 4, "queries": 197, "keys": 50, "heads": 3, "channels": 32},
            "tiny": {"batch": 1, "queries": 3, "keys": 4, "heads": 2, "channels": 3, "bias": "full"},
            "bias": {"batch": 2, "queries": 17, "keys": 9, "heads": 2, "channels": 24, "bias": "full"},
            "tiles": {"queries": 17, "keys": 70, "heads": 2, "channels": 16, "bias": "full"},
            "loop": {"queries": 5, "keys": 300, "channels": 16, "bias": "keys"},
            "excluded": {"queries": 9, "keys": 17, "channels": 16, "bias": "matrix", "excluded": "some"},
            "position": {
                "batch": 2,
                "position": "table",
                "height": 4,
                "width": 3,
                "key_height": 2,
                "key_width": 2,
                "stride": 2,
                "class_token": True,
                "heads": 2,
                "channels": 16,
            },
        },
        without_gradients=("cpu",),
    ),
}
