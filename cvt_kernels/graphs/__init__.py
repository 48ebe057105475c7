"""CUDA graphs: :func:`graphed` captures the calls of a model once, and then replays them.

A replay launches all kernels of a forward, or of a backward, at once. With few images, and in training, the
host takes longer to launch them one by one than the GPU takes to compute them.

A graph repeats the captured work on the captured memory. So a call is replayed only if the kind of its
arguments, the settings (``_settings``), and the modules, parameters and buffers with their memory
(``_Snapshot``) are the same as at the capture. In inference a call is replayed at once: hundreds of tensors
are compared while the GPU computes, and the result of an outdated replay is dropped. Such a replay writes
nothing but the graph's own memory, and the memory that it reads is kept. With gradients (``training``)
the tensors are compared before, since a replay changes BatchNorm's statistics. The graphs are an attribute
of the model, whose class is swapped; a copy or a pickle begins without graphs.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import enum
import functools
import itertools
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from .. import backends, checks, machine, messages, modes
from ..changes import HOOKS, State, is_recorder, note_written
from ..classes import UNGRAPHED, cached, derived, is_graphed, ungraphed_class
from .training import Captured, TrainingGraph, Turn

_Model = TypeVar("_Model", bound=nn.Module)

#: The default number of graphs that a model keeps.
MOST = 8
#: The attribute of a graphed model that holds its graphs.
_ATTRIBUTE = "_cvt_kernels_graphs"


def graphed(model: _Model, *, most: int = MOST) -> _Model:
    """Replays a model's calls on an NVIDIA GPU as CUDA graphs, in inference and in training; works in place.

    The first call of each kind (shapes, dtypes and strides of its tensors, its other arguments, autocast and
    so on) runs the model twice and captures a graph. Later calls copy their tensors into the graph's,
    replay it and return copies of its results. The same kernels run as without a graph. The class name,
    parameters, ``state_dict`` and hooks of the model stay. It works before and after :func:`accelerate`;
    :func:`restore` undoes both.

    With gradients, the second call of a kind is captured, as a graph of the forward and one of the backward.
    Loss, optimizer and gradient scaler stay outside. Random numbers and BatchNorm's statistics go on as
    without graphs. The graphs hold the activations of one forward: a second forward before the backward of
    the first runs without a graph. Wrap the model in ``DistributedDataParallel`` afterwards.

    Weights may change. A graph sees changes in place; after a replacement, the model is captured again. Other
    attributes of modules stay as they were at the capture.

    Calls that cannot be graphed run as usual: with hooks on inner modules, gradient checkpointing, on a CPU
    and so on. ``cvt_kernels.graphs.why_not_graphed`` returns why.

    Args:
        model: A module whose forward launches the same work whatever the values of its arguments.
        most: The number of graphs to keep; the least recently used one is dropped before another capture.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module, or ``most`` not an integer.
        ValueError: ``most`` is not positive, or ``model`` has a forward of its own on the object.
    """
    checks.check_kind("model", model, nn.Module)
    checks.check_int("most", most, 1)
    if "forward" in vars(model):
        raise ValueError(
            f"model: this {type(model).__name__} has a forward of its own on the object, expected that of "
            "its class"
        )
    if not is_graphed(model):
        model.__class__ = _graphed_class(type(model))
    _graphs_of(model).forget()
    vars(model)[_ATTRIBUTE] = _Graphs(most, model)
    return model


def ungraphed(model: _Model) -> _Model:
    """Removes the graphs of a model and of its submodules, in place; returns the same object.

    Raises:
        TypeError: ``model`` is not a module.
    """
    checks.check_kind("model", model, nn.Module)
    for module in model.modules():
        if is_graphed(module):
            _graphs_of(module).forget()
            del vars(module)[_ATTRIBUTE]
            module.__class__ = ungraphed_class(type(module))
    return model


def why_not_graphed(model: nn.Module, *args: Any, **kwargs: Any) -> str | None:
    """Returns why a call of a model with these arguments would run without a graph now, or None.

    Raises:
        TypeError: ``model`` is not a module.
    """
    checks.check_kind("model", model, nn.Module)
    if not is_graphed(model):
        return "graphed() has not been called"
    return _graphs_of(model).why_not(model, _Call(args, kwargs))


# Classes with graphs --------------------------------------------------------------------------------------


@cached
def _graphed_class(under: Any) -> Any:

    @functools.wraps(under.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return under.forward(self, *args, **kwargs)
        return _graphs_of(self).call(self, functools.partial(under.forward, self), _Call(args, kwargs))

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _graphs_of(self).forget()  # or the weights would stay in memory twice until the next call
        return under._apply(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # Pickle finds classes by name, and this name is the original's.
        build, arguments, *state = under.__reduce_ex__(self, 2)
        if build is copyreg.__newobj__:  # type: ignore[attr-defined]
            arguments = (under,)
        return (_new_graphed, (build, arguments), *state)

    return derived(under, UNGRAPHED, forward=forward, _apply=_apply, __reduce_ex__=__reduce_ex__)


def _new_graphed(build: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Builds a graphed module without its state, for pickle and ``copy``."""
    module = build(*arguments)
    module.__class__ = _graphed_class(type(module))
    return module


