"""Detects replaced modules, parameters and buffers of a model, at every call."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


class Structure:
    """A snapshot of the modules, parameters and buffers of a module, for comparison with later ones.

    It refers to inner modules, but not to the owner, which it must not keep alive. Every call compares
    hundreds of members, so the loops run in C.
    """

    def __init__(self, owner: nn.Module, modules: Sequence[nn.Module]):
        self.modules = modules
        self.spaces = [vars(module) for module in modules]
        members = [m for each in (owner, *modules) for m in (each._modules, each._parameters, each._buffers)]
        self._filled = [each for each in members if each]
        self._empty = [each for each in members if not each]
        classes = {cls for each in (owner, *modules) for cls in type(each).__mro__}
        self._classes = [cls for cls in classes if hasattr(cls, "forward")]
        self._found = self._find()

    def _find(self) -> tuple[list[Any], ...]:
        members = itertools.chain.from_iterable(map(_values_of, self._filled))
        return [*map(id, members)], [*map(type, self.modules)], [*map(_forward_of, self._classes)]

    def is_changed(self) -> bool:
        """Returns whether a member, a class or the forward of a class has been replaced."""
        return any(self._empty) or self._find() != self._found

    def is_training(self) -> bool:
        """Returns whether an inner module is in training mode."""
        return any(map(_training_of, self.spaces))


_values_of: Callable[[Any], Any] = dict.values
_forward_of: Callable[[Any], Any] = operator.attrgetter("forward")
_training_of: Callable[[Any], bool] = operator.itemgetter("training")
