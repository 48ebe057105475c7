"""Registration of an operator's implementations: each by its path in the operator's package."""

from __future__ import annotations

from collections.abc import Callable

from .. import backends, machine, reference


def register_triton(operator: str, package: str) -> None:
    """Registers the Triton kernels ``package.triton``, for NVIDIA GPUs."""
    implementation = backends.Implementation(
        function=f"{package}.triton:{operator}",
        devices=("cuda",),
        why_unavailable=machine.why_triton_unavailable,
        why_unsupported=f"{package}.triton:why_unsupported",
        experimental=_untried("triton"),
    )
    backends.register(operator, "triton", implementation)


def register_native(
    operator: str,
    package: str,
    *,
    devices: tuple[str, ...] = ("cpu",),
    why_unsupported: Callable[..., str | None] | None = None,
) -> None:
    """Registers the function of the operator's name in ``package.native``.

    Args:
        operator: Name of the operator.
        package: Name of its package.
        devices: Device types that it serves.
        why_unsupported: See :class:`backends.Implementation`; None for that of ``package.native``.
    """
    implementation = backends.Implementation(
        function=f"{package}.native:{operator}",
        devices=devices,
        why_unavailable=machine.why_native_unavailable,
        why_unsupported=why_unsupported or f"{package}.native:why_unsupported",
        experimental=_untried("native"),
    )
    backends.register(operator, "native", implementation)


def register_reference(operator: str) -> None:
    """Registers the function of the operator's name in ``cvt_kernels.reference``, for every device."""
    backends.register(operator, "reference", backends.Implementation(function=getattr(reference, operator)))


def _untried(backend: str) -> dict[str, str]:
    return {"cuda": f"has not run on a GPU yet; use_backend({backend!r}) tries it"}
