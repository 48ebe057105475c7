"""Triton launches planned once per key of a call, which then bypass Triton's argument binding.

Triton binds and inspects every argument at every launch, which takes the host about three times as long as a
plan. Calls of one key (``declaration``) differ only in the tensors' addresses. So a backend's function runs
once on dummy tensors without starting kernels, while its launches are recorded, with the tensors that they
take: the call's, casts of these, and new ones. The plan allocates the new tensors and starts the compiled
kernels directly.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import linecache
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from .. import backends, declaration, launching
from ..backends import Record, prepared_by
from . import weight_cache
from .prepared_launches import addressed, descriptor_on, prepared
from .waiting_launches import gathered

_Function = TypeVar("_Function", bound=Callable[[Record], Any])
_Part = TypeVar("_Part", bound=Callable[..., Any])

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip


def planned(function: _Function) -> _Function:
    """Marks a backend's function: its launches are planned after the first call of a key."""
    return prepared_by(lambda call: plan(function, call))(function)


def planned_with_operators(function: _Function) -> _Function:
    """Marks a backend's function without gradients that calls PyTorch's operators too; its plan does."""
    return prepared_by(lambda call: plan(function, call, computes=True))(function)


def planned_part(function: _Part) -> _Part:
    """Plans the launches of a part of an operator, such as of its backward, after the first call of a key.

    The function takes tensors, sequences of them, None and hashable settings, by position. It only allocates,
    casts and launches. Its results may be views of what it allocates, None, and sequences of these, but no
    arguments.
    """
    record: Any = collections.namedtuple(function.__name__, inspect.signature(function).parameters)  # type: ignore[misc]

    def of_record(call: Record) -> Any:
        return function(*call)

    @functools.wraps(function)
    def call(*values: Any) -> Any:
        if launching.is_taken():
            return function(*values)
        table, first = backends.dispatch_cache, values[0]
        tf32 = first.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision
        key = function, first.get_device(), tf32, *map(_fact, values)
        known = table.get(key)
        if known is not None:
            return known(*values)
        out = function(*values)
        backends.cache_dispatch(table, key, plan(of_record, record(*values)) or function)
        return out

    return call  # type: ignore[return-value]


def _fact(value: Any) -> Any:
    """Returns the part of a key for an argument of a part."""
    kind = value.__class__
    if kind is Tensor or kind is nn.Parameter:
        return value.shape, value.stride(), value.dtype
    return tuple(map(_fact, value)) if kind is tuple or kind is list else value


class _Operation(NamedTuple):
    """A call of one of PyTorch's operators in a recording."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any

    @property
    def is_cast(self) -> bool:
        """True if it does no more than convert a tensor to another dtype."""
        packet, out = self.function.overloadpacket, self.out
        return packet in (_aten._to_copy, _aten.to) and out.device == self.args[0].device


class _Recording(TorchDispatchMode):
    """A dispatch mode that records what a function launches, allocates and computes, in order.

    Args:
        values: What the function takes.

    Attributes:
        events: Its launches and operators, without allocations and views.
        allocated: The storage of an allocation → the tensor.
        is_refused: Whether it does what no plan can do again.
        drawn: What :func:`drawn_outside` has drawn.
    """

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.events: list[launching.Launch | _Operation] = []
        self.allocated: dict[int, Tensor] = {}
        self.is_refused = False
        self.drawn: list[Tensor] = []
        #: Storage → the first tensor there.
        self.known = {_storage(leaf): leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, before = kwargs or {}, len(self.events)
        out = function(*args, **kwargs)
        made = {_storage(leaf): leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)}
        # An operator that launches would do it twice; what returns a number may decide what follows.
        refused = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
        is_refused = bool(refused.intersection(function.tags)) and not _drops_nothing(function, args)
        if len(self.events) != before or is_refused:
            self.is_refused = True
        elif function in _ALLOCATIONS:
            self.allocated |= made
        elif function._schema.is_mutable or not made.keys() <= self.known.keys():  # unlike a view
            self.events.append(_Operation(function, args, kwargs, out))
        self.known = made | self.known
        return out

    @property
    def computes(self) -> bool:
        """True if the function does more than allocate, cast and launch."""
        return any(isinstance(each, _Operation) and not each.is_cast for each in self.events)

    @property
    def launches(self) -> bool:
        """True if the function launches anything."""
        return any(isinstance(each, launching.Launch) for each in self.events)


def _drops_nothing(function: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operator is dropout in evaluation, which returns its input."""
    return function is _aten.dropout.default and not args[2]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def plan(
    function: Callable[[Record], Any], call: Record, *, computes: bool = False
) -> Callable[..., Any] | None:
    """Returns the plan of a function that does nothing but launch, for calls of one key; None without one.

    It takes the fields of the record by position. A record is any NamedTuple, with tensors also in tuples.
    With ``computes`` the function may call PyTorch's operators too, if no gradients are recorded.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    if not all(type(leaf) in _PLAIN and leaf.numel() for leaf in leaves):
        return None
    # Dummy tensors are distinct where the call may pass the same tensor twice.
    alone = pytree.tree_map_only(Tensor, _like, call)
    recording = _Recording(alone)
    with launching.taken_launches(recording.events.append), recording:
        out = function(alone)
    if (recording.computes and not computes) or not recording.launches:
        return None
    return _written(function, alone, recording, out)


def recorded(function: Callable[[Record], Any], call: Record) -> tuple[Any, Callable[..., Any] | None]:
    """Serves a call without gradients; returns the result, and the plan for later calls like it, or None.

    Unlike :func:`plan` it records the call itself, with all of PyTorch's operators between the launches. So
    the plan serves what is computed by several operators, such as a block of a model. It returns
    NotImplemented for tensors of another alignment.

    Args:
        function: A function of the record, which may depend on nothing but the key of the call.
        call: Its tensors do not overlap in memory.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    recording = _Recording(call)
    with _started(recording, leaves) as may_be_planned:
        out = function(call)
    if not may_be_planned():
        return out, None
    return out, _written(_leave, call, recording, out)


