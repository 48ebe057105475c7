"""Frozen stages and layers under ``torch.compile`` on a CPU, where each is one operator of the graph.

Inductor sees neither its modules nor its parameters: the operator does what the stage does without
``torch.compile``, so that changed weights are noticed and a call may be proven. A graph names the stage by a
number, which is an attribute of the stage and of no other; it is guarded as any integer of a module.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import checks
from .entries import BlockEntry, ServedEntry, StageEntry
from .freezing import has_gradient, refuse_to_train, tokens_served, why_not_freezable

_NUMBER, _ENTRY = "_cvt_kernels_number", "_cvt_kernels_entry"
_numbers = itertools.count()
_stages: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def members_of_numbered(entry: ServedEntry) -> dict[str, Any]:
    """Returns the members of a class whose objects get a number by :func:`give_number`."""
    return {_ENTRY: entry, _NUMBER: None}


def is_frozen(module: nn.Module) -> bool:
    """Says whether the class of a module is that of a frozen stage or layer."""
    return hasattr(type(module), _ENTRY)


def give_number(stage: nn.Module) -> None:
    """Gives a frozen stage or layer a number of its own."""
    number = next(_numbers)
    vars(stage)[_NUMBER] = number
    _stages[number] = stage


def take_number(module: nn.Module) -> None:
    """Takes its number from a module that has one."""
    _stages.pop(vars(module).pop(_NUMBER, None), None)


def without_number(state: Any) -> Any:
    """Returns the state of a module for a copy or a pickle, which must not have the number of the module."""
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name != _NUMBER}


def _numbered(number: int) -> tuple[nn.Module, ServedEntry]:
    stage = _stages.get(number)
    if stage is None:
        raise RuntimeError("the frozen module for which this code was compiled is no longer frozen")
    return stage, getattr(type(stage), _ENTRY)


# The operators --------------------------------------------------------------------------------------------

# An operator of torch.library.custom_op takes three times as long to call.
_library = torch.library.Library("cvt_kernels", "FRAGMENT")
_library.define(
    "frozen_stage(Tensor image, int number, SymInt tokens, int channels) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "frozen_layer(Tensor x, int number, SymInt height, SymInt width) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.no_grad()
def _run_stage(image: Tensor, number: int, tokens: int, channels: int) -> Tensor:
    return _run(number, image, None)


@torch.no_grad()
def _run_layer(x: Tensor, number: int, height: int, width: int) -> Tensor:
    return _run(number, x, (height, width))


def _run(number: int, x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    stage, entry = _numbered(number)
    refuse_to_train(stage)
    served = tokens_served(stage, entry, x, grid)
    if served is not None:
        return served[0].contiguous()
    own_forward = type(stage)._cvt_kernels_original.forward  # type: ignore[attr-defined]
    return entry.tokens(own_forward(stage, x, *(grid or ()))).contiguous()


def _shape_of_stage(image: Tensor, number: int, tokens: int, channels: int) -> Tensor:
    return image.new_empty(image.shape[0], tokens, channels)


def _shape_of_layer(x: Tensor, number: int, height: int, width: int) -> Tensor:
    return x.new_empty(x.shape)


for _name, _function, _shape_of in (
    ("frozen_stage", _run_stage, _shape_of_stage),
    ("frozen_layer", _run_layer, _shape_of_layer),
):
    _library.impl(_name, _function, "CPU")
    torch.library.register_fake(f"cvt_kernels::{_name}", _shape_of, lib=_library)


# The forward that is traced -------------------------------------------------------------------------------


def try_to_trace_as_one(
    stage: nn.Module, entry: ServedEntry, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Traces a frozen stage or layer as one operator; None where its own modules are to be traced.

    In training mode it is one operator too, which raises when it is called.
    """
    number = getattr(stage, _NUMBER)
    call = entry.call_of(args, kwargs)
    # An exported program may run anywhere, and so holds the model's own modules.
    if call is None or checks.is_exporting() or number is None or call[0].device.type != "cpu":
        return None
    if torch_module._has_any_global_hook() or checks.autocast_enabled(call[0]) or checks.is_transformed():
        return None
    if _why_not_freezable(number) is not None or (not stage.training and has_gradient(stage, call[0])):
        return None
    if isinstance(entry, BlockEntry):
        return _trace_layer(stage, entry, number, *call)
    return _trace_stage(stage, entry, number, call[0])


def _trace_stage(stage: nn.Module, entry: StageEntry, number: int, image: Tensor) -> Any:
    conv, class_token = entry.embedding(stage)
    if image.ndim != 4 or image.shape[1] != conv.in_channels or image.dtype != conv.weight.dtype:
        return None  # its own forward says what is wrong
    grid = _output_size(image.shape[2], conv), _output_size(image.shape[3], conv)
    if grid[0] < 1 or grid[1] < 1:
        return None
    count = grid[0] * grid[1] + (0 if class_token is None else class_token.shape[1])
    tokens = torch.ops.cvt_kernels.frozen_stage.default(image, number, count, conv.out_channels)
    return entry.result(tokens, grid)


def _trace_layer(
    layer: nn.Module, entry: BlockEntry, number: int, x: Tensor, grid: tuple[int, int] | None
) -> Any:
    parts = entry.parts(layer)
    assert parts is not None
    assert grid is not None
    weight = parts.fc1.weight
    if x.ndim != 3 or x.shape[2] != weight.shape[1] or x.dtype != weight.dtype:
        return None
    tokens = torch.ops.cvt_kernels.frozen_layer.default(x, number, *grid)
    return entry.result(tokens, grid)


def _output_size(size: int, conv: nn.Conv2d) -> int:
    return (size + 2 * int(conv.padding[0]) - conv.kernel_size[0]) // conv.stride[0] + 1


def _why_not_freezable(number: int) -> str | None:
    """Says why the module of a number cannot be served as one; those within it are then better traced."""
    return why_not_freezable(*_numbered(number))


# What changes afterwards is noticed by the operator; see the end of backends.py.
_why_not_freezable._dynamo_marked_constant = True  # type: ignore[attr-defined]
