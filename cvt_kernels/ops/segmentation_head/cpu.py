"""The segmentation head on a CPU by the compiled extension (csrc), for inference.

The products of the other maps are computed at their own sizes, in float32, in memory that stays for the next
call. Then up to 112 pixels of a row pass through all the rest while they are in the cache: the product of the
first map, the interpolated others, ReLU and the classifier. Only the logits are written. Sums and products
are in float32; only products of bfloat16 use the CPU's instructions for pairs, where it has them. Results are
bitwise deterministic, whatever the number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import checks, machine
from ...backends import Record
from .. import weight_cache

machine.load_extension()
_ops = torch.ops.cvt_kernels

_MOST_SIDE = 2**20  # kMostSide in csrc/segmentation_head/cpu_loops.h


@torch.library.register_fake("cvt_kernels::segmentation_head_packed")
def _(
    maps: list[Tensor], packed: list[Tensor], bias: Tensor, classifier: Tensor, classifier_bias: Tensor
) -> Tensor:
    return maps[0].new_empty(maps[0].shape[0], maps[0].shape[1] * maps[0].shape[2], classifier_bias.shape[0])


def why_unsupported(call: Record) -> str | None:
    """Returns why these kernels cannot serve a call, or None."""
    x, *others = call
    if any(max(image.shape[2:]) > _MOST_SIDE for image in (x, *(image for image, _ in call.others))):
        return f"serves heights and widths of up to {_MOST_SIDE}"
    return weight_cache.why_unpackable(x, *checks.tensors_of(others))


def segmentation_head(call: Record) -> Tensor:
    """Computes ``cvt_kernels.segmentation_head`` for checked arguments."""
    x, weight, bias, others, classifier_weight, classifier_bias = call
    weights = weight, *(other for _, other in others)

    def pack() -> tuple[Any, ...]:
        layers = [_ops.pack_linear.default(each.detach()) for each in weights]
        classifier = _ops.pack_linear.default(classifier_weight.detach())
        biases = [
            weight_cache.vector(given, len(of))
            for given, of in ((bias, weight), (classifier_bias, classifier_weight))
        ]
        return layers, biases[0], classifier, biases[1]

    tensors = (*weights[1:], bias, classifier_weight, classifier_bias)
    packed = weight_cache.packed(weight, "segmentation head", pack, tensors)
    maps = [image.permute(0, 2, 3, 1) for image in (x, *(image for image, _ in others))]
    return _ops.segmentation_head_packed.default(maps, *packed)