def _leave(call: Record) -> Any:
    return NotImplemented


@contextlib.contextmanager
def _started(recording: _Recording, leaves: Sequence[Tensor]) -> Iterator[Callable[[], bool]]:
    """Records what a block computes and launches on tensors; gives whether a plan may do the same later."""

    def take(launch: launching.Launch) -> None:
        recording.events.append(launch)
        with _disable_current_modes():  # Triton's interpreter computes with tensors
            launch.start()

    def may_be_planned() -> bool:
        distinct = len(set(map(_storage, leaves))) == len(leaves)
        plain = all(type(leaf) in _PLAIN and leaf.numel() for leaf in leaves)
        return distinct and plain and choices.all_last and not uses.were_asked

    with (
        declaration.noted_choices() as choices,
        weight_cache.noted_uses() as uses,
        launching.current_device_of(leaves[0]),
        launching.taken_launches(take),
        recording,
    ):
        yield may_be_planned


def drawn_outside(draw: Callable[[], Tensor]) -> Tensor:
    """Returns ``draw()``, which a plan of the caller takes as an argument: plans draw no random numbers."""
    recording = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    if not isinstance(recording, _Recording):
        return draw()
    with _disable_current_modes():
        drawn = draw()
    recording.drawn.append(drawn)
    recording.known[_storage(drawn)] = drawn
    return drawn


class TrainingPlan(NamedTuple):
    """The plans of a forward and of its backward, for calls of one key.

    Attributes:
        forward: Takes what is drawn and the tensors of the call; returns the result, then what is saved.
        backward: Takes the result's gradient, the tensors of the call that it reads, and what is saved.
            Returns the gradient of each tensor of the call, None where none is wanted.
        draws: How many tensors :func:`drawn_outside` draws.
        read: The places of the tensors of the call, with what is drawn, that the backward reads.
        written: Likewise of those that the forward writes to.
    """

    forward: Callable[..., list[Tensor]]
    backward: Callable[..., Sequence[Tensor | None]]
    draws: int
    read: tuple[int, ...]
    written: tuple[int, ...]


