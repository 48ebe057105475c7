"""Tests of CUDA graphs: on a CPU with a tape of PyTorch's operators in the place of CUDA, and on a GPU."""

import concurrent.futures
import contextlib
import copy
import functools
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import cvt_kernels as ck
from cvt_kernels import backends, graphs, models
from cvt_kernels.models import served as served_module
from cvt_kernels.models import stages
from cvt_kernels.ops import weight_cache
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests.checks import implementation, needs_extension
from tests.tape import FakeCapture, Tape, taped
from tests.upstream import KERNELS_FIRST, huggingface, logits, microsoft, ours, segformer


@pytest.fixture
def cuda():
    """Puts the tape in the place of CUDA; returns the class that counts."""
    with taped() as counting, ck.use_backend("reference"), torch.no_grad():
        yield counting


class Toy(nn.Module):
    """A model whose square weight can be transposed in place."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.last = nn.Sequential()

    def forward(self, x, scale=1.0, extra=None, as_dict=False):
        x = self.last(self.second(self.norm(self.first(x)).relu())) * scale
        if extra is not None:
            x = x + extra
        return {"x": x, "scale": scale} if as_dict else x


def toy(**settings):
    return ck.graphed(Toy().eval(), **settings)


def plain(model):
    """Returns a copy without graphs."""
    return graphs.ungraphed(copy.deepcopy(model))


def captures(cuda):
    return len(cuda.tapes)


def assert_same(model, *args, **kwargs):
    """Asserts that a model and its copy without graphs return the same bits; returns what it returned."""
    got, expected = model(*args, **kwargs), plain(model)(*args, **kwargs)
    leaves, form = pytree.tree_flatten(got)
    expected_leaves, expected_form = pytree.tree_flatten(expected)
    assert form == expected_form
    for a, b in zip(leaves, expected_leaves, strict=True):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b
    return got


# Replays --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [huggingface, ours, segformer])
@pytest.mark.parametrize("freeze", [None, True])
def test_models_are_replayed(cuda, make, freeze):
    model = ck.accelerate(make().eval(), freeze=freeze)
    model(torch.randn(2, 3, 32, 48))  # SegFormer's first call leaves hooks on its attentions
    assert ck.graphed(model) is model
    for _ in range(3):
        assert_same(model, torch.randn(2, 3, 32, 48))
    assert [tape.replays for tape in cuda.tapes] == [3]


def test_keywords_and_outputs_of_hugging_face(cuda):
    model = ck.graphed(huggingface().eval())
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([3, 4])
    settings = {"labels": labels, "output_hidden_states": True}
    for _ in range(2):
        out = assert_same(model, pixel_values=images, **settings)
    assert type(out).__name__ == "ImageClassifierOutputWithNoAttention"
    assert len(out.hidden_states) == 3
    assert out.loss.ndim == 0
    assert type(assert_same(model, pixel_values=images, return_dict=False)) is tuple
    assert [tape.replays for tape in cuda.tapes] == [2, 1]
    model.config.output_hidden_states = True  # is seen, though it is no argument
    assert assert_same(model, pixel_values=images, labels=labels).hidden_states is not None


def test_results_stay_what_they_are(cuda):
    model = toy()
    one, two = torch.randn(2, 4), torch.randn(2, 4)
    first = model(one)
    kept = first.clone()
    second = model(two)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    assert not first.requires_grad
    assert captures(cuda) == 1


class Twice(nn.Module):
    """A model whose outputs are one tensor, twice, and an argument."""

    def forward(self, x):
        y = x + 1
        return y, {"again": y, "x": x, "name": "y"}


def test_an_output_that_comes_twice_is_copied_once(cuda):
    model = ck.graphed(Twice().eval())
    x = torch.randn(3)
    y, rest = assert_same(model, x)
    assert rest["again"] is y
    assert rest["x"] is not x  # a copy, as all outputs


def test_inference_mode_and_no_grad_share_a_graph(cuda):
    model, x = toy(), torch.randn(2, 4)
    with torch.inference_mode():
        assert model(x).is_inference()
        inference = torch.randn(2, 4)
    assert not assert_same(model, inference).is_inference()
    with torch.inference_mode():
        assert_same(model, x)
    assert captures(cuda) == 1


# Kinds of calls (test_keys.py has their facts) ------------------------------------------------------------


def test_a_call_of_another_kind_has_a_graph_of_its_own(cuda):
    model, x = toy(), torch.randn(2, 4)
    for _ in range(2):
        assert_same(model, x)
        assert_same(model, x, scale=2.0)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(model, x)
    assert [tape.replays for tape in cuda.tapes] == [2, 2, 2]


def test_replays_wait_for_each_other_on_any_streams(monkeypatch):
    """They have one memory; the allocator waits for what a replay reads, too."""
    done, current = mock.Mock(), mock.Mock()
    memory = mock.Mock()
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    capture = object.__new__(graphs._CudaCapture)
    capture.device, capture._done = torch.device("cuda"), done
    with capture.turn([memory]):
        assert current.method_calls == [mock.call.wait_event(done)]
        assert memory.method_calls == [mock.call.record_stream(current)]
        assert done.method_calls == []
    assert done.method_calls == [mock.call.record(current)]


def test_weights_are_cast_in_every_replay_under_autocast(cuda):
    model, x = toy(), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        plain(model)(x)
        model.requires_grad_(True)
        model.first(x)  # fills autocast's cache with casts of the weights
        model(x)
        model.first.weight.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(model, x)
    assert captures(cuda) == 1


def test_the_least_recently_used_graph_is_dropped(cuda):
    model = toy(most=2)
    one, two, three = (torch.randn(n, 4) for n in (1, 2, 3))
    for x in (one, two, one, three):  # drops two
        assert_same(model, x)
    assert cuda.released == [cuda.tapes[1]]
    assert_same(model, one)
    assert captures(cuda) == 3
    assert_same(model, two)  # drops three
    assert captures(cuda) == 4
    assert cuda.released == [cuda.tapes[1], cuda.tapes[2]]


def test_graphs_share_their_memory_while_one_of_them_lives(cuda, monkeypatch):
    pools = []
    monkeypatch.setattr(
        cuda, "__init__", lambda self, device: (setattr(self, "device", device), pools.append(1))[0]
    )
    model = toy(most=2)
    for n in (1, 2, 3):
        model(torch.randn(n, 4))
    assert len(pools) == 1
    ck.graphed(model, most=1)
    for n in (1, 2):  # the second is captured when no graph is left
        model(torch.randn(n, 4))
    assert len(pools) == 3


# Weights --------------------------------------------------------------------------------------------------


def test_updates_in_place_are_seen_without_another_capture(cuda):
    model, x = toy(), torch.randn(2, 4)
    before = model(x)
    model.first.weight.copy_(torch.randn(4, 4))
    assert not torch.equal(assert_same(model, x), before)
    assert captures(cuda) == 1


#: Changes after which a graph is captured again; others are in tests/changes.py.
REPLACED = {
    "data": lambda model: setattr(model.first.weight, "data", torch.randn(4, 4)),
    "parameter": lambda model: setattr(model.first, "weight", nn.Parameter(torch.randn(4, 4))),
    "module": lambda model: setattr(model, "second", nn.Linear(4, 3).eval()),
    "added to an empty container": lambda model: model.last.append(nn.Tanh().eval()),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_captured_again(cuda, name):
    model, x = toy(), torch.randn(2, 4)
    before = model(x)
    REPLACED[name](model)
    assert graphs.why_not_graphed(model, x).startswith("weights or modules were replaced")
    assert not torch.equal(assert_same(model, x), before)
    assert cuda.released == cuda.tapes[:1]
    assert graphs.why_not_graphed(model, x) is None
    for _ in range(2):
        assert not torch.equal(assert_same(model, x), before)
    assert captures(cuda) == 2


#: Changes that rule out a replay, and what the call has to compute then.
DURING = REPLACED | {
    "hook": lambda model: hook(model),
    "pre-hook": lambda model: pre_hook(model),
    "forward": lambda model: own_forward(model),
    "double": lambda model: model.first.to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("name", DURING)
def test_a_change_during_a_replay_drops_its_result(cuda, monkeypatch, name):
    model, x = toy(), torch.randn(2, 4)
    before = model(x)
    replay, changes = graphs._Graph.replay, [DURING[name]]

    def changing_replay(self, tensors):
        outputs = replay(self, tensors)
        if changes:
            changes.pop()(model)
        return outputs

    monkeypatch.setattr(graphs._Graph, "replay", changing_replay)
    got = model(x)
    assert not changes
    assert torch.equal(got, plain(model)(x))
    assert name in ("double", "pre-hook") or not torch.equal(got, before)
    for _ in range(2):
        assert_same(model, x)


def test_another_thread_moves_the_model_after_a_replay(cuda, monkeypatch):
    model, x = toy(), torch.randn(2, 4)
    before, replay = model(x), graphs._Graph.replay
    threads = []

    def replay_beside_a_move(self, tensors):
        if not threads:
            threads.append(threading.Thread(target=model.double))
            threads[0].start()
            threads[0].join(0.2)  # .double() waits for the call
            assert threads[0].is_alive()
        return replay(self, tensors)

    monkeypatch.setattr(graphs._Graph, "replay", replay_beside_a_move)
    assert torch.equal(model(x), before)
    threads[0].join()
    assert assert_same(model, x.double()).dtype == torch.float64


def test_moved_weights_are_captured_again_at_once(cuda):
    model, x = toy(), torch.randn(2, 4)
    model(x)
    assert model.double() is model
    assert cuda.released == cuda.tapes
    assert assert_same(model, x.double()).dtype == torch.float64
    assert captures(cuda) == 2
    model.float()
    model.first.to(torch.float64).to(torch.float32)  # of a part
    for _ in range(2):
        assert_same(model, x)


def test_weights_that_differ_in_every_call_are_not_captured_again(cuda):
    model, x = toy(), torch.randn(2, 4)
    model(x)
    for _ in range(4):
        weights = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
        got = torch.func.functional_call(model, weights, x)
        assert torch.equal(got, torch.func.functional_call(plain(model), weights, x))
    assert captures(cuda) == 1


@needs_extension
def test_a_graph_that_reads_a_packed_weight_is_captured_again_when_that_changes(cuda):
    torch.manual_seed(0)
    layer = LinearInt8.from_float(nn.Linear(16, 8))
    model, x = ck.graphed(nn.Sequential(layer).eval()), torch.randn(4, 16)
    # data: values that PyTorch has not counted; release_memory: the copy that the graph reads stays.
    changes = (
        lambda: None,
        lambda: layer.qweight.copy_(layer.qweight.flip(0)),
        lambda: layer.weight_scale.mul_(2),
        lambda: layer.qweight.data.copy_(layer.qweight.flip(1)),
        ck.release_memory,
    )
    with ck.use_backend("cpu", "reference"):
        for change in changes:
            change()
            for _ in range(3):
                got = model(x)
                weight_cache._known.clear()  # nobody else keeps it
                torch.testing.assert_close(got, plain(model)(x), rtol=0, atol=0)
    assert captures(cuda) == 4


@pytest.mark.parametrize(
    "make", [lambda: ours().eval(), lambda: ours().eval().stage1], ids=["stages of a model", "a stage"]
)
@pytest.mark.parametrize("freeze", [True, None])
@pytest.mark.parametrize("is_graphed_first", [True, False])
def test_served_stages_are_captured_again_when_they_are_folded_again(
    cuda, monkeypatch, is_graphed_first, freeze, make
):
    monkeypatch.setattr(served_module, "fold", lambda parts, device_type: stages.fold(parts, "cuda"))
    model = make()
    x = torch.randn(1, 3, 32, 32) if hasattr(model, "stage1") else torch.randn(1, 16, 8, 8)
    first = ck.graphed if is_graphed_first else functools.partial(ck.accelerate, freeze=freeze)
    ck.graphed(ck.accelerate(first(model), freeze=freeze))
    before = pytree.tree_leaves(assert_same(model, x))[0]
    assert_same(model, x)
    assert captures(cuda) == 1
    mlp = getattr(model, "stage1", model).blocks[0].mlp
    mlp.fc1.weight.mul_(1.5)  # is read where it lies
    after = pytree.tree_leaves(assert_same(model, x))[0]
    assert captures(cuda) == 1
    assert not torch.equal(before, after)
    mlp.fc2.bias.add_(torch.arange(32.0) % 3)  # is folded
    for _ in range(3):
        assert not torch.equal(pytree.tree_leaves(assert_same(model, x))[0], after)
    assert captures(cuda) == 2


@needs_extension
def test_every_graph_notices_that_a_packed_weight_has_changed(cuda):
    """Checks that one graph's look at the weights does not stand for another's, which has read copies."""
    layer = LinearInt8.from_float(nn.Linear(16, 8))
    model, few, many = ck.graphed(nn.Sequential(layer).eval()), torch.randn(1, 16), torch.randn(4, 16)
    with ck.use_backend("reference"):
        model(few)
    with ck.use_backend("cpu", "reference"):
        model(many)
    layer.qweight.copy_(layer.qweight.flip(0))
    with ck.use_backend("reference"):
        assert_same(model, few)
    with ck.use_backend("cpu", "reference"):
        for _ in range(3):
            torch.testing.assert_close(model(many), plain(model)(many), rtol=0, atol=0)


def test_evaluation_between_steps_keeps_the_graphs_of_training(cuda, monkeypatch):
    monkeypatch.setattr(served_module, "fold", lambda parts, device_type: stages.fold(parts, "cuda"))
    model, x = ck.graphed(ck.accelerate(ours())), torch.randn(2, 3, 32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train():
        with torch.enable_grad():
            model.train()(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    for count in (3, 4, 5):  # a forward and a backward of training, then one of evaluation each time
        train()
        model.eval()
        for _ in range(3):
            assert_same(model, x)
        assert captures(cuda) == count
    assert [tape.replays for tape in cuda.tapes[:2]] == [3, 3]


# Calls that are left alone --------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A subclass of a tensor."""


