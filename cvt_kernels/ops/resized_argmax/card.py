"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

from .. import cards

_USUAL = cards.worded("batch=2 height=4 width=5 channels=19 out_height=13 out_width=18")


def _resized_argmax(m: Any) -> Any:
    return (cards.image_of(m, m.channels, m.height, m.width), (m.out_height, m.out_width)), {}


def _resized_argmax_stage(step: cards.Step) -> None:
    """Turns the logits of SegFormer's decode head, for 150 classes, into classes at 4 times the size."""
    if step.stage.decoder and not step.training:
        height, width = step.stage.grid
        logits = step.tensor(step.batch, height, width, 150).permute(0, 3, 1, 2)
        step.call("resized_argmax", logits, (4 * height, 4 * width))


CARDS = {
    "resized_argmax": cards.Card(
        call=_resized_argmax,
        choices=cards.FORWARD
        | cards.GRID
        | {
            "channels": (*cards.WIDEST, 1000),
            "out_height": (4, 1, 2, 7, 16, 33),
            "out_width": (4, 1, 3, 8, 17, 36),
            "channels_last": cards.BOTH,
        },
        examples={
            "usual": _USUAL,
            "odd": _USUAL
            | {"batch": 1, "height": 1, "width": 1, "channels": 7, "out_height": 1, "out_width": 1},
            "empty": _USUAL | {"batch": 0},
            "many": _USUAL | {"batch": 3, "channels": 65, "out_height": 61, "out_width": 47},
            "tiny": _USUAL | {"height": 2, "width": 3, "channels": 4, "out_height": 5, "out_width": 3},
            "channels last": _USUAL | {"channels_last": True},
            "one class": _USUAL | {"channels": 1},
            "1000 classes": _USUAL | {"channels": 1000, "out_height": 5},
            "smaller": _USUAL | {"out_height": 3, "out_width": 2},
            "one pixel": _USUAL | {"height": 1, "width": 1},
        },
        rounds=True,
        multiplies=False,
        stages={"resized_argmax": cards.Launches(_resized_argmax_stage, of_pyramids=True)},
        work={
            "pixel_classes": functools.partial(cards.once, names="x out"),
            "resized_argmax": functools.partial(cards.once, names="x largest out"),
        },
    )
}
