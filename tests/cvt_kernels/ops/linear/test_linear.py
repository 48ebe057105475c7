"""Linear layers: the gradient of a bias, calls without a choice, samples."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends
from tests.checks import assert_accurate, record_calls


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
