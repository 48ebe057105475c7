"""What the commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch

from cvt_kernels import BackendUnavailable


def run_command(name: str, command: Callable[[], int | None]) -> int:
    """Runs ``command``, which may return an exit code.

    What a user can mend becomes one line on stderr and exit code 2.
    """
    code = None
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, BackendUnavailable, ModuleNotFoundError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


def positive_int(text: str) -> int:
    """Type of an argparse argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive integer")
    return int(text)


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--device``, for :func:`resolve_device`."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cuda if there is one)")


def resolve_device(name: str | None) -> torch.device:
    """The device of that name, tried out; None chooses.

    Raises:
        ValueError: There is no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise ValueError("--device meta: computes nothing")
    return device
