"""Warns once if compiled kernels are missing.

Without them PyTorch's own operators serve and nothing fails, so an incomplete installation would go
unnoticed.
"""

from __future__ import annotations

import contextlib
import platform
import warnings

import torch

from . import machine
from .caller import stacklevel_of_caller

_said = False


def warn_of_missing_kernels() -> None:
    """Warns once per process if kernels for this machine are not installed."""
    global _said
    if _said:
        return
    _said = True
    reason = why_kernels_are_missing()
    if reason is not None:
        warnings.warn(
            f"kernels are missing, and PyTorch's own operators serve in their place: {reason}",
            RuntimeWarning,
            stacklevel=stacklevel_of_caller(),
        )


def why_kernels_are_missing() -> str | None:
    """Returns which kernels for this machine are not installed and how to install them, or None."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    has_gpu = _has_gpu()
    reasons = []
    with contextlib.suppress(machine.ExtensionError):  # the first call will raise it
        reasons.append(machine.why_extension_unavailable("cpu"))
        if has_gpu and machine.has_extension() and machine.load_extension().cuda_request != "0":
            reasons.append(machine.why_extension_unavailable("cuda"))  # 0: left out on purpose
    if has_gpu:
        reasons.append(machine.why_triton_unavailable("cuda"))
    return "; ".join(reason for reason in reasons if reason is not None) or None


def _has_gpu() -> bool:
    """Returns whether there is an NVIDIA GPU that this project has kernels for."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    gpus = range(torch.cuda.device_count())
    return any(torch.cuda.get_device_capability(index) >= machine.OLDEST_GPU for index in gpus)
