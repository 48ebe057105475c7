"""The linear layer's primitives, and when which is taken."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import cvt_kernels as ck
from cvt_kernels.ops import linear as primitives
from tests.checks import assert_accurate
from tests.upstream import huggingface

WAYS = [
    (name, dtype) for dtype, names in primitives._CANDIDATES.items() for name in names if name != "linear"
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("CVT_KERNELS_LINEAR", raising=False)
    primitives._choose.cache_clear()
    yield
    primitives._choose.cache_clear()


@pytest.fixture
def take(monkeypatch):
    """Returns a function that lets every dtype take a primitive if it can, and lists its calls."""

    def take(name):
        monkeypatch.setenv("CVT_KERNELS_LINEAR", name)
        return stack.enter_context(counted_calls(name))

    with contextlib.ExitStack() as stack:
        yield take


@contextlib.contextmanager
def counted_calls(*names):
    """Lists the names of the primitives of ``names`` as they are called."""
    calls = []

    def counted(name, primitive):
        def call(*given):
            calls.append(name)
            return primitive(*given)

        return call if name in names else primitive

    with primitives.replaced(counted):
        yield calls


def make(shape, outputs, dtype=torch.float32):
    tensors = (torch.randn(*shape), torch.randn(outputs, shape[-1]), torch.randn(outputs))
    return [t.to(dtype) for t in tensors]


@pytest.mark.parametrize(("name", "dtype"), WAYS, ids=str)
@pytest.mark.parametrize("shape", [(2, 50, 64), (2500, 33), (7,), (3, 1, 2, 5), (1, 1)], ids=str)
def test_accuracy(take, name, dtype, shape):
    calls = take(name)
    x, weight, bias = make(shape, 24, dtype)
    for given in (bias, None):
        out = ck.linear(x, weight, given)
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        assert out.is_contiguous()
        assert_accurate(out, F.linear(x, weight, given), exact)
    assert len(calls) == 2


@pytest.mark.parametrize(("name", "dtype"), WAYS, ids=str)
def test_strided_x(take, name, dtype):
    take(name)
    x, weight, bias = make((4, 6, 8), 5, dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    for strided in (x.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([x, x], 2)[..., :8]):
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            ck.linear(strided, weight, bias).double(), expected, rtol=tolerance, atol=tolerance
        )


def test_where_there_is_no_choice(take):
    calls = take("convolution")
    x, weight, bias = make((3, 8), 5)
    with torch.no_grad():
        ck.linear(x, weight.requires_grad_(), bias)
    assert len(calls) == 1
    ck.linear(x, weight, bias)  # wants a gradient
    weight.requires_grad_(False)
    with ck.use_backend("reference"):
        ck.linear(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ck.linear(x, weight, bias), F.linear(x, weight, bias))
    torch.use_deterministic_algorithms(True)
    try:
        ck.linear(x, weight, bias)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(ck.linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    assert ck.linear(x[:0], weight, bias).shape == (0, 5)
    assert ck.linear(x.to("meta"), weight.to("meta")).shape == (3, 5)
    compiled = torch.compile(ck.linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, weight, bias), F.linear(x, weight, bias))
    assert len(calls) == 1


def test_a_subclass_of_tensor_computes_itself(take):
    calls = take("convolution")

    class Quantized(torch.Tensor):
        pass

    x, weight, bias = make((3, 8), 5)
    assert isinstance(ck.linear(x, weight.as_subclass(Quantized), bias), Quantized)
    assert not calls


def test_errors_are_those_of_pytorch(take):
    take("convolution")
    x, weight, bias = make((3, 8), 5)
    for given in ((x, weight[:, :7], bias), (x, weight, bias[:4]), (x, weight.half(), bias)):
        with pytest.raises(RuntimeError) as theirs:
            F.linear(*given)
        with pytest.raises(RuntimeError) as ours:
            ck.linear(*given)
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"linear": 1.0, "convolution": 0.5, "float32": 0.7}, "convolution"),
        ({"linear": 1.0, "convolution": 0.9, "float32": 0.1}, "float32"),
        ({"linear": 1.0, "convolution": 0.81, "float32": 2.0}, "linear"),  # not by a quarter
    ],
)
def test_the_fastest_by_a_margin_once_per_process(monkeypatch, seconds, expected):
    measured = []
    monkeypatch.setattr(primitives, "_measure", lambda dtype: (measured.append(dtype), seconds)[1])
    assert ck.linear_primitives()[torch.bfloat16] == expected
    assert ck.linear_primitives()[torch.bfloat16] == expected
    assert len(measured) == len(set(measured)) == 3


def test_measuring_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    seconds = primitives._measure(torch.float32)
    assert set(seconds) == {"linear", "convolution"}
    assert min(seconds.values()) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_primitives_are_replaced_for_a_while():
    before = dict(primitives._PRIMITIVES)
    x, weight, bias = make((3, 8), 5)
    chosen = ck.linear_primitives()[torch.float32]  # measured before anything is counted
    expected = ck.linear(x, weight, bias)
    with counted_calls(*before) as calls:
        torch.testing.assert_close(ck.linear(x, weight, bias), expected)
        assert calls == [chosen]
    ck.linear(x, weight, bias)
    assert len(calls) == 1
    assert before == primitives._PRIMITIVES


def test_override(monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_LINEAR", "float32")
    assert set(ck.linear_primitives().values()) == {"linear", "float32"}  # float32 itself has no such way
    primitives._choose.cache_clear()
    monkeypatch.setenv("CVT_KERNELS_LINEAR", "mkl")
    with pytest.raises(ValueError, match="CVT_KERNELS_LINEAR: got 'mkl', expected one of auto, linear"):
        ck.linear(*make((3, 8), 5))


class Adapted(nn.Linear):
    """A linear layer whose own forward adds something, like that of a low-rank adapter."""

    def forward(self, x):
        return super().forward(x) + 1


def test_accelerated_linear_layers(take):
    """A plain one takes the primitive; one that is watched or something else is called as it is."""
    calls = take("convolution")
    model = huggingface().eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(images).logits
        ck.accelerate(model)
        torch.testing.assert_close(model(images).logits, expected)
        layers = [m for m in model.cvt.modules() if type(m) is nn.Linear]
        assert len(calls) == len(layers)
        calls.clear()
        seen = []
        layers[0].register_forward_hook(lambda *given: seen.append(given))
        layers[1].__class__ = Adapted
        parametrize.register_parametrization(layers[2], "weight", nn.Identity())
        changed = model(images).logits
        assert len(seen) == 1
        assert len(calls) == len(layers) - 3
        ck.restore(model)
        torch.testing.assert_close(model(images).logits, changed)
