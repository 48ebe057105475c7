"""The models and operators that are compiled, and the launches of Triton kernels that each stage makes.

The operators run on meta tensors, and their launches are recorded instead of started.
"""

from __future__ import annotations

import functools

import torch

from cvt.config import PRESETS
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops.cards import Embedding, Launches, Stage, Step, all_cards

from .. import pyramids
from ..pyramids import image_size_of

#: Of each stage: a block of ``RATIOS`` squared tokens makes one of keys and values.
RATIOS, HEADS = (8, 4, 2, 1), (1, 2, 5, 8)
#: SegFormer-B1 to B5 have the same Mix-FFNs, as have PVT v2-B2 to B4.
PYRAMIDS = {name: pyramids.PYRAMIDS[name] for name in ("segformer_b0", "segformer_b5", "pvt_v2_b2")}


def is_of(operator: str, model: str) -> bool:
    """Returns whether a model has an operator."""
    return _LAUNCHES[operator].of_pyramids == (model in PYRAMIDS)


def kernel_name(function: str) -> str:
    """Returns the name of a kernel of this project by that of its function in Triton."""
    return function.strip("_").removesuffix("_kernel")


def stages_of(model: str, image_size: int | None = None) -> list[Stage]:
    """Returns the stages of a model of ``PRESETS`` or ``PYRAMIDS``, for square images, by default its own."""
    shapes, side = [], image_size or image_size_of(model)
    if model in PRESETS:
        height = width = side
        for stage in PRESETS[model].stages:
            convolution = stage.in_chans, stage.patch_size, stage.patch_stride, stage.patch_padding
            embedding = Embedding((height, width), *convolution)
            height, width = stage.grid(height, width)
            if not height > 0:
                raise ValueError(f"image_size: got {image_size}, of which {model} has no tokens")
            shapes.append(Stage((height, width), stage.embed_dim, int(stage.cls_token), embedding))
        return shapes
    sizes = PYRAMIDS[model].sizes
    decoder, widths = sizes.get("decoder_hidden_size", 0), sizes["hidden_sizes"]
    hidden = (width * ratio for width, ratio in zip(widths, sizes["mlp_ratios"], strict=True))
    for i, (channels, between, ratio, heads) in enumerate(zip(widths, hidden, RATIOS, HEADS, strict=True)):
        rows = -(-side // (4 << i))
        grid = rows, rows
        reduction = None if ratio == 1 else Embedding(grid, channels, ratio, ratio, 0)
        shapes.append(Stage(grid, between, 0, reduction, decoder, heads))
        decoder = 0  # of the first stage's grid
    return shapes


def _recorded(
    launches: Launches,
    stage: Stage,
    dtype: torch.dtype,
    chip: launching.Chip,
    *,
    batch: int = 256,
    training: bool = True,
    device: str = "meta",
) -> list[launching.Launch]:
    """Returns the launches of a stage, planned for a GPU; they can be started on tensors of a ``device``."""
    with launching.recorded_launches(chip) as recorded, torch.set_grad_enabled(training):
        launches.run(Step(stage, dtype, batch, training, device))
    return recorded


_LAUNCHES = {
    name: launches
    for operator, card in all_cards().items()
    if {"triton", "gluon"} & backends.implementations[operator].keys()
    for name, launches in card.stages.items()
}
#: What the cards of operators with Triton kernels launch, by name.
TRITON_OPERATORS = {name: functools.partial(_recorded, launches) for name, launches in _LAUNCHES.items()}
