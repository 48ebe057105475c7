"""Calls every operator by each backend of this project that serves it, forward and backward, at small shapes.

``python -m benchmarks.calls FILE`` is for a memory checker, and lists in FILE what ran and what raised. The
exit status is 1 if a call raises.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.autotune import clock

from . import auto, suites

SCHEMA, VERSION = "benchmarks calls", 1
#: What a backend may take for the parts of a call that it does not compute itself.
PARTS = ("reference",)


def main() -> int:
    """Makes the calls, and writes the file; prints what raises."""
    options = suites.script_parser("calls", __doc__).parse_args()
    suites.TINY = True
    calls: list[dict[str, Any]] = []
    try:
        calls.extend(called(case, backend) for case in auto.cases() for backend in backends.OURS)
    finally:  # what ran before an interrupt is worth knowing
        report = {"schema": SCHEMA, "version": VERSION, "device": suites.device_name(), "calls": calls}
        suites.write_report(options.path, report)
    raised = [call for call in calls if call["status"] not in ("ran", "not served")]
    print("\n".join(f"{call['case']}, {call['backend']}: {call['status']}" for call in raised))
    print(f"{sum(call['status'] == 'ran' for call in calls)} calls ran, {len(raised)} raised")
    return int(bool(raised))


def called(case: auto.Case, backend: str) -> dict[str, Any]:
    """Makes a call, and returns how it went: ``ran``, ``not served``, or the error."""
    try:
        call = case.make(case.setting)
        with ck.use_backend(backend, *PARTS), torch.inference_mode(call.douts is None):
            served = suites.backends_serving(call.runner(getattr(ck, call.operator)))
            clock.synchronize(suites.DEVICE)
        status = "ran" if any(backend in names for names in served.values()) else "not served"
    except Exception as error:  # which must not cost the others their call
        status = f"{type(error).__name__}: {error}"
    return auto.named(case) | {"backend": backend, "status": status}


if __name__ == "__main__":
    sys.exit(main())
