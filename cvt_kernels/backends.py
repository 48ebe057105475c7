"""The registry of operators and backends, the requested backends, and the available ones.

``declaration`` fills the registry: a package in ``ops/`` declares its operators and names their
implementations, which are imported when a call needs them. ``choose`` chooses the one that serves a call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import torch

from . import machine, modes

if TYPE_CHECKING:
    from .declaration import Declaration

#: The name of a backend, or ``"auto"``. ``gluon`` are our kernels for sm_90 in Gluon, Triton's lower
#: language, ``cuda`` and ``cpu`` those in csrc; ``composed`` calls other operators of this package. From
#: ``sdpa`` on, they are PyTorch's own.
Backend = Literal[
    "auto",
    "gluon",
    "triton",
    "cuda",
    "cpu",
    "composed",
    "sdpa",
    "convolution",
    "float32",
    "int_mm",
    "scaled_mm",
    "reference",
]
#: Every backend, without ``"auto"``.
BACKENDS: tuple[str, ...] = get_args(Backend)[1:]
#: The backends that are kernels of this project.
OURS = ("gluon", "triton", "cuda", "cpu")
#: The backends without support for ``torch.func``: ours, and those that pack weights or write in place.
_UNTRANSFORMED = (*OURS, "float32", "int_mm", "scaled_mm")

#: Stands for the class of a size that is symbolic where ``torch.compile`` traces.
ANY_SIZE = "SIZE"

#: The record of a call: a NamedTuple of the arguments, with the names of the operator's parameters.
Record = Any


class BackendUnavailable(RuntimeError):  # noqa: N818 (the public name; it says what happened)
    """An explicitly requested backend cannot serve a call.

    Attributes:
        operator: Name of the operator.
        backend: Name of the backend.
        reason: Why it cannot serve the call.
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
        function: A function of the record of a call, or its path ``"package.module:name"``, which is imported
            when a call first needs it.
        devices: The device types that it serves; None for all.
        why_unavailable: Takes a device type; returns why this machine cannot run it there, or None. It is
            called once for each type.
        why_unsupported: Takes the record of a call; returns why it cannot serve the call, or None. A function
            or its path. The result must depend only on the key of the call (``declaration``).
        is_partial: Whether it is for some calls of the operator only. A request for it, like one for kernels
            that the operator has not, leaves the other calls to the operator's defaults.
    """

    function: Any
    devices: tuple[str, ...] | None = None
    why_unavailable: Callable[[str], str | None] | None = None
    why_unsupported: Any = None
    is_partial: bool = False

    def load(self) -> Implementation:
        """Imports the functions that are given by their paths; returns this object."""
        if isinstance(self.function, str):
            self.function = _imported(self.function)
        if isinstance(self.why_unsupported, str):
            self.why_unsupported = _imported(self.why_unsupported)
        return self


_Function = TypeVar("_Function", bound=Callable[..., Any])


def bound_by(bind: Callable[[Record], Callable[[Any], Any] | None]) -> Callable[[_Function], _Function]:
    """Marks a backend's function as one that can be bound to its parameters.

    ``bind`` takes the record of a served call without gradients; it returns a function that serves calls with
    other numbers in the first argument, and may hold packed parameters, or None.
    """

    def mark(function: _Function) -> _Function:
        function.bind = bind  # type: ignore[attr-defined]
        return function

    return mark


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_AUTO: tuple[Backend, ...] = ("auto",)
#: The operators: name → operator.
operators: dict[str, Declaration] = {}
#: The implementations: operator → backend → implementation.
implementations: dict[str, dict[str, Implementation]] = {}
#: What serves later calls of this process (``declaration``): key of a call → function.
dispatch_cache: dict[Any, Callable[..., Any]] = {}
#: The number of functions at which all are dropped, so that ever new shapes do not fill the memory.
MOST_CACHED = 10_000
_fallbacks: dict[tuple[str, str], str] = {}


def declare(operator: Declaration) -> None:
    """Adds an operator to the registry."""
    operators[operator.name] = operator
    implementations[operator.name] = {}


def register(operator: str, backend: str, implementation: Implementation) -> None:
    """Registers an implementation of ``operator`` on ``backend``, replacing an earlier one."""
    if operator not in operators:
        raise ValueError(f"operator: got {operator!r}, expected one of {', '.join(operators)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    implementations[operator][backend] = implementation
    forget()


def registered(operator: str, backend: str) -> Implementation:
    """Returns the implementation of ``operator`` on ``backend``; KeyError if there is none."""
    return implementations[operator][backend]


_replacing = threading.RLock()


@contextlib.contextmanager
def replaced(replace: Callable[[str, str, Implementation], Implementation]) -> Iterator[None]:
    """Replaces every implementation by ``replace(operator, backend, implementation)`` within a block.

    It is for tools that count, label or time calls. Implementations that are registered within the block are
    dropped at its end. It applies to the whole process: a block in another thread waits for this one.
    """
    global implementations
    with _replacing:
        previous = implementations
        implementations = {
            operator: {backend: replace(operator, backend, each) for backend, each in known.items()}
            for operator, known in previous.items()
        }
        forget()
        try:
            yield
        finally:
            implementations = previous
            forget()


# What is requested ----------------------------------------------------------------------------------------

_Names = tuple[Backend, ...]
#: The choice of the process, at first from the environment; requested_backends() checks it.
_requested = cast(
    _Names, tuple((os.environ.get("CVT_KERNELS_BACKEND") or "auto").replace(" ", "").split(","))
)
#: The request of a compiled function. Dynamo can trace a change of a global, not of a context.
_requested_in_graph: _Names | None = None
#: The choice of the context, that is of a thread or an asyncio task, and the one that was made last in any.
_names_here: contextvars.ContextVar[Any] = contextvars.ContextVar("names_here")
_latest: _Names | None = None


class _Context:
    """The choice of the current context, or this object if it has none.

    ``torch.compile`` takes a property that is written in C for a plain attribute: it neither traces nor
    rejects it, and its guards read it at every call. A context variable without a value returns its argument,
    here this object.
    """

    names = property(_names_here.get)


_here = _Context()


def _request_here(names: _Names) -> Callable[[], None]:
    """Sets the choice of the context; returns a function that gives it back the one before."""
    global _latest
    token, _latest = _names_here.set(names), names

    def end() -> None:
        global _latest
        _names_here.reset(token)
        _latest = None if _here.names is _here else _here.names

    return end


def _request_everywhere(names: _Names, in_graph: _Names | None = None) -> Callable[[], None]:
    """Sets the choice of the process; returns a function that gives it back the one before."""
    global _requested, _requested_in_graph, _latest
    before = _requested, _requested_in_graph
    _requested, _requested_in_graph, _latest = names, in_graph, None

    def end() -> None:
        _request_everywhere(*before)

    return end


@contextlib.contextmanager
def requesting(*names: Backend) -> Iterator[None]:
    """Requests backends within a block, like :class:`use_backend`, but at no time for other threads."""
    end = _request_here(names)
    try:
        yield
    finally:
        end()


class use_backend:  # noqa: N801 (lower case as torch.no_grad)
    """Sets the backends of later calls in this thread or asyncio task: a function or a context manager.

    It takes effect at once; as a context manager it restores the previous choice on exit::

        use_backend("reference")                    # from now on
        with use_backend("triton", "cuda"): ...     # only here: Triton's kernel, else ours in CUDA

    ``"auto"``, the default, takes what :func:`tune` found on this machine, or what this release's table has
    for it. Several names are an order of preference; a call that none of them can serve raises
    :class:`BackendUnavailable`. An operator without kernels of this project, such as ``linear``, ignores a
    request that names none of its backends. The environment variable ``CVT_KERNELS_BACKEND`` (names with
    commas between them), read at import, sets the initial choice.

    A block applies to its thread or task only. A call in the main thread, outside of blocks, applies to all
    threads without a choice of their own; in a compiled function, to the process. Within a block, a call
    applies until the end of the block. The backward on a GPU, which runs in PyTorch's threads, uses the
    choice that was made last.

    Raises:
        ValueError: A name is unknown, none is given, or ``"auto"`` is not alone. Or a block ends in another
            thread or task than it began in.
    """

    #: What undoes the call, if a block begins with it.
    _undo: Callable[[], None] | None = None

    def __init__(self, *names: Backend):
        global _requested_in_graph
        _check_backends(names, "backend")
        self._names, self._in_graph = names, _requested_in_graph
        if torch.compiler.is_compiling():
            _requested_in_graph = names
            return
        is_outside = _here.names is _here and threading.current_thread() is threading.main_thread()
        self._undo = (_request_everywhere if is_outside else _request_here)(names)
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> use_backend:
        global _requested_in_graph
        if torch.compiler.is_compiling():
            _requested_in_graph = self._names
            return self
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
        self._ends.append(_request_here(self._names))
        return self

    def __exit__(self, *exception: object) -> None:
        global _requested_in_graph
        if torch.compiler.is_compiling():
            _requested_in_graph = self._in_graph
            return
        self._ends[-1]()
        self._ends.pop()


def names_requested() -> _Names:
    """Returns the requested backends, unchecked (see :func:`requested_backends`)."""
    names = _here.names
    if _requested_in_graph is not None and (torch.compiler.is_compiling() or names is _here):
        return _requested_in_graph
    if names is not _here:
        return names
    # Activation checkpointing recomputes the forward in that thread; the same backends must serve.
    if not torch.compiler.is_compiling() and _latest is not None and machine.is_thread_of_autograd():
        return _latest
    return _requested


def _check_backends(names: tuple[str, ...], argument: str) -> None:
    if names == _AUTO:
        return
    unknown = not names
    for name in names:  # a loop: it runs at every call, and a generator would be slower
        unknown = unknown or name not in BACKENDS
    if unknown:
        came, expected = ", ".join(map(str, names)), ", ".join(BACKENDS)
        raise ValueError(f"{argument}: got {came!r}, expected auto alone or some of {expected}")


def is_auto() -> bool:
    """Returns whether ``"auto"`` is in effect."""
    return names_requested() == _AUTO


def requested_backends() -> tuple[Backend, ...]:
    """Returns the backends chosen by :class:`use_backend` or ``CVT_KERNELS_BACKEND``, or ``("auto",)``.

    Raises:
        ValueError: The environment variable holds an unknown name.
    """
    names = names_requested()
    _check_backends(names, "CVT_KERNELS_BACKEND")
    return names


def fallbacks() -> dict[tuple[str, str], str]:
    """Returns (operator, backend) → why ``auto`` last passed over it, or why it could not serve a call."""
    return dict(_fallbacks)


def note_fallback(operator: str, backend: str, reason: str) -> None:
    """Notes why a backend is passed over, for :func:`fallbacks`."""
    _fallbacks[operator, backend] = reason


# Availability ---------------------------------------------------------------------------------------------


def why_unsupported(operator: str, backend: str, call: Record) -> str | None:
    """Returns why a backend cannot serve a call, or None."""
    x = call[0]
    reason = why_unavailable(operator, backend, x.device.type)
    if reason is None and backend in OURS and x.is_cuda:
        reason = _gpu_lacks(backend, x.device)
    if reason is None and backend in _UNTRANSFORMED:  # modes that only PyTorch's own operators support
        if modes.forward_mode_enabled():
            reason = "forward-mode differentiation is not supported"
        elif modes.is_transformed():
            reason = "function transforms (torch.func) are not supported"
    if reason is None:
        # Another thread may have replaced the implementations, so that this one is not loaded yet.
        ask = implementations[operator][backend].load().why_unsupported
        reason = None if ask is None else ask(call)
    return reason


def why_unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Returns why ``backend`` cannot run ``operator`` on a type of device here, or None."""
    implementation = implementations[operator].get(backend)
    if implementation is None:
        return "not implemented in this version"
    reason = _machine_lacks(operator, backend, device_type)
    if reason is not None:
        return reason
    # With TRITON_INTERPRET=1 Triton's kernels run on the CPU, too slowly unless they are requested.
    requested = backend in ("gluon", "triton") and backend in names_requested()
    interpreted = machine.INTERPRETING and requested and device_type == "cpu"
    if implementation.devices is not None and device_type not in implementation.devices and not interpreted:
        return f"serves {' and '.join(implementation.devices)} tensors, not {device_type}"
    return None


