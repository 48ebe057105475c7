"""Model cards: the description that this package's commands save with the weights.

A card comes from a file that anybody may have written, so every field is checked before anything is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cvt_kernels.checks import shown

from .config import CvTConfig, check_images

# The most characters of the name of a class.
_LONGEST_NAME = 1000


class ModelCard(NamedTuple):
    """The description of a model and its images that this package's commands save with the weights.

    Attributes:
        config: The architecture.
        labels: Class names.
        image_size: Pixels of each side, as in :func:`cvt.images.preprocess`.
        crop_fraction: Likewise.
        folders: The names that the classes have in data sets; None if those are the labels.
    """

    config: CvTConfig
    labels: list[str]
    image_size: int
    crop_fraction: float | None = None
    folders: list[str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values that ``torch.load(weights_only=True)`` can read."""
        return {**self._asdict(), "config": dataclasses.asdict(self.config)}

    @classmethod
    def from_dict(cls, content: Any) -> ModelCard:
        """Builds a card from what :meth:`to_dict` returned; TypeError or ValueError for anything else."""
        if not isinstance(content, Mapping):
            raise TypeError(f"card: got {shown(content)}, expected an object of fields")
        missing = [name for name in cls._fields if name not in content and name not in cls._field_defaults]
        unknown = [name for name in content if name not in cls._fields]
        if missing or unknown:
            what = f"no {missing[0]}" if missing else f"the field {shown(unknown[0])}, which is not known"
            raise ValueError(f"card: has {what}")
        card = cls(**{**content, "config": CvTConfig.from_dict(content["config"])})
        check_names("labels", card.labels, card.config.num_classes)
        if card.folders is not None:
            check_names("folders", card.folders, card.config.num_classes)
        check_images(card.image_size, card.crop_fraction)
        return card


def check_names(field: str, names: Any, classes: int) -> None:
    """Raises unless ``names`` is a list of one text of moderate length per class."""
    if not isinstance(names, list):
        raise TypeError(f"got {field} {shown(names)}, expected a list of strings")
    if len(names) != classes:
        raise ValueError(f"got {len(names)} {field} for {classes} classes")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"got {field} {shown(names)}, with {shown(name)}, expected a list of strings")
    check_texts(field, names)


def check_texts(field: str, names: Iterable[str]) -> None:
    """Raises ValueError for a name of a class that is too long or has half of a character."""
    for name in names:
        try:
            name.encode(errors="surrogateescape")  # names of folders may be in any encoding
        except UnicodeEncodeError:
            is_text = False
        else:
            is_text = len(name) <= _LONGEST_NAME
        if not is_text:
            raise ValueError(
                f"got {shown(name)} of {len(name)} characters among the {field}, expected text of at most "
                f"{_LONGEST_NAME}"
            )
