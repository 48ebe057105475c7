"""Runs the contract's example calls of every operator by this project's kernels, forward and backward.

``python -m benchmarks.calls FILE`` is for compute-sanitizer: FILE says how each call went, and the exit
status is 1 if one raises. Without a GPU it runs the CPU's kernels.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import pytest

from cvt_kernels import backends
from cvt_kernels.autotune import clock, tuner
from tests.contract.examples import served

from . import lab

#: Names of examples; each operator has these.
NAMES = ("usual", "odd", "many")
DTYPES = ("float32", "bfloat16")


def main(argv: list[str] | None = None) -> int:
    """Makes the calls, and prints those that raise."""
    parser = argparse.ArgumentParser(prog="benchmarks.calls", description=__doc__)
    parser.add_argument("path", type=Path, help="the JSON file")
    report, raised = lab.Report(parser.parse_args(argv).path, {}), 0
    chosen = ("triton", "cuda") if lab.DEVICE == "cuda" else ("cpu",)
    for operator, known in backends.implementations.items():
        for backend, name, dtype in itertools.product(chosen, NAMES, DTYPES):
            if backend not in known:
                continue
            status = called(operator, backend, name, dtype)
            report.add({"call": f"{operator} {backend} {name} {dtype}", "status": status})
            if not status.startswith(("ran", "not served")):
                print(f"{operator} {backend} {name} {dtype}: {status}", flush=True)
                raised += 1
    print(f"{len(report.content['rows'])} calls, {raised} raised")
    return int(bool(raised))


def called(operator: str, backend: str, name: str, dtype: str) -> str:
    """Makes a call; returns ``ran``, ``not served: `` with the reason, or the error."""
    try:
        made = served(operator, backend, name, dtype=dtype)
        call = made.call.map(tuner._copied)
        outputs = tuner._forward(made.public, call)
        tuner._results(call, outputs, made.douts(outputs))
        clock.synchronize(lab.DEVICE)
    except pytest.skip.Exception as skipped:
        return f"not served: {skipped}"
    except Exception as error:  # which must not cost the others their call
        return f"{type(error).__name__}: {error}"
    return "ran"


if __name__ == "__main__":
    sys.exit(main())