class Config:
    """An argument that could hold anything."""


def own_forward(model):
    model.second.forward = lambda x: x[:, :3]


def hook(model):
    model.first.register_forward_hook(lambda module, args, output: output + 1)


def pre_hook(model):
    model.second.register_forward_pre_hook(lambda module, args: None)


#: Changes of a model, or other arguments of a call, with the reason why it is left alone.
LEFT_ALONE = [
    (Toy.train, None, "the model is in training mode"),
    (lambda model: model.norm.train(), None, "a module of the model is in training mode"),
    (hook, None, "a module of the model has forward hooks"),
    (pre_hook, None, "a module of the model has forward hooks"),
    (own_forward, None, "a module of the model has a forward of its own"),
    (lambda model: setattr(model, "_is_replica", True), None, "the model is a replica"),
    (None, lambda x: (x, 1.0, None, Config()), "it has an argument of type Config"),
    (None, lambda x: (x.as_subclass(Elsewhere),), "an argument is a subclass"),
    (None, lambda x: (x.to("meta"),), "an argument is on meta"),
    (None, lambda x: (), "none of its arguments is a tensor"),
]


@pytest.mark.parametrize(("change", "arguments", "reason"), LEFT_ALONE)
def test_a_call_that_is_left_alone(cuda, change, arguments, reason):
    model, x = toy(), torch.randn(2, 4)
    if change is not None:
        change(model)
    args = (x,) if arguments is None else arguments(x)
    assert graphs.why_not_graphed(model, *args).startswith(reason)
    if args and args[0].device.type != "meta":
        expected = plain(model)(*args)
        for _ in range(2):
            model.norm.load_state_dict(Toy().norm.state_dict())  # training changes it
            assert torch.equal(pytree.tree_leaves(model(*args))[0], pytree.tree_leaves(expected)[0])
    assert captures(cuda) == 0


