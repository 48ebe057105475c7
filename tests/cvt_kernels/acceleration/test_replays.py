"""Recordings of live blocks: they compute what the block computes, and every change is noticed."""

import copy

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.acceleration import fused
from cvt_kernels.ops import planned_launches
from tests import upstream

pytest.importorskip("triton")

FAMILIES = {
    "cvt": upstream.huggingface,
    "segformer": upstream.segformer,
    "pvt": upstream.pvt,
    "pvt_v2": upstream.pvt_v2,
    "glpn": upstream.glpn,
}


@pytest.fixture(autouse=True)
def kernels():
    with ck.use_backend("triton", "composed", "reference"), torch.no_grad():
        yield
    backends.forget()


@pytest.fixture
def plans(monkeypatch):
    """Lists the plan, or None, of each recording."""
    made, recorded = [], planned_launches.recorded

    def noted(*args):
        out, plan = recorded(*args)
        made.append(plan)
        return out, plan

    monkeypatch.setattr(planned_launches, "recorded", noted)
    return made


def modules_run(monkeypatch):
    """Counts the blocks that run operator by operator."""
    count, normalize = [], fused.pass_on_and_normalize

    def counted(*args):
        count.append(1)
        return normalize(*args)

    monkeypatch.setattr(fused, "pass_on_and_normalize", counted)
    return count


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_blocks_give_the_same_bits(family, plans, monkeypatch):
    """The first call runs as it is, the second records, later ones replay, for other numbers too."""
    model = ck.accelerate(FAMILIES[family]().eval(), freeze=False)
    size = 70 if family == "pvt" else 32
    x = upstream.images(1, size, size)
    expected = upstream.logits(model(x))
    model(x)
    assert plans
    assert all(plan is not None for plan in plans)
    recorded, ran = len(plans), modules_run(monkeypatch)
    assert torch.equal(upstream.logits(model(x)), expected)
    assert (ran, len(plans)) == ([], recorded)
    other = upstream.logits(model(2 * x))
    backends.forget()  # and with them all recordings
    assert torch.equal(upstream.logits(model(2 * x)), other)
    assert ran


def recorded_segformer():
    model = ck.accelerate(upstream.segformer().eval(), freeze=False)
    for _ in range(3):
        model(upstream.images(1, 32, 32))
    return model


def layer_of(model):
    return next(each for each in model.modules() if type(each).__name__ == "SegformerLayer")


def weights_of(model):
    return layer_of(model).mlp.fc1.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda model: weights_of(model).mul_(2),
        lambda model: setattr(weights_of(model), "data", 2 * weights_of(model)),
        lambda model: [setattr(m, "eps", 0.5) for m in model.modules() if hasattr(m, "eps")],
        lambda model: model.load_state_dict({k: v + v for k, v in model.state_dict().items()}),
        lambda model: model.to(torch.bfloat16),
        lambda model: vars(layer_of(model).layernorm_after).update(bias=torch.ones(16)),
    ],
    ids=["in place", "data", "settings", "load_state_dict", "dtype", "shadowed"],
)
def test_changes_are_noticed(change):
    model = recorded_segformer()
    plain = ck.restore(copy.deepcopy(model))
    before = upstream.logits(model(upstream.images(1, 32, 32)))
    for each in (model, plain):
        change(each)
    ck.accelerate(plain, freeze=False)
    x = upstream.images(1, 32, 32).to(next(model.parameters()).dtype)
    for _ in range(4):
        out = upstream.logits(model(x))
        backends_before, backends.plans = backends.plans, {}
        expected = upstream.logits(plain(x))
        backends.plans = backends_before
        assert torch.equal(out, expected)
    assert not torch.equal(out.float(), before.float())


def test_hooks_training_and_gradients_run_the_modules(monkeypatch):
    model = recorded_segformer()
    x, ran = upstream.images(1, 32, 32), modules_run(monkeypatch)
    seen = []
    layer = next(each for each in model.modules() if type(each).__name__ == "SegformerLayer").mlp.fc1
    handle = layer.register_forward_hook(lambda *args: seen.append(1))
    for _ in range(3):
        model(x)
    assert len(seen) == 3
    assert ran
    handle.remove()
    with torch.enable_grad():
        upstream.logits(model(x)).sum().backward()
    assert layer.weight.grad is not None


def test_blocks_alike_share_a_plan(plans):
    """A plan keeps no tensor, so that blocks of the same shapes and settings need one recording."""
    models = [ck.accelerate(upstream.segformer().eval(), freeze=False) for _ in range(2)]
    for model in models:
        for _ in range(2):
            model(upstream.images(1, 32, 32))
    blocks = [each for each in models[0].modules() if type(each).__name__ == "SegformerLayer"]
    assert 0 < len(plans) < len(blocks)
