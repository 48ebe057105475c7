"""The tuner: runs candidates in guarded memory, compares them with float64, and times those that pass.

A candidate is a function that computes an operator from the record of a call. It passes if its outputs, its
gradients and the arguments after the call are as accurate as PyTorch's (``accuracy``), and if it writes
nowhere else. All memory that it gets or allocates lies between guard zones, and holds NaN until it is written
(in int8, −128, which no operator returns).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .. import backends, checks, choose, messages
from ..backends import OURS, Record
from ..launch import launching
from . import accuracy, clock
from .choices import FAILS_HERE, Entry, Measurement
from .depthwise import AsSums

#: A candidate replaces the default only if it wins by this factor. With a smaller one, noise decides:
#: on a virtual machine of two cores, with 1.05 one choice of 180 was 15 % slower than the default.
MARGIN = 1.1
#: The same on a GPU, where calls are timed within CUDA graphs and the host makes no noise.
_MARGIN_OF_GPU = 1.03

#: The flaw of a kernel that may have spoilt the memory of its process.
WRITES_OUTSIDE = "wrong: writes outside of its tensors"
#: The flaw of a kernel with a race.
RACES = "wrong: the first and the last of its timed runs have different bits"

_GUARD = 2**16  # bytes on each side, more than a tile of any kernel
_ALIGNMENT = 512  # bytes, as PyTorch's allocators have it
_POISON = -1  # in every byte of a number: NaN in all floating dtypes
_POISON_OF_INT8 = 0x80  # −128: −1 is as good as any other number
_HUGE = 1e15  # sums of squares of larger numbers may overflow float32
_CANCELS = 1e-6  # times the size of other numbers: the limit for a sum that is zero except for rounding
_UNITS = 4  # in the last place, allowed in addition to a multiple of PyTorch's own error
_UNITS_OF_FLOAT64 = 1000  # for results in float64, where PyTorch, being the reference itself, has no error
_NEAR_OF_8_BITS = 0.1  # times the largest exact value: the largest error that rounding to 8 bits may make
_SECONDS, _FEWEST, _MOST = 0.1, 5, 40  # how long to time the candidates of a call, and in how many rounds
_REPLAYED, _CALLS = 0.01, 200  # seconds that the calls of a CUDA graph take without it, and their number

Function = Callable[..., Any]


class Call(NamedTuple):
    """The record of an operator's call, and whether it includes the backward.

    Attributes:
        record: The record.
        gradient: Whether the backward is included.
        score: Turns outputs that are no numbers into some; see :class:`backends.Operator`.
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

    def detached(self) -> Call:
        """Returns the call with detached tensors, which require gradients where the call includes them."""
        return self.map(lambda tensor: tensor.detach().requires_grad_(self.gradient and tensor.requires_grad))

    def tensors(self) -> list[Tensor]:
        """Returns the tensors in the arguments, in order."""
        return checks.tensors_of(self.record)


class Task(NamedTuple):
    """The candidates for one cache key, and the calls that check and time them.

    Attributes:
        cache_key: The cache key of the entry.
        reference: The operator in plain PyTorch: the oracle in float64, and the measure in the call's dtypes.
        candidates: Backend → function.
        default: The candidate that serves unless another wins by :attr:`margin`.
        sample: The call on a few images, for the check, because float64 is slow.
        timed: The call on more images, for the timing.
        exact: Replaces the reference as the oracle, if given.
        unrounded: Computes alternative results that are correct too; see :class:`backends.Operator`.
    """

    cache_key: str
    reference: Function
    candidates: Mapping[str, Function]
    default: str
    sample: Call
    timed: Call
    exact: Function | None = None
    unrounded: Function | None = None

    @property
    def margin(self) -> float:
        """The factor by which another candidate must win against the default."""
        return _MARGIN_OF_GPU if self.timed.device.type == "cuda" else MARGIN

    def expected(self) -> Expected:
        """Runs the reference and returns the results to compare candidates with."""
        return Expected.of(self.reference, self.sample, self.exact, self.unrounded)


_ALL = 2**40  # more images than any call has


