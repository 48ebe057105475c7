"""The operator calls that a model makes, as data that another process makes tensors of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import backends, choose, machine
from . import tuner


@dataclass(frozen=True)
class TensorLike:
    """The description of a tensor, from which another process makes one with random values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLike:
        """Describes a tensor; it requires a gradient only where autograd records."""
        wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, wants_gradient)

    def make(self, device: torch.device, generator: torch.Generator) -> Tensor:
        """Makes the tensor; vectors are positive, since one may be a variance."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype == torch.int8:
            return tensor.random_(-127, 128, generator=generator)
        if self.dtype == torch.int64 and len(self.shape) == 2:  # rows of tokens, which are unique
            return tensor.copy_(torch.arange(self.shape[1]))
        if not self.dtype.is_floating_point:
            return tensor.fill_(1)
        if len(self.shape) > 1:
            numbers = torch.randn(self.shape, generator=generator, device=device)
        else:
            numbers = 0.5 + torch.rand(self.shape, generator=generator, device=device)
        return tensor.copy_(numbers).requires_grad_(self.requires_grad)


class OperatorCall(NamedTuple):
    """One call of an operator; picklable, for another process.

    Attributes:
        cache_key: Its cache key in the file of choices.
        operator: The operator's name.
        arguments: The arguments by name, with a :class:`TensorLike` for every tensor.
        device: The device of its first argument.
        autocast: The dtype of autocast around the call; None without it.
    """

    cache_key: str
    operator: str
    arguments: dict[str, Any]
    device: torch.device
    autocast: torch.dtype | None

    def task(self) -> tuner.Task:
        """Makes the arguments, with the same numbers every time; returns what checks and times the call."""
        generator = torch.Generator(self.device).manual_seed(0)
        arguments = pytree.tree_map_only(
            TensorLike, lambda like: like.make(self.device, generator), self.arguments
        )
        return tuner.task_of(self.operator, **arguments)

    def autocasting(self) -> torch.autocast:
        """Returns the autocast around the call, without its cache, which would keep copies of weights."""
        on = self.autocast is not None
        return torch.autocast(self.device.type, self.autocast, enabled=on, cache_enabled=False)


def call_of(operator: str, *args: Any, **kwargs: Any) -> OperatorCall:
    """Returns the call of an operator with these arguments."""
    record = backends.operators[operator].bind(*args, **kwargs)
    like = pytree.tree_map_only(Tensor, TensorLike.of, record._asdict())
    device = record[0].device
    autocast = None
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    return OperatorCall(choose.cache_key(operator, *args, **kwargs), operator, like, device, autocast)


#: Composed operators call their parts. Our kernels are requested too, and replaced: else operators that exist
#: for them would be composed before they are called. (Triton's interpreter is no candidate.)
_RECORDED: tuple[backends.Backend, ...] = (
    "composed", *(() if machine.INTERPRETING else ("gluon", "triton")), "cuda", "cpu", "sdpa", "reference",
)  # fmt: skip


def collect(run: Callable[[], Any]) -> list[OperatorCall]:
    """Runs something on PyTorch's operators, and lists the operator calls in it, each cache key once.

    The parts of a composed operator come before it, since it is timed with the backends chosen for them.
    """
    calls: dict[str, OperatorCall] = {}

    def recording(
        operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        plain = backends.implementations[operator]["reference"].function
        function = implementation.load().function if backend == "composed" else plain

        def serve(record: backends.Record) -> Any:
            call = call_of(operator, **record._asdict())
            calls.setdefault(call.cache_key, call)
            return function(record)

        return dataclasses.replace(implementation, function=serve, why_unsupported=None)

    with backends.replaced(recording), backends.requesting(*_RECORDED):
        run()
    return sorted(calls.values(), key=_rank)


def _rank(call: OperatorCall) -> tuple[bool, int]:
    """Returns a sort key by which operators come before those composed of them."""
    composed = "composed" in backends.implementations[call.operator]
    return composed, list(backends.operators).index(call.operator)
