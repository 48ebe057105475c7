"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from ... import cards
from ...records import NormalizedConv


def _conv(m: Any, outputs: int, inputs: int) -> NormalizedConv:
    mean, variance = (m.parameter(outputs).detach() for _ in range(2))
    return NormalizedConv(
        m.parameter(outputs, inputs, 3, 3, scale=(9 * inputs) ** -0.5),
        m.optional(outputs),
        m.optional(outputs, scale=0.25, shift=1.0),
        m.optional(outputs),
        mean,
        variance.abs() + 0.1,
        m.eps,
    )


def _selective_fusion(m: Any) -> Any:
    x = cards.image_of(m, m.inputs, 2 * m.height, 2 * m.width)
    other = cards.image_of(m, m.inputs, m.height, m.width)
    first, second = _conv(m, m.channels, 2 * m.inputs), _conv(m, m.outputs, m.channels)
    last = m.parameter(2, m.outputs, 3, 3, scale=(9 * m.outputs) ** -0.5)
    return (x, other, first, second, last, m.optional(2)), {}


def _selective_fusion_stage(step: cards.Step) -> None:
    """Fuses the maps of 64 channels of GLPN's last two stages."""
    if not step.stage.decoder or step.training:
        return

    def conv(outputs: int, inputs: int) -> NormalizedConv:
        bias, gamma, beta, mean, variance = (step.tensor(outputs) for _ in range(5))
        return NormalizedConv(step.tensor(outputs, inputs, 3, 3), bias, gamma, beta, mean, variance)

    height, width = (size // 2 for size in step.stage.grid)
    x, other = (step.tensor(step.batch, n * height, n * width, 64).permute(0, 3, 1, 2) for n in (2, 1))
    last = step.tensor(2, 32, 3, 3), step.tensor(2)
    step.call("selective_fusion", x, other, conv(64, 128), conv(32, 64), *last)


def _starts_work(arguments: dict[str, Any]) -> cards.Work:
    names = "other", "up", "w0", "taps0", "w1", "taps1"
    return cards.Work(cards.bytes_of([arguments[f"{name}_ptr"] for name in names]))


def _conv_work(arguments: dict[str, Any]) -> cards.Work:
    tensors = [arguments[f"{name}_ptr"] for name in ("x", "other", "w", "out")]
    spec = arguments["SPEC"]
    flops = 2 * arguments["rows"] * arguments["w_ptr"].numel()
    is_exact = arguments["x_ptr"].dtype == torch.float32 and spec.precision == "ieee"
    return cards.Work(cards.bytes_of(tensors), 0 if is_exact else flops)


def _sum_work(arguments: dict[str, Any]) -> cards.Work:
    names = "hidden", "last", "x", "up", "out"
    return cards.Work(cards.bytes_of([arguments[f"{name}_ptr"] for name in names]))


_KERNELS = "fusion_starts fusion_conv fusion_conv fusion_sum"

CARDS = {
    "selective_fusion": cards.Card(
        call=_selective_fusion,
        choices=cards.COMMON
        | cards.GRID
        | cards.NORM
        | cards.OUTPUTS
        | {"inputs": (1, 2, 3, 5, 8, 17, 64), "channels": cards.WIDE, "channels_last": cards.BOTH},
        examples={
            "usual": cards.MAP | {"inputs": 9, "outputs": 7},
            "odd": cards.ODD_MAP | {"inputs": 1, "outputs": 5},
            "empty": cards.MAP | {"inputs": 9, "outputs": 7, "batch": 0},
            "many": cards.MANY_PIXELS | {"inputs": 8, "outputs": 17},
            "tiny": cards.TINY_MAP | {"inputs": 2, "outputs": 2},
            "bare": cards.MAP | {"inputs": 9, "outputs": 7, "bare": True},
            "channels last": cards.MAP | {"inputs": 9, "outputs": 7, "channels_last": True},
        },
        without_gradients=("triton",),
        wrong={
            "x": ((9, 6, 8), (2, 9, 5, 8), (2, 9, 0, 8)),
            "other": ((2, 9, 6, 8), (2, 9, 3), (1, 9, 3, 4)),
            "last_weight": ((7, 3, 3), (1, 7, 3, 3), (2, 5, 3, 3)),
        },
        stages={"selective_fusion": cards.Launches(_selective_fusion_stage, of_pyramids=True)},
        work={"fusion_starts": _starts_work, "fusion_conv": _conv_work, "fusion_sum": _sum_work},
        uncounted={
            "fusion_starts": " ".join(
                f"{name}{i}" for name in ("bias", "gamma", "beta", "mean", "var", "affine") for i in (0, 1)
            ),
            "fusion_conv": "affine",
            "fusion_sum": "bias",
        },
        accesses={
            name: cards.Accesses(_KERNELS, f"batch=2 {words}")
            for name, words in {
                "selective fusion": (
                    "dtype=bfloat16 layout=sliced height=2 width=3 inputs=5 channels=13 outputs=6"
                ),
                "selective fusion of many channels": "height=1 width=9 inputs=70 channels=35 outputs=65",
                "selective fusion of one column": (
                    "dtype=float16 height=3 width=1 inputs=5 channels=5 outputs=2 bare=True"
                ),
            }.items()
        },
        emulated={"selective fusion": "batch=2 height=3 width=13 inputs=40 channels=72 outputs=40"},
    ),
}