def task_of(operator: str, *args: Any, **kwargs: Any) -> Task:
    """Returns the task for a call with these arguments; its candidates are all backends that can serve it."""
    call = backends.operators[operator].bind(*args, **kwargs)
    described, known = backends.operators[operator], backends.implementations[operator]
    x, able, gradient = call[0], choose.able_backends(operator, call), choose.wants_gradient(call)

    def images(factor: int) -> Call:
        return Call(described.sample(factor, call), gradient, described.score)

    with undisturbed(x.device):
        return Task(
            cache_key=choose.cache_key(operator, *args, **kwargs),
            reference=known["reference"].function,
            candidates={name: known[name].function for name in able},
            default=_favored(described.defaults, able),
            sample=images(64 if x.is_cuda else 1),
            timed=images(_ALL if x.is_cuda else 32),  # a GPU is busy with a whole call only
            exact=described.exact,
            unrounded=described.unrounded,
        )


def _favored(defaults: tuple[str, ...], able: list[str]) -> str:
    """Returns the backend that another one replaces by a margin only.

    It is the default, or before ``composed`` our kernel that computes the same in one pass: within a model it
    gains more than a timing shows, since the tensors between the parts are never written to memory.
    """
    fused = OURS if defaults[0] == "composed" else ()
    return next(name for name in (*fused, *defaults) if name in able)


def launches_of(operator: str, *args: Any, **kwargs: Any) -> list[launching.Launch]:
    """Returns the launches of Triton kernels that tuning a call makes; its candidates run on meta tensors."""
    call: Record = backends.operators[operator].bind(*args, **kwargs)
    described, known = backends.operators[operator], backends.implementations[operator]
    chip, launches = launching.chip(call[0].device), list[launching.Launch]()
    gradient, able = choose.wants_gradient(call), choose.able_backends(operator, call)
    for factor, name in itertools.product((64, _ALL), ("gluon", "triton")):
        if name not in able:
            continue
        with undisturbed(call[0].device):
            sample = Call(described.sample(factor, call), gradient).map(_on_meta)
        # An error is described by the candidate's check.
        try:
            with launching.rehearsed_launches(launches.append, chip):
                rehearse(known[name].load().function, sample)
        except Exception as error:
            if messages.is_foreign(error):
                raise
    return launches