def change_class(module: nn.Module, changed: Callable[[Any], Any]) -> None:
    """Swaps a module's class for ``changed`` of it, beneath its graphs if it has any."""
    under = vars(type(module)).get(UNGRAPHED)
    if under is None:
        module.__class__ = changed(type(module))
    else:
        module.__class__ = _graphed_class(changed(under))
        _graphs_of(module).forget()


# The graphs of one model ----------------------------------------------------------------------------------

_thread = threading.local()  # whether a model is being captured; models within it are then not


def _graphs_of(model: nn.Module) -> _Graphs:
    graphs = vars(model).get(_ATTRIBUTE)
    if graphs is None or graphs.owner() is not model:  # of a copy
        graphs = vars(model)[_ATTRIBUTE] = _Graphs(MOST if graphs is None else graphs.most, model)
    return graphs


class _Graphs:
    """The graphs of one model: kind of call → graph, the least recently used first.

    ``most`` is the number to keep. ``owner`` is a weak reference to the model; in a copy it returns None.
    """

    def __init__(self, most: int, owner: nn.Module | None = None):
        self.most = most
        self.owner = (lambda: None) if owner is None else weakref.ref(owner)
        self._lock = threading.RLock()
        self._snapshot: _Snapshot | None = None
        self._graphs: OrderedDict[Any, Any] = OrderedDict()  # of _Graph and TrainingGraph
        self._failures: dict[Any, str] = {}
        self._tries: collections.Counter[Any] = collections.Counter()  # of captures that may yet succeed
        # Whether with gradients → what captures such calls. Inference must not overwrite activations.
        self._captures: dict[bool, _CudaCapture] = {}
        self._seen: set[Any] = set()  # kinds of calls with gradients that have come once
        self._turn: Callable[[], Turn | None] = lambda: None  # a weak reference to the last one

    def __reduce__(self) -> tuple[Any, ...]:
        return _Graphs, (self.most,)  # a copy of the model has graphs of its own, once it is called

    def forget(self) -> None:
        """Drops all graphs and the snapshot of the model."""
        with self._lock:
            while self._graphs:
                self._drop(next(iter(self._graphs)))
            self._failures.clear()
            self._tries.clear()
            self._seen.clear()
            self._snapshot = None

    def _drop(self, key: Any) -> None:
        graph = self._graphs.pop(key)
        graph.cuda.release(*graph.recorded)
        for with_gradients, cuda in list(self._captures.items()):
            if all(other.cuda is not cuda for other in self._graphs.values()):
                del self._captures[with_gradients]  # the memory is freed with the last graph

    def why_not(self, model: nn.Module, call: _Call) -> str | None:
        """Returns why a call runs without a graph, or None."""
        reason, snapshot, known = _why_not_of_call(model, call), _Snapshot(model), self._snapshot
        with_gradients = snapshot.wants_gradient(call)
        reason = reason or snapshot.why_not(model, call, with_gradients)
        if reason is not None:
            return reason
        with self._lock:
            if known is not None and not known.serves_as_before(model, with_gradients):
                return "weights or modules were replaced; the call after this one is captured"
            return self._why_not_replayed(_key(model, snapshot, call, with_gradients), with_gradients)

    def _why_not_replayed(self, key: Any, with_gradients: bool) -> str | None:
        turn = self._turn()
        if with_gradients and turn is not None and not turn.is_over:
            return "the backward of the forward before has not been computed"
        return _FIRST if with_gradients and key not in self._seen else self._failures.get(key)

    def call(self, model: nn.Module, forward: Callable[..., Any], call: _Call) -> Any:
        """Computes a call, by a graph unless :meth:`why_not` returns a reason."""
        before, _thread.is_graphed = getattr(_thread, "is_graphed", False), True
        try:
            if _why_not_of_call(model, call) is None:
                with self._lock:
                    outputs = self._replayed(model, forward, call)
                if outputs is not _NOTHING:
                    return outputs
            return forward(*call.args, **call.kwargs)
        finally:
            _thread.is_graphed = before

    def _replayed(self, model: nn.Module, forward: Callable[..., Any], call: _Call) -> Any:
        """Returns the outputs of a replay, after a capture if need be, or ``_NOTHING``."""
        snapshot = self._snapshot = self._snapshot or _Snapshot(model)
        with_gradients = snapshot.wants_gradient(call)
        key = _key(model, snapshot, call, with_gradients)
        graph, outputs = self._graphs.get(key), _NOTHING
        if graph is not None and not with_gradients:
            outputs = graph.replay(call.tensors)  # the GPU computes while the host asks
            self._graphs.move_to_end(key)
        # Where it does not hold, this call runs without a graph, so that a model with other weights in every
        # call is never captured.
        if not snapshot.has_same_modules():
            self.forget()
            self._snapshot = _Snapshot(model)
            return _NOTHING
        if not snapshot.holds_for(model, with_gradients, graph):
            for old in [old for old, each in self._graphs.items() if each.has_backward is with_gradients]:
                self._drop(old)
            snapshot.forms[with_gradients] = snapshot.forms_of(model, with_gradients)
            return _NOTHING
        if snapshot.why_not(model, call, with_gradients) is not None:
            return _NOTHING
        if (reason := self._why_not_replayed(key, with_gradients)) is not None:
            if reason is _FIRST:  # the sizes of a last batch may never come again
                self._seen.add(key)
            return _NOTHING
        if graph is None:
            return self._capture(key, snapshot, model, forward, call, with_gradients)
        if not with_gradients:
            return outputs
        self._graphs.move_to_end(key)
        return self._take_turn(graph, call)

    def _take_turn(self, graph: TrainingGraph, call: _Call) -> Any:
        turn = Turn()
        self._turn = weakref.ref(turn)
        return graph.replay(call.tensors, turn)

    def _capture(
        self,
        key: Any,
        snapshot: _Snapshot,
        model: nn.Module,
        forward: Callable[..., Any],
        call: _Call,
        with_gradients: bool,
    ) -> Any:
        is_refused, outputs = False, _NOTHING
        _thread.is_capturing = True
        try:
            if not with_gradients:
                # As the user called it: this raises the user's errors.
                outputs = forward(*call.args, **call.kwargs)
                # If the forward replaces parameters or buffers, a capture would leave uncomputed ones behind.
                if not snapshot.serves_as_before(model, with_gradients):
                    return outputs
            while len(self._graphs) >= self.most:
                self._drop(next(iter(self._graphs)))
            cuda = self._captures.get(with_gradients)
            if cuda is None or cuda.device != call.device:
                cuda = self._captures[with_gradients] = _CudaCapture(call.device)
            try:
                graph: Any = (
                    TrainingGraph(cuda, model, forward, call.arguments, call.tensors)
                    if with_gradients
                    else _Graph(cuda, forward, call)
                )
                reason = graph.why_not or _why_not_copied(graph.leaves, call.device)
            except Exception as error:
                self._captures.pop(with_gradients, None)  # its memory may hold allocations of this capture
                if messages.is_foreign(error):
                    raise
                if "captur" in str(error) and self._tries[key] < _MOST_TRIES:
                    self._tries[key] += 1  # another thread may have captured, or synchronized the device
                    return outputs
                is_refused = True
                first_line = (str(error).splitlines() or ["no reason given"])[0]
                reason = f"it cannot be captured: {type(error).__name__}: {first_line}"
        finally:
            _thread.is_capturing = False
        if reason is None:
            self._graphs[key] = graph
            # So that the first results come from the same kernels.
            return self._take_turn(graph, call) if with_gradients else graph.replay(call.tensors)
        self._captures.pop(with_gradients, None)
        if len(self._failures) >= _MOST_FAILURES:
            self._failures.clear()
            self._tries.clear()
        self._failures[key] = reason
        if is_refused:
            warnings.warn(
                f"cvt_kernels: calls of {type(model).__name__} with such arguments run without a CUDA graph: "
                f"{reason}",
                RuntimeWarning,
                stacklevel=messages.stacklevel_of_caller(),
            )
        return outputs


