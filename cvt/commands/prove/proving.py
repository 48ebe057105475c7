"""The proof of one question after another, by a process that may hang or die of a kernel."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from cvt_kernels import backends, proofs
from cvt_kernels.verdicts import Store, Trial, Verdict

from .questions import Question
from .worker import Failure, NotEnoughMemory, Worker


class Result(NamedTuple):
    """The result of one question: its verdict, or why it is not proven."""

    question: str
    verdict: Verdict | None
    why_not_proven: str | None = None

    @property
    def flaws(self) -> dict[str, str]:
        """The backends that cannot serve, each with its flaw."""
        trials = self.verdict.trials if self.verdict is not None else {}
        return {name: trial.flaw for name, trial in trials.items() if trial.flaw is not None}

    @property
    def is_good(self) -> bool:
        """True if there is an answer, and no kernel of this project has a flaw."""
        return self.verdict is not None and not any(name in backends.OURS for name in self.flaws)


#: Processes that compile side by side; each holds a context of the GPU.
_MOST_COMPILERS = 8


def compile_ahead(questions: Iterable[Question], device: torch.device, until: float = math.inf) -> None:
    """Compiles the Triton kernels for questions in several processes, until a time of ``time.monotonic()``.

    So compilation does not count as the time of a kernel. What does not compile shows when it is proven.
    """
    todo = [each for each in questions if "triton" in backends.implementations[each.operator]]
    processes = min(_MOST_COMPILERS, len(os.sched_getaffinity(0)), len(todo))

    def compile_part(part: Sequence[Question]) -> None:
        with Worker(device, 0.0) as worker:
            for question in part:
                if time.monotonic() < until:
                    with contextlib.suppress(Failure):
                        worker.compile(question)

    if todo:
        with ThreadPoolExecutor(processes) as threads:
            list(threads.map(compile_part, [todo[i::processes] for i in range(processes)]))


def prove_all(
    questions: Iterable[Question], worker: Worker, store: Store, until: float = math.inf
) -> Iterator[Result]:
    """Proves questions, and yields each result once its verdict is in the store.

    A question with a single backend has no result. Nothing begins after ``until``, of ``time.monotonic()``.
    """
    for question in questions:
        if time.monotonic() >= until:
            yield Result(question.text, None, "the time limit was reached before")
            continue
        with store.proving():
            result = prove(question, worker)
            if result is None:
                continue
            if result.verdict is not None and store.why_not_remembered() is None:
                store.remember({question.text: result.verdict}, replace=True)
        yield result


def prove(question: Question, worker: Worker) -> Result | None:
    """Checks and times the candidates for a question; returns None if there is only one."""
    try:
        candidates = worker.candidates(question)
        if len(candidates.names) == 1:
            return None
        trials = {name: worker.check(question, name) for name in candidates.names}
        trials |= _time(question, trials, worker)
    except NotEnoughMemory:
        return Result(question.text, None, "there is not enough memory")
    except Failure as failure:
        return Result(question.text, None, f"the preparation {failure}")
    return Result(question.text, proofs.choose(trials, candidates.default))


def _time(question: Question, trials: dict[str, Trial], worker: Worker) -> dict[str, Trial]:
    """Times the candidates without a flaw, in turns; if that fails, again without those that fail alone."""
    results: dict[str, Trial] = {}
    sound = {name: trial for name, trial in trials.items() if trial.flaw is None}
    while len(sound) > 1:
        try:
            return results | worker.time(question, sound)
        except NotEnoughMemory:
            raise
        except Failure:
            failing = {name: _flaw_alone(question, name, trial, worker) for name, trial in sound.items()}
        flawed = {name: sound.pop(name)._replace(flaw=flaw) for name, flaw in failing.items() if flaw}
        if not flawed:  # they fail only together, so that nothing is known about their speed
            break
        results |= flawed
    return results


def _flaw_alone(question: Question, name: str, trial: Trial, worker: Worker) -> str | None:
    """Returns the flaw that a candidate shows when it is timed beside itself; None if there is none."""
    try:
        worker.time(question, {name: trial})
    except NotEnoughMemory:
        raise
    except Failure as failure:
        return str(failure)
    return None
