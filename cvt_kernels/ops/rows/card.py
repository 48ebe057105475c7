"""The cards of these operators; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import cards

_SOME: dict[str, Any] = {"batch": 2, "tokens": 13, "count": 7, "channels": 40, "absent": "some"}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "usual": _SOME,
    "odd": {"batch": 1, "tokens": 1, "count": 1, "channels": 7},
    "empty": _SOME | {"batch": 0},
    "many": {"batch": 4, "tokens": 200, "count": 150, "channels": 96},
    "tiny": {"batch": 2, "tokens": 4, "count": 3, "channels": 5, "absent": "some"},
    "no rows": _SOME | {"count": 0},
}


def _index(m: Any) -> Tensor:
    return m.index(m.batch, m.tokens, min(m.count, m.tokens))


def _gather_rows(m: Any) -> Any:
    return (m.activation(m.batch, m.tokens, m.channels), _index(m)), {}


def _scatter_rows(m: Any) -> Any:
    x, index = _gather_rows(m)[0]
    values = m.activation(m.batch, index.shape[1], m.channels)
    branch = None if m.bare else m.activation(m.batch, index.shape[1], m.channels)
    return (x, index, values, branch), {"inplace": m.inplace}


def _rows(step: cards.Step) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a stage's tokens, the index of 7 of 10, and values for these."""
    kept = -(-7 * step.tokens // 10)
    values = step.tensor(step.batch, kept, step.channels)
    rows = torch.arange(kept, device=step.device).expand(step.batch, kept).contiguous()
    return step.x(), rows, values


def _gather_rows_stage(step: cards.Step) -> None:
    """Gathers 7 of 10 tokens of a stage."""
    x, rows, _ = _rows(step)
    step.call("gather_rows", x, rows)


def _scatter_rows_stage(step: cards.Step) -> None:
    """Puts 7 of 10 tokens back with a branch, in inference once more in place."""
    x, rows, values = _rows(step)
    for inplace in (False,) if step.training else (False, True):
        step.call("scatter_rows", x, rows, values, values, inplace=inplace)


CARDS = {
    "gather_rows": cards.Card(
        call=_gather_rows,
        stages={"gather_rows": cards.Launches(_gather_rows_stage)},
        choices=cards.COMMON | cards.TOKENS | cards.ABSENT | {"count": (*cards.SIZES, 0)},
        examples=_EXAMPLES,
        multiplies=False,
    ),
    "scatter_rows": cards.Card(
        call=_scatter_rows,
        stages={"scatter_rows": cards.Launches(_scatter_rows_stage)},
        choices=cards.COMMON
        | cards.TOKENS
        | cards.ABSENT
        | {"count": (*cards.SIZES, 0), "bare": cards.BOTH}
        | cards.INPLACE,
        examples=_EXAMPLES | {"bare": _SOME | {"bare": True}, "inplace=True": _SOME | {"inplace": True}},
        multiplies=False,
        wrong={"values": ((2, 6, 40), (2, 7, 3), (7, 40))},
    ),
}
