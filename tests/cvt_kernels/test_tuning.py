"""ck.tune: all operators of a call of a model, ahead of time."""

import copy

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import autotune
from cvt_kernels.autotune import tuner
from tests.upstream import huggingface, images, relative, segformer


class Model(nn.Module):
    """Two kinds of GELU, a BatchNorm and a dropout, which training changes and draws numbers for."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0):
        return ck.gelu(self.dropout(ck.gelu(self.norm(x)))[:, :8].contiguous()) * scale


@pytest.fixture
def tuned(tuning, monkeypatch):
    """Lists the cache keys as they are tuned; without ``tune``, there is no time for it."""
    cache_keys, tune = [], tuner.tune
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE_SECONDS", "0")
    monkeypatch.setattr(
        tuner, "tune", lambda task, *how: cache_keys.append(task.cache_key) or tune(task, *how)
    )
    return cache_keys


def test_it_returns_what_it_tuned_and_later_calls_tune_nothing(tuned):
    model, x = Model().eval(), torch.randn(3, 16)
    chosen = ck.tune(model, x, scale=2.0)
    entries = autotune.cache_for(x.device).cached_entries()
    assert list(chosen) == tuned
    assert chosen == {cache_key: entry.chosen for cache_key, entry in entries.items()}
    assert [cache_key.split(", ")[:3] for cache_key in chosen] == 2 * [["gelu", "forward", "float32"]]
    assert ck.tune(model, x) == {}
    with torch.no_grad():
        model(x)
    assert len(tuned) == 2


def test_training_is_tuned_with_gradients_and_changes_nothing(tuned):
    model, x = Model().train(), torch.randn(3, 16)
    before, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    chosen = ck.tune(model, x)
    assert [cache_key.split(", ")[1] for cache_key in chosen] == 2 * ["forward+backward"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_works_whatever_the_settings_are(tuned, monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_AUTOTUNE", "0")
    model, x = Model().eval(), torch.randn(3, 16)
    with torch.no_grad():
        model(x)  # whose plans must not serve later
    with ck.use_backend("reference"):
        assert len(ck.tune(model, x)) == len(tuned) == 2
    compiled = torch.compile(model, backend="eager")
    assert ck.tune(compiled, x) == {}


@pytest.mark.parametrize("make", [huggingface, segformer])
def test_an_accelerated_model_needs_no_tuning_afterwards(tuned, make):
    model = make().eval()
    own, x = copy.deepcopy(model), images()
    chosen = ck.tune(ck.accelerate(model), x)
    assert {cache_key.split(", ")[0] for cache_key in chosen} >= {"conv_embedding", "transformer_block"}
    count = len(tuned)
    with torch.no_grad():
        assert relative(model(x).logits, own(x).logits) < 1e-4
    assert len(tuned) == count
    assert not [reason for reason in ck.fallbacks().values() if "not tuned yet" in reason]


def test_what_is_no_model_and_a_frozen_one_in_training(tuned):
    with pytest.raises(TypeError, match="model: got function, expected Module"):
        ck.tune(ck.gelu, torch.randn(3, 16))
    model = ck.accelerate(huggingface().eval(), freeze=True).train()
    with pytest.raises(RuntimeError, match=r"is frozen for serving and cannot train.*restore"):
        ck.tune(model, images())
