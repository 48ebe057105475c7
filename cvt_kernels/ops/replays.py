"""Recordings of all that a live module launches and computes without gradients, as straight lines of code.

A call is then one question for the module, instead of one for every operator.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import backends, machine
from ..declaration import key_of_serving, key_of_tensor
from ..structure import looks
from . import launch_plans
from .bound_steps import MOST
from .weight_cache import is_noting


class _Replay(NamedTuple):
    """A recording for calls of one key.

    Attributes:
        cache: The dispatch cache when it was made.
        layouts: Where the module's tensors were.
        run: The plan.
    """

    cache: Any
    layouts: Any
    run: Callable[..., Any]


class Replays:
    """The recordings of a module's forward on a GPU, for calls without gradients and autocast.

    The forward may depend on nothing but the arguments' keys, the state of the process that choices depend
    on, and the layouts of the module's tensors; the caller has to notice all else. Modules with tensors and
    settings alike share a plan, since it keeps no tensor.

    Args:
        name: What the forwards of modules with the same settings have in common, and those settings.
        tensors: The parameters and buffers.
    """

    def __init__(self, name: Any, tensors: Sequence[Tensor]) -> None:
        self._name, self._tensors = name, list(tensors)
        self._known: dict[Any, _Replay] = {}
        self._calls: collections.Counter[Any] = collections.Counter()

    def run(self, forward: Callable[[], Any], inputs: tuple[Tensor | None, ...], *settings: Any) -> Any:
        """Returns ``forward()`` of inputs and settings, by a recording if there is one for such a call.

        Args:
            forward: Computes the result: tensors, constants, and sequences and records of these.
            inputs: The tensors of the call, the first not None.
            settings: All else that it depends on, hashable.
        """
        x = inputs[0]
        assert x is not None
        token = key_of_serving(x) if self.may_run(x) else None
        if token is None:
            return forward()
        key = token, *(key_of_tensor(each, False) for each in inputs[1:]), settings
        layouts = looks().layouts(self._tensors)
        known = self._known.get(key)
        if known is not None and known.layouts == layouts and known.cache is backends.dispatch_cache:
            out = known.run(*inputs, *self._tensors)
            return forward() if out is NotImplemented else out
        return self._look_for(key, layouts, forward, inputs)

    @staticmethod
    def may_run(x: Tensor) -> bool:
        """Returns whether a call with such a tensor may run by a recording."""
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():  # which keeps its casts of weights
            return False
        return (x.is_cuda or machine.INTERPRETING) and not is_noting()

    def _look_for(
        self, key: Any, layouts: Any, forward: Callable[[], Any], inputs: tuple[Tensor | None, ...]
    ) -> Any:
        """Serves a call without a recording, and records it if it is the second, the fourth, … of its key."""
        table, shared, out = backends.dispatch_cache, (self._name, key, self._key_of_tensors()), None
        plan = table.get(shared)
        if plan is None:
            if len(self._calls) >= MOST:
                self._calls.clear()
            self._calls[key] += 1
            calls, x = self._calls[key], inputs[0]
            assert x is not None
            # The first call compiles and tunes; what it could not tune may be tuned later.
            if calls == 1 or calls & (calls - 1) or machine.is_capturing(x) or not self._are_distinct():
                return forward()
            out, plan = launch_plans.recorded(lambda call: forward(), self._record(inputs))
            if plan is None:
                return out
            backends.cache_dispatch(table, shared, plan)
        elif not self._are_distinct():
            return forward()
        if len(self._known) >= MOST:
            self._known.clear()
        self._known[key] = _Replay(table, layouts, plan)
        return forward() if out is None else out

    def _record(self, inputs: tuple[Tensor | None, ...]) -> Any:
        fields = [f"x{i}" for i in range(len(inputs))] + [f"t{i}" for i in range(len(self._tensors))]
        record: Any = collections.namedtuple("module_call", fields)  # type: ignore[misc]
        return record(*inputs, *self._tensors)

    def _key_of_tensors(self) -> tuple[Any, ...]:
        return tuple(key_of_tensor(each, False) for each in self._tensors)

    def _are_distinct(self) -> bool:
        """Returns whether the module's tensors are plain ones, each in memory of its own."""
        storages = {each.untyped_storage().data_ptr() for each in self._tensors}
        plain = all(type(each) in (Tensor, nn.Parameter) for each in self._tensors)
        return plain and len(storages) == len(self._tensors)
