"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

from cvt_kernels.ops import cards


def _scaled_rows(m: Any) -> Any:
    return (m.activation(*cards.shape_of(m)), m.parameter(m.channels)), {}


def _stage(step: cards.Step) -> None:
    """Scales a stage's tokens."""
    step.call("scaled_rows", step.x(), step.tensor(step.channels))


CARDS = {
    "scaled_rows": cards.Card(
        call=_scaled_rows,
        choices=cards.COMMON | cards.LEADING,
        examples=cards.of_rows(),
        without_gradients=("triton",),
        multiplies=False,
        stages={"scaled_rows": cards.Launches(_stage)},
        work={"scaled_rows": functools.partial(cards.once, names="x out")},
        uncounted={"scaled_rows": "scale"},
        accesses={"scaled_rows": cards.Accesses("scaled_rows", "rows=67 channels=17")},
        emulated={"scaled_rows": "rows=150 channels=64"},
    ),
}
