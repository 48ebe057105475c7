"""A process that judges cases, so that one that crashes or hangs ends nothing but this process."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

_SECONDS = 120  # the longest that a case may take


class Answer(NamedTuple):
    """The result of running a case.

    Attributes:
        flaws: What is wrong, a sentence each.
        served: How many backends served it; none if its arguments were refused.
        ratio: The largest error as a part of what is allowed.
    """

    flaws: list[str]
    served: int = 1
    ratio: float = 0.0


#: Tries the case that a line names.
Ask = Callable[[str], Answer]


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Lets the block take so many bytes beside what the process has, where that can be limited."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


class Worker:
    """A child process that answers lines; one that ends is a flaw, and another takes its place."""

    def __init__(self, *arguments: str, command: tuple[str, ...] = ("-m", "tests.fuzz", "--worker")):
        self._command = [sys.executable, *command, *arguments]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end(10.0)

    def ask(self, line: str) -> Answer:
        """Lets the process try a case."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line + "\n")
            process.stdin.flush()
        # By the second: of a time in which both processes are stopped, one second counts.
        if not any(select.select([process.stdout], [], [], 1.0)[0] for _ in range(_SECONDS)):
            self._end()
            return Answer([f"hangs for {_SECONDS} seconds"])
        text = process.stdout.readline()
        if text:
            return Answer(*json.loads(text))
        code = process.wait()
        self._end()
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Answer([f"ends the process by {ended}"])

    def _start(self) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(self._command, text=True, cwd=Path(__file__).parents[2], **pipes)
        return self._process

    def _end(self, seconds: float = 0.0) -> None:
        """Lets the process end by itself, since it has folders to delete, and kills it after some time."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def answer_lines(ask: Ask) -> None:
    """Answers the lines of standard input, in the process of a :class:`Worker`."""
    answers: IO[str] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    for line in sys.stdin:
        answers.write(json.dumps(ask(line.strip())) + "\n")
        answers.flush()
