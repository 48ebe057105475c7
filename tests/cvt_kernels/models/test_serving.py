"""accelerate() without settings: what is examined, packed, traced and kept, and changes on a GPU."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import graphs, machine
from cvt_kernels.models import served as served_module
from cvt_kernels.ops import weight_cache
from tests.cvt_kernels.models.served import MODELS, inputs, outermost_of
from tests.upstream import huggingface, images, logits, microsoft, ours, pvt, pvt_v2, relative, segformer

every_model = pytest.mark.parametrize("make", MODELS)


def accelerated(make, **settings):
    return ck.accelerate(make().eval(), **settings)


def twin(model, **settings):
    """Returns an accelerated copy of a model with other settings."""
    return ck.accelerate(ck.restore(copy.deepcopy(model)), **settings)


@every_model
def test_it_trains_and_serves_in_turns(make, served):
    model, x = accelerated(make), inputs(make)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for turn in range(3):
        with torch.no_grad():
            out = logits(model.eval()(x))
            assert len(served) == (turn + 1) * len(outermost_of(model))
            torch.testing.assert_close(out, logits(ck.restore(copy.deepcopy(model))(x)), rtol=1e-3, atol=1e-4)
        logits(model.train()(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("freeze", [False, None, True])
@pytest.mark.parametrize("make", [huggingface, microsoft, ours, segformer])
def test_a_model_that_its_parts_and_hooks_refer_to_is_collected(make, freeze):
    model = accelerated(make, freeze=freeze)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    linears[0].register_forward_hook(lambda *args, model=model: None)
    for linear in linears[1:]:
        linear.whole = [model]
    with torch.no_grad():
        model(images())
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, linears, linear
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


@pytest.mark.parametrize("freeze", [False, None, True])
@every_model
def test_nothing_waits_for_the_garbage_collector(make, freeze):
    settings = {} if make in (microsoft, ours) else {"output_hidden_states": True}

    def made_and_dropped():
        """Returns references to the parameters and results of a model that is gone."""
        model = accelerated(make, freeze=freeze)
        if not freeze:
            logits(model.train()(inputs(make))).sum().backward()
        with torch.no_grad():
            outputs = model.eval()(inputs(make), **settings)
        return [weakref.ref(each) for each in (*model.parameters(), *pytree.tree_leaves(outputs))]

    made_and_dropped()  # what is imported or compiled for it leaves garbage
    gc.collect()
    gc.disable()
    try:
        assert not any(each() is not None for each in made_and_dropped())
    finally:
        gc.enable()


def test_coverage_has_a_row_for_a_stage_that_is_served_as_one():
    model = accelerated(huggingface)
    paths = [f"cvt.encoder.stages.{i}" for i in range(3)]
    rows = {row.path: row for row in ck.coverage(model, images())}
    assert all("transformer_block" in rows[path].backends for path in paths)
    assert not {row.path for row in ck.coverage(model.train())} & set(paths)
    assert not {row.path for row in ck.coverage(twin(model.eval(), freeze=False))} & set(paths)


def test_nothing_is_packed_before_the_first_call_in_evaluation():
    ck.release_memory()
    model = accelerated(microsoft)
    logits(model(images()))
    assert not weight_cache._known
    with torch.no_grad(), ck.use_backend("cpu", "reference"):
        model(images())
    assert weight_cache._known


# Where a stage cannot be served -----------------------------------------------------------------------------


def test_why_a_stage_is_not_served_is_found_once_until_a_change(monkeypatch, served):
    model, x = accelerated(ours), inputs(ours)
    stage = model.stage1
    handle = stage.blocks[0].norm1.register_forward_hook(lambda *args: None)
    own, examined = served_module.why_not_freezable, []
    monkeypatch.setattr(served_module, "why_not_freezable", lambda s, e: (examined.append(s), own(s, e))[1])
    with torch.no_grad():
        for _ in range(2):  # its blocks, which run alone, are examined in the first call
            model(x)
        assert stage in examined
        examined.clear()
        for _ in range(3):
            model(x)
        assert examined == []
        next(stage.parameters()).mul_(2)
        for _ in range(2):
            model(x)
        assert examined == [stage]
        ck.coverage(model)  # whose reasons are those of now
        assert examined.count(stage) == 2
        handle.remove()
        served.clear()
        model(x)
        assert len(served) == len(outermost_of(model))


# On a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
@torch.no_grad()
def test_only_frozen_models_are_served_as_one_where_there_is_no_cpu(make, served):
    """Tensors without memory stand for a GPU's."""
    model = accelerated(make).to("meta")
    logits(model(inputs(make).to("meta")))
    assert not served
    ck.accelerate(model, freeze=True)
    logits(model(inputs(make).to("meta")))
    assert [args[0] for args in served] == outermost_of(model)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("freeze", [True, None])
@pytest.mark.parametrize("make", [segformer, pvt, pvt_v2])
@torch.no_grad()
def test_pyramids_on_a_gpu(make, freeze, graphs):
    """Whatever serves them, the logits are the model's own, after a change of its weights too."""
    own = make().eval().cuda()
    served = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    served = ck.graphed(served) if graphs else served
    for _ in range(3):
        x = torch.randn_like(inputs(make), device="cuda")
        for _ in range(3):
            expected, actual = (logits(model(x)) for model in (own, served))
            assert relative(actual, expected) < 1e-3
        for mine, theirs in zip(own.parameters(), served.parameters(), strict=True):
            mine.mul_(0.9)
            theirs.mul_(0.9)


@pytest.mark.gpu
@pytest.mark.usefixtures("_without_tf32")
@pytest.mark.parametrize("freeze", [None, True])
@torch.no_grad()
def test_gpu_changes_are_noticed(freeze):
    """Changes of a model that is not frozen, those that PyTorch does not count too."""
    plain = huggingface().eval().cuda()
    model = ck.accelerate(copy.deepcopy(plain), freeze=freeze)
    x = images(2).cuda()

    def compare():
        torch.testing.assert_close(logits(model(x)), logits(plain(x)), rtol=1e-3, atol=1e-3)

    with ck.use_backend("triton", "cuda", "sdpa", "composed", "reference"):
        for _ in range(2):  # then graphed
            compare()
            for each in (model, plain):
                each.cvt.encoder.stages[2].layers[0].output.dense.bias.add_(0.5)
            compare()
            for each in (model, plain):
                each.cvt.encoder.stages[1].layers[0].attention.output.dense.bias.data.mul_(2)
            if freeze:
                ck.refresh(model)
            for _ in range(3):
                compare()
            ck.graphed(model)
        assert graphs.why_not_graphed(model, x) is None


@pytest.mark.gpu
@pytest.mark.usefixtures("_without_tf32")
def test_gpu_a_graph_of_the_users_reads_the_weights_where_they_lie():
    model = accelerated(huggingface).cuda()
    x, graph = images(2).cuda(), torch.cuda.CUDAGraph()
    with ck.use_backend("triton", "cuda", "sdpa", "composed", "reference"), torch.no_grad():
        with machine.rehearsed_capture():
            model(x)
        with torch.cuda.graph(graph):
            out = logits(model(x))
        model.cvt.encoder.stages[2].layers[0].output.dense.bias.add_(0.5)
        graph.replay()
        expected = logits(ck.restore(model)(x))
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
