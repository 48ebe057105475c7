"""The shapes, contenders and checks that the suites share, and how pytest-benchmark measures them.

On a GPU a call is captured into a CUDA graph whose replays are timed by events, with L2 flushed before each:
neither the host nor a warm cache is measured. What cannot be captured is launched as it is, while the flush
keeps the GPU busy. On a CPU it is the wall clock, with caches as the previous call leaves them.
"""

import argparse
import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import cvt_kernels as ck
from cvt.commands.bench import breakdown
from cvt.files import replacing, write_json
from cvt_kernels import backends, checks, machine
from cvt_kernels.autotune import accuracy, clock

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
#: Whether this is a smoke test: small shapes, no torch.compile; set before the suites are imported.
TINY = False
#: The ceilings that were measured in this process: bytes or operations per second.
CEILINGS: dict[str, float] = {}

# Shapes ---------------------------------------------------------------------------------------------------


def batch() -> int:
    """Returns the number of images in a call of one operator."""
    return 2 if TINY else 256 if CUDA else 8


def stages():
    """Returns (H, W), channels and class tokens by stage of CvT-13 at 224×224. Heads have 64 channels."""
    if TINY:
        return {"stage1": ((4, 4), 64, 0), "stage3": ((3, 2), 128, 1)}
    return {"stage1": ((56, 56), 64, 0), "stage2": ((28, 28), 192, 0), "stage3": ((14, 14), 384, 1)}


def dtypes() -> list[torch.dtype]:
    """Returns the dtypes worth timing here: bfloat16 is far slower than float32 on a CPU that lacks it."""
    if CUDA:
        return [torch.bfloat16]
    flags = Path("/proc/cpuinfo")
    known = flags.read_text(encoding="utf-8") if flags.exists() else ""
    fast = any(flag in known for flag in ("avx512_bf16", "amx_bf16", " bf16 "))
    return [torch.float32, torch.bfloat16] if fast or TINY else [torch.float32]


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns random numbers that are the same in every process."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)


def short(dtype: torch.dtype) -> str:
    """Returns the name of a dtype, as in ``bfloat16``."""
    return checks.dtype_name(dtype)


def device_name() -> str:
    """Returns the name of the GPU, or of the CPU."""
    return torch.cuda.get_device_name() if CUDA else machine.cpu_name()


# Scripts --------------------------------------------------------------------------------------------------


def write_report(path: Path, report: Any) -> None:
    """Writes a JSON file in one piece."""
    with replacing(path) as file:
        write_json(file, report, indent=1)


def script_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a script that measures: where its JSON goes, and whether it is a smoke test."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("--tiny", action="store_true", help="shapes of a smoke test")
    return parser


# Contenders -----------------------------------------------------------------------------------------------


def contenders(operator: str) -> list[str]:
    """Lists the backends that run here, ``reference`` first, and compiled ones, which take long."""
    names = []
    for backend in reversed(backends.BACKENDS):
        # An extension that does not load must not cost the others their rows.
        with ck.use_backend(backend), contextlib.suppress(machine.ExtensionError):
            if backends.why_unavailable(operator, backend, DEVICE) is None:
                names.append(backend)
    if TINY:
        return names
    return [*names, "compiled", *(["max_autotune"] if CUDA else [])]


@functools.cache
def implementation(operator: str, name: str):
    """Returns a contender, to be called as the public function is."""
    reference = getattr(ck.reference, operator)
    if name == "reference":
        return reference
    if name == "compiled":
        return torch.compile(reference, dynamic=False)
    if name == "max_autotune":  # without graphs of its own, since it is captured like the others
        return torch.compile(reference, dynamic=False, mode="max-autotune-no-cudagraphs")

    def call(*args, **kwargs):
        with ck.use_backend(name):
            return getattr(ck, operator)(*args, **kwargs)

    return call


def serving(model: torch.nn.Module, images: torch.Tensor):
    """Returns a call of a model, whose kernels have been tuned."""

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return model(images)

    call()
    return call


def backends_serving(call) -> dict[str, list[str]]:
    """Runs ``call`` twice, first to autotune; returns operator → backends of the second."""
    served: dict[str, set[str]] = {}

    def noted(operator, backend, implementation):
        def function(call):
            served.setdefault(operator, set()).add(backend)
            return implementation.load().function(call)

        return dataclasses.replace(implementation, function=function)

    call()
    with backends.replaced(noted):
        call()
    return {operator: sorted(names) for operator, names in sorted(served.items())}


def results(call, leaves, douts=None):
    """Returns the outputs of ``call(*leaves)`` and, with ``douts``, the leaves' gradients."""
    if douts is None:
        with torch.inference_mode():
            return _flat(call(*leaves))
    live = [t.detach().requires_grad_() for t in leaves]
    outs = _flat(call(*live))
    return *outs, *torch.autograd.grad(outs, live, douts)


def served(call, leaves, douts=None):
    """Returns :func:`results`, or skips the test if the backend does not support such a call."""
    try:
        return results(call, leaves, douts)
    except ck.BackendUnavailable as error:
        pytest.skip(str(error))


def _flat(outs):
    return tuple(outs) if isinstance(outs, tuple | list) else (outs,)


def check(outputs, same, exact, dtype: torch.dtype) -> None:
    """Asserts errors of at most three times the reference's, and four units in the last place besides."""
    for ours, theirs, right in zip(outputs, same, exact, strict=True):
        error = accuracy.compare(
            ours, theirs, right.double(), factor=accuracy.GRADIENT_FACTOR, units=4, dtype=dtype
        )
        assert error.passed, str(error)