def test_hooks_of_the_model_itself_run_around_the_replay(cuda):
    model, x = toy(), torch.randn(2, 4)
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model.register_forward_hook(lambda module, args, output: output + 1)
    for _ in range(2):
        assert_same(model, x)
    assert [tape.replays for tape in cuda.tapes] == [2]


def test_inference_and_training_have_graphs_of_their_own(cuda):
    model, x = toy(), torch.randn(2, 4)
    model(x)
    with torch.enable_grad():
        for _ in range(3):
            model(x).sum().backward()
        assert captures(cuda) == 3
        model.requires_grad_(False)
        assert graphs.why_not_graphed(model, x) is None
        assert_same(model, x)
    assert_same(model, x)
    assert captures(cuda) == 3


def test_transforms_and_modes(cuda):
    model, x = toy(), torch.randn(2, 4)
    model(x)
    reason = "it is within a function transform or forward-mode differentiation"
    torch.testing.assert_close(torch.func.vmap(model)(x[:, None])[:, 0], model(x))
    with torch.autograd.forward_ad.dual_level():
        assert graphs.why_not_graphed(model, x) == reason
    with FlopCounterMode(display=False) as counter:
        assert graphs.why_not_graphed(model, x) == "a torch dispatch mode watches the operators"
        model(x)
    assert counter.get_total_flops() == 2 * 2 * (4 * 4 + 4 * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in some versions
        traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), model(x))
    assert captures(cuda) == 1


