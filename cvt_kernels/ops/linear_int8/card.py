"""The cards of these operators; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ... import reference
from .. import cards

_QUANTIZED = cards.FORWARD | cards.LEADING | {"to": ("int8", "float8_e4m3fn")}


def _quantize_rows(m: Any) -> Any:
    return (m.activation(*cards.shape_of(m)),), {"dtype": getattr(torch, m.to)}


def _layer_norm_quantize(m: Any) -> Any:
    x = m.activation(*cards.shape_of(m))
    shift = m.parameter(m.channels) if m.shifted else None
    settings = {"eps": m.eps, "shift": shift, "dtype": getattr(torch, m.to)}
    return (x, *m.norm(m.channels)[:2]), settings


def _gelu_quantize(m: Any) -> Any:
    settings = {"approximate": m.approximate, "dtype": getattr(torch, m.to)}
    return (m.activation(*cards.shape_of(m)), m.optional(m.channels)), settings


def _linear_int8(m: Any) -> Any:
    dtype = getattr(torch, m.to)
    layer = m.quantized(m.outputs, m.channels, dtype)
    x, scales, result = m.activation(*cards.shape_of(m)), None, m.dtype
    if m.autocast and m.dtype != torch.float64:
        result = torch.bfloat16
    residual = m.activation(*x.shape[:-1], m.outputs).to(result) if m.added else None
    settings: dict[str, Any] = {"approximate": None if m.approximate == "nothing" else m.approximate}
    if m.rounded and m.dtype != torch.float64:
        x, scales = reference.quantize_rows(x, dtype=dtype)
    settings |= {"x_scales": scales, "residual": residual, "dtype": result}
    return (x, layer.weight, layer.weight_scale, layer.bias), settings


def _quantize_rows_stage(step: cards.Step) -> None:
    """Rounds a stage's tokens to int8, which has no gradient."""
    if not step.training:
        step.call("quantize_rows", step.x())


def _layer_norm_quantize_stage(step: cards.Step) -> None:
    """Rounds the LayerNorm of a stage's tokens, shifted as where they are frozen."""
    vector = step.tensor(step.channels)
    if not step.training:
        step.call("layer_norm_quantize", step.x(), vector, vector, shift=vector)


def _gelu_quantize_stage(step: cards.Step) -> None:
    """Rounds Microsoft's GELU of the hidden features of a CvT block's MLP."""
    hidden, *_ = step.linear(4, 1)
    if not step.training:
        step.call("gelu_quantize", hidden, approximate="quick")


def _linear_int8_stage(step: cards.Step) -> None:
    """Runs a CvT block's linear layers by 8-bit integers, one of each kind.

    These are Q, the layer after attention and the two of the MLP, the second and the last with a residual.
    """
    for inputs, outputs, adds in () if step.training else ((1, 1, 0), (1, 1, 1), (1, 4, 0), (4, 1, 1)):
        x, weight, bias, residual = step.linear(inputs, outputs)
        step.call(
            "linear_int8", x.to(torch.int8), weight.to(torch.int8), bias.float(), bias,
            x_scales=step.tensor(len(x), 1, dtype=torch.float32), residual=residual if adds else None,
            dtype=step.dtype,
        )  # fmt: skip


_ROUNDING = functools.partial(cards.once, names="x scales values")


CARDS = {
    "quantize_rows": cards.Card(
        call=_quantize_rows,
        choices=_QUANTIZED,
        examples=cards.of_rows("to=float8_e4m3fn"),
        rounds=True,
        multiplies=False,
        stages={"quantize_rows": cards.Launches(_quantize_rows_stage)},
        work={"quantize_rows": _ROUNDING},
        accesses={
            "int8 rows": cards.Accesses("quantize_rows", "rows=67 channels=5"),
            "float8 rows": cards.Accesses("quantize_rows", "rows=3 channels=1031 to=float8_e4m3fn"),
        },
    ),
    "layer_norm_quantize": cards.Card(
        call=_layer_norm_quantize,
        choices=_QUANTIZED | cards.NORM | cards.SHIFTED,
        examples=cards.of_rows("to=float8_e4m3fn", "bare=True", "shifted=True"),
        rounds=True,
        multiplies=False,
        stages={"layer_norm_quantize": cards.Launches(_layer_norm_quantize_stage)},
        work={"layer_norm_quantize": _ROUNDING},
        uncounted={"layer_norm_quantize": "gamma beta shift"},
        accesses={"LayerNorm to int8": cards.Accesses("layer_norm_quantize", "rows=67 channels=5")},
        emulated={"layer_norm_quantize": "rows=67 channels=192"},
    ),
    "gelu_quantize": cards.Card(
        call=_gelu_quantize,
        choices=_QUANTIZED | cards.APPROXIMATE | {"bare": cards.BOTH},
        examples=cards.of_rows("to=float8_e4m3fn", "bare=True", *cards.GELUS),
        rounds=True,
        multiplies=False,
        stages={"gelu_quantize": cards.Launches(_gelu_quantize_stage)},
        work={"gelu_quantize": _ROUNDING},
        uncounted={"gelu_quantize": "bias"},
        accesses={"GELU to int8": cards.Accesses("gelu_quantize", "dtype=float16 rows=5 channels=67")},
        emulated={"float8 GELU": "dtype=float32 to=float8_e4m3fn rows=67 channels=192"},
        found=("values=large seed=7174",),
    ),
    "linear_int8": cards.Card(
        call=_linear_int8,
        stages={"linear_int8": cards.Launches(_linear_int8_stage)},
        choices=_QUANTIZED
        | cards.OUTPUTS
        | dict.fromkeys(("rounded", "bare", "added"), cards.BOTH)
        | {"approximate": ("nothing", *cards.VARIANTS)},
        examples=cards.of_rows(
            "to=float8_e4m3fn", "rounded=True", "bare=True", "added=True", *cards.GELUS, outputs=33
        ),
        rounds=True,
        needed={"scaled_mm": {"to": "float8_e4m3fn", "dtype": "bfloat16", "channels": 48, "outputs": 32}},
        found=("rows=0 seed=0", "leading=tokens rows=0 seed=0", "to=float8_e4m3fn rounded=True seed=0"),
    ),
}
