"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ... import cards


def _depth_head(m: Any) -> Any:
    x = cards.image_of(m, m.inputs, m.height, m.width)
    weight = m.parameter(m.channels, m.inputs, 3, 3, scale=(9 * m.inputs) ** -0.5)
    bias = m.optional(m.channels)
    last = m.parameter(1, m.channels, 3, 3, scale=(9 * m.channels) ** -0.5)
    return (x, weight, bias, last, m.optional(1), m.max_depth), {}


def _depth_head_stage(step: cards.Step) -> None:
    """Runs GLPN's head for a map of 64 channels, upsampled to the size of the image."""
    if step.stage.decoder and not step.training:
        weight, last = step.tensor(64, 64, 3, 3), step.tensor(1, 64, 3, 3)
        x = step.tensor(step.batch, 64, *step.stage.grid)
        step.call("depth_head", x, weight, step.tensor(64), last, step.tensor(1), 10.0)


def _depth_head_work(arguments: dict[str, Any]) -> cards.Work:
    products, last, sums = (arguments[f"{name}_ptr"] for name in ("products", "last", "sums"))
    is_exact = products.dtype == torch.float32 and arguments["SPEC"].precision == "ieee"
    flops = 2 * sums.numel() * arguments["SPEC"].channels
    return cards.Work(cards.bytes_of(products, last, sums), 0 if is_exact else flops)


def _depth_sums_work(arguments: dict[str, Any]) -> cards.Work:
    """Counts the sums of taps that a pixel has: at the border some are of pixels beyond it, and not read."""
    out = arguments["out_ptr"]
    images, height, width = out.shape
    return cards.Work(4 * images * (3 * height - 2) * (3 * width - 2) + cards.bytes_of(out))


CARDS = {
    "depth_head": cards.Card(
        call=_depth_head,
        choices=cards.COMMON
        | cards.GRID
        | {
            "inputs": (1, 2, 3, 5, 8, 17, 64),
            "channels": cards.WIDE,
            "max_depth": (10.0, 1.0, 80),
            "bare": cards.BOTH,
            "channels_last": cards.BOTH,
        },
        examples={
            "usual": cards.MAP | {"inputs": 9},
            "odd": cards.ODD_MAP | {"inputs": 1},
            "empty": cards.MAP | {"inputs": 9, "batch": 0},
            "many": cards.MANY_PIXELS | {"inputs": 8},
            "tiny": cards.TINY_MAP | {"inputs": 2},
            "bare": cards.MAP | {"inputs": 9, "bare": True},
            "channels last": cards.MAP | {"inputs": 9, "channels_last": True},
        },
        without_gradients=("cpu", "triton"),
        wrong={
            "x": ((9, 3, 4), (2, 9, 0, 4)),
            "weight": ((20, 9), (20, 2, 3, 3), (20, 9, 1, 1), (0, 9, 3, 3)),
            "last_weight": ((20, 3, 3), (2, 20, 3, 3), (1, 5, 3, 3)),
        },
        stages={"depth_head": cards.Launches(_depth_head_stage, of_pyramids=True)},
        work={
            "depth_head": _depth_head_work,
            "depth_sums": _depth_sums_work,
        },
        uncounted={"depth_head": "bias", "depth_sums": "bias"},
        accesses={
            name: cards.Accesses("depth_head depth_sums", f"batch=2 {words}")
            for name, words in {
                "depth head": "dtype=bfloat16 layout=sliced height=3 width=7 inputs=5 channels=13",
                "depth head of many channels": "height=1 width=33 inputs=17 channels=70",
                "depth head of one column": "dtype=float16 height=5 width=1 inputs=5 channels=5",
            }.items()
        },
        emulated={"depth head": "batch=2 height=3 width=35 inputs=40 channels=72"},
    ),
}