def test_torch_compile_traces_the_model_itself(cuda):
    model, x = toy(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(model)(x))
    assert captures(cuda) == 0
    torch.compiler.reset()


def test_parameters_that_no_graph_can_read(cuda):
    model, x = toy(), torch.randn(2, 4)
    model.second.bias = nn.Parameter(torch.zeros(3, device="meta"))
    assert graphs.why_not_graphed(model, x) == "a parameter or buffer of the model is on the meta device"
    model.second.bias = nn.Parameter(torch.zeros(3).as_subclass(Elsewhere))
    assert "is a subclass of a tensor" in graphs.why_not_graphed(model, x)
    snapshots = set()
    for _ in range(3):
        assert model(x).shape == (2, 3)
        snapshots.add(graphs._graphs_of(model)._snapshot)
    assert len(snapshots) == 1  # it takes milliseconds
    assert captures(cuda) == 0


class Uncapturable(nn.Linear):
    """A layer that cannot be captured, as one that asks the GPU for a value."""

    def forward(self, x):
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("operation not permitted\nwhen capturing")
        return super().forward(x)


def test_a_failed_capture_is_told_once_and_remembered(cuda):
    model, x = ck.graphed(Uncapturable(4, 3).eval()), torch.randn(2, 4)
    reason = "it cannot be captured: RuntimeError: operation not permitted"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is remembered all the same
        message = f"calls of Uncapturable .* run without a CUDA graph: {reason}$"
        for _ in range(graphs._MOST_TRIES):  # another thread may have captured
            model(x)
            assert graphs.why_not_graphed(model, x) is None
        with pytest.raises(RuntimeWarning, match=message):
            model(x)
        assert graphs.why_not_graphed(model, x) == reason
        assert_same(model, x)
    assert graphs.why_not_graphed(model, x[:1]) is None  # of another kind, nothing is known
    model.double().float()
    assert graphs.why_not_graphed(model, x) is None


