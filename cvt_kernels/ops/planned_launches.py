"""Triton launches planned once per key of a call, which then bypass Triton's argument binding.

Triton binds and inspects every argument at every launch, which takes the host about three times as long as a
plan. Calls of one key (``declaration``) differ only in the tensors' addresses. So a backend's function runs
once on dummy tensors without starting kernels, while its launches are recorded, with the tensors that they
take: the call's, casts of these, and new ones. The plan allocates the new tensors and starts the compiled
kernels directly.
"""

from __future__ import annotations

import collections
import functools
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import backends, launching
from ..backends import Record, prepared_by

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
        table, first = backends.plans, values[0]
        tf32 = first.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision
        key = function, first.get_device(), tf32, *map(_fact, values)
        known = table.get(key)
        if known is not None:
            return known(*values)
        out = function(*values)
        backends.keep_plan(table, key, plan(of_record, record(*values)) or function)
        return out

    return call  # type: ignore[return-value]


def _fact(value: Any) -> Any:
    """Returns the part of a key for an argument of a part."""
    kind = value.__class__
    if kind is Tensor or kind is nn.Parameter:
        return value.shape, value.stride(), value.dtype
    return tuple(map(_fact, value)) if kind is tuple or kind is list else value


class _Noted(TorchDispatchMode):
    """A dispatch mode that records a function's operators: it may only allocate, make views and cast.

    Attributes:
        casts: The storage of a cast → the tensor that was cast.
        computes: Whether the function calls any other operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, Tensor] = {}
        self.computes = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is _aten._to_copy.default and set(kwargs) == {"dtype"}:
            self.casts[_storage(out)] = args[0]
        elif function not in _ALLOCATIONS and not function.is_view and isinstance(out, Tensor | tuple | list):
            self.computes = True  # other than for dtype promotion and the like, which returns no tensor
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def plan(function: Callable[[Record], Any], call: Record) -> Callable[..., Any] | None:
    """Returns the plan of a function that does nothing but launch, for calls of one key; None without one.

    It takes the fields of the record by position. A record is any NamedTuple, with tensors also in tuples.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    if not all(type(leaf) in (Tensor, nn.Parameter) and leaf.numel() for leaf in leaves):
        return None
    launches: list[launching.Launch] = []
    # Dummy tensors are distinct where the call may pass the same tensor twice.
    alone = pytree.tree_map_only(Tensor, _like, call)
    with launching.planned_launches(launches.append), _Noted() as noted:
        out = function(alone)
    if noted.computes or not launches:
        return None
    try:
        return _Writer(function, alone, noted).plan(launches, out)
    except _CannotBePlannedError:
        return None


def _like(tensor: Tensor) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like if tensor.is_floating_point() else like.zero_()  # a function may compute with it as an index


class _CannotBePlannedError(Exception):
    pass


class _Source(NamedTuple):
    """A tensor of a plan, with its Python expression."""

    expression: str
    like: Tensor


