"""Autotuning: which backend serves a call under ``auto``.

The candidates for a kind of calls are checked and timed on the machine, and the fastest correct one is
cached. No kernel serves on your machine before it has matched float64 there.

``tuner`` checks and times candidates: ``accuracy`` is the rule of the check, ``clock`` measures the time.
``cache`` remembers the result as an entry (``entries``) under a cache key, in a file for each machine
(``key``, ``files``, ``locks``).
"""

from .cache import (
    Cache,
    cache_directory,
    cache_for,
    forget,
    tuning_enabled,
)
from .entries import FAILS_HERE, Entry, Measurement
from .key import machine_key

__all__ = (
    "FAILS_HERE",
    "Cache",
    "Entry",
    "Measurement",
    "cache_directory",
    "cache_for",
    "forget",
    "machine_key",
    "tuning_enabled",
)