def recorded_with_gradients(
    function: Callable[[], Tensor], tensors: Sequence[Tensor]
) -> tuple[Tensor, TrainingPlan | None]:
    """Serves a call with gradients; returns the result, and the plan for later calls like it, or None.

    It computes the gradients once, to record them, and gives them to nobody.

    Args:
        function: Computes the result. It may depend on nothing but the key of the call.
        tensors: All tensors of the call. They do not overlap in memory.
    """
    recording, versions = _Recording(tensors), [each._version for each in tensors]
    with _started(recording, tensors) as may_be_planned:
        out = function()
        forward, before, recording.events = recording.events, recording.known, []
        with _disable_current_modes():
            dout = torch.zeros_like(out)
        recording.known = {**before, _storage(dout): dout}
        wanted = [each for each in tensors if each.requires_grad]
        with torch.autograd.set_multithreading_enabled(False):  # the launches of this thread are recorded
            found = iter(torch.autograd.grad(out, wanted, dout, retain_graph=True, allow_unused=True))
    gradients = [next(found) if each.requires_grad else None for each in tensors]
    written = {i for i, each in enumerate(tensors) if each._version != versions[i]}
    shared = [each for each in gradients if each is not None and _storage(each) in {*before, _storage(dout)}]
    changed = any(tensors[i].requires_grad for i in written)
    if not may_be_planned() or shared or changed or not out.is_contiguous():
        return out, None
    recording.events = gathered(recording.events, lambda event: _read_by([event]))
    given, events = [*recording.drawn, *tensors], recording.events
    needed = {each: before[each] for each in _read_by(events) if each in before}
    read = tuple(i for i, each in enumerate(given) if needed.pop(_storage(each), None) is not None)
    saved = [*needed.values()]
    backward = _written(None, _record_of([dout, *(given[i] for i in read), *saved]), recording, gradients)
    recording.events = forward
    made = _written(None, _record_of(given), recording, [out, *saved])
    if made is None or backward is None:
        return out, None
    draws = len(recording.drawn)
    return out, TrainingPlan(made, backward, draws, read, tuple(draws + i for i in written))


def _record_of(tensors: Sequence[Tensor]) -> Record:
    kind: Any = collections.namedtuple("module_call", [f"t{i}" for i in range(len(tensors))])  # type: ignore[misc]
    made: Record = kind(*tensors)
    return made


def _read_by(events: Sequence[launching.Launch | _Operation]) -> Iterator[int]:
    """Yields the storages of all arguments."""
    for event in events:
        given = event.arguments if isinstance(event, launching.Launch) else (event.args, event.kwargs)
        for leaf in pytree.tree_leaves(given):
            base = leaf.base if launching.is_descriptor(leaf) else leaf
            if isinstance(base, Tensor):
                yield _storage(base)


def _written(
    otherwise: Callable[[Record], Any] | None, call: Record, recording: _Recording, out: Any
) -> Callable[..., Any] | None:
    if recording.is_refused:
        return None
    try:
        return _Writer(otherwise, call, recording).plan(out)
    except _CannotBePlannedError:
        return None


_PLAIN = Tensor, nn.Parameter


