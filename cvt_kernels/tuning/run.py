"""Tuning on request: the calls of a model, checked and timed in a process that may die, and remembered."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from .. import backends, checks, choose, messages
from . import choices, tuner
from .calls import OperatorCall, call_of, collect
from .choices import Entry
from .tuner import Measurement
from .worker import Failure, NotEnoughMemory, Worker

#: Seconds that a candidate may take for its check, and each for the timing, unless it is asked for otherwise.
SECONDS = 60.0


def tune(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Checks and times every backend for the operators in a call of a model, and remembers the fastest.

    Nothing else in this package does so: without it, calls are served by the table in ``choose``, which has
    our kernels on CPUs, and on GPUs those that have run on a GPU of that kind. It compares each kernel with
    float64 in guarded memory, and its results before and after the timing bit by bit, in a process that may
    crash or hang. Triton kernels are compiled before, several at once. The choices serve this process at
    once, and later processes on this machine, from ``~/.cache/cvt_kernels/choices/`` (or below
    ``XDG_CACHE_HOME``).

    In evaluation mode it tunes the calls without gradients, as they are within ``torch.inference_mode()``; in
    training mode those of a training step, forward and backward. The model and the random number generators
    stay as they are: a copy is called, by PyTorch's operators, without ``torch.compile`` and CUDA graphs.
    (Your own hooks are copied, and run.) A bar shows the progress where stderr is a terminal.

    Args:
        model: Any module that calls operators of this package, such as an accelerated one.
        args: The positional arguments of its call.
        kwargs: The keyword arguments.

    Returns:
        Cache key → the backend that serves its calls from now on, for each with more than one candidate.

    Raises:
        TypeError: ``model`` is not a module.
        OSError: The process cannot be started, as in a frozen application.
        Exception: What the call raises.
    """
    checks.check_kind("model", model, nn.Module)
    results: list[Result] = []
    tune_all(calls_of(model, *args, **kwargs), SECONDS, results)
    lines = [
        *flaws_of_ours(results),
        *(f"{r.cache_key}: {r.why_not_tuned}" for r in results if r.why_not_tuned),
    ]
    if lines:
        _warn(
            "these kernels were not chosen on this machine; please report them with the output of "
            "`cvt doctor`:\n" + "\n".join(lines)
        )
    return {result.cache_key: result.chosen for result in results if result.chosen is not None}


def calls_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[OperatorCall]:
    """Returns the operator calls that a copy of a model makes in a call with these arguments."""
    from ..graphs import ungraphed

    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=cuda),
        torch.inference_mode(False),
        torch.set_grad_enabled(model.training),
        torch.compiler.set_stance("force_eager"),
    ):
        copied = ungraphed(copy.deepcopy(model))
        return collect(lambda: copied(*args, **kwargs))


class Result(NamedTuple):
    """The result for one cache key: what serves, with the measurements, and why it could not be tuned.

    Where a candidate has a flaw and the timing failed, what serves is one without a flaw.
    """

    cache_key: str
    chosen: str | None
    measurements: dict[str, Measurement]
    why_not_tuned: str | None = None

    @property
    def flaws(self) -> dict[str, str]:
        """The flaws of the backends that failed, by name."""
        return {name: each.flaw for name, each in self.measurements.items() if each.flaw is not None}

    @property
    def is_good(self) -> bool:
        """True if it could be tuned, and no kernel of this project has a flaw."""
        return self.why_not_tuned is None and not any(name in backends.OURS for name in self.flaws)


def tune_all(calls: Sequence[OperatorCall], seconds: float, results: list[Result]) -> None:
    """Tunes calls in a process for each device, and remembers the choices in one piece at the end.

    What is known when someone interrupts it is remembered too. A call with a single candidate has no result.
    A bar shows the progress where stderr is a terminal. ``seconds`` are what a candidate may take for its
    check, and each for the timing.
    """
    for device in sorted({call.device for call in calls}, key=str):
        there = [call for call in calls if call.device == device]
        tuned: dict[str, Entry] = {}
        with Worker(device, seconds) as worker:
            compile_kernels(there, worker)
            try:
                for call in tqdm(there, desc="tune", unit="call", leave=False, disable=None):
                    result = tune_call(call, worker)
                    results += [result] if result is not None else []
                    if result is not None and result.chosen is not None:
                        entry = {result.cache_key: Entry(result.chosen, result.flaws)}
                        tuned |= entry
                        worker.use(entry)
            finally:
                reason = choices.remember(device, tuned)
                backends.forget()  # later calls choose again
                if reason is not None:
                    _warn(f"the choices cannot be written, and serve this process only: {reason}")