# Measuring ------------------------------------------------------------------------------------------------


def compare(
    benchmark,
    facts: dict[str, Any],
    call,
    reference,
    leaves,
    douts=None,
    *,
    exact=None,
    images: int | None = None,
    moved: int,
    operations: int | None = None,
) -> None:
    """Compares the results of a contender with the reference's, then measures it.

    Args:
        benchmark: The fixture.
        facts: ``suite``, ``case`` and ``contender``.
        call: The contender, a function of the leaves.
        reference: The reference, likewise.
        leaves: Tensors, activations first.
        douts: Gradients of the outputs; None for a forward alone.
        exact: What it gives in float64; None where all leaves are turned into float64 for that.
        images: How many images are compared, where all tensors have images; None for all.
        moved: Bytes that must be read or written.
        operations: Floating-point operations, a product and a sum being two.
    """
    dtype = leaves[0].dtype
    outputs = [out[:images] for out in served(call, leaves, douts)]
    few, few_douts = [t[:images] for t in leaves], douts and [t[:images] for t in douts]
    if exact is None:
        wide = [t.double() for t in few], few_douts and [t.double() for t in few_douts]
        exact = results(reference, *wide)
    check(outputs, results(reference, few, few_douts), exact, dtype)
    facts |= {"dtype": short(dtype), "batch": leaves[0].shape[0]}
    record(benchmark, lambda: results(call, leaves, douts), facts, moved=moved, operations=operations)


_clock = clock.DeviceClock()
#: For ``pytest.mark.benchmark``, of the suites that :func:`record` an operator.
TIMER = {"timer": _clock.read} if CUDA else {}


def record(
    benchmark,
    call,
    facts: dict[str, Any],
    *,
    moved: int | None = None,
    operations: int | None = None,
    host: bool = False,
) -> None:
    """Times ``call``, which has been checked, measures its memory, and notes ``facts`` about it.

    Args:
        benchmark: The fixture.
        call: The function to measure; it is called without arguments.
        facts: ``suite``, ``case``, ``contender``, ``dtype``, ``batch`` and whatever else goes into the JSON.
        moved: Bytes that must be read or written.
        operations: Floating-point operations, a product and a sum being two.
        host: Measure by the wall clock on a GPU too.
    """
    if benchmark.disabled:
        benchmark.pedantic(call)
        return
    memory = facts.get("peak_memory_bytes") or peak_memory(call)
    clock, timed = "wall", _waiting(call)
    if CUDA and not host:
        replay = clock.graph_replay(call)
        clock, timed = ("launches", call) if replay is None else ("graph", replay)
    benchmark.group = f"{facts['suite']}, {facts['case']}, {facts['dtype']}, batch {facts['batch']}, {DEVICE}"
    arm = None if clock == "wall" else _clock.arm
    try:
        benchmark.pedantic(timed, setup=arm, rounds=_rounds(timed), warmup_rounds=1)
    except BaseException:  # it notices no skip or interrupt by itself, and then could not write the JSON
        benchmark.has_error = True
        raise
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= facts | {"clock": clock, "seconds": seconds, "peak_memory_bytes": memory}
    benchmark.extra_info |= rates(seconds, facts["dtype"], moved, operations)
    benchmark.extra_info["images_per_second"] = facts["batch"] / seconds


def _waiting(call):
    """Returns ``call`` so that it ends when the GPU is done with it."""
    if not CUDA:
        return call

    def run() -> None:
        call()
        clock.synchronize(DEVICE)

    return run


def rates(seconds: float, dtype: str, moved: int | None, operations: int | None) -> dict[str, float]:
    """Returns bytes and operations per second, and as shares of the ceilings the call comes closest to."""
    facts = {}
    shares = [0.0]
    if moved is not None:
        shares.append(moved / seconds / copy_bandwidth())
        facts |= {"gigabytes_per_second": moved / seconds / 1e9, "share_of_copy": shares[-1]}
    if operations is not None:
        shares.append(operations / seconds / product_rate(dtype))
        facts |= {"teraflop_per_second": operations / seconds / 1e12, "share_of_matmul": shares[-1]}
    return facts | {"share_of_ceiling": max(shares)}


def _rounds(call) -> int:
    """Returns how many calls fit into a second, from 5 to 50."""
    start = clock.now(DEVICE)
    call()
    return max(5, min(50, int(1 / (clock.now(DEVICE) - start))))


def peak_memory(call) -> int:
    """Returns the most bytes that a call after the first holds at once, and what our kernels keep after it.

    These are tensors beyond those before the call, and the workspace that it needs by itself.
    """
    call()
    breakdown.release_workspace()
    return clock.peak_bytes(call, DEVICE) + breakdown.workspace_bytes()


# Ceilings -------------------------------------------------------------------------------------------------


@functools.cache
def copy_bandwidth() -> float:
    """Measures the bytes per second of a copy, once per process."""
    CEILINGS["copy"] = clock.copy_bandwidth(DEVICE, 2**22 if TINY else None)
    return CEILINGS["copy"]


@functools.cache
def product_rate(dtype: str) -> float:
    """Measures the operations per second of a matrix product, once per process."""
    rate = clock.product_rate(DEVICE, getattr(torch, dtype), 256 if TINY else None)
    CEILINGS[f"matmul_{dtype}"] = rate
    return rate
