"""Operators bound to packed parameters, which serve repeated calls of a module on a CPU without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import backends
from ..declaration import key_of_serving
from .weight_cache import Snapshot, is_noting

#: The most calls that are known for a module.
MOST = 32

Steps = Sequence[Callable[[Tensor], Tensor]]


class _Steps(Snapshot):
    """Steps that are valid until a tensor changes or a backend is registered.

    Args:
        tensors: The tensors.
        bind: Returns the steps in order, or None.

    Attributes:
        steps: The steps.
    """

    def __init__(self, tensors: Sequence[Tensor | None], bind: Callable[[], Steps | None]):
        self._tensors, self._cache = tensors, backends.dispatch_cache
        super().__init__(tensors)  # first, so that changes meanwhile are noticed
        self.steps = bind()

    def is_current(self) -> bool:
        """Returns whether nothing has changed."""
        return backends.dispatch_cache is self._cache and self.holds(self._tensors)

    def outdate(self) -> None:
        """Marks the steps as outdated and frees packed parameters."""
        super().outdate()
        self.steps = None

    def release(self) -> None:
        """Frees packed parameters, so that the next call binds them again."""
        self.outdate()


class BoundSteps:
    """The bound steps of a module, cached by input and settings, for calls without gradients."""

    def __init__(self) -> None:
        self._known: dict[Any, _Steps] = {}

    def run(self, x: Tensor, *settings: Any) -> Tensor | None:
        """Runs the cached steps for a tensor like an earlier one; returns None if there are none."""
        if x.device.type != "cpu":
            return None
        found = self._known.get((key_of_serving(x), settings))
        steps = None if found is None or not found.is_current() else found.steps
        if steps is None or is_noting():  # such as a CUDA graph that must know the copies that it reads
            return None
        for step in steps:
            x = step(x)
        return x

    def add(
        self,
        x: Tensor,
        tensors: Callable[[], Sequence[Tensor | None]],
        bind: Callable[[], Steps | None],
        *settings: Any,
    ) -> None:
        """Caches the steps for tensors like one that has been served.

        Args:
            x: The tensor.
            tensors: Returns the parameters.
            bind: Returns the steps in order, or None.
            settings: The rest of the key.
        """
        if x.device.type != "cpu":
            return
        state = key_of_serving(x)
        known = self._known.get((state, settings))
        if state is None or (known is not None and known.is_current()):
            return
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[state, settings] = _Steps(tensors(), bind)
