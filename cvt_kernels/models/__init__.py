"""Drop-in fused forwards for the CvT you already have: ``accelerate`` and ``restore``.

The class of a supported block is swapped for a subclass of the same name that overrides ``forward``.
Parameters, buffers, submodules, hooks and ``state_dict`` stay.

Every call checks that the block is what its entry in the table expects; if not, the block's own forward runs.
CONTRIBUTING.md says what each file is for.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import _symbolic_trace

from .. import checks, choose, modes
from ..classes import UNFUSED, cached, derived, is_fused, original_class
from ..graphs import change_class, is_bound_by_host, is_within_graphed, ungraphed
from ..machine import warn_of_missing_kernels
from ..ops.linear_int8.modules import QuantizedLayer, put_back
from . import class_token, maps, served
from .blocks import HUGGING_FACE, Entry
from .class_token import class_token_of, is_block_wanted
from .families import CLASSIFIERS, MODELS, SERVED, TABLE
from .forward import forward_block
from .matching import (
    classifier_of,
    find_blocks,
    find_stages,
    model_name,
    parts_if_fused,
    why_another_forward,
    why_mismatched,
    why_not_freezable,
)
from .watching import LENT, forget

_Model = TypeVar("_Model", bound=nn.Module)

#: The attribute of a derived class with the original class and the keys of the entries, in order.
_MADE_OF = "_cvt_kernels_made_of"


def accelerate(model: _Model, *, freeze: bool | None = None) -> _Model:
    """Swaps fused forwards into the blocks of a CvT, SegFormer, PVT, PVT v2, GLPN or ViT, in place.

    It supports Hugging Face's models of these names and relatives of ViT, Microsoft's ``cls_cvt`` models, and
    every model that contains their blocks. (``cvt``'s own blocks are fused already.) Outputs, gradients,
    random numbers and BatchNorm statistics stay the same up to rounding, in evaluation and in training.
    Parameters, ``state_dict``, hooks and class names stay.

    A block that differs from upstream's keeps its class. A call that the fused forward does not support runs
    the block's own forward. :func:`coverage` lists both, with the reasons. :func:`restore` undoes everything.
    Second derivatives are computed by PyTorch's operators.

    In evaluation and without gradients, each stage of a CvT, a SegFormer or a PVT v2 and each layer of the
    other models runs as one step on a CPU, with weights packed for this CPU; the packed copies take as much
    memory as the weights (:func:`release_memory` frees them). Changed weights are detected and packed again,
    however they were changed; what may be missed is in docs/accelerate.md (:func:`refresh`). Elsewhere the
    layers of a ViT are upstream's own.

    With ``freeze=True`` the model is for inference only: in training mode it raises. With gradients, under
    autocast and export, and under ``torch.compile`` on a GPU, its blocks run one by one. On a GPU stages run
    as one step only so: biases are folded, matrix products accumulate into the residual stream, and a CvT-13
    takes half the launches; changes of weights that PyTorch does not count go unnoticed there. On a GPU,
    :func:`graphed` launches all of a forward at once.

    Args:
        model: Any module; wrappers are looked into.
        freeze: None runs whole stages and layers as one in evaluation. True does so for inference only; the
            model must be in evaluation mode. False runs block by block.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module, or ``freeze`` neither None, True nor False.
        ValueError: The model has no supported block; or with ``freeze=True``, it has no stage or layer that
            can be frozen, or is in training mode. It is left unchanged.
    """
    if freeze is not None:
        checks.check_flag("freeze", freeze)
    blocks = find_blocks(model)
    supported = [(block, entry) for _, block, entry in blocks if why_mismatched(block, entry) is None]
    if not supported:
        path, block, entry = blocks[0]
        raise ValueError(
            f"model: none of the {len(blocks)} blocks of {type(model).__name__} is supported; "
            f"the first, {path or 'itself'}: {why_mismatched(block, entry)}"
        )
    stages = _freezable_stages(model) if freeze else []
    warn_of_missing_kernels()
    if not all(entry.is_only_served for _, entry in supported):  # or no kernel of a GPU is for them
        for device in {parameter.device for parameter in model.parameters()}:
            choose.warn_of_unknown_gpu(device)
    for block, entry in supported:
        if entry.arguments and not (entry.is_only_served or is_fused(block)):
            _swap(block, entry.key)
    for module in model.modules():
        classifier = None if is_fused(module) else classifier_of(module)
        if classifier is not None:
            _swap(module, classifier.name)
    for _, stage, stage_entry in [] if freeze is False else find_stages(model):
        is_upstreams = why_another_forward(stage, stage_entry) is None
        if is_upstreams and not (served.is_serving(stage) or served.is_frozen(stage)):
            _swap(stage, stage_entry.serving_key + _IN_EVALUATION)
    for module, key in maps.find_models(model):
        _swap(module, key)
    for stage, key in stages:
        if not served.is_frozen(stage):
            _swap(stage, key)
            served.give_number(stage)
    return model


def _swap(module: nn.Module, key: str) -> None:
    change_class(module, lambda original: _swapped_class(original, key))


def accelerated_forward(original: type[nn.Module]) -> Any:
    """Returns the forward that ``accelerate`` gives to a class of transformers; None if it has none for it.

    It may be bound to a module of that class too, in the place of a derived class.
    """
    keys = [key for key, entry in TABLE.items() if _is_entry_of(original, entry) and not entry.is_only_served]
    keys += [key + _IN_EVALUATION for key, entry in SERVED.items() if _is_entry_of(original, entry)]
    if not keys:
        return None
    forward = _swapped_class(original, *keys).forward
    setattr(forward, LENT, True)
    return forward


def _is_entry_of(original: type[nn.Module], entry: Entry) -> bool:
    arguments = tuple(inspect.signature(original.forward).parameters)[1:]
    described = entry.upstream, entry.name, entry.arguments
    return described == (HUGGING_FACE, original.__name__, arguments)


def _freezable_stages(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the stages and layers of a model that can be frozen, with the keys of their entries."""
    if model.training:
        raise ValueError("model: is in training mode, expected model.eval() before freeze=True")
    found = find_stages(model)
    if not found:
        raise ValueError(
            f"model: got {model_name(model)}, expected one with a whole stage or layer of one of these to "
            f"freeze: {MODELS}"
        )
    reasons = {path: why_not_freezable(stage, entry) for path, stage, entry in found}
    freezable = [(stage, entry.serving_key) for path, stage, entry in found if reasons[path] is None]
    if not freezable:
        noun = found[-1][2].noun  # of layers within stages, rather than of these
        paths = [path for path, _, entry in found if entry.noun == noun]
        raise ValueError(
            f"model: none of the {len(paths)} {noun}s of {type(model).__name__} can be frozen; "
            f"the first, {paths[0] or 'itself'}: {reasons[paths[0]]}"
        )
    return freezable


def restore(model: _Model) -> _Model:
    """Undoes ``accelerate``, ``graphed`` and ``quantize``, in place.

    A layer that was loaded as a quantized one stays quantized.

    Args:
        model: Any module.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module.
    """
    give_classes_back(model)
    quantized = [layer for layer in model.modules() if isinstance(layer, QuantizedLayer)]
    put_back(model, [layer for layer in quantized if layer.float_layer is not None])
    return model


def give_classes_back(model: _Model) -> _Model:
    """Undoes ``accelerate`` and ``graphed``, in place; quantized layers stay."""
    ungraphed(model)
    for module in model.modules():
        forget(module)
        if is_fused(module):
            module.__class__ = original_class(type(module))
            served.take_number(module)
    return model


# The classes that are swapped in --------------------------------------------------------------------------


def _run_fused(
    block: nn.Module, entry: Any, own: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    parts = parts_if_fused(block, entry)
    result = NotImplemented
    if parts is not None and entry.forward is not None:
        result = entry.forward(block, *args, **kwargs)
    elif parts is not None and (call := entry.call_of(args, kwargs)) is not None:
        x, grid = call
        # Upstream has an error for a grid without keys.
        if parts.reduction is None or not _is_smaller(grid, parts.reduction[0].kernel_size[0]):
            rows = class_token_of(x) if is_block_wanted(block) else None
            out, _ = forward_block(parts, x, grid, rows, rows_only=rows is not None)
            return entry.result(block, out, grid)
    return own(block, *args, **kwargs) if result is NotImplemented else result


def _is_smaller(grid: tuple[Any, Any], least: int) -> bool:
    return modes.is_known(grid[0] < least) or modes.is_known(grid[1] < least)


class _Here(threading.local):
    """The choice of a thread: upstream's own forwards, where the host takes longer than the GPU."""

    is_upstreams = False


_here = _Here()

#: The end of the keys of stages and layers that are served as one in evaluation.
_IN_EVALUATION = ", in evaluation"
#: What the classes of a key, which pickles have, do: a function of a module, an entry, the forward without it
#: and the arguments of a call; other members of the class; the entry. A layer may be a block too, whose fused
#: forward then runs where it is not served as one.
_BEHAVIORS: dict[str, tuple[Callable[..., Any], Callable[[Any], dict[str, Any]], Any]] = {
    key + end: (run, members, entry)
    for run, members, entries, end in (
        (_run_fused, lambda entry: {}, TABLE, ""),
        (class_token.run, lambda entry: {}, CLASSIFIERS, ""),
        (maps.run, lambda entry: {maps.MARK: True}, maps.ENTRIES, ""),
        (served.run_served, functools.partial(served.members, frozen=True), SERVED, ""),
        (served.run_served, functools.partial(served.members, frozen=False), SERVED, _IN_EVALUATION),
    )
    for key, entry in entries.items()
}


def _swapped_class(original: Any, *keys: str) -> Any:
    """Returns the class ``original``, which may have been swapped before, with other behaviors."""
    first, *before = vars(original).get(_MADE_OF, (original,))
    frozen = {key + _IN_EVALUATION for key in keys}
    return _class_with(first, *(key for key in (*before, *keys) if key not in frozen))


@cached
def _class_with(first: Any, *keys: str) -> Any:
    """Returns the subclass of ``first`` that looks the same and behaves as ``_BEHAVIORS`` says of keys."""

    def own(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return first.forward(self, *args, **kwargs)  # which somebody may have patched since

    run: Callable[..., Any] = own
    members = {_MADE_OF: (first, *keys)}
    for key in keys:
        behavior, others, entry = _BEHAVIORS[key]
        run = _with_behavior(behavior, entry, run)
        members |= others(entry)
    is_frozen = any(key in SERVED for key in keys)

    @functools.wraps(first.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_recorded(args, kwargs):
            return first.forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # which traces no state of a thread
            return run(self, *args, **kwargs)
        if is_frozen:
            served.refuse_to_train(self)
        if _here.is_upstreams:
            is_upstreams = not (is_within_graphed() or modes.saved_tensors_hooked())
            return (first.forward if is_upstreams else run)(self, *args, **kwargs)
        if not is_bound_by_host(next(iter((*args, *kwargs.values())), None)):
            return run(self, *args, **kwargs)
        _here.is_upstreams = True
        try:
            return first.forward(self, *args, **kwargs)
        finally:
            _here.is_upstreams = False

    # Dynamo limits how often it compiles a code object, which all functions of this definition would share.
    forward.__code__ = forward.__code__.replace()  # type: ignore[attr-defined]

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # Pickle finds classes by name, and under this name it would find the original.
        return _new_module, (first, *keys), served.without_number(object.__reduce_ex__(self, 2)[2])

    forward = _traceable(forward, original_class(first).forward)
    return derived(first, UNFUSED, **members, forward=forward, __reduce_ex__=__reduce_ex__)


def _with_behavior(run: Callable[..., Any], entry: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(self, entry, own, args, kwargs)

    return forward


def _traceable(run: Any, own: Any) -> Any:
    """Returns a forward as ``torch.fx`` can trace it in the place of its class's own one.

    Of a forward with ``**kwargs`` fx makes plain positional parameters of as many first variables of its code
    as its own forward, below all that ``functools.wraps`` made, has parameters.
    """
    code = getattr(own, "__code__", None)
    if code is None or hasattr(own, "__wrapped__") or not code.co_flags & inspect.CO_VARKEYWORDS:
        return run
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    if count > len(_VARIABLES):
        return run

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(args) is not tuple:  # fx has made parameters of the variables; the last are own's kwargs
            return own(self, *map(locals().get, _VARIABLES[: count - 1]))
        for _a, _b, _c, _d, _e, _f, _g, _h, _i, _j in _NONE:
            pass
        return run(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace()  # as that of run
    return functools.wraps(run)(forward)


#: The first variables of such a forward after the module.
_VARIABLES = ("args", "kwargs", "_a", "_b", "_c", "_d", "_e", "_f", "_g", "_h", "_i", "_j")
_NONE: tuple[Any, ...] = ()


def _is_recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether ``torch.jit.trace`` or ``torch.fx`` traces a call; its own forward then runs."""
    if not _symbolic_trace._is_fx_tracing_flag:
        return torch.jit.is_tracing()
    return any(map(_is_proxy, (*args, *kwargs.values())))


def _is_proxy(value: Any) -> bool:
    """Returns whether an argument, or a map in a list of them, stands for a value in a trace of torch.fx."""
    return isinstance(value, torch.fx.Proxy) or (
        isinstance(value, list | tuple) and any(map(_is_proxy, value))
    )


def _new_module(original: type[nn.Module], *keys: str) -> nn.Module:
    """Returns an accelerated block, a frozen stage or layer without state, for pickle and ``copy``."""
    made = _swapped_class(original, *keys)
    module: nn.Module = made.__new__(made)
    if served.is_frozen(module):
        served.give_number(module)
    return module
