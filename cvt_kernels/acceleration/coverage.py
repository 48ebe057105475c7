"""Reports which blocks, frozen stages and layers run fused, by which backends, and why others do not."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from .. import backends, dispatch
from ..ops.linear_int8.modules import QuantizedLayer
from ..tables import aligned
from . import ours
from .compiling import is_frozen
from .entries import BlockEntry
from .freezing import find_stages, is_serving, operators_served, why_not_served
from .matching import find_blocks, is_fused, why_mismatched, why_not_now

#: A path with a number; the last one, if there are some.
_NUMBERED = re.compile(r"(.*\.|)(0|[1-9]\d*)((?:\..*)?)")


class BlockCoverage(NamedTuple):
    """A row of :func:`coverage`: one block, or a frozen stage or layer.

    Attributes:
        path: Its name in ``model.named_modules()``.
        class_name: Name of its class.
        fused: True if a call would run the fused forward now.
        backends: Operator → the backends that serve it on the block's device, with gradients if the block is
            in training mode and has parameters that require one. Under ``auto`` they are those of this
            machine's verdicts on all shapes and dtypes, the most frequent first, such as
            ``"native or reference"``; ``"not used yet"`` if the first call will decide. ``"none"`` if no
            requested backend can serve.
        reason: Says why it is not fused; None if it is.
    """

    path: str
    class_name: str
    fused: bool
    backends: dict[str, str]
    reason: str | None


class Calls(NamedTuple):
    """The calls that a block makes now.

    Attributes:
        device_type: The type of its device.
        gradient: Whether they are with gradients.
    """

    device_type: str
    gradient: bool


class Coverage(list[BlockCoverage]):
    """The rows of :func:`coverage`; as a string, a table of them and the backends of their operators.

    In the table, equal rows of consecutive blocks are one.

    Attributes:
        served: The calls of the fused blocks → operator → the backends that serve them, each with its number
            of verdicts (0 where it serves without one).
    """

    def __init__(
        self, rows: Iterable[BlockCoverage], served: Mapping[Calls, Mapping[str, Mapping[str, int]]]
    ):
        super().__init__(rows)
        self.served = served

    def __str__(self) -> str:
        table = [("block", "class", "fused", "operators, or why not")]
        for path, row in _rows_by_range(self):
            operators = ", ".join(row.backends) or "–"
            table.append((path, row.class_name, "yes" if row.fused else "no", row.reason or operators))
        lines = [*aligned(table), ""]
        for calls, by_operator in self.served.items():
            direction = "forward+backward" if calls.gradient else "forward"
            lines.append(f"served on {calls.device_type}, {direction}, by")
            lines += [f"  {operator}: {_described(counts)}" for operator, counts in by_operator.items()]
            lines.append("")
        fused = sum(row.fused for row in self)
        return "\n".join([*lines, f"{fused} of {len(self)} blocks fused"])


def _rows_by_range(rows: Iterable[BlockCoverage]) -> list[tuple[str, BlockCoverage]]:
    """Returns rows with their paths; equal ones of consecutive blocks as one: ``stage2.blocks.0–9.attn``."""
    lines: list[tuple[str, list[int], str, BlockCoverage]] = []
    runs: dict[Any, list[int]] = {}
    for row in rows:
        match = _NUMBERED.fullmatch(row.path)
        before, number, after = match.groups() if match else (row.path, None, "")
        kind = before, after, row.class_name, row.fused, tuple(row.backends.items()), row.reason
        run = runs.get(kind, [])
        if not run or number is None or int(number) != run[-1] + 1:
            run = runs[kind] = []
            lines.append((before, run, after, row))
        if number is not None:
            run.append(int(number))
    return [(f"{before}{_as_range(run)}{after}", row) for before, run, after, row in lines]


def _as_range(run: list[int]) -> str:
    return f"{run[0]}–{run[-1]}" if len(run) > 1 else "".join(map(str, run))


def _described(counts: Mapping[str, int]) -> str:
    """Returns backends with their numbers of verdicts: ``native (9 kinds of call), reference (3)``."""
    numbers = [f"{count}" if count else "" for count in counts.values()]
    if numbers[0]:
        numbers[0] += " kind of call" if numbers[0] == "1" else " kinds of call"
    pairs = zip(counts, numbers, strict=True)
    return ", ".join(f"{name} ({number})" if number else name for name, number in pairs)


def coverage(model: nn.Module) -> Coverage:
    """Lists the blocks that :func:`accelerate` knows as they are now: fused by which backends, or why not.

    A frozen stage has a row of its own before those of its blocks, which say how these run where the stage
    does not run as one. So has a frozen layer before those of its parts; it is a block too, but its row is
    about the layer as one.

    Args:
        model: Any module, accelerated or not; wrappers are looked into.

    Returns:
        A list of :class:`BlockCoverage`; print it.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no block that could be supported.
    """
    rows = []
    served: dict[Calls, dict[str, dict[str, int]]] = {}
    for path, module, reason, operators_of in _rows_of(model):
        calls = _calls_of(module)
        operators = operators_of(calls.device_type) if reason is None else ()
        for operator in operators:
            by_operator = served.setdefault(calls, {})
            if operator not in by_operator:
                by_operator[operator] = _backends(operator, calls)
        names = {operator: " or ".join(served[calls][operator]) for operator in operators}
        rows.append(BlockCoverage(path, type(module).__name__, reason is None, names, reason))
    return Coverage(rows, served)


class _Row(NamedTuple):
    """A block, a frozen stage or layer: why it is not fused, and its operators on a type of device."""

    path: str
    module: nn.Module
    reason: str | None
    operators: Callable[[str], tuple[str, ...]]


def _rows_of(model: nn.Module) -> list[_Row]:
    """Returns the rows of a model in its order; stages and layers as such where they are frozen."""
    blocks = list(find_blocks(model))  # which says so if it is no module
    on_rows = ours.blocks_on_rows(model)
    rows = {}
    for path, block, entry in blocks:
        operators_of = functools.partial(_operators_of, block, entry, block in on_rows)
        rows[path] = _Row(path, block, _why_not_fused(block, entry), operators_of)
    for path, stage, stage_entry in find_stages(model):
        reason = why_not_served(stage, stage_entry) if is_frozen(stage) or is_serving(stage) else None
        on_cpu = _calls_of(stage).device_type == "cpu"
        if is_frozen(stage) or (is_serving(stage) and on_cpu and reason is None):
            rows[path] = _Row(path, stage, reason, functools.partial(operators_served, stage, stage_entry))
    return [rows[path] for path, _ in model.named_modules() if path in rows]


def _operators_of(block: nn.Module, entry: BlockEntry, on_rows: bool, device_type: str) -> tuple[str, ...]:
    """Returns the public operators, but ``linear``, that a block calls on a type of device."""
    names = entry.operators(block, device_type)
    names = ours.operators_on_rows(names) if on_rows else names
    quantized = any(isinstance(block._modules.get(name), QuantizedLayer) for name in entry.layers)
    return tuple(dict.fromkeys((*names, "linear_int8"))) if quantized else names


def _why_not_fused(block: nn.Module, entry: BlockEntry) -> str | None:
    reason = why_mismatched(block, entry)
    if reason is None and entry.forward is not None and not is_fused(block):
        reason = "accelerate() has not been called"
    if reason is None:
        reason = why_not_now(block, entry)
    if reason is None and "forward" in vars(block):
        reason = "its forward has been replaced in this object"
    return reason


def _calls_of(block: nn.Module) -> Calls:
    # A quantized or flattened block may have no parameter of its own.
    tensors = itertools.chain(block.parameters(), block.buffers())
    device_type = next((t.device.type for t in tensors), "cpu")
    gradient = block.training and any(parameter.requires_grad for parameter in block.parameters())
    return Calls(device_type, gradient)


def _backends(operator: str, calls: Calls) -> dict[str, int]:
    """Returns the backends that serve an operator, each with its number of verdicts; or why none does."""
    counts = dispatch.chosen_backends(operator, calls.device_type, gradient=calls.gradient)
    if counts:
        return counts
    if backends.requested_backends() != ("auto",):
        return {"none": 0}
    name = dispatch.backend_without_verdict(operator, calls.device_type, gradient=calls.gradient)
    return {name or "not used yet": 0}
