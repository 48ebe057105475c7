"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ...launch.records import ConvLinear
from .. import cards
from ..conv_projection.card import PROJECTION, _conv_projection, conv_batch_norm


def _conv_linear(m: Any) -> Any:
    (x, grid, convs), _ = _conv_projection(m)
    return (x, grid, convs, tuple(tuple(m.linear(m.outputs, m.channels)) for _ in convs)), {}


def _conv_linear_stage(step: cards.Step) -> None:
    """Runs a CvT block's projection with its linear layers."""
    convs = [conv_batch_norm(step, stride) for stride in (1, 2, 2)]
    linears = [(step.tensor(step.channels, step.channels), step.tensor(step.channels)) for _ in convs]
    step.call("conv_linear", step.x(), step.stage.grid, convs, linears)


def _conv_linear_work(arguments: dict[str, Any]) -> cards.Work:
    x, outs, spec = arguments["x_ptr"], arguments["y_ptrs"], arguments["SPEC"]
    is_exact = x.dtype == torch.float32 and spec.precision == "ieee"
    flops = 0 if is_exact else 2 * x.shape[2] * sum(out.numel() for out in outs)
    return cards.Work(cards.bytes_of(x, outs, arguments["linear_ptrs"]), flops)


def _conv_linear_few_work(arguments: dict[str, Any]) -> cards.Work:
    batch, height, width = (arguments[name] for name in ("batch", "height", "width"))
    few, x = arguments["FEW"], arguments["x_ptr"]
    grids = [(-(-height // stride), -(-width // stride)) for stride in arguments["STRIDES"]]
    rows = sum(batch * (h * w + few.class_token) for h, w in grids)
    size = cards.bytes_of(x, arguments["w_ptr"]) + rows * few.outputs * x.element_size()
    size += cards.bytes_of(arguments["statistics_ptr"]) if few.norm_width else 0
    return cards.Work(size, 2 * rows * few.outputs * few.channels)


_TRIED = {
    "tokens": (32, 64, 128), "branches": (1, 2), "outputs": (64, 128), "chunk": (32, 64), "num_warps": (4, 8),
    "registers": (128, 255),
}  # fmt: skip

CARDS = {
    "conv_linear": cards.Card(
        call=_conv_linear,
        choices=cards.COMMON | PROJECTION | cards.OUTPUTS,
        examples={
            "usual": cards.MAP | cards.K3X3 | {"branches": 2, "outputs": 33, "class_token": True},
            "odd": cards.ODD_MAP | cards.K3X3 | {"outputs": 5},
            "empty": cards.MAP | cards.K3X3 | {"batch": 0, "outputs": 33},
            "many": cards.MANY_PIXELS | cards.K3X3 | {"outputs": 33},
            "tiny": cards.TINY_MAP | cards.K3X3 | {"outputs": 4, "branches": 2, "class_token": True},
            "bare": cards.MAP | cards.K3X3 | {"outputs": 33, "bare": True},
        },
        without_gradients=("gluon", "triton"),
        stages={"conv_linear": cards.Launches(_conv_linear_stage)},
        work={"conv_linear_fwd": _conv_linear_work, "conv_linear_few": _conv_linear_few_work},
        uncounted={
            "conv_linear_few": "taps bias norm_weight norm_bias",
            "conv_linear": "w gamma beta mean var bias",
        },
        factors=("linears",),
        sweeps={
            "conv_linear": cards.Sweep(
                "conv_linear", (1,), "conv_linear", ConvLinear, _TRIED, launched="conv_linear_fwd"
            )
        },
        found=(
            "values=infinite gradient=all seed=0",
            "dtype=float16 values=tiny width=2 statistics=none eps=1e-12 seed=0",
        ),
    )
}
