"""The head of a segmentation model: maps of several sizes to the logits of every pixel of the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ... import checks
from ...backends import Record
from ...declaration import extension_kernels, operator, triton_kernels
from ..cost_classes import first_images, images_within, size_class

_MAP, _WEIGHT, _CLASSIFIER = "(batch, C, height, width)", "(channels, C)", "(classes, channels)"
_SAMPLE = 2**16  # numbers of the sum


def _check(call: Any) -> None:
    x, weight, bias, others, classifier_weight, classifier_bias = call
    _check_map("x", x, x)
    checks.check_dimensions("weight", weight, 2, _WEIGHT)
    channels = weight.shape[0]
    _check_product("weight", weight, x, channels)
    for i, pair in enumerate(others):
        name = f"others[{i}]"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{name}: got {checks.shown(pair)}, expected a pair (map, weight)")
        _check_map(name, pair[0], x)
        _check_product(f"the weight of {name}", pair[1], pair[0], channels)
    checks.check_dimensions("classifier_weight", classifier_weight, 2, _CLASSIFIER)
    classes = classifier_weight.shape[0]
    checks.check_tensor_like("classifier_weight", classifier_weight, (classes, channels), _CLASSIFIER, x)
    if channels < 1 or classes < 1:
        raise ValueError(f"classifier_weight: got shape {classes, channels}, expected classes and channels")
    checks.check_vector("bias", bias, channels, x)
    checks.check_vector("classifier_bias", classifier_bias, classes, x, "(classes,)")


def _check_map(name: str, image: Tensor, x: Tensor) -> None:
    checks.check_dimensions(name, image, 4, _MAP)
    if image.shape[0] != x.shape[0] or 0 in image.shape[1:]:
        raise ValueError(f"{name}: got shape {tuple(image.shape)}, expected {_MAP} of {x.shape[0]} images")
    checks.check_like(name, image, "x", x)


def _check_product(name: str, weight: Tensor, image: Tensor, channels: int) -> None:
    checks.check_tensor_like(name, weight, (channels, image.shape[1]), _WEIGHT, image)


def _cost_class(call: Record) -> str:
    batch, inputs, height, width = call.x.shape
    classes, channels = call.classifier_weight.shape
    words = f"{size_class(batch)} images of {size_class(height * width)} pixels, {inputs} to {channels} "
    words += f"channels and {classes} classes"
    for image, _ in call.others:
        words += f", {image.shape[1]} channels of {size_class(image.shape[2] * image.shape[3])} pixels"
    return words + (", channels last" if call.x.stride(1) == 1 else "")


def _sample(factor: int, call: Record) -> Record:
    batch, _, height, width = call.x.shape
    elements = batch * height * width * call.weight.shape[0]
    images = images_within(_SAMPLE * factor, batch, elements)
    others = tuple((image[:images], weight) for image, weight in call.others)
    return first_images(call._replace(others=others), images, "x")


@operator(
    backends={"triton": triton_kernels("triton"), "cpu": extension_kernels("cpu")},
    cost_class=_cost_class,
    sample=_sample,
    check=_check,
    sequences={"others": "a sequence of pairs (map, weight)"},
)
def segmentation_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    others: Sequence[tuple[Tensor, Tensor]],
    classifier_weight: Tensor,
    classifier_bias: Tensor | None = None,
) -> Tensor:
    """Computes classifier(relu(weight · x + bias + Σ resize(weightᵢ · mapᵢ))) for every pixel of ``x``.

    The all-MLP decode head of SegFormer (Xie et al. 2021, section 3.2), its layers before ReLU multiplied to
    one per map; upstream ``SegformerDecodeHead`` of transformers. ``resize`` is ``F.interpolate``, bilinear
    with ``align_corners=False``.

    Args:
        x: The first map ``(B, C, H, W)``, channels last or not; float16, bfloat16, float32 or float64.
        weight: ``(D, C)``.
        bias: ``(D,)``, or None for 0.
        others: Pairs of a map ``(B, Cᵢ, Hᵢ, Wᵢ)`` and its weight ``(D, Cᵢ)``.
        classifier_weight: ``(L, D)``.
        classifier_bias: ``(L,)``, or None for 0.

    Returns:
        The logits as contiguous tokens ``(B, H·W, L)`` in row-major order, of the
        dtype of ``x`` or, under autocast, of a linear layer.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    total = F.conv2d(x, weight[:, :, None, None], bias)
    for image, other in others:
        product = F.conv2d(image, other[:, :, None, None])
        total = total + F.interpolate(product, total.shape[2:], mode="bilinear", align_corners=False)
    return F.linear(total.relu().flatten(2).transpose(1, 2), classifier_weight, classifier_bias)
