"""The cards of these operators; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import cards

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


def _gather_add_layer_norm(m: Any) -> Any:
    x, index = _gather_rows(m)[0]
    branch = m.activation(m.batch, index.shape[1], m.channels)
    return (x, index, branch, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": cards.result_of(m)}


def _scatter_rows(m: Any) -> Any:
    x, index = _gather_rows(m)[0]
    values = m.activation(m.batch, index.shape[1], m.channels)
    branch = None if m.bare else m.activation(m.batch, index.shape[1], m.channels)
    return (x, index, values, branch), {"inplace": m.inplace}


CARDS = {
    "gather_rows": cards.Card(
        call=_gather_rows,
        choices=cards.COMMON | cards.TOKENS | cards.ABSENT | {"count": (*cards.SIZES, 0)},
        examples=_EXAMPLES,
        multiplies=False,
    ),
    "gather_add_layer_norm": cards.Card(
        call=_gather_add_layer_norm,
        choices=cards.COMMON
        | cards.TOKENS
        | cards.ABSENT
        | {"count": (*cards.SIZES, 0)}
        | cards.NORM
        | cards.RESULT,
        examples=_EXAMPLES | {"bare": _SOME | {"bare": True}},
        normalizes=True,
        multiplies=False,
        wrong={"branch": ((2, 6, 40), (40,))},
    ),
    "scatter_rows": cards.Card(
        call=_scatter_rows,
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
