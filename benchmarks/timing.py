"""What the suites share: the device, the shapes, the contenders, the clock and the ceilings.

On a GPU a call is captured into a CUDA graph whose replays are timed by events, with L2 flushed before each:
neither the host nor a warm cache is measured. What cannot be captured is launched as it is, while the flush
keeps the GPU busy. On a CPU it is the wall clock, with caches as the previous call leaves them.

``python benchmarks/timing.py FILE`` measures the ceilings alone.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, machine

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
#: Set by conftest.py before the suites are imported: shapes of a smoke test, and no torch.compile.
TINY = False
#: What was measured of them in this process: bytes or operations per second.
CEILINGS: dict[str, float] = {}

# Shapes ---------------------------------------------------------------------------------------------------


def batch() -> int:
    """Images of a call of one operator."""
    return 2 if TINY else 256 if CUDA else 8


def stages():
    """Of CvT-13 at 224×224: (H, W), channels, class tokens. Heads have 64 channels."""
    if TINY:
        return {"stage1": ((4, 4), 64, 0), "stage3": ((3, 2), 128, 1)}
    return {"stage1": ((56, 56), 64, 0), "stage2": ((28, 28), 192, 0), "stage3": ((14, 14), 384, 1)}


def dtypes() -> list[torch.dtype]:
    """What is worth timing here: bfloat16 is many times slower than float32 on a CPU that lacks it."""
    if CUDA:
        return [torch.bfloat16]
    flags = Path("/proc/cpuinfo")
    known = flags.read_text(encoding="utf-8") if flags.exists() else ""
    fast = any(flag in known for flag in ("avx512_bf16", "amx_bf16", " bf16 "))
    return [torch.float32, torch.bfloat16] if fast or TINY else [torch.float32]


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same numbers in every process."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)


def short(dtype: torch.dtype) -> str:
    """As in ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def device_name() -> str:
    """Of the GPU, or of the CPU."""
    return torch.cuda.get_device_name() if CUDA else machine.facts().cpu.rpartition(",")[0]


# Contenders -----------------------------------------------------------------------------------------------


def contenders(operator: str, *others: str) -> list[str]:
    """``reference``, ``others``, every backend that runs here and, as they take long, compiled references."""
    names = ["reference", *others]
    for backend in ("native", "triton"):
        # An extension that does not load must not cost the others their rows.
        with ck.use_backend(backend), contextlib.suppress(machine.ExtensionError):
            if backends.why_unavailable(operator, backend, DEVICE) is None:
                names.append(backend)
    if TINY:
        return names
    return [*names, "compiled", *(["max_autotune"] if CUDA else [])]


@functools.cache
def implementation(operator: str, name: str):
    """A contender, to be called as the public function is."""
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


@contextlib.contextmanager
def every_kernel():
    """Within it ``auto`` also takes the kernels that it leaves to an explicit request elsewhere."""
    with backends.replaced(lambda operator, backend, kernel: dataclasses.replace(kernel, experimental={})):
        yield


def results(call, leaves, douts=None):
    """What ``call(*leaves)`` returns and, if the gradients of that are given, those of the leaves."""
    if douts is None:
        with torch.inference_mode():
            return _flat(call(*leaves))
    live = [t.detach().requires_grad_() for t in leaves]
    outs = _flat(call(*live))
    return *outs, *torch.autograd.grad(outs, live, douts)


def served(call, leaves, douts=None):
    """:func:`results`; skips the test if the backend refuses such a call."""
    try:
        return results(call, leaves, douts)
    except ck.BackendUnavailable as error:
        pytest.skip(str(error))


def _flat(outs):
    return tuple(outs) if isinstance(outs, tuple | list) else (outs,)


def check(found, same, exact, dtype: torch.dtype) -> None:
    """Errors: at most three times the reference's in the same dtype, and four units in the last place."""
    for ours, theirs, right in zip(found, same, exact, strict=True):
        allowed = 3 * (theirs.double() - right).abs().max().item()
        allowed += 4 * torch.finfo(dtype).eps * right.abs().max().item()
        torch.testing.assert_close(ours.double(), right.double(), rtol=0, atol=allowed)


# Measuring ------------------------------------------------------------------------------------------------