def test_a_capture_that_another_thread_has_disturbed_is_tried_again(cuda, monkeypatch):
    model, x, record = ck.graphed(nn.Linear(4, 3).eval()), torch.randn(2, 4), cuda.record
    errors = [RuntimeError("operation not permitted when stream is capturing")]

    def disturbed(self, *functions):
        if errors:
            raise errors.pop()
        return record(self, *functions)

    monkeypatch.setattr(cuda, "record", disturbed)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(model(x), plain(model)(x))
    assert [tape.replays for tape in cuda.tapes] == [2]


class Writes(nn.Module):
    """A model that changes its argument."""

    def forward(self, x):
        return x.add_(1)


class Counts(nn.Module):
    """A model that puts another buffer in the place of its own at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return x + self.count


class Returns(nn.Module):
    """A model that returns something that is no tensor."""

    def forward(self, x):
        return Config()


def test_models_that_no_replay_does_justice_to(cuda):
    x = torch.zeros(3)
    model = ck.graphed(Writes().eval())
    for i in range(3):
        assert torch.equal(model(x), torch.full((3,), i + 1.0))
    assert torch.equal(x, torch.full((3,), 3.0))
    assert graphs.why_not_graphed(model, x) == "the forward changes its arguments"

    model = ck.graphed(Counts().eval())
    assert [model(torch.zeros(())).item() for _ in range(4)] == [1, 2, 3, 4]

    model = ck.graphed(Returns().eval())
    assert type(model(x)) is type(model(x)) is Config
    assert graphs.why_not_graphed(model, x) == "it returns a Config, neither a tensor nor a plain value"
    assert not cuda.released or set(cuda.released) == set(cuda.tapes)


def test_errors_of_the_user_are_raised_as_they_are(cuda):
    model = toy()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(2, 5))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        model(torch.randn(2, 4), y=1)
    assert_same(model, torch.randn(2, 4))
    assert captures(cuda) == 1


def test_a_model_on_a_cpu_is_left_alone():
    model = toy()
    with torch.no_grad():
        reason = "an argument is on cpu, not on an NVIDIA GPU"
        assert graphs.why_not_graphed(model, torch.randn(2, 4)) == reason
        assert_same(model, torch.randn(2, 4))


# The object -----------------------------------------------------------------------------------------------


def test_the_model_stays_what_it_is(cuda):
    original = huggingface().eval()
    keys, cls = list(original.state_dict()), type(original)
    signature = inspect.signature(original.forward)
    model = ck.graphed(original)
    model(torch.randn(1, 3, 32, 32))
    assert model is original
    assert isinstance(model, cls)
    assert (type(model).__name__, type(model).__module__) == (cls.__name__, cls.__module__)
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert repr(model) == repr(plain(model))
    assert ck.restore(model) is model
    assert type(model) is cls
    assert not any("graph" in name for name in vars(model))
    assert cuda.released == cuda.tapes


def test_a_block_that_is_graphed_itself(cuda):
    block = huggingface().eval().cvt.encoder.stages[0].layers[0]
    cls, x = type(block), torch.randn(1, 16, 16)
    expected = block(x, 4, 4)
    ck.graphed(block)
    assert not ck.coverage(block)[0].fused
    assert ck.coverage(block)[0].reason == "accelerate() has not been called"
    assert torch.equal(block(x, 4, 4), expected)
    ck.accelerate(block)
    assert all(row.fused for row in ck.coverage(block))
    for _ in range(3):
        torch.testing.assert_close(block(x, 4, 4), expected)
    assert captures(cuda) == 2
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert ck.coverage(other)[0].fused
        assert graphs.is_graphed(other)
        torch.testing.assert_close(other(x, 4, 4), expected)
    graphs.ungraphed(block)
    assert ck.coverage(block)[0].fused
    assert not graphs.is_graphed(block)
    ck.graphed(block)
    ck.restore(block)
    assert type(block) is cls


def test_a_graphed_part_of_a_graphed_model(cuda):
    model, x = toy(), torch.randn(2, 4)
    ck.graphed(model.second)
    for _ in range(2):
        assert_same(model, x)
    assert captures(cuda) == 1
    assert_same(model.second, x)
    assert captures(cuda) == 2
    ck.restore(model)
    assert [type(model), type(model.second)] == [Toy, nn.Linear]


def test_nothing_waits_for_the_garbage_collector(cuda, monkeypatch):
    monkeypatch.setattr(Tape, "replay", lambda tape: None)
    monkeypatch.setattr(cuda, "record", lambda self, function: [(function(), Tape())])
    model = toy()
    model(torch.randn(2, 4))
    weight = weakref.ref(model.first.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_a_model_that_its_parts_refer_to_is_collected(cuda):
    model = toy()
    model.first.whole = [model]
    model(torch.randn(2, 4))
    weight = weakref.ref(model.first.weight)
    cuda.tapes.clear()
    del model
    gc.collect()
    assert weight() is None


def test_arguments():
    model = Toy()
    model.forward = model.first.forward
    with pytest.raises(ValueError, match="this Toy has a forward of its own on the object"):
        ck.graphed(model)
    assert graphs.why_not_graphed(Toy(), torch.ones(1)) == "graphed() has not been called"
    with pytest.raises(TypeError, match="model: got NoneType"):
        graphs.why_not_graphed(None)


def test_graphed_again_takes_another_limit(cuda):
    model = toy()
    for n in (1, 2, 3):
        model(torch.randn(n, 4))
    cls = type(model)
    ck.graphed(model, most=1)
    assert type(model) is cls
    assert cuda.released == cuda.tapes
    for n in (1, 2):
        assert_same(model, torch.randn(n, 4))
    assert len(cuda.released) == 4


def run_threads(work, count):
    """Calls ``work`` with a number in each of some threads, and raises what one of them has raised."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def test_threads_take_turns(cuda, monkeypatch):
    model = toy(most=2)
    expected, inside = plain(model), []

    @contextlib.contextmanager
    def turn(self, memory):
        inside.append(threading.get_ident())
        assert len(set(inside)) == 1, "two replays at once"
        yield
        inside.pop()

    monkeypatch.setattr(FakeCapture, "turn", turn)

    @torch.no_grad()
    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for i in range(30):
            x = torch.randn(1 + (seed + i) % 3, 4, generator=generator)
            assert torch.equal(model(x), expected(x))

    run_threads(work, 4)


