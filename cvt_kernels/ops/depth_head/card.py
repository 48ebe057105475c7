"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

from .. import cards


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


CARDS = {
    "depth_head": cards.Card(
        call=_depth_head,
        stages={"depth_head": cards.Launches(_depth_head_stage, of_pyramids=True)},
        choices=cards.COMMON | cards.IMAGE | {"max_depth": (10.0, 1.0, 80)},
        examples=cards.of_maps(
            "bare=True", "channels_last=True", odd="inputs=1", many="inputs=8", tiny="inputs=2", inputs=9
        ),
        without_gradients=("cpu",),
        wrong={
            "x": ((9, 3, 4), (2, 9, 0, 4)),
            "weight": ((20, 9), (20, 2, 3, 3), (20, 9, 1, 1), (0, 9, 3, 3)),
            "last_weight": ((20, 3, 3), (2, 20, 3, 3), (1, 5, 3, 3)),
        },
    )
}
