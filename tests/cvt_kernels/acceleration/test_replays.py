"""Recordings of live blocks, stages and encoders: they compute the same, and every change is noticed."""

import contextlib
import copy
import gc
import itertools
import pickle
import statistics
import sys
import threading
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.acceleration import fused, recording
from cvt_kernels.ops import launch_plans
from cvt_kernels.ops.prepared_launches import Prepared
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
    made, recorded = [], launch_plans.recorded

    def noted(*args):
        out, plan = recorded(*args)
        made.append(plan)
        return out, plan

    monkeypatch.setattr(launch_plans, "recorded", noted)
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
    known = recordings_of(model)
    assert {name for name, _ in known} == RECORDED[family]
    assert all(len(each.replays._known) == 1 for _, each in known)
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


def taps_of(model):
    return layer_of(model).mlp.dwconv.dwconv.weight


@pytest.mark.parametrize(
    "change",
    [
        lambda model: weights_of(model).mul_(2),
        lambda model: setattr(weights_of(model), "data", 2 * weights_of(model)),
        lambda model: setattr(taps_of(model), "data", 2 * taps_of(model).mT.contiguous().mT),
        lambda model: [setattr(m, "eps", 0.5) for m in model.modules() if hasattr(m, "eps")],
        lambda model: model.load_state_dict({k: v + v for k, v in model.state_dict().items()}),
        lambda model: model.to(torch.bfloat16),
        lambda model: vars(layer_of(model).layernorm_after).update(bias=torch.ones(16)),
    ],
    ids=["in place", "data", "strides", "settings", "load_state_dict", "dtype", "shadowed"],
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
        backends_before, backends.dispatch_cache = backends.dispatch_cache, {}
        expected = upstream.logits(plain(x))
        backends.dispatch_cache = backends_before
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


# Stages and encoders --------------------------------------------------------------------------------------

RECORDED = {
    "cvt": {"CvtStage"},
    "segformer": {"SegformerStage"},
    "pvt": {"PvtEncoder"},
    "pvt_v2": {"PvtV2Encoder"},
    "glpn": {"GLPNEncoder", "GLPNDecoder"},
}


@pytest.fixture
def reference():
    """PyTorch's operators in the place of kernels, which Triton's interpreter computes slowly."""
    with ck.use_backend("reference"):
        yield


def recorded_model(family):
    """Returns a model that has been recorded, and its images."""
    model = ck.accelerate(FAMILIES[family]().eval(), freeze=False)
    size = 70 if family == "pvt" else 32
    x = upstream.images(1, size, size)
    for _ in range(3):
        model(x)
    return model, x


def recordings_of(model):
    """Returns class name → what is known of each module that may be recorded as a whole."""
    found = [(type(each).__name__, vars(each).get(recording._Recorded.attribute)) for each in model.modules()]
    return [(name, known) for name, known in found if known is not None]


@pytest.mark.parametrize("family", ["segformer", "glpn"])
def test_results_are_new_tensors(family, reference):
    model, x = recorded_model(family)
    settings = {"output_hidden_states": True}
    for _ in range(3):
        first = model(x, **settings)
    expected = copy.deepcopy(first)
    second = model(x, **settings)
    for a, b in zip(all_tensors(first), all_tensors(second), strict=True):
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
        b.fill_(torch.nan)
    third = model(x, **settings)
    assert type(third) is type(expected)
    for a, b, c in zip(*map(all_tensors, (first, third, expected)), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


def all_tensors(out):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def module_named(model, *names):
    return next(each for each in model.modules() if type(each).__name__ in names)


def embedding_of(model):
    kinds = ("CvtConvEmbeddings", "PvtPatchEmbeddings", "PvtV2OverlapPatchEmbeddings")
    return module_named(model, "SegformerOverlapPatchEmbeddings", "GLPNOverlapPatchEmbeddings", *kinds)


def conv_of(model):
    return next(each for each in embedding_of(model).children() if type(each) is torch.nn.Conv2d)


def last_norm_of(model):
    return [each for each in model.modules() if type(each) is torch.nn.LayerNorm][-1]


def tanh_of(forward):
    return lambda x: forward(x).tanh()


STAGE_CHANGES = {
    "embedding in place": lambda model: conv_of(model).weight.mul_(2),
    "embedding replaced": lambda model: setattr(
        conv_of(model), "weight", torch.nn.Parameter(2 * conv_of(model).weight)
    ),
    "embedding shadowed": lambda model: vars(conv_of(model)).update(bias=3 - 4 * conv_of(model).bias),
    "another layer": lambda model: setattr(
        embedding_of(model), type_name(model), torch.nn.Sequential(conv_of(model), torch.nn.Tanh())
    ),
    "hook": lambda model: conv_of(model).register_forward_hook(lambda module, args, out: out.tanh()),
    "hook before": lambda model: conv_of(model).register_forward_pre_hook(lambda module, args: 2 * args[0]),
    "norm": lambda model: setattr(last_norm_of(model), "eps", 0.5),
    "memory": lambda model: setattr(conv_of(model).weight, "data", 2 * conv_of(model).weight),
    "patched": lambda model: setattr(conv_of(model), "forward", tanh_of(conv_of(model).forward)),
}  # fmt: skip


def type_name(model):
    return next(name for name, each in embedding_of(model).named_children() if each is conv_of(model))


@pytest.mark.parametrize(("change", "family"), [*zip(STAGE_CHANGES, itertools.cycle(FAMILIES), strict=False)])
def test_changes_within_a_stage_are_noticed(change, family, reference):
    model, x = recorded_model(family)
    before = upstream.logits(model(x))
    plain = ck.restore(copy.deepcopy(model))
    for each in (model, plain):
        STAGE_CHANGES[change](each)
    expected = upstream.logits(plain(x))
    assert not torch.allclose(before, expected, rtol=1e-3, atol=1e-3 * expected.abs().max())
    for _ in range(4):
        torch.testing.assert_close(
            upstream.logits(model(x)), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
        )


@pytest.mark.parametrize(
    ("setting", "family"),
    [*zip(["training", "autocast", "gradients", "global hook", "a mode"], FAMILIES, strict=True)],
)
def test_calls_that_run_the_modules(setting, family, reference, monkeypatch):
    model, x = recorded_model(family)
    ran = modules_run(monkeypatch)
    model(x)
    assert ran == []
    with contextlib.ExitStack() as stack:
        if setting == "training":
            layer = module_named(
                model, "CvtLayer", "SegformerLayer", "PvtLayer", "PvtV2BlockLayer", "GLPNLayer"
            )
            next(each for each in layer.modules() if type(each) is torch.nn.Dropout).train()
        elif setting == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif setting == "gradients":
            stack.enter_context(torch.enable_grad())
        elif setting == "global hook":
            handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
            stack.callback(handle.remove)
        else:
            stack.enter_context(FlopCounterMode(display=False))
        calls = []
        run = launch_plans.recorded
        monkeypatch.setattr(launch_plans, "recorded", lambda *args: calls.append(1) or run(*args))
        model(x)
        model(x)
    assert calls == []
    assert ran or setting in ("global hook", "a mode")  # of flops has one too: upstream's forwards run


def test_another_choice_of_backends_is_another_recording(plans):
    model, x = recorded_model("segformer")
    before = len(plans)
    with ck.use_backend("reference"):
        for _ in range(2):
            model(x)
    assert len(plans) > before
    with ck.use_backend("cpu"), pytest.raises(ck.BackendUnavailable):  # which serves no float64
        model.double()(x.double())


def test_a_recorded_model_is_copied_without_its_recordings(reference):
    model, x = recorded_model("glpn")
    expected = upstream.logits(model(x))
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(3):
            assert torch.equal(upstream.logits(each(x)), expected)
    ck.restore(model)
    assert recordings_of(model) == []


def test_threads_replay_at_once(reference):
    """Each thread has its own tensors, so that calls at once do not meet."""
    model, x = recorded_model("pvt_v2")
    inputs = [x * factor for factor in (1.0, 0.5, 2.0)]
    expected = [upstream.logits(model(each)) for each in inputs]
    wrong = []

    def call(image, result):
        with ck.use_backend("reference"), torch.no_grad():
            for _ in range(3):
                if not torch.equal(upstream.logits(model(image)), result):
                    wrong.append(image)

    threads = [threading.Thread(target=call, args=each) for each in zip(inputs, expected, strict=True)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


# The host -------------------------------------------------------------------------------------------------

_FOUR_STAGES = {
    "num_encoder_blocks": 4, "depths": [2, 2, 2, 2], "hidden_sizes": [8, 16, 16, 24],
    "num_attention_heads": [1, 2, 2, 3], "patch_sizes": [7, 3, 3, 3], "strides": [4, 2, 2, 2],
    "mlp_ratios": [2] * 4, "sr_ratios": [4, 2, 1, 1],
}  # fmt: skip
_OF_PVT = {"patch_sizes": [4, 2, 2, 2], "sequence_reduction_ratios": [4, 2, 1, 1]}
#: Models of the depths that are published, with few channels.
DEEP = {
    "cvt": lambda: upstream.huggingface(depth=[1, 2, 10]),
    "segformer": lambda: upstream.segformer(**_FOUR_STAGES),
    "pvt": lambda: upstream.pvt(**_FOUR_STAGES | _OF_PVT),
    "pvt_v2": lambda: upstream.pvt_v2(**_FOUR_STAGES),
    "glpn": lambda: upstream.glpn(**_FOUR_STAGES),
}


def calls_of(function):
    """Returns how many functions of Python and of C are called."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def seconds_of(*functions, rounds=25):
    """Returns the least processor time of each function, called in turns."""
    times = [[] for _ in functions]
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for function, found in zip(functions, times, strict=True):
                start = time.process_time_ns()
                function()
                found.append(time.process_time_ns() - start)
    finally:
        gc.enable()
    return [statistics.mean(sorted(found)[:3]) for found in times]


@pytest.mark.parametrize("family", DEEP)
def test_the_host_needs_at_most_three_fifths_of_upstreams(family, monkeypatch):
    """Over a driver that launches nothing, with operators so small that the host is all that counts."""
    from triton.runtime import interpreter

    compiled, started = object(), Prepared(lambda *args: None, None)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: compiled)
    monkeypatch.setattr(launch_plans, "prepared", lambda *args: started)
    own = DEEP[family]().eval()
    live = ck.accelerate(copy.deepcopy(own), freeze=False)
    size = 70 if family == "pvt" else 64
    x = upstream.images(1, size, size)
    with torch.inference_mode():
        for _ in range(4):
            own(x)
            live(x)
        assert calls_of(lambda: live(x)) <= 0.6 * calls_of(lambda: own(x))
        theirs, ours = seconds_of(lambda: own(x), lambda: live(x))
    assert ours <= 0.6 * theirs
