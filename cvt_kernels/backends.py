"""The registry of operators and backends, the backends that are requested, and those that this machine has.

``declaration`` fills it: a package in ``ops/`` declares its operators, and names the implementations by
module path. ``dispatch`` chooses the one that serves a call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch

from . import machine, modes

#: The name of a backend, or ``"auto"``. ``native`` is csrc (CPU or CUDA), ``composed`` other operators of
#: this package one after the other; from ``sdpa`` on, they are PyTorch's own (``onednn`` beside other
#: operators of this package).
Backend = Literal[
    "auto",
    "triton",
    "native",
    "composed",
    "sdpa",
    "onednn",
    "convolution",
    "float32",
    "int_mm",
    "scaled_mm",
    "dequantized",
    "reference",
]
#: Every backend, without ``"auto"``.
BACKENDS: tuple[str, ...] = get_args(Backend)[1:]
#: The backends that are kernels of this project.
OURS = ("triton", "native")
#: Those that cannot be differentiated or vectorized by transforms: ours, and what packs weights or writes in
#: place.
_UNTRANSFORMED = (*OURS, "onednn", "float32", "int_mm", "scaled_mm", "dequantized")

#: The record of a call: a NamedTuple with the names of the parameters of its operator.
Record = Any


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
        function: Takes the record of a call: itself, or its path ``"package.module:name"``, which is imported
            when a call first asks for this backend on a device that it serves.
        devices: Device types that it serves; None for every one.
        why_unavailable: Given a device type, says why this machine cannot run it there. It is asked once.
        why_unsupported: Given the record of a call, says why it cannot serve that call; itself, or its path.
            The answer depends on nothing but the key of the call (``declaration``).
    """

    function: Any
    devices: tuple[str, ...] | None = None
    why_unavailable: Callable[[str], str | None] | None = None
    why_unsupported: Any = None

    def load(self) -> Implementation:
        """Puts the functions in the place of their paths; returns this object."""
        if isinstance(self.function, str):
            self.function = _imported(self.function)
        if isinstance(self.why_unsupported, str):
            self.why_unsupported = _imported(self.why_unsupported)
        return self


@dataclass(eq=False)
class Operator:
    """The description of an operator that ``dispatch`` needs besides its backends.

    Attributes:
        name: Its name.
        bind: Makes the record of a call of its arguments.
        kind: Given the record of a call, returns words for all calls that share an entry: those with the
            same kernels and about the same economics.
        sample: Given a factor and the record of a call, returns that of a call of fewer images: with 1 as few
            as suffice to check it on a CPU, with 32 about as many as change its speed there.
        defaults: PyTorch's own backends, of which the first that can serves where there is no entry; before
            them ``composed``, if other operators are to serve then.
        exact: Computes the exact result for autotuning, from a record in float64; None for the reference.
        unrounded: Computes results that are right as well, of implementations that do not round where the
            operator does.
        fused_by_compiler: Whether torch.compile's own code for a CPU fuses it with what is around it.
    """

    name: str
    bind: Callable[..., Record]
    kind: Callable[[Record], str]
    sample: Callable[[int, Record], Record]
    defaults: tuple[str, ...]
    exact: Callable[[Record], Any] | None
    unrounded: Callable[[Record], Any] | None
    fused_by_compiler: bool


_Function = TypeVar("_Function", bound=Callable[..., Any])


def bound_by(bind: Callable[[Record], Callable[[Any], Any] | None]) -> Callable[[_Function], _Function]:
    """Marks the function of a backend as one that can be bound to its parameters.

    Args:
        bind: Takes the record of a call without gradients that has been served, and returns what serves calls
            that differ from it in the numbers of the first argument only, or None. It may hold packed
            parameters.
    """

    def mark(function: _Function) -> _Function:
        function.bind = bind  # type: ignore[attr-defined]
        return function

    return mark


