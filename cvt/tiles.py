"""Segmentation of images that are too large for the memory, in tiles that overlap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels import checks, resized_argmax

#: Offsets of tiles are multiples of this: the strides of a model fall on the same pixels as in the whole.
GRID = 32

_MOST_OF_BYTES = 256  # classes whose labels are bytes


#: Turns images (B, C, h, w) into logits, as :func:`segment_in_tiles` describes.
Model = Callable[[Tensor], Any]


def segment_in_tiles(
    model: Model,
    images: Tensor,
    *,
    tile: int = 512,
    overlap: int = 128,
    context: int = 32,
    logits: bool = False,
) -> Tensor:
    """Computes the class of every pixel by tiles, with the memory for one tile and one row of logits.

    Of an image that is a single tile, smaller logits are not interpolated in memory to find the classes.

    Neighboring tiles share at least ``overlap`` pixels. At every edge within the image, the outer ``context``
    pixels of a tile only serve its inner ones, and the logits of both tiles are blended linearly in between.

    If no output depends on pixels farther away than ``context``, as in a small network of convolutions, the
    result is the whole image's, up to rounding. (Sizes of images must be multiples of the model's strides.)
    Attention sees a whole tile: each output of a CvT, SegFormer or PVT depends on all pixels of its tile, and
    differs from the whole image's whatever the context is.

    Args:
        model: A module in evaluation mode, or a function. It turns images (B, C, h, w) into logits
            (B, K, h, w), or into what segmenters of transformers return: an output whose ``logits`` may be
            smaller, as SegFormer's are by 4, and are interpolated bilinearly to (B, K, h, w).
        images: (B, C, H, W), on any device; each tile is moved to the module's, if it is one.
        tile: Height and width of the tiles, a multiple of 32. Tiles at the right and at the bottom may be up
            to 31 pixels smaller.
        overlap: What neighbors share, a multiple of 32 and less than ``tile``.
        context: At most half of ``overlap``.
        logits: Whether to return logits, in float32, instead of classes.

    Returns:
        Classes (B, H, W), of uint8 up to 256 classes and else int64, or logits (B, K, H, W), on the device of
        the images.

    Raises:
        TypeError: An argument is of another type, or the model returns no logits.
        ValueError: A size does not fit, the model is in training mode, or returns another shape.
    """
    _check(model, images, logits, tile, overlap, context)
    if not logits and max(images.shape[2:]) <= tile:
        return _classes_of(model, images)
    strips = _strips(model, images, tile, overlap, context)
    if not logits:
        strips = (_labels(strip.argmax(1), strip.shape[1]) for strip in strips)
    return torch.cat(list(strips), dim=-2)


def _strips(model: Model, images: Tensor, tile: int, overlap: int, context: int) -> Iterator[Tensor]:
    """Yields the logits (B, K, h, W) of rows of tiles from top to bottom, float32 on the images' device."""
    height, width = images.shape[2:]
    rows, columns = (_spans(size, tile, overlap) for size in (height, width))
    across = _weights(columns, width, overlap, context)
    pending: Tensor | None = None  # logits below the next row of tiles, to which it adds its own
    following = [top for top, _ in rows[1:]] + [height]
    down = _weights(rows, height, overlap, context)
    for (top, bottom), weights, end in zip(rows, down, following, strict=True):
        strip = _strip(model, images[:, :, top:bottom], columns, across)
        strip *= weights[:, None].to(strip.device)
        if pending is not None:
            strip[:, :, : pending.shape[2]] += pending
        pending = strip[:, :, end - top :].clone()
        yield strip[:, :, : end - top]


def _strip(model: Model, images: Tensor, columns: list[tuple[int, int]], weights: list[Tensor]) -> Tensor:
    """Returns the logits of a row of tiles, blended from left to right."""
    strip: Tensor | None = None
    for (left, right), weight in zip(columns, weights, strict=True):
        out = _logits_of(model, images[..., left:right])
        if strip is None:
            strip = out.new_zeros(*out.shape[:3], images.shape[3])
        strip[..., left:right] += out * weight.to(out.device)
    assert strip is not None
    return strip


