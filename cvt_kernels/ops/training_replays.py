"""Recordings of a module's forward and backward on a GPU, which serve repeated calls in training.

A block of a transformer takes the host a dozen autograd functions, the keys of as many operators, and
autocast's look at every one of PyTorch's. A recording is one autograd function. Its forward and its backward
are straight lines of launches, products and allocations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import backends, launching, machine, modes
from ..declaration import key_of_tensor, key_of_training
from ..structure import looks
from . import launch_plans
from .autograd import once_differentiable
from .bound_steps import MOST
from .launch_plans import TrainingPlan
from .replays import Replays
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
    @once_differentiable()
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Computes all gradients."""
        plan: TrainingPlan = ctx.plan
        dout = dout.contiguous()
        if dout.data_ptr() % 16:
            dout = dout.clone()
        with torch._C._DisableAutocast(), _BelowAutograd():
            return *[None] * (1 + plan.draws), *plan.backward(dout, *ctx.saved_tensors)


# What a stage asks for its blocks ---------------------------------------------------------------------------


class State(NamedTuple):
    """All that the recordings of the blocks of a stage depend on, besides the tensor of each call.

    Attributes:
        cache: The dispatch cache.
        layouts: Where the stage's parameters and buffers are.
    """

    cache: Any
    layouts: Any


class States:
    """The states in which a stage was called.

    Args:
        tensors: Its parameters and buffers.
        spaces: The attributes of its modules.
    """

    def __init__(self, tensors: Sequence[Tensor], spaces: Sequence[dict[str, Any]]) -> None:
        self._tensors, self._spaces = list(tensors), spaces
        self._states: dict[Any, State] = {}

    def now(self, x: Tensor) -> State | None:
        """Returns the state of a call with gradients, the same object while nothing changes, or None."""
        token = key_of_training(x) if _may_record(x) else None
        if token is None:
            return None
        precision = torch.backends.cuda.matmul.fp32_precision, modes.convolution_precision()
        wanted = tuple([each.requires_grad for each in self._tensors])
        key = token, precision, wanted, tuple([space["training"] for space in self._spaces])
        state = State(backends.dispatch_cache, looks().layouts(self._tensors))
        known = self._states.get(key)
        if known is None or known.layouts != state.layouts or known.cache is not state.cache:
            if len(self._states) >= MOST:
                self._states.clear()
            self._states[key] = known = state
        return known


class _Around(threading.local):
    """The state of the stage that runs in this thread."""

    state: State | None = None


_around = _Around()


@contextlib.contextmanager
def within(state: State | None) -> Iterator[None]:
    """Runs a stage in a state that :meth:`States.now` has returned, for all modules within it."""
    before, _around.state = _around.state, state
    try:
        yield
    finally:
        _around.state = before


def state_around() -> State | None:
    """Returns the state of the stage that runs; None where checkpointing or a mode within it differs."""
    state = _around.state
    if state is None or modes.saved_tensors_hooked() or torch._C._len_torch_dispatch_stack():
        return None
    return state if torch.is_grad_enabled() else None


def _may_record(x: Tensor) -> bool:
    """Returns whether calls with such a tensor may be recorded in training now."""
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
    return not modes.saved_tensors_hooked()


# Recordings -----------------------------------------------------------------------------------------------


class _Known(NamedTuple):
    """A recording for calls of one key; see ``replays``."""

    cache: Any
    layouts: Any
    plan: TrainingPlan


class TrainingReplays(Replays):
    """The recordings of a module's forward and backward on a GPU, for calls with gradients.

    What the forward may depend on is said in :class:`Replays`. It draws random numbers by
    :func:`launch_plans.drawn_outside` or makes no recording, and gives a contiguous result.
    """

    def __init__(self, name: Any, tensors: Sequence[Tensor]) -> None:
        super().__init__(name, tensors)
        self._trained: dict[Any, _Known] = {}
        #: The recordings for calls within a stage in one state; one attribute, for threads.
        self._within: tuple[State | None, dict[Any, TrainingPlan]] = None, {}

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
        state, short = state_around(), (key_of_tensor(x, True), settings)
        last, plans = self._within
        plan = plans.get(short) if state is not None and state is last else None
        if plan is None:
            found = self._find(forward, x, *settings)
            if isinstance(found, Tensor):
                return found
            plan = found
            if state is not None:
                self._within = state, {**(plans if state is last else {}), short: plan}
        drawn = draw() if plan.draws else ()
        out: Tensor = _Replayed.apply(plan, *drawn, x, *self._tensors)
        return out

    def _find(self, forward: Callable[[], Tensor], x: Tensor, *settings: Any) -> Tensor | TrainingPlan:
        """Returns the recording for a call, or the call's result where there is none."""
        token = key_of_training(x) if self._may_train(x) else None
        if token is None:
            return forward()
        key = token, settings, tuple([each.requires_grad for each in self._tensors])
        layouts = looks().layouts(self._tensors)
        known = self._trained.get(key)
        if known is None or known.layouts != layouts or known.cache is not backends.dispatch_cache:
            return self._record_or_find(key, layouts, forward, x)
        return known.plan

    def _may_train(self, x: Tensor) -> bool:
        return _may_record(x) and modes.wants_gradient(x, *self._tensors)

    def _record_or_find(self, key: Any, layouts: Any, forward: Callable[[], Tensor], x: Tensor) -> Tensor:
        """Serves a call without a recording, and records it if it is the second, the fourth, … of its key."""
        table, shared = backends.dispatch_cache, ("training", self._name, key, self._key_of_tensors())
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
            out, plan = launch_plans.recorded_with_gradients(forward, [x, *self._tensors])
            if plan is None:
                return out
            backends.cache_dispatch(table, shared, plan)
        if len(self._trained) >= MOST:
            self._trained.clear()
        self._trained[key] = _Known(table, layouts, plan)
        return forward() if out is None else out

    def _has_hooks(self) -> bool:
        """Returns whether a hook would see the gradients of a recording."""
        return any(each._backward_hooks for each in self._tensors)
