"""The fuzzer: ``python -m tests.fuzz --minutes 10``; see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

# Before cvt_kernels is imported.
if "--triton" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from . import campaign, cases, subjects, worker


def main() -> int:
    """Runs the command; returns 1 if a case has failed."""
    parser = _parser()
    options = parser.parse_args()
    if options.seed < 0:
        parser.error(f"argument --seed: got {options.seed}, expected an integer of at least 0")
    torch.set_num_threads(1)
    ask = subjects.asking(triton=options.triton)
    if options.worker:
        worker.answer_lines(ask)
        return 0
    if options.case is not None:
        try:
            case = cases.parsed(options.case)
        except ValueError as error:
            parser.error(str(error))
        print(case, flush=True)
        answer = ask(options.case)
        print("\n".join(answer.flaws) or f"no failure; {answer.served} backends served it")
        return 1 if answer.flaws else 0
    return _search(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long, of all subjects together")
    parser.add_argument("--cases", type=int, help="how many cases of each subject; without --minutes 1000")
    parser.add_argument(
        "--only", nargs="+", choices=cases.CHOICES, default=list(cases.CHOICES), metavar="SUBJECT",
        help="operators, raw, commands, files",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="the first seed; others count up from it")
    parser.add_argument("--case", metavar="LINE", help="one case alone, as a failure names it")
    parser.add_argument("--triton", action="store_true", help="Triton's kernels too, in its slow interpreter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _search(options: argparse.Namespace) -> int:
    count = options.cases
    if count is None and options.minutes is None:
        count = 1000
    seconds = None if options.minutes is None else 60 * options.minutes / len(options.only)
    found = []
    arguments = ["--triton"] if options.triton else []
    with worker.Worker(*arguments) as child:
        for subject in options.only:
            lines = (f"{subject}:{seed}" for seed in itertools.count(options.seed))
            figures = campaign.search(subject, lines, child.ask, cases.simpler, cases=count, seconds=seconds)
            found.append(figures)
            print(*_lines_of(figures), sep="\n", flush=True)
    print(*campaign.table(found), sep="\n")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(each) for each in found], indent=1) + "\n")
    return 1 if any(figures.failed for figures in found) else 0


def _lines_of(figures: campaign.Figures) -> list[str]:
    lines = [f"{figures.subject}: {figures.cases} cases, {figures.failed} failures"]
    for failure in figures.failures:
        lines += [f"  {failure.case}: {failure.flaw}", f"    --case '{failure.shrunk}'"]
    return lines


if __name__ == "__main__":
    sys.exit(main())
