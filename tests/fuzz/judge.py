"""The judge of a case: every backend that serves it against float64 and PyTorch, in guarded memory.

Where all numbers are finite, the rule is ``cvt_kernels.tuning.accuracy``. Elsewhere a number is right if it
is what PyTorch's operators give in the same dtype, or the exact one in that dtype; see CONTRIBUTING.md.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cvt_kernels import backends
from cvt_kernels.ops.cards import Made, call_public, make
from cvt_kernels.records import LIMITS
from cvt_kernels.tuning import accuracy, tuner
from cvt_kernels.tuning.tuner import Results

from .cases import Case
from .worker import Answer

#: A result, and what it would be exactly.
_Pair = tuple[Tensor, Tensor]
#: What serves the parts of operators that are made of others.
_PARTS = ("cpu", "reference")
_SLACK_OF_PYTORCHS = 8.0  # more than ours, since PyTorch's faults are not ours to fix
_UNITS_OF_OTHERS = 16  # allowed in addition for gradients, in units of the largest other one
_NUDGES = 8  # comparisons at most with arguments that are off by roundings
#: The operators whose reference multiplies matrices by einsum.
_WITH_EINSUM = ("attention", "transformer_block", "transformer_blocks")


class _Standards(NamedTuple):
    """Results to compare with: PyTorch's in the same dtype, exact ones, and ones of nudged arguments.

    Attributes:
        same: PyTorch's results in the same dtype.
        exact: The results in float64.
        nudged: Computes ``exact`` for arguments that are off by roundings, by few or coarsely, by a seed.
        beside: Computes both for other arguments in the same dtype, by a seed.
    """

    same: Results
    exact: Results
    nudged: Callable[[bool, int], Results]
    beside: Callable[[int], tuple[Results, Results]]


def judge(case: Case, *, triton: bool = False) -> Answer:
    """Runs a case on every backend that can serve it, and compares what they return."""
    made = make(*case)
    with _settings(case):
        public = functools.partial(call_public, case.subject)
        try:
            with backends.use_backend("reference"):
                forward = made.call._replace(gradient=False).map(tuner._copied)
                douts = [made.douts(out) for out in tuner.run(public, forward, []).outputs]
                same = tuner.run(public, made.call.map(tuner._copied), douts)
        except (ValueError, TypeError, RuntimeError):
            return Answer([], 0)  # the last is PyTorch's, as of half precision under autocast
        names = _able(case.subject, made.call, triton)
        standards = list(_standards(case, made, same, douts))
        flaws, worst = [], 0.0
        for name in names:
            flaw, ratio = _judge_backend(case, made, name, douts, standards)
            flaws += [f"{name} {flaw}"] if flaw else []
            worst = max(worst, 0.0 if flaw else ratio)
    return Answer(flaws, len(names), worst)


@contextlib.contextmanager
def _settings(case: Case) -> Iterator[None]:
    """Lets the block run in the modes of a case."""
    threads = torch.get_num_threads()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.settings["autocast"]):
            yield
    finally:
        torch.set_num_threads(threads)


def _able(operator: str, call: tuner.Call, triton: bool) -> list[str]:
    registered = backends.implementations[operator]
    names = [name for name in registered if name != "reference"]
    requested = [name for name in names if triton or name != "triton"]
    with torch.set_grad_enabled(call.gradient), backends.use_backend(*requested or ["reference"]):
        able = [name for name in requested if backends.why_unsupported(operator, name, call.record) is None]
    # On a CPU the public functions of some operators call others without a choice.
    return [*able, "composed"] if "composed" in registered and "cpu" not in registered else able


def _standards(case: Case, made: Made, same: Results, douts: list[Tensor]) -> Iterator[_Standards]:
    """Yields what results may be compared with: one, or two where some backends do not round."""
    described = backends.operators[case.subject]
    plain = described.reference
    yield _standard(plain, described.exact or plain, made, same, douts)
    if described.unrounded is not None:
        unrounded = tuner.run(described.unrounded, made.call.map(tuner._copied), douts)
        yield _standard(described.unrounded, described.unrounded, made, unrounded, douts)


def _standard(plain: Any, oracle: Any, made: Made, same: Results, douts: list[Tensor]) -> _Standards:
    wide = [dout.double() for dout in douts]

    def run(change: Callable[[Tensor], Tensor], call: tuner.Call = made.call) -> Results:
        with torch.autocast("cpu", enabled=False):
            return tuner.run(oracle, call.map(change), wide)

    @functools.cache
    def nudged(coarsely: bool, seed: int) -> Results:
        generator = torch.Generator().manual_seed(seed)
        return run(lambda tensor: _nudged(tensor, generator, coarsely))

    @functools.cache
    def beside(seed: int) -> tuple[Results, Results]:
        generator = torch.Generator().manual_seed(seed)

        def change(tensor: Tensor) -> Tensor:
            changed = tuner._copied(tensor)
            changed.data.copy_(_nudged(tensor, generator, True).detach())
            return changed

        call = made.call.map(change)
        return tuner.run(plain, call, douts), run(tuner._in_float64, call)

    return _Standards(same, run(tuner._in_float64), nudged, beside)


def _nudged(tensor: Tensor, generator: torch.Generator, coarsely: bool) -> Tensor:
    """Returns a tensor in float64 that is off by roundings: of each number, and of all by one factor.

    They are a few of float32; coarsely, one of the dtype or of autocast, to which compositions round between
    their parts.
    """
    exact = tuner._in_float64(tensor)
    if tuner._is_fine(tensor):
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        most = 4 * torch.finfo(dtype).eps
        if coarsely:
            most = max(most, torch.finfo(tensor.dtype).eps)
        if coarsely and torch.is_autocast_enabled("cpu") and dtype == torch.float32:
            most = torch.finfo(torch.bfloat16).eps
        for shape in (tensor.shape, ()):
            noise = torch.rand(shape, generator=generator, dtype=torch.float64)
            exact.data.mul_(1 + most * (2 * noise - 1))
    return exact


def _judge_backend(
    case: Case, made: Made, name: str, douts: list[Tensor], standards: list[_Standards]
) -> tuple[str | None, float]:
    """Returns what is wrong with a backend, and its largest error as a part of what is allowed."""
    public, threads = functools.partial(call_public, case.subject), case.settings["threads"]
    try:
        with backends.use_backend(name, *_PARTS):
            torch.set_num_threads(1)
            with tuner.guarded_memory() as memory:
                mine = tuner.run(public, made.call.map(memory.copy), douts)
            if memory.is_overwritten():
                return "writes outside of its tensors", 0.0
            if (flaw := _changed(case, made, mine, standards[0].same)) is not None:
                return flaw, 0.0
            found = [_compare(case, made, name, mine, douts, standard) for standard in standards]
            flaw, ratio = next((each for each in found if each[0] is None), found[0])
            if flaw is None and name in backends.OURS:  # PyTorch's may depend on threads and addresses
                torch.set_num_threads(threads)
                again = tuner.run(public, made.call.map(_in_other_memory), douts)
                pairs = zip(mine.outputs + mine.gradients, again.outputs + again.gradients, strict=True)
                if not all(_same_numbers(*pair) for pair in pairs):
                    return f"gives other bits with {threads} threads than with 1 elsewhere in memory", 0.0
    except Exception as error:
        return f"fails: {tuner.describe_error(error)}", 0.0
    return flaw, ratio


def _in_other_memory(tensor: Tensor) -> Tensor:
    """Returns a copy with the strides of a tensor, and with what lies between its numbers."""
    flat = tensor.detach().as_strided((tuner._extent(tensor),), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Returns whether two results have the same bits; which of its NaN two processors make is their own."""
    if not a.is_floating_point() or not b.is_floating_point():
        return _same_bits(a, b)
    a, b = (t.masked_fill(t.isnan(), math.nan) for t in (a, b))
    return _same_bits(a, b)


