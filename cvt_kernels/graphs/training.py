"""Calls of a model that are captured; with gradients as two CUDA graphs: the forward, and the backward.

Autograd sees one function, whose forward replays the first graph and whose backward the second. The
activations stay in the memory of the graphs between the two, so the next forward waits for the backward of
the last one (:class:`Turn`). Results and gradients are copied out. Random numbers continue the generator's
sequence, and BatchNorm's statistics are updated, as in a call without graphs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import modes
from ..ops import weight_cache
from ..ops.autograd import once_differentiable


class Turn:
    """A forward whose activations the graphs hold until its backward is done or no longer possible."""

    is_over = False


class Captured:
    """A call of a model that ``cuda`` (see ``graphs``) has captured, to be replayed with other tensors.

    Attributes:
        copies: The packed copies of weights that the captured call has read.
        recorded: The graph; with gradients those of the forward and of the backward.
        leaves: The leaves of the results, with the tensors of the graph.
        values: The snapshot's, when the graphs were last found up to date.
        why_not: Why a replay would not do the same as the call, or None.
    """

    has_backward = False
    values: object = None
    why_not: str | None = None

    def __init__(
        self,
        cuda: Any,
        tensors: Sequence[Tensor],
        record: Callable[[Sequence[Tensor]], Sequence[tuple[Any, Any]]],
    ):
        """Captures a call of ``tensors``: ``record`` takes others like these, and records their call.

        It returns, for each graph, what the recorded function gives and the graph.
        """
        self.cuda = cuda
        self._inputs = [torch.empty_like(each).copy_(each) for each in tensors]
        versions = [each._version for each in self._inputs]
        with weight_cache.noted_uses() as self.copies:
            recorded = record(self._inputs)
        if versions != [each._version for each in self._inputs]:
            self.why_not = "the forward changes its arguments"
        self.recorded = [graph for _, graph in recorded]
        self.leaves, self._form = pytree.tree_flatten(recorded[0][0])

    def _write(self, tensors: Sequence[Tensor]) -> None:
        for ours, theirs in zip(self._inputs, tensors, strict=False):
            ours.detach().copy_(theirs)


class TrainingGraph(Captured):
    """A call with gradients; ``has_gradient`` says for each tensor among its results whether it has one."""

    has_backward = True
    _gradients: _Gradients | None = None

    def __init__(
        self,
        cuda: Any,
        model: nn.Module,
        forward: Callable[..., Any],
        arguments: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]],
        tensors: Sequence[Tensor],
    ):
        """Captures a call of a model, whose buffers and random numbers stay what they are.

        ``arguments`` returns the call's arguments with other tensors.
        """
        self._parameters = [each for each in model.parameters() if each.requires_grad]

        def record(inputs: Sequence[Tensor]) -> Any:
            for ours, theirs in zip(inputs, tensors, strict=True):
                ours.requires_grad_(theirs.requires_grad)
            args, kwargs = arguments(inputs)
            with _aliases(model) as aliases:
                every = *inputs, *(aliases[each] for each in self._parameters)
                wanted = [each for each in every if each.requires_grad]
                return cuda.record(
                    lambda: forward(*args, **kwargs), lambda outputs: self._differentiate(outputs, wanted)
                )

        state = _host_random_state(cuda)
        with modes.capturing(gradients=True), _restored([*model.buffers()], cuda):
            super().__init__(cuda, tensors, record)
        self.has_gradient = [_is_differentiable(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)]
        # Not the autograd graph of the capture, whose nodes belong to the stream of the capture.
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        if self.why_not is None and _host_random_state(cuda) != state:
            self.why_not, (of_python, of_cpu) = "the forward takes random numbers of the host", state
            random.setstate(of_python)
            if of_cpu:
                torch.set_rng_state(torch.frombuffer(bytearray(of_cpu), dtype=torch.uint8))

    def _differentiate(self, outputs: Any, wanted: Sequence[Tensor]) -> None:
        """Computes the gradients of the outputs with respect to ``wanted``.

        The first time, which is the warm-up, it makes the tensors that hold them and those of the results,
        and raises RuntimeError for a parameter for which no alias stands (:func:`_aliases`).
        """
        results = [leaf for leaf in pytree.tree_leaves(outputs) if _is_differentiable(leaf)]
        is_first = self._gradients is None
        if is_first:
            self._douts = [torch.zeros_like(each) for each in results]
        others = self._parameters if is_first else ()
        found = torch.autograd.grad(results, [*wanted, *others], self._douts, allow_unused=True)
        if any(each is not None for each in found[len(wanted) :]):
            raise RuntimeError("the model computes with a parameter that it does not take from its module")
        found = found[: len(wanted)]
        if self._gradients is None:
            self._gradients = _Gradients(found)
        self._gradients.fill(found)

    def replay(self, tensors: Sequence[Tensor], turn: Turn) -> Any:
        """Replays the forward with other tensors; returns its results, which autograd can differentiate."""
        copies = iter(_Replay.apply(self, turn, *tensors, *self._parameters))
        leaves = [next(copies) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self._form)

    def replay_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replays the forward; returns copies of its results."""
        with torch.no_grad(), self.cuda.turn(self._inputs):
            self._write(tensors)
            self.recorded[0].replay()
            return [leaf.clone() for leaf in self.leaves if isinstance(leaf, Tensor)]

    def replay_backward(self, douts: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replays the backward; returns copies of the gradients of all inputs and parameters."""
        with torch.no_grad(), self.cuda.turn(self._douts):
            given = [dout for dout, has in zip(douts, self.has_gradient, strict=True) if has]
            for ours, theirs in zip(self._douts, given, strict=True):
                ours.zero_() if theirs is None else ours.copy_(theirs)
            self.recorded[1].replay()
            assert self._gradients is not None
            gradients = iter(self._gradients.copies())
        every = (*self._inputs, *self._parameters)
        return [next(gradients) if each.requires_grad else None for each in every]


class _Replay(torch.autograd.Function):
    """Autograd function of a replayed call: (graph, turn, its tensors, the parameters)."""

    @staticmethod
    def forward(ctx: Any, graph: TrainingGraph, turn: Turn, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Replays the forward; saves nothing, since the graph has the activations."""
        ctx.graph, ctx.turn = graph, turn
        ctx.set_materialize_grads(False)
        copies = graph.replay_forward(tensors)
        constants = [c for c, has in zip(copies, graph.has_gradient, strict=True) if not has]
        ctx.mark_non_differentiable(*constants)
        return tuple(copies)

    @staticmethod
    @once_differentiable("undo graphed() by cvt_kernels.restore(model)")
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:
        """Replays the backward, once."""
        if ctx.turn.is_over:
            raise RuntimeError(
                "backward: a model after cvt_kernels.graphed() has no second backward of one forward, even "
                "with retain_graph=True, since its first one has overwritten the activations"
            )
        ctx.turn.is_over = True
        return None, None, *ctx.graph.replay_backward(douts)


class _Gradients:
    """The gradients of a captured backward, side by side in one tensor per dtype; ``None`` stays None.

    So one launch per dtype copies them out.
    """

    def __init__(self, like: Sequence[Tensor | None]):
        self._shapes = [None if each is None else (each.dtype, each.shape) for each in like]
        self._flat: dict[torch.dtype, Tensor] = {}
        for dtype in {each.dtype for each in like if each is not None}:
            own = [each for each in like if each is not None and each.dtype == dtype]
            self._flat[dtype] = own[0].new_empty(sum(map(Tensor.numel, own)))
        self._views = self._split(self._flat)

    def _split(self, flat: dict[torch.dtype, Tensor]) -> list[Tensor | None]:
        places, views = dict.fromkeys(flat, 0), list[Tensor | None]()
        for each in self._shapes:
            if each is None:
                views.append(None)
                continue
            dtype, shape = each
            start, places[dtype] = places[dtype], places[dtype] + shape.numel()
            views.append(flat[dtype][start : places[dtype]].view(shape))
        return views

    def fill(self, gradients: Sequence[Tensor | None]) -> None:
        """Copies gradients here."""
        ours = [each for each in self._views if each is not None]
        torch._foreach_copy_(ours, [each for each in gradients if each is not None])

    def copies(self) -> list[Tensor | None]:
        """Returns copies of the gradients."""
        return self._split({dtype: each.clone() for dtype, each in self._flat.items()})


@contextlib.contextmanager
def _aliases(model: nn.Module) -> Iterator[dict[Tensor, nn.Parameter]]:
    """Replaces the parameters of a model by others in the same memory within a block.

    Autograd's nodes that accumulate a parameter's gradient live as long as a graph of an earlier call, or
    DistributedDataParallel, and belong to the stream of that call. A capture must not wait for that stream.
    """
    spaces = [module._parameters for module in model.modules() if module._parameters]
    before = [dict(space) for space in spaces]
    aliases: dict[Tensor, nn.Parameter] = {}
    for each in model.parameters():
        aliases[each] = nn.Parameter(each.detach(), requires_grad=each.requires_grad)
    try:
        for space in spaces:
            for name, own in space.items():
                if own is not None:
                    space[name] = aliases[own]
        yield aliases
    finally:
        for space, parameters in zip(spaces, before, strict=True):
            space.update(parameters)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


@contextlib.contextmanager
def _restored(buffers: Sequence[Tensor], cuda: Any) -> Iterator[None]:
    """Restores buffers and the generator's state after a block that runs the model for practice."""
    before = [each.detach().clone() for each in buffers]
    state = cuda.random_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        cuda.set_random_state(state)


def _host_random_state(cuda: Any) -> tuple[Any, bytes]:
    """Returns the states of Python's generator and of PyTorch's for the CPU, which no graph uses."""
    of_cpu = torch.get_rng_state() if cuda.device_type == "cuda" else torch.empty(0)
    return random.getstate(), of_cpu.numpy().tobytes()