def _on_meta(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return like.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Runs the block without the caller's modes and hooks on saved tensors, but with its autocast.

    The state of the random number generators is restored afterwards.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            # Without its cache, which would keep copies of weights.
            dtype = torch.get_autocast_dtype(device.type)
            stack.enter_context(torch.autocast(device.type, dtype, cache_enabled=False))
        yield


def _unchanged(value: Any) -> Any:
    return value


def fastest(measurements: Mapping[str, Measurement], default: str, margin: float = MARGIN) -> Entry:
    """Returns the entry for measurements: the fastest candidate without a flaw wins, if by ``margin``."""
    sound = {name: each for name, each in measurements.items() if each.flaw is None}
    seconds = {name: each.seconds for name, each in sound.items() if each.seconds is not None}
    if not seconds:  # a single one, which was not timed, or all failed only together
        return Entry(default if default in sound else next(iter(sound), "reference"), dict(measurements))
    best = min(seconds, key=seconds.__getitem__)
    wins = default not in seconds or margin * seconds[best] < seconds[default]
    return Entry(best if wins else default, dict(measurements))


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
        sample: The call, with detached tensors.
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
        """Runs the reference; on random numbers where the call's numbers cannot tell right from wrong.

        Raises:
            FloatingPointError: PyTorch's results are not finite on random numbers either.
        """
        sample = sample.detached()
        generator = torch.Generator(sample.device).manual_seed(0)
        varied = sample.map(lambda tensor: tensor if _varies(tensor) else _randomized(tensor, generator))
        expected = cls._run(reference, varied, oracle or reference, unrounded)
        if expected._is_near_exact():
            return expected
        randomized = sample.map(lambda tensor: _randomized(tensor, generator))
        expected = cls._run(reference, randomized, oracle or reference, unrounded)
        if not all(bool(t.isfinite().all()) for t in (*expected.same.outputs, *expected.same.gradients)):
            raise FloatingPointError("PyTorch's own results are not finite, not on random numbers either")
        return expected

    @classmethod
    def _run(
        cls, reference: Function, sample: Call, oracle: Function, unrounded: Function | None = None
    ) -> Expected:
        generator = torch.Generator(sample.device).manual_seed(1)
        call = sample.map(_copied)
        outputs = _forward(reference, call)
        douts = [_randomized(torch.empty_like(out), generator) for out in outputs if sample.gradient]
        same = _results(call, outputs, douts)
        exact = _run_in_float64(oracle, sample.map(_in_float64), douts)
        return cls(reference, oracle, sample, douts, same, exact, unrounded)

    @functools.cached_property
    def other(self) -> Expected | None:
        """The expected results of ``unrounded``, or None."""
        return None if self.unrounded is None else self._run(self.unrounded, self.sample, self.unrounded)

    @functools.cached_property
    def nudged(self) -> Results:
        """The results in float64 for arguments that are perturbed by roundings in float32.

        They show how far rounding may move results, for example a variance of two values, where the error of
        ``same`` may be small by luck.
        """
        generator = torch.Generator(self.sample.device).manual_seed(2)
        nudged = self.sample.map(lambda tensor: _nudged(tensor, generator))
        return _run_in_float64(self.oracle, nudged, self.douts)

    def _is_near_exact(self) -> bool:
        """Returns whether PyTorch's own results are near the exact ones, so that errors of candidates show.

        The tolerance is larger where activations are rounded to 8 bits, which they are not in float64.
        """
        rounds = any(tensor.dtype in accuracy.OF_8_BITS for tensor in self.sample.tensors())
        after = zip(self.sample.tensors(), self.same.arguments, self.exact.arguments, strict=True)
        changed = [(mine, truth) for given, mine, truth in after if not torch.equal(mine, given)]
        results = zip(
            (*self.same.outputs, *self.same.gradients),
            (*self.exact.outputs, *self.exact.gradients),
            strict=True,
        )
        least = _NEAR_OF_8_BITS if rounds else 0.0

        def is_near(result: Tensor, exact: Tensor) -> bool:
            largest = exact.abs().max().item() if exact.numel() else 0.0
            error = accuracy.compare(result, result, exact).ours
            return error <= max(least, torch.finfo(result.dtype).eps ** 0.5) * largest < math.inf

        return all(is_near(mine, truth) for mine, truth in (*results, *changed) if _is_fine(mine))


def _is_fine(tensor: Tensor) -> bool:
    """Returns whether a tensor has floating-point numbers of more than 8 bits; others are taken as exact."""
    return tensor.is_floating_point() and tensor.dtype not in accuracy.OF_8_BITS


def _run_in_float64(reference: Function, call: Call, douts: list[Tensor]) -> Results:
    with torch.autocast(call.device.type, enabled=False), torch._C._EnableTorchFunction(), AsSums():
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
    results = expected.same if function is expected.reference else _run_guarded(function, expected)
    if isinstance(results, str):
        return Measurement(None, None, None, results)
    measurement = _compare(results, expected)
    if measurement.flaw is None or expected.other is None:
        return measurement
    other = _compare(results, expected.other)
    return other if other.flaw is None else measurement


def _run_guarded(function: Function, expected: Expected) -> Results | str:
    """Returns the results of a candidate in guarded memory, or a flaw if there are none to compare."""
    try:
        with guarded_memory() as memory:
            results = run(function, expected.sample.map(memory.copy), expected.douts)
            _wait_for_stream(expected.sample.device)
    except Exception as error:
        if messages.is_foreign(error) or is_out_of_memory(error) or not is_usable(expected.sample.device):
            raise
        return _flaw_of(error)
    return WRITES_OUTSIDE if memory.is_overwritten() else results


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


def _flaw_of(error: Exception) -> str:
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
    errors = [
        *_errors("output", results.outputs, expected, "outputs"),
        *_gradient_errors(results.gradients, expected),
        *_argument_errors(results.arguments, expected),
    ]
    failed = [pair for pair in errors if not pair[1].passed]
    name, worst = failed[0] if failed else max(errors, key=lambda pair: pair[1].ours)
    if not failed:
        return Measurement(worst.ours, worst.allowed, None, None)
    flaw = f"wrong: {name} is off by {worst.ours:.1e}, allowed are {worst.allowed:.1e}"
    return Measurement(worst.ours, worst.allowed, None, flaw)


def _argument_errors(ours: list[Tensor], expected: Expected) -> Iterator[tuple[str, accuracy.Error]]:
    """Yields the errors of arguments after a run, where they differ from those after the reference's run."""
    for i, (given, mine, same) in enumerate(
        zip(expected.sample.tensors(), ours, expected.same.arguments, strict=True)
    ):
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


def _gradient_errors(ours: list[Tensor], expected: Expected) -> Iterator[tuple[str, accuracy.Error]]:
    """Yields the errors of gradients.

    Each is judged by itself, but for those that are sums that cancel, such as the gradient of q for a single
    key. PyTorch's may then be exact by luck, while the rounding that remains in ours depends on the size of
    other numbers.
    """
    exact = expected.exact.gradients
    others = max((t.abs().max().item() for t in (*exact, *expected.douts) if t.numel()), default=0.0)
    errors = _errors("gradient", ours, expected, "gradients", accuracy.GRADIENT_FACTOR)
    for (name, error), mine, truth in zip(errors, ours, exact, strict=True):
        rounding = torch.finfo(torch.promote_types(mine.dtype, torch.float32)).eps
        if not truth.numel() or truth.abs().max().item() <= _CANCELS * others:
            error = error._replace(allowed=error.allowed + rounding**0.5 * others)
        yield name, error


def _errors(
    name: str, ours: list[Tensor], expected: Expected, kind: str, factor: float = accuracy.VALUE_FACTOR
) -> Iterator[tuple[str, accuracy.Error]]:
    """Yields the name and the error of each result in a field of :class:`Results`."""
    for i, mine in enumerate(ours):
        error = _error(mine, expected, kind, i, factor)
        yield f"{name} {i}" if len(ours) > 1 else name, error


def _error(
    mine: Tensor, expected: Expected, kind: str, i: int, factor: float = accuracy.VALUE_FACTOR
) -> accuracy.Error:
    same, exact = getattr(expected.same, kind)[i], getattr(expected.exact, kind)[i]
    units = max(_UNITS, accuracy.usual_units(mine.numel()))
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


def _varies(tensor: Tensor) -> bool:
    """Returns whether a tensor can tell right from wrong: not if constant, or with NaN or huge numbers."""
    if not _is_fine(tensor) or not tensor.numel():
        return True
    if not tensor.ndim:  # a scale
        return bool(0 < tensor < _HUGE)
    return bool(tensor.min() < tensor.max() < _HUGE)  # masks may have −inf


def _randomized(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns random numbers in a tensor's layout; positive for a vector, which may be a variance."""
    if not _is_fine(tensor):
        return tensor
    numbers = torch.randn(_extent(tensor), generator=generator, dtype=torch.float32, device=tensor.device)
    if tensor.ndim < 2:
        numbers = 0.5 + numbers.abs()
    numbers = numbers.to(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return numbers.requires_grad_(tensor.requires_grad)


def _extent(tensor: Tensor) -> int:
    """Returns the number of elements from a tensor's first to its last in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in steps) + 1 if tensor.numel() else 0


# Guarded memory -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded_memory() -> Iterator[GuardedMemory]:
    """Runs the block in :class:`GuardedMemory`, which then includes the extension's allocations."""
    _count_guarded(1)
    try:
        with GuardedMemory() as memory:
            yield memory
    finally:
        _count_guarded(-1)


_lock = threading.Lock()
_guarded = 0  # blocks in guarded memory, in all threads


def _count_guarded(change: int) -> None:
    """Lets the extension allocate through the dispatcher, as long as any block is in guarded memory."""
    global _guarded
    with _lock:
        _guarded += change
        extension = sys.modules.get("cvt_kernels._C")
        if extension is not None:
            extension.dispatch_allocations(_guarded > 0)


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
        before, behind = start // 8, -(-(start + size) // 8)
        signed = words.view(torch.int8)
        edges = signed[8 * before : start], signed[start + size : 8 * behind]
        self._zones += [words[:before], words[behind:], *(edge for edge in edges if edge.numel())]
        offset = start // like.element_size()
        return buffer.view(like.dtype).as_strided(like.shape, like.stride(), offset)

    def is_overwritten(self) -> bool:
        """Returns whether something was written into a guard zone."""
        return any(bool((zone != _POISON).any()) for zone in self._zones)


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
#: Other operators that give kernels memory to write into.
_FILLED = {
    torch.ops.aten.clone.default,
    torch.ops.aten.full.default,
    torch.ops.aten.full_like.default,
    torch.ops.aten.new_full.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.ones_like.default,
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
}


# Speed ----------------------------------------------------------------------------------------------------


def time_in_turns(
    candidates: Mapping[str, Function], call: Call, measurements: Mapping[str, Measurement]
) -> dict[str, Measurement]:
    """Times candidates that passed, in turns with a cold L2.

    On a GPU all of them are timed in CUDA graphs, or if one cannot be captured, none. A candidate whose
    results before and after the timing have other bits has a race, which a single check rarely shows.

    Returns:
        The given measurements with the seconds of the fastest run, or with a flaw if a candidate fails on
        this larger call.
    """
    # Vectors may be running statistics, which calls would change.
    call = call.detached().map(lambda tensor: _copied(tensor) if tensor.ndim < 2 else tensor)
    results, runners, first = {}, {}, {}
    kept = call.map(_copied)  # timed runs may write to their arguments
    for name, function in candidates.items():
        try:
            first[name] = _numbers_of(function, kept)
            runners[name] = runner_of(function, call)
            runners[name]()
            _wait_for_stream(call.device)
        except Exception as error:
            if messages.is_foreign(error) or is_out_of_memory(error) or not is_usable(call.device):
                raise
            runners.pop(name, None)
            results[name] = measurements[name]._replace(flaw=_flaw_of(error))
    names = list(runners)
    graphs = _replays(list(runners.values()), call)
    measured = clock.cold_seconds_in_turns(
        graphs or list(runners.values()), call.device, _SECONDS, fewest=_FEWEST, most=_MOST
    )
    for name, times in zip(names, measured, strict=True):
        results[name] = measurements[name]._replace(seconds=min(times))
        if not all(map(_same_bits, first[name], _numbers_of(candidates[name], kept))):
            results[name] = results[name]._replace(flaw=RACES)
    clock.release_memory(call.device)
    return results


def _numbers_of(function: Function, call: Call) -> list[Tensor]:
    """Returns the outputs and the gradients of a copy of a call."""
    call = call.map(_copied)
    outputs = _forward(function, call)
    return [
        *outputs,
        *(_gradients(call, outputs, list(map(torch.ones_like, outputs))) if call.gradient else ()),
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def _replays(runners: list[Callable[..., Any]], call: Call) -> list[clock.Replay] | None:
    """Returns CUDA graphs of calls by each runner, on the same inputs; None for no GPU, or no graph."""
    if call.device.type != "cuda":
        return None
    seconds = []
    for run in runners:
        start = clock.now(call.device)
        run()
        seconds.append(clock.now(call.device) - start)
    calls = max(2, min(_CALLS, int(_REPLAYED / min(seconds))))
    size = sum(tensor.nbytes for tensor in call.tensors())
    copies = [call.map(_copied) for _ in range(clock.copies_that_fill_cache(size, calls))]
    return clock.replays(
        [[functools.partial(run, copies[i % len(copies)]) for i in range(calls)] for run in runners]
    )


def runner_of(function: Function, call: Call) -> Callable[..., Any]:
    """Returns the function to time for a candidate, with the backward if the call includes it.

    It may be given other calls, which differ in the numbers only.
    """

    def run_forward(call: Call = call) -> Any:
        with torch.no_grad():
            return function(call.record)

    if not call.gradient:
        return run_forward
    # With gradients here too: without them, other kernels would be compiled.
    douts = [torch.ones_like(out) for out in _forward(function, call)]

    def run_both(call: Call = call) -> Any:
        _gradients(call, _flat(function(call.record)), douts)

    return run_both


def rehearse(function: Function, call: Call) -> None:
    """Runs a candidate on meta tensors, for the launches that its check and its timing make."""
    with undisturbed(call.device):
        call = call.detached()
        outputs = _forward(function, call)
        if call.gradient:
            _gradients(call, outputs, [torch.empty_like(out) for out in outputs])
