"""CUDA graphs for inference: :func:`graphed` records the calls of a model once, and then replays them.

A forward of a CvT launches some hundreds of kernels. For a few images the GPU is done with each of them
before the host has launched the next one; a replay launches all of them at once.

A graph computes what was recorded, from the memory that was recorded. So a call is replayed only if all that
a recorded call depends on is as it was: the kind of the arguments and the settings (``_settings``) pick the
graph; the modules, parameters and buffers must be those of the recording, in the same memory (``_Snapshot``).
The memory of a snapshot is given to nobody else while the snapshot lives. Therefore the comparison of some
hundreds of tensors is made while the GPU computes, and a replay that turns out to be outdated is thrown away.

The class of a graphed model is swapped, as ``accelerate`` does it, for one that overrides ``forward`` (and
``_apply``, which forgets the graphs before ``.to()`` moves the weights). The graphs themselves are an
attribute that is neither parameter, buffer nor module; a copy or a pickle gets an empty one in its place.
"""

from __future__ import annotations

import contextlib
import copyreg
import enum
import functools
import itertools
import operator
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from . import backends, checks, machine, verdicts
from .classes import UNGRAPHED, cached, derived, is_graphed, ungraphed_class
from .ops import packing

_Model = TypeVar("_Model", bound=nn.Module)

#: The number of graphs that a model keeps unless :func:`graphed` is told another.
MOST = 8
#: The attribute of a graphed model that holds its graphs.
_ATTRIBUTE = "_cvt_kernels_graphs"


def graphed(model: _Model, *, most: int = MOST) -> _Model:
    """Lets the calls of a model on an NVIDIA GPU be replayed as CUDA graphs in inference, in place.

    The first call of each kind (shapes, dtypes and strides of its tensors, its other arguments, autocast and
    the like) runs the model a few times and captures a graph; later ones copy their tensors into the graph's,
    replay it and return copies of its results. The results are those of the same kernels. The class name,
    parameters, ``state_dict`` and hooks of the model stay. It works before and after :func:`accelerate`;
    :func:`restore` undoes both.

    Weights may change: in place, which a graph sees by itself, or by others in their place, after which the
    model is captured anew. Other attributes of modules are taken as they were at the capture.

    A call that no graph does justice to runs as it would without: in training, where a gradient is wanted,
    with hooks on inner modules, on a CPU and so on; ``cvt_kernels.graphs.why_not_graphed`` says why.

    Args:
        model: Any module whose forward launches the same work whatever the values of its arguments.
        most: The number of graphs that are kept; before one more is captured, the one that has not been used
            for the longest time is dropped.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module, or ``most`` not an integer.
        ValueError: ``most`` is not positive, or ``model`` has a forward of its own on the object.
    """
    _check_module(model)
    checks.check_int("most", most, 1)
    if "forward" in vars(model):
        raise ValueError(
            f"model: this {type(model).__name__} has a forward of its own on the object, expected that of "
            "its class"
        )
    if is_graphed(model):
        _graphs_of(model).forget()
    else:
        model.__class__ = _graphed_class(type(model))
    vars(model)[_ATTRIBUTE] = _Graphs(most)
    return model


def ungraphed(model: _Model) -> _Model:
    """Takes the graphs of a model and of its submodules away, in place; returns the same object.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_module(model)
    for module in model.modules():
        if is_graphed(module):
            _graphs_of(module).forget()
            del vars(module)[_ATTRIBUTE]
            module.__class__ = ungraphed_class(type(module))
    return model


def why_not_graphed(model: nn.Module, *args: Any, **kwargs: Any) -> str | None:
    """Says why a call of a model with these arguments would run without a graph now; None if it would not.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_module(model)
    if not is_graphed(model):
        return "graphed() has not been called"
    return _graphs_of(model).why_not(model, args, kwargs)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")


# Classes with graphs --------------------------------------------------------------------------------------


