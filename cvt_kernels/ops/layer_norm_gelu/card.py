"""The cards of these operators; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import (
    APPROXIMATE,
    COMMON,
    GELUS,
    LEADING,
    NORM,
    RESULT,
    SHIFTED,
    Card,
    of_rows,
    result_of,
    shape_of,
)


def _layer_norm(m: Any) -> Any:
    x = m.activation(*shape_of(m))
    shift = m.parameter(m.channels) if m.shifted else None
    return (x, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": result_of(m), "shift": shift}


def _add_layer_norm(m: Any) -> Any:
    x, residual = m.activation(*shape_of(m)), m.activation(*shape_of(m)) if m.added else None
    return (x, residual, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": result_of(m)}


def _gelu(m: Any) -> Any:
    return (m.activation(*shape_of(m)),), {"approximate": m.approximate}


def _bias_gelu(m: Any) -> Any:
    return (m.activation(*shape_of(m)), m.parameter(m.channels)), {"approximate": m.approximate}


def _layer_norm_gelu(m: Any) -> Any:
    return (m.activation(*shape_of(m)), *m.norm(m.channels)[:2]), {"eps": m.eps, "approximate": m.approximate}


CARDS = {
    "layer_norm": Card(
        call=_layer_norm,
        choices=COMMON | LEADING | NORM | SHIFTED | RESULT,
        examples=of_rows("bare=True", "shifted=True", "result=bfloat16"),
        normalizes=True,
    ),
    "add_layer_norm": Card(
        call=_add_layer_norm,
        choices=COMMON | LEADING | NORM | RESULT | {"added": (True, False)},
        examples=of_rows("bare=True", "result=bfloat16", "added=False"),
        normalizes=True,
    ),
    "gelu": Card(
        call=_gelu,
        choices=COMMON | LEADING | APPROXIMATE,
        examples=of_rows(*GELUS),
        wrong={"x": ()},
    ),
    "bias_gelu": Card(
        call=_bias_gelu,
        choices=COMMON | LEADING | APPROXIMATE,
        examples=of_rows(*GELUS),
    ),
    "layer_norm_gelu": Card(
        call=_layer_norm_gelu,
        choices=COMMON | LEADING | NORM | APPROXIMATE,
        examples=of_rows("bare=True", *GELUS),
        normalizes=True,
    ),
}
