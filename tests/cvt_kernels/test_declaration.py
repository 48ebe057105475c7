"""Public functions: what they look like, and which calls the dispatch cache serves."""

import gc
import inspect
import weakref

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.ops.rows import gather_rows
from cvt_kernels.records import ConvBatchNorm


@pytest.fixture
def first(monkeypatch):
    """Lists the calls whose arguments were checked, since there was no plan for them."""
    checked = []
    for name in ("gelu", "attention", "linear"):
        monkeypatch.setattr(backends.operators[name], "check", checked.append)
    backends.forget()
    with ck.use_backend("reference"):
        yield checked
    backends.forget()


@pytest.mark.parametrize(
    "name", sorted(set(backends.operators) - {"linear_int8"})
)  # whose public function takes more
def test_a_public_function_looks_as_it_was_declared(name):
    function = backends.operators[name].public
    assert function is getattr(ck, name, function)
    assert inspect.signature(function) == backends.operators[name].signature
    assert function.__doc__
    assert function.__name__ == name


@pytest.mark.parametrize(
    ("args", "settings", "message"),
    [
        (2, {}, "missing a required argument: 'v'"),
        (4, {}, "too many positional arguments"),
        (3, {"nonsense": 1}, "got an unexpected keyword argument 'nonsense'"),
        (3, {"v": 1}, "multiple values for argument 'v'"),
    ],
)
def test_arguments_that_are_no_call_are_refused(args, settings, message):
    with pytest.raises(TypeError, match=rf"attention\(\) {message}") as caught:
        ck.attention(*[torch.randn(1, 4, 2, 8)] * args, **settings)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("name", sorted(set(backends.operators) - {"linear"}))  # which PyTorch checks first
def test_an_error_of_arguments_is_the_only_one(name):
    given = [p for p in backends.operators[name].signature.parameters.values() if p.default is p.empty]
    values = {p.name: "nonsense" for p in given if p.kind is p.KEYWORD_ONLY}
    positional = ["nonsense" for p in given if p.kind is not p.KEYWORD_ONLY]
    with pytest.raises((TypeError, ValueError)) as caught:
        backends.operators[name].public(*positional, **values)
    assert caught.value.__context__ is None


def test_plans_keep_no_tensors(first):
    q = torch.randn(1, 4, 2, 8)
    references = [weakref.ref(q)]
    ck.attention(q, q, q, scale=0.5)
    ck.attention(q, q, q, scale=0.5)
    assert backends.dispatch_cache
    del q
    first.clear()
    gc.collect()
    assert references[0]() is None


def test_plans_are_bounded(first, monkeypatch):
    monkeypatch.setattr(backends, "MOST_CACHED", 5)
    for size in range(1, 20):
        ck.gelu(torch.randn(size))
    assert len(backends.dispatch_cache) <= 5


@pytest.mark.parametrize("stride", [2, (2,), (2, 2)])
def test_records_of_modules_take_one_number_however_it_is_written(stride):
    conv = torch.nn.Conv2d(4, 4, 3, stride, 1, groups=4, bias=False)
    record = ConvBatchNorm.from_modules(conv, torch.nn.BatchNorm2d(4))
    assert (record.stride, record.padding, record.dilation) == (2, 1, 1)


def test_values_are_checked_at_every_call():
    x, rows = torch.randn(2, 6, 4), torch.tensor([[0, 1], [2, -1]])
    for _ in range(2):
        gather_rows(x, rows)
    with pytest.raises(ValueError, match="rows"):
        gather_rows(x, rows + 6)
