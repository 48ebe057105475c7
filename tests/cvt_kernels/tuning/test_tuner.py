"""The tuner: wrong kernels are found, right ones pass, and the caller notices nothing."""

import contextlib
import ctypes
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.ops.cards import laid_out
from cvt_kernels.tuning import accuracy, clock, tuner
from tests.checks import implementation, recorded_operators
from tests.contract.examples import example, served, tensors_of


def expected_of(operator, *args, gradient=False, **kwargs):
    declared = backends.operators[operator]
    return tuner.Expected.of(declared.reference, tuner.Call(declared.bind(*args, **kwargs), gradient))


def check(function, expected) -> tuner.Measurement:
    """Checks a function of the operator's parameters against expected results."""
    operator = type(expected.sample.record).__name__.removesuffix("_call")
    return tuner.check(backends.operators[operator].passing_on(function), expected)


def gelu_flaw(function, x=None) -> str | None:
    expected = expected_of("gelu", torch.randn(7, 24) if x is None else x, approximate="none")
    return check(function, expected).flaw


def branches(channels=6, strides=(1, 2, 2), *, dtype=torch.float32, shared=False, affine=True):
    """Returns branches of conv_projection, with statistics and weights as after some training."""
    norm = nn.BatchNorm2d(channels, affine=affine)
    convs = []
    for stride in strides:
        conv = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        norm = norm if shared else nn.BatchNorm2d(channels, affine=affine)
        with torch.no_grad():
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            for parameter in norm.parameters():
                parameter.normal_(1, 0.1)
        convs.append(ck.ConvBatchNorm.from_modules(conv.to(dtype), norm.to(dtype)))
    return tuple(convs)


# Wrong kernels --------------------------------------------------------------------------------------------


def _one_wrong(x, bias=None, *, approximate):
    out = reference.gelu(x, approximate=approximate).clone()
    out.view(-1)[-1] += 0.01
    return out


def _fails_silently(x, *_, **__):
    raise RuntimeError


def _changed(change):
    """Returns a kernel that changes the output of the reference, or the input."""

    def kernel(x, bias=None, *, approximate):
        out = reference.gelu(x, approximate=approximate).clone()
        change(out, x)
        return out

    return kernel


@pytest.mark.parametrize(
    ("function", "flaw"),
    [
        (_one_wrong, "wrong: output is off by 1.0e-02, allowed are"),
        (_changed(lambda out, x: out[0, 0].fill_(torch.nan)), "wrong: output is off by nan, allowed are"),
        (lambda x, *_, **__: torch.empty_like(x), "wrong: output is off by nan, allowed are"),
        (
            _changed(lambda out, x: x[0, 0].add_(1)),
            "wrong: tensor 0 of the arguments, after the call, is off by",
        ),
        (lambda x, *_, **__: x.sum(0), "wrong: returns [(torch.float32, torch.Size([24]))], expected ["),
        (lambda x, *_, **__: x.double(), "wrong: returns [(torch.float64, "),
        (lambda x, *_, **__: (x, x), "wrong: returns [(torch.float32, torch.Size([7, 24])), (torch.float32,"),
        (lambda x, *_, **__: None, "fails: "),
        (lambda x, *_, **__: 1 / 0, "fails: ZeroDivisionError: division by zero"),
        (_fails_silently, "fails: RuntimeError: no reason given"),
        (
            _changed(lambda out, x: setattr(ctypes.c_float.from_address(x.data_ptr() - 4), "value", 7.0)),
            tuner.WRITES_OUTSIDE,
        ),
        (
            _changed(lambda out, x: ctypes.memset(out.data_ptr() + out.nbytes + 30_000, 0, 4)),
            tuner.WRITES_OUTSIDE,
        ),
    ],
)
def test_flaws_of_wrong_kernels(function, flaw):
    assert gelu_flaw(function).startswith(flaw)


