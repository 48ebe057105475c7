"""Fused forwards for the CvT that people already have: ``accelerate`` and ``restore``.

A supported block changes its class, to a subclass of the same name that overrides ``forward``: parameters,
buffers, submodules, hooks and ``state_dict`` stay as they are.

Every call asks again whether the block is what its entry in the table expects; if not, the block's own
forward runs. The files, each on those before it: ``watching`` (who would notice that a module is not called),
``blocks`` (the modules of a block, the form of an entry), ``fused`` (operations on them, and the fused
forward), ``stages`` (whole stages and layers for serving), ``cvt`` and ``pyramids`` (the entries of each
upstream), ``matching`` (which block is which, and whether it runs fused), ``freezing`` (which stages and
layers can be served, and their forward), this file (the swap of classes), ``coverage`` and ``verify``.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, TypeVar

import torch
from torch import nn

from .. import checks
from ..classes import UNFUSED, cached, derived, is_fused, original_class
from ..graphs import change_class, ungraphed
from ..missing import warn_of_missing_kernels
from ..ops.linear_int8.modules import QuantizedLayer, put_back
from . import freezing
from .blocks import BlockEntry, BlockParts, block_of
from .fused import forward_block
from .matching import TABLE, find_blocks, parts_if_fused, why_another_forward, why_mismatched
from .watching import forget

_Model = TypeVar("_Model", bound=nn.Module)

#: The attribute of a class of ours that holds the first original and the keys of the entries, in their order.
_MADE_OF = "_cvt_kernels_made_of"


def accelerate(model: _Model, *, freeze: bool | None = None) -> _Model:
    """Gives the supported blocks of a CvT, SegFormer, PVT, PVT v2 or GLPN fused forwards, in place.

    Supported are Hugging Face's models of these names, Microsoft's ``cls_cvt`` models and every model that
    contains their blocks. (``cvt``'s own blocks are fused as they are.) The model computes what it computed
    before, in evaluation and in training, with the same random numbers, gradients and BatchNorm statistics,
    up to rounding. Parameters, ``state_dict``, hooks and class names stay.

    A block that is not as its class is upstream keeps its class, and one that a fused forward would not do
    justice to its own computation, call by call: :func:`coverage` tells which and why. :func:`restore` undoes
    everything. Second derivatives need the reference backend.

    On a CPU, in evaluation and without gradients, each stage of a CvT is one step whose weights are packed
    for this CPU, and so is each layer of the other models. The packed copies take as much memory as the
    weights (:func:`release_memory` frees them). Changed weights are noticed, and packed again, unless they
    were changed through ``.data`` in place, which PyTorch does not count (:func:`refresh`).

    With ``freeze=True`` a model is for serving only, on GPUs too: biases are folded, the residual stream is
    one tensor that the matrix products accumulate into, and a CvT-13 takes half the launches. In training
    mode it raises. Where gradients are recorded, under autocast and export, and under ``torch.compile`` on a
    GPU, its blocks run one by one.

    Args:
        model: Any module; wrappers are looked into.
        freeze: None serves whole stages and layers on a CPU in evaluation. True serves them everywhere, and
            nothing else; the model must be in evaluation mode. False leaves every call to the blocks.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module, or ``freeze`` neither None, True nor False.
        ValueError: It has no supported block, or with ``freeze=True`` it has no stage or layer that can be
            frozen, or is in training mode; it is left as it was.
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
    for block, entry in supported:
        if entry.arguments and not is_fused(block):
            change_class(block, functools.partial(_fused_class, key=entry.key))
    for stage, key in [] if freeze is False else _servable_stages(model):
        if not (freezing.is_serving(stage) or freezing.is_frozen(stage)):
            change_class(stage, functools.partial(_serving_class, key=key + _IN_EVALUATION))
    for stage, key in stages:
        if not freezing.is_frozen(stage):
            change_class(stage, functools.partial(_frozen_class, key=key))
            freezing.give_number(stage)
    return model


def _servable_stages(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the stages and layers that may be served as one, with the keys of their entries."""
    return [
        (stage, entry.serving_key)
        for _, stage, entry in freezing.find_stages(model)
        if why_another_forward(stage, block_of(entry)) is None
    ]


def _freezable_stages(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the stages and layers of a model that can be frozen, with the keys of their entries.

    Raises:
        ValueError: There are none, or the model is in training mode.
    """
    if model.training:
        raise ValueError("model: is in training mode, expected model.eval() before freeze=True")
    stages = freezing.find_stages(model)
    if not stages:
        raise ValueError(
            f"model: {type(model).__name__} has no whole stage of a CvT to freeze, and no layer of a "
            "SegFormer, PVT, PVT v2 or GLPN"
        )
    reasons = [freezing.why_not_freezable(stage, entry) for _, stage, entry in stages]
    if all(reason is not None for reason in reasons):
        raise ValueError(
            f"model: none of the {len(stages)} {stages[0][2].noun}s of {type(model).__name__} can be frozen; "
            f"the first, {stages[0][0] or 'itself'}: {reasons[0]}"
        )
    return [
        (stage, entry.serving_key)
        for (_, stage, entry), reason in zip(stages, reasons, strict=True)
        if reason is None
    ]


def restore(model: _Model) -> _Model:
    """Gives blocks and stages their own classes back, in place, drops CUDA graphs, and undoes ``quantize``.

    A quantized layer that was loaded as it is stays so: there is no other.

    Args:
        model: Any module; what was neither accelerated, graphed nor quantized stays as it is.

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
    """Does as :func:`restore`, but leaves quantized layers as they are."""
    ungraphed(model)
    for module in model.modules():
        forget(module)
        if is_fused(module):
            module.__class__ = original_class(type(module))
            freezing.take_number(module)
    return model


@cached
def _fused_class(original: Any, key: str) -> Any:
    """Returns the subclass of ``original`` with the fused forward of the entry named ``key``."""
    entry = TABLE[key]

    run = _run_block if entry.forward is None else _run_module

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_recorded(args, kwargs):
            parts = parts_if_fused(self, entry)
            result = NotImplemented if parts is None else run(entry, self, parts, args, kwargs)
            if result is not NotImplemented:
                return result
        return original.forward(self, *args, **kwargs)

    return _derived(original, key, forward=forward)


def _run_module(entry: BlockEntry, module: nn.Module, parts: Any, args: Any, kwargs: Any) -> Any:
    """Computes a call of an embedding or a head; NotImplemented for one that is left to its own forward."""
    assert entry.forward is not None
    return entry.forward(module, *args, **kwargs)


def _run_block(entry: BlockEntry, block: nn.Module, parts: BlockParts, args: Any, kwargs: Any) -> Any:
    """Computes a call of a block; NotImplemented for one that is left to its own forward."""
    call = entry.call_of(args, kwargs)
    if call is None:
        return NotImplemented
    x, grid = call
    if parts.reduction is not None and min(grid) < parts.reduction[0].kernel_size[0]:
        return NotImplemented  # upstream has an error for it
    return entry.result(forward_block(parts, x, grid)[0], grid)


@cached
def _frozen_class(original: Any, key: str) -> Any:
    """Returns the subclass of ``original`` that serves the stage or layer of the entry ``key`` as one.

    A layer is a block too, and ``original`` then the class with its fused forward.
    """
    entry = freezing.STAGES[key]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_recorded(args, kwargs):
            return original.forward(self, *args, **kwargs)
        serve = freezing.try_to_trace_as_one if torch.compiler.is_compiling() else freezing.try_to_serve
        result = serve(self, entry, args, kwargs)
        return original.forward(self, *args, **kwargs) if result is None else result

    def _cvt_kernels_graph_key(self: nn.Module) -> Any:
        return freezing.graph_key(self, entry)

    members = {"forward": forward, "_cvt_kernels_graph_key": _cvt_kernels_graph_key}
    return _derived(original, key, **members, **{freezing.ENTRY: entry, freezing.NUMBER: None})


#: The end of the keys of stages and layers that are served as one in evaluation.
_IN_EVALUATION = ", in evaluation"


@cached
def _serving_class(original: Any, key: str) -> Any:
    """Returns the subclass of ``original`` that serves the stage or layer of an entry as one in evaluation.

    It is on a CPU, and without gradients; ``torch.compile`` traces the modules.
    """
    entry = freezing.STAGES[key.removesuffix(_IN_EVALUATION)]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training or torch.compiler.is_compiling() or _is_recorded(args, kwargs)):
            result = freezing.try_to_serve_in_evaluation(self, entry, args, kwargs)
            if result is not None:
                return result
        return original.forward(self, *args, **kwargs)

    return _derived(original, key, forward=forward, _cvt_kernels_serves=True)


def _is_recorded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether ``torch.jit.trace`` or ``torch.fx`` records a call, which is then the module's own."""
    if torch.jit.is_tracing():
        return True
    return any(map(isinstance, (*args, *kwargs.values()), itertools.repeat(torch.fx.Proxy)))


def _derived(original: Any, key: str, **members: Any) -> Any:
    """Returns a subclass of ``original`` that looks the same, with members of its own."""
    first, *keys = vars(original).get(_MADE_OF, (original,))
    made_of = first, *keys, key

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # Pickle finds classes by name, and under this name it would find the original.
        return _new_module, made_of, freezing.without_number(object.__reduce_ex__(self, 2)[2])

    return derived(original, UNFUSED, **members, __reduce_ex__=__reduce_ex__, **{_MADE_OF: made_of})


def _new_module(original: type[nn.Module], *keys: str) -> nn.Module:
    """Returns an accelerated block, a frozen stage or layer without state, for pickle and ``copy``."""
    made: Any = original
    for key in keys:
        if key.endswith(_IN_EVALUATION):
            made = _serving_class(made, key)
        else:
            made = _frozen_class(made, key) if key in freezing.STAGES else _fused_class(made, key)
    module: nn.Module = made.__new__(made)
    if freezing.is_frozen(module):
        freezing.give_number(module)
    return module
