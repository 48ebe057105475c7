"""The cards of these operators; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch
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
#: The kernels that scatter into new rows, and settings of calls with gradients.
_SCATTERED, _TRAINING = "scatter_rows_places scatter_rows", "gradient=all layout=sliced"
_EMULATED = f"{_TRAINING} batch=2 tokens=50 count=33 channels=64"


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


def _gather_add_layer_norm_stage(step: cards.Step) -> None:
    """Gathers 7 of 10 tokens, adds and normalizes."""
    vector = step.tensor(step.channels)
    step.call("gather_add_layer_norm", *_rows(step), vector, vector)


def _scatter_rows_stage(step: cards.Step) -> None:
    """Puts 7 of 10 tokens back with a branch, in inference cards.once more in place."""
    x, rows, values = _rows(step)
    for inplace in (False,) if step.training else (False, True):
        step.call("scatter_rows", x, rows, values, values, inplace=inplace)


def _gathered_and_normalized_rows(arguments: dict[str, Any]) -> cards.Work:
    x, branch = arguments["x_ptr"], arguments["branch_ptr"]
    return cards.Work(cards.once(arguments, "rows branch h y").bytes + branch.numel() * x.element_size())


def _scattered_rows(arguments: dict[str, Any]) -> cards.Work:
    size, x = cards.once(arguments, "places out values branch").bytes, arguments["x_ptr"]
    if x is not None:  # but for the tokens of the index
        size += (x.shape[1] - arguments["count"]) * cards.bytes_of(x) // x.shape[1]
    return cards.Work(size)


CARDS = {
    "gather_rows": cards.Card(
        call=_gather_rows,
        choices=cards.COMMON | cards.TOKENS | cards.ABSENT | {"count": (*cards.SIZES, 0)},
        examples=_EXAMPLES,
        multiplies=False,
        stages={"gather_rows": cards.Launches(_gather_rows_stage)},
        work={"gather_rows": functools.partial(cards.once, names="rows out out")},
        accesses={
            name: cards.Accesses(
                f"gather_rows {_SCATTERED}", f"{_TRAINING} {words}", is_dense="absent" not in words
            )
            for name, words in {
                "gather": "batch=3 tokens=41 count=37 channels=5",
                "gather one": "dtype=float16 batch=1 tokens=1 count=1 channels=1",
                "gather nothing": "batch=2 tokens=3 count=2 channels=5 absent=some",
                "gather wide rows": "batch=2 tokens=3 count=2 channels=1031",
            }.items()
        },
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
        stages={"gather_add_layer_norm": cards.Launches(_gather_add_layer_norm_stage)},
        work={
            "gather_add_layer_norm": _gathered_and_normalized_rows,
            "gather_add_layer_norm_backward": functools.partial(cards.once, names="dy dh h out sums"),
        },
        uncounted={"gather_add_layer_norm": "gamma beta"},
        accesses={
            "gather and normalize": cards.Accesses(
                f"gather_add_layer_norm gather_add_layer_norm_backward {_SCATTERED}",
                f"{_TRAINING} batch=3 tokens=131 count=127 channels=13",
            )
        },
        emulated={
            "gather and normalize": _EMULATED,
            "ones: normalize, training": f"{_TRAINING} dtype=float32 batch=1 tokens=1 count=1 channels=2",
        },
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
        stages={"scatter_rows": cards.Launches(_scatter_rows_stage)},
        work={
            "scatter_rows": _scattered_rows,
            "scatter_rows_places": functools.partial(cards.once, names="rows places"),
            "scatter_rows_inplace": functools.partial(cards.once, names="rows values values branch"),
        },
        accesses={
            "scatter": cards.Accesses(
                f"{_SCATTERED} gather_rows",
                f"{_TRAINING} dtype=bfloat16 batch=3 tokens=41 count=37 channels=5",
            ),
            "scatter many": cards.Accesses(
                f"{_SCATTERED} gather_rows", f"{_TRAINING} batch=1 tokens=521 count=519 channels=1"
            ),
            "scatter in place": cards.Accesses(
                "scatter_rows_inplace", "batch=3 tokens=41 count=37 channels=5 inplace=True"
            ),
        },
        emulated={"scatter": _EMULATED},
    ),
}