def _like(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like if tensor.is_floating_point() else like.zero_()  # a function may compute with it as an index


class _CannotBePlannedError(Exception):
    pass


class _Source(NamedTuple):
    """A tensor of a plan, with its Python expression."""

    expression: str
    like: Tensor


#: What computes an operator with the least time of the host; others are called by PyTorch's table.
_DIRECT = {
    _aten.linear.default: F.linear, _aten.addmm.default: torch.addmm, _aten.mm.default: torch.mm,
    _aten.add.Tensor: torch.add, _aten.layer_norm.default: torch.layer_norm, _aten.clone.default: torch.clone,
    _aten.flatten.using_ints: torch.flatten, _aten.conv2d.default: torch.conv2d,
    _aten.convolution.default: torch.convolution, _aten.cat.default: torch.cat,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten._foreach_copy_.default: torch._foreach_copy_,
}  # fmt: skip


class _Writer:
    """The writer of a plan's Python source, a line for each allocation, launch or operator."""

    def __init__(
        self, otherwise: Callable[[Record], Any] | None, call: Record, recording: _Recording
    ) -> None:
        self._record, self._recording, self._otherwise = type(call), recording, otherwise
        self._scope: dict[str, Any] = {
            "_otherwise": otherwise, "_record": type(call), "_on": launching.current_device_of,
            "_empty": torch.empty_strided, "_watched": launching.are_watched,
            "_stream_of": launching.stream_of, "_descriptor": descriptor_on,
            "_changed": torch.autograd.graph.increment_version,
        }  # fmt: skip
        self._lines: list[str] = []
        self._pointers: dict[str, str] = {}
        self._sources: dict[int, _Source] = {}
        self._allocating: list[int] = []  # lines
        for name, value in zip(call._fields, call, strict=True):
            self._add_leaves(name, value)
        given = list(self._sources.values())
        self._of_call = {source.expression for source in given}
        self._on = next((each for each in given if each.like.is_cuda), given[0]).expression

    def plan(self, out: Any) -> Callable[..., Any]:
        """Returns the plan: a function of the values of a call's record."""
        results = [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
        allocated = self._recording.allocated
        # Results have shapes of their own.
        allocated |= {
            _storage(each): each for each in results if _storage(each) in allocated and _is_whole(each)
        }
        for event in self._recording.events:
            if isinstance(event, launching.Launch):
                self._start(event)
            else:
                self._compute(event)
        self._finish(out)
        self._free()
        names = ", ".join(self._record._fields)
        given = {each: pointer for each, pointer in self._pointers.items() if each in self._of_call}
        lines = [f"{pointer} = {each}.data_ptr()" for each, pointer in given.items()]
        if self._otherwise is not None:
            otherwise = f"    return _otherwise(_record({names}))"
            if given:
                lines += [f"if ({' | '.join(given.values())}) % 16:", otherwise]
            lines += ["if _watched():", otherwise]  # by hooks that want more
        lines += [f"with _on({self._on}):", f"    _stream = _stream_of({self._on})"]  # no field begins so
        lines += [f"    {line}" for line in self._lines]
        source = f"def plan({names}):\n" + "".join(f"    {line}\n" for line in lines)
        filename = f"<cvt_kernels {self._record.__name__} launch>"
        linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
        exec(compile(source, filename, "exec"), self._scope)
        function = self._scope["plan"]
        assert isinstance(function, types.FunctionType)
        return function

    def _free(self) -> None:
        """Adds what frees a tensor in the last line that reads it, if memory is allocated after it."""
        for name in {source.expression for source in self._sources.values()} - self._of_call:
            reads = re.compile(rf"\b({'|'.join(filter(None, (name, self._pointers.get(name))))})\b")
            last = max(i for i, line in enumerate(self._lines) if reads.search(line))
            if self._allocating and last < self._allocating[-1]:
                self._lines[last] += f"; del {name}"

    def _add_leaves(self, expression: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._sources[_storage(value)] = _Source(expression, value)
        elif isinstance(value, tuple | list):
            for i, each in enumerate(value):
                self._add_leaves(f"{expression}[{i}]", each)

    # Tensors

    def _source(self, tensor: Tensor) -> _Source:
        """Returns the tensor that holds another one, after a line that allocates it if it is new."""
        known = self._sources.get(_storage(tensor))
        if known is None:
            known = self._allocate(_storage(tensor))
        return known

    def _allocate(self, storage: int) -> _Source:
        like = self._recording.allocated.get(storage)
        if like is None or like.data_ptr() != storage or _bytes_of(like) != like.untyped_storage().nbytes():
            raise _CannotBePlannedError
        dtype, layout = self._constant(like.dtype), f"{tuple(like.shape)}, {like.stride()}"
        self._scope["_device"] = like.device
        source = self._new(like)
        self._add(f"{source.expression} = _empty({layout}, dtype={dtype}, device=_device)", allocates=True)
        return source

    def _new(self, like: Tensor) -> _Source:
        source = self._sources[_storage(like)] = _Source(f"new{len(self._sources)}", like)
        return source

    def _add(self, line: str, *, allocates: bool = False) -> None:
        if allocates:
            self._allocating.append(len(self._lines))
        self._lines.append(line)

    def _tensor(self, tensor: Tensor) -> str:
        """Returns the expression of a tensor."""
        name, like = self._source(tensor)
        if like.dtype != tensor.dtype:
            raise _CannotBePlannedError
        begin = tensor.data_ptr() - like.data_ptr()
        if begin == 0 and (like.shape, like.stride()) == (tensor.shape, tensor.stride()):
            return name
        flipped = like.shape[::-1], like.stride()[::-1]
        if begin == 0 and tensor.ndim == 2 and flipped == (tensor.shape, tensor.stride()):
            return f"{name}.t()"
        offset = str(begin // tensor.element_size())
        if name in self._of_call:
            offset = f"{name}.storage_offset() + {offset}"
        return f"{name}.as_strided({tuple(tensor.shape)}, {tensor.stride()}, {offset})"

    def _pointer(self, tensor: Tensor) -> str:
        """Returns the expression of a tensor's address."""
        name, like = self._source(tensor)
        pointer = self._pointers.get(name)
        if pointer is None:
            pointer = self._pointers[name] = f"p{len(self._pointers)}"
            if name not in self._of_call:
                self._add(f"{pointer} = {name}.data_ptr()")
        offset = tensor.data_ptr() - like.data_ptr()
        if offset % 16:
            raise _CannotBePlannedError
        return f"{pointer} + {offset}" if offset else pointer

    def _constant(self, value: Any) -> str:
        name = f"_c{len(self._scope)}"
        self._scope[name] = value
        return name

    # Launches and operators

    def _given(self, value: Any) -> str:
        """Returns the expression of a kernel's argument, as Triton compiles for it."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if launching.is_descriptor(value):
            like = self._constant(descriptor_on(value, None))  # plans keep no tensor
            return f"_descriptor({like}, {self._tensor(value.base)})"
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            return f"({', '.join(map(self._given, value))},)"
        return self._constant(value)

    def _start(self, launch: launching.Launch) -> None:
        """Adds the line that starts a launch: through Triton until it is compiled, then directly."""
        kernel, grid, options = launch.kernel, (*launch.grid, 1, 1)[:3], launch.options
        run: list[Any] = []  # what starts it, and the kernel, which stays loaded

        def compile_and_start(*arguments: Any) -> None:
            launching.settle_key(kernel)
            compiled = kernel[grid](*arguments, **options)
            if compiled is not None:  # as in Triton's interpreter, which compiles nothing
                run[:] = prepared(compiled, grid, arguments).start, compiled

        given = [launch.arguments[name] for name in kernel.arg_names]
        found = [each.base if launching.is_descriptor(each) else each for each in addressed(tuple(given))]
        addresses = ", ".join(["_stream", *map(self._pointer, found)])
        arguments, name = ", ".join(map(self._given, given)), self._constant(run)
        self._add(f"{name}[0]({addresses}) if {name} else {self._constant(compile_and_start)}({arguments})")

    def _compute(self, operation: _Operation) -> None:
        """Adds the line that calls an operator of PyTorch's."""
        function, args, kwargs, out = operation
        if operation.is_cast and {*kwargs} <= {"dtype", "layout", "device"}:  # of which it changes the first
            call = f"{self._tensor(args[0])}.to({self._constant(out.dtype)})"
        else:
            given = [self._value(each) for each in args]
            given += [f"{name}={self._value(each)}" for name, each in kwargs.items()]
            call = f"{self._constant(_DIRECT.get(function, function))}({', '.join(given)})"
        if function._schema.is_mutable:
            self._add(call)
            return
        outs = out if isinstance(out, tuple | list) else (out,)
        names = [self._new(each).expression if isinstance(each, Tensor) else "_" for each in outs]
        self._add(f"{', '.join(names)}{'' if outs[0] is out else ','} = {call}", allocates=True)

    def _value(self, value: Any) -> str:
        """Returns the expression of an operator's argument."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self._value, value))}]"
        return repr(value) if value is None or type(value) in (bool, int) else self._constant(value)

    # Results

    def _finish(self, out: Any) -> None:
        """Adds the last lines."""
        for each in pytree.tree_leaves(out):
            if isinstance(each, Tensor) and (name := self._source(each).expression) in self._of_call:
                if not _is_whole(each):
                    raise _CannotBePlannedError
                self._lines += [f"if not {name}.is_inference(): _changed({name})"]
        self._add(f"return {self._result(out)}")

    def _result(self, out: Any) -> str:
        """Returns the expression of a result, or of several."""
        if out is None:
            return "None"
        if isinstance(out, Tensor):
            return self._tensor(out)
        if not isinstance(out, tuple | list):
            return self._other_result(out)
        results = ", ".join(map(self._result, out))
        if hasattr(out, "_fields"):
            return f"{self._constant(type(out))}({results})"
        return f"[{results}]" if isinstance(out, list) else f"({results},)" if out else "()"

    def _other_result(self, out: Any) -> str:
        """Returns the expression of a number, or of a record of results that PyTorch can take apart."""
        leaves, spec = pytree.tree_flatten(out)
        if len(leaves) == 1 and leaves[0] is out:
            if type(out) not in (bool, int, float, str):
                raise _CannotBePlannedError
            return repr(out) if type(out) in (bool, int) else self._constant(out)
        made = self._constant(functools.partial(pytree.tree_unflatten, treespec=spec))
        return f"{made}([{', '.join(map(self._result, leaves))}])"


def _is_whole(tensor: Tensor) -> bool:
    """Returns whether a tensor is all that its storage holds, or may be written in place."""
    begins = tensor.data_ptr() == _storage(tensor)
    return begins and (not tensor.is_contiguous() or tensor.untyped_storage().nbytes() == tensor.nbytes)


def _bytes_of(tensor: Tensor) -> int:
    """Returns the bytes from the first to the last element of a tensor."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()
