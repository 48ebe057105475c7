"""Answers to cache keys: entries, and the measurements of candidates that they are made of."""

from __future__ import annotations

from typing import NamedTuple

#: How a flaw begins that is a fault of the environment, as a full disk or a missing compiler.
FAILS_HERE = "fails here: "


class Measurement(NamedTuple):
    """The result of one candidate.

    Attributes:
        error: Its largest error against float64; None if it gave no number.
        allowed: The largest error that is allowed.
        seconds: Device time of a call, with a cold L2; None if it was not timed.
        host_seconds: Time that the host takes to start a call; None on a CPU.
        flaw: Why it cannot serve: ``wrong: …``, ``fails: …``, ``fails here: …``, or from ``cvt tune``
            ``hangs: …`` or ``dies: …``; None if it can.
        is_disturbed: Whether other work on the machine disturbed the timing.
    """

    error: float | None
    allowed: float | None
    seconds: float | None
    host_seconds: float | None
    flaw: str | None
    is_disturbed: bool = False

    @property
    def call_seconds(self) -> float | None:
        """The seconds that a call takes at best: those of the device or of the host, whichever are more."""
        return None if self.seconds is None else max(self.seconds, self.host_seconds or 0.0)

    @property
    def is_lasting(self) -> bool:
        """False if it has a flaw that is a fault of the environment: the next process may not meet it."""
        return self.flaw is None or not self.flaw.startswith(FAILS_HERE)


class Entry(NamedTuple):
    """The answer to one cache key.

    Attributes:
        chosen: The backend that serves.
        chosen_in_graphs: The backend that serves in CUDA graphs and under ``torch.compile``, where the host
            costs nothing.
        measurements: Backend → its result.
        timings: How often they were timed: again by a later process where the timing is unsure.
    """

    chosen: str
    chosen_in_graphs: str
    measurements: dict[str, Measurement]
    timings: int = 1

    @property
    def is_lasting(self) -> bool:
        """True if all its measurements are; otherwise it holds for this process only."""
        return all(measurement.is_lasting for measurement in self.measurements.values())

    @property
    def is_unsure(self) -> bool:
        """True if other work on the machine disturbed the timing, so that another backend may be faster."""
        return any(measurement.is_disturbed for measurement in self.measurements.values())
