"""The cards of these operators; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ...cards import (
    APPROXIMATE,
    BOTH,
    COMMON,
    GELUS,
    INPLACE,
    LEADING,
    NORM,
    OUTPUTS,
    ROWS,
    SHIFTED,
    Card,
    of_rows,
    shape_of,
)


def _linear(m: Any) -> Any:
    return (m.activation(*shape_of(m)), *m.linear(m.outputs, m.channels)), {}


def _linear_gelu(m: Any) -> Any:
    return _linear(m)[0], {"approximate": m.approximate}


def _linear_add(m: Any) -> Any:
    args = _linear(m)[0]
    residual, settings = m.activation(*shape_of(m)[:-1], m.outputs), {"inplace": m.inplace}
    if m.scaled and not m.inplace and residual.ndim > 1:
        scale = torch.rand(residual.shape[0], generator=m._generator, dtype=torch.float32)
        settings |= {"scale": scale, "scales_sum": m.scales_sum}
    return (*args, residual), settings


def _linear_add_layer_norm(m: Any) -> Any:
    args = _linear(m)[0]
    args, settings = (*args, m.activation(*shape_of(m)[:-1], m.outputs)), {"inplace": m.inplace}
    shift = m.parameter(m.outputs) if m.shifted else None
    return (*args, *m.norm(m.outputs)[:2]), {"eps": m.eps, "shift": shift, **settings}


_SCALED = {"outputs": 33, "scaled": True}
CARDS = {
    "linear": Card(
        call=_linear,
        choices=COMMON | LEADING | OUTPUTS | {"bare": BOTH},
        examples=of_rows("bare=True", outputs=33),
        without_gradients=("float32",),
        needed={"float32": {"dtype": "bfloat16", "bare": True}},
    ),
    "linear_gelu": Card(
        call=_linear_gelu,
        choices=COMMON | LEADING | OUTPUTS | {"bare": BOTH} | APPROXIMATE,
        examples=of_rows("bare=True", *GELUS, outputs=33),
    ),
    "linear_add": Card(
        call=_linear_add,
        choices=COMMON
        | LEADING
        | OUTPUTS
        | INPLACE
        | {
            "bare": BOTH,
            "scaled": BOTH,
            "scales_sum": BOTH,
        },
        examples=of_rows("bare=True", "inplace=True", outputs=33)
        | {
            "scaled": ROWS | _SCALED,
            "scaled sum": ROWS | _SCALED | {"scales_sum": True},
        },
    ),
    "linear_add_layer_norm": Card(
        call=_linear_add_layer_norm,
        choices=COMMON | LEADING | OUTPUTS | NORM | SHIFTED | INPLACE,
        examples=of_rows("bare=True", "shifted=True", "inplace=True", outputs=33),
        without_gradients=("triton",),
        normalizes=True,
    ),
}