_NOTHING = object()
_FIRST = "a call with gradients is captured when it comes for the second time"
_MOST_FAILURES = 1000  # ever new shapes must not fill the memory
_MOST_TRIES = 2


# Calls ----------------------------------------------------------------------------------------------------


class _Call:
    """A call of a model, with the pytree leaves of its arguments and the tensors among them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs
        self.leaves: list[Any] = [*args, *kwargs.values()]
        self.form: Any = len(args), *kwargs  # of arguments without containers
        if not _LEAVES.issuperset(map(type, self.leaves)):
            self.leaves, self.form = pytree.tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.tensors[0].device

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args`` and ``kwargs`` with ``tensors`` instead of the call's."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        if isinstance(self.form, tuple):
            count, *names = self.form
            return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return args, kwargs

    def kind(self) -> Any:
        """Returns the call's key: a hashable value that is the same for calls of the same graph."""
        return self.form, *map(_kind_of, self.leaves)


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but a forward may not think so.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


#: Types of arguments that are no containers; others may be, and pytree knows them.
_LEAVES = {Tensor, nn.Parameter, type(None), bool, int, float, str}
#: Types of arguments that are compared by value.
_SETTINGS = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
_SETTINGS += (torch.dtype, torch.device, torch.memory_format, torch.layout)  # type: ignore[assignment]