@cached
def _graphed_class(under: Any) -> Any:
    """Returns the subclass of ``under`` whose calls are replayed."""

    @functools.wraps(under.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return under.forward(self, *args, **kwargs)
        return _graphs_of(self).call(self, functools.partial(under.forward, self), args, kwargs)

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _graphs_of(self).forget()  # or the weights would stay in memory twice until the next call
        return under._apply(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # Pickle finds classes by name, and under this name it would find another one.
        build, arguments, *state = under.__reduce_ex__(self, 2)
        if build is copyreg.__newobj__:  # type: ignore[attr-defined]
            arguments = (under,)
        return (_new_graphed, (build, arguments), *state)

    return derived(under, UNGRAPHED, forward=forward, _apply=_apply, __reduce_ex__=__reduce_ex__)


def _new_graphed(build: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Returns a graphed module, whose state is yet to come, for pickle and ``copy``."""
    module = build(*arguments)
    module.__class__ = _graphed_class(type(module))
    return module


def change_class(module: nn.Module, changed: Callable[[Any], Any]) -> None:
    """Swaps the class of a module for what ``changed`` makes of it, beneath its graphs if it has any."""
    under = vars(type(module)).get(UNGRAPHED)
    module.__class__ = changed(type(module)) if under is None else _graphed_class(changed(under))


# The graphs of one model ----------------------------------------------------------------------------------


def _graphs_of(model: nn.Module) -> _Graphs:
    graphs = vars(model).get(_ATTRIBUTE)
    if graphs is None or not graphs.belongs_to(model):  # of a shallow copy
        graphs = vars(model)[_ATTRIBUTE] = _Graphs(MOST if graphs is None else graphs.most)
        graphs.belongs_to(model)
    return graphs


class _Busy(threading.local):
    """A note in each thread whether it captures, so that models within that model do not."""

    capturing = False


_busy = _Busy()


class _Graphs:
    """The graphs of one model by the kinds of calls, the least recently used first.

    Attributes:
        most: The number of graphs that are kept.
    """

    def __init__(self, most: int):
        self.most = most
        self._owner: weakref.ref[nn.Module] | None = None
        self._lock = threading.RLock()
        self._snapshot: _Snapshot | None = None
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._failures: dict[Any, str] = {}
        self._cuda: _CudaCapture | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Graphs, (self.most,)  # a copy of the model has graphs of its own, once it is called

    def belongs_to(self, model: nn.Module) -> bool:
        """Says whether these are the graphs of a model, which they become if they are nobody's."""
        if self._owner is None:
            self._owner = weakref.ref(model)
        return self._owner() is model

    def forget(self) -> None:
        """Drops all graphs and what is known of the model."""
        with self._lock:
            self._drop()
            self._snapshot = None

    def call(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Computes ``forward(*args, **kwargs)``: by a graph, or as it is if :meth:`why_not` says so."""
        call = _Call.of(args, kwargs)
        if model.training or _why_not_of_call(model, call) is not None:
            return forward(*args, **kwargs)
        with self._lock:
            outputs = self._replayed(model, forward, call)
        return forward(*args, **kwargs) if outputs is _NOTHING else outputs

    def _replayed(self, model: nn.Module, forward: Callable[..., Any], call: _Call) -> Any:
        """Returns the outputs of a replay, of a graph that may be captured first, or else ``_NOTHING``."""
        snapshot = self._snapshot
        if snapshot is None:
            snapshot = self._snapshot = _Snapshot(model)
        key = call.kind(), _settings(call.device, model)
        is_same, outputs = snapshot.keys_hold(), _NOTHING
        if is_same and snapshot.why_not(call.device) is None and key not in self._failures:
            graph = self._graphs.get(key)
            if graph is not None and not graph.holds():
                is_same = False
            elif graph is not None:
                self._graphs.move_to_end(key)
                outputs = graph.replay(call.tensors)
            elif snapshot.holds(model):
                return self._capture(key, snapshot, model, forward, call)
        # A replay is on its way meanwhile.
        if is_same and snapshot.holds(model):
            return outputs
        # This call runs as it is: whose weights differ in every call is not captured in every call.
        self._drop()
        self._snapshot = _Snapshot(model)
        return _NOTHING

    def _capture(
        self, key: Any, snapshot: _Snapshot, model: nn.Module, forward: Callable[..., Any], call: _Call
    ) -> Any:
        args, kwargs = call.arguments(call.tensors)
        _busy.capturing = True
        try:
            # As the user called it: verdicts are proven, and errors of the user are raised.
            outputs = forward(*args, **kwargs)
            if snapshot.refresh_keys():  # weights were folded meanwhile
                self._drop()
            try:
                # Before the capture, in which it would put what is never computed into their place.
                if not (snapshot.keys_hold() and snapshot.holds(model)):
                    raise NotReplayable("the forward replaces parameters, buffers or modules of the model")
                if self._cuda is None or self._cuda.device != call.device:
                    self._drop()
                    self._cuda = _CudaCapture(call.device)
                while len(self._graphs) >= self.most:
                    self._drop_oldest()
                graph = _Graph(self._cuda, forward, call)
            except NotReplayable as error:
                self._note_failure(key, str(error))
                return outputs
            except Exception as error:
                self._note_failure(key, f"it cannot be captured: {_first_line(error)}")
                warnings.warn(
                    f"cvt_kernels: calls of {type(model).__name__} with such arguments run without a CUDA "
                    f"graph: {self._failures[key]}",
                    RuntimeWarning,
                    stacklevel=verdicts.stacklevel_of_caller(),
                )
                return outputs
        finally:
            _busy.capturing = False
        self._graphs[key] = graph
        return graph.replay(call.tensors)  # the first results come from the kernels of the later ones

    def _note_failure(self, key: Any, reason: str) -> None:
        if len(self._failures) >= _MOST_FAILURES:
            self._failures.clear()
        self._failures[key] = reason

    def _drop(self) -> None:
        while self._graphs:
            self._drop_oldest()
        self._failures.clear()

    def _drop_oldest(self) -> None:
        _, graph = self._graphs.popitem(last=False)
        graph.release()

    def why_not(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Says why a call with these arguments runs as it is; None if it is replayed or captured."""
        if model.training:
            return "the model is in training mode; call its eval() before"
        call = _Call.of(args, kwargs)
        reason = _why_not_of_call(model, call) or _Snapshot(model).why_not(call.device)
        if reason is not None:
            return reason
        with self._lock:
            known = self._snapshot
            if known is not None and not (known.keys_hold() and known.holds(model)):
                return "weights or modules were replaced; the call after this one is captured"
            return self._failures.get((call.kind(), _settings(call.device, model)))


_NOTHING = object()
_MOST_FAILURES = 1000  # ever new shapes must not fill the memory


class NotReplayable(Exception):  # noqa: N818 (it says what a model is, and never leaves this file)
    """A call was captured, but a replay would not do what the call does; the message says why."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no reason given'])[0]}"


# Calls ----------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arguments of a call, taken apart.

    Attributes:
        tensors: The tensors among them.
        leaves: All of them, with None for each tensor.
        is_tensor: Whether each of the leaves is a tensor.
        form: Puts the leaves together again.
    """

    tensors: list[Tensor]
    leaves: list[Any]
    is_tensor: tuple[bool, ...]
    form: pytree.TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Takes the arguments of a call apart."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        tensors = list(itertools.compress(leaves, is_tensor))
        rest = [None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]
        return cls(tensors, rest, is_tensor, form)

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return self.tensors[0].device

    def kind(self) -> Any:
        """Returns what tells the call from those that another graph serves; hashable."""
        tensors = tuple((t.shape, t.stride(), t.dtype) for t in self.tensors)
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but a forward may not think so.
        rest = tuple(
            (type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf) for leaf in self.leaves
        )
        return tensors, rest, self.is_tensor, self.form

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns ``args`` and ``kwargs`` with ``tensors`` in the place of the call's."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if tensor else leaf
            for leaf, tensor in zip(self.leaves, self.is_tensor, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.form)


#: Arguments that say all they have to say by their value.
_SETTINGS = (type(None), bool, int, float, complex, str, bytes, enum.Enum)
_SETTINGS += (torch.dtype, torch.device, torch.memory_format, torch.layout)  # type: ignore[assignment]


def _why_not_of_call(model: nn.Module, call: _Call) -> str | None:
    """Says why a call cannot be replayed, by its arguments and what goes on around it; None if it can."""
    if not call.tensors:
        return "none of its arguments is a tensor"
    for leaf in call.leaves:
        if not isinstance(leaf, _SETTINGS):
            return (
                f"it has an argument of type {type(leaf).__qualname__}, neither a tensor nor a plain setting"
            )
    device = call.device
    for tensor in call.tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return "an argument is a subclass of a tensor, or sparse"
        if tensor.device.type != _CudaCapture.device_type:
            return f"an argument is on {tensor.device}, not on an NVIDIA GPU"
        if tensor.device != device:
            return f"its arguments are on {device} and {tensor.device}"
    if _busy.capturing or _CudaCapture.is_capturing():
        return "another graph is being captured"
    if getattr(model, "_is_replica", False):
        return "the model is a replica of DataParallel, which lives for one call"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "the call is traced"
    if checks.is_transformed() or checks.forward_mode_enabled():
        return "it is within a function transform or forward-mode differentiation"
    if torch._C._len_torch_dispatch_stack():
        return "a torch dispatch mode watches the operators"
    if checks.wants_gradient(*call.tensors):
        return "an argument requires a gradient"
    return None


def _settings(device: torch.device, model: nn.Module) -> tuple[Any, ...]:
    """Returns the settings outside of a model on which it depends what a call launches."""
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
        # By these, Hugging Face's models say what they return.
        tuple(getattr(config, name, None) for name in ("output_hidden_states", "output_attentions")),
        getattr(config, "return_dict", None),
    )


# What a graph takes from the model ------------------------------------------------------------------------


class _Snapshot:
    """The modules, parameters and buffers of a model at one time, to be compared with those of later calls.

    It keeps the memory of the tensors alive, so that no other tensor can be found at their addresses, and it
    has no reference to the model itself, so that nothing needs the garbage collector to go.
    """

    def __init__(self, model: nn.Module):
        self._class, modules = type(model), list(model.modules())
        inner = self._inner = modules[1:]
        self._classes = list(map(type, inner))
        self._why_unknown = _why_modules_unknown(modules)
        known = [] if self._why_unknown else inner
        self._attributes = [vars(module) for module in known]
        self._hooks = [module._forward_hooks for module in known]
        self._hooks += [module._forward_pre_hooks for module in known]
        members = [m for each in modules for m in (each._modules, each._parameters, each._buffers)]
        self._full = [] if self._why_unknown else [each for each in members if each]
        self._empty = [] if self._why_unknown else [each for each in members if not each]
        self._members = [*itertools.chain.from_iterable(each.values() for each in self._full), _END]
        tensors = [each for each in self._members if isinstance(each, Tensor)]
        self._why_unknown = self._why_unknown or _why_tensors_unknown(tensors)
        self._tensors = [] if self._why_unknown else tensors
        self._parameters = [each for each in self._tensors if isinstance(each, nn.Parameter)]
        with torch.no_grad():
            self._memory = [tensor.detach() for tensor in self._tensors]
        self._dtypes = [tensor.dtype for tensor in self._tensors]
        self._devices = {tensor.device for tensor in self._tensors}
        # A bound method would refer to the model.
        self._keyed = [module for module in inner if hasattr(module, _KEY)]
        self._model_key = getattr(type(model), _KEY, None)
        self._owner = weakref.ref(model)
        self._keys = self._read_keys()

    def _read_keys(self) -> list[Any]:
        keys = [getattr(module, _KEY)() for module in self._keyed]
        return keys if self._model_key is None else [*keys, self._model_key(self._owner())]

    def keys_hold(self) -> bool:
        """Says whether the modules that have a key of their own still have the same."""
        return not (self._keyed or self._model_key) or self._read_keys() == self._keys

    def refresh_keys(self) -> bool:
        """Takes the keys of the modules anew; says whether one was another."""
        before, self._keys = self._keys, self._read_keys()
        return before != self._keys

    def holds(self, model: nn.Module) -> bool:
        """Says whether the model still consists of the same, in the same memory."""
        members = itertools.chain(
            itertools.chain.from_iterable(map(_values, self._full)), itertools.repeat(_END, 1)
        )
        return (
            type(model) is self._class
            and not any(self._empty)
            and all(map(operator.is_, members, self._members))
            and list(map(type, self._inner)) == self._classes
            and all(map(Tensor.is_set_to, self._tensors, self._memory))
            and list(map(_dtype, self._tensors)) == self._dtypes
        )

    def why_not(self, device: torch.device) -> str | None:
        """Says why a model of this snapshot cannot be replayed with arguments on a device; None if it can."""
        if self._why_unknown is not None:
            return self._why_unknown
        if not self._devices <= {device}:
            other = next(each for each in self._devices if each != device)
            return f"a parameter or buffer of the model is on {other}, the arguments are on {device}"
        if torch.is_grad_enabled() and any(map(_requires_grad, self._parameters)):
            return "a gradient is wanted; call the model within torch.inference_mode() or torch.no_grad()"
        if any(map(_training, self._attributes)):
            return "a module of the model is in training mode"
        if any(self._hooks) and not all(map(_is_idle, itertools.chain(*map(_values, self._hooks)))):
            return "a module of the model has forward hooks"
        if torch_module._has_any_global_hook():
            return "a hook sees all modules"
        if any(map(operator.contains, self._attributes, itertools.repeat("forward"))):
            return "a module of the model has a forward of its own on the object"
        return None


#: The method by which a module tells what else it computes from; the result is compared by ``==``.
_KEY = "_cvt_kernels_graph_key"
_END = object()
_values: Any = dict.values
_dtype = operator.attrgetter("dtype")
_requires_grad = operator.attrgetter("requires_grad")
_training = operator.itemgetter("training")


def _is_idle(hook: Any) -> bool:
    """Says whether a forward hook is one by which transformers records outputs, and nobody records now.

    Such hooks stay in a model once it has recorded any. If it does so again in the call that is to be
    replayed, the graph has what they record.
    """
    if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
        return False
    collector = getattr(sys.modules[hook.__module__], "_active_collector", None)
    return collector is not None and collector.get() is None


def _why_modules_unknown(modules: list[nn.Module]) -> str | None:
    for module in modules:
        attributes = vars(module)
        members = [attributes.get(name) for name in ("_modules", "_parameters", "_buffers")]
        if "training" not in attributes or not all(isinstance(each, dict) for each in members):
            return f"a {type(module).__qualname__} in the model is not a plain module of PyTorch"
    return None


def _why_tensors_unknown(tensors: list[Tensor]) -> str | None:
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return "a parameter or buffer of the model is a subclass of a tensor, or sparse"
        if tensor.device.type == "meta":
            return "a parameter or buffer of the model is on the meta device"
    return None


# Graphs ---------------------------------------------------------------------------------------------------


class _Graph:
    """A captured call: replays it with other tensors.

    Args:
        cuda: Captures it.
        forward: The forward of the model.
        call: The call.

    Raises:
        NotReplayable: A replay would not do what the call does.
    """

    def __init__(self, cuda: _CudaCapture, forward: Callable[..., Any], call: _Call):
        self._cuda = cuda
        with _recording(call.device):
            self._inputs = [torch.empty_like(tensor) for tensor in call.tensors]
            for ours, theirs in zip(self._inputs, call.tensors, strict=True):
                ours.copy_(theirs)
            args, kwargs = call.arguments(self._inputs)
            versions = [tensor._version for tensor in self._inputs]
            with packing.noted_uses() as self._copies:
                outputs, self._recorded = cuda.record(lambda: forward(*args, **kwargs))
            changed = versions != [tensor._version for tensor in self._inputs]
        self._leaves, self._form = pytree.tree_flatten(outputs)
        reason = _why_not_copied(self._leaves, call.device)
        if changed:
            reason = "the forward changes its arguments"
        if reason is not None:
            self.release()
            raise NotReplayable(reason)

    def holds(self) -> bool:
        """Says whether the weights are those of which the recorded call has read packed copies."""
        return self._copies.hold()

    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Returns what the call computes of other tensors, in memory of its own."""
        with torch.no_grad(), self._cuda.turn(self._inputs):
            for ours, theirs in zip(self._inputs, tensors, strict=True):
                ours.copy_(theirs)
            self._recorded.replay()
            copies = {id(leaf): leaf.clone() for leaf in self._leaves if isinstance(leaf, Tensor)}
        return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in self._leaves], self._form)

    def release(self) -> None:
        """Gives the memory of the graph back; it must not be replayed afterwards."""
        self._cuda.release(self._recorded)
        self._inputs, self._leaves, self._copies = [], [], packing.Uses()


@contextlib.contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    """Lets a block record no gradients, and cast weights without autocast's cache.

    Casts that the cache holds may have been made before the capture, in memory that does not last.
    """
    kind = device.type
    casting: Any = contextlib.nullcontext()
    if torch.is_autocast_enabled(kind):
        casting = torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)
    # Tensors of inference mode could not be written outside of it.
    with torch.inference_mode(False), torch.no_grad(), casting:
        torch.clear_autocast_cache()  # a forward may have an autocast of its own, with a cache
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def _why_not_copied(leaves: list[Any], device: torch.device) -> str | None:
    """Says why outputs cannot be copied out of a graph; None if they can."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
                return "an output is a subclass of a tensor, or sparse"
            if leaf.device != device:
                return f"an output is on {leaf.device}, the arguments are on {device}"
        elif not isinstance(leaf, _SETTINGS):
            return f"it returns a {type(leaf).__qualname__}, neither a tensor nor a plain value"
    return None


class _CudaCapture:
    """The calls of CUDA that graphs need, for all graphs of one model, which share their memory.

    Since they share it, their replays follow each other, whatever the streams.

    Attributes:
        device: The GPU.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device):
        self.device = device
        self._graphs: set[torch.cuda.CUDAGraph] = set()
        self._pool: Any = None
        self._side = torch.cuda.Stream(device)
        self._done = torch.cuda.Event()

    @staticmethod
    def is_capturing() -> bool:
        """Says whether work is being captured into a graph, be it ours or not."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, function: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
        """Runs a function on a side stream and captures it; returns its outputs and the graph."""
        if self._pool is None or not self._graphs:  # the last graph took the memory with it
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side), machine.rehearsed_capture():
                for _ in range(2):
                    function()
            current.wait_stream(self._side)
            torch.clear_autocast_cache()
            torch._C._cuda_clearCublasWorkspaces()  # or the graph would use one that is not its own
            try:
                with machine.captured(graph, self._pool, self._side):
                    outputs = function()
            except Exception:
                self._pool = None  # it may hold what the failed capture has allocated
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        self._graphs.add(graph)
        return outputs, graph

    @contextlib.contextmanager
    def turn(self, memory: Sequence[Tensor]) -> Iterator[None]:
        """Lets the work of a block begin on the current stream when that of the block before is done.

        The memory of the graph's own tensors is not given to others before that work is done.
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

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """Destroys a graph, when the GPU is done with it."""
        self._done.synchronize()
        self._graphs.discard(graph)
        graph.reset()
