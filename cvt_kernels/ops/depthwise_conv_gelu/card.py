"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

from .. import cards


def _depthwise_conv_gelu(m: Any) -> Any:
    x = m.activation(m.batch, m.height * m.width, m.channels)
    weight = m.parameter(m.channels, 1, 3, 3, scale=1 / 3)
    return (x, (m.height, m.width), weight, m.optional(m.channels)), {"approximate": m.approximate}


def _depthwise_conv_gelu_stage(step: cards.Step) -> None:
    """Runs a Mix-FFN's convolution with exact GELU."""
    weight, bias = step.tensor(step.channels, 1, 3, 3), step.tensor(step.channels)
    step.call("depthwise_conv_gelu", step.x(), step.stage.grid, weight, bias)


_KERNELS = (
    "depthwise_conv_gelu_fwd depthwise_conv_gelu_bwd_conv conv_projection_sliding_bwd_input sum_regions"
)

CARDS = {
    "depthwise_conv_gelu": cards.Card(
        call=_depthwise_conv_gelu,
        choices=cards.COMMON | cards.GRID | {"channels": cards.WIDE, "bare": cards.BOTH} | cards.APPROXIMATE,
        examples=cards.of_maps("bare=True", *cards.GELUS),
        stages={"depthwise_conv_gelu": cards.Launches(_depthwise_conv_gelu_stage, of_pyramids=True)},
        work={
            "depthwise_conv_gelu_fwd": functools.partial(cards.once, names="x y"),
            "depthwise_conv_gelu_bwd_conv": functools.partial(cards.once, names="x dy da partial"),
        },
        uncounted={"depthwise_conv_gelu": "w bias"},
        accesses={
            "convolution and GELU": cards.Accesses(
                _KERNELS, "gradient=all batch=2 height=3 width=5 channels=5"
            ),
            "convolution and GELU of pairs": cards.Accesses(
                _KERNELS, "dtype=float16 gradient=all batch=2 height=5 width=2 channels=6"
            ),
        },
        emulated={"depthwise_conv_gelu": "gradient=all batch=2 height=9 width=11 channels=40"},
    )
}
