"""Recordings of blocks in training: the bits of the operators' own steps, and who must not get one."""

import contextlib
import copy
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cvt.model
import cvt_kernels as ck
from cvt_kernels import backends, modes
from cvt_kernels.acceleration import fused, matching
from cvt_kernels.ops import launch_plans, training_replays
from cvt_kernels.ops.prepared_launches import Prepared
from cvt_kernels.ops.training_replays import TrainingReplays
from tests import upstream
from tests.cvt_kernels.acceleration.test_replays import DEEP, FAMILIES, seconds_of

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def kernels():
    with ck.use_backend("triton", "cpu", "composed", "reference"):
        yield
    backends.forget()


@pytest.fixture
def plans(monkeypatch):
    """Lists the plan, or None, of each recording."""
    made, recorded = [], launch_plans.recorded_with_gradients

    def noted(*args):
        out, plan = recorded(*args)
        made.append(plan)
        return out, plan

    monkeypatch.setattr(launch_plans, "recorded_with_gradients", noted)
    return made


@pytest.fixture
def replayed(monkeypatch):
    """Counts the calls that a recording serves."""
    count, apply = [], training_replays._Replayed.apply

    def counted(*args):
        count.append(1)
        return apply(*args)

    monkeypatch.setattr(training_replays._Replayed, "apply", counted)
    return count


LAYERS = "CvtLayer", "SegformerLayer", "PvtLayer", "PvtV2BlockLayer", "GLPNLayer", "Block"


class OneBlock(nn.Module):
    """The last block of a model, or module of another name, called as the model does."""

    def __init__(self, model, size, names=LAYERS, index=-1):
        super().__init__()
        block = [each for each in model.modules() if type(each).__name__ in names][index]
        calls = []
        handle = block.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        with torch.no_grad(), ck.use_backend("reference"):
            model.eval()(upstream.images(2, size, size))
        handle.remove()
        ((x, *self.args), self.kwargs), *_ = calls
        self.register_buffer("x", x)
        self.block = block

    def forward(self, factor=1.0):
        self.leaf = self.x.detach().requires_grad_()
        out = self.block(factor * self.leaf, *self.args, **self.kwargs)
        return out[0] if isinstance(out, tuple) else out


def trained(family="cvt", make=None, **config):
    model = (make or {**FAMILIES, "ours": upstream.ours}[family])(**config)
    return ck.accelerate(OneBlock(model, 70 if family == "pvt" else 32).train(), freeze=False)


def trained_stage(**config):
    """Returns a stage of two blocks."""
    model = OneBlock(upstream.huggingface(**config), 32, ("CvtStage",), index=1)
    return ck.accelerate(model.train(), freeze=False)


def run(model, count, seed=0):
    """Runs steps of SGD; returns all results, gradients and buffers."""
    torch.manual_seed(seed)
    found = []
    for i in range(count):
        out = model(1.0 + i)
        out.float().sin().sum().backward()
        found += [out.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
        found.append(model.leaf.grad)
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each.sub_(0.01 * each.grad)
                each.grad = None
    return [each if each is None else each.detach().clone() for each in found]


def run_without_recordings(model, *args):
    with without_recordings():
        return run(model, *args)


@contextlib.contextmanager
def without_recordings():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingReplays, "_may_train", lambda *args: False)
        patch.setattr(training_replays, "state_around", lambda: None)
        patch.setattr(matching, "state_around", lambda: None)
        yield


def assert_same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("family", [*FAMILIES, "ours"])
def test_steps_have_the_same_bits(family, plans, replayed):
    """The first step runs as it is, the second records, later ones replay, with other weights and numbers."""
    model = trained(family)
    plain = copy.deepcopy(model)
    ours = run(model, 3)
    assert [plan is not None for plan in plans] == [True]
    assert len(replayed) == 1
    assert_same(ours, run_without_recordings(plain, 3))
    assert len(replayed) == 1


