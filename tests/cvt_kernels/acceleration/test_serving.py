"""accelerate() without settings: stages and layers as one in evaluation on a CPU, the blocks elsewhere."""

import copy
import pickle

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.acceleration import freezing
from cvt_kernels.ops import packing
from tests.upstream import (
    glpn,
    huggingface,
    images,
    logits,
    microsoft,
    ours,
    pvt,
    pvt_v2,
    relative,
    segformer,
)

#: Each with its stages or layers.
MODELS = {huggingface: 3, microsoft: 3, ours: 3, segformer: 3, pvt: 3, pvt_v2: 3, glpn: 4}
every_model = pytest.mark.parametrize("make", MODELS)


@pytest.fixture
def asked(monkeypatch):
    """Lists the calls of stages and layers that are served as one."""
    calls, serve = [], freezing.tokens_served

    def tokens_served(*args):
        out = serve(*args)
        calls.extend([] if out is None else [args])
        return out

    monkeypatch.setattr(freezing, "tokens_served", tokens_served)
    return calls


def images_of(make):
    return images(2, *{pvt: (70, 70), glpn: (32, 64)}.get(make, (32, 48)))


def accelerated(make, **settings):
    return ck.accelerate(make().eval(), **settings)


def twin(model, **settings):
    """Returns an accelerated copy of a model with other settings."""
    return ck.accelerate(ck.restore(copy.deepcopy(model)), **settings)


@every_model
def test_in_evaluation_it_is_a_frozen_model(make, asked):
    model, x = accelerated(make), images_of(make)
    with torch.no_grad():
        out = logits(model(x))
        assert len(asked) == MODELS[make]
        assert torch.equal(out, logits(twin(model, freeze=True)(x)))
        assert relative(out, logits(twin(model, freeze=False)(x))) < 1e-4


@every_model
def test_elsewhere_it_is_a_model_of_fused_blocks(make, asked):
    model, x = accelerated(make), images_of(make)
    live = twin(model, freeze=False)
    assert torch.equal(logits(model(x)), logits(live(x)))  # with gradients
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model(x)), logits(live(x)))
    for each in (model, live):
        each.train()
        torch.manual_seed(3)
    out, expected = logits(model(x)), logits(live(x))
    if torch.equal(out, expected):  # where nothing is dropped
        out.sum().backward()
        expected.sum().backward()
        for mine, other in zip(model.parameters(), live.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, other.grad)
    assert asked == []


@every_model
def test_it_trains_and_serves_in_turns(make, asked):
    model, x = accelerated(make), images_of(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for turn in range(3):
        with torch.no_grad():
            out = logits(model.eval()(x))
            assert len(asked) == (turn + 1) * MODELS[make]
            torch.testing.assert_close(out, logits(ck.restore(copy.deepcopy(model))(x)), rtol=1e-3, atol=1e-4)
        logits(model.train()(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@every_model
def test_hooks_and_patches_within_are_called(make, asked):
    model, x, seen = accelerated(make), images_of(make), []
    linear = next(
        m
        for _, stage, _ in freezing.find_stages(model)
        for m in stage.modules()
        if isinstance(m, torch.nn.Linear)
    )
    handle = linear.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(x)
        assert (len(seen), len(asked)) == (1, MODELS[make] - 1)
        handle.remove()
        model(x)
        assert (len(seen), len(asked)) == (1, 2 * MODELS[make] - 1)


@every_model
def test_it_is_copied_pickled_restored_and_accelerated_again(make, asked):
    model, x = accelerated(make), images_of(make)
    own = ck.restore(copy.deepcopy(model))
    others = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), ck.accelerate(model)
    with torch.no_grad():
        expected = logits(model(x))
        for other in others:
            asked.clear()
            assert torch.equal(logits(other(x)), expected)
            assert len(asked) == MODELS[make]
            assert other.state_dict().keys() == own.state_dict().keys()
        asked.clear()
        assert [type(m) for m in ck.restore(model).modules()] == [type(m) for m in make().modules()]
        model(x)
    assert asked == []


def test_freeze_true_refuses_to_train_what_was_accelerated_before():
    model = ck.accelerate(accelerated(huggingface), freeze=True).train()
    with pytest.raises(RuntimeError, match="is frozen for serving and cannot train"):
        model(images())


@pytest.mark.parametrize("freeze", [0, "yes", 1.0])
def test_another_setting_is_refused(freeze):
    with pytest.raises(TypeError, match="freeze: got"):
        ck.accelerate(huggingface(), freeze=freeze)


def test_coverage_has_a_row_for_a_stage_that_is_served_as_one():
    model = accelerated(huggingface)
    paths = [f"cvt.encoder.stages.{i}" for i in range(3)]
    rows = {row.path: row for row in ck.coverage(model, images())}
    assert all("transformer_block" in rows[path].backends for path in paths)
    assert not {row.path for row in ck.coverage(model.train())} & set(paths)
    assert not {row.path for row in ck.coverage(twin(model.eval(), freeze=False))} & set(paths)


@pytest.mark.slow
def test_torch_compile_traces_the_blocks():
    model, graphs = accelerated(microsoft), []

    def noting(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=noting)
    with torch.no_grad():
        assert relative(logits(compiled(images())), logits(model(images()))) < 1e-5
    assert not any("frozen" in name for names in graphs for name in names)
    torch.compiler.reset()


def test_nothing_is_packed_before_the_first_call_in_evaluation():
    ck.release_memory()
    model = accelerated(microsoft)
    logits(model(images()))
    assert packing.packed_bytes() == 0
    with torch.no_grad(), ck.use_backend("onednn", "native", "reference"):
        model(images())
    assert packing.packed_bytes() > 0


def test_verify_compares_the_stages_of_a_model_that_was_not_accelerated_yet():
    model = huggingface()
    report = ck.verify(model, images(), rounds=1)
    assert report.passed, str(report)
    assert "cvt.encoder.stages.0" in {layer.path for layer in report.layers}
    assert not any(freezing.is_serving(module) for module in model.modules())
