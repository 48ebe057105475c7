"""The cards of these operators; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ...launch.records import Mlp
from .. import cards
from ..linear.card import BIAS_GRADIENT, SCALED, factors


def _layer_norm_mlp(m: Any) -> Any:
    x, c, hidden = m.activation(*cards.shape_of(m)), m.channels, m.outputs
    shift = m.parameter(c) if m.shifted else None
    args = (x, *m.norm(c)[:2], *m.linear(hidden, c), *m.linear(c, hidden))
    return args, {"eps": m.eps, "approximate": m.approximate, "shift": shift}


def _layer_norm_mlp_stage(step: cards.Step) -> None:
    """Runs a CvT block's MLP (4 hidden features per channel, QuickGELU)."""
    _, first, first_bias, _ = step.linear(1, 4)
    _, second, second_bias, _ = step.linear(4, 1)
    norm = step.tensor(step.channels), step.tensor(step.channels)
    layers = first, first_bias, second, second_bias
    step.call("layer_norm_mlp", step.x(), *norm, *layers, approximate="quick")


def _mlp_add(m: Any) -> Any:
    x, c, hidden = m.activation(*cards.shape_of(m)), m.channels, m.outputs
    residual = m.activation(*cards.shape_of(m))
    args = (x, *m.linear(hidden, c), *m.linear(c, hidden), residual)
    return args, {"approximate": m.approximate, **factors(m, residual)}


def _mlp_add_stage(step: cards.Step) -> None:
    """Runs a CvT block's MLP in training, with stochastic depth; only there has it kernels of its own."""
    if not step.training:
        return
    x, fc1, bias1, _ = step.linear(1, 4)
    _, fc2, bias2, _ = step.linear(4, 1)
    scale = step.tensor(step.batch, dtype=torch.float32).detach()
    residual = step.tensor(*x.shape, dtype=torch.float32).unflatten(0, (step.batch, -1))
    x = x.unflatten(0, (step.batch, -1))
    step.call("mlp_add", x, fc1, bias1, fc2, bias2, residual, approximate="quick", scale=scale)


def _mlp_work(arguments: dict[str, Any]) -> cards.Work:
    x, weights = arguments["x_ptr"], (arguments["fc1_weight_ptr"], arguments["fc2_weight_ptr"])
    multiplies = x.dtype != torch.float32 or arguments["SPEC"].precision != "ieee"
    flops = 2 * arguments["rows"] * sum(weight.numel() for weight in weights) if multiplies else 0
    return cards.Work(cards.bytes_of(x, arguments["out_ptr"], weights), flops)


_TRIED = {
    "resident": (True,), "block_rows": (64, 128), "block_hidden": (64, 128, 256), "num_warps": (4, 8),
    "programs": (1, 2, 3),
}  # fmt: skip
_TRAINING = f"linear_gelu linear_ends {BIAS_GRADIENT}"

CARDS = {
    "layer_norm_mlp": cards.Card(
        call=_layer_norm_mlp,
        choices=cards.LAYER | cards.NORM | cards.SHIFTED | cards.APPROXIMATE,
        examples=cards.of_rows("bare=True", "shifted=True", *cards.GELUS, outputs=33),
        without_gradients=("triton",),
        normalizes=True,
        wrong={"x": ((), (0,))},
        stages={"layer_norm_mlp": cards.Launches(_layer_norm_mlp_stage)},
        work={"layer_norm_mlp_fwd": _mlp_work, "layer_norm_mlp_fwd_resident": _mlp_work},
        uncounted={"layer_norm_mlp": "norm_weight norm_bias fc1_bias fc2_bias shift"},
        accesses={
            "MLP": cards.Accesses("layer_norm_mlp_fwd", "rows=257 channels=5 outputs=37"),
            "resident MLP": cards.Accesses(
                "layer_norm_mlp_fwd_resident", "dtype=float16 rows=643 channels=20 outputs=70"
            ),
        },
        emulated={
            "MLP": "rows=150 channels=64 outputs=256",
            "stage 1: MLP": "dtype=bfloat16 rows=3136 channels=64 outputs=256",
        },
        factors=("fc1_weight", "fc2_weight"),
        sweeps={
            "layer_norm_mlp": cards.Sweep(
                "mlp", (1,), "layer_norm_mlp", Mlp, _TRIED, launched="layer_norm_mlp_fwd_resident"
            )
        },
        found=("dtype=float16 values=zeros gradient=all channels=2 outputs=2 eps=1e-12 seed=0",),
    ),
    "mlp_add": cards.Card(
        call=_mlp_add,
        choices=cards.LAYER | cards.APPROXIMATE | dict.fromkeys(("bare", "scaled", "scales_sum"), cards.BOTH),
        examples=cards.of_rows("bare=True", *cards.GELUS, outputs=33) | SCALED,
        stages={"mlp_add": cards.Launches(_mlp_add_stage)},
        accesses={
            "MLP in training": cards.Accesses(_TRAINING, "gradient=all rows=131 channels=5 outputs=67"),
            "MLP of 16 bits in training": cards.Accesses(
                _TRAINING,
                "dtype=bfloat16 gradient=all leading=tokens rows=131 channels=24 outputs=192 scaled=True",
            ),
        },
        emulated={
            "MLP, training": "gradient=all leading=tokens rows=75 channels=24 outputs=136 scaled=True",
            "ones: MLP, scaled": "dtype=bfloat16 gradient=all rows=1 channels=1 outputs=1 scaled=True",
        },
    ),
}