@pytest.mark.parametrize(
    "allocate", [torch.empty_like, torch.zeros_like, torch.clone, torch.Tensor.contiguous]
)
@pytest.mark.parametrize("place", [-1, "behind"])
@pytest.mark.parametrize("way", ["strides", "address"])
def test_writes_outside_of_an_output_are_found(allocate, place, way):
    def writes(x, bias=None, *, approximate):
        out = allocate(x.mT).mT.contiguous() if allocate is torch.Tensor.contiguous else allocate(x)
        out.copy_(reference.gelu(x, approximate=approximate))
        index = out.numel() if place == "behind" else place
        if way == "strides":
            out.as_strided((1,), (1,), out.storage_offset() + index).fill_(7.0)
        else:
            number = ctypes.c_float.from_address(out.data_ptr() + index * out.element_size())
            number.value = 7.0
        return out

    assert gelu_flaw(writes) == "wrong: writes outside of its tensors"


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("side", [-2, 42])
def test_writes_beside_tensors_that_begin_or_end_within_a_word_are_found(where, side):
    def writes(x, bias=None, *, approximate):
        out = torch.empty_like(x).copy_(reference.gelu(x, approximate=approximate))
        ctypes.memset((x if where == "input" else out).data_ptr() + side, 7, 2)
        return out

    x = torch.randn(22).bfloat16()[1:].view(3, 7)
    assert gelu_flaw(writes, x) == "wrong: writes outside of its tensors"


def test_what_is_read_outside_of_an_input_is_nan():
    def reads(x, bias=None, *, approximate):
        beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
        return reference.gelu(x, approximate=approximate) + 0 * beyond

    assert gelu_flaw(reads).startswith("wrong: output is off by nan")


