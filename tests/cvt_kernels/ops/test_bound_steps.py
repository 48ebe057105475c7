"""Bound steps: operators that are bound to packed parameters, and everything that ends them."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.ops import weight_cache
from cvt_kernels.ops.bound_steps import MOST, BoundSteps
from tests.checks import add_marked_backend


class Doubling:
    """A module that is bound to twice its weight."""

    def __init__(self):
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.bound_steps, self.bound = BoundSteps(), 0

    def bind(self):
        self.bound += 1
        copy = 2 * self.weight.detach()
        return [lambda x: x * copy, lambda x: x + 1]

    @torch.no_grad()
    def __call__(self, x, *settings):
        """Returns the result, and whether the steps computed it."""
        out = self.bound_steps.run(x, *settings)
        if out is not None:
            return out, True
        self.bound_steps.add(x, lambda: [self.weight, None], self.bind, *settings)
        return x * (2 * self.weight) + 1, False


@pytest.fixture
def model():
    backends.forget()
    return Doubling()


X = torch.tensor([3.0, 4.0])


def served(model, x=X, *settings):
    with torch.no_grad():
        out, by_steps = model(x, *settings)
        torch.testing.assert_close(out, x * 2 * model.weight + 1)
    return by_steps


def test_later_calls_take_the_steps(model):
    assert [served(model) for _ in range(3)] == [False, True, True]
    assert served(model, X + 1)
    assert model.bound == 1


@pytest.mark.parametrize(
    "x",
    [
        X.double(),
        X[:1],
        X[None],
        torch.empty(2, 2)[:, 0].copy_(X),
        X.as_subclass(type("Other", (torch.Tensor,), {})),
    ],
    ids=["dtype", "shape", "rank", "stride", "class"],
)
def test_other_tensors_have_other_steps(model, x):
    served(model)
    assert not served(model, x)
    assert served(model)


def write(model):
    with torch.no_grad():
        model.weight.mul_(3)


def replace_data(model):
    model.weight.data = model.weight.data + 1


def narrow(model):
    model.weight.data = model.weight.data[:1]


def step(model):
    model.weight.grad = torch.ones(2)
    torch.optim.SGD([model.weight], lr=0.5, fused=True).step()


@pytest.mark.parametrize("change", [write, replace_data, narrow, step])
def test_changed_parameters_end_them(model, change):
    served(model)
    assert served(model)
    change(model)
    assert [served(model), served(model)] == [False, True]
    assert model.bound == 2


def test_what_pytorch_does_not_count_ends_them_or_is_reported_by_refresh(model):
    served(model)
    model.weight.data.mul_(3)
    assert [served(model), served(model)] == [False, True]
    module = nn.Module()
    module.weight = model.weight
    ck.refresh(module)
    assert not served(model)


def test_other_states_of_the_process_end_or_leave_them(model):
    served(model)
    with ck.use_backend("reference"):
        assert not served(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not served(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert not served(model)
    finally:
        torch.set_num_threads(threads)
    assert served(model)
    add_marked_backend("cpu", 1.0)
    assert [served(model), served(model)] == [False, True]


def test_none_serve_where_copies_are_noted_or_a_mode_watches(model):
    served(model)
    with weight_cache.noted_uses():
        assert not served(model)
    with FlopCounterMode(display=False):
        assert not served(model)
    assert served(model)
    assert model.bound == 1


def test_memory_is_released(model):
    held = []

    def bind():
        copy = torch.zeros(4)
        held.append(weakref.ref(copy))
        return [lambda x: x + copy.sum()]

    model.bind = bind
    served_before = model.bound_steps
    with torch.no_grad():
        model.bound_steps.add(X, lambda: [model.weight], bind)
        ck.release_memory()
        gc.collect()
        assert held[0]() is None
        assert served_before.run(X) is None
        model.bound_steps.add(X, lambda: [model.weight], bind)
        assert torch.equal(served_before.run(X), X)
        model.weight = None
        gc.collect()


def test_ever_new_sizes_do_not_fill_the_memory(model):
    for n in range(2 * MOST):
        model.bound_steps.add(torch.zeros(n + 1), lambda: [model.weight], model.bind)
    assert len(model.bound_steps._known) <= MOST
