"""Host time of a call: what Python and Triton do from the public function to the driver.

On a CPU, the host time of a whole model is the processor's time for a forward with CvT-13's modules and
operators, one image and one thread, but with so few channels and pixels that arithmetic takes next to
nothing: what is left is Python, the choice of backends, and what PyTorch's operators and our kernels take to
begin. The models take our CPU kernels wherever there are any.

On a GPU these are calls with one image, which the GPU serves faster than the host issues them; nobody waits
for it in between. Without a GPU every part but the driver runs, on CPU tensors: Triton compiles for an sm_90
and binds the arguments of its kernels, and its launcher, from which C calls the driver, does nothing. The
numbers leave out that launcher then, and the difference between the allocators of GPU and CPU.
LayerNorm has no Triton kernel; without a GPU it is the CPU's, of few tokens.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import time
from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS
from cvt.commands.bench.contenders import HUGGINGFACE, build_contender, build_huggingface, build_ours
from cvt.evaluation import cost
from cvt_kernels import backends, launching, machine
from cvt_kernels.autotune import clock
from cvt_kernels.ops.conv_projection import modules

from . import suites

#: Calls between two looks at the clock, which would cost as much as some of them.
CALLS = 100


#: CvT-13 with so few channels, and the pixels of its image, that arithmetic takes next to nothing.
SMALL = dataclasses.replace(PRESETS["cvt_13"], embed_dims=(8, 24, 48), num_classes=8)
PIXELS = 16
#: The models whose host time is measured on a CPU.
MODELS = ("hf", "accelerate", "cvt", "accelerate-frozen", "cvt-frozen")


# Whole models on a CPU ------------------------------------------------------------------------------------


@pytest.fixture
def kernels_serve():
    """Lets the CPU kernels serve under ``auto`` without an entry, wherever there are any, on one thread.

    Where there are none, it is the composition, or else PyTorch's own operator.
    """

    def serving(operator, backend, implementation):
        if backend != "reference":  # it needs no entry where it is the only one
            return dataclasses.replace(implementation, why_unavailable=lambda _: "is not measured")
        for better in ("cpu", "composed"):
            with contextlib.suppress(KeyError):
                found = backends.registered(operator, better)
                return dataclasses.replace(found, devices=None, why_unavailable=None)
        return implementation

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with backends.replaced(serving), ck.use_backend("auto"):
            yield
    finally:
        torch.set_num_threads(threads)


@pytest.mark.benchmark(timer=time.process_time)  # which no other program on the machine adds to
@pytest.mark.skipif(suites.CUDA, reason="is about CPUs")
@pytest.mark.skipif(machine.why_extension_unavailable("cpu") is not None, reason="has no CPU kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=suites.short)
@pytest.mark.parametrize("name", MODELS)
def test_model(benchmark, kernels_serve, name, dtype):
    """A forward of a whole model: below a millisecond and a half a frozen one hardly waits for the host."""
    if name in HUGGINGFACE and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    _, ours = build_ours(SMALL)
    theirs = build_huggingface(ours) if name in HUGGINGFACE else ours
    model = build_contender(name, theirs.to(dtype).eval(), theirs.eval()).model
    image = suites.randn(1, 3, PIXELS, PIXELS, dtype=dtype, seed=0)

    def call():
        return getattr(model(image), "logits", None)

    with torch.inference_mode():
        call()
        if benchmark.disabled:
            benchmark.pedantic(call)
            return
        events = clock.profiled(call, "cpu").events() or ()
        benchmark.group = "host time of a forward on a CPU"
        benchmark.pedantic(call, rounds=300, warmup_rounds=20)
    operators = sum(event.cpu_parent is None for event in events)
    record(benchmark, f"forward of {name}", dtype, "process, with little arithmetic")
    benchmark.extra_info |= {"operators": operators, "multiply_adds": cost(SMALL, PIXELS).multiply_adds}


# Calls of a GPU's kernels ---------------------------------------------------------------------------------


class StubbedDriver:
    """The driver of an sm_90 that loads no kernel and launches nothing, as Triton's driver of a GPU."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (None, 0, 0, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232448},
    )

    def __init__(self) -> None:
        self.launches = 0

    def launcher_cls(self, source, metadata):
        """Returns what takes the place of a kernel's launcher."""

        def launch(*arguments) -> None:
            self.launches += 1

        return launch

    def get_current_target(self):
        """Returns what kernels are compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Returns the index of the current GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Returns the handle of the current stream."""
        return 0


@contextlib.contextmanager
def stubbed() -> Iterator[StubbedDriver]:
    """Lets Triton's kernels serve CPU tensors under ``auto``, up to the driver, within a block."""
    from triton.runtime import driver

    def serving(operator, backend, implementation):
        try:
            triton = backends.registered(operator, "triton")
        except KeyError:
            return implementation
        if backend == "reference":  # it needs no entry
            return dataclasses.replace(triton, devices=None, why_unavailable=None)
        # Available, so that there is a choice, but for no call.
        return dataclasses.replace(
            implementation, devices=None, why_unavailable=None, why_unsupported=lambda _: "is not measured"
        )

    # There is no default driver without a GPU; whoever asks for it next finds that out again.
    before, stub = driver._active, StubbedDriver()
    driver.set_active(stub)
    try:
        with backends.replaced(serving), ck.use_backend("auto"):
            yield stub
    finally:
        driver._active = before


@pytest.fixture(scope="module")
def launches() -> Iterator[StubbedDriver | None]:
    """Stubs the driver where there is no GPU; None where there is one."""
    if suites.CUDA:
        yield None
        return
    with stubbed() as stub:
        yield stub


