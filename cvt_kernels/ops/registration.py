"""Registration of an operator's implementations by their paths, and classes of sizes for its verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import backends, machine


def register_triton(operator: str, package: str, why_unsupported: str = "why_unsupported") -> None:
    """Registers the Triton kernels ``package.triton``, for NVIDIA GPUs.

    Args:
        operator: Name of the operator.
        package: Name of its package.
        why_unsupported: Name of the function of ``package.triton`` that says why it cannot serve a call.
    """
    implementation = backends.Implementation(
        function=f"{package}.triton:{operator}",
        devices=("cuda",),
        why_unavailable=machine.why_triton_unavailable,
        why_unsupported=f"{package}.triton:{why_unsupported}",
    )
    backends.register(operator, "triton", implementation)


def register_native(
    operator: str,
    package: str,
    *,
    devices: tuple[str, ...] = ("cpu",),
    why_unsupported: Callable[..., str | None] | str | None = "why_unsupported",
    forward_only: bool = False,
) -> None:
    """Registers the function of the operator's name in ``package.native``.

    Args:
        operator: Name of the operator.
        package: Name of its package.
        devices: Device types that it serves.
        why_unsupported: As of :class:`backends.Implementation`, or the name of one in ``package.native``.
        forward_only: See :class:`backends.Implementation`.
    """
    if isinstance(why_unsupported, str):
        why_unsupported = f"{package}.native:{why_unsupported}"
    implementation = backends.Implementation(
        function=f"{package}.native:{operator}",
        devices=devices,
        why_unavailable=machine.why_native_unavailable,
        why_unsupported=why_unsupported,
        forward_only=forward_only,
    )
    backends.register(operator, "native", implementation)


def register_composed(
    operator: str, function: Callable[..., Any], devices: tuple[str, ...] = ("cuda",)
) -> None:
    """Registers a function that computes an operator by others of this package, each by its own verdict."""
    backends.register(operator, "composed", backends.Implementation(function, devices=devices))


def size_class(size: int, factor: int = 4) -> str:
    """Returns words for all sizes from a power of ``factor`` up to the next one."""
    least = 1
    while least * factor <= size:
        least *= factor
    return f"{least}+"


def images_within(most: int, images: int, elements: int) -> int:
    """Returns how many of some images have ``most`` elements together, at least one."""
    return max(1, min(images, most // max(1, elements // max(1, images))))
