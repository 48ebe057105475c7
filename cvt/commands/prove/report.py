"""The report of ``cvt prove``: the table that it prints, what it says about the whole, and its JSON file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from cvt_kernels import __version__, backends
from cvt_kernels.tables import aligned
from cvt_kernels.verdicts import FAILS_HERE, Store, Trial, Verdict
from cvt_kernels.verdicts.files import storable

from .proving import Result
from .questions import Workload

#: Written into the JSON file. The version changes whenever a reader of the old ones would fail.
SCHEMA, VERSION = "cvt prove", 1


class _Kind(NamedTuple):
    """The calls that share a block of the table."""

    operator: str
    direction: str
    dtype: str


def table(results: Sequence[Result]) -> list[str]:
    """Returns the lines of a table: a block for each operator, direction and dtype, a line for each question.

    A backend's column has microseconds, or its flaw in a word; the error is the largest of our kernels'.
    """
    blocks: dict[_Kind, list[Result]] = {}
    for result in results:
        kind, _ = _kind_and_case(result.question)
        blocks.setdefault(kind, []).append(result)
    lines: list[str] = []
    for kind, block in blocks.items():
        lines += [""] * bool(lines) + [f"{', '.join(kind)} (times in µs)", *_rows(block)]
    return lines


def _rows(results: Sequence[Result]) -> list[str]:
    """Returns the lines of a block, with the columns of the backends that were tried for it."""
    names = [name for name in backends.BACKENDS if any(name in _trials(result) for result in results)]
    heading = ["case", *names, "error / allowed", "chosen"]
    rows = [[_kind_and_case(result.question)[1], *_cells(result, names)] for result in results]
    return aligned([heading, *rows], right=range(1, 2 + len(names)))


def _kind_and_case(question: str) -> tuple[_Kind, str]:
    """Returns the two parts of a question, without the geometry of convolutions."""
    operator, direction, dtype, case = question.split(", ", 3)
    kind = _Kind(operator, direction, dtype.replace(" under autocast to ", " → "))
    return kind, case.split(", kernel/")[0]


def _cells(result: Result, names: Sequence[str]) -> list[str]:
    trials = _trials(result)
    ours = [trials[name] for name in backends.OURS if name in trials]
    errors = [trial.error / trial.allowed for trial in ours if trial.error is not None and trial.allowed]
    error = f"{max(errors):.2g}" if errors else "–"
    return [*(_cell(trials.get(name)) for name in names), error, _chosen(result.verdict)]


def _cell(trial: Trial | None) -> str:
    if trial is None:
        return "–"
    if trial.flaw is not None:
        return trial.flaw.partition(":")[0]
    return "right" if trial.call_seconds is None else f"{1e6 * trial.call_seconds:.0f}"


def _chosen(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not proven"
    in_graphs = verdict.chosen_in_graphs
    return verdict.chosen if in_graphs == verdict.chosen else f"{verdict.chosen}, {in_graphs} in graphs"


def _trials(result: Result) -> dict[str, Trial]:
    return result.verdict.trials if result.verdict is not None else {}


def summary(results: Sequence[Result], store: Store) -> list[str]:
    """Returns the lines about the whole: every flaw, the number of questions, and where the verdicts are."""
    lines = [
        f"{name}, {result.question}: {flaw}" for result in results for name, flaw in result.flaws.items()
    ]
    if any(flaw.startswith(FAILS_HERE) for result in results for flaw in result.flaws.values()):
        lines.append("What fails here is not remembered: every process tries it again.")
    if any(name in backends.OURS for result in results for name in result.flaws):
        lines.append(
            f"No kernel with a flaw is used. Please report the lines of {' and '.join(backends.OURS)} "
            "with the output of `cvt doctor`."
        )
    lines += [f"not proven, {each.question}: {each.why_not_proven}" for each in results if not each.verdict]
    proven = [result.verdict for result in results if result.verdict is not None]
    chosen = ", ".join(f"{name} {count}" for name, count in _counts(proven).items())
    lines.append(f"{len(results)} questions, {len(proven)} proven; chosen: {chosen or 'nothing'}")
    reason = store.why_not_remembered()
    lines.append(
        f"remembered in {store.path}" if reason is None else f"not remembered in {store.path}: {reason}"
    )
    if (advice := store.advice()) is not None:
        lines.append(advice)
    if files := os.environ.get("CVT_KERNELS_VERDICTS"):
        lines.append(f"CVT_KERNELS_VERDICTS is set: the verdicts in {files} go before them")
    if (requested := backends.requested_backends()) != ("auto",):
        lines.append(f"CVT_KERNELS_BACKEND is {','.join(requested)}: verdicts serve under auto only")
    return lines


def _counts(proven: Sequence[Verdict]) -> dict[str, int]:
    chosen = [verdict.chosen for verdict in proven]
    return {name: chosen.count(name) for name in backends.BACKENDS if name in chosen}


def as_json(results: Sequence[Result], workload: Workload, store: Store) -> dict[str, Any]:
    """Returns the contents of the JSON file, which has every trial."""
    reason = store.why_not_remembered()
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "cvt_kernels": __version__,
        "machine": store.key,
        "workload": workload._asdict(),
        "remembered_in": str(store.path) if reason is None else None,
        "why_not_remembered": reason,
        "questions": [_question_as_json(result) for result in results],
    }


def _question_as_json(result: Result) -> dict[str, Any]:
    verdict = None if result.verdict is None else storable(result.verdict)
    return {
        "question": result.question,
        "chosen": verdict.chosen if verdict else None,
        "chosen_in_graphs": verdict.chosen_in_graphs if verdict else None,
        "why_not_proven": result.why_not_proven,
        "trials": {name: trial._asdict() for name, trial in verdict.trials.items()} if verdict else {},
    }
