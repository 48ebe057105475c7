"""The cards of these operators; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ... import reference
from ...cards import (
    APPROXIMATE,
    BOTH,
    FORWARD,
    GELUS,
    LEADING,
    NORM,
    OUTPUTS,
    SHIFTED,
    VARIANTS,
    Card,
    of_rows,
    shape_of,
)

_QUANTIZED = FORWARD | LEADING | {"to": ("int8", "float8_e4m3fn"), "one_scale": ("none", "0.05", "0.001")}


def _quantize_rows(m: Any) -> Any:
    return (m.activation(*shape_of(m)),), {"scale": m.row_scale(), "dtype": getattr(torch, m.to)}


def _layer_norm_quantize(m: Any) -> Any:
    x = m.activation(*shape_of(m))
    shift = m.parameter(m.channels) if m.shifted else None
    settings = {"eps": m.eps, "shift": shift, "scale": m.row_scale(), "dtype": getattr(torch, m.to)}
    return (x, *m.norm(m.channels)[:2]), settings


def _gelu_quantize(m: Any) -> Any:
    settings = {"approximate": m.approximate, "scale": m.row_scale(), "dtype": getattr(torch, m.to)}
    return (m.activation(*shape_of(m)), m.optional(m.channels)), settings


def _linear_int8(m: Any) -> Any:
    dtype = getattr(torch, m.to)
    layer = m.quantized(m.outputs, m.channels, dtype, None)
    x, scales, result = m.activation(*shape_of(m)), None, m.dtype
    if m.autocast and m.dtype != torch.float64:
        result = torch.bfloat16
    residual = m.activation(*x.shape[:-1], m.outputs).to(result) if m.added else None
    settings: dict[str, Any] = {"approximate": None if m.approximate == "nothing" else m.approximate}
    if m.rounded and m.dtype != torch.float64:
        x, scales = reference.quantize_rows(x, dtype=dtype)
    else:
        settings["input_scale"] = m.row_scale()
    settings |= {"x_scales": scales, "residual": residual, "dtype": result}
    return (x, layer.weight, layer.weight_scale, layer.bias), {"input_scale": None, **settings}


CARDS = {
    "quantize_rows": Card(
        call=_quantize_rows,
        choices=_QUANTIZED,
        examples=of_rows("to=float8_e4m3fn", "one_scale=0.05"),
        rounds=True,
    ),
    "layer_norm_quantize": Card(
        call=_layer_norm_quantize,
        choices=_QUANTIZED | NORM | SHIFTED,
        examples=of_rows("to=float8_e4m3fn", "one_scale=0.05", "bare=True", "shifted=True"),
        rounds=True,
    ),
    "gelu_quantize": Card(
        call=_gelu_quantize,
        choices=_QUANTIZED | APPROXIMATE | {"bare": BOTH},
        examples=of_rows("to=float8_e4m3fn", "one_scale=0.05", "bare=True", *GELUS),
        rounds=True,
    ),
    "linear_int8": Card(
        call=_linear_int8,
        choices=_QUANTIZED
        | OUTPUTS
        | {
            "rounded": BOTH,
            "bare": BOTH,
            "added": BOTH,
            "approximate": ("nothing", *VARIANTS),
        },
        examples=of_rows(
            "to=float8_e4m3fn",
            "one_scale=0.05",
            "rounded=True",
            "bare=True",
            "added=True",
            *GELUS,
            outputs=33,
        ),
        rounds=True,
        needed={"scaled_mm": {"to": "float8_e4m3fn", "dtype": "bfloat16", "channels": 48, "outputs": 32}},
    ),
}
