"""The kinds of calls that share a cache entry, in words, and sample calls of fewer images for tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .. import modes
from ..backends import ANY_SIZE, Record


def size_class(size: int, factor: int = 4) -> str:
    """Returns the name of a size's class: from a power of ``factor`` up to the next one.

    A symbolic size, which ``torch.compile`` traces, may be in any class.
    """
    least = 1
    while modes.is_known(least * factor <= size):
        least *= factor
    return f"{least}+" if modes.is_known(size < least * factor) else ANY_SIZE


def rows_of(shape: Sequence[int]) -> int:
    """Returns the number of rows of a tensor's shape."""
    return math.prod(shape[:-1])


def gelu_words(approximate: str) -> str:
    """Returns the name of a GELU variant."""
    return "exact" if approximate == "none" else approximate


def images_within(most: int, images: int, elements: int) -> int:
    """Returns the number of images, at least one, that have at most ``most`` elements together."""
    return max(1, min(images, most // max(1, elements // max(1, images))))


_FEWEST_SCORES, _SCORES = 2**22, 2**20  # of an attention, per head, query and key


def scores_within(factor: int) -> int:
    """Returns the number of attention scores that a sample of one image may have, for a factor of a sample.

    A larger image is cut: time and memory of the reference, and of its copies in float64, would grow with the
    square of the pixels.
    """
    return max(_FEWEST_SCORES, _SCORES * factor)


def sampled(
    most: int, *fields: str, times: Callable[[Record], int] = lambda call: 1, written: str | None = None
) -> Callable[[int, Record], Record]:
    """Returns a function that cuts a call to its first images, with ``most`` elements of x together.

    Args:
        most: The number of elements, for a factor of 1.
        fields: The tensors with a batch dimension; a call may lack some.
        times: Returns as how many elements one of x counts.
        written: The tensor that a call with ``inplace`` writes to.
    """

    def sample(factor: int, call: Record) -> Record:
        x, copied = call[0], written if getattr(call, "inplace", False) else None
        if x.ndim < 2:
            return first_images(call, 1, copied=copied)
        known = [field for field in fields if field in call._fields]
        images = images_within(most * factor, x.shape[0], x.numel() * times(call))
        return first_images(call, images, *known, copied=copied)

    return sample


def first_images(call: Record, images: int, *fields: str, copied: str | None = None) -> Record:
    """Returns the record of a call whose tensors ``fields`` are cut to the first images.

    The tensor ``copied``, which the call writes to, is copied, so that measurements leave the caller's alone.
    """
    cut = {field: getattr(call, field)[:images] for field in fields if getattr(call, field) is not None}
    if copied is not None:
        cut[copied] = cut.get(copied, getattr(call, copied)).clone()
    return call._replace(**cut)