def _changed(case: Case, made: Made, mine: Results, same: Results) -> str | None:
    """Says which argument was changed that the operator leaves as it is; None if there is none."""
    replaced = [out.data_ptr() for out in mine.outputs] if case.settings.get("inplace") else []
    triples = zip(made.call.tensors(), mine.arguments, same.arguments, strict=True)
    for i, (given, after, expected) in enumerate(triples):
        if after.data_ptr() in replaced:
            continue
        if _same_bits(given.detach(), expected) and not _same_bits(given.detach(), after):
            return f"changes tensor {i} of its arguments"
    return None


# The rule -------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """The facts on which the rule for one result depends, beside the numbers.

    Attributes:
        floor: The error that the roundings of float64 may make.
        autocast: Whether autocast was on.
        is_odd_judged: Whether numbers that are not finite are judged: not where sums of squares overflow, and
            not of PyTorch's own backends: SDPA turns NaN into 0, and oneDNN spreads it.
        slack: By what all that is allowed is multiplied: SDPA's exponential has 20 bits.
        is_nan_infinite: Whether NaN is as good as an infinity: of running statistics, and of compositions,
            which overflow elsewhere on the way.
        may_be_finite: Whether a number may be finite where PyTorch has NaN: gradients of convolutions need
            not multiply zeros of the padding.
        others: For a gradient, the size of the other gradients and the outputs' gradients; else None.
    """

    floor: float
    autocast: bool
    is_odd_judged: bool
    slack: float
    is_nan_infinite: bool
    may_be_finite: bool
    others: float | None


def _compare(
    case: Case, made: Made, name: str, mine: Results, douts: list[Tensor], standard: _Standards
) -> tuple[str | None, float]:
    """Returns the first result that is wrong, or None; and the largest error as a part of what is allowed."""
    worst = 0.0
    floor = 16 * torch.finfo(torch.float64).eps * max(map(_largest, (*made.call.tensors(), *douts)))
    if "gelu" in case.subject:  # where 1 + erf(x / √2) cancels
        floor += torch.finfo(torch.float32).eps / 4 * max(map(_largest, made.call.tensors()))
    others = max((_largest(t) for t in (*standard.exact.gradients, *douts)), default=0.0)
    is_pytorchs = name not in (*backends.OURS, "composed")
    is_ours = name in backends.OURS
    if is_pytorchs and case.settings["values"] in ("shifted", "large", "huge", "largest"):
        return None, 0.0  # SDPA's backward computes probabilities from scores again
    is_odd_judged = not (is_pytorchs or _overflows(case, name))
    slack = _SLACK_OF_PYTORCHS if is_pytorchs else 1.0
    rule = _Rule(floor, case.settings["autocast"], is_odd_judged, slack, name == "composed", False, None)
    gradients = rule._replace(others=others, may_be_finite="conv" in case.subject or "block" in case.subject)
    for kind, rules in (
        ("outputs", rule),
        ("gradients", gradients),
        ("arguments", rule._replace(is_nan_infinite=True)),
    ):
        for i, result in enumerate(getattr(mine, kind)):
            same, exact = getattr(standard.same, kind)[i], getattr(standard.exact, kind)[i]
            if kind == "arguments" and _same_bits(result, same):
                continue
            if rule.autocast and result.dtype == torch.bfloat16 and case.subject in _WITH_EINSUM:
                same = same.bfloat16()  # which is wider where a size is 1
            if result.dtype != same.dtype or result.shape != same.shape:
                got, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (result, same))
                return f"returns {got} as {kind} {i}, expected {expected}", 0.0
            if kind == "outputs" and (ignored := _ignored(case, made, standard, floor)) is not None:
                result, same, exact = (t.masked_fill(ignored, 0) for t in (result, same, exact))
            others = functools.partial(_other_standards, standard, not is_ours, kind, i)
            flaw, ratio = _judge_tensor(rules, result, same, exact, others)
            if flaw is not None:
                return f"{kind} {i} {flaw}", 0.0
            worst = max(worst, ratio)
    return None, worst


def _overflows(case: Case, name: str) -> bool:
    """Returns whether sums may overflow their dtype: sums of squares, or values rounded between parts."""
    values, dtype = case.settings["values"], case.settings["dtype"]
    return values == "largest" or (values == "huge" and dtype == "float16" and name == "composed")


def _ignored(case: Case, made: Made, standard: _Standards, floor: float) -> Tensor | None:
    """Returns where outputs mean nothing, as a mask that broadcasts; None for nowhere."""
    if made.ignored is not None:
        return made.ignored[..., None, None]
    if case.subject == "gelu_quantize":  # rows whose largest number is rounding, by which all are divided
        return standard.exact.outputs[1] * LIMITS[standard.same.outputs[0].dtype] <= floor
    return None


def _other_standards(standard: _Standards, coarsely: bool, kind: str, i: int) -> Iterator[_Pair]:
    """Yields pairs whose difference is allowed as well, since PyTorch's error may be small by luck.

    They are the exact results of arguments that are off by roundings and of the arguments themselves; and
    PyTorch's results and the exact ones of other arguments.
    """
    exact = getattr(standard.exact, kind)[i]
    for seed in range(_NUDGES):
        yield getattr(standard.nudged(coarsely, seed), kind)[i], exact
        same, right = standard.beside(seed)
        yield getattr(same, kind)[i], getattr(right, kind)[i]


def _judge_tensor(
    rule: _Rule, mine: Tensor, same: Tensor, exact: Tensor, others: Callable[[], Iterator[_Pair]]
) -> tuple[str | None, float]:
    """Returns what is wrong with one result, and its error as a part of what is allowed.

    ``others`` computes pairs of results whose difference is allowed as well.
    """
    if not mine.is_floating_point() and mine.dtype != torch.int8:
        return (None, 0.0) if torch.equal(mine, same) else ("is another number than PyTorch's", 0.0)
    if not mine.numel():
        return None, 0.0
    finite = mine.isfinite() & same.isfinite() & exact.isfinite()
    error = _error(rule, mine, same, exact, finite)
    for near, near_exact in () if error.passed else others():
        near = near if near.dtype == mine.dtype else accuracy.rounded(near, mine.dtype)
        both = finite & near.isfinite() & near_exact.isfinite()
        allowed = _error(rule, near, near, near_exact, both).allowed
        error = error._replace(allowed=max(error.allowed, allowed))
        if error.passed:
            break
    if not error.passed:
        return f"is off by {error.ours:.2e}, allowed {error.allowed:.2e}, PyTorch's {error.pytorchs:.2e}", 0.0
    if rule.is_odd_judged and not bool(finite.all()):
        # Where PyTorch has no number, its error counts as none.
        ours = mine.isfinite() & exact.isfinite()
        allowed = _error(rule, mine, accuracy.rounded(exact, mine.dtype), exact, ours).allowed
        wrong = ~finite & ~_is_right(rule, mine, same, exact, max(allowed, error.allowed))
        if bool(wrong.any()):
            values = [t[wrong][0].item() for t in (mine, same, exact)]
            return "is {} where PyTorch has {} and float64 {}".format(*values), 0.0
    return None, error.ours / error.allowed if error.allowed else 0.0


def _error(rule: _Rule, mine: Tensor, same: Tensor, exact: Tensor, finite: Tensor) -> accuracy.Error:
    """Returns the error of the numbers that are all finite."""
    dtype = mine.dtype
    units = tuner._UNITS_OF_FLOAT64 if dtype == torch.float64 else accuracy.usual_units(mine.numel())
    factor = accuracy.VALUE_FACTOR if rule.others is None else accuracy.GRADIENT_FACTOR
    narrow = torch.bfloat16 if rule.autocast and dtype == torch.float32 else None
    if not bool(finite.all()):
        mine, same, exact = (torch.where(finite, t, t.new_zeros(())) for t in (mine, same, exact))
    error = accuracy.compare(mine, same, exact, factor=factor, units=units, dtype=narrow)
    allowed = error.allowed + rule.floor
    if dtype not in accuracy.OF_8_BITS:
        allowed += 4 * torch.finfo(dtype).tiny  # smaller numbers may be zeros
    if rule.others is not None:
        rounding = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        cancels = _largest(exact) <= tuner._CANCELS * rule.others
        allowed += (rounding**0.5 if cancels else _UNITS_OF_OTHERS * rounding) * rule.others
    return error._replace(allowed=allowed * rule.slack)


def _is_right(rule: _Rule, mine: Tensor, same: Tensor, exact: Tensor, allowed: float) -> Tensor:
    """Says of each number whether it is PyTorch's of the same dtype, or the exact one in that dtype."""
    rounded = exact.to(mine.dtype)
    right = (mine == same) | (mine == rounded) | (mine.isnan() & (same.isnan() | exact.isnan()))
    right |= (mine.double() - exact).abs() <= allowed
    if rule.is_nan_infinite:
        right |= ~same.isfinite() & ~mine.isfinite()
    if rule.may_be_finite:
        right |= same.isnan() & mine.isfinite()
    return right


def _largest(tensor: Tensor) -> float:
    """Returns the largest finite absolute value; 0 if there is none."""
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return tensor.detach().double().abs().nan_to_num_(0.0, 0.0, 0.0).max().item()
