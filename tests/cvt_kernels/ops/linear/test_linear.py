"""Linear layers: the gradient of a bias, calls without a choice, what entries choose, samples."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.tuning import tuner
from tests.checks import assert_accurate, record_calls, remember_entry

FORMS = [
    ("convolution", torch.float32),
    ("convolution", torch.bfloat16),
    ("convolution", torch.float16),
    ("float32", torch.bfloat16),
    ("float32", torch.float16),
]


@contextlib.contextmanager
def counted_calls():
    """Lists the backends of the linear layer as they are called."""
    calls = []

    def counted(operator, backend, implementation):
        implementation.load()

        def serve(call):
            calls.append(backend)
            return implementation.function(call)

        return dataclasses.replace(implementation, function=serve) if operator == "linear" else implementation

    with backends.replaced(counted):
        yield calls


def make(shape, outputs, dtype=torch.float32):
    tensors = (torch.randn(*shape), torch.randn(outputs, shape[-1]), torch.randn(outputs))
    return [t.to(dtype) for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_every_form_passes_its_accuracy_check(dtype, gradient):
    x, weight, bias = make((2, 50, 64), 24, dtype)
    task = tuner.task_of("linear", x, weight.requires_grad_(gradient), bias)
    forms = {name for name, of in FORMS if of == dtype and not (gradient and name == "float32")}
    assert set(task.candidates) == {*forms, "reference"}
    expected = task.expected()
    flaws = {name: tuner.check(candidate, expected).flaw for name, candidate in task.candidates.items()}
    assert flaws == dict.fromkeys(task.candidates)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_gradient_of_the_bias_of_a_convolution_is_pytorchs_sum(threads):
    """OneDNN, which serves with more than one thread, makes one sum over all rows."""
    x, weight, bias = (t.requires_grad_() for t in make((2, 3136, 64), 64))
    dout = torch.randn(2, 3136, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (expected,) = torch.autograd.grad(F.linear(x, weight, bias), bias, dout)
        with ck.use_backend("convolution"), counted_calls() as calls:
            (gradient,) = torch.autograd.grad(ck.linear(x, weight, bias), bias, dout)
    finally:
        torch.set_num_threads(before)
    assert calls == ["convolution"]
    assert_accurate(gradient, expected, dout.double().sum((0, 1)), floor=2.0)


# The calls that have a choice -----------------------------------------------------------------------------


def test_calls_that_a_form_refuses():
    x, weight, bias = make((3, 8), 5)
    half = [t.bfloat16() for t in (x, weight, bias)]
    autocast = torch.autocast("cpu", torch.float16)
    for name, tensors, context, reason in (
        ("convolution", (x.double(), weight.double()), contextlib.nullcontext(), "no advantage in float64"),
        ("float32", (x, weight, bias), contextlib.nullcontext(), "serves 16-bit tensors only"),
        ("float32", (half[0].requires_grad_(), *half[1:]), contextlib.nullcontext(), "has no gradients"),
        ("float32", (half[0].detach(), *half[1:]), autocast, "autocast would convert the float32 numbers"),
    ):
        with ck.use_backend(name), context, pytest.raises(ck.BackendUnavailable, match=reason):
            ck.linear(*tensors)
        with ck.use_backend(name, "reference"), context:
            out, expected = ck.linear(*tensors), F.linear(*tensors)
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_calls_that_have_no_choice():
    """They go to ``F.linear`` itself."""
    x, weight, bias = make((3, 8), 5)
    with ck.use_backend("convolution"), counted_calls() as calls:
        assert ck.linear(x[:0], weight, bias).shape == (0, 5)
        torch.testing.assert_close(ck.linear(nn.Parameter(x), weight), F.linear(x, weight))
        with torch.autocast("cpu", torch.bfloat16):
            mixed = x.bfloat16(), weight, bias
            torch.testing.assert_close(ck.linear(*mixed), F.linear(*mixed), rtol=0, atol=0)
        compiled = torch.compile(ck.linear, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, weight, bias), F.linear(x, weight, bias))
        assert not calls
        ck.linear(x, weight, bias)
        assert calls == ["convolution"]


def test_a_subclass_of_tensor_computes_itself():
    class Quantized(torch.Tensor):
        pass

    x, weight, bias = make((3, 8), 5)
    with ck.use_backend("convolution"), counted_calls() as calls:
        assert isinstance(ck.linear(x, weight.as_subclass(Quantized), bias), Quantized)
        assert isinstance(ck.linear(x.as_subclass(Quantized), weight, bias), Quantized)
        assert isinstance(ck.linear(x, weight, bias.as_subclass(Quantized)), Quantized)
    assert not calls


# The choice -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [*FORMS, ("reference", torch.float32)], ids=str)
def test_the_entry_chooses(name, dtype):
    x, weight, bias = make((3, 8), 5, dtype)

    def call_others():
        ck.linear(x.repeat(10, 1), weight, bias)
        ck.linear(x, weight[:4], bias[:4])
        ck.linear(x, nn.Parameter(weight), bias)
        ck.linear(x.double(), weight.double(), bias.double())

    with counted_calls() as by_the_table:  # which has a row for 16 bits on some processors
        call_others()
    if dtype == torch.float32:
        assert by_the_table == ["reference"] * 4
    remember_entry(name, "linear", x, weight, bias)
    with counted_calls() as calls:
        ck.linear(x, weight, bias)
        ck.linear(x[:2], weight, None)  # of the same class
        assert calls == [name, name]
        call_others()
        assert calls == [name, name, *by_the_table]


@pytest.mark.parametrize("operator", ["linear_add", "linear_add_layer_norm"])
def test_measurements_in_place_do_not_change_what_the_caller_has(operator):
    x, weight, residual = torch.randn(4, 3, 8), torch.randn(5, 8), torch.randn(4, 3, 5)
    declared = backends.operators[operator]
    for tensors in ((x, weight, None, residual), (x[0, 0], weight, None, residual[0, 0])):
        for factor in (1, 2**40):
            some = declared.sample(factor, declared.bind(*tensors, inplace=True))
            assert some.inplace
            assert torch.equal(some.residual, tensors[3][: len(some.x)])
            assert some.residual.untyped_storage().data_ptr() != residual.untyped_storage().data_ptr()
            same = declared.sample(factor, declared.bind(*tensors, inplace=False)).residual
            assert same.untyped_storage().data_ptr() == residual.untyped_storage().data_ptr()


# With what follows ----------------------------------------------------------------------------------------


def test_the_composition_takes_the_backends_of_its_parts():
    (x, weight, bias), residual = make((2, 5, 8), 6), torch.randn(2, 5, 6)
    added, activated = record_calls("add_layer_norm"), record_calls("gelu")
    with ck.use_backend("cpu", "reference"):
        composed = backends.implementations["linear_gelu"]["composed"].function
        torch.testing.assert_close(
            composed(backends.operators["linear_gelu"].bind(x, weight, bias, approximate="tanh")),
            F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        )
        ck.linear_add_layer_norm(x, weight, bias, residual)
    assert len(activated) == 1
    assert len(added) == 1