class DeviceClock:
    """A timer for pytest-benchmark on the GPU: it runs between the two readings that follow :meth:`arm`."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []
        self._left = 0

    def arm(self) -> None:
        """Flushes L2, which takes the GPU longer than the host takes to launch what is to be measured."""
        _flush_buffer().zero_()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._left = 2

    def read(self) -> float:
        """Seconds that it has run."""
        if self._left:
            self._events[-self._left].record()
            self._left -= 1
            if not self._left:
                self._events[1].synchronize()
                self._seconds += self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._seconds


_clock = DeviceClock()
#: For ``pytest.mark.benchmark``, of the suites that :func:`measure` an operator.
TIMER = {"timer": _clock.read} if CUDA else {}


@functools.cache
def _flush_buffer() -> torch.Tensor:
    size = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    return torch.empty(max(size, 2**28), dtype=torch.uint8, device="cuda")


def measure(
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
        call: What to measure, without arguments.
        facts: ``suite``, ``case``, ``contender``, ``dtype``, ``batch`` and whatever else goes into the JSON.
        moved: Bytes that must be read or written.
        operations: Floating-point operations, a product and a sum being two.
        host: By the wall clock on a GPU too.
    """
    if benchmark.disabled:
        benchmark.pedantic(call)
        return
    memory = facts.get("peak_memory_bytes") or peak_memory(call)
    clock, timed = "wall", _waiting(call)
    if CUDA and not host:
        replay = graphed(call)
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


def synchronize() -> None:
    """Waits for the GPU if there is one."""
    if CUDA:
        torch.cuda.synchronize()


def _waiting(call):
    """``call``, and then until the GPU is done with it."""
    if not CUDA:
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def rates(seconds: float, dtype: str, moved: int | None, operations: int | None) -> dict[str, float]:
    """Bytes and operations per second, and as shares of the ceilings; the larger is that of the roofline."""
    found = {}
    shares = [0.0]
    if moved is not None:
        shares.append(moved / seconds / copy_bandwidth())
        found |= {"gigabytes_per_second": moved / seconds / 1e9, "share_of_copy": shares[-1]}
    if operations is not None:
        shares.append(operations / seconds / matmul_rate(dtype))
        found |= {"teraflop_per_second": operations / seconds / 1e12, "share_of_matmul": shares[-1]}
    return found | {"share_of_ceiling": max(shares)}


def _rounds(call) -> int:
    """As many as fit into a second, from 5 to 50."""
    start = time.perf_counter()
    _waiting(call)()
    return max(5, min(50, int(1 / (time.perf_counter() - start))))


def graphed(call):
    """The replay of a CUDA graph of ``call``; None if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # what asks the host something meanwhile
        torch.cuda.synchronize()
        return None
    return graph.replay


def peak_memory(call) -> int:
    """The most bytes of tensors that a call holds at once, beyond what was there before."""
    call()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with tempfile.TemporaryDirectory() as scratch:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            call()
        trace = Path(scratch, "trace.json")
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


# Ceilings -------------------------------------------------------------------------------------------------


@functools.cache
def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy that no cache holds."""
    size = 2**22 if TINY else 2**31 if CUDA else 2**28
    source = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    CEILINGS["copy"] = 2 * size / fastest(lambda: target.copy_(source))
    return CEILINGS["copy"]


@functools.cache
def matmul_rate(dtype: str) -> float:
    """Operations per second of a large product; on a CPU of the faster of the two ways that PyTorch has."""
    n = 256 if TINY else 8192 if CUDA else 1024
    a, b = (randn(n, n, dtype=getattr(torch, dtype), seed=seed) for seed in (0, 1))
    seconds = fastest(lambda: a @ b)
    if not CUDA:
        image, weight = a.T[None, :, :, None], b[:, :, None, None]
        image = image.contiguous(memory_format=torch.channels_last)
        seconds = min(seconds, fastest(lambda: F.conv2d(image, weight)))
    CEILINGS[f"matmul_{dtype}"] = 2 * n**3 / seconds
    return CEILINGS[f"matmul_{dtype}"]


def fastest(call, rounds: int = 10) -> float:
    """Seconds of the fastest of some calls, or as many as take two seconds, by the clock of the operators."""
    read = _clock.read if CUDA else time.perf_counter
    times = []
    with torch.inference_mode():
        call()
        while len(times) < rounds and sum(times) < 2:
            if CUDA:
                _clock.arm()
            start = read()
            call()
            times.append(read() - start)
    return min(times)


def main() -> None:
    """Writes the ceilings."""
    global TINY
    parser = argparse.ArgumentParser(prog="benchmarks/timing.py", description="Measures the ceilings.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    TINY = options.tiny
    copy_bandwidth()
    for dtype in dict.fromkeys([torch.float32, *dtypes()]):
        matmul_rate(short(dtype))
    for name, rate in CEILINGS.items():
        print(f"{name}: {rate / 1e9:,.0f} · 10⁹ {'bytes' if name == 'copy' else 'operations'} per second")
    options.path.write_text(json.dumps(CEILINGS, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
