"""Example calls of every operator, and of what a backend is asked for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.ops.cards import all_cards, call_public, card_of, laid_out, make
from cvt_kernels.tuning import accuracy, tuner
from tests.checks import assert_accurate, not_built

#: The settings of the examples of each operator, by name.
EXAMPLES = {operator: dict(card.examples) for operator, card in all_cards().items()}
#: What serves the parts of an operator on backends that compose it of others.
_PARTS: dict[str, tuple[ck.Backend, ...]] = {"composed": ("cpu", "reference")}
#: The operators that round, and have no gradients.
ROUNDING = tuple(operator for operator, card in all_cards().items() if card.rounds)
#: Pairs of operator and backend that compute no gradients, and refuse them.
WITHOUT_GRADIENTS = frozenset(
    (operator, backend) for operator, card in all_cards().items() for backend in card.without_gradients
)

#: Operators that chain several sums, whose gradients are compared over this many calls where one misses.
_BLOCKS, _DRAWS = ("transformer_block", "transformer_blocks"), 8


def device_of(operator: str, backend: str) -> str:
    """Returns the device type on which a backend of an operator is tested on this machine."""
    devices = backends.registered(operator, backend).devices or ("cpu",)
    return "cuda" if "cuda" in devices and torch.cuda.is_available() else "cpu"


def _pair(operator: str, backend: str) -> Any:
    devices = backends.registered(operator, backend).devices or ("cpu",)
    needs_gpu = "cpu" not in devices and backend != "triton"
    return pytest.param(
        operator, backend, marks=[pytest.mark.gpu] if needs_gpu else [], id=f"{operator}-{backend}"
    )


def pairs(chosen: Callable[[str, str], bool] = lambda operator, backend: True) -> Any:
    """Parametrizes a test by operators and their chosen backends, as one parameter."""
    found = [
        _pair(operator, backend)
        for operator, known in backends.implementations.items()
        for backend in known
        if chosen(operator, backend)
    ]
    return pytest.mark.parametrize(("operator", "backend"), found)


def has_gradients(operator: str, backend: str) -> bool:
    """Returns whether a backend of an operator computes gradients."""
    return operator not in ROUNDING and (operator, backend) not in WITHOUT_GRADIENTS


def is_ours(operator: str, backend: str) -> bool:
    """Returns whether a backend has kernels of this project."""
    return backend in backends.OURS


class Example(NamedTuple):
    """An example call, and the backend that it is for.

    Attributes:
        operator: The operator.
        backend: The backend.
        call: The arguments, on the device of the backend.
        upstream: The layout of the gradients of outputs.
    """

    operator: str
    backend: str
    call: tuner.Call
    upstream: str

    def douts(self, outputs: list[Tensor]) -> list[Tensor]:
        """Returns the gradients of outputs, the same numbers every time; none where there is no backward."""
        generator = torch.Generator().manual_seed(1)
        numbers = [
            torch.randn(out.shape, generator=generator, dtype=torch.float64)
            for out in outputs
            if self.call.gradient
        ]
        return [
            laid_out(dout.to(out.dtype), self.upstream).to(out.device)
            for dout, out in zip(numbers, outputs, strict=False)
        ]

    def public(self, record: backends.Record) -> Any:
        """Calls the public function with the arguments of a record, served by the backend."""
        with ck.use_backend(self.backend, *_PARTS.get(self.backend, ())):
            return call_public(self.operator, record)

    def leaves(self) -> list[Tensor]:
        """Returns the tensors that require a gradient."""
        return [tensor for tensor in self.call.tensors() if tensor.requires_grad]

    def of_leaves(self, *leaves: Tensor) -> Any:
        """Calls the public function with other tensors in the places of those that require a gradient."""
        given = dict(zip(map(id, self.leaves()), leaves, strict=True))
        return self.public(
            pytree.tree_map_only(Tensor, lambda t: given.get(id(t), t), self.call.map(lambda t: t).record)
        )

    def why_refused(self) -> str | None:
        """Says why the backend cannot serve the call; None if it can."""
        with torch.set_grad_enabled(self.call.gradient), ck.use_backend(self.backend):
            return backends.why_unsupported(self.operator, self.backend, self.call.record)


def example(operator: str, backend: str, name: str, **settings: Any) -> Example:
    """Makes an example; skips where this machine lacks the backend.

    Args:
        operator: The operator.
        backend: The backend.
        name: The name of the example.
        settings: Other settings, of the card's choices.
    """
    device = device_of(operator, backend)
    with ck.use_backend(backend):
        reason = backends.why_unavailable(operator, backend, device)
    if reason is not None:
        assert backend != "cpu" or not_built(), reason
        pytest.skip(reason)
    card = card_of(operator)
    chosen = card.settings(card.examples[name]) | card.needed.get(backend, {}) | settings
    layout = chosen["layout"]
    if layout != "expanded":  # parameters that repeat would let LayerNorms divide by nothing
        chosen["layout"] = "contiguous"
    call = make(operator, {key: chosen[key] for key in card.choices}).call
    call = call.map(lambda tensor: _laid_out(tensor, layout))
    if device != "cpu":
        call = call.map(lambda tensor: _moved(tensor, device))
    return Example(operator, backend, call, chosen.get("upstream", "contiguous"))


def served(operator: str, backend: str, name: str, **settings: Any) -> Example:
    """Makes an example that the backend serves; skips where it refuses it, as some refuse a dtype."""
    made = example(operator, backend, name, **settings)
    if (reason := made.why_refused()) is not None:
        pytest.skip(reason)
    return made


def gradient_of(operator: str, backend: str) -> str:
    """Returns the setting of gradients: of all arguments where there are gradients."""
    return "all" if has_gradients(operator, backend) else "none"


def made_of(operator: str, backend: str, name: str = "usual", **settings: Any) -> Example:
    """Makes an example that a backend must serve, with all gradients that it has and other settings."""
    made = example(operator, backend, name, **{"gradient": gradient_of(operator, backend)} | settings)
    assert made.why_refused() is None
    return made


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Returns a tensor in a layout; integers stay as they are."""
    if not tuner._is_fine(tensor) or layout in ("contiguous", "expanded"):
        return tensor
    return laid_out(tensor.detach(), layout).requires_grad_(tensor.requires_grad)


