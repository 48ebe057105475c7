"""Operators bound to their packed parameters, as frozen modules call them again and again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import backends
from ..declaration import key_of_serving
from .packing import Snapshot, is_noting

#: How many kinds and sizes of tensors are remembered of a module.
_MOST = 32

Steps = Sequence[Callable[[Tensor], Tensor]]


class _Program(Snapshot):
    """Steps that hold as long as no tensor changes, and no backend is registered.

    Args:
        tensors: The tensors.
        bind: Returns the steps, one after the other; None if there are none.

    Attributes:
        steps: The steps.
    """

    def __init__(self, tensors: Sequence[Tensor | None], bind: Callable[[], Steps | None]):
        self._tensors, self._plans = tensors, backends.plans
        super().__init__(tensors)  # first: what changes meanwhile is noticed
        self.steps = bind()

    def is_current(self) -> bool:
        """Returns whether nothing has changed."""
        return backends.plans is self._plans and self.holds(self._tensors)

    def outdate(self) -> None:
        """Notes that a tensor was written, or that its memory is gone, and frees packed parameters."""
        super().outdate()
        self.steps = None

    def release(self) -> None:
        """Frees packed parameters, so that the next call binds them again."""
        self.outdate()


class Programs:
    """The programs of a module, by what tells calls without gradients apart whose parameters stay."""

    def __init__(self) -> None:
        self._programs: dict[Any, _Program] = {}

    def run(self, x: Tensor, *settings: Any) -> Tensor | None:
        """Returns what the steps make of a tensor like an earlier one; None where there are none now."""
        program = self._programs.get((key_of_serving(x), settings))
        steps = None if program is None or not program.is_current() else program.steps
        if steps is None or is_noting():  # as a graph that has to know the copies that it reads
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
        """Keeps the steps for tensors like one that has been served, unless it is known that there are none.

        Args:
            x: The tensor.
            tensors: Returns the parameters.
            bind: As of the program.
            settings: What else tells calls apart.
        """
        state = key_of_serving(x)
        known = self._programs.get((state, settings))
        if state is None or (known is not None and known.is_current()):
            return
        if len(self._programs) >= _MOST:
            self._programs.clear()
        self._programs[state, settings] = _Program(tensors(), bind)
