"""Entries of the cache, and the measurements of candidates in them."""

from __future__ import annotations

from typing import NamedTuple

#: The beginning of a flaw that the environment causes, such as a full disk or a missing compiler.
FAILS_HERE = "fails here: "


class Measurement(NamedTuple):
    """The error and the time of one candidate.

    Attributes:
        error: Its largest error against float64; None if there is no number.
        allowed: The largest allowed error.
        seconds: Device time of a call, with a cold L2; None if it was not timed.
        host_seconds: Time that the host takes to start a call; None on a CPU.
        flaw: Why it cannot serve, or None: ``wrong: …``, ``fails: …``, ``fails here: …``, or from
            ``cvt tune`` ``hangs: …`` or ``dies: …``.
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
        """The seconds that a call takes at best: the larger of device and host time."""
        return None if self.seconds is None else max(self.seconds, self.host_seconds or 0.0)

    @property
    def is_lasting(self) -> bool:
        """False if the environment causes its flaw, which the next process may not meet."""
        return self.flaw is None or not self.flaw.startswith(FAILS_HERE)


class Entry(NamedTuple):
    """An entry of the cache: the backends that serve the calls of one cache key.

    Attributes:
        chosen: The backend that serves.
        chosen_in_graphs: The backend in CUDA graphs and under ``torch.compile``, where the host costs
            nothing.
        measurements: Backend → its measurement.
        timings: How often they were timed; later processes repeat an unsure timing. 0 where time was up
            after the check of some: a later call goes on.
    """

    chosen: str
    chosen_in_graphs: str
    measurements: dict[str, Measurement]
    timings: int = 1

    @property
    def is_lasting(self) -> bool:
        """True if it was timed and all measurements are lasting; otherwise it holds for this process only."""
        return self.timings > 0 and all(measurement.is_lasting for measurement in self.measurements.values())

    @property
    def is_unsure(self) -> bool:
        """True if other work on the machine disturbed the timing, so that another backend may be faster."""
        return any(measurement.is_disturbed for measurement in self.measurements.values())
