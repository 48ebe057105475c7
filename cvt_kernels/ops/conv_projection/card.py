"""The card of an operator; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...launch.records import Sliding
from ...records import ConvBatchNorm
from .. import cards

PROJECTION = cards.GRID | cards.CONV | {
    "channels": cards.WIDE, "class_token": cards.BOTH, "branches": (1, 2, 3), "summands": (1, 2, 3),
    "mixed": cards.BOTH, "statistics": ("running", "none", "averaged"), **cards.NORM,
}  # fmt: skip


def _convs(m: Any) -> tuple[Any, ...]:
    """Returns the branches: the second and third of the next stride, summands of larger kernels."""
    branches = []
    # PyTorch 2.13 crashes in 16 bits where a kernel of 1×1 or an image of width 1 has a dilation.
    dilation = 1 if m.kernel == 1 or m.width == 1 else m.dilation
    reach = dilation * (m.kernel - 1) + 1
    padding = max(m.padding, -((min(m.height, m.width) - reach) // 2))  # so that there is an output
    for i in range(m.branches):
        parts = tuple(
            m.conv(m.channels, m.kernel + 2 * j, m.stride + (i > 0), padding + dilation * j, dilation)
            for j in range(m.summands)
        )
        branches.append(parts[0] if len(parts) == 1 else parts)
    return tuple(branches)


def _conv_projection(m: Any) -> Any:
    tokens = m.height * m.width + m.class_token
    x = m.activation(m.batch, tokens, m.channels)
    return (x, (m.height, m.width), _convs(m)), {"training": m.training}


def conv_batch_norm(step: cards.Step, stride: int) -> ConvBatchNorm:
    """Returns a 3×3 convolution with BatchNorm, which in training has parameters in float32."""

    def vector() -> Tensor:
        return step.tensor(step.channels, dtype=torch.float32 if step.training else None)

    weight, count = step.tensor(step.channels, 1, 3, 3), step.tensor(dtype=torch.int64)
    mean, variance = (vector().detach() for _ in range(2))
    return ConvBatchNorm(weight, vector(), vector(), mean, variance, count, stride, 1, 1)


def _conv_projection_stage(step: cards.Step) -> None:
    """Runs a CvT block's projection (q has stride 1, k and v stride 2).

    Training is under autocast, with BatchNorm's parameters in float32; inference has all in ``dtype``.
    """
    convs = [conv_batch_norm(step, stride) for stride in (1, 2, 2)]
    step.call("conv_projection", step.x(), step.stage.grid, convs, training=step.training)


def _spatial_bytes(arguments: dict[str, Any], tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of tensors (B, T, C) without their class tokens."""
    tokens = arguments["CLASS_TOKEN"]
    return sum(cards.bytes_of(tensor) // tensor.shape[1] * (tensor.shape[1] - tokens) for tensor in tensors)


def _inputs_bytes(arguments: dict[str, Any]) -> int:
    """Returns the bytes of x and, in the backward, of the gradients of the outputs, without class tokens."""
    return _spatial_bytes(arguments, [arguments["x_ptr"], *cards.each_once(arguments.get("dy_ptrs", ()))])


def _projection_forward(arguments: dict[str, Any]) -> cards.Work:
    statistics = arguments.get("statistics_ptr")  # of a LayerNorm that it applies
    return cards.Work(cards.bytes_of(arguments["x_ptr"], cards.each_once(arguments["y_ptrs"]), statistics))


def _projection_sums(arguments: dict[str, Any]) -> cards.Work:
    """Describes sums over outputs, for the statistics of the batch and for the backward."""
    sums = [arguments.get("partial_ptr"), arguments.get("counts_ptr")]
    return cards.Work(_inputs_bytes(arguments) + cards.bytes_of(sums))


def _projection_backward_convolution(arguments: dict[str, Any]) -> cards.Work:
    written = cards.bytes_of(arguments["dconv_ptrs"], arguments["partial_ptr"])
    return cards.Work(_inputs_bytes(arguments) + written)


def _projection_backward_input(arguments: dict[str, Any]) -> cards.Work:
    dys = cards.each_once(arguments["dy_ptrs"])
    class_tokens = cards.bytes_of(dys) - _spatial_bytes(arguments, dys)  # whose gradients are copied
    return cards.Work(cards.bytes_of(arguments["dx_ptr"], arguments["dconv_ptrs"]) + class_tokens)


def _sweep(kernel: str, stages: tuple[int, ...], **values: tuple[int, ...]) -> cards.Sweep:
    """Returns the configurations of a sliding-row kernel."""
    tried = {"pairs": (1, 2, 4, 8), "channels": (64,), "registers": (128, 168), "resident_warps": (8, 12, 16)}
    name = f"conv_projection_sliding_{kernel}"
    return cards.Sweep("projection", stages, name, Sliding, tried | values, training=kernel != "fwd")


def _accesses(words: str, *, training: bool = False) -> cards.Accesses:
    sliding = ("fwd", "bwd_sums", "bwd_conv", "bwd_input", *(("stats",) if training else ()))
    kernels = [*(f"conv_projection_sliding_{kernel}" for kernel in sliding), "sum_regions"]
    kernels += ["merge_stats"] if training else []
    settings = f"kernel=3 padding=1 batch=2 class_token=True gradient=all training={training} {words}"
    return cards.Accesses(" ".join(kernels), settings)


CARDS = {
    "conv_projection": cards.Card(
        call=_conv_projection,
        choices=cards.COMMON | PROJECTION | {"training": cards.BOTH},
        examples={
            "usual": cards.MAP | cards.K3X3 | {"branches": 2, "class_token": True},
            "odd": cards.ODD_MAP | cards.K3X3,
            "empty": cards.MAP | cards.K3X3 | {"batch": 0},
            "many": cards.MANY_PIXELS | cards.K3X3 | {"branches": 2, "class_token": True},
            "tiny": cards.TINY_MAP | cards.K3X3 | {"branches": 2, "class_token": True},
            "5x5": cards.MAP | {"kernel": 5, "padding": 2, "stride": 2, "bare": True},
            "sums": cards.MAP | cards.K3X3 | {"summands": 2, "branches": 2},
            "training": cards.MAP | cards.K3X3 | {"branches": 2, "class_token": True, "training": True},
            "mixed": cards.MAP | cards.K3X3 | {"mixed": True},
        },
        stages={"conv_projection": cards.Launches(_conv_projection_stage)},
        work={
            "conv_projection_fwd": _projection_forward,
            "conv_projection_stats": _projection_sums,
            "conv_projection_bwd_sums": _projection_sums,
            "conv_projection_bwd_conv": _projection_backward_convolution,
            "conv_projection_bwd_input": _projection_backward_input,
            "merge_stats": functools.partial(cards.once, names="partial counts mean var"),
            "sum_regions": functools.partial(cards.once, names="partial sum"),
        },
        uncounted={
            "conv_projection": "w gamma beta mean var sums",
            "merge_stats": "running_mean running_var tracked",
        },
        accesses={
            "sliding, frozen": _accesses("height=3 width=2 channels=3 branches=2"),
            "sliding": _accesses("height=5 width=3 channels=5 branches=2 layout=chunk", training=True),
            "sliding of pairs": _accesses("height=3 width=5 channels=6 dtype=bfloat16", training=True),
            "sliding at one pixel": _accesses(
                "height=1 width=1 channels=5 branches=2 batch=5", training=True
            ),
        },
        emulated={
            name: f"kernel=3 padding=1 class_token=True {words}"
            for name, words in {
                "projection": "batch=2 height=14 width=14 channels=64 branches=3",
                "projection, training": (
                    "training=True gradient=all batch=3 height=14 width=13 channels=40 branches=3"
                ),
            }.items()
        },
        sweeps={
            "conv_projection fwd": _sweep("fwd", (1,)),
            "conv_projection bwd_conv": _sweep(
                "bwd_conv", (1, 2), registers=(168, 255), resident_warps=(4, 8)
            ),
            "conv_projection bwd_input": _sweep("bwd_input", ()),
        },
        found=("values=infinite gradient=all seed=0",),
    )
}
