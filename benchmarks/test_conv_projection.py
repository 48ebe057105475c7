"""Throughput of CvT-13's projection (q stride 1, k and v stride 2) per stage: PyTorch, compiled and ours.

GB/s counts what must move (in units of B·T·C): x once and the outputs once in evaluation, 2.5; in a training
step x twice and the outputs once forward (3.5), then x, the gradients of the outputs and dx once (3.5). It is
compared with a plain copy, measured in the same session.
"""

import functools

import pytest
import torch
import torch.utils.benchmark
from torch import nn

import cvt_kernels as ck
from cvt_kernels import runtime

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, BATCH = ("cuda", torch.bfloat16, 256) if CUDA else ("cpu", torch.float32, 2)
CALLS = 10 if CUDA else 1  # in a round, so that the launches run ahead of the clock
STAGES = {1: ((56, 56), 64, 0), 2: ((28, 28), 192, 0), 3: ((14, 14), 384, 1)}
UNITS = {"evaluation": 2.5, "training": 7.0}


def timed(benchmark, function):
    """Median seconds of one call, or None under --benchmark-disable."""

    def round_():
        for _ in range(CALLS):
            function()
        if CUDA:
            torch.cuda.synchronize()

    benchmark.pedantic(round_, rounds=10, warmup_rounds=2)
    return None if benchmark.stats is None else benchmark.stats.stats.median / CALLS


@functools.cache
def copy_bandwidth():
    """Bytes per second, read and written, of a copy that no cache holds."""
    source = torch.empty(2**30 if CUDA else 2**27, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    timer = torch.utils.benchmark.Timer("target.copy_(source)", globals={"source": source, "target": target})
    return 2 * source.nbytes / timer.blocked_autorange().median


@functools.cache
def setting(stage):
    grid, channels, class_tokens = STAGES[stage]
    torch.manual_seed(0)
    x = torch.randn(BATCH, grid[0] * grid[1] + class_tokens, channels, device=DEVICE, dtype=DTYPE)
    branches = []
    for stride in (1, 2, 2):
        conv = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False).to(DEVICE, DTYPE)
        branches.append(ck.ConvBatchNorm.from_modules(conv, nn.BatchNorm2d(channels).to(DEVICE)))
    return x.requires_grad_(), grid, branches


def implementations():
    """Every backend that can run here is a column, and torch.compile of the reference on a GPU."""
    backends = [name for name in runtime.BACKENDS if serves(name)]
    return [*backends, *(["compile"] if CUDA else [])]


def serves(backend):
    with ck.use_backend(backend):
        return runtime.unavailable("conv_projection", backend, DEVICE) is None


@functools.cache
def function(name):
    if name == "compile":
        return torch.compile(ck.reference.conv_projection)

    def call(*args, **kwargs):
        with ck.use_backend(name):
            return ck.conv_projection(*args, **kwargs)

    return call


@pytest.mark.parametrize("name", implementations())
@pytest.mark.parametrize("mode", UNITS)
@pytest.mark.parametrize("stage", STAGES)
def test_conv_projection(benchmark, stage, mode, name):
    x, grid, branches = setting(stage)
    training = mode == "training"

    def step():
        with torch.set_grad_enabled(training):
            outs = function(name)(x, grid, branches, training=training)
        if training:
            leaves = [x, *(t for conv in branches for t in conv[:3])]
            torch.autograd.grad(outs, leaves, [torch.ones_like(out) for out in outs])
        return outs

    expected = ck.reference.conv_projection(x, grid, branches, training=training)
    tolerance = 2e-2 if torch.bfloat16 == DTYPE else 1e-4
    torch.testing.assert_close(list(step()), list(expected), rtol=tolerance, atol=tolerance)
    benchmark.group = f"conv_projection, stage {stage}, {mode}, batch {BATCH}, {DTYPE}, {DEVICE}"
    seconds = timed(benchmark, step)
    if seconds is not None:
        bandwidth = UNITS[mode] * x.nbytes / seconds
        benchmark.extra_info |= {
            "microseconds": 1e6 * seconds,
            "gigabytes_per_second": bandwidth / 1e9,
            "share_of_copy": bandwidth / copy_bandwidth(),
            "device": torch.cuda.get_device_name() if CUDA else runtime.machine().cpu,
        }
