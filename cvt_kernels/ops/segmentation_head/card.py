"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import cards


def _segmentation_head(m: Any) -> Any:
    x = cards.image_of(m, m.inputs, m.height, m.width)
    others = []
    for i in range(m.others):
        sizes = [(-(-size // 2), -(-size // 3), size, 2 * size + 1)[i] for size in (m.height, m.width)]
        inputs = m.inputs + 3 * i
        others.append((cards.image_of(m, inputs, *sizes), m.matrix(m.channels, inputs)))
    args = (x, m.matrix(m.channels, m.inputs), m.optional(m.channels), tuple(others))
    return (*args, *m.linear(m.outputs, m.channels)), {}


def _segmentation_head_stage(step: cards.Step) -> None:
    """Runs SegFormer's decode head for 150 classes, with maps of a half, a quarter and an eighth."""
    if not step.stage.decoder:
        return
    assert step.stage.embedding is not None
    (height, width), inputs, channels = step.stage.grid, step.stage.embedding.in_channels, step.stage.decoder

    def map_and_weight(shift: int) -> tuple[Tensor, Tensor]:
        size = -(-height >> shift), -(-width >> shift)
        image = step.tensor(step.batch, *size, inputs << shift).permute(0, 3, 1, 2)
        return image, step.tensor(channels, inputs << shift)

    first, *others = map(map_and_weight, range(4))
    classifier = step.tensor(150, channels), step.tensor(150)
    step.call("segmentation_head", *first, step.tensor(channels), tuple(others), *classifier)


def _segmentation_head_work(arguments: dict[str, Any]) -> cards.Work:
    x, spec = arguments["x_ptr"], arguments["SPEC"]
    tensors = [arguments[f"{name}_ptr"] for name in ("w", "classifier", "out")]
    flops = 2 * x.numel() // spec.inputs * spec.channels * (spec.inputs + spec.classes)
    is_exact = x.dtype == torch.float32 and spec.precision == "ieee"
    return cards.Work(cards.bytes_of(x, arguments["map_ptrs"], tensors), 0 if is_exact else flops)


CARDS = {
    "segmentation_head": cards.Card(
        call=_segmentation_head,
        choices=cards.COMMON | cards.IMAGE | cards.OUTPUTS | {"others": (3, 2, 1, 0, 4)},
        examples=cards.of_maps(
            *("bare=True", "others=0", "channels_last=True"),
            odd="inputs=1 outputs=5",
            many="inputs=8",
            tiny="inputs=2 outputs=4",
            inputs=9,
            outputs=33,
        ),
        without_gradients=("cpu", "triton"),
        wrong={
            "x": ((9, 3, 4), (2, 9, 0, 4)),
            "weight": ((20,), (20, 2), (20, 9, 1)),
            "classifier_weight": ((20,), (33, 3), (0, 20)),
        },
        stages={"segmentation_head": cards.Launches(_segmentation_head_stage, of_pyramids=True)},
        work={"segmentation_head": _segmentation_head_work},
        uncounted={"segmentation_head": "bias classifier_bias"},
        accesses={
            name: cards.Accesses("segmentation_head", f"batch=2 {words}")
            for name, words in {
                "segmentation head": (
                    "dtype=bfloat16 layout=sliced height=5 width=7 inputs=5 channels=13 outputs=6"
                ),
                "segmentation head of many classes": (
                    "height=3 width=2 inputs=35 channels=40 outputs=301 others=1"
                ),
                "segmentation head of one map": (
                    "dtype=float16 height=1 width=19 inputs=5 channels=5 outputs=2 others=0"
                ),
            }.items()
        },
        emulated={
            "segmentation head": "batch=2 height=9 width=33 inputs=40 channels=72 outputs=150 others=3"
        },
    )
}
