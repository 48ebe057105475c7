"""The tuner: runs candidates in guarded memory, compares them with float64, and times those that pass.

A candidate is a function that computes an operator from the record of a call. It passes if its outputs, its
gradients and the arguments after the call are as accurate as PyTorch's (``accuracy``), and if it writes
nowhere else. All memory that it gets or allocates lies between guard zones, and holds NaN until it is written
(in int8, −128, which no operator returns).
"""

from __future__ import annotations

import contextlib
import functools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .. import backends, checks, choose
from ..backends import OURS
from ..launch import launching
from . import accuracy, clock
from .choices import FAILS_HERE

if TYPE_CHECKING:
    from ..declaration import Declaration

#: A candidate replaces the default only if it wins by this factor. With a smaller one, noise decides:
#: on a virtual machine of two cores, with 1.05 one choice of 180 was 15 % slower than the default.
MARGIN = 1.1
#: The same on a GPU, where many calls are timed in one CUDA graph and the host makes no noise.
MARGIN_OF_GPU = 1.03

#: The flaw of a kernel that may have spoilt the memory of its process.
WRITES_OUTSIDE = "wrong: writes outside of its tensors"
#: The flaw of a kernel with a race.
RACES = "wrong: the first and the last of its timed runs have different bits"

_GUARD = 2**16  # bytes on each side, more than a tile of any kernel
_ALIGNMENT = 512  # bytes, as PyTorch's allocators have it
_POISON = -1  # in every byte of a number: NaN in all floating dtypes
_POISON_OF_INT8 = 0x80  # −128: −1 is as good as any other number
_CANCELS = 1e-6  # times the size of other numbers: the limit for a sum that is zero except for rounding
_UNITS = 4  # in the last place, allowed in addition to a multiple of PyTorch's own error
_UNITS_OF_FLOAT64 = 1000  # for results in float64, where PyTorch, being the reference itself, has no error
_SECONDS, _FEWEST, _MOST = 0.1, 5, 40  # how long to time the candidates of a call, and in how many rounds
_CALLS, _COPIED = 20, 2**28  # in a CUDA graph, or fewer: their arguments have this many bytes at most

Function = Callable[..., Any]


class Measurement(NamedTuple):
    """The error and the time of one candidate.

    Attributes:
        error: Its largest error against float64; None if there is no number.
        allowed: The largest allowed error.
        seconds: The fastest run, with a cold L2: on a GPU of the device, on a CPU of the call. None if it was
            not timed.
        flaw: Why it cannot serve, or None: ``wrong: …``, ``fails: …``, ``fails here: …``, ``hangs: …`` or
            ``dies: …``.
    """

    error: float | None
    allowed: float | None
    seconds: float | None
    flaw: str | None


