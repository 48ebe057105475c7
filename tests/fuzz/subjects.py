"""Running of a case of any subject."""

from __future__ import annotations

import warnings

from . import cases, commands, files, judge, models, raw
from .worker import Answer, Ask


def asking(*, triton: bool = False) -> Ask:
    """Returns what tries the case of a line, with Triton's kernels if these are wanted."""
    others = {"raw": raw, "models": models, "commands": commands, "files": files}

    def ask(line: str) -> Answer:
        case = cases.parsed(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if case.subject in others:
                return others[case.subject].judge(case)
            return judge.judge(case, triton=triton)

    return ask