# On a GPU -------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(_without_tf32):
    """Lets kernels of this project serve whatever they can, without gradients and TF32."""
    with ck.use_backend("triton", *KERNELS_FIRST), torch.no_grad():
        yield


def assert_close(model, *args, **kwargs):
    """Asserts that a model is replayed, or captured, with the results of its copy without graphs."""
    assert graphs.why_not_graphed(model, *args, **kwargs) is None
    torch.testing.assert_close(
        logits(model(*args, **kwargs)), logits(plain(model)(*args, **kwargs)), rtol=1e-3, atol=1e-3
    )


def random_images(batch, size=64):
    return torch.randn(batch, 3, size, size, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("make", [huggingface, microsoft, ours])
def test_gpu_replays(on_gpu, make):
    model = ck.graphed(ck.accelerate(make().cuda().eval()), most=2)
    for batch in (2, 2, 1, 2, 3, 1):
        assert_close(model, random_images(batch))
    held = logits(model(random_images(2)))
    kept = held.clone()
    model(random_images(2))
    assert torch.equal(held, kept)


@pytest.mark.gpu
def test_gpu_weights_change(on_gpu):
    model, x = ck.graphed(ours().cuda().eval()), random_images(2)
    before = model(x)
    next(model.parameters()).mul_(1.5)
    assert_close(model, x)
    assert not torch.equal(model(x), before)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for parameter in model.parameters():
        parameter.data = 0.9 * parameter.data
    expected = plain(model)(x)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    model.half()
    for _ in range(2):
        assert graphs.why_not_graphed(model, x.half()) is None
        assert model(x.half()).dtype == torch.float16


@pytest.mark.gpu
def test_gpu_autocast(on_gpu):
    model, x = ck.graphed(huggingface().cuda().eval()), random_images(2)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            got = logits(model(x))
            expected = logits(plain(model)(x))
        torch.cuda.empty_cache()  # casts of weights that a graph must not read are gone
        torch.testing.assert_close(got.float(), expected.float(), rtol=0.05, atol=0.05)
    assert_close(model, x)


@pytest.mark.gpu
def test_gpu_streams_and_threads(on_gpu):
    model = ck.graphed(ours().cuda().eval())
    expected = plain(model)

    def work(seed):
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
            generator = torch.Generator("cuda").manual_seed(seed)
            for i in range(20):
                x = torch.randn(1 + (seed + i) % 3, 3, 64, 64, generator=generator, device="cuda")
                torch.testing.assert_close(model(x), expected(x), rtol=1e-3, atol=1e-3)

    torch.cuda.synchronize()
    run_threads(work, 3)


class AsksTheHost(nn.Linear):
    """A layer that waits for the GPU, which a capture does not allow."""

    def forward(self, x):
        return super().forward(x) * x.sum().item()


@pytest.mark.gpu
def test_gpu_a_failed_capture_harms_nothing(on_gpu):
    model, x = ck.graphed(AsksTheHost(4, 3).cuda().eval()), torch.randn(2, 4, device="cuda")
    stream = torch.cuda.current_stream()
    for _ in range(graphs._MOST_TRIES):
        model(x)
    with pytest.warns(RuntimeWarning, match="run without a CUDA graph: it cannot be captured"):
        got = model(x)
    torch.testing.assert_close(got, plain(model)(x))
    torch.testing.assert_close(model(x), got)
    assert torch.cuda.current_stream() == stream
    torch.rand(1, device="cuda")  # up to torch 2.11 it failed from then on
    other = ck.graphed(ours().cuda().eval())
    for _ in range(2):
        assert_close(other, random_images(1))


@pytest.mark.gpu
def test_gpu_memory_is_given_back(on_gpu):
    model, x = ours().cuda().eval(), random_images(64)
    model(x)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    ck.graphed(model)
    model(x)
    assert torch.cuda.memory_allocated() >= before + x.nbytes // 2  # most of it the graph's own images
    ck.restore(model)
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before


# Small calls on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def _not_capturing(monkeypatch):
    """Lets machines without a GPU answer whether a graph is captured."""
    monkeypatch.setattr(graphs.machine, "is_capturing", lambda x: False)


def on_a_gpu(*shape):
    """Returns a tensor on a GPU that this machine need not have."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(*shape, device="cuda")


@pytest.mark.usefixtures("_not_capturing")
def test_small_calls_are_left_to_upstreams_modules():
    few, many = on_a_gpu(1, 197, 384), on_a_gpu(1, graphs._FEW)
    with ck.use_backend("auto"):
        assert graphs.is_bound_by_host(few)
        assert graphs.is_bound_by_host([few, many])
        assert not graphs.is_bound_by_host(many)
        assert not graphs.is_bound_by_host(torch.empty(1, 197, 384))
        assert not graphs.is_bound_by_host(None)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # checkpointing's
            assert not graphs.is_bound_by_host(few)
    with ck.use_backend("triton", "reference"):
        assert not graphs.is_bound_by_host(few)


@pytest.mark.usefixtures("_not_capturing")
def test_a_graphed_model_has_our_kernels_in_small_calls():
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append(graphs.is_bound_by_host(on_a_gpu(2)))
            return x

    asks = Asks()
    with ck.use_backend("auto"):
        asks(torch.ones(2))
        ck.graphed(asks)(torch.ones(2))
        asks.forward(torch.ones(2))
    assert seen == [True, False, False]


@pytest.mark.parametrize("freeze", [False, True])
def test_a_block_that_is_left_runs_upstreams_own_forward(monkeypatch, freeze):
    own = huggingface().eval()
    model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    monkeypatch.setattr(models, "is_bound_by_host", lambda x: True)
    monkeypatch.setattr(served_module, "serves_on", lambda device: False)  # as on a GPU
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), ck.use_backend("auto"):
        for operator in ("attention", "conv_projection", "transformer_block", "conv_embedding"):
            served = implementation(operator, lambda *_, **__: pytest.fail("a kernel serves"))
            backends.register(operator, "cpu", served)
        torch.testing.assert_close(model(x).logits, own(x).logits)
