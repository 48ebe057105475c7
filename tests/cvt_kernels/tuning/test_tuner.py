"""The tuner: wrong kernels are found, right ones pass, and the caller notices nothing."""

import ctypes
import itertools

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.tuning import accuracy, clock, tuner
from tests.contract.examples import EXAMPLES, example, served, tensors_of
from tests.cvt_kernels.tuning import broken_kernels

CPU = torch.device("cpu")


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


# Wrong kernels --------------------------------------------------------------------------------------------


def _one_wrong(x, bias=None, *, approximate):
    out = reference.gelu(x, approximate=approximate).clone()
    out.view(-1)[-1] += 0.01
    return out


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
        (_one_wrong, "wrong: output 0 is off by 1.0e-02, allowed are"),
        (_changed(lambda out, x: out[0, 0].fill_(torch.nan)), "wrong: output 0 is off by nan, allowed are"),
        (lambda x, *_, **__: torch.empty_like(x), "wrong: output 0 is off by nan, allowed are"),
        (
            _changed(lambda out, x: x[0, 0].add_(1)),
            "wrong: tensor 0 of the arguments, after the call, is off by",
        ),
        (lambda x, *_, **__: x.sum(0), "wrong: returns [(torch.float32, torch.Size([24]))], expected ["),
        (lambda x, *_, **__: x.double(), "wrong: returns [(torch.float64, "),
        (lambda x, *_, **__: (x, x), "wrong: returns [(torch.float32, torch.Size([7, 24])), (torch.float32,"),
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

    assert gelu_flaw(reads).startswith("wrong: output 0 is off by nan")


def test_a_wrong_backward_is_found_only_where_it_is_wanted():
    x = torch.randn(7, 24, requires_grad=True)

    def function(x, *_, **__):
        return broken_kernels._WrongBackward.apply(x)

    assert gelu_flaw(function, x.detach()) is None
    both = expected_of("gelu", x, approximate="none", gradient=True)
    assert check(function, both).flaw.startswith("wrong: gradient 0 is off by")


@pytest.mark.parametrize("wrong", ["running_mean", "running_var", "num_batches_tracked", None])
def test_wrong_running_statistics_are_found(wrong):
    def function(x, grid, convs, *, training):
        if wrong is None:  # one that is not updated
            convs = tuple(conv._replace(running_mean=conv.running_mean.clone()) for conv in convs)
        outs = reference.conv_projection(x, grid, convs, training=training)
        if wrong is not None:
            getattr(convs[1], wrong).add_(1)
        return outs

    record = example("conv_projection", "reference", "training").call.record
    expected = expected_of("conv_projection", **record._asdict())
    assert "of the arguments, after the call, is off by" in check(function, expected).flaw


# Right kernels --------------------------------------------------------------------------------------------


CPU_KERNELS = [name for name, known in backends.implementations.items() if "cpu" in known]
VALUES = ("normal", "zeros", "constant", "small")
LAYOUTS = ("offset", "sliced", "transposed", "expanded")
DATA = [*(("usual", {"values": each}) for each in VALUES), *(("usual", {"layout": each}) for each in LAYOUTS)]
DATA += [("odd", {}), ("empty", {}), ("many", {}), ("usual", {"gradient": "all", "layout": "transposed"})]
DATA += [("usual", {"parameters": "zeros"}), ("inplace=True", {}), ("rows", {}), ("SegFormer", {})]


def flaws(made) -> dict[str, str | None]:
    """Checks every backend that can serve an example; returns their flaws."""
    with torch.set_grad_enabled(made.call.gradient):
        task = tuner.task_of(made.operator, **made.call.record._asdict())
        expected = task.expected()
        return {name: tuner.check(each, expected).flaw for name, each in task.candidates.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    ("operator", "name", "settings"),
    [(each, *data) for data in DATA for each in CPU_KERNELS if data[0] in EXAMPLES[each]],
    ids=str,
)
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


def outputs_of(operator):
    made = example(operator, "cpu", "usual")
    return tensors_of(backends.registered(operator, "cpu").load().function(made.call.record))


@pytest.mark.parametrize("operator", CPU_KERNELS)
def test_outputs_of_cpu_kernels_lie_in_guarded_memory(operator):
    with tuner.guarded_memory() as memory:
        assert all(is_guarded(out) for out in outputs_of(operator))
    assert not memory.is_overwritten()
    assert not any(is_guarded(out) for out in outputs_of(operator))


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


