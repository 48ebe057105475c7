"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

import torch

from .. import cards


def _reduction_linear(m: Any) -> Any:
    x = m.activation(m.batch, m.height * m.width, m.channels)
    kernel = min(m.kernel, m.height, m.width)
    weight = m.parameter(m.channels, m.channels, kernel, kernel, scale=(m.channels * kernel**2) ** -0.5)
    if m.channels_last:
        weight = weight.detach().contiguous(memory_format=torch.channels_last)
        weight.requires_grad_(m.gradient == "all")
    layers = tuple(m.linear(m.outputs, m.channels) for _ in range(m.layers))
    vectors = m.optional(m.channels), *m.norm(m.channels)[:2]
    return (x, (m.height, m.width), weight, *vectors, layers), {"eps": m.eps}


def _reduction_linear_stage(step: cards.Step) -> None:
    """Runs the tokens of keys and values of a pyramid's stage: of a live model, then of a frozen one."""
    if step.stage.embedding is None:
        return
    grid, channels, ratio, _, _ = step.stage.embedding
    x, vector = step.tensor(step.batch, grid[0] * grid[1], channels), step.tensor(channels)
    weight, key = step.tensor(channels, channels, ratio, ratio), step.tensor(channels, channels)
    step.call("reduction_linear", x, grid, weight, vector, vector, vector, [(key, vector)] * 2)
    packed, both = weight.to(memory_format=torch.channels_last), step.tensor(2 * channels, channels)
    layers = [(both, step.tensor(2 * channels))]
    step.call("reduction_linear", x, grid, packed, vector, vector, vector, layers)


def _reduction_linear_work(arguments: dict[str, Any]) -> cards.Work:
    x, weight, layers, outs = (arguments[name] for name in ("image_ptr", "w_ptr", "linear_ptrs", "out_ptrs"))
    rows = arguments["rows"]
    flops = 2 * rows * (weight.numel() + sum(each.numel() for each in layers))
    return cards.Work(cards.bytes_of(x, weight, layers, outs), flops)


CARDS = {
    "reduction_linear": cards.Card(
        call=_reduction_linear,
        choices=cards.COMMON
        | cards.GRID
        | cards.NORM
        | cards.OUTPUTS
        | {"channels": cards.WIDE, "channels_last": cards.BOTH}
        | {"kernel": (1, 2, 3, 4, 7), "layers": (2, 1, 3)},
        examples=cards.of_maps(
            *("bare=True", "channels_last=True"),
            odd="kernel=1 outputs=5",
            many="kernel=2",
            tiny="kernel=2 outputs=3",
            kernel=3,
            outputs=33,
        ),
        without_gradients=("triton",),
        normalizes=True,
        needed={"triton": {"dtype": "float16"}},
        stages={"reduction_linear": cards.Launches(_reduction_linear_stage, of_pyramids=True)},
        work={"reduction_linear": _reduction_linear_work},
        uncounted={"reduction_linear": "bias gamma beta linear_bias"},
        accesses={
            # Two of the five rows of "reduction" are in no window.
            name: cards.Accesses("reduction_linear", f"batch=2 {words}", is_dense=name != "reduction")
            for name, words in {
                "reduction": "dtype=bfloat16 height=5 width=9 kernel=3 channels=13 outputs=7",
                "reduction of many channels": (
                    "dtype=float16 height=4 width=6 kernel=2 channels=129 outputs=97"
                ),
                "reduction by a packed weight": (
                    "dtype=float16 height=9 width=6 kernel=3 channels=13 outputs=65 channels_last=True"
                ),
            }.items()
        },
        emulated={
            "reduction": "dtype=bfloat16 batch=2 height=14 width=17 kernel=4 channels=128 outputs=129",
            "reduction by a packed weight": (
                "dtype=float16 batch=2 height=9 width=17 kernel=2 channels=97 outputs=48 channels_last=True"
            ),
        },
    )
}