@torch.no_grad()
def _logits_of(model: Model, tile: Tensor) -> Tensor:
    """Returns the logits of a tile at its size, in float32."""
    out, size = _answer_of(model, tile), tile.shape[2:]
    if out.shape[2:] != size:
        out = F.interpolate(out.float(), size, mode="bilinear", align_corners=False)
    return out.to(tile.device, torch.float32)


@torch.no_grad()
def _classes_of(model: Model, images: Tensor) -> Tensor:
    """Returns the classes of images that are one tile."""
    out, size = _answer_of(model, images), images.shape[2:]
    labels = out.argmax(1) if out.shape[2:] == size else resized_argmax(out.float(), (size[0], size[1]))
    return _labels(labels, out.shape[1]).to(images.device)


def _answer_of(model: Model, tile: Tensor) -> Tensor:
    """Returns a model's logits; those of a model of transformers may be smaller than the tile."""
    tensors = itertools.chain(model.parameters(), model.buffers()) if isinstance(model, nn.Module) else ()
    answer = model(tile.to(next((tensor.device for tensor in tensors), tile.device)))
    out = getattr(answer, "logits", answer)
    size, expected = tile.shape[2:], f"({tile.shape[0]}, classes, {tile.shape[2]}, {tile.shape[3]})"
    if not isinstance(out, Tensor):
        raise TypeError(
            f"model: returned {type(answer).__name__}, expected logits {expected}, or an output of "
            'transformers with logits; of others give a function, such as lambda images: model(images)["out"]'
        )
    is_resized = out is not answer and out.ndim == 4 and min(out.shape) > 0
    if out.ndim != 4 or len(out) != len(tile) or not (is_resized or out.shape[2:] == size):
        raise ValueError(
            f"model: returned shape {tuple(out.shape)}, expected {expected}; for smaller logits give a "
            "function, such as lambda images: F.interpolate(model(images), images.shape[2:])"
        )
    return out


def _labels(labels: Tensor, classes: int) -> Tensor:
    """Returns labels as bytes where these are enough."""
    return labels.to(torch.uint8) if classes <= _MOST_OF_BYTES else labels


def _spans(size: int, tile: int, overlap: int) -> list[tuple[int, int]]:
    """Returns where tiles begin and end along one side of an image."""
    last = max(0, -(-(size - tile) // GRID) * GRID)
    starts = [*range(0, last, tile - overlap), last]
    return [(start, min(start + tile, size)) for start in starts]


def _weights(spans: list[tuple[int, int]], size: int, overlap: int, context: int) -> list[Tensor]:
    """Returns the weight of every pixel of each tile, along one side; in each place they add up to 1."""
    steps = overlap - 2 * context
    rise = torch.cat((torch.zeros(context), (torch.arange(steps) + 0.5) / max(steps, 1)))
    weights, total = [], torch.zeros(size)
    for start, end in spans:
        weight = torch.ones(end - start)
        if start > 0:
            weight[: len(rise)] *= rise
        if end < size:
            weight[len(weight) - len(rise) :] *= rise.flip(0)
        total[start:end] += weight
        weights.append(weight)
    return [weight / total[start:end] for weight, (start, end) in zip(weights, spans, strict=True)]


def _check(model: Model, images: Tensor, logits: bool, tile: int, overlap: int, context: int) -> None:
    if not callable(model) or isinstance(model, type):
        raise TypeError(f"model: got {checks.shown(model)}, expected a module or a function")
    if isinstance(model, nn.Module) and model.training:
        raise ValueError("model: is in training mode, expected model.eval()")
    checks.check_float_tensor("images", images, "(B, C, H, W)")
    checks.check_rank("images", images, 4, "(B, C, H, W)")
    if images.is_meta or 0 in images.shape:
        raise ValueError(f"images: got shape {tuple(images.shape)} on {images.device}, expected pixels")
    _check_multiple("tile", tile, GRID)
    _check_multiple("overlap", overlap, 0, tile - GRID)
    checks.check_int("context", context, 0, overlap // 2)
    checks.check_flag("logits", logits)


def _check_multiple(name: str, value: int, least: int, most: int | None = None) -> None:
    checks.check_int(name, value, least, most)
    if value % GRID:
        raise ValueError(f"{name}: got {value}, expected a multiple of {GRID}")
