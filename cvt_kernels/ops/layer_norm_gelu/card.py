"""The cards of these operators; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

from .. import cards


def _layer_norm(m: Any) -> Any:
    x = m.activation(*cards.shape_of(m))
    shift = m.parameter(m.channels) if m.shifted else None
    return (x, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": cards.result_of(m), "shift": shift}


def _add_layer_norm(m: Any) -> Any:
    x, residual = m.activation(*cards.shape_of(m)), m.activation(*cards.shape_of(m)) if m.added else None
    return (x, residual, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": cards.result_of(m)}


def _gelu(m: Any) -> Any:
    return (m.activation(*cards.shape_of(m)), m.optional(m.channels)), {"approximate": m.approximate}


def _layer_norm_gelu(m: Any) -> Any:
    settings = {"eps": m.eps, "approximate": m.approximate}
    return (m.activation(*cards.shape_of(m)), *m.norm(m.channels)[:2]), settings


def _normalizing(operator: str, streams: int = 1) -> cards.Launches:
    """Returns a call of an operator with a LayerNorm, which takes so many tensors of tokens."""

    def run(step: cards.Step) -> None:
        vectors = step.tensor(step.channels), step.tensor(step.channels)
        step.call(operator, *(step.x() for _ in range(streams)), *vectors)

    return cards.Launches(run)


def _gelu_stage(step: cards.Step) -> None:
    """Runs both GELUs of the public CvTs, Hugging Face's and Microsoft's, between the layers of an MLP."""
    for approximate in ("none", "quick"):
        hidden = step.tensor(step.batch, step.tokens, 4 * step.channels)
        step.call("gelu", hidden, step.tensor(4 * step.channels), approximate=approximate)


CARDS = {
    "layer_norm": cards.Card(
        call=_layer_norm,
        choices=cards.COMMON | cards.LEADING | cards.NORM | cards.SHIFTED | cards.RESULT,
        examples=cards.of_rows("bare=True", "shifted=True", "result=bfloat16"),
        normalizes=True,
        multiplies=False,
        stages={"layer_norm": _normalizing("layer_norm")},
    ),
    "add_layer_norm": cards.Card(
        call=_add_layer_norm,
        choices=cards.COMMON | cards.LEADING | cards.NORM | cards.RESULT | {"added": (True, False)},
        examples=cards.of_rows("bare=True", "result=bfloat16", "added=False"),
        normalizes=True,
        multiplies=False,
        stages={"add_layer_norm": _normalizing("add_layer_norm", 2)},
    ),
    "gelu": cards.Card(
        call=_gelu,
        choices=cards.COMMON | cards.LEADING | cards.APPROXIMATE | {"bare": cards.BOTH},
        examples=cards.of_rows("bare=True", *cards.GELUS),
        multiplies=False,
        stages={"gelu": cards.Launches(_gelu_stage)},
        wrong={"x": ()},
    ),
    "layer_norm_gelu": cards.Card(
        call=_layer_norm_gelu,
        choices=cards.COMMON | cards.LEADING | cards.NORM | cards.APPROXIMATE,
        examples=cards.of_rows("bare=True", *cards.GELUS),
        normalizes=True,
        multiplies=False,
        stages={"layer_norm_gelu": _normalizing("layer_norm_gelu")},
    ),
}
