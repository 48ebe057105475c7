"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ... import cards


def _conv_embedding(m: Any) -> Any:
    image = cards.image_of(m, m.inputs, m.height, m.width)
    weight = m.parameter(m.channels, m.inputs, m.kernel, m.kernel, scale=(m.inputs * m.kernel**2) ** -0.5)
    token = m.parameter(m.channels) if m.class_token else None
    padding = max(m.padding, -((min(m.height, m.width) - m.kernel) // 2))  # so that there is an output
    args = (image, weight, m.optional(m.channels), *m.norm(m.channels)[:2])
    return args, {"stride": m.stride, "padding": padding, "eps": m.eps, "class_token": token}


def _conv_embedding_stage(step: cards.Step) -> None:
    """Runs a stage's embedding: of images with channels first, and of channels-last maps."""
    assert step.stage.embedding is not None
    size, in_channels, kernel_size, stride, padding = step.stage.embedding
    image = step.tensor(step.batch, in_channels, *size)
    if in_channels > 3:
        image = image.to(memory_format=torch.channels_last)
    weight = step.tensor(step.channels, in_channels, kernel_size, kernel_size)
    vector = step.tensor(step.channels)
    step.call(
        "conv_embedding", image, weight, vector, vector, vector, stride=stride, padding=padding,
        class_token=vector if step.stage.class_tokens else None,
    )  # fmt: skip


def _token_reduction_stage(step: cards.Step) -> None:
    """Runs a pyramid's reduction of the tokens of keys and values, by a weight in both orders."""
    if step.stage.embedding is None:
        return
    (height, width), channels, ratio, _, _ = step.stage.embedding
    image = step.tensor(step.batch, height, width, channels).permute(0, 3, 1, 2)
    weight = step.tensor(channels, channels, ratio, ratio)
    vector = step.tensor(channels)
    for each in (weight, weight.to(memory_format=torch.channels_last)):
        step.call("conv_embedding", image, each, vector, vector, vector, stride=ratio, padding=0)


def _embedding_in_one(arguments: dict[str, Any]) -> cards.Work:
    image, weight, out = (arguments[f"{name}_ptr"] for name in ("image", "w", "out"))
    return cards.Work(
        cards.bytes_of(image, weight, out), 2 * weight.numel() * image.shape[0] * arguments["tokens"]
    )


def _embedding_of_patches(arguments: dict[str, Any]) -> cards.Work:
    image, weight, out = (arguments[f"{name}_ptr"] for name in ("image", "w", "out"))
    return cards.Work(cards.bytes_of(image, weight, out), 2 * weight.numel() * arguments["rows"])


CARDS = {
    "conv_embedding": cards.Card(
        call=_conv_embedding,
        choices=cards.COMMON
        | cards.GRID
        | cards.NORM
        | {
            "inputs": (1, 2, 3, 5, 8, 17, 64),
            "channels": cards.WIDE,
            "kernel": (1, 2, 3, 4, 7),
            "stride": (1, 2, 3, 4),
            "padding": (0, 1, 2, 3),
            "class_token": cards.BOTH,
            "channels_last": cards.BOTH,
        },
        examples={
            "usual": cards.MAP | cards.K3X3 | {"inputs": 5, "stride": 2, "class_token": True},
            "odd": cards.ODD_MAP | cards.K3X3 | {"inputs": 1},
            "empty": cards.MAP | cards.K3X3 | {"inputs": 3, "batch": 0},
            "many": cards.MANY_PIXELS | cards.K3X3 | {"inputs": 8},
            "tiny": cards.TINY_MAP | cards.K3X3 | {"inputs": 2, "stride": 2, "class_token": True},
            "first stage": cards.worded(
                "batch=2 height=14 width=17 inputs=3 channels=64 kernel=7 stride=4 padding=2 class_token=True"
            ),
            "later stage": cards.MAP | cards.K3X3 | {"inputs": 40, "stride": 2, "class_token": True},
            "bare": cards.MAP | cards.K3X3 | {"inputs": 5, "stride": 2, "bare": True},
            "channels last": cards.MAP | cards.K3X3 | {"inputs": 5, "stride": 2, "channels_last": True},
        },
        without_gradients=("cpu", "triton"),
        normalizes=True,
        wrong={
            "image": ((5, 3, 4), (2, 2, 3, 4), (2, 5, 0, 0)),
            "weight": ((20, 5, 3), (20, 5, 3, 2), (0, 5, 3, 3)),
        },
        stages={
            "conv_embedding": cards.Launches(_conv_embedding_stage),
            "token_reduction": cards.Launches(_token_reduction_stage, of_pyramids=True),
        },
        work={
            "conv_embedding_embed": _embedding_in_one,
            "conv_embedding_patches": _embedding_of_patches,
            "conv_embedding_normalize": functools.partial(cards.once, names="x out"),
        },
        uncounted={"conv_embedding": "bias gamma beta class_token"},
    ),
}
