"""The registry of backends, the choice of the one that serves a call, and the reasons against the others.

A package in ``ops/`` names its implementations by module path with :func:`register` and serves its public
function with :func:`call`; the module is imported when it first serves. The choice is plain Python over
module globals, so that ``torch.compile(fullgraph=True)`` traces through it and recompiles when it changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import machine

#: Every backend, in the order in which ``auto`` tries them. ``native`` is csrc (CPU or CUDA).
BACKENDS = ("triton", "native", "reference")

#: Every operator of the registry.
OPERATORS = (
    "conv_projection",
    "attention",
    "layer_norm",
    "add_layer_norm",
    "gelu",
    "bias_gelu",
    "layer_norm_gelu",
)


class BackendUnavailable(RuntimeError):  # noqa: N818 (the public name; it says what happened)
    """An explicitly requested backend cannot serve a call.

    Attributes:
        operator: Name of the operator.
        backend: Name of the backend.
        reason: Why it cannot.
    """

    def __init__(self, operator: str, backend: str, reason: str):
        super().__init__(f"{operator}: backend {backend!r} is unavailable: {reason}")
        self.operator, self.backend, self.reason = operator, backend, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operator, self.backend, self.reason)


@dataclass(eq=False)
class Implementation:
    """One operator on one backend.

    Attributes:
        function: Takes the arguments of the public function: itself, or its path ``"package.module:name"``,
            which is imported when a call first asks for this backend on a device that it serves.
        devices: Device types that it serves; None for every one.
        why_unavailable: Given a device type, says why this machine cannot run it there at all, or None if it
            can. It is asked once, at the first call.
        why_unsupported: Given the arguments of one call, says why it cannot serve that call, or None if it
            can; itself, or its path.
        experimental: By device type, why ``auto`` leaves it alone and only an explicit request takes it.
    """

    function: Any
    devices: tuple[str, ...] | None = None
    why_unavailable: Callable[[str], str | None] | None = None
    why_unsupported: Any = None
    experimental: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def load(self) -> Implementation:
        """Puts the functions in the place of their paths; returns this object."""
        if isinstance(self.function, str):
            self.function = _imported(self.function)
        if isinstance(self.why_unsupported, str):
            self.why_unsupported = _imported(self.why_unsupported)
        return self


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_implementations: dict[str, dict[str, Implementation]] = {operator: {} for operator in OPERATORS}
_requested = os.environ.get("CVT_KERNELS_BACKEND") or "auto"
_fallbacks: dict[tuple[str, str], str] = {}


def register(operator: str, backend: str, implementation: Implementation) -> None:
    """Makes ``backend`` known for ``operator``, replacing what was registered before.

    Raises:
        ValueError: The operator or the backend is unknown.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator: got {operator!r}, expected one of {', '.join(OPERATORS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    _implementations[operator][backend] = implementation
    _ask_why_unavailable.cache_clear()


def registered(operator: str, backend: str) -> Implementation:
    """Returns the implementation of ``operator`` on ``backend``; KeyError if there is none."""
    return _implementations[operator][backend]


@contextlib.contextmanager
def replaced(replace: Callable[[str, str, Implementation], Implementation]) -> Iterator[None]:
    """Replaces every implementation by ``replace(operator, backend, implementation)`` within a block.

    Implementations that are registered within the block are forgotten at its end. Tools that count, label or
    time calls need this; like the registry, it applies to the whole process.
    """
    global _implementations
    previous = _implementations
    _implementations = {
        operator: {backend: replace(operator, backend, each) for backend, each in known.items()}
        for operator, known in previous.items()
    }
    _ask_why_unavailable.cache_clear()
    try:
        yield
    finally:
        _implementations = previous
        _ask_why_unavailable.cache_clear()


class use_backend:  # noqa: N801 (lower case as torch.no_grad)
    """Chooses the backend of every later call in this process, in all threads.

    It takes effect at once; as a context manager it restores the previous choice on exit::

        use_backend("reference")            # from now on
        with use_backend("triton"): ...     # only here

    ``"auto"``, the default, takes the first of ``BACKENDS`` that can serve the call. Any other choice that
    cannot serve a call raises :class:`BackendUnavailable`. The environment variable ``CVT_KERNELS_BACKEND``,
    read at import, sets the choice that a process starts with.

    Raises:
        ValueError: The name is unknown.
    """

    def __init__(self, name: str):
        global _requested
        _check_backend(name, "backend")
        self._name, self._previous = name, _requested
        _requested = name

    def __enter__(self) -> use_backend:
        global _requested
        _requested = self._name  # again, for an object that is entered more than once
        return self

    def __exit__(self, *exception: object) -> None:
        global _requested
        _requested = self._previous


def _check_backend(name: str, argument: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"{argument}: got {name!r}, expected one of auto, {', '.join(BACKENDS)}")


def requested_backend() -> str:
    """Returns the backend chosen by :class:`use_backend` or ``CVT_KERNELS_BACKEND``.

    Raises:
        ValueError: The environment variable holds an unknown name.
    """
    _check_backend(_requested, "CVT_KERNELS_BACKEND")
    return _requested


def call(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves ``operator(x, ...)`` with the requested backend, or under ``auto`` the first that can.

    Raises:
        BackendUnavailable: The requested backend cannot serve the call.
    """
    requested = requested_backend()
    for backend in BACKENDS if requested == "auto" else (requested,):
        reason = why_unavailable(operator, backend, x.device.type)
        if reason is None:
            implementation = _implementations[operator][backend]
            if implementation.why_unsupported is not None:
                reason = implementation.why_unsupported(x, *args, **kwargs)
            if reason is None:
                return implementation.function(x, *args, **kwargs)
        _fallbacks[operator, backend] = reason
    raise BackendUnavailable(operator, backend, _fallbacks[operator, backend])


def why_unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Says why ``backend`` cannot run ``operator`` on a type of device here; None if it can."""
    implementation = _implementations[operator].get(backend)
    if implementation is None:
        return "not implemented in this version"
    reason = _machine_lacks(operator, backend, device_type)
    if reason is not None:
        return reason
    # With TRITON_INTERPRET=1 Triton's kernels run on the CPU, far too slowly for anyone who did not ask.
    interpreted = machine.INTERPRETING and backend == _requested == "triton" and device_type == "cpu"
    if implementation.devices is not None and device_type not in implementation.devices and not interpreted:
        return f"serves {' and '.join(implementation.devices)} tensors, not {device_type}"
    return None if _requested == backend else implementation.experimental.get(device_type)


def fallbacks() -> dict[tuple[str, str], str]:
    """Returns (operator, backend) → why it was last passed over by ``auto``, or could not serve a call."""
    return dict(_fallbacks)


def backend_for(operator: str, device_type: str) -> str | None:
    """Returns the backend that serves ``operator`` on a type of device, as far as no other argument matters.

    Returns:
        Its name, or None if the requested backend cannot.
    """
    requested = requested_backend()
    for backend in BACKENDS if requested == "auto" else (requested,):
        if why_unavailable(operator, backend, device_type) is None:
            return backend
    return None


def _machine_lacks(operator: str, backend: str, device_type: str) -> str | None:
    return _ask_why_unavailable(operator, backend, device_type)


@functools.cache
def _ask_why_unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Asks the machine, and imports the functions if it can run them."""
    implementation = _implementations[operator][backend]
    ask, devices = implementation.why_unavailable, implementation.devices
    reason = None if ask is None else ask(device_type)
    if reason is None and (devices is None or device_type in devices or machine.INTERPRETING):
        implementation.load()
    return reason


# What is installed does not change under a compiled graph. This is what torch.compiler.assume_constant_result
# does; to call it would import torch._dynamo, and with it Triton, and double the time of our import.
_machine_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
