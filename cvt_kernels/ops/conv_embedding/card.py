"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import cards


def _conv_embedding(m: Any) -> Any:
    image = cards.image_of(m, m.inputs, m.height, m.width)
    weight = m.parameter(m.channels, m.inputs, m.kernel, m.kernel, scale=(m.inputs * m.kernel**2) ** -0.5)
    token = m.parameter(m.channels) if m.class_token else None
    padding = max(m.padding, -((min(m.height, m.width) - m.kernel) // 2))  # so that there is an output
    args = (image, weight, m.optional(m.channels), *m.norm(m.channels)[:2])
    rows, columns = ((size + 2 * padding - m.kernel) // m.stride + 1 for size in (m.height, m.width))
    positions = m.parameter(rows * columns + m.class_token, m.channels) if m.positions else None
    settings = {"stride": m.stride, "padding": padding, "eps": m.eps}
    return args, settings | {"class_token": token, "positions": positions}


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


#: Channels of a stage of PVT → channels of what it embeds.
_PVT = {64: 3, 128: 64, 320: 128, 512: 320}


def _patch_embedding_stage(step: cards.Step) -> None:
    """Runs the embedding of a PVT's stage, with positions, by a weight in both orders."""
    reduction = step.stage.embedding
    channels = step.channels // 4 if reduction is None else reduction.in_channels
    if channels not in _PVT:
        return
    inputs, (height, width) = _PVT[channels], step.stage.grid
    size, class_tokens = 4 if inputs == 3 else 2, int(reduction is None)
    image = step.tensor(step.batch, inputs, size * height, size * width)
    if inputs > 3:
        image = image.to(memory_format=torch.channels_last)
    weight, vector = step.tensor(channels, inputs, size, size), step.tensor(channels)
    positions = step.tensor(height * width + class_tokens, channels)
    for each in (weight, weight.to(memory_format=torch.channels_last)):
        step.call(
            "conv_embedding", image, each, vector, vector, vector, stride=size, padding=0,
            class_token=vector if class_tokens else None, positions=positions,
        )  # fmt: skip


def _embedding(arguments: dict[str, Any]) -> cards.Work:
    image, weight, *others = (arguments[f"{name}_ptr"] for name in ("image", "w", "positions", "out"))
    rows = arguments["rows"] if "rows" in arguments else image.shape[0] * arguments["tokens"]
    return cards.Work(cards.bytes_of(image, weight, *others), 2 * weight.numel() * rows)


_ADDED = {"class_token": True, "positions": True}
_OF_PATCHES = "dtype=float16 height=9 width=6 inputs=5 channels=13 kernel=3 stride=3 padding=0"
_OF_IMAGES = "dtype=bfloat16 height=8 width=12 inputs=3 channels=5 kernel=4 stride=4 padding=0"
_OF_MAPS = "dtype=float32 height=5 width=3 inputs=40 channels=13 kernel=3 stride=2 padding=1"

CARDS = {
    "conv_embedding": cards.Card(
        call=_conv_embedding,
        choices=cards.COMMON
        | cards.IMAGE
        | cards.NORM
        | {"kernel": (1, 2, 3, 4, 7), "stride": (1, 2, 3, 4), "padding": (0, 1, 2, 3)}
        | dict.fromkeys(("class_token", "positions"), cards.BOTH),
        examples={
            "usual": cards.MAP | cards.K3X3 | _ADDED | {"inputs": 5, "stride": 2},
            "odd": cards.ODD_MAP | cards.K3X3 | {"inputs": 1},
            "empty": cards.MAP | cards.K3X3 | {"inputs": 3, "batch": 0},
            "many": cards.MANY_PIXELS | cards.K3X3 | {"inputs": 8},
            "tiny": cards.TINY_MAP | cards.K3X3 | {"inputs": 2, "stride": 2, "class_token": True},
            "first stage": cards.worded(
                "batch=2 height=14 width=17 inputs=3 channels=64 kernel=7 stride=4 padding=2 class_token=True"
            ),
            "later stage": cards.MAP | cards.K3X3 | {"inputs": 40, "stride": 2, "class_token": True},
            "positions": cards.MAP | cards.K3X3 | {"inputs": 5, "stride": 2, "positions": True},
            "patches": cards.worded(
                "batch=2 height=6 width=8 channels=20 inputs=5 kernel=2 stride=2 padding=0 class_token=True "
                "positions=True channels_last=True"
            ),
            "bare": cards.MAP | cards.K3X3 | {"inputs": 5, "stride": 2, "bare": True},
            "channels last": cards.MAP | cards.K3X3 | {"inputs": 5, "stride": 2, "channels_last": True},
        },
        without_gradients=("cpu", "triton"),
        normalizes=True,
        wrong={
            "image": ((5, 3, 4), (2, 2, 3, 4), (2, 5, 0, 0)),
            "weight": ((20, 5, 3), (20, 5, 3, 2), (0, 5, 3, 3)),
            "positions": ((4, 20), (5, 21), (1, 5, 20), (20,)),
        },
        stages={
            "conv_embedding": cards.Launches(_conv_embedding_stage),
            "token_reduction": cards.Launches(_token_reduction_stage, of_pyramids=True),
            "patch_embedding": cards.Launches(_patch_embedding_stage, of_pyramids=True),
        },
        work={
            "conv_embedding_embed": _embedding,
            "conv_embedding_patches": _embedding,
            "conv_embedding_normalize": functools.partial(cards.once, names="x positions out"),
        },
        uncounted={"conv_embedding": "bias gamma beta class_token"},
        accesses={
            name: cards.Accesses(
                f"conv_embedding_{kernel}", f"batch=2 positions=True class_token=True {words}"
            )
            for name, kernel, words in (
                ("patches with positions", "patches", f"{_OF_PATCHES} channels_last=True"),
                ("embedding with positions", "embed", _OF_IMAGES),
                ("embedding of many channels with positions", "normalize", _OF_MAPS),
            )
        },
        emulated={
            "embedding with positions": (
                "batch=2 height=29 width=31 inputs=3 channels=64 kernel=4 stride=4 padding=0 positions=True"
            ),
            "embedding of maps with positions": (
                "batch=2 height=15 width=14 inputs=64 channels=96 kernel=3 stride=2 padding=1 "
                "class_token=True positions=True"
            ),
            "patches with positions": (
                "batch=3 height=14 width=15 inputs=40 channels=136 kernel=2 stride=2 padding=0 "
                "class_token=True positions=True channels_last=True"
            ),
        },
    )
}