class _WrongBackward(torch.autograd.Function):
    """LayerNorm whose gradient of x lacks a term."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return reference.layer_norm(x, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        rstd = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + ctx.eps)
        normalized = (x - x.mean(-1, keepdim=True)) * rstd
        g = dout * weight
        dx = rstd * (g - g.mean(-1, keepdim=True))
        return dx, (dout * normalized).sum((0, 1)), dout.sum((0, 1)), None


def test_a_wrong_backward_is_found_only_where_it_is_wanted():
    x, weight, bias = torch.randn(2, 9, 16, requires_grad=True), torch.randn(16), torch.randn(16)

    def function(x, weight, bias, *, eps, **_):
        return _WrongBackward.apply(x, weight, bias, eps)

    forward = expected_of("layer_norm", x.detach(), weight, bias, eps=1e-5)
    assert check(function, forward).flaw is None
    both = expected_of("layer_norm", x, weight, bias, eps=1e-5, gradient=True)
    assert check(function, both).flaw.startswith("wrong: gradient is off by")


@pytest.mark.parametrize("wrong", ["running_mean", "running_var", "num_batches_tracked", None])
def test_wrong_running_statistics_are_found(wrong):
    def function(x, grid, convs, *, training):
        if wrong is None:  # one that is not updated
            convs = tuple(conv._replace(running_mean=conv.running_mean.clone()) for conv in convs)
        outs = reference.conv_projection(x, grid, convs, training=training)
        if wrong is not None:
            getattr(convs[1], wrong).add_(1)
        return outs

    expected = expected_of("conv_projection", torch.randn(2, 12, 6), (3, 4), branches(), training=True)
    assert "of the arguments, after the call, is off by" in check(function, expected).flaw


@pytest.mark.parametrize("value", [0.0, 3.0, torch.nan, torch.inf, 1e30])
def test_data_that_tell_nothing_do_not_hide_a_wrong_kernel(value):
    assert gelu_flaw(_one_wrong, torch.full((7, 24), value)) is not None
    assert gelu_flaw(_one_wrong, torch.full((1, 24), value).expand(7, 24)) is not None
    mixed = torch.randn(7, 24)
    mixed[3, 3] = value
    assert gelu_flaw(_one_wrong, mixed) is not None


@pytest.mark.parametrize("gradient", [False, True])
def test_the_reference_runs_once_in_its_dtype_and_once_in_float64(gradient):
    dtypes = []

    def counted(x, bias=None, *, approximate):
        dtypes.append(x.dtype)
        return reference.gelu(x, approximate=approximate)

    x = torch.randn(7, 24, requires_grad=gradient)
    for backend, each in {"reference": counted, "cpu": reference.gelu, "triton": reference.gelu}.items():
        backends.register("gelu", backend, implementation("gelu", each))
    task = tuner.task_of("gelu", x, approximate="none")
    expected = task.expected()
    measurements = {name: tuner.check(function, expected) for name, function in task.candidates.items()}
    assert dtypes == [torch.float32, torch.float64]
    assert len(measurements) == 3
    assert len(set(measurements.values())) == 1  # the reference has its error all the same
    assert measurements["reference"].error > 0


# Right kernels --------------------------------------------------------------------------------------------


CPU_KERNELS = [name for name, known in backends.implementations.items() if "cpu" in known]
VALUES = ("normal", "zeros", "constant", "huge", "small", "nan", "infinite")
LAYOUTS = ("offset", "sliced", "transposed", "expanded")
DATA = [*(("usual", {"values": each}) for each in VALUES), *(("usual", {"layout": each}) for each in LAYOUTS)]
DATA += [("odd", {}), ("empty", {}), ("many", {}), ("usual", {"gradient": "all", "layout": "transposed"})]
DATA += [("usual", {"gradient": "all", "values": "nan"}), ("usual", {"parameters": "zeros"})]


def flaws(made) -> dict[str, str | None]:
    """Checks every backend that can serve an example; returns their flaws."""
    with torch.set_grad_enabled(made.call.gradient):
        task = tuner.task_of(made.operator, **made.call.record._asdict())
        with tuner.undisturbed(task.sample.device):
            expected = task.expected()
            return {name: tuner.check(each, expected).flaw for name, each in task.candidates.items()}


@pytest.mark.parametrize("operator", CPU_KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(("name", "settings"), DATA, ids=str)
def test_right_kernels_pass(operator, name, settings, dtype):
    found = flaws(served(operator, "cpu", name, dtype=dtype, **settings))
    assert "cpu" in found
    assert set(found.values()) == {None}


def test_a_small_gradient_beside_a_large_one_is_judged_by_itself():
    """The bias's is off by 1e-4 of its size, which is little beside the weight's."""
    x, weight, bias = 1e3 * torch.randn(50, 64), torch.randn(24, 64), torch.randn(24)
    expected = expected_of("linear", x, weight.requires_grad_(), bias.requires_grad_(), gradient=True)

    def off(call):
        more = 1e-4 * call.bias
        return torch.nn.functional.linear(call.x, call.weight, call.bias + (more - more.detach()))

    assert tuner.check(off, expected).flaw.startswith("wrong: gradient 1 is off by")


@pytest.mark.parametrize("keys", [1, 9])
def test_gradients_that_cancel_are_no_flaw(keys):
    """Those of q are zero for a single key."""
    made = example("attention", "triton", "usual", keys=keys, gradient="all", queries=5)
    with ck.use_backend("triton"):
        assert flaws(made)["triton"] is None


# Guarded memory -------------------------------------------------------------------------------------------


def is_guarded(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.nbytes + 2 * 2**16


def cpu(operator, gradient="none", name="usual"):
    """Returns a call of a CPU kernel, and the tensors that it may want a gradient of."""
    made = example(operator, "cpu", name, gradient=gradient)
    function = backends.registered(operator, "cpu").load().function
    with torch.set_grad_enabled(made.call.gradient):
        return tensors_of(function(made.call.record)), made.leaves()


@pytest.mark.parametrize("operator", CPU_KERNELS)
def test_outputs_of_cpu_kernels_lie_in_guarded_memory(operator):
    with tuner.guarded_memory() as memory:
        assert all(is_guarded(out) for out in cpu(operator)[0])
    assert not memory.is_overwritten()
    assert not any(is_guarded(out) for out in cpu(operator)[0])


def test_gradients_of_cpu_kernels_lie_in_guarded_memory():
    with tuner.guarded_memory():
        [out], leaves = cpu("gelu", "all")
        gradient, *_ = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert is_guarded(gradient)


def test_allocations_are_direct_again_after_an_error_and_after_the_last_of_nested_blocks():
    with pytest.raises(ZeroDivisionError), tuner.guarded_memory():
        _ = 1 / 0
    with recorded_operators() as operators:
        cpu("gelu")[0][0]
    assert not any("empty" in name for name in operators)
    with tuner.guarded_memory():
        with tuner.guarded_memory():
            pass
        assert is_guarded(cpu("gelu")[0][0])
    assert not is_guarded(cpu("gelu")[0][0])


def test_guarded_memory_of_two_threads():
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other():
        with tuner.guarded_memory():
            entered.set()
            left.wait(60)
            seen.append(is_guarded(cpu("gelu")[0][0]))

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    assert not is_guarded(cpu("gelu")[0][0])  # not in this thread
    with tuner.guarded_memory():
        assert is_guarded(cpu("gelu")[0][0])
    left.set()
    thread.join()
    assert seen == [True]
    assert not is_guarded(cpu("gelu")[0][0])


# 8-bit numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_in_guarded_memory(layout, dtype):
    x = laid_out(torch.randn(3, 4, 5).to(dtype), layout)
    memory = tuner.GuardedMemory()
    copy = memory.copy(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.data_ptr() % 64 == x.data_ptr() % 64
    assert copy.data_ptr() != x.data_ptr()
    assert not memory.is_overwritten()


# 8-bit numbers --------------------------------------------------------------------------------------------


def expected_of_integers(operator, **settings):
    return tuner.task_of(
        operator, **example(operator, "reference", "usual", **settings).call.record._asdict()
    ).expected()


def with_results(change):
    """Makes a kernel of the reference by a change of the values and the scales that it returns."""
    return lambda operator: lambda *args, **kwargs: change(*getattr(reference, operator)(*args, **kwargs))


def by_float64(change):
    """Makes a kernel that computes in float64, where values are not rounded, and rounds by a function."""

    def make(operator):
        def kernel(x, *args, dtype, **kwargs):
            wide = getattr(reference, operator)(x.double(), *args, dtype=dtype, **kwargs)
            return change(wide.values, dtype), wide.scales.float()

        return kernel

    return make


def _one_more(values, scales):
    values.view(torch.int8).view(-1)[5] += 1
    return values, scales


def _nothing_written_at_the_end(values, scales):
    out = torch.empty_like(values)
    out[:-1] = values[:-1]
    return out, scales


#: Kernels of rows of 8-bit numbers, and whether they are right.
ROWS = {
    "reference": (with_results(lambda *out: out), True),
    "exact": (by_float64(accuracy.rounded), True),
    "one more": (with_results(_one_more), False),
    "not written": (with_results(_nothing_written_at_the_end), False),
    "nothing written": (with_results(lambda values, scales: (torch.empty_like(values), scales)), False),
    "truncated": (by_float64(lambda values, dtype: values.trunc().to(dtype)), False),
    "scales": (with_results(lambda values, scales: (values, scales * (1 + 1e-4))), False),
    "zeros": (with_results(lambda values, scales: (torch.zeros_like(values), scales)), False),
}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("operator", ["quantize_rows", "layer_norm_quantize", "gelu_quantize"])
def test_right_and_wrong_rows_of_8_bit_numbers(operator, dtype):
    expected = expected_of_integers(operator, to=dtype, leading="tokens", rows=40)
    for name, (make, is_right) in ROWS.items():
        if name != "truncated" or dtype == "int8":  # of others a step is not 1
            flaw = check(make(operator), expected).flaw
            assert (flaw is None) == is_right, (name, flaw)


def _with_truncated_input(x, weight, *args, x_scales, **settings):
    if x_scales is None:
        wide = reference.quantize_rows(x.double())
        x, x_scales = wide.values.trunc().to(torch.int8), wide.scales.float()
    return reference.linear_int8(x, weight, *args, x_scales=x_scales, **settings)


def _without_a_row(x, weight, *args, **settings):
    weight = weight.clone()
    weight[3] = 0
    return reference.linear_int8(x, weight, *args, **settings)


def _dequantized(x, weight, scale, bias, *, x_scales, approximate, residual, dtype):
    rows = x if x_scales is None else x * x_scales
    product = nn.functional.linear(rows.float(), weight.float() * scale[:, None], bias.float())
    return (reference.gelu(product, approximate=approximate) + residual).to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [{"rounded": False}, {"rounded": True}], ids=str)
def test_right_and_wrong_products_of_8_bit_numbers(rows, dtype):
    expected = expected_of_integers(
        "linear_int8", dtype=dtype, added=True, approximate="tanh", leading="tokens", rows=20, **rows
    )
    for right in (reference.linear_int8, _dequantized):
        assert check(right, expected).flaw is None
    wrong = [_without_a_row, lambda *args, **settings: torch.empty_like(settings["residual"])]
    if not rows["rounded"] and dtype == "float32":
        wrong.append(_with_truncated_input)
    for kernel in wrong:
        assert "wrong: output is off by" in check(kernel, expected).flaw


# The caller -----------------------------------------------------------------------------------------------


def tune(operator, *args, **kwargs):
    """Checks and times the candidates of a call here, as the process of ``tune`` does; returns the entry."""
    return tune_task(tuner.task_of(operator, *args, **kwargs))


def tune_task(task):
    with tuner.undisturbed(task.sample.device):
        expected = task.expected()
        checked = {name: tuner.check(each, expected) for name, each in task.candidates.items()}
        sound = {name: task.candidates[name] for name in checked if checked[name].flaw is None}
        timed = tuner.time_in_turns(sound, task.timed, checked)
    return tuner.fastest({**checked, **timed}, task.default, task.margin)


def test_arguments_statistics_gradients_and_random_numbers_stay():
    x = torch.randn(2, 12, 6, requires_grad=True)
    x.grad = torch.ones_like(x)
    convs = branches(shared=True)

    def draws(x, grid, convs, *, training):
        torch.rand(5)
        return reference.conv_projection(x, grid, convs, training=training)

    backends.register("conv_projection", "cpu", implementation("conv_projection", draws))
    tensors = [x, x.grad, *(t for conv in convs for t in conv if isinstance(t, torch.Tensor))]
    before = [(t.clone(), t._version, t.grad) for t in tensors]
    state = torch.get_rng_state()

    entry = tune("conv_projection", x, (3, 4), convs, training=True)
    assert entry.measurements.keys() == {"cpu", "reference"}
    assert torch.equal(torch.get_rng_state(), state)
    for tensor, (value, version, gradient) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
        assert (tensor._version, tensor.grad) == (version, gradient)


class _Refuses(TorchFunctionMode):
    """Lets only the properties of tensors be read."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function.__name__ == "__get__", f"{function} was seen"
        return function(*args, **(kwargs or {}))