def _moved(tensor: Tensor, device: str) -> Tensor:
    flat = tensor.detach().as_strided((tuner._extent(tensor),), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def tensors_of(results: Any) -> list[Tensor]:
    """Returns the tensors that an operator returned."""
    return list(results) if isinstance(results, tuple | list) else [results]


def same_bits(ours: tuner.Results | list[Tensor], others: tuner.Results | list[Tensor]) -> bool:
    """Returns whether results are equal in every bit."""
    flat, other = (pytree.tree_leaves(list(each)) for each in (ours, others))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(flat, other, strict=True))


def standards(made: Example) -> Iterator[tuple[tuner.Results, tuner.Results]]:
    """Yields what results may be compared with: PyTorch's in the same dtype, and those in float64.

    Where backends need not round between the parts of an operator, there is a pair for that too. After a pair
    with a result of a single number comes one that has it from float64, of arguments that roundings perturb:
    the tuner does so too, since PyTorch's error in one number may be small by luck.
    """
    described = backends.operators[made.operator]
    functions = [(described.reference, described.exact or described.reference)]
    functions += [] if described.unrounded is None else [(described.unrounded, described.unrounded)]
    for plain, exact in functions:
        call = made.call.map(tuner._copied)
        outputs = tuner.run(plain, call._replace(gradient=False).map(tuner._copied), []).outputs
        douts = made.douts(outputs)
        right = tuner._run_in_float64(exact, made.call.map(tuner._in_float64), douts)
        same = tuner.run(plain, call, douts)
        if _misses_numbers(same, right):
            # torch 2.13: oneDNN's gradient of a bfloat16 convolution's weight reads memory that nobody has
            # written where the output is one pixel wide and the stride 4. PyTorch's own kernels do not.
            with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
                same = tuner.run(plain, made.call.map(tuner._copied), douts)
        yield same, right
        if any(each.numel() == 1 for kind in same for each in kind):
            nudge = functools.partial(
                tuner._nudged, generator=torch.Generator(made.call.device).manual_seed(2)
            )
            nudged = tuner._run_in_float64(exact, made.call.map(nudge), douts)
            yield tuner.Results(*map(_with_single_numbers, same, nudged)), right