class Call(NamedTuple):
    """The record of an operator's call, and whether it includes the backward.

    Attributes:
        record: The record.
        gradient: Whether the backward is included.
        score: Turns outputs that are no numbers into some; see ``Declaration``.
    """

    record: Any
    gradient: bool
    score: Callable[[Any, list[Tensor]], list[Tensor]] | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first argument."""
        return self.record[0].device

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """Returns the call with ``function`` applied once to each tensor."""
        known: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = function(tensor)
            return known[id(tensor)]

        return self._replace(record=pytree.tree_map_only(Tensor, once, self.record))

    def tensors(self) -> list[Tensor]:
        """Returns the tensors in the arguments, in order."""
        return checks.tensors_of(self.record)


class Task(NamedTuple):
    """The candidates for a call, and the calls that check and time them.

    Attributes:
        candidates: Backend → function; the first serves unless another is clearly faster.
        sample: The call on a few images, for the check, because float64 is slow.
        timed: The call on more images, for the timing.
        operator: The operator.
    """

    candidates: Mapping[str, Function]
    sample: Call
    timed: Call
    operator: Declaration

    def expected(self) -> Expected:
        """Runs the reference and returns the results to compare candidates with."""
        reference = backends.implementations[self.operator.name]["reference"].function
        return Expected.of(reference, self.sample, self.operator.exact, self.operator.unrounded)


_ALL = 2**40  # more images than any call has


def task_of(operator: str, *args: Any, **kwargs: Any) -> Task:
    """Returns the task for a call with these arguments; its candidates are all backends that can serve it."""
    call = backends.operators[operator].bind(*args, **kwargs)
    described, known = backends.operators[operator], backends.implementations[operator]
    x, able, gradient = call[0], choose.able_backends(operator, call), choose.wants_gradient(call)
    default = _favored(described.defaults, able)

    def images(factor: int) -> Call:
        return Call(described.sample(factor, call), gradient, described.score)

    return Task(
        candidates={name: known[name].function for name in (default, *(n for n in able if n != default))},
        sample=images(64 if x.is_cuda else 1),
        timed=images(_ALL if x.is_cuda else 32),  # a GPU is busy with a whole call only
        operator=described,
    )


def _favored(defaults: tuple[str, ...], able: list[str]) -> str:
    """Returns the backend that another one replaces by a margin only.

    It is the default, or before ``composed`` our kernel that computes the same in one pass: within a model it
    gains more than a timing shows, since the tensors between the parts are never written to memory.
    """
    fused = OURS if defaults[0] == "composed" else ()
    return next(name for name in (*fused, *defaults) if name in able)


def launches_of(task: Task, chip: launching.Chip) -> list[launching.Launch]:
    """Returns the launches of Triton kernels that the check and the timing of a task make."""
    found = []
    for call in (task.sample, task.timed):
        for name in (name for name in ("gluon", "triton") if name in task.candidates):
            # An error is described by the candidate's check.
            with contextlib.suppress(Exception), launching.recorded_launches(chip) as launches:
                _numbers_of(task.candidates[name], call)
            found += launches
    return found


def fastest(measurements: Mapping[str, Measurement], default: str, device: torch.device) -> str:
    """Returns the fastest candidate without a flaw, or the default if that is slower by a margin at most."""
    sound = {name: each for name, each in measurements.items() if each.flaw is None}
    seconds = {name: each.seconds for name, each in sound.items() if each.seconds is not None}
    if not seconds:  # a single one, which was not timed
        return default if default in sound else next(iter(sound), "reference")
    best, margin = min(seconds, key=seconds.__getitem__), MARGIN_OF_GPU if device.type == "cuda" else MARGIN
    return best if default not in seconds or margin * seconds[best] < seconds[default] else default


# Correctness ----------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """The outputs of a run, the gradients of arguments that require one, and all arguments after the run."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    arguments: list[Tensor]


@dataclass
class Expected:
    """The expected results on a sample of a call.

    Attributes:
        reference: The operator in plain PyTorch, which need not be checked.
        oracle: Computes the exact results in float64.
        sample: The call.
        douts: Gradients of the outputs, if the call includes the backward.
        same: The reference's results in the dtypes of the call.
        exact: The oracle's results in float64.
        unrounded: Computes alternative results that are correct too.
    """

    reference: Function
    oracle: Function
    sample: Call
    douts: list[Tensor]
    same: Results
    exact: Results
    unrounded: Function | None = None

    @classmethod
    def of(
        cls,
        reference: Function,
        sample: Call,
        oracle: Function | None = None,
        unrounded: Function | None = None,
    ) -> Expected:
        """Runs the reference in the dtypes of the call, and the oracle in float64.

        It raises FloatingPointError if PyTorch's results are not finite.
        """
        oracle = oracle or reference
        generator = torch.Generator(sample.device).manual_seed(1)
        call = sample.map(_copied)
        outputs = _forward(reference, call)
        douts = [_random_like(out, generator) for out in outputs if sample.gradient]
        same = _results(call, outputs, douts)
        if not all(bool(t.isfinite().all()) for t in (*same.outputs, *same.gradients) if _is_fine(t)):
            raise FloatingPointError("PyTorch's own results are not finite")
        exact = _run_in_float64(oracle, sample.map(_in_float64), douts)
        return cls(reference, oracle, sample, douts, same, exact, unrounded)

    @functools.cached_property
    def other(self) -> Expected | None:
        """The expected results of ``unrounded``, or None."""
        return None if self.unrounded is None else self.of(self.unrounded, self.sample)

    @functools.cached_property
    def nudged(self) -> Results:
        """The results in float64 for arguments that are perturbed by roundings in float32.

        They show how far rounding may move results, for example a variance of two values, where the error of
        ``same`` may be small by luck.
        """
        generator = torch.Generator(self.sample.device).manual_seed(2)
        nudged = self.sample.map(lambda tensor: _nudged(tensor, generator))
        return _run_in_float64(self.oracle, nudged, self.douts)


def _is_fine(tensor: Tensor) -> bool:
    """Returns whether a tensor has floating-point numbers of more than 8 bits; others are taken as exact."""
    return tensor.is_floating_point() and tensor.dtype not in accuracy.OF_8_BITS


def _run_in_float64(reference: Function, call: Call, douts: list[Tensor]) -> Results:
    with torch.autocast(call.device.type, enabled=False):
        return run(reference, call, [dout.double() for dout in douts])