#: Elements of a block's tokens from which on an H200 computes for longer than the host needs for launches by
#: Triton: about 200 images of CvT-13.
_FEW = 2**24


def is_bound_by_host(x: Any) -> bool:
    """Returns whether a call outside of graphs is so small that the host takes longer than the GPU.

    Upstream's own modules then take the host less time than ours, whose kernels Triton launches from Python.
    Where it holds for a model, it holds for all within it. Models that :func:`graphed` wraps, captures,
    ``torch.compile`` and requested backends have our kernels at any size, and so has what activation
    checkpointing computes twice.
    """
    x = x[0] if isinstance(x, list | tuple) and x else x
    if not (isinstance(x, Tensor) and x.is_cuda) or x.numel() >= _FEW or not backends.is_auto():
        return False
    if is_within_graphed() or torch.compiler.is_compiling() or machine.is_capturing(x):
        return False
    return not modes.saved_tensors_hooked()


def is_within_graphed() -> bool:
    """Returns whether a model that :func:`graphed` wraps runs in this thread."""
    return getattr(_thread, "is_graphed", False)


def _why_not_of_call(model: nn.Module, call: _Call) -> str | None:
    if not call.tensors:
        return "none of its arguments is a tensor"
    for leaf in call.leaves:
        if not isinstance(leaf, (Tensor, *_SETTINGS)):
            kind = type(leaf).__qualname__
            return f"it has an argument of type {kind}, neither a tensor nor a plain setting"
    for tensor in call.tensors:
        if not _is_plain(tensor):
            return "an argument is a subclass of a tensor, or sparse"
        if tensor.device.type != _CudaCapture.device_type:
            return f"an argument is on {tensor.device}, not on an NVIDIA GPU"
        if tensor.device != call.device:
            return f"its arguments are on {call.device} and {tensor.device}"
    if getattr(_thread, "is_capturing", False) or machine.is_capturing(call.tensors[0]):
        return "another graph is being captured"
    if getattr(model, "_is_replica", False):
        return "the model is a replica of DataParallel, which lives for one call"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "the call is traced"
    if modes.is_transformed() or modes.forward_mode_enabled():
        return "it is within a function transform or forward-mode differentiation"
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode watches the operators"
    return None


