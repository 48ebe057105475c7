"""Autotuning: which backend serves a call under ``auto``.

Autotuning checks and times the candidates for a call on your machine, and caches the fastest correct one. No
kernel serves before it has matched float64 there.

``tuner`` checks and times candidates; ``accuracy`` is the accuracy rule, ``clock`` measures the time.
``limit`` is how long a call may do so. ``cache`` keeps the results: an entry (``entries``) for each cache
key, in one file for each machine (``key``, ``files``, ``locks``).
"""

from .cache import (
    Cache,
    cache_directory,
    cache_for,
    forget,
    tuning_enabled,
    tuning_seconds,
)
from .entries import FAILS_HERE, Entry, Measurement
from .key import machine_key
from .limit import run_until_tuned, unlimited

__all__ = (
    "FAILS_HERE",
    "Cache",
    "Entry",
    "Measurement",
    "cache_directory",
    "cache_for",
    "forget",
    "machine_key",
    "run_until_tuned",
    "tuning_enabled",
    "tuning_seconds",
    "unlimited",
)