def run(function: Function, call: Call, douts: list[Tensor]) -> Results:
    """Runs a function on a call, which it may change, and the backward if the call includes it."""
    return _results(call, _forward(function, call), douts)


def _forward(function: Function, call: Call) -> list[Tensor]:
    with torch.set_grad_enabled(call.gradient):
        return _flat(function(call.record))


def _results(call: Call, outputs: list[Tensor], douts: list[Tensor]) -> Results:
    gradients = _gradients(call, outputs, douts) if call.gradient else []
    outputs = outputs if call.score is None else call.score(call.record, outputs)
    return Results([out.detach() for out in outputs], gradients, [t.detach() for t in call.tensors()])


def _gradients(call: Call, outputs: list[Tensor], douts: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of arguments that require one, with zeros for unused arguments."""
    leaves = [t for t in call.tensors() if t.requires_grad]
    pairs = [pair for pair in zip(outputs, douts, strict=True) if pair[0].requires_grad]
    roots, grads = zip(*pairs, strict=True) if pairs else ((), ())
    given = torch.autograd.grad(roots, leaves, grads, allow_unused=True)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, given, strict=True)
    ]


def check(function: Function, expected: Expected) -> Measurement:
    """Runs a candidate on the sample in guarded memory, and compares its results with the expected ones.

    The reference does not run again: its results are among the expected ones.
    """
    results = expected.same
    if function is not expected.reference:
        with guarded_memory() as memory:
            results = run(function, expected.sample.map(memory.copy), expected.douts)
            _wait_for_stream(expected.sample.device)
        if memory.is_overwritten():
            return Measurement(None, None, None, WRITES_OUTSIDE)
    measurement = _compare(results, expected)
    if measurement.flaw is None or expected.other is None:
        return measurement
    other = _compare(results, expected.other)
    return other if other.flaw is None else measurement


def _wait_for_stream(device: torch.device) -> None:
    """Synchronizes the current stream only: other streams may wait for processes that wait for this one."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def is_usable(device: torch.device) -> bool:
    """Returns whether a device still works: after an illegal access, no GPU does in the whole process."""
    try:
        torch.zeros(1, device=device).add_(1)
        _wait_for_stream(device)
    except RuntimeError:
        return False
    return True


def flaw_of(error: Exception) -> str:
    """Returns the flaw of a candidate that raises an error."""
    # The kernel could not be built, loaded or started; Triton's errors have no types of their own.
    is_of_environment = isinstance(error, OSError | ImportError | subprocess.SubprocessError)
    is_of_environment |= any(words in str(error) for words in _PASSING)
    return f"{FAILS_HERE if is_of_environment else 'fails: '}{describe_error(error)}"


#: In errors that the next run may not meet: no compiler, one that was killed, a capture elsewhere.
_PASSING = ("Failed to find C compiler", "failed with error code -", "when stream is capturing")


def describe_error(error: Exception) -> str:
    """Returns an error's type and the first line of its message, then the same of its cause.

    If the cause is in Triton's compiler, whose messages begin with the source, it is the last line.
    """
    cause = error
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    described = f"{type(error).__name__}: {_lines(error)[0]}"
    if type(cause).__name__ == "CompilationError":
        return f"{described} {_lines(cause)[-1]}"
    return described if cause is error else f"{described} {type(cause).__name__}: {_lines(cause)[0]}"


def _lines(error: Exception) -> list[str]:
    return [line for line in str(error).splitlines() if line.strip()] or ["no reason given"]


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an error means that memory is short; on a CPU, PyTorch's has no type of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error) for words in ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED"))


def _compare(results: Results, expected: Expected) -> Measurement:
    """Returns a measurement with the largest error of the results, or the first one that is not allowed."""
    shapes = [(out.dtype, out.shape) for out in results.outputs]
    due = [(out.dtype, out.shape) for out in expected.same.outputs]
    if shapes != due:
        return Measurement(None, None, None, f"wrong: returns {shapes}, expected {due}")
    errors = list(_errors(results, expected))
    failed = [pair for pair in errors if not pair[1].passed]
    name, worst = failed[0] if failed else max(errors, key=lambda pair: pair[1].ours)
    if not failed:
        return Measurement(worst.ours, worst.allowed, None, None)
    flaw = f"wrong: {name} is off by {worst.ours:.1e}, allowed are {worst.allowed:.1e}"
    return Measurement(worst.ours, worst.allowed, None, flaw)


def _errors(results: Results, expected: Expected) -> Iterator[tuple[str, accuracy.Error]]:
    """Yields the name and the error of each result.

    Each is judged by itself, but for gradients that are sums that cancel, such as those of q for a single
    key. PyTorch's may then be exact by luck, while the rounding that remains in ours depends on the size of
    other numbers. Arguments count only where they differ from those after the reference's run.
    """
    for i, mine in enumerate(results.outputs):
        yield f"output {i}", _error(mine, expected, "outputs", i)
    truths = expected.exact.gradients
    others = max((t.abs().max().item() for t in (*truths, *expected.douts) if t.numel()), default=0.0)
    for i, (mine, truth) in enumerate(zip(results.gradients, truths, strict=True)):
        error = _error(mine, expected, "gradients", i, accuracy.GRADIENT_FACTOR)
        rounding = torch.finfo(torch.promote_types(mine.dtype, torch.float32)).eps
        if not truth.numel() or truth.abs().max().item() <= _CANCELS * others:
            error = error._replace(allowed=error.allowed + rounding**0.5 * others)
        yield f"gradient {i}", error
    after = zip(expected.sample.tensors(), results.arguments, expected.same.arguments, strict=True)
    for i, (given, mine, same) in enumerate(after):
        if mine is same or torch.equal(mine, same):
            continue
        if torch.equal(given, same) or not given.is_floating_point():
            error = accuracy.compare(mine.double(), same.double(), same.double(), factor=0.0, units=0.0)
        else:
            error = _error(mine, expected, "arguments", i)
            # A sum with the old value is rounded at the old value's size.
            coarseness = _UNITS * torch.finfo(given.dtype).eps * given.abs().max().item()
            error = error._replace(allowed=error.allowed + coarseness)
        yield f"tensor {i} of the arguments, after the call,", error


def _error(
    mine: Tensor, expected: Expected, kind: str, i: int, factor: float = accuracy.VALUE_FACTOR
) -> accuracy.Error:
    """Returns the error of one result in a field of :class:`Results`."""
    same, exact = getattr(expected.same, kind)[i], getattr(expected.exact, kind)[i]
    units: float = max(_UNITS, accuracy.usual_units(mine.numel()))
    if mine.dtype == torch.float64:
        units = _UNITS_OF_FLOAT64
    error = accuracy.compare(mine, same, exact, factor=factor, units=units)
    if error.passed:
        return error
    nudged = accuracy.rounded(getattr(expected.nudged, kind)[i], mine.dtype)
    by_rounding = accuracy.compare(mine, nudged, exact, factor=factor, units=units)
    return max(error, by_rounding, key=lambda each: each.allowed if each.allowed < math.inf else 0.0)


def _flat(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _in_float64(tensor: Tensor) -> Tensor:
    exact = tensor.detach().to(torch.float64, copy=True) if _is_fine(tensor) else _copied(tensor)
    return exact.requires_grad_(tensor.requires_grad)


def _nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a tensor in float64, perturbed by up to a few units in the last place of float32."""
    exact = _in_float64(tensor)
    if _is_fine(tensor):
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=tensor.device)
        most = _UNITS * torch.finfo(torch.promote_types(tensor.dtype, torch.float32)).eps
        exact.data.mul_(1 + most * (2 * noise - 1))
    return exact


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    numbers = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    return torch.empty_like(tensor).copy_(numbers)


def _extent(tensor: Tensor) -> int:
    """Returns the number of elements from a tensor's first to its last in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps) + 1 if tensor.numel() else 0


# Guarded memory -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded_memory() -> Iterator[GuardedMemory]:
    """Runs the block in :class:`GuardedMemory`, which then includes the extension's allocations."""
    extension = sys.modules.get("cvt_kernels._C")
    if extension is not None:
        extension.dispatch_allocations(True)
    try:
        with GuardedMemory() as memory:
            yield memory
    finally:
        if extension is not None:
            extension.dispatch_allocations(False)


class GuardedMemory(TorchDispatchMode):
    """A mode in which memory holds NaN until it is written, and lies between guard zones."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first tuning would import torch._dynamo, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self._zones: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "cvt_kernels":
            # Past the Python dispatch key, which brought the call here; its allocations then come here too.
            tensors = (t for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
            key = torch._C.DispatchKey.CUDA if next(tensors).is_cuda else torch._C.DispatchKey.CPU
            with self:
                return function.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        result = function(*args, **kwargs)
        if function not in _ALLOCATIONS and function not in _FILLED:
            return result
        guarded = self._allocate(result, result.untyped_storage().nbytes())
        return guarded.copy_(result) if function in _FILLED else guarded

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a tensor with its strides and its alignment."""
        flat = tensor.detach().as_strided((_extent(tensor),), (1,))
        shift = tensor.data_ptr() % _ALIGNMENT
        copy = self._allocate(flat, flat.nbytes, shift - shift % flat.element_size()).copy_(flat)
        return copy.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)

    def _allocate(self, like: Tensor, size: int, shift: int = 0) -> Tensor:
        """Returns poisoned memory of ``size`` bytes with the dtype, shape and strides of a tensor.

        It begins ``shift`` bytes after an aligned address.
        """
        start = _GUARD + shift
        padded = -(-(start + size + _GUARD) // _ALIGNMENT) * _ALIGNMENT
        with _disable_current_modes():  # this one, if copy() is called within it
            # As words, an eighth as many as bytes: on a busy machine threads wait for each other.
            words = torch.full((padded // 8,), _POISON, dtype=torch.int64, device=like.device)
            buffer = words.view(torch.uint8)
            if like.dtype == torch.int8:
                buffer[start : start + size] = _POISON_OF_INT8
        numbers = words.view(torch.int8)
        self._zones += [numbers[:start], numbers[start + size :]]
        offset = start // like.element_size()
        return buffer.view(like.dtype).as_strided(like.shape, like.stride(), offset)

    def is_overwritten(self) -> bool:
        """Returns whether something was written into a guard zone."""
        return any(bool((zone != _POISON).any()) for zone in self._zones)


def _overloads(*names: str) -> set[Any]:
    return {getattr(torch.ops.aten, name).default for name in names}


_ALLOCATIONS = _overloads("empty_like", "empty_strided", "new_empty", "new_empty_strided")
_ALLOCATIONS.add(torch.ops.aten.empty.memory_format)
#: Other operators that give kernels memory to write into.
_FILLED = _overloads(
    "clone", "full", "full_like", "new_full", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"
)


# Speed ----------------------------------------------------------------------------------------------------


def time_in_turns(
    candidates: Mapping[str, Function], call: Call, measurements: Mapping[str, Measurement]
) -> dict[str, Measurement]:
    """Times candidates that passed, in turns with a cold L2.

    On a GPU all of them are timed in CUDA graphs, or if one cannot be captured, none. Each has several calls,
    since its start takes as long as a small kernel, on copies of the arguments, which L2 has not. A candidate
    whose results before and after the timing have other bits has a race, which a single check rarely shows.

    Returns:
        The given measurements with the seconds of the fastest run, or with the flaw.
    """
    kept = call.map(_copied)  # timed runs may write to their arguments
    first = {name: _numbers_of(function, kept.map(_copied)) for name, function in candidates.items()}
    runs = [runner_of(function, call) for function in candidates.values()]
    calls = 1
    if call.device.type == "cuda":
        size = sum(tensor.nbytes for tensor in call.tensors())
        copy = GuardedMemory().copy  # keeps strides
        copies = [call.map(copy) for _ in range(min(_CALLS, _COPIED // (size + 1)) or 1)]
        graphs: list[Any] = [
            clock.graph_replay(*(runner_of(function, each) for each in copies))
            for function in candidates.values()
        ]
        if None not in graphs:
            runs, calls = graphs, len(copies)
    measured = clock.cold_seconds_in_turns(runs, call.device, _SECONDS, fewest=_FEWEST, most=_MOST)
    results = {}
    for (name, function), times in zip(candidates.items(), measured, strict=True):
        is_same = all(map(_same_bits, first[name], _numbers_of(function, kept.map(_copied))))
        seconds = min(times) / calls
        results[name] = measurements[name]._replace(seconds=seconds, flaw=None if is_same else RACES)
    clock.release_memory(call.device)
    return results


def rehearse(function: Function, call: Call) -> None:
    """Runs a candidate on the call that will be timed, which may fail where a sample does not."""
    _numbers_of(function, call)
    _wait_for_stream(call.device)


def _numbers_of(function: Function, call: Call) -> list[Tensor]:
    """Returns the outputs and the gradients of a call."""
    outputs = _forward(function, call)
    gradients = _gradients(call, outputs, list(map(torch.ones_like, outputs))) if call.gradient else []
    return [*outputs, *gradients]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def runner_of(function: Function, call: Call) -> Callable[[], None]:
    """Returns the function to time for a candidate, with the backward if the call includes it."""
    douts = list(map(torch.ones_like, _forward(function, call))) if call.gradient else []

    def run() -> None:
        outputs = _forward(function, call)
        if call.gradient:
            _gradients(call, outputs, douts)

    return run
