"""Reports which blocks, frozen stages and layers run fused, why others do not, and what a forward calls."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .. import backends
from ..backends import Implementation
from ..classes import is_fused
from ..graphs import ungraphed
from ..messages import aligned
from .blocks import BlockEntry
from .matching import find_blocks, find_stages, why_mismatched, why_not_now
from .served import is_frozen, is_serving, serves_on, why_not_served
from .watching import LENT

#: A path with a number; the last one, if there are some.
_NUMBERED = re.compile(r"(.*\.|)(0|[1-9]\d*)((?:\..*)?)")

#: The numbers of calls of an operator's backends.
_Counts = collections.Counter[str]


class BlockCoverage(NamedTuple):
    """A row of :func:`coverage`: a block, or a stage or layer that runs as one.

    Attributes:
        path: Its name in ``model.named_modules()``.
        class_name: The name of its class.
        fused: True if a call would run the fused forward now.
        backends: Operator → the backends that served it, such as ``"cpu and reference"``. Calls by inner
            blocks count for these. Empty without inputs.
        reason: Why it is not fused, or None.
    """

    path: str
    class_name: str
    fused: bool
    backends: dict[str, str]
    reason: str | None


class Coverage(list[BlockCoverage]):
    """The rows of :func:`coverage`; as a string, a table of them and the backends of their operators.

    The table merges equal rows of consecutive blocks. ``called`` maps operator → backend → number of calls in
    the forward; empty without inputs.
    """

    def __init__(self, rows: Iterable[BlockCoverage], called: Mapping[str, Mapping[str, int]]):
        super().__init__(rows)
        self.called = called

    def __str__(self) -> str:
        table = [("block", "class", "fused", "operators, or why not" if self.called else "why not")]
        for path, row in _rows_by_range(self):
            operators = ", ".join(row.backends) or "–"
            table.append((path, row.class_name, "yes" if row.fused else "no", row.reason or operators))
        lines = [*aligned(table), ""]
        if self.called:
            lines.append("served by")
            lines += [f"  {operator}: {_described(counts)}" for operator, counts in self.called.items()]
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
    """Returns backends with their numbers of calls: ``cpu (9 calls), reference (3)``."""
    (name, count), *others = counts.items()
    first = f"{name} ({count} call{'' if count == 1 else 's'})"
    return ", ".join([first, *(f"{name} ({count})" for name, count in others)])


def coverage(model: nn.Module, inputs: Any = None) -> Coverage:
    """Lists the blocks that :func:`accelerate` supports: which run fused now, and why others do not.

    With inputs it runs one forward, and also lists the operators that each block called and the backends that
    served them. The forward records gradients if a block is in training mode. It runs on a copy, without
    ``torch.compile`` and CUDA graphs: the model, its buffers and the random number generators stay as they
    are. (Your own hooks are copied, and run.)

    A stage or layer that runs as one has a row. The blocks of the stage, which are not called then, have rows
    too.

    Args:
        model: Any module, accelerated or not; wrappers are looked into.
        inputs: The arguments of the model: one tensor, a tuple of positional or a dict of keyword arguments;
            None to run nothing.

    Returns:
        A list of :class:`BlockCoverage`; print it.

    Raises:
        TypeError: ``model`` is not a module, ``inputs`` is neither a tensor, a tuple nor a dict, or has no
            tensor of floating point.
        ValueError: It has no block that could be supported.
    """
    rows = _rows_of(model)
    if inputs is None:
        return Coverage(rows, {})
    check_inputs(inputs)
    inner = unwrapped(model)
    beginning = next((f"{path}." for path, module in model.named_modules() if module is inner and path), "")
    called = _called(inner, inputs, [row.path.removeprefix(beginning) for row in rows])
    total: dict[str, _Counts] = {}
    for i, counts in enumerate(called):
        rows[i] = rows[i]._replace(backends={name: " and ".join(by) for name, by in counts.items()})
        for operator, by_backend in counts.items():
            total.setdefault(operator, collections.Counter()).update(by_backend)
    return Coverage(rows, {operator: dict(counts.most_common()) for operator, counts in total.items()})


def _rows_of(model: nn.Module) -> list[BlockCoverage]:
    # First: it says so if the model is no module.
    reasons = {path: _why_not_fused(block, entry) for path, block, entry in find_blocks(model)}
    for path, stage, entry in find_stages(model):
        if not (is_frozen(stage) or is_serving(stage)):
            continue
        reason = why_not_served(stage, entry)
        is_here = all(serves_on(parameter.device) for parameter in stage.parameters())
        if is_frozen(stage) or (is_here and reason is None):
            reasons[path] = reason
    return [
        BlockCoverage(path, type(module).__name__, reasons[path] is None, {}, reasons[path])
        for path, module in model.named_modules()
        if path in reasons
    ]


def _why_not_fused(block: nn.Module, entry: BlockEntry) -> str | None:
    own = vars(block).get("forward")
    is_lent = hasattr(own, LENT)
    if (reason := why_mismatched(block, entry)) is not None:
        return reason
    if entry.arguments and not (is_fused(block) or is_lent):
        return "accelerate() has not been called"
    if (reason := why_not_now(block, entry)) is not None:
        return reason
    if own is not None and not is_lent:
        return "its forward has been replaced in this object"
    return why_not_served(block, entry) if entry.is_only_served else None


# What a forward calls -------------------------------------------------------------------------------------


@torch.inference_mode(False)
def _called(model: nn.Module, inputs: Any, paths: list[str]) -> list[dict[str, _Counts]]:
    """Returns the operators that the modules at some paths call in one forward, without those within them."""
    model = ungraphed(copy.deepcopy(model))
    rows = {model.get_submodule(path): i for i, path in enumerate(paths)}
    called: list[dict[str, _Counts]] = [{} for _ in paths]
    within: list[int] = []
    thread = threading.get_ident()

    def note(operator: str, backend: str) -> None:
        if within and threading.get_ident() == thread:
            called[within[-1]].setdefault(operator, collections.Counter())[backend] += 1

    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        _noted(note),  # first: it lets threads take turns, and what follows is the process's
        torch.random.fork_rng(devices=cuda),
        torch.set_grad_enabled(any(block.training for block in rows)),
        torch.compiler.set_stance("force_eager"),
        _entered(rows, within),
    ):
        call_model(model, inputs)
    return called


def check_inputs(inputs: Any) -> None:
    """Raises TypeError for what is no arguments of a model, or has no tensor of floating point."""
    is_known = isinstance(inputs, Tensor | tuple | Mapping)
    if not is_known or not list(tensors_in(inputs)):
        lacking = " without a floating-point tensor" if is_known else ""
        raise TypeError(
            f"inputs: got {type(inputs).__name__}{lacking}, expected a tensor, a tuple of positional or a "
            "dict of keyword arguments"
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the floating tensors in what a model returns or takes."""
    if isinstance(value, Tensor):
        yield from [value] if value.is_floating_point() else []
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Calls a model with one tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model within wrappers for several GPUs and of ``torch.compile``."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextlib.contextmanager
def _entered(rows: Mapping[nn.Module, int], within: list[int]) -> Iterator[None]:
    """Keeps the rows of the modules that are being called in a list; a hook would change how they run."""
    own = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        row = rows.get(module)
        if row is None:
            return own(module, *args, **kwargs)
        within.append(row)
        try:
            return own(module, *args, **kwargs)
        finally:
            within.pop()

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = own  # type: ignore[method-assign]


def _noted(note: Callable[[str, str], None]) -> contextlib.AbstractContextManager[None]:
    """Notes which backend serves each call of an operator within a block."""

    def noting(operator: str, backend: str, implementation: Implementation) -> Implementation:
        def function(call: Any) -> Any:
            note(operator, backend)
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=function)

    return backends.replaced(noting)