def _key(model: nn.Module, snapshot: _Snapshot, call: _Call, with_gradients: bool) -> Any:
    key = call.kind(), _settings(model, call.device)
    return (*key, snapshot.modes_of(model)) if with_gradients else key


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _settings(model: nn.Module, device: torch.device) -> tuple[Any, ...]:
    cudnn: Any = torch.backends.cudnn
    cuda = torch.backends.cuda
    config = getattr(model, "config", None)
    return (
        torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        backends.requested_backends(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        (cuda.matmul.fp32_precision, cudnn.conv.fp32_precision),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        cuda.cudnn_sdp_enabled(),
        tuple(getattr(config, name, None) for name in _CONFIG),
    )


#: The configuration of Hugging Face's models for their results and their attention.
_CONFIG = ("output_hidden_states", "output_attentions", "return_dict", "_attn_implementation")


# Snapshots of the model -----------------------------------------------------------------------------------


class _Snapshot(State):
    """A snapshot of a model's modules, parameters and buffers, whose memory it keeps alive."""

    def __init__(self, model: nn.Module):
        inner = list(itertools.islice(model.modules(), 1, None))
        scripted = [module for module in inner if isinstance(module, torch.jit.ScriptModule)]
        tensors = [*model.parameters(), *model.buffers()]
        # Changes of these cannot be detected.
        self._why_unknown: str | None = None
        if scripted:
            kind = type(scripted[0]).__qualname__
            self._why_unknown = f"a {kind} in the model is not a plain module of PyTorch"
        elif not all(map(_is_plain, tensors)):
            self._why_unknown = "a parameter or buffer of the model is a subclass of a tensor, or sparse"
        elif any(tensor.is_meta for tensor in tensors):
            self._why_unknown = "a parameter or buffer of the model is on the meta device"
        self._tensors = tensors
        self._placed = [] if self._why_unknown else tensors
        self._inner = [] if scripted else inner
        super().__init__(self._placed, model, self._inner, attributes=False, ignores=is_recorder)
        with torch.no_grad():
            self._memory = [tensor.detach() for tensor in self._placed]
        self._devices = {tensor.device for tensor in tensors}
        self._spaces = [vars(module) for module in self._inner]
        self._hooks = [space[kind] for space in self._spaces for kind in HOOKS[:2]]
        self._has_backward_hooks = any(space[kind] for space in self._spaces for kind in HOOKS[2:])
        self._served = [module for module in inner if hasattr(module, _SERVED)]
        #: What should serve stages and layers, with or without gradients.
        self.forms: dict[bool, list[Any]] = {}
        #: What changes whenever a number of a tensor may have changed.
        self.values = object()

    def forms_of(self, model: nn.Module, with_gradients: bool) -> list[Any]:
        """Returns what serves stages and layers (``_SERVED``) now."""
        served = [model, *self._served] if hasattr(model, _SERVED) else self._served
        with torch.set_grad_enabled(with_gradients):  # as in the capture
            return [getattr(module, _SERVED)() for module in served]

    def has_forms_of(self, model: nn.Module, with_gradients: bool) -> bool:
        """Returns whether the same serves stages and layers, which is taken if nothing was."""
        found = self.forms_of(model, with_gradients)
        return self.forms.setdefault(with_gradients, found) == found

    def holds_for(self, model: nn.Module, with_gradients: bool, graph: Any) -> bool:
        """Returns whether the same modules and tensors still compute as they did for a graph, or None.

        Where no tensor has changed since the graph was asked last, no other question is asked.
        """
        if graph is None:
            return self.has_forms_of(model, with_gradients)
        if graph.values is self.values and graph.copies.hold_for_same_tensors():
            return True
        if not self.has_forms_of(model, with_gradients) or not graph.copies.hold():
            return False
        graph.values = self.values
        return True

    def serves_as_before(self, model: nn.Module, with_gradients: bool) -> bool:
        """Returns whether the model still has the same modules and tensors, and the same serves it."""
        return self.has_same_modules() and self.has_forms_of(model, with_gradients)

    def has_same_modules(self) -> bool:
        """Returns whether the model still has the same modules and tensors, in the same memory."""
        found = self.now(self._placed)
        if found[:2] != self.found[:2]:
            return False
        if self.is_outdated or found != self.found:
            if found[:3] == self.found[:3]:
                note_written(self._placed)
            self.found, self.is_outdated, self.values = found, False, object()
        return True

    def wants_gradient(self, call: _Call) -> bool:
        """Returns whether autograd has to record a call."""
        if not (torch.is_grad_enabled() or modes.forward_mode_enabled()):
            return False  # before hundreds of tensors become arguments
        return modes.wants_gradient(*call.tensors, *self._tensors)

    def modes_of(self, model: nn.Module) -> tuple[Any, ...]:
        """Returns what decides how the model is differentiated: modules in training mode, and parameters."""
        return (
            model.training,
            *(space["training"] for space in self._spaces),
            *(tensor.requires_grad for tensor in self._tensors),
        )

    def why_not(self, model: nn.Module, call: _Call, with_gradients: bool) -> str | None:
        """Returns why the model cannot be replayed with such arguments, or None."""
        if self._why_unknown is not None:
            return self._why_unknown
        other = next((each for each in self._devices if each != call.device), None)
        if other is not None:
            return f"a parameter or buffer of the model is on {other}, the arguments are on {call.device}"
        if with_gradients:
            if (reason := self._why_no_gradients(model)) is not None:
                return reason
        elif model.training:
            return "the model is in training mode, and no gradient is wanted; call its eval() before"
        elif any(space["training"] for space in self._spaces):
            return "a module of the model is in training mode, and no gradient is wanted"
        if not all(_is_idle(hook) for each in self._hooks if each for hook in each.values()):
            return "a module of the model has forward hooks"
        if torch_module._has_any_global_hook():
            return "a hook sees all modules"
        if any("forward" in space for space in self._spaces):
            return "a module of the model has a forward of its own on the object"
        return None

    def _why_no_gradients(self, model: nn.Module) -> str | None:
        if self._has_backward_hooks or any(tensor._backward_hooks for tensor in self._tensors):
            return "a module or a parameter of the model has backward hooks"
        if any(space.get("gradient_checkpointing") for space in (vars(model), *self._spaces)):
            return "the model computes activations again in the backward (gradient checkpointing)"
        if any(isinstance(module, nn.SyncBatchNorm) for module in (model, *self._inner)):
            return "a SyncBatchNorm communicates with other processes"
        if torch.is_anomaly_enabled():
            return "autograd's anomaly detection is on"
        if modes.saved_tensors_hooked():
            return "hooks on saved tensors are active"
        return None


#: The method that returns what serves a stage or a layer.
_SERVED = "_cvt_kernels_served"


def _is_idle(hook: Any) -> bool:
    """Returns whether a forward hook is one of transformers' output recorders, and is not recording now.

    These hooks stay in a model after its first recording. A replay has what they recorded at the capture.
    """
    if not is_recorder(hook):
        return False
    collector = getattr(sys.modules[hook.__module__], "_active_collector", None)
    return collector is not None and collector.get() is None


# Graphs ---------------------------------------------------------------------------------------------------


class _Graph(Captured):
    """A call without gradients."""

    def __init__(self, cuda: _CudaCapture, forward: Callable[..., Any], call: _Call):
        def record(inputs: Sequence[Tensor]) -> Any:
            args, kwargs = call.arguments(inputs)
            return cuda.record(lambda: forward(*args, **kwargs))

        with modes.capturing(gradients=False):
            super().__init__(cuda, call.tensors, record)

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Replays the call with other tensors; returns copies of the results."""
        with torch.no_grad(), self.cuda.turn(self._inputs):
            self._write(tensors)
            self.recorded[0].replay()
            copies = {id(leaf): leaf.clone() for leaf in self.leaves if isinstance(leaf, Tensor)}
        return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in self.leaves], self._form)


def _why_not_copied(leaves: list[Any], device: torch.device) -> str | None:
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not _is_plain(leaf):
                return "an output is a subclass of a tensor, or sparse"
            if leaf.device != device:
                return f"an output is on {leaf.device}, the arguments are on {device}"
        elif not isinstance(leaf, _SETTINGS):
            return f"it returns a {type(leaf).__qualname__}, neither a tensor nor a plain value"
    return None


_streams: weakref.WeakValueDictionary[int, torch.cuda.Stream] = weakref.WeakValueDictionary()
_POOLED = 32  # streams that PyTorch has of a kind, after which it gives the first again


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a stream on which no other graph of this package that lives was captured."""
    for _ in range(_POOLED):
        stream = torch.cuda.Stream(device)
        if stream.cuda_stream not in _streams:
            break
    _streams[stream.cuda_stream] = stream
    return stream


class _CudaCapture:
    """Captures and replays of one model's graphs on a GPU.

    The graphs share their memory, so their replays run one after the other on any streams.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)
        self._stream = _unused_stream(device)
        self._done = torch.cuda.Event()

    def record(self, *functions: Callable[..., Any]) -> list[tuple[Any, torch.cuda.CUDAGraph]]:
        """Warms functions up on a side stream and captures each; returns their outputs and the graphs.

        Each but the first takes the outputs of the one before. The stream of the captures runs nothing, so
        that cuBLAS's workspace for it is in the graphs' own memory.
        """
        recorded: list[tuple[Any, torch.cuda.CUDAGraph]] = []
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side), machine.rehearsed_capture():
                outputs: tuple[Any, ...] = ()
                for function in functions:
                    outputs = (function(*outputs),)
                del outputs
            current.wait_stream(self._side)
            torch.clear_autocast_cache()
            for function in functions:
                graph = torch.cuda.CUDAGraph()
                before = [outputs for outputs, _ in recorded[-1:]]
                with machine.captured(graph, self._pool, self._stream):
                    made = function(*before)
                recorded.append((made, graph))
        return recorded

    def random_state(self) -> Tensor:
        """Returns the state of the device's generator."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: Tensor) -> None:
        """Sets the state of the device's generator."""
        torch.cuda.set_rng_state(state, self.device)

    @contextlib.contextmanager
    def turn(self, memory: Sequence[Tensor]) -> Iterator[None]:
        """Makes the current stream wait for the previous block's work before this block's.

        ``memory``, the graph's own tensors, is not reused by the allocator before the work is done.
        """
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            for tensor in memory:
                tensor.record_stream(stream)
            try:
                yield
            finally:
                self._done.record(stream)

    def release(self, *graphs: torch.cuda.CUDAGraph) -> None:
        """Destroys graphs once the GPU is done with them."""
        self._done.synchronize()
        for graph in graphs:
            graph.reset()
