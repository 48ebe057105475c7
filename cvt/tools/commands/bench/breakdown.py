"""The memory of a step, and its time by part of the model and kind of operator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.profiler import profile, record_function

from cvt_kernels import backends, machine
from cvt_kernels.autotune import clock

from .contenders import COMPILED, Contender

#: Kinds of operators, by the outermost operator that has one. Backward has its names in CamelCase.
_KINDS = {
    kind: re.compile(pattern, re.IGNORECASE)
    for kind, pattern in {
        "block": r"(transformer|pyramid)_block by cpu",
        # The only products of two tensors, and the only scaling, are attention's.
        "attention": r"attention|einsum|bmm|softmax|aten::(matmul|mul)$|^MulBackward",
        "linear": r"linear|addmm|aten::mm$|: MmBackward",
        "convolution": r"conv|batch_?norm",
        "norm": r"layer_?norm|aten::add_?$|: AddBackward",
        "gelu": r"gelu",
        "copies": r"aten::(copy_|clone|contiguous|cat|to)$|: (Clone|Cat|Copy)",
    }.items()
}
# The endings of class names, ours and transformers'.
_PARTS = {
    "embedding": ("PatchEmbeddings", "CvtEmbeddings", "ConvEmbed"),
    "block": ("SegformerLayer", "PvtLayer", "PvtV2BlockLayer", "GLPNLayer", "CvtLayer", "Block"),
}
#: The fastest of this many is kept; no further one begins after these seconds.
_PROFILES, _SECONDS = 3, 1.0
#: The range around a call of an operator.
_LABEL = re.compile(r"cvt_kernels::(?P<operator>\w+) by (?P<backend>\w+)")

#: Loops that torch.compile made, in which operators can no longer be told apart.
_COMPILED = re.compile(r"^triton_|cpp_fused|Compiled|Inductor", re.IGNORECASE)


def memory_and_time(contender: Contender, batch: Tensor) -> dict[str, Any]:
    """Returns ``peak_bytes`` (None if nothing was recorded) and other fields of a row of the results."""
    cuda = batch.device.type == "cuda"
    contender.model.zero_grad(set_to_none=True)
    launched = contender.launched()  # a replay allocates nothing: its graph holds the memory all the time
    release_workspace()  # what another contender needed
    peak = clock.peak_bytes(lambda: launched.step(batch), batch.device) if cuda else None
    profiles = profiled_steps(contender, batch)
    workspace = workspace_bytes()
    held = peak if cuda else clock.peak_of(profiles[0]) or None
    seconds = min((by_place(each, cuda) for each in profiles), key=lambda places: sum(places.values()))
    return {
        "peak_bytes": None if held is None else held + workspace,
        "workspace_bytes": workspace,
        "backends": served_backends(profiles[0]),
        "breakdown": [
            {"part": part, "kind": kind, "seconds": total}
            for (part, kind), total in sorted(seconds.items())
            if total > 0
        ],
    }


def workspace_bytes() -> int:
    """Returns the bytes that our kernels for CPUs keep between calls, unseen by PyTorch's allocator."""
    return _of_extension("workspace_bytes") or 0


def release_workspace() -> None:
    """Lets our kernels for CPUs give back what they keep between calls."""
    _of_extension("release_workspace")


def _of_extension(name: str) -> Any:
    """Calls a function of the compiled extension; returns None if the extension lacks it."""
    with contextlib.suppress(machine.ExtensionError):
        if machine.why_extension_unavailable("cpu") is None:
            return getattr(machine.load_extension(), name, lambda: None)()
    return None


def profiled_steps(contender: Contender, batch: Tensor) -> list[profile]:
    """Profiles some steps, with ranges that show the parts of the model and our operators."""
    profiles: list[profile] = []
    start = time.perf_counter()
    # Code that torch.compile made would be made again for labels, within the profile.
    labels = contextlib.nullcontext() if contender.key in COMPILED else _labeled_operators()
    with _labeled_parts(contender), labels:
        while len(profiles) < _PROFILES and (not profiles or time.perf_counter() - start < _SECONDS):
            contender.model.zero_grad(set_to_none=True)
            step = functools.partial(contender.step, batch)
            profiles.append(clock.profiled(step, batch.device, memory=batch.device.type != "cuda"))
    return profiles


def served_backends(profiler: profile) -> dict[str, dict[str, int]]:
    """Returns operator → backend → the number of its calls in a profile of :func:`profiled_steps`."""
    calls: dict[str, Counter[str]] = {}
    for event in profiler.events() or ():
        label = _LABEL.fullmatch(event.name) if event.device_type.name == "CPU" else None
        if label is not None:
            calls.setdefault(label["operator"], Counter())[label["backend"]] += 1
    return {operator: dict(by_backend) for operator, by_backend in calls.items()}


def by_place(profiler: profile, cuda: bool) -> Counter[tuple[str, str]]:
    """Sums up the seconds of the operators themselves, on the GPU or the CPU, by part and kind."""
    seconds: Counter[tuple[str, str]] = Counter()
    for event in profiler.events() or ():
        if event.device_type.name == "CPU":
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            seconds[_place(event)] += microseconds / 1e6
    return seconds


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the embeddings and blocks of a model, named by their stage, from 1 on.

    The blocks of a stage lie in a list of their own.
    """
    places: dict[str, list[str]] = {kind: [] for kind in _PARTS}
    for name, module in model.named_modules():
        for kind, endings in _PARTS.items():
            if type(module).__name__.endswith(endings):
                place = name if kind == "embedding" else name.rpartition(".")[0]
                if place not in places[kind]:
                    places[kind].append(place)
                yield f"{kind} {len(places[kind])}", module


@contextlib.contextmanager
def _labeled_parts(contender: Contender) -> Iterator[None]:
    """Shows the parts of a model as ranges in a profile."""
    open_ranges: list[record_function] = []

    def enter(label: str) -> None:
        open_ranges.append(record_function(label))
        open_ranges[-1].__enter__()

    handles = []
    for label, module in _parts(contender.model) if contender.has_parts else ():
        handles += [
            module.register_forward_pre_hook(lambda module, args, label=label: enter(label)),
            module.register_forward_hook(
                lambda module, args, output: open_ranges.pop().__exit__(None, None, None)
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _labeled_operators() -> Iterator[None]:
    """Shows our operators as ranges in a profile.

    A Triton kernel has no name of PyTorch's around it, and a linear layer may be computed as a convolution.
    """

    def labeled(
        operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        def serve(call: backends.Record) -> Any:
            with record_function(f"cvt_kernels::{operator} by {backend}"):
                # What is never called may not be installed, such as Triton.
                return implementation.load().function(call)

        return dataclasses.replace(implementation, function=serve)

    with backends.replaced(labeled):
        yield


def _place(event: Any) -> tuple[str, str]:
    """Returns the part of the model and the kind of an event, by the ranges and operators around it."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    names.reverse()
    part = next((name for name in names if re.fullmatch(r"(embedding|block) \d+", name)), "rest")
    kinds = (kind for name in names for kind, pattern in _KINDS.items() if pattern.search(name))
    compiled = any(map(_COMPILED.search, names))
    return part, next(kinds, "compiled" if compiled else "other")
