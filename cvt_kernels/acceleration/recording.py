"""Recordings on a GPU: of blocks, and of stages and encoders as a whole for calls in evaluation.

The first call runs the modules. A later one records what they launch and compute, embeddings and upstream's
own steps included; from then on a call asks once whether anything has changed, and runs the recording
(``ops/replays.Replays``). Hooks, training mode, gradients, autocast and tracing run the modules.

In training each block has a recording (``ops/training_replays``), and a stage or an encoder asks once for all
of its blocks whether anything has changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import machine
from ..classes import is_fused, original_class
from ..ops.linear_int8.modules import LinearInt8
from ..ops.replays import Replays
from ..ops.training_replays import States, within
from .blocks import BlockParts, RecordedEntry, is_named
from .class_token import is_stage_wanted
from .families import RECORDED
from .fused import draw_factors, draws_of, forward_block
from .matching import PLAIN, ExaminedBlock, blocks_in, examine, replays_of, why_another_forward
from .watching import Examined, Watch, is_only_recorded, known_of, patch_of, why_must_be_called

#: The attribute of the class of a stage or an encoder that is recorded as a whole.
MARK = "_cvt_kernels_records"
#: PyTorch's layers that upstream's code calls, besides those that fused blocks replace.
_OTHERS = nn.ReLU, nn.Sigmoid, nn.Upsample


def find_recordable(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the stages and encoders that may be recorded, with the keys of their entries."""
    found = []
    for module in model.modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        for key, entry in RECORDED.items():
            if entry.block.name in names and why_another_forward(module, entry.block) is None:
                found.append((module, key))
    return found


class _Recorded(Examined):
    """A stage or an encoder that was called.

    Attributes:
        replays: The recordings of its forward; None where they could not notice what it depends on.
        states: What its blocks ask in training; None likewise.
    """

    attribute = "_cvt_kernels_recorded"

    def __init__(self, module: nn.Module, entry: RecordedEntry) -> None:
        modules = list(itertools.islice(module.modules(), 1, None))
        for each in filter(is_fused, (module, *modules)):  # what is examined later is no change
            for kind in (ExaminedBlock, _Recorded):
                vars(each).setdefault(kind.attribute, None)
        super().__init__(module, Watch(module, modules))  # first: what changes meanwhile is noticed
        self.replays: Replays | None = None
        self.states: States | None = None
        identity = self.watch.identity()
        if identity is not None and _is_known(module, entry):
            tensors = (*module.parameters(), *module.buffers())
            self.replays = Replays((type(module), identity), tensors)
            self.states = States(tensors, self.watch.spaces)


def _is_known(module: nn.Module, entry: RecordedEntry) -> bool:
    """Returns whether fused blocks, PyTorch's layers and upstream's code compute all within a module."""
    if why_another_forward(module, entry.block) is not None:
        return False
    within: set[nn.Module] = {module}
    for _, block, block_entry in blocks_in(module):
        parts = examine(block, block_entry).parts
        if parts is None or not is_fused(block) or why_another_forward(block, block_entry) is not None:
            return False
        if isinstance(parts, BlockParts):
            if not parts.are_all_replaced():
                return False
            within.update(block.modules())
        else:
            within.add(block)
    return all(each in within or _is_called_as_written(each, entry) for each in module.modules())


def _is_called_as_written(module: nn.Module, entry: RecordedEntry) -> bool:
    cls = original_class(type(module))
    if cls not in PLAIN and ((cls not in _OTHERS and not is_named(cls, entry.classes)) or patch_of(cls)):
        return False
    return cls is not LinearInt8 and (why_must_be_called(module) is None or is_only_recorded(module))


def run(
    module: nn.Module,
    entry: RecordedEntry,
    own: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Returns the result of a module's ``own`` forward, by a recording if there is one."""
    if torch.compiler.is_compiling():
        return own(module, *args, **kwargs)

    def forward() -> Any:
        return own(module, *args, **kwargs)

    given = {**dict(zip(entry.block.arguments, args, strict=False)), **kwargs}
    inputs = given.pop(entry.block.arguments[0], None)
    inputs = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    trains = module.training and torch.is_grad_enabled()
    may_run = all(isinstance(x, Tensor) and (_is_on_gpu(x) if trains else Replays.may_run(x)) for x in inputs)
    if not inputs or not may_run or (module.training and not trains) or torch_module._has_any_global_hook():
        return forward()
    is_plain = len(args) <= len(entry.block.arguments) and {*map(type, given.values())} <= {bool, NoneType}
    if not is_plain and not trains:
        return forward()
    known = known_of(module, _Recorded)
    if known is None:
        if getattr(module, "_is_replica", False):  # of DataParallel, which lives for one call
            return forward()
        known = vars(module)[_Recorded.attribute] = _Recorded(module, entry)
    if known.states is not None and trains:
        with within(known.states.now(inputs[0])):
            return forward()
    if known.replays is None or known.watch.is_training():
        return forward()
    settings = (*given.items(),), entry.settings(module), is_stage_wanted(module)
    return known.replays.run(forward, inputs, *settings)


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda or machine.INTERPRETING


def run_block(
    block: nn.Module,
    parts: BlockParts,
    x: Tensor,
    grid: tuple[int, int],
    rows: Tensor | None = None,
    *,
    rows_only: bool = False,
) -> Tensor:
    """Returns the tokens of :func:`forward_block` for a block's parts, by a recording if there is one."""

    def forward() -> Tensor:
        return forward_block(parts, x, grid, rows, rows_only=rows_only)[0]

    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    found = None if is_traced or not _is_on_gpu(x) else replays_of(block)
    if found is None:
        return forward()
    replays, training = found
    rate = draws_of(parts) if torch.is_grad_enabled() and rows is None else None
    if rate is not None:
        settings = grid, rate > 0, training
        return replays.train(forward, x, lambda: draw_factors(parts, x), *settings)
    if training:
        return forward()
    out: Tensor = replays.run(forward, (x, rows), grid, rows_only)
    return out