def test_tuning_exchanges_no_data_with_other_processes():
    x, grid, convs, _ = example("conv_projection", "reference", "training", batch=3).call.record
    convs = tuple(conv._replace(process_group=object()) for conv in convs)
    task = tuner.task_of("conv_projection", x, grid, convs, training=True)
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
    others = 2  # before and after the timing, whose bits are compared
    assert [ran.count(name) for name in candidates] == [others + tuner._FEWEST] * 2


# Choice ---------------------------------------------------------------------------------------------------


def measurement(seconds, flaw=None):
    return tuner.Measurement(0.0, 0.0, seconds, flaw)


def test_the_fastest_is_chosen_if_it_wins_clearly():
    measured = {"cpu": measurement(1.0), "reference": measurement(1.09)}
    assert tuner.fastest(measured, "reference", CPU) == "reference"
    assert tuner.fastest(measured, "reference", torch.device("cuda")) == "cpu"
    measured = {"cpu": measurement(1.0), "reference": measurement(1.11)}
    assert tuner.fastest(measured, "reference", CPU) == "cpu"


def test_a_default_with_a_flaw_is_not_chosen_unless_all_have_one():
    wrong = measurement(None, flaw="wrong: all of it")
    assert tuner.fastest({"cpu": measurement(5.0), "reference": wrong}, "reference", CPU) == "cpu"
    single = tuner.fastest({"sdpa": wrong, "reference": measurement(None)}, "sdpa", CPU)  # not timed
    assert single == "reference"
    assert tuner.fastest({"cpu": wrong, "reference": wrong}, "reference", CPU) == "reference"


def test_a_kernel_whose_bits_differ_from_run_to_run_has_a_race():
    runs = itertools.count()

    def racing(call):
        out = call.x.clone()
        out.view(-1)[5] *= 1 + (next(runs) > 5) * torch.finfo(call.x.dtype).eps
        return out

    call = tuner.Call(backends.operators["gelu"].bind(torch.randn(7, 24)), False)
    (timed,) = tuner.time_in_turns({"cpu": racing}, call, {"cpu": measurement(None)}).values()
    assert timed.flaw == tuner.RACES


@pytest.mark.parametrize(
    ("error", "flaw"),
    [
        (ZeroDivisionError("division by zero"), "fails: ZeroDivisionError: division by zero"),
        (RuntimeError(), "fails: RuntimeError: no reason given"),
        (RuntimeError("one\nsecond line"), "fails: RuntimeError: one"),
        (OSError("no file"), "fails here: OSError: no file"),
    ],
)
def test_flaws_of_errors(error, flaw):
    assert tuner.flaw_of(error) == flaw


def test_a_lack_of_memory_is_no_flaw():
    def lacks(x, *_, **__):
        return torch.empty(2**60)

    with pytest.raises(RuntimeError) as caught:
        gelu_flaw(lacks)
    assert tuner.is_out_of_memory(caught.value)
    assert tuner.is_out_of_memory(torch.OutOfMemoryError())
    assert not tuner.is_out_of_memory(RuntimeError("no memory of it"))


# The choice on a GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fastest", ["gluon", "triton", "composed", "reference"])
@pytest.mark.parametrize(("room", "calls"), [(2**28, 20), (1000, 7), (100, 1)])
def test_on_a_gpu_the_device_decides_whatever_the_host_takes(monkeypatch, fastest, room, calls):
    """By 3 % and more: replays of graphs are timed, not the functions that were captured."""
    names = ("gluon", "triton", "composed", "reference")
    captured = []

    def graph_replay(*runs):
        captured.append(len(runs))
        return names[len(captured) - 1]

    monkeypatch.setattr(tuner.Call, "device", property(lambda call: torch.device("cuda", 0)))
    monkeypatch.setattr(clock, "graph_replay", graph_replay)
    monkeypatch.setattr(tuner, "_COPIED", room)
    monkeypatch.setattr(
        clock, "_cold_seconds", lambda replay, device: 1e-5 * calls * (1 + 0.04 * (replay != fastest))
    )
    monkeypatch.setattr(clock, "release_memory", lambda device: None)
    call = tuner.Call(backends.operators["gelu"].bind(torch.randn(4, 8)), False)
    candidates = {name: lambda call: call.x * 2 for name in names}
    timed = tuner.time_in_turns(candidates, call, dict.fromkeys(names, measurement(None)))
    assert tuner.fastest(timed, "triton", call.device) == fastest
    assert timed[fastest].seconds == pytest.approx(1e-5)
    assert captured == 4 * [calls]