def prepared_by(prepare: Callable[[Record], Callable[..., Any] | None]) -> Callable[[_Function], _Function]:
    """Marks the function of a backend as one whose calls can be prepared.

    Args:
        prepare: Takes the record of a call without gradients that has been served, and returns what serves
            calls of the same key from now on, given all arguments by position; None if it cannot be prepared.
            That may depend on nothing but what is part of the key (``declaration``), and keeps no tensor.
    """

    def mark(function: _Function) -> _Function:
        function.prepare = prepare  # type: ignore[attr-defined]
        return function

    return mark


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_AUTO: tuple[Backend, ...] = ("auto",)
#: Every operator of the registry, by its name.
operators: dict[str, Operator] = {}
#: The implementations of operators, by the names of operator and backend.
implementations: dict[str, dict[str, Implementation]] = {}
#: The plans of this process (``declaration``), by the keys of the calls that they serve.
plans: dict[Any, Callable[..., Any]] = {}
#: The choices that process groups have agreed on; the table does not delay the end of a group.
agreements: MutableMapping[Any, dict[Any, tuple[str, ...]]] = weakref.WeakKeyDictionary()
_fallbacks: dict[tuple[str, str], str] = {}


def declare(operator: Operator) -> None:
    """Makes an operator known."""
    operators[operator.name] = operator
    implementations[operator.name] = {}