class _Writer:
    """The writer of a plan's Python source."""

    def __init__(self, function: Callable[[Record], Any], call: Record, noted: _Noted) -> None:
        self._record, self._casts = type(call), noted.casts
        self._scope: dict[str, Any] = {
            "_function": function, "_record": type(call), "_on": launching.current_device_of,
            "_empty": torch.empty,
            "_descriptor": _descriptor, "_changed": torch.autograd.graph.increment_version,
        }  # fmt: skip
        self._lines: list[str] = []
        self._pointers: dict[str, str] = {}
        self._sources: dict[int, _Source] = {}
        for name, value in zip(call._fields, call, strict=True):
            self._add_leaves(name, value)
        self._of_call = {source.expression for source in self._sources.values()}

    def plan(self, launches: list[launching.Launch], out: Any) -> Callable[..., Any]:
        """Returns the plan: a function of the values of a call's record."""
        for each in pytree.tree_leaves(out):  # first, since results have shapes of their own
            if isinstance(each, Tensor) and _is_whole(each):
                self._source(each)
        starts = [self._start(i, launch) for i, launch in enumerate(launches)]
        results = self._results(out)
        names = ", ".join(self._record._fields)
        pointers = [f"{pointer} = {each}.data_ptr()" for each, pointer in self._pointers.items()]
        lines = [
            *self._lines,
            *pointers,
            f"if ({' | '.join(self._pointers.values())}) % 16:",
            f"    return _function(_record({names}))",
            f"with _on({next(iter(self._of_call))}):",
            *(f"    {line}" for line in starts),
            *results,
        ]
        source = f"def plan({names}):\n" + "".join(f"    {line}\n" for line in lines)
        filename = f"<cvt_kernels {self._record.__name__} launch>"
        linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
        exec(compile(source, filename, "exec"), self._scope)
        function = self._scope["plan"]
        assert isinstance(function, types.FunctionType)
        return function

    def _add_leaves(self, expression: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._sources[_storage(value)] = _Source(expression, value)
        elif isinstance(value, tuple | list):
            for i, each in enumerate(value):
                self._add_leaves(f"{expression}[{i}]", each)

    def _source(self, tensor: Tensor) -> str:
        """Returns the expression of a tensor, after a line that allocates it if it is new."""
        if tensor.data_ptr() != _storage(tensor):  # it begins elsewhere
            raise _CannotBePlannedError
        known = self._sources.get(_storage(tensor))
        if known is None:
            known = _Source(f"new{len(self._sources)}", tensor)
            self._lines.append(f"{known.expression} = {self._made(tensor)}")
            self._sources[_storage(tensor)] = known
        if known.like.numel() != tensor.numel():
            raise _CannotBePlannedError
        return known.expression

    def _made(self, tensor: Tensor) -> str:
        cast = self._casts.get(_storage(tensor))
        name = f"_dtype{len(self._sources)}"
        self._scope[name] = tensor.dtype
        if cast is not None:
            return f"{self._cast_source(cast)}.to({name})"
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            raise _CannotBePlannedError
        self._scope["_device"] = tensor.device
        return f"_empty({tuple(tensor.shape)}, dtype={name}, device=_device)"

    def _cast_source(self, tensor: Tensor) -> str:
        """Returns the expression of a tensor to cast, whose cast has the same layout as in the call."""
        expression = self._source(tensor)
        like = self._sources[_storage(tensor)].like
        same = (like.shape, like.stride()) == (tensor.shape, tensor.stride())
        if expression in self._of_call and (same or (like.is_contiguous() and tensor.is_contiguous())):
            return expression
        raise _CannotBePlannedError

    def _argument(self, name: str, value: Any, *, as_tensor: bool) -> str:
        """Returns the expression of a kernel's argument: a tensor or its address."""
        if isinstance(value, Tensor):
            source = self._source(value)
            pointer = self._pointers.setdefault(source, f"p{len(self._pointers)}")
            return source if as_tensor else pointer
        if launching.is_descriptor(value):
            self._scope[name] = _descriptor(value, None)  # plans keep no tensor
            source = self._source(value.base)
            self._pointers.setdefault(source, f"p{len(self._pointers)}")
            return f"_descriptor({name}, {source})"
        if isinstance(value, tuple) and any(isinstance(each, Tensor) for each in value):
            parts = [self._argument(f"{name}_{i}", v, as_tensor=as_tensor) for i, v in enumerate(value)]
            return f"({', '.join(parts)},)"
        self._scope[name] = value
        return name

    def _start(self, number: int, launch: launching.Launch) -> str:
        """Returns the line that starts a launch: through Triton until it is compiled, then directly."""
        kernel, grid, options = launch.kernel, (*launch.grid, 1, 1)[:3], launch.options
        runs: list[Any] = [None]

        def compile_and_start(*arguments: Any) -> None:
            launching.settle_key(kernel)
            compiled = kernel[grid](*arguments, **options)
            if compiled is not None:  # as in Triton's interpreter, which compiles nothing
                runs[0] = compiled[grid]

        self._scope |= {f"_runs{number}": runs, f"_start{number}": compile_and_start}
        given = [(f"_a{number}_{name}", launch.arguments[name]) for name in kernel.arg_names]
        tensors, pointers = (
            ", ".join(self._argument(name, value, as_tensor=as_tensor) for name, value in given)
            for as_tensor in (True, False)
        )
        run = f"_runs{number}[0]"
        return f"{run}({pointers}) if {run} else _start{number}({tensors})"

    def _results(self, out: Any) -> list[str]:
        """Returns the last lines of the function."""
        changes = [line for each in pytree.tree_leaves(out) for line in self._changes(each)]
        return [*changes, f"return {self._result(out)}"]

    def _result(self, out: Any) -> str:
        """Returns the expression of a result, or of several."""
        if out is None:
            return "None"
        if isinstance(out, Tensor):
            return self._source(out) if _is_whole(out) else self._view(out)
        results = ", ".join(map(self._result, out))
        if hasattr(out, "_fields"):
            self._scope["_results"] = type(out)
            return f"_results({results})"
        return f"[{results}]" if isinstance(out, list) else f"({results},)"

    def _view(self, result: Tensor) -> str:
        """Returns the expression of a view of a new tensor."""
        base = self._sources.get(_storage(result))
        if base is None or base.expression in self._of_call or base.like.dtype != result.dtype:
            raise _CannotBePlannedError
        layout = tuple(result.shape), result.stride(), result.storage_offset()
        return f"{base.expression}.as_strided({', '.join(map(str, layout))})"

    def _changes(self, result: Tensor | None) -> list[str]:
        """Returns the lines that bump the version counter of an argument written in place."""
        if result is None or not _is_whole(result):
            return []
        source = self._source(result)
        if source not in self._of_call:
            return []
        return [f"if not {source}.is_inference():", f"    _changed({source})"]


def _is_whole(tensor: Tensor) -> bool:
    """Returns whether a tensor is all that its storage holds, or may be written in place."""
    begins = tensor.data_ptr() == _storage(tensor)
    return begins and (not tensor.is_contiguous() or tensor.untyped_storage().nbytes() == tensor.nbytes)


def _descriptor(like: Any, base: Tensor | None) -> Any:
    """Returns a copy of a checked tensor descriptor on another base, without checking again."""
    made = object.__new__(type(like))
    made.__dict__.update(like.__dict__)
    made.base = base
    return made
