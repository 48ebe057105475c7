"""Stages and encoders whose blocks run one by one, recorded as a whole for calls in evaluation on a GPU.

The first call runs the modules. A later one records what they launch and compute, embeddings and upstream's
own steps included; from then on a call asks once whether anything has changed, and runs the recording
(``ops/programs.Replays``). Hooks, training mode, gradients, autocast and tracing run the modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..classes import is_fused, original_class
from ..ops.linear_int8.modules import LinearInt8
from ..ops.programs import Replays
from .blocks import BlockParts, RecordedEntry, is_named
from .class_token import is_stage_wanted
from .families import RECORDED
from .matching import PLAIN, ExaminedBlock, blocks_in, examine, why_another_forward
from .watching import Examined, Watch, is_only_recorded, known_of, patch_of, why_must_be_called

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
    """

    attribute = "_cvt_kernels_recorded"

    def __init__(self, module: nn.Module, entry: RecordedEntry) -> None:
        modules = list(itertools.islice(module.modules(), 1, None))
        for each in filter(is_fused, (module, *modules)):  # what is examined later is no change
            for kind in (ExaminedBlock, _Recorded):
                vars(each).setdefault(kind.attribute, None)
        super().__init__(module, Watch(module, modules))  # first: what changes meanwhile is noticed
        self.replays: Replays | None = None
        identity = self.watch.identity()
        if identity is not None and _is_known(module, entry):
            self.replays = Replays((type(module), identity), (*module.parameters(), *module.buffers()))


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
    forward: Callable[[], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Returns ``forward()``, the result of a call with these arguments, by a recording if there is one."""
    given = {**dict(zip(entry.block.arguments, args, strict=False)), **kwargs}
    inputs = given.pop(entry.block.arguments[0], None)
    inputs = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    if module.training or not all(isinstance(x, Tensor) and Replays.may_run(x) for x in inputs):
        return forward()
    is_plain = len(args) <= len(entry.block.arguments) and {*map(type, given.values())} <= {bool, NoneType}
    if not inputs or not is_plain or torch_module._has_any_global_hook():
        return forward()
    known = known_of(module, _Recorded)
    if known is None:
        if getattr(module, "_is_replica", False):  # of DataParallel, which lives for one call
            return forward()
        known = vars(module)[_Recorded.attribute] = _Recorded(module, entry)
    if known.replays is None or known.watch.is_training():
        return forward()
    settings = (*given.items(),), entry.settings(module), is_stage_wanted(module)
    return known.replays.run(forward, inputs, *settings)