@pytest.mark.parametrize("family", [*FAMILIES, "ours"])
def test_sums_of_a_block_are_one_launch(family, plans, monkeypatch):
    """Besides, the projection needs what it sums for BatchNorm before it goes on."""
    noted, start = [], launch_plans._Writer._start

    def noting(self, launch):
        if self._otherwise is None:  # a recording, rather than a part that an operator plans
            noted.append(launch)
        return start(self, launch)

    monkeypatch.setattr(launch_plans._Writer, "_start", noting)
    run(trained(family), 2)
    assert [plan is not None for plan in plans] == [True]
    launches = [each.arguments for each in noted if each.kernel.__name__ == "_sum_regions_kernel"]
    assert len(launches) == (2 if family in ("cvt", "ours") else 1)
    assert sum(len(each["sum_ptrs"]) for each in launches) >= 5


@pytest.mark.parametrize("make", [upstream.huggingface, upstream.microsoft, upstream.ours])
def test_stochastic_depth_draws_the_same_numbers(make, plans, replayed):
    model = trained(make=make, drop_path=0.4)
    plain = copy.deepcopy(model)
    assert_same(run(model, 3), run_without_recordings(plain, 3))
    assert replayed
    assert [plan.draws for plan in plans] == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*FAMILIES, "ours"])
def test_stochastic_depth_draws_what_its_module_draws(family, dtype):
    if family == "ours":
        module = cvt.model.DropPath(0.3)
    else:
        modules = FAMILIES[family](drop_path=0.3).modules()
        module = next(m for m in modules if type(m).__name__.endswith("DropPath"))
        module.drop_prob = 0.3
    x = torch.zeros(4096, 3, 2, dtype=dtype)
    for drops_sum in (False, True):
        torch.manual_seed(0)
        ours = fused._drawn_factors(module.train(), 0.3, x, dtype, drops_sum)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        kept = module(torch.ones_like(x))[:, 0, 0] != 0
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(ours, kept.float() * (1 / 0.7))
        assert 0 < kept.sum() < len(kept)


def test_autocast(replayed, monkeypatch):
    """Weights of a block are cast together, which is so on a GPU alone."""
    monkeypatch.setattr(modes, "dtype_for_layers", modes.autocast_dtype)
    model = trained()
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(model, 3)
        assert replayed
        assert_same(ours, run_without_recordings(plain, 3))

    replayed.clear()
    assert_same(run(model, 1), run_without_recordings(plain, 1))
    assert not replayed


def drop(model):
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.5


def freeze(model):
    for each in model.block.intermediate.parameters():
        each.requires_grad_(False)


def freeze_statistics(model):
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d):
            each.eval()


def watch(model):
    model.block.intermediate.dense.register_forward_hook(lambda *args: None)


@pytest.fixture
def recorded():
    model = trained()
    run(model, 2)
    return model


@pytest.mark.parametrize("change", [freeze, freeze_statistics, drop, watch, nn.Module.double])
def test_changes_are_noticed(change, recorded, replayed):
    plain = copy.deepcopy(recorded)
    for each in (recorded, plain):
        change(each)
    assert_same(run(recorded, 1), run_without_recordings(plain, 1))
    assert not replayed


def test_dropout_has_no_recording(replayed):
    model = trained(drop=0.5)
    plain = copy.deepcopy(model)
    assert_same(run(model, 3), run_without_recordings(plain, 3))
    assert not replayed


def gradients_of(model, differentiate):
    model.zero_grad()
    differentiate(model)
    return [model.leaf.grad, *(each.grad for each in model.parameters())]


def twice(model):
    """Uses the block twice before a backward."""
    (model() * model(2.0)).sum().backward()


def retain(model):
    loss = model().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_strided_gradients(model):
    """Gives the block gradients that are expanded or begin anywhere."""
    out = model()
    out.sum().backward(retain_graph=True)
    weights = torch.randn(out.numel() + 1, generator=torch.Generator().manual_seed(0))[1:]
    out.backward(weights.view(out.shape))


