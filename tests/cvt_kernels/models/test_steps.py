"""Tests of the bound operators of what is served as one: when they serve, and when they are bound again."""

import gc
import weakref

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.changes import KNOWN
from cvt_kernels.models import served as served_module
from tests.cvt_kernels.models.served import stages_of
from tests.upstream import segformer


@pytest.fixture
def binds(monkeypatch):
    """Lists what has been bound."""
    bound, own = [], served_module.bound
    monkeypatch.setattr(served_module, "bound", lambda *args: bound.append(own(*args)) or bound[-1])
    return bound


@pytest.fixture
def layer(binds):
    """Returns a layer that is served as one, and a call of it."""
    backends.forget()
    layer = stages_of(ck.accelerate(segformer().eval()))[0]
    x = torch.randn(2, 24, layer.layernorm_before.weight.numel())

    @torch.no_grad()
    def call(x=x):
        return layer(x, 4, 6)

    return layer, call


def steps_of(layer):
    (known,) = (each for each in vars(layer)[KNOWN].values() if isinstance(each, served_module.Served))
    return known.steps


def test_later_calls_take_the_steps(layer, binds):
    _, call = layer
    first = call()
    assert all(torch.equal(call(), first) for _ in range(3))
    call(torch.randn(2, 24, first.shape[2]))
    assert len(binds) == 1
    call(torch.randn(3, 24, first.shape[2]))
    assert len(binds) == 2


def test_memory_is_released(layer, binds):
    layer, call = layer
    out = call()
    packed = weakref.ref(binds.pop()[0])
    ck.release_memory()
    gc.collect()
    assert packed() is None
    assert torch.equal(call(), out)
    assert len(binds) == 1


def test_ever_new_sizes_do_not_fill_the_memory(layer, binds):
    layer, call = layer
    channels = layer.layernorm_before.weight.numel()
    for n in range(served_module.MOST + 3):
        call(torch.zeros(n + 1, 24, channels))
    assert len(steps_of(layer)) <= served_module.MOST