def register(operator: str, backend: str, implementation: Implementation) -> None:
    """Makes ``backend`` known for ``operator``, replacing what was registered before.

    Raises:
        ValueError: The operator or the backend is unknown.
    """
    if operator not in operators:
        raise ValueError(f"operator: got {operator!r}, expected one of {', '.join(operators)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    implementations[operator][backend] = implementation
    forget()
    agreements.clear()


def registered(operator: str, backend: str) -> Implementation:
    """Returns the implementation of ``operator`` on ``backend``; KeyError if there is none."""
    return implementations[operator][backend]


_replacing = threading.RLock()


@contextlib.contextmanager
def replaced(replace: Callable[[str, str, Implementation], Implementation]) -> Iterator[None]:
    """Replaces every implementation by ``replace(operator, backend, implementation)`` within a block.

    Implementations that are registered within the block are forgotten at its end. Tools that count, label or
    time calls need this; like the registry, it applies to the whole process, so that a block of another
    thread waits for this one.
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
#
# A thread or asyncio task has its choice in its context, and is left alone by the others. One that has made
# none takes the process's.

_Names = tuple[Backend, ...]
#: The choice of the process: first as the environment has it, which requested_backends() checks.
_requested = cast(
    _Names, tuple((os.environ.get("CVT_KERNELS_BACKEND") or "auto").replace(" ", "").split(","))
)
#: The statement that made it, as long as it may turn out to be the beginning of a block.
_requested_by: use_backend | None = None
#: What a compiled function has requested. Dynamo cannot trace how a context changes; a global it can.
_requested_in_graph: _Names | None = None


class _Block(NamedTuple):
    """A block that is open in a context, and what is requested in it; None for the process's choice."""

    owner: object
    names: _Names | None


#: The choices of the threads that have one, the last to be made at the end.
_latest_choices: MutableMapping[threading.Thread, _Names] = weakref.WeakKeyDictionary()
_blocks: contextvars.ContextVar[tuple[_Block, ...]] = contextvars.ContextVar("blocks")
_names_here: contextvars.ContextVar[Any] = contextvars.ContextVar("names_here")


class _Context:
    """The choice of the context in which it is asked for.

    ``torch.compile`` takes a property that is written in C for a plain attribute: it neither traces nor
    forbids it, and its guards read it at every call. The variable returns its argument, which is this object,
    where it has no value.
    """

    names = property(_names_here.get)


_here = _Context()
_OUTSIDE = (_Block(None, None),)


def _open_blocks(blocks: tuple[_Block, ...]) -> None:
    """Makes these the blocks of the context; the first stands for what is around all of them."""
    _blocks.set(blocks)
    names, thread = blocks[-1].names, threading.current_thread()
    _names_here.set(_here if names is None else names)
    _latest_choices.pop(thread, None)
    if names is not None:
        _latest_choices[thread] = names


def _close_block(owner: object) -> None:
    blocks = _blocks.get(_OUTSIDE)
    for i in reversed(range(1, len(blocks))):
        if blocks[i].owner is owner:
            return _open_blocks(blocks[:i] + blocks[i + 1 :])
    raise RuntimeError("use_backend: got the end of a block that did not begin in this thread or task")


def _request_from_now_on(names: _Names, by: use_backend | None) -> None:
    global _requested, _requested_by
    *outer, last = _blocks.get(_OUTSIDE)
    _open_blocks((*outer, last._replace(names=names)))
    if not outer and threading.current_thread() is threading.main_thread():
        _requested, _requested_by = names, by


def _catch_up() -> None:
    """Makes a statement within a compiled function one of this context, or in a block one of the process.

    It may be another thread's, which an open block has nothing to do with.
    """
    global _requested, _requested_in_graph
    names, _requested_in_graph = _requested_in_graph, None
    if names is not None and _is_in_block():
        _requested = names
    elif names is not None:
        _request_from_now_on(names, None)


def _is_in_block() -> bool:
    return len(_blocks.get(_OUTSIDE)) > 1


@contextlib.contextmanager
def requesting(*names: Backend) -> Iterator[None]:
    """Requests backends within a block, as :class:`use_backend` does, which other threads never notice."""
    _catch_up()
    owner = object()
    _open_blocks((*_blocks.get(_OUTSIDE), _Block(owner, names)))
    try:
        yield
    finally:
        _catch_up()
        _close_block(owner)


class use_backend:  # noqa: N801 (lower case as torch.no_grad)
    """Chooses the backends of later calls in this thread or asyncio task.

    It takes effect at once; as a context manager it restores the previous choice on exit::

        use_backend("reference")                    # from now on
        with use_backend("triton", "native"): ...   # only here: Triton's kernel, else csrc's

    ``"auto"``, the default, takes the fastest backend that has been tuned on this machine. Names are an
    order of preference; a call that none of them can serve raises :class:`BackendUnavailable`. An operator
    without kernels of this project, ``linear``, ignores a request that names none of its backends. The
    environment variable ``CVT_KERNELS_BACKEND`` (names between commas), read at import, sets the choice that
    a process starts with.

    A block holds for its thread or task alone. A statement in the main thread, outside of blocks, also holds
    for all threads that make no choice themselves; within a block it holds until the end of the block, or in
    a compiled function for the process. Where blocks overlap, the last one to begin counts that is still
    open. The backward on a GPU, in threads of PyTorch's, takes the choice that a thread made last.

    Raises:
        ValueError: A name is unknown, none is given, or ``"auto"`` is not alone.
        RuntimeError: A block ends in another thread or task than it began in.
    """

    _after: tuple[_Block, ...] | None = None

    def __init__(self, *names: Backend):
        global _requested_in_graph
        _check_backends(names, "backend")
        self._names, self._in_graph = names, _requested_in_graph
        if torch.compiler.is_compiling():
            _requested_in_graph = names
            return
        _catch_up()
        self._before, self._requested = _blocks.get(_OUTSIDE), _requested
        _request_from_now_on(names, self)  # whether a block follows is not known yet
        self._after = _blocks.get()

    def __enter__(self) -> use_backend:
        global _requested, _requested_by, _requested_in_graph
        if torch.compiler.is_compiling():
            _requested_in_graph = self._names
            return self
        _catch_up()
        blocks = _blocks.get(_OUTSIDE)
        if blocks is self._after:  # it was the beginning of this block, and no statement
            blocks = self._before
        if _requested_by is self:
            _requested, _requested_by = self._requested, None
        _open_blocks((*blocks, _Block(self, self._names)))
        return self

    def __exit__(self, *exception: object) -> None:
        global _requested_in_graph
        if torch.compiler.is_compiling():
            _requested_in_graph = self._in_graph
            return
        _catch_up()
        _close_block(self)


def names_requested() -> _Names:
    """Returns the requested backends, which :func:`requested_backends` checks too."""
    if _requested_in_graph is not None and (torch.compiler.is_compiling() or not _is_in_block()):
        return _requested_in_graph
    names = _here.names
    if names is not _here:
        return names
    # Activation checkpointing computes the forward again there, which must be served as it was before.
    if not torch.compiler.is_compiling() and _latest_choices and machine.is_thread_of_autograd():
        return list(_latest_choices.values())[-1]
    return _requested


def _check_backends(names: tuple[str, ...], argument: str) -> None:
    if names == _AUTO:
        return
    unknown = not names
    for name in names:  # a loop, which takes less time than a generator: it is run at every call
        unknown = unknown or name not in BACKENDS
    if unknown:
        came, expected = ", ".join(map(str, names)), ", ".join(BACKENDS)
        raise ValueError(f"{argument}: got {came!r}, expected auto alone or some of {expected}")


def is_auto() -> bool:
    """Says whether no backends are requested."""
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
    """Returns (operator, backend) → why it was last passed over by ``auto``, or could not serve a call."""
    return dict(_fallbacks)


def note_fallback(operator: str, backend: str, reason: str) -> None:
    """Notes why a backend is passed over, for :func:`fallbacks`."""
    _fallbacks[operator, backend] = reason


# Availability ---------------------------------------------------------------------------------------------


def why_unsupported(operator: str, backend: str, call: Record) -> str | None:
    """Says why a backend cannot serve a call; None if it can."""
    x = call[0]
    reason = why_unavailable(operator, backend, x.device.type)
    if reason is None and backend in OURS and x.is_cuda:
        reason = _gpu_lacks(backend, x.device)
    if reason is None and backend in _UNTRANSFORMED:
        reason = _why_transformed()
    if reason is None:
        # Another thread may have replaced the implementations since: this one may not have been loaded.
        ask = implementations[operator][backend].load().why_unsupported
        reason = None if ask is None else ask(call)
    return reason


def _why_transformed() -> str | None:
    """Says what goes on around a call that only PyTorch's own operators know; None if nothing does."""
    if modes.forward_mode_enabled():
        return "forward-mode differentiation is not supported"
    return "function transforms (torch.func) are not supported" if modes.is_transformed() else None


def why_unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Says why ``backend`` cannot run ``operator`` on a type of device here; None if it can."""
    implementation = implementations[operator].get(backend)
    if implementation is None:
        return "not implemented in this version"
    reason = _machine_lacks(operator, backend, device_type)
    if reason is not None:
        return reason
    # With TRITON_INTERPRET=1 Triton's kernels run on the CPU, far too slowly for anyone who did not ask.
    interpreted = machine.INTERPRETING and backend == "triton" in names_requested() and device_type == "cpu"
    if implementation.devices is not None and device_type not in implementation.devices and not interpreted:
        return f"serves {' and '.join(implementation.devices)} tensors, not {device_type}"
    return None


def _machine_lacks(operator: str, backend: str, device_type: str) -> str | None:
    return _ask_why_unavailable(implementations[operator][backend], device_type)


def _gpu_lacks(backend: str, device: torch.device) -> str | None:
    return machine.why_gpu_unsupported(backend, device.index)


@functools.cache
def _ask_why_unavailable(implementation: Implementation, device_type: str) -> str | None:
    """Asks the machine, and imports the functions if it can run them."""
    ask, devices = implementation.why_unavailable, implementation.devices
    reason = None if ask is None else ask(device_type)
    if reason is None and (devices is None or device_type in devices or machine.INTERPRETING):
        implementation.load()
    return reason


def forget() -> None:
    """Forgets the plans of this process, so that entries and the machine are asked again.

    What process groups agreed on stays: a process that asked the others again would wait for them in vain.
    """
    global plans
    plans = {}  # another thread may be about to keep in the old table what it has chosen before
    _ask_why_unavailable.cache_clear()


def reset() -> None:
    """Brings this process to "auto", without plans, fallbacks or agreements, as between two tests."""
    global _requested, _requested_by, _requested_in_graph
    _open_blocks(_OUTSIDE)
    _requested, _requested_by, _requested_in_graph = _AUTO, None, None
    _fallbacks.clear()
    agreements.clear()
    forget()


# What is installed does not change under a compiled graph. This is what torch.compiler.assume_constant_result
# does; to call it would import torch._dynamo, and with it Triton, and double the time of our import.
_machine_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
_gpu_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