def test_modes_and_hooks_see_nothing():
    def seen(tensor):
        raise AssertionError("the tuning was seen")

    x = torch.randn(4, 8, requires_grad=True)
    task = tuner.task_of("gelu", x, approximate="none")
    with recorded_operators() as operators, torch.autograd.graph.saved_tensors_hooks(seen, seen), _Refuses():
        tune_task(task)
    assert operators == []


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.float64),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_tuning_in_any_context(context):
    x = torch.zeros(3, 8, requires_grad=True)
    with context():
        entry = tune("gelu", x, approximate="none")
        grad_mode, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    assert {measurement.flaw for measurement in entry.measurements.values()} == {None}
    with context():
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad_mode, inference)
    # Nothing that tuning left behind is bound to its context.
    assert {
        measurement.flaw for measurement in tune("gelu", x, approximate="tanh").measurements.values()
    } == {None}


def test_tuning_exchanges_no_data_with_other_processes():
    convs = tuple(conv._replace(process_group=object()) for conv in branches())
    task = tuner.task_of("conv_projection", torch.randn(3, 12, 6), (3, 4), convs, training=True)
    for call in (task.sample, task.timed):
        assert call.record.x.shape[0] == 3
        assert all(conv.process_group is None for conv in call.record.convs)


# Timing ---------------------------------------------------------------------------------------------------


