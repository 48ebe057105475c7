"""Words for the kinds of calls that share an entry, and samples of calls with fewer images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..backends import Record


def size_class(size: int, factor: int = 4) -> str:
    """Returns words for all sizes from a power of ``factor`` up to the next one."""
    least = 1
    while least * factor <= size:
        least *= factor
    return f"{least}+"


def rows_of(shape: Sequence[int]) -> int:
    """Returns how many rows a tensor of a shape has."""
    return math.prod(shape[:-1])


def gelu_words(approximate: str) -> str:
    """Returns the word for a variant of GELU."""
    return "exact" if approximate == "none" else approximate


def images_within(most: int, images: int, elements: int) -> int:
    """Returns how many of some images have ``most`` elements together, at least one."""
    return max(1, min(images, most // max(1, elements // max(1, images))))


def sampled(most: int, *fields: str) -> Callable[[int, Record], Record]:
    """Returns what samples calls: of those with images, the first with ``most`` elements of x together.

    Args:
        most: The number, for a factor of 1.
        fields: The tensors that have images, as far as a call has them.
    """

    def sample(factor: int, call: Record) -> Record:
        x = call[0]
        if x.ndim < 2:
            return call
        known = [field for field in fields if field in call._fields]
        return first_images(call, images_within(most * factor, x.shape[0], x.numel()), *known)

    return sample


def first_images(call: Record, images: int, *fields: str, copied: str | None = None) -> Record:
    """Returns the record of a call of the first images only.

    Args:
        call: The record.
        images: Their number.
        fields: The tensors that have images; others stay.
        copied: The one among them that the call changes: a measurement must not change what the caller has.
    """
    cut = {field: getattr(call, field)[:images] for field in fields if getattr(call, field) is not None}
    if copied is not None:
        cut[copied] = cut[copied].clone()
    return call._replace(**cut)
