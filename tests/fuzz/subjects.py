"""The trial of a case, of whichever subject."""

from __future__ import annotations

import warnings

from . import cases, commands, files, judge, models
from .worker import Answer, Ask


def asking(*, triton: bool = False) -> Ask:
    """Returns what tries the case of a line, with Triton's kernels if these are wanted."""

    def ask(line: str) -> Answer:
        case = cases.parsed(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if case.subject == "commands":
                return commands.judge(case)
            if case.subject == "files":
                return files.judge(case)
            if case.subject == "models":
                return models.judge(case)
            return judge.judge(case, triton=triton)

    return ask
