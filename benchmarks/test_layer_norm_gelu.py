"""LayerNorm, GELU and their fusions at the shapes of CvT-13 at 224×224: PyTorch, compiled and ours.

GB/s counts what must move: every operand and every result once in each direction. It is compared with a plain
copy, measured in the same session.
"""

import functools

import pytest
import torch
from test_conv_projection import copy_bandwidth, timed

import cvt_kernels as ck
from cvt_kernels import runtime

CUDA = torch.cuda.is_available()
DEVICE, DTYPE, BATCH = ("cuda", torch.bfloat16, 256) if CUDA else ("cpu", torch.float32, 2)
STAGES = {1: (3136, 64), 2: (784, 192), 3: (197, 384)}  # tokens, channels; an MLP has four times the channels
#: Operator and GELU → what moves, in tensors of the shape of x: forward, forward and backward.
CALLS = {
    ("layer_norm", None): (2, 5),
    ("add_layer_norm", None): (4, 8),
    ("gelu", "none"): (2, 5),
    ("gelu", "quick"): (2, 5),
    ("bias_gelu", "none"): (2, 5),
    ("bias_gelu", "quick"): (2, 5),
    ("layer_norm_gelu", "none"): (2, 5),
}


def implementations(operator):
    """Every backend that can run here, and torch.compile of the reference on a GPU."""
    backends = [name for name in runtime.BACKENDS if serves(operator, name)]
    return [*backends, *(["compile"] if CUDA else [])]


def serves(operator, backend):
    with ck.use_backend(backend):
        return runtime.unavailable(operator, backend, DEVICE) is None


@functools.cache
def function(operator, name):
    if name == "reference":
        return getattr(ck.reference, operator)
    if name == "compile":
        return torch.compile(getattr(ck.reference, operator))

    def call(*args, **kwargs):
        with ck.use_backend(name):
            return getattr(ck, operator)(*args, **kwargs)

    return call


def make(operator, stage):
    """The arguments, tokens first."""
    tokens, channels = STAGES[stage]
    channels *= 4 if operator in ("gelu", "bias_gelu") else 1
    generator = torch.Generator(DEVICE).manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=DTYPE)

    x, residual = (randn(BATCH, tokens, channels) for _ in range(2))
    weight, bias = randn(channels), randn(channels)
    return {
        "layer_norm": (x, weight, bias),
        "add_layer_norm": (x, residual, weight, bias),
        "gelu": (x,),
        "bias_gelu": (x, bias),
        "layer_norm_gelu": (x, weight, bias),
    }[operator]


def results(call, tensors, douts=None):
    """The outputs and, if their gradients are given, the gradients of the arguments."""
    if douts is None:
        with torch.inference_mode():
            outs = call(*tensors)
        return outs if isinstance(outs, tuple) else (outs,)
    live = [t.detach().requires_grad_() for t in tensors]
    outs = call(*live)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return *outs, *torch.autograd.grad(outs, live, douts)


@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("operator", "approximate", "name"),
    [(operator, gelu, name) for operator, gelu in CALLS for name in implementations(operator)],
)
def test_layer_norm_gelu(benchmark, operator, approximate, name, stage, direction):
    keywords = {} if approximate is None else {"approximate": approximate}
    call = functools.partial(function(operator, name), **keywords)
    tensors = make(operator, stage)
    backward = direction == "forward+backward"
    outputs = 2 if operator == "add_layer_norm" else 1
    douts = [torch.ones_like(tensors[0])] * outputs if backward else None

    exact = functools.partial(getattr(ck.reference, operator), **keywords)
    doubles = [[t.double() for t in given or ()] for given in (tensors, douts)]
    expected = results(exact, doubles[0], doubles[1] or None)
    for ours, theirs in zip(results(call, tensors, douts), expected, strict=True):
        units = 16 if ours.ndim == 3 else 256  # in sums over all rows errors add up
        atol = units * torch.finfo(DTYPE).eps * theirs.abs().max().item()
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=atol)

    benchmark.group = (
        f"{operator} {approximate or ''}, stage {stage}, {direction}, batch {BATCH}, {DTYPE}, {DEVICE}"
    )
    seconds = timed(benchmark, lambda: results(call, tensors, douts))
    if seconds is not None:
        bandwidth = CALLS[operator, approximate][backward] * tensors[0].nbytes / seconds
        benchmark.extra_info |= {
            "microseconds": 1e6 * seconds,
            "gigabytes_per_second": bandwidth / 1e9,
            "share_of_copy": bandwidth / copy_bandwidth(),
            "device": torch.cuda.get_device_name() if CUDA else runtime.machine().cpu,
        }