def timer(benchmark, case: str, call, stub: StubbedDriver | None, launched: int = 1) -> None:
    """Measures the host time of ``call``, which must launch so many Triton kernels."""
    with torch.inference_mode():
        call()  # compiles
        before = stub.launches if stub is not None else 0
        call()
        assert stub is None or stub.launches - before == launched
        if benchmark.disabled:
            benchmark.pedantic(call)
            return
        benchmark.group = f"host time of a call, {suites.DEVICE}"
        benchmark.pedantic(call, rounds=50, iterations=CALLS, warmup_rounds=5)
    record(benchmark, case, torch.bfloat16, "wall" if suites.CUDA else "wall, without the driver")


def record(benchmark, case: str, dtype: torch.dtype, timer: str) -> None:
    """Notes the median of what has been measured."""
    seconds = benchmark.stats.stats.median
    benchmark.extra_info |= {
        "suite": "host",
        "case": case,
        "contender": "auto",
        "dtype": suites.short(dtype),
        "batch": 1,
        "clock": timer,
        "seconds": seconds,
        "images_per_second": 1 / seconds,
    }


def projection(stage: str):
    """Returns a call of the projection of live modules in evaluation."""
    grid, channels, class_tokens = suites.stages()[stage]
    x = suites.randn(1, grid[0] * grid[1] + class_tokens, channels, dtype=torch.bfloat16, seed=0)
    branches = []
    for stride in (1, 2, 2):
        conv = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        branches.append((conv, nn.BatchNorm2d(channels)))
    for module in itertools.chain(*branches):
        module.to(suites.DEVICE, torch.bfloat16).eval()
    return lambda: modules.project(x, grid, branches)


@pytest.mark.parametrize("stage", suites.stages())
def test_projection(benchmark, launches, stage):
    timer(benchmark, f"projection of modules, {stage}", projection(stage), launches)


@pytest.mark.parametrize("stage", suites.stages())
def test_attention(benchmark, launches, stage):
    grid, channels, class_tokens = suites.stages()[stage]
    queries = grid[0] * grid[1] + class_tokens
    keys = -(-grid[0] // 2) * -(-grid[1] // 2) + class_tokens
    q, k, v = (
        suites.randn(1, tokens, channels, dtype=torch.bfloat16, seed=tokens).unflatten(2, (-1, 64))
        for tokens in (queries, keys, keys)
    )
    timer(benchmark, f"attention, {stage}", lambda: ck.attention(q, k, v, scale=channels**-0.5), launches)


def test_layer_norm(benchmark, launches):
    x = suites.randn(1, 4, 64, dtype=torch.bfloat16, seed=0)
    norm = nn.LayerNorm(64).to(suites.DEVICE, torch.bfloat16)
    weight, bias = norm.weight, norm.bias
    timer(benchmark, "layer_norm", lambda: ck.layer_norm(x, weight, bias), launches, launched=0)


@pytest.mark.parametrize("way", ["by name", "planned"])
def test_launch(benchmark, launches, way):
    """The launch of the projection alone: as Triton binds it, and planned."""
    with torch.inference_mode(), ck.use_backend("triton" if suites.CUDA else "auto"):
        taken: list[launching.Launch] = []
        with launching.intercepted_launches(taken.append):
            projection("stage1")()
    kernel, grid, arguments, options = taken[0]
    x = arguments["x_ptr"]
    if way == "by name":
        by_name = functools.partial(launching.launch, kernel, grid, x, options, **arguments)
        timer(benchmark, "launch by name", by_name, launches)
        return
    from cvt_kernels.ops.planned_launches import planned

    names = [name for name in kernel.arg_names if name.endswith(("_ptr", "_ptrs"))]
    call = namedtuple("Call", names)(*(arguments[name] for name in names))

    @planned
    def function(call):
        launching.launch(kernel, grid, call.x_ptr, options, **arguments | call._asdict())
        return call.y_ptrs

    run = function.prepare(call)
    timer(benchmark, "planned launch", lambda: run(*call), launches)


def fused_operators():
    """Yields calls of the fused operators that have Triton kernels, each with its launches."""
    x, hidden, residual = (
        suites.randn(1, 50, n, dtype=torch.bfloat16, seed=i) for i, n in enumerate((64, 256, 64))
    )
    wide, narrow = (suites.randn(*shape, dtype=torch.bfloat16, seed=3) for shape in ((256, 64), (64, 256)))
    v, bias, taps = (
        suites.randn(*shape, dtype=torch.bfloat16, seed=4) for shape in ((64,), (256,), (64, 1, 3, 3))
    )
    convs = tuple(ck.ConvBatchNorm(taps, v, v, v, v.abs(), stride=s, padding=1) for s in (1, 2, 2))
    linears = ((narrow[:, :64].contiguous(), v),) * 3
    tokens = x[:, :49].contiguous()
    yield "linear_gelu", lambda: ck.linear_gelu(x, wide, bias), 1
    yield "linear_add", lambda: ck.linear_add(hidden, narrow, v, residual), 1
    yield "linear_add_layer_norm", lambda: ck.linear_add_layer_norm(hidden, narrow, v, residual, v, v), 1
    yield "layer_norm_mlp", lambda: ck.layer_norm_mlp(x, v, v, wide, bias, narrow, v), 1
    yield "conv_linear", lambda: ck.conv_linear(tokens, (7, 7), convs, linears), 1
    yield "depthwise_conv_gelu", lambda: ck.depthwise_conv_gelu(tokens, (7, 7), taps, v), 1
    yield "quantize_rows", lambda: ck.quantize_rows(x), 1


@pytest.mark.parametrize("name", [name for name, *_ in fused_operators()])
def test_fused_operator(benchmark, launches, name):
    """A call of an operator that fuses several, small enough for the host to be what takes time."""
    call, launched = next(others for each, *others in fused_operators() if each == name)
    timer(benchmark, name, call, launches, launched=launched)
