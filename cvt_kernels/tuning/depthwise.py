"""Depthwise convolutions in float64 on a CPU, as the tuner's oracle computes them.

PyTorch has no kernel for them: it computes one channel after the other, and its threads meet at least once
for each. On a busy machine that takes 8 to 16 ms a channel, which is 16 s for 1024 channels. The sum over the
places of the kernel is the same up to rounding, and its threads meet a few times in all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class AsSums(TorchFunctionMode):
    """A mode in which ``F.conv2d`` is a sum over places where it is depthwise, in float64 and on a CPU.

    Modes around it see nothing of the block.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            result = _as_sum(*args, **kwargs) if function is F.conv2d else None
            return function(*args, **kwargs) if result is None else result


def _as_sum(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Computes ``F.conv2d``, or returns None for other convolutions, wrong ones included."""
    if image.dtype != torch.float64 or weight.dtype != torch.float64 or image.device.type != "cpu":
        return None
    if image.shape[1:2] != (groups,) or weight.shape[:2] != (groups, 1):
        return None
    if any(type(n) is not int for n in (stride, padding, dilation)) or min(stride, dilation, padding + 1) < 1:
        return None
    size = weight.shape[2:]
    padded = F.pad(image, (padding,) * 4)
    height, width = (
        (n - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(padded.shape[2:], size, strict=True)
    )
    if height < 1 or width < 1:
        return None
    out: Tensor | None = None
    for i in range(size[0]):
        rows = padded[:, :, dilation * i :: stride][:, :, :height]
        for j in range(size[1]):
            places, factor = rows[..., dilation * j :: stride][..., :width], weight[:, 0, i, j, None, None]
            out = places * factor if out is None else out.addcmul_(places, factor)
    return out if out is None or bias is None else out + bias[:, None, None]