def test_candidates_are_timed_in_turns_and_the_fastest_run_counts(monkeypatch):
    ran, milliseconds = [], {"cpu": [9, 1, 2, 2, 2], "reference": [3, 2, 2, 2, 2]}

    def cold_seconds(function, device):
        function()
        return milliseconds[ran[-1]].pop(0) / 1000

    monkeypatch.setattr(clock, "_cold_seconds", cold_seconds)
    monkeypatch.setattr(tuner, "_SECONDS", 0.0)
    candidates = {name: lambda x, name=name: ran.append(name) or x for name in milliseconds}
    call = tuner.Call((torch.ones(2, 2),), False)
    measurements = tuner.time_in_turns(candidates, call, dict.fromkeys(candidates, measurement(None)))
    assert [each.seconds for each in measurements.values()] == [0.001, 0.002]
    others = 3  # the first run, and those before and after the timing whose bits are compared
    assert [ran.count(name) for name in candidates] == [others + tuner._FEWEST] * 2


# Choice ---------------------------------------------------------------------------------------------------


def measurement(seconds, flaw=None):
    return tuner.Measurement(0.0, 0.0, seconds, flaw)


def test_the_fastest_is_chosen_if_it_wins_clearly():
    entry = tuner.fastest({"cpu": measurement(1.0), "reference": measurement(1.09)}, "reference")
    assert entry.chosen == "reference"
    entry = tuner.fastest({"cpu": measurement(1.0), "reference": measurement(1.11)}, "reference")
    assert entry.chosen == "cpu"