def compile_kernels(calls: Sequence[OperatorCall], worker: Worker) -> None:
    """Compiles the Triton kernels of calls ahead, so that compiling does not count towards a time limit."""
    triton = [call for call in calls if {"triton", "gluon"} & backends.implementations[call.operator].keys()]
    if triton and triton[0].device.type == "cuda":
        worker.compile(triton)


def tune_call(call: OperatorCall, worker: Worker) -> Result | None:
    """Checks and times the candidates for a call; returns None if there is only one."""
    measurements: dict[str, Measurement] = {}
    step, reason = "the preparation", None
    try:
        names = worker.candidates(call)
        if len(names) == 1:
            return None
        measurements |= {name: worker.check(call, name) for name in names}
        sound = {name: each for name, each in measurements.items() if each.flaw is None}
        step = "the timing"
        if len(sound) > 1:
            measurements |= worker.time(call, sound)
    except NotEnoughMemory:
        reason = "there is not enough memory"
    except Failure as failure:
        reason = f"{step} {failure}"
    if reason is None or any(each.flaw is not None for each in measurements.values()):
        # Without times too, or what has a flaw might go on serving.
        return Result(
            call.cache_key, tuner.fastest(measurements, names[0], call.device), measurements, reason
        )
    return Result(call.cache_key, None, measurements, reason)


def flaws_of_ours(results: Sequence[Result]) -> Iterator[str]:
    """Yields a line for each kernel of this project that is wrong, fails, hangs or crashes."""
    for result in results:
        for name, flaw in result.flaws.items():
            if name in backends.OURS and "OutOfResources" not in flaw:  # less shared memory is no flaw
                yield f"{name}, {result.cache_key}: {flaw}"


def _warn(message: str) -> None:
    warnings.warn(f"cvt_kernels.tune: {message}", RuntimeWarning, stacklevel=messages.stacklevel_of_caller())


# Without a model ------------------------------------------------------------------------------------------

#: The examples of the operators' cards that are checked, and the dtypes, if the operator takes them.
_EXAMPLES, _DTYPES = ("usual", "odd", "many"), ("float32", "bfloat16")


def check_kernels(device: torch.device, seconds: float = SECONDS) -> dict[str, Measurement]:
    """Checks the kernels of this project that may serve on a device, in a process that may die.

    Returns:
        Backend and cache key → the measurement of the check, which may take ``seconds``, without a time.
    """
    from ..ops.cards import all_cards, make

    asked: dict[tuple[str, str], OperatorCall] = {}
    for operator, card in all_cards().items():
        ours = [name for name, _ in choose.chosen_backends(operator, device) if name in backends.OURS]
        for example, dtype in itertools.product(_EXAMPLES, _DTYPES):
            if ours and dtype in card.choices["dtype"]:
                settings = card.settings({**card.examples[example], "dtype": dtype})
                record = make(operator, settings).call.map(lambda tensor: tensor.to(device)).record
                call = call_of(operator, **record._asdict())
                asked |= {(name, call.cache_key): call for name in ours}
    results: dict[str, Measurement] = {}
    with Worker(device, seconds) as worker:
        compile_kernels(list(asked.values()), worker)
        for (name, key), call in tqdm(asked.items(), desc="check", unit="call", leave=False, disable=None):
            try:
                if name in worker.candidates(call):
                    results[f"{name}, {key}"] = worker.check(call, name)
            except Failure as failure:
                results[f"{name}, {key}"] = Measurement(None, None, None, str(failure))
    return results
