"""Recordings of a module's forward and backward on a GPU, which serve repeated calls in training.

A block of a transformer takes the host a dozen autograd functions, the keys of as many operators, and
autocast's look at every one of PyTorch's. A recording is one autograd function. Its forward and its backward
are straight lines of launches, products and allocations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, launching, machine, modes
from ..declaration import key_of_training
from ..structure import looks
from . import planned_launches
from .autograd import once_differentiable
from .planned_launches import TrainingPlan
from .programs import MOST, Replays
from .weight_cache import is_noting

#: Calls PyTorch's operators without the layer that records gradients, which plans need for nothing.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


class _Replayed(torch.autograd.Function):
    """Autograd function of a recorded call: (plan, what is drawn, the tensors of the call)."""

    @classmethod
    def apply(cls, *values: Any) -> Any:
        """Is ``Function.apply`` without a search of every argument for what transforms have left."""
        return super(torch.autograd.Function, cls).apply(*values)  # type: ignore[misc]

    @staticmethod
    def forward(ctx: Any, plan: TrainingPlan, *values: Tensor) -> Tensor:
        """Saves what the backward reads."""
        with torch._C._DisableAutocast(), _BelowAutograd():  # whose casts are part of the plan
            out, *saved = plan.forward(*values)
        if plan.written:
            torch.autograd.graph.increment_version([values[i] for i in plan.written])
        ctx.plan = plan
        ctx.save_for_backward(*[values[i] for i in plan.read], *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes all gradients."""
        plan: TrainingPlan = ctx.plan
        dout = dout.contiguous()
        if dout.data_ptr() % 16:
            dout = dout.clone()
        with torch._C._DisableAutocast(), _BelowAutograd():
            return *[None] * (1 + plan.draws), *plan.backward(dout, *ctx.saved_tensors)


class _Known(NamedTuple):
    """A recording for calls of one key; see ``programs``."""

    plans: Any
    layouts: Any
    plan: TrainingPlan


class TrainingReplays(Replays):
    """The recordings of a module's forward and backward on a GPU, for calls with gradients.

    What the forward may depend on is said in :class:`Replays`. It draws random numbers by
    :func:`planned_launches.drawn_outside` or makes no recording, and gives a contiguous result.
    """

    def __init__(self, name: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__(name, tensors)
        self._trained: dict[Any, _Known] = {}

    def train(
        self, forward: Callable[[], Tensor], x: Tensor, draw: Callable[[], Sequence[Tensor]], *settings: Any
    ) -> Tensor:
        """Returns ``forward()``, of x and settings, by a recording if there is one for such a call.

        Args:
            forward: Computes the result.
            x: The tensor of the call.
            draw: Draws what the forward draws, in the same order.
            settings: The rest of the key.
        """
        token = key_of_training(x) if self._may_train(x) else None
        if token is None:
            return forward()
        key = token, settings, tuple([each.requires_grad for each in self._tensors])
        layouts = looks().layouts(self._tensors)
        known = self._trained.get(key)
        if known is None or known.layouts != layouts or known.plans is not backends.plans:
            return self._record_or_find(key, layouts, forward, x)
        drawn = draw() if known.plan.draws else ()
        out: Tensor = _Replayed.apply(known.plan, *drawn, x, *self._tensors)
        return out

    def _may_train(self, x: Tensor) -> bool:
        if (
            not (x.is_cuda or machine.INTERPRETING)
            or is_noting()
            or launching.are_watched()  # by hooks that want more than plans call
            or torch._C._get_tracing_state() is not None
        ):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(x):  # which a transform has left
            return False
        # Activation checkpointing compares what two calls save; a recording may begin between them.
        return modes.wants_gradient(x, *self._tensors) and not modes.saved_tensors_hooked()

    def _record_or_find(self, key: Any, layouts: Any, forward: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Serves a call without a recording, and records it if it is the second, the fourth, … of its key."""
        table, shared = backends.plans, ("training", self._name, key, self._facts())
        plan: Any = table.get(shared)
        out: Tensor | None = None
        aligned = not any(each.data_ptr() % 16 for each in (x, *self._tensors))
        if not aligned or not self._are_distinct():
            return forward()
        if plan is None:
            if len(self._calls) >= MOST:
                self._calls.clear()
            self._calls[key] += 1
            calls = self._calls[key]
            # The first call compiles and tunes; what it could not tune may be tuned later.
            if calls == 1 or calls & (calls - 1) or machine.is_capturing(x) or self._has_hooks():
                return forward()
            out, plan = planned_launches.recorded_with_gradients(forward, [x, *self._tensors])
            if plan is None:
                return out
            backends.keep_plan(table, shared, plan)
        if len(self._trained) >= MOST:
            self._trained.clear()
        self._trained[key] = _Known(table, layouts, plan)
        return forward() if out is None else out

    def _has_hooks(self) -> bool:
        """Returns whether a hook would see the gradients of a recording."""
        return any(each._backward_hooks for each in self._tensors)