def _with_single_numbers(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Returns tensors, but those of one number from others."""
    return [b.to(a.dtype) if a.numel() == 1 else a for a, b in zip(tensors, others, strict=True)]


def _misses_numbers(same: tuner.Results, right: tuner.Results) -> bool:
    """Returns whether a result or a gradient is not finite where the exact one is."""
    pairs = (
        (a, b)
        for kind in same._fields
        for a, b in zip(getattr(same, kind), getattr(right, kind), strict=True)
    )
    return any(bool((~a.double().isfinite() & b.double().isfinite()).any()) for a, b in pairs)


def run(made: Example, *, call: tuner.Call | None = None) -> tuner.Results:
    """Runs an example, with its backward if it has gradients."""
    call = made.call.map(tuner._copied) if call is None else call
    outputs = tuner._forward(made.public, call)
    return tuner._results(call, outputs, made.douts(outputs))


def run_guarded(made: Example) -> tuner.Results:
    """Runs an example in memory that holds NaN where nothing was written, between guard zones."""
    with tuner.guarded_memory() as memory:
        ours = run(made, call=made.call.map(memory.copy))
    assert not memory.is_overwritten(), "writes outside of its tensors"
    return ours


def assert_agrees(operator: str, backend: str, **settings: Any) -> None:
    """Fails unless results, gradients and statistics are right, and all memory is written that should be."""
    made = made_of(operator, backend, **settings)
    assert_right(made, run_guarded(made))


def assert_right(made: Example, ours: tuner.Results, *, dtype: torch.dtype | None = None) -> None:
    """Fails unless results, gradients and what is left in the arguments are right by the accuracy rule.

    Gradients of queries and keys through a whole block are small differences of large numbers: in one call
    their error may be a third of PyTorch's or eight times as large. Where such a call misses the rule, its
    factors hold between the largest errors of this call and others that round differently.

    Args:
        made: The example.
        ours: Its results.
        dtype: The dtype in whose units the rule counts, where results are wider, as under autocast.
    """
    errors = []
    for same, exact in standards(made):
        try:
            _assert_near(ours, same, exact, dtype)
            return
        except AssertionError as error:
            errors.append(error)
    if not (made.operator in _BLOCKS and made.call.gradient):
        raise errors[0]
    generator = torch.Generator().manual_seed(3)
    draws = [(ours, *next(standards(made)))]
    for _ in range(_DRAWS - 1):
        drawn = made._replace(call=made.call.map(lambda tensor: _rounded_anew(tensor, generator)))
        draws.append((run(drawn), *next(standards(drawn))))
    _assert_near(*map(_stacked, zip(*draws, strict=True)), dtype)


def _rounded_anew(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a copy of a tensor whose numbers differ by up to a few units in the last place."""
    copy = tuner._copied(tensor)
    if tuner._is_fine(copy):
        noise = torch.rand(copy.shape, generator=generator).to(copy)
        copy.data.mul_(1 + 4 * torch.finfo(copy.dtype).eps * (2 * noise - 1))
    return copy


def _stacked(draws: Sequence[tuner.Results]) -> tuner.Results:
    """Returns the results of several calls as one."""
    return tuner.Results(
        *([torch.stack(each) for each in zip(*kind, strict=True)] for kind in zip(*draws, strict=True))
    )


def _assert_near(
    ours: tuner.Results, same: tuner.Results, exact: tuner.Results, dtype: torch.dtype | None
) -> None:
    for kind, factor in zip(ours._fields, (2.0, accuracy.GRADIENT_FACTOR, 2.0), strict=True):
        for got, theirs, right in zip(*(getattr(each, kind) for each in (ours, same, exact)), strict=True):
            assert (got.dtype, got.shape) == (theirs.dtype, theirs.shape)
            if not got.numel() or torch.equal(got, theirs):
                continue
            if got.dtype == torch.float64:  # in which the reference is no more exact
                torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
                continue
            floor = 4.0
            if dtype is not None and got.dtype.itemsize > dtype.itemsize:
                floor *= torch.finfo(dtype).eps / torch.finfo(got.dtype).eps
            assert_accurate(got, theirs, right, factor=factor, floor=floor)
