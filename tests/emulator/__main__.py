"""Runs calls in the emulator: prints a line for each; the exit status is 1 if one is wrong.

``TRITON_INTERPRET=0 python -m tests.emulator [--arch 80] [name ...]``; without names, all of them.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tests.emulator import launches
from tests.emulator.calls import CALLS, SHIPPED, Call
from tests.emulator.ptx import UnsupportedError


def main() -> int:
    """Runs the calls; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help="calls; default: all")
    parser.add_argument("--arch", type=int, help="the GPU, as 86; default: 80, and 89 for float8")
    options = parser.parse_args()
    if unknown := set(options.names) - set(CALLS):
        parser.error(f"no such calls: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # which also fills new tensors with NaN
    return max([_run(name, _call(name, options.arch)) for name in options.names or CALLS])


def _call(name: str, arch: int | None) -> Call:
    return CALLS[name]._replace(arch=arch) if arch and name not in SHIPPED else CALLS[name]


def _run(name: str, call: Call) -> int:
    try:
        outcome = launches.Check(call).run()
    except UnsupportedError as error:
        print(f"{name}: unsupported: {error}", flush=True)
        return 1
    instructions = sum(ran.result.thread_instructions for ran in outcome.ran)
    entry = "ok" if outcome.is_good else "FAILED"
    print(f"{name}: {entry}: {instructions} instructions, {outcome.worst}", flush=True)
    for ran in outcome.ran:
        for fault in ran.result.faults[:4]:
            print(f"    {ran.kernel}: {fault}")
    return int(not outcome.is_good)


if __name__ == "__main__":
    sys.exit(main())
