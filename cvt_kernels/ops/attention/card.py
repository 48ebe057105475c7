"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...launch.records import Attention
from ...records import PositionBias
from .. import cards


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
    return (q, k, v), {"scale": m.scale, "bias": bias, "dropout_p": 0.0, "position": position}


def _attention_stage(step: cards.Step) -> None:
    """Runs a CvT block's attention (heads of 64, k and v strided by 2)."""
    grid, heads = step.stage.grid, step.channels // 64
    key_grid = -(-grid[0] // 2), -(-grid[1] // 2)
    keys = math.prod(key_grid) + step.stage.class_tokens
    q, k, v = (step.tensor(step.batch, tokens, heads, 64) for tokens in (step.tokens, keys, keys))
    step.call("attention", q, k, v, scale=step.channels**-0.5)


def _attention_of_pyramids(step: cards.Step) -> None:
    """Runs a pyramid's attention, whose keys and values are reduced tokens."""
    (height, width), heads, reduction = step.stage.grid, step.stage.heads, step.stage.embedding
    if not heads:
        return
    channels, ratio = step.channels // 4, 1
    if reduction is not None:
        channels, ratio = reduction.in_channels, reduction.stride
    keys = (height // ratio) * (width // ratio)
    q, k, v = (
        step.tensor(step.batch, tokens, heads, channels // heads) for tokens in (height * width, keys, keys)
    )
    step.call("attention", q, k, v)


def _attention_work(arguments: dict[str, Any], names: str, products: int) -> cards.Work:
    """Describes a kernel by its tensors, which a launch may lack, and its products of queries and keys."""
    given = {name: arguments.get(f"{name}_ptr") for name in names.split()}
    if not arguments.get("STORE_STATS", True):
        del given["stats"]
    given = {name: cards.matrix(argument) for name, argument in given.items()}
    q = cards.matrix(arguments["q_ptr"])
    is_exact = q.dtype == torch.float32 and arguments["SPEC"].precision == "ieee"
    return cards.Work(cards.bytes_of(given), 0 if is_exact else 2 * products * q.numel() * arguments["keys"])


_OF_QUERIES = "q k v dout stats delta"
#: Kernels with all gradients in one launch behind the forward, and those of a backward in two.
_AT_ONCE, _IN_TWO = "attention_fwd attention_bwd", "attention_bwd_dq attention_bwd_dkdv"


def _work(names: str, products: int) -> Any:
    return functools.partial(_attention_work, names=names, products=products)


def _sweep(kernel: str, stages: tuple[int, ...]) -> cards.Sweep:
    """Returns the configurations of a kernel of attention."""
    tiles = {"block_q": (64, 128), "block_kv": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)}
    name, training = f"attention_{kernel}", kernel.startswith("bwd")
    return cards.Sweep("attention", stages, name, Attention, tiles, training=training)


#: Kernel → the stages of CvT-13 whose launches are timed.
_SWEPT: dict[str, tuple[int, ...]] = {
    "fwd_loop": (1,), "fwd": (2, 3), "bwd": (3,), "bwd_dq": (1,), "bwd_dkdv": (),
}  # fmt: skip

CARDS = {
    "attention": cards.Card(
        call=_attention,
        choices=cards.COMMON
        | {
            "batch": cards.FEW,
            "queries": cards.WIDE,
            "keys": (*cards.WIDE, 223, 224, 225, 257),
            "heads": (1, 2, 3),
            "channels": (*cards.WIDE, 255, 256, 257),
            "scale": (None, 0.0, 0.1, -1.0, 10.0, 1e-30),
            "bias": ("none", "full", "matrix", "keys", "heads", "queries"),
            "excluded": ("none", "some", "most", "block", "all"),
            "position": ("none", "table", "rows"),
            "height": (1, 2, 3, 4, 5, 7),
            "width": (1, 2, 3, 4, 5, 8),
            "key_height": (1, 2, 3, 4),
            "key_width": (1, 2, 3, 5),
            "stride": (1, 2, 3),
            "class_token": cards.BOTH,
            **cards.ABSENT,
        },
        examples={
            "usual": {"batch": 2, "queries": 17, "keys": 9, "heads": 2, "channels": 24},
            "odd": {"batch": 1, "queries": 1, "keys": 1, "channels": 7},
            "empty": {"batch": 0, "queries": 5, "keys": 3, "channels": 8},
            "many": {"batch": 4, "queries": 197, "keys": 50, "heads": 3, "channels": 32},
            "tiny": {"batch": 1, "queries": 3, "keys": 4, "heads": 2, "channels": 3},
            "bias": {"batch": 2, "queries": 17, "keys": 9, "heads": 2, "channels": 24, "bias": "full"},
            "tiles": {"queries": 17, "keys": 70, "heads": 2, "channels": 16},
            "loop": {"queries": 5, "keys": 300, "channels": 16},
            "excluded": {"queries": 9, "keys": 17, "channels": 16, "bias": "matrix", "excluded": "some"},
            "position": cards.worded(
                "batch=2 position=table height=4 width=3 key_height=2 key_width=2 stride=2 class_token=True "
                "heads=2 channels=16"
            ),
        },
        without_gradients=("cpu",),
        stages={
            "attention": cards.Launches(_attention_stage),
            "attention_of_pyramids": cards.Launches(_attention_of_pyramids, of_pyramids=True),
        },
        work={
            "attention_fwd": _work("q k v out stats", 2),
            "attention_fwd_loop": _work("q k v out stats", 2),
            "attention_bwd": _work(f"{_OF_QUERIES} dq dk dv", 5),
            "attention_bwd_dq": _work(f"{_OF_QUERIES} out dq", 3),
            "attention_bwd_dkdv": _work(f"{_OF_QUERIES} dk dv", 4),
        },
        accesses={
            "no gradient": cards.Accesses("attention_fwd", "queries=5 keys=3 heads=2 channels=7"),
            "keys on the chip": cards.Accesses(
                _AT_ONCE, "gradient=all batch=3 queries=37 keys=5 heads=2 channels=7 layout=chunk"
            ),
            "tiles of keys": cards.Accesses(
                f"attention_fwd {_IN_TWO}", "gradient=all queries=67 keys=71 channels=7 dtype=float16"
            ),
            "keys in a loop": cards.Accesses(
                f"attention_fwd_loop {_IN_TWO}",
                "gradient=all queries=33 keys=67 heads=2 channels=7 layout=chunk",
            ),
            "last keys apart": cards.Accesses(
                f"attention_fwd_loop {_IN_TWO}", "gradient=all queries=3 keys=211 channels=7 dtype=float16"
            ),
        },
        emulated={
            "attention": "batch=2 queries=197 keys=50 heads=2 channels=64",
            "attention, many keys": "gradient=all queries=65 keys=197 channels=64",
            "attention, training": "gradient=all queries=131 keys=37 heads=3 channels=64",
        },
        sweeps={f"attention {kernel}": _sweep(kernel, stages) for kernel, stages in _SWEPT.items()},
    )
}
