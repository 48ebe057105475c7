"""The memory of a call, and the ceilings of a machine: the rates of a large copy and a large product."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from . import clock

# Memory -----------------------------------------------------------------------------------------------------


def peak_bytes(function: Callable[[], Any], device: clock.Device) -> int:
    """Returns the peak memory of one call in bytes, beyond what was allocated before it.

    On a CPU it is the peak of the running sum over all allocations that the profiler records: exact, and the
    same in every run. On a GPU it is the allocator's own count.
    """
    if torch.device(device).type == "cuda":
        clock.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        clock.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler reports its own start on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((each for each in events if each.get("name") == "[memory]"), key=lambda each: each["ts"])
    return max(itertools.accumulate((each["args"]["Bytes"] for each in changes), initial=0))


# Ceilings -------------------------------------------------------------------------------------------------


def fastest(function: Callable[[], Any], device: clock.Device, rounds: int = 10) -> float:
    """Returns the seconds of the fastest of ``rounds`` calls, or fewer if they take two seconds.

    A :class:`~clock.DeviceClock` times them on a GPU, the wall clock elsewhere, after one warm-up call.
    """
    times = clock.Times()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        is_gpu = torch.device(device).type == "cuda"
        if is_gpu:
            stack.enter_context(torch.cuda.device(device))
        function()
        while len(times.seconds) < rounds and sum(times.seconds) < 2:
            if is_gpu:
                times.add(clock.device_seconds(function), 0.0)
                continue
            with times.run(device):
                function()
    return min(times.seconds)


def copy_bandwidth(device: clock.Device, size: int | None = None) -> float:
    """Returns the bytes per second, read and written, of a copy of ``size`` bytes.

    The default size exceeds every cache: 256 MiB, up to 2 GiB on a large GPU.
    """
    source = torch.ones(size or _copy_size(torch.device(device)), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / fastest(lambda: target.copy_(source), device)


def _copy_size(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**28
    return max(2**28, min(2**31, torch.cuda.get_device_properties(device).total_memory // 16))


#: Rows and columns of the matrices in a :class:`Product`.
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}


class Product:
    """The product a·bᵀ of two large matrices, with the ``ways`` to compute it in PyTorch.

    On a CPU there are two: ``F.linear``, where MKL is slow in float32 on AMD's CPUs, and a 1×1 convolution of
    n pixels by oneDNN.
    """

    def __init__(self, device: clock.Device, dtype: torch.dtype, n: int | None = None):
        """Creates the matrices, with ``PRODUCT_SIZE`` rows and columns by default."""
        kind = torch.device(device).type
        self.n = n = n or PRODUCT_SIZE["cuda" if kind == "cuda" else "cpu"]
        self.operations = 2 * n**3
        generator = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(n, n, generator=generator, device=device, dtype=dtype) for _ in range(2))
        self.ways: list[Callable[[], Any]] = [lambda: F.linear(a, b)]
        if kind != "cuda":
            pixels, weight = a.view(1, n, 1, n).permute(0, 3, 1, 2), b.view(n, n, 1, 1)
            self.ways.append(lambda: F.conv2d(pixels, weight))


def product_rate(device: clock.Device, dtype: torch.dtype, n: int | None = None) -> float:
    """Returns the operations per second of a :class:`Product`, in the faster of its ways."""
    product = Product(device, dtype, n)
    return product.operations / min(fastest(way, device) for way in product.ways)