def test_a_default_with_a_flaw_is_not_chosen_unless_all_have_one():
    wrong = measurement(None, flaw="wrong: all of it")
    assert tuner.fastest({"cpu": measurement(5.0), "reference": wrong}, "reference").chosen == "cpu"
    single = tuner.fastest({"sdpa": wrong, "reference": measurement(None)}, "sdpa")  # not timed
    assert single.chosen == "reference"
    assert tuner.fastest({"cpu": wrong, "reference": wrong}, "reference").chosen == "reference"
    assert tuner.fastest({}, "reference").chosen == "reference"


def test_a_kernel_whose_bits_differ_from_run_to_run_has_a_race():
    runs = itertools.count()

    def racing(x, bias=None, *, approximate):
        out = reference.gelu(x, approximate=approximate).clone()
        out.view(-1)[5] *= 1 + (next(runs) > 5) * torch.finfo(x.dtype).eps
        return out

    backends.register("gelu", "cpu", implementation("gelu", racing))
    entry = tune("gelu", torch.randn(7, 24), approximate="none")
    assert entry.measurements["cpu"].flaw == tuner.RACES
    assert entry.chosen == "reference"


def test_a_lack_of_memory_is_no_flaw():
    def lacks(x, *_, **__):
        return torch.empty(2**60)

    with pytest.raises(RuntimeError) as caught:
        gelu_flaw(lacks)
    assert tuner.is_out_of_memory(caught.value)
    assert tuner.is_out_of_memory(torch.OutOfMemoryError())
    assert not tuner.is_out_of_memory(RuntimeError("no memory of it"))


# The choice on a GPU --------------------------------------------------------------------------------------


class GpuClock:
    """A fake clock of a GPU: what a candidate takes is told, and replays of a graph take the host nothing."""

    def __init__(self, monkeypatch):
        self.host, self.on_device = 0.0, 0.0
        monkeypatch.setattr(tuner.Call, "device", property(lambda call: torch.device("cuda", 0)))
        monkeypatch.setattr(tuner, "_wait_for_stream", lambda device: None)
        monkeypatch.setattr(clock, "now", lambda device: self.host + self.on_device)
        monkeypatch.setattr(clock, "copies_that_fill_cache", lambda size, most: 2)
        monkeypatch.setattr(clock, "replays", self.replays)

    def candidate(self, host, on_device):
        def function(call):
            self.host += host
            self.on_device += on_device
            return call.x * 2

        return function

    def replays(self, functions):
        captured = []
        for calls in functions:
            before = self.on_device
            for call in calls:
                call()
            captured.append(Replayed((self.on_device - before) / len(calls)))
        return captured


class Replayed(clock.Replay):
    def __init__(self, seconds):
        self._seconds = seconds

    def seconds(self):
        return self._seconds


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("fastest", ["gluon", "triton", "composed", "reference"])
@pytest.mark.parametrize("host", [1e-6, 1e-4, 5e-3])
def test_on_a_gpu_the_device_decides_whatever_the_host_takes(monkeypatch, gradient, fastest, host):
    """By 3 % and more, in graphs and outside of them: the fastest there takes the host the longest."""
    gpu = GpuClock(monkeypatch)
    names = ("gluon", "triton", "composed", "reference")
    candidates = {
        name: gpu.candidate(host if name == fastest else 1e-6, 1e-5 if name == fastest else 1.04e-5)
        for name in names
    }
    call = tuner.Call(backends.operators["gelu"].bind(torch.randn(4, 8)), gradient)
    if gradient:
        call.record.x.requires_grad_()
    measured = dict.fromkeys(names, tuner.Measurement(0.0, 1.0, None, None))
    timed = tuner.time_in_turns(candidates, call, measured)
    assert tuner.fastest(timed, "triton", tuner._MARGIN_OF_GPU).chosen == fastest


def test_gradients_are_timed_by_the_kernels_that_the_check_has_run():
    """Without gradients a forward may have other kernels, which would be compiled for nothing."""
    enabled = []

    def function(call):
        enabled.append(torch.is_grad_enabled())
        return call.x * 2

    record = backends.operators["gelu"].bind(torch.randn(4, 8, requires_grad=True))
    run = tuner.runner_of(function, tuner.Call(record, True))
    run()
    assert enabled == [True, True]
