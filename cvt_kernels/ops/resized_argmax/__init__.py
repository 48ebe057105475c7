"""The class of every pixel from logits at a fraction of the image's size, as of segmentation models."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks, modes
from ...backends import Record
from ...declaration import extension_kernels, operator, triton_kernels
from ..cost_classes import first_images, images_within, size_class

_SHAPE = "(batch, classes, height, width)"
_SAMPLE = 2**18  # numbers of the resized logits


def _check(call: Any) -> None:
    checks.check_dimensions("logits", call.logits, 4, _SHAPE)
    if 0 in call.logits.shape[1:]:
        raise ValueError(f"logits: got shape {tuple(call.logits.shape)}, expected classes and pixels")
    checks.check_grid("size", call.size)
    if min(call.size) < 1:
        raise ValueError(f"size: got {call.size}, expected a height and a width of at least 1")
    if modes.wants_gradient(call.logits):
        raise ValueError("logits: wants a gradient, expected logits.detach(), since argmax has none")


def _cost_class(call: Record) -> str:
    batch, classes, height, width = call.logits.shape
    words = f"{size_class(batch)} images of {size_class(height * width)} pixels, {classes} classes"
    words += f", to {size_class(call.size[0] * call.size[1])} pixels"
    return words + (", channels last" if call.logits.stride(1) == 1 else "")


def _sample(factor: int, call: Record) -> Record:
    batch, classes = call.logits.shape[:2]
    images = images_within(_SAMPLE * factor, batch, batch * classes * call.size[0] * call.size[1])
    return first_images(call, images, "logits")


def _resized(logits: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(logits, size, mode="bilinear", align_corners=False)


def _score(call: Record, outputs: list[Tensor]) -> list[Tensor]:
    """Returns the exact resized logit of each pixel's class: the closer to the largest, the better."""
    (classes,) = outputs
    exact = _resized(call.logits.detach().double(), call.size)
    return [exact.gather(1, classes[:, None])[:, 0].to(call.logits.dtype)]


@operator(
    backends={"triton": triton_kernels("triton"), "cpu": extension_kernels("cpu")},
    cost_class=_cost_class,
    sample=_sample,
    check=_check,
    score=_score,
)
def resized_argmax(logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns the class of every pixel of logits that are resized: argmax(resize(logits)).

    It turns the small logits of SegFormer and other models into a class map, as upstream
    ``post_process_semantic_segmentation`` of transformers does, without the resized logits in memory.
    ``resize`` is ``F.interpolate``, bilinear with ``align_corners=False``.

    Args:
        logits: ``(B, K, h, w)``, in any layout; fastest with channels last. float16, bfloat16, float32 or
            float64.
        size: ``(H, W)``.

    Returns:
        The index of the largest class of each pixel ``(B, H, W)``, int64 as of ``torch.argmax``: the first of
        those that are equal, and the first NaN if there is one. Kernels interpolate in float32, also in half
        precision, where rounded logits of PyTorch's composition may be equal.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape, a size below 1, or a gradient is wanted, which argmax does not have.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    return _resized(logits, size).argmax(1)