def checkpointed(model):
    checkpoint(model, 2.0, use_reentrant=False).sum().backward()


def in_a_thread(model):
    def differentiate():
        with ck.use_backend("triton", "cpu", "composed", "reference"):
            model().sum().backward()

    thread = threading.Thread(target=differentiate)
    thread.start()
    thread.join()


@pytest.mark.parametrize("use", [twice, retain, of_strided_gradients, checkpointed, in_a_thread])
def test_uses_of_a_recorded_block(use, recorded, replayed):
    plain = copy.deepcopy(recorded)
    ours = gradients_of(recorded, use)
    assert bool(replayed) == (use is not checkpointed)
    with without_recordings():
        assert_same(ours, gradients_of(plain, use))


def test_hooks_of_parameters_see_no_gradient_of_a_recording(plans):
    model, seen = trained(), []
    for each in model.parameters():
        each.register_hook(lambda gradient: seen.append(1))
    run(model, 1)
    count = len(seen)
    run(model, 1)
    assert len(seen) == 2 * count
    assert not plans


def test_changed_tensors_and_second_derivatives_raise(recorded, replayed):
    loss = recorded().sum()
    with torch.no_grad():
        recorded.block.layernorm_before.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (gradient,) = torch.autograd.grad(recorded().sin().sum(), recorded.leaf, create_graph=True)
    assert replayed
    with pytest.raises(RuntimeError, match="use_backend"):
        gradient.sum().backward()


def test_statistics_count_as_changed(recorded):
    """Whoever reads the buffers of a BatchNorm notices an update, as of one by PyTorch."""
    buffers = [each for name, each in recorded.named_buffers() if "running" in name]
    versions = [each._version for each in buffers]
    recorded()
    assert all(each._version > version for each, version in zip(buffers, versions, strict=True))


def test_blocks_alike_share_a_plan(recorded, plans, replayed):
    other = trained()
    run(other, 2)
    assert len(replayed) == 1
    assert not plans


def test_hooks_on_launches_run_the_operators(replayed):
    model, hook = trained(), pytest.importorskip("triton.knobs").runtime.launch_enter_hook
    run(model, 3)
    assert replayed
    replayed.clear()
    hook.add(print)
    try:
        run(model, 2)
        assert not replayed
    finally:
        hook.remove(print)
    run(model, 1)
    assert replayed


# Stages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Counts the blocks and embeddings that ask by themselves whether anything has changed."""
    count, known_of = [], matching.known_of

    def counted(module, kind):
        count.append(module)
        return known_of(module, kind)

    monkeypatch.setattr(matching, "known_of", counted)
    return count


def test_a_stage_asks_for_its_blocks(asked, replayed):
    model = trained_stage(drop_path=0.4)
    plain = copy.deepcopy(model)
    depth = len(model.block.layers)
    ours = run(model, 3)
    asked.clear(), replayed.clear()
    ours += run(model, 1)
    assert (asked, len(replayed)) == ([], depth)
    assert_same(ours, run_without_recordings(plain, 3) + run_without_recordings(plain, 1))


@contextlib.contextmanager
def frozen_weight(layers):
    weight = layers[0].intermediate.dense.weight.requires_grad_(False)
    yield
    weight.requires_grad_(True)


@contextlib.contextmanager
def other_weight(layers):
    layer = layers[1].output.dense
    before, layer.weight = layer.weight, nn.Parameter(2 * layer.weight.detach())
    yield
    layer.weight = before


@contextlib.contextmanager
def other_memory(layers):
    weight = layers[1].output.dense.weight
    before, weight.data = weight.data, 2 * weight.data
    yield
    weight.data = before


@contextlib.contextmanager
def other_rate(layers):
    before, layers[1].drop_path.drop_prob = layers[1].drop_path.drop_prob, 0.9
    yield
    layers[1].drop_path.drop_prob = before