def _machine_lacks(operator: str, backend: str, device_type: str) -> str | None:
    return _ask_why_unavailable(implementations[operator][backend], device_type)


def _gpu_lacks(backend: str, device: torch.device) -> str | None:
    return machine.why_gpu_unsupported(backend, device.index)


@functools.cache
def _ask_why_unavailable(implementation: Implementation, device_type: str) -> str | None:
    """Returns why this machine cannot run an implementation, or None; then its functions are imported."""
    ask, devices = implementation.why_unavailable, implementation.devices
    reason = None if ask is None else ask(device_type)
    if reason is None and (devices is None or device_type in devices or machine.INTERPRETING):
        if isinstance(implementation.function, str):
            reason = machine.why_not_importable(implementation.function.partition(":")[0])
        if reason is None:
            implementation.load()
    return reason


def cache_dispatch(table: dict[Any, Callable[..., Any]], key: Any, function: Callable[..., Any]) -> None:
    """Adds a function to the table that ``dispatch_cache`` was when its call began."""
    if len(table) >= MOST_CACHED:
        table.clear()
    table[key] = function


def forget() -> None:
    """Empties the dispatch cache of this process, so that later calls choose again."""
    global dispatch_cache
    dispatch_cache = {}  # a new table: another thread may add to the old one yet
    _ask_why_unavailable.cache_clear()


def reset() -> None:
    """Resets this process to "auto", without cache or fallbacks, as between two tests."""
    _names_here.set(_here)
    _request_everywhere(_AUTO)
    _fallbacks.clear()
    forget()


# The installation does not change under a compiled graph. This is what torch.compiler.assume_constant_result
# does; calling it would import torch._dynamo and Triton, and double the time of our import.
_machine_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
_gpu_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
# A note while tracing must not make the number of notes a guard.
note_fallback._dynamo_marked_constant = True  # type: ignore[attr-defined]