@contextlib.contextmanager
def dropout(layers):
    layers[1].output.dropout.p = 0.5
    yield
    layers[1].output.dropout.p = 0.0


@contextlib.contextmanager
def evaluation(layers):
    layers[1].eval()
    yield
    layers[1].train()


@contextlib.contextmanager
def hook(layers):
    handle = layers[1].output.dense.register_forward_hook(lambda module, args, out: 2 * out)
    yield
    handle.remove()


@contextlib.contextmanager
def swapped(layers):
    layers[0], layers[1] = layers[1], layers[0]
    yield
    layers[0], layers[1] = layers[1], layers[0]


@contextlib.contextmanager
def saved_on_cpu(layers):
    with torch.autograd.graph.save_on_cpu():
        yield


@contextlib.contextmanager
def autocast(layers):
    with torch.autocast("cpu", torch.bfloat16):
        yield


CHANGES = frozen_weight, other_weight, other_memory, other_rate, dropout, evaluation, hook, swapped
CHANGES = *CHANGES, saved_on_cpu, autocast


def test_changes_within_a_stage_are_noticed(replayed):
    """Each is taken back, so that the stage and its blocks have recordings for the state before."""
    model = trained_stage(drop_path=0.4)
    run(model, 3)
    plain, state = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for change in CHANGES:
        found = []
        for each, steps in ((model, run), (plain, run_without_recordings)):
            each.load_state_dict(state)
            with change(each.block.layers):
                found.append(steps(each, 1))
        assert_same(*found)
    replayed.clear()
    assert_same(run(model, 1), run_without_recordings(plain, 1))
    assert len(replayed) == 2


def test_a_failure_within_a_stage_leaves_no_state():
    model = trained_stage()
    model()
    model.x = model.x[:, 1:]
    with pytest.raises((ValueError, RuntimeError)):
        model()
    assert training_replays._around.state is None


# The host -------------------------------------------------------------------------------------------------


class Compiled:
    """A compiled kernel whose launches do nothing."""

    def __getitem__(self, grid):
        return lambda *args: None


STARTED = Prepared(lambda *args: None, None)


def calls_of_a_step(model):
    """Returns how many functions Python calls in a step, its own and C's."""
    count = [0]

    def note(frame, event, argument):
        count[0] += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        model().sum().backward()
    finally:
        sys.setprofile(None)
    return count[0]


def test_a_recorded_step_takes_fewer_calls(monkeypatch):
    """Launches do nothing here, so that what is left is the host's."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.InterpretedFunction, "run", lambda *args, **kwargs: Compiled())
    monkeypatch.setattr(launch_plans, "prepared", lambda *args: STARTED)
    model = trained(drop_path=0.2)
    for _ in range(3):
        model().sum().backward()
    replayed = calls_of_a_step(model)
    monkeypatch.setattr(TrainingReplays, "_may_train", lambda *args: False)
    for _ in range(3):
        model().sum().backward()
    by_operators = calls_of_a_step(model)
    assert replayed <= 0.35 * by_operators, (replayed, by_operators)


@pytest.mark.parametrize("family", DEEP)
def test_the_host_of_a_step_needs_less_than_upstreams(family, monkeypatch):
    """Over a driver that launches nothing, with operators so small that the host counts most."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: Compiled())
    monkeypatch.setattr(launch_plans, "prepared", lambda *args: STARTED)
    own = DEEP[family]().train()
    live = ck.accelerate(copy.deepcopy(own), freeze=False)
    size = 70 if family == "pvt" else 64
    x = upstream.images(2, size, size)

    def step(model):
        upstream.logits(model(x)).sum().backward()
        model.zero_grad()

    for _ in range(4):
        step(own)
        step(live)
    theirs, ours = seconds_of(lambda: step(own), lambda: step(live))
    assert ours <= (0.6 if family == "cvt" else 0.9) * theirs
