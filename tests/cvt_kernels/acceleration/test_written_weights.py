"""Accelerated models whose weights change: every change, every way of serving, every family."""

import contextlib
import copy
import inspect
import os
import types

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt_kernels import changes
from cvt_kernels.acceleration import served as served_module
from cvt_kernels.ops import weight_cache
from tests import tape
from tests.upstream import (
    KERNELS_FIRST,
    glpn,
    huggingface,
    logits,
    microsoft,
    ours,
    pvt,
    pvt_v2,
    relative,
    segformer,
)

FAMILIES = [huggingface, microsoft, ours, segformer, pvt, pvt_v2, glpn]


def _optimizers():
    """Yields every optimizer of torch.optim as PyTorch takes it by itself, by tensor, together and fused."""
    for name, kind in sorted(vars(torch.optim).items()):
        if (
            inspect.isclass(kind)
            and issubclass(kind, torch.optim.Optimizer)
            and kind is not torch.optim.Optimizer
        ):
            taken = inspect.signature(kind).parameters
            yield pytest.param(kind, {}, id=name)
            for mode in ("foreach", "fused"):
                if mode in taken:
                    yield pytest.param(kind, {mode: True}, id=f"{name}-{mode}")


OPTIMIZERS = list(_optimizers())


class Sharing:
    """A model, its accelerated and its frozen copy, which share parameters and buffers."""

    def __init__(self, make):
        size = 70 if make is pvt else 64
        self.images = torch.randn(1, 3, size, size)
        self.own = make().eval()
        tensors = {id(t): t for t in (*self.own.parameters(), *self.own.buffers())}
        self.accelerated = ck.accelerate(copy.deepcopy(self.own, dict(tensors)), freeze=False)
        self.frozen = ck.accelerate(copy.deepcopy(self.own, dict(tensors)), freeze=True)
        assert next(self.frozen.parameters()) is next(self.own.parameters())
        self.before = self.results()[0]

    def train(self):
        """Lets the accelerated model compute gradients in training mode."""
        with ck.use_backend(*KERNELS_FIRST):
            logits(self.accelerated.train()(self.images)).sin().mean().backward()
        self.accelerated.eval()
        nn.utils.clip_grad_norm_(self.own.parameters(), 5.0)

    @torch.no_grad()
    def results(self):
        with ck.use_backend(*KERNELS_FIRST):
            models = self.own, self.accelerated, self.frozen
            return [logits(model(self.images)) for model in models]

    def assert_followed(self):
        """Checks that the weights are others than before, and that both copies compute with them."""
        expected, *others = self.results()
        assert relative(self.before, expected) > 1e-3
        for out in others:
            assert relative(out, expected) < 1e-4
        self.before = expected


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda make: make.__name__)
def sharing(request):
    """Models of one family for all optimizers, with the gradients of one step."""
    models = Sharing(request.param)
    models.train()
    models.start = [p.detach().clone() for p in models.own.parameters()]
    return models


@pytest.mark.parametrize(("kind", "mode"), OPTIMIZERS)
@pytest.mark.slow
def test_steps_of_every_optimizer(sharing, kind, mode):
    parameters = list(sharing.own.parameters())
    with torch.no_grad():
        for parameter, start in zip(parameters, sharing.start, strict=True):
            parameter.copy_(start)
    sharing.before = sharing.results()[0]
    if kind is torch.optim.Muon:
        parameters = [p for p in parameters if p.ndim == 2]
    gradients = [p.grad for p in parameters]
    if kind is torch.optim.SparseAdam:
        for parameter in parameters:
            parameter.grad = parameter.grad.to_sparse()
    optimizer = kind(parameters, lr=1.0 if kind is torch.optim.LBFGS else 0.02, **mode)
    for _ in range(2):
        optimizer.step(*([lambda: torch.tensor(1.0)] if kind is torch.optim.LBFGS else []))
        sharing.assert_followed()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of PyTorch's own import
def test_a_compiled_step():
    models = Sharing(segformer)
    models.train()
    step = torch.compile(
        torch.optim.AdamW(models.own.parameters(), lr=0.02, fused=True).step, backend="eager"
    )
    for _ in range(2):
        step()
        models.assert_followed()


def test_steps_of_another_model_change_nothing(monkeypatch):
    folded = []
    own_fold = served_module.fold
    monkeypatch.setattr(served_module, "fold", lambda *args: folded.append(args) or own_fold(*args))
    teacher, student = Sharing(ours), nn.Linear(2, 2)
    assert len(folded) == 3
    known = dict(weight_cache._known)
    student(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(student.parameters(), lr=0.1, fused=True).step()
    teacher.results()
    assert len(folded) == 3
    assert weight_cache._known == known


class _Subclass(nn.Parameter):
    """A parameter of a subclass, as in FSDP2."""


def _as_fsdp1_marks_it(parameter):
    parameter._fsdp_flattened = True
    return parameter


@pytest.mark.parametrize("shard", [_Subclass, _as_fsdp1_marks_it])
def test_a_step_of_sharded_parameters_outdates_everything(shard):
    """A module computes with a gathered copy, which the optimizer does not hold."""
    weight = torch.ones(2, 2)
    assert weight_cache.packed(weight, "a", lambda: 1) == 1
    torch.optim.SGD([shard(nn.Parameter(torch.ones(2)))], lr=0.1).step()
    assert weight_cache.packed(weight, "a", lambda: 2) == 2


# Every change × every way of serving × every family ------------------------------------------------------


def _served(model, freeze):
    return ck.accelerate(model, freeze=freeze)


def _quantized(model, freeze):
    ck.quantize(model)
    return ck.accelerate(model, freeze=freeze)


#: How a model is served: what is made of it, and whether its results are those of the model as it was.
WAYS = {
    "live": lambda model: _served(model, False),
    "served": lambda model: _served(model, None),
    "frozen": lambda model: _served(model, True),
    "quantized": lambda model: _quantized(model, None),
    "quantized and frozen": lambda model: _quantized(model, True),
    "graphed": lambda model: ck.graphed(_served(model, None)),
    "frozen and graphed": lambda model: ck.graphed(_served(model, True)),
    "compiled": lambda model: torch.compile(_served(model, None), backend="eager"),
    "frozen and compiled": lambda model: torch.compile(_served(model, True), backend="aot_eager"),
}


class Served:
    """A model as it is served, and another one on the same tensors that keeps nothing of them."""

    def __init__(self, make, way):
        self.images = torch.randn(1, 3, 70, 70) if make is pvt else torch.randn(1, 3, 64, 64)
        self.way, self.own = way, make().eval()
        tensors = {id(t): t for t in (*self.own.parameters(), *self.own.buffers())}
        self.model = WAYS[way](copy.deepcopy(self.own, dict(tensors)))
        written = self.model if "quantized" in way else self.own
        self.tensors = [t for t in (*written.parameters(), *written.buffers()) if t.is_floating_point()]
        self.start = [t.detach().clone() for t in self.tensors]

    @torch.no_grad()
    def reset(self):
        """Gives the tensors their first values, and lets copies be made of these and be read."""
        for tensor, start in zip(self.tensors, self.start, strict=True):
            tensor.copy_(start)
        self.run()
        self.assert_right()
        self.before = self.expected()

    @torch.no_grad()
    def expected(self):
        own = copy.deepcopy(self.model) if "quantized" in self.way else self.own
        return logits(own(self.images))

    @torch.no_grad()
    def run(self):
        with tape.taped() if "graphed" in self.way else contextlib.nullcontext():
            return logits(self.model(self.images))

    def assert_right(self):
        assert relative(self.run(), self.expected()) < 1e-4

    def assert_followed(self):
        """Checks that the weights are others than before, and that the served model computes with them."""
        assert relative(self.before, self.expected()) > 1e-3
        self.assert_right()


_made: dict[tuple[str, str], Served] = {}


@pytest.fixture
def served_model(make, way):
    """Returns a model of a family as it is served, with its first weights; tests share it."""
    served = _made.get((make.__name__, way))
    if served is None:
        weight_cache.release_memory()
        served = _made[make.__name__, way] = Served(make, way)
        served.run()
        assert weight_cache.packed_bytes() or way in ("live", "compiled")  # or nothing would be tested
    served.reset()
    return served


every_family = pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
every_way = pytest.mark.parametrize("way", WAYS)


def through_numpy(tensor):
    tensor.detach().numpy()[...] *= 1.1


def through_dlpack(tensor):
    torch.from_dlpack(tensor.detach()).mul_(1.05)
    np.from_dlpack(tensor.detach())[...] *= 1.05


def through_storage(tensor):
    tensor.untyped_storage().copy_((1.1 * tensor.detach()).contiguous().untyped_storage())


def through_another_tensor(tensor):
    torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride()).mul_(1.1)


def to_other_memory(tensor):
    tensor.data = 1.1 * tensor.data


def of_a_tenth(tensor):
    """Limits the largest tenth of the numbers."""
    limit = tensor.detach().abs().flatten().quantile(0.9)
    tensor.data.clamp_(-limit, limit)


def in_inference_mode(tensor):
    with torch.inference_mode():
        tensor.mul_(1.1)


class TeacherOfEma:
    """The weights that ema_pytorch averages, of a student."""

    def update(self, teacher):
        for tensor in teacher:
            student = 1.5 * tensor.detach()
            tensor.data.lerp_(student.data, 0.2)


class AverageOfTorchEma:
    """The averages that torch_ema swaps in for an evaluation."""

    def __init__(self, tensors):
        self.shadow = [1.1 * tensor.detach() for tensor in tensors]

    def copy_to(self, tensors):
        for shadow, tensor in zip(self.shadow, tensors, strict=True):
            tensor.data.copy_(shadow.data)


def by_hand_written_sgd(tensors):
    for tensor in tensors:
        gradient = tensor.detach().sign()
        tensor.data -= 0.05 * gradient


def by_fused_optimizer(tensors):
    parameters = [tensor for tensor in tensors if tensor.requires_grad]
    for parameter in parameters:
        parameter.grad = parameter.detach().sign()
    torch.optim.SGD(parameters, lr=0.05, fused=True).step()


def by_another_process(tensors):
    child = os.fork()
    if not child:
        try:
            for tensor in tensors:
                tensor.data.mul_(1.1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def each(write):
    """Returns a change of all tensors by a change of one."""

    def change(tensors):
        for tensor in tensors:
            write(tensor)

    return change


CHANGES = {
    "ema_pytorch": lambda tensors: TeacherOfEma().update(tensors),
    "torch_ema": lambda tensors: AverageOfTorchEma(tensors).copy_to(tensors),
    "hand-written SGD": by_hand_written_sgd,
    "data.mul_": each(lambda tensor: tensor.data.mul_(1.1)),
    "data.copy_": each(lambda tensor: tensor.data.copy_(1.1 * tensor.detach())),
    "data.clamp_": each(of_a_tenth),
    "NumPy": each(through_numpy),
    "DLPack": each(through_dlpack),
    "a storage": each(through_storage),
    "another tensor": each(through_another_tensor),
    "another process": by_another_process,
    "inference mode": each(in_inference_mode),
    "other memory": each(to_other_memory),
    "in place": torch.no_grad()(each(lambda tensor: tensor.mul_(1.1))),
    "a fused optimizer": by_fused_optimizer,
}


@every_family
@every_way
@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights(served_model, name):
    if name == "another process":
        for tensor in served_model.tensors:
            tensor.data = tensor.data.share_memory_()
        served_model.assert_right()
    CHANGES[name](served_model.tensors)
    served_model.assert_followed()


@every_family
@every_way
def test_weights_of_numbers_that_are_none(served_model):
    """NaN is what it was, or all copies would be made anew in every call."""
    tensors = [tensor for tensor in served_model.tensors if tensor.ndim > 1]
    for tensor in tensors:
        tensor.data.flatten()[0] = float("nan")
    snapshot = changes.State(served_model.tensors)
    assert snapshot.holds(served_model.tensors)
    tensors[-1].data.flatten()[0] = 1.0
    assert not snapshot.holds(served_model.tensors)


@torch.inference_mode()
@every_family
@pytest.mark.parametrize("freeze", [False, None, True])
def test_weights_made_in_inference_mode(make, freeze):
    """They have no version, and a write is noticed all the same."""
    own = make().eval()
    images = torch.randn(1, 3, 70, 70) if make is pvt else torch.randn(1, 3, 64, 64)
    tensors = {id(t): t for t in (*own.parameters(), *own.buffers())}
    fused = ck.accelerate(copy.deepcopy(own, dict(tensors)), freeze=freeze)
    assert next(fused.parameters()).is_inference()
    for write in (lambda t: t.mul_(1.1), lambda t: t.data.mul_(0.9)):
        before = logits(own(images))
        for _ in range(3):
            assert relative(logits(fused(images)), before) < 1e-4
        for parameter in own.parameters():
            write(parameter)
        expected = logits(own(images))
        assert relative(before, expected) > 1e-3
        assert relative(logits(fused(images)), expected) < 1e-4
    with torch.inference_mode(False), torch.no_grad():
        assert relative(logits(fused(images.clone())), expected) < 1e-4


class Adapter(nn.Module):
    """A layer with an adapter of low rank, which merges it as peft does: through ``.data``."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        self.is_merged = False
        self.eval()

    def delta(self):
        return self.up.weight.detach() @ self.down.weight.detach()

    def merge(self):
        self.base_layer.weight.data += self.delta()
        self.is_merged = True

    def unmerge(self):
        self.base_layer.weight.data -= self.delta()
        self.is_merged = False

    def forward(self, x):
        out = self.base_layer(x)
        return out if self.is_merged else out + self.up(self.down(x))


def layers_of(model):
    """Returns paths of linear layers, half of those of the blocks."""
    found = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    return [path for path in found if module_of_block(path)][::2]


def module_of_block(path):
    return any(part in path for part in ("layer", "block", "stage"))


def add_adapters(model):
    torch.manual_seed(1)
    for path in layers_of(model):
        model.set_submodule(path, Adapter(model.get_submodule(path)))


def of_adapters(function):
    def run(model):
        for path, module in [*model.named_modules()]:
            if type(module) is Adapter:
                function(model, path, module)

    return run


merge = of_adapters(lambda model, path, adapter: adapter.merge())
unmerge = of_adapters(lambda model, path, adapter: adapter.unmerge())
unload = of_adapters(lambda model, path, adapter: model.set_submodule(path, adapter.base_layer))


def evaluate(model):
    pass


#: Orders of what people do with an adapter; each step is followed by comparisons where it says so.
ORDERS = {
    "merged at once": [ck.accelerate, evaluate, add_adapters, merge, unload, evaluate],
    "evaluated with it": [ck.accelerate, evaluate, add_adapters, evaluate, merge, unload, evaluate],
    "accelerated with it": [add_adapters, ck.accelerate, evaluate, merge, unload, evaluate],
    "merged, later taken out": [ck.accelerate, add_adapters, evaluate, merge, evaluate, unload, evaluate],
    "merged and undone": [ck.accelerate, evaluate, add_adapters, merge, evaluate, unmerge, unload, evaluate],
    "taken out before it is merged": [ck.accelerate, evaluate, add_adapters, evaluate, unload, evaluate],
}


#: Layers with adapters cannot be frozen.
FREEZES = {
    order: [False, None, True] if steps[0] is ck.accelerate else [False, None]
    for order, steps in ORDERS.items()
}


@torch.no_grad()
@every_family
@pytest.mark.parametrize(
    ("order", "freeze"), [(order, freeze) for order in ORDERS for freeze in FREEZES[order]]
)
def test_a_merged_adapter(make, order, freeze):
    own = make().eval()
    fused = copy.deepcopy(own)
    images = torch.randn(1, 3, 70, 70) if make is pvt else torch.randn(1, 3, 64, 64)
    start, seen = logits(own(images)), []
    for step in ORDERS[order]:
        if step is ck.accelerate:
            ck.accelerate(fused, freeze=freeze)
        elif step is not evaluate:
            step(own)
            step(fused)
        else:
            expected = logits(own(images))
            for _ in range(3):
                assert relative(logits(fused(images)), expected) < 1e-4
            seen.append(expected)
    assert layers_of(own)
    if order not in ("merged and undone", "taken out before it is merged"):
        assert relative(seen[-1], start) > 1e-3


@pytest.mark.parametrize("make", [ours, segformer], ids=lambda make: make.__name__)
def test_refresh_after_a_write_that_the_sample_misses(make):
    """A number in the middle of a tensor."""
    served = Served(make, "frozen")
    served.reset()
    tensors = [tensor for tensor in served.tensors if tensor.numel() > 4096]
    snapshots = [changes.State([tensor]) for tensor in tensors]
    for tensor, snapshot in zip(tensors, snapshots, strict=True):
        for place in range(100, tensor.numel()):
            number = tensor.detach().view(-1)[place]
            before = number.item()
            number.data.fill_(before + 1)
            if snapshot.holds([tensor]):
                break
            number.data.fill_(before)
            snapshot = changes.State([tensor])
    ck.refresh(served.own)  # whose memory the other shares
    served.assert_followed()


def ours_with_batch_norm():
    config = CvTConfig(embed_dims=(16, 32, 48), depths=1, num_heads=1, embed_norm="batch_layer_norm")
    return create_model(config, num_classes=10)


@torch.no_grad()
@pytest.mark.parametrize(
    "make", [huggingface, microsoft, ours_with_batch_norm, segformer], ids=lambda make: make.__name__
)
def test_running_statistics_that_pytorch_has_updated(make):
    """Without a counted write, as where BatchNorms are calibrated without a step of an optimizer."""
    models = Sharing(make)
    norms = [module for module in models.own.modules() if type(module) is nn.BatchNorm2d]
    for norm in norms:
        norm.train()(torch.randn(4, norm.num_features, 3, 3))
        norm.eval()
    models.assert_followed()


@torch.no_grad()
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_a_shadowed_parameter(make):
    models = Sharing(make)
    shadowed = [models.own, models.accelerated, models.frozen]
    layers = [m for model in shadowed for m in model.modules() if type(m) is nn.Linear and m.bias is not None]
    for factor in (0.5, 2.0):  # the second replaces the first
        for layer in layers:
            vars(layer)["bias"] = factor * layer._parameters["bias"] + 0.1
        models.assert_followed()
    for layer in layers:
        del vars(layer)["bias"]
    models.assert_followed()


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("make", [ours, segformer], ids=lambda make: make.__name__)
def test_tensors_are_swapped(make, freeze):
    model, other = make().eval(), make().eval()
    ck.accelerate(model, freeze=freeze)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), ck.use_backend(*KERNELS_FIRST):
        model(images)
        for mine, theirs in zip(model.parameters(), copy.deepcopy(other).parameters(), strict=True):
            torch.utils.swap_tensors(mine, theirs)
        for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
            mine.copy_(theirs)
        assert relative(logits(model(images)), logits(other(images))) < 1e-4
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.double()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert relative(logits(model(images.double())).float(), logits(other(images))) < 1e-4


# On a GPU -------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True

    def record_stream(self, stream):
        self.readers = [*getattr(self, "readers", []), stream.name]


class Stream:
    """A stream that notes when somebody waits for it."""

    device = torch.device("cpu")

    def __init__(self, name):
        self.name, self.waits = name, 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch):
    """Puts switches in the place of CUDA's state: the current stream, and whether it is captured."""
    state = types.SimpleNamespace(stream=Stream("first"), captures=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    return state


def test_only_frozen_models_keep_copies_on_a_gpu(gpu):
    """Nobody could see in time that the weights of others were written through ``.data``."""
    weight, made = torch.randn(3).as_subclass(OnGpu), []

    def copy():
        return weight_cache.packed(weight, "a test", lambda: made.append(0) or len(made))

    assert [copy(), copy()] == [1, 2]
    with weight_cache.kept_on_gpu():
        assert [copy(), copy()] == [3, 3]
    assert copy() == 4


def test_a_graph_of_the_users_reads_no_cached_copy(gpu):
    """It would read it for ever; graphed looks at the weights before each replay."""
    weight, made = torch.randn(3).as_subclass(OnGpu), []

    def copy():
        with weight_cache.kept_on_gpu():
            return weight_cache.packed(weight, "a test", lambda: made.append(0) or len(made))

    assert [copy(), copy()] == [1, 1]
    gpu.captures = True
    assert [copy(), copy()] == [2, 3]
    with weight_cache.noted_uses():
        assert copy() == 1
        weight.add_(1)
        assert [copy(), copy()] == [4, 5]  # made in the capture, and not kept
    gpu.captures = False
    assert [copy(), copy()] == [6, 6]


def test_copies_on_a_gpu_are_written_before_any_stream_reads_them(gpu):
    """And their memory is not used again before every stream that has read it is done."""
    weight, first = torch.randn(3).as_subclass(OnGpu), gpu.stream

    def copy():
        with weight_cache.kept_on_gpu():
            return weight_cache.packed(weight, "a test", lambda: (torch.zeros(3).as_subclass(OnGpu), 1))

    made = copy()[0]
    assert copy()[0] is made
    assert first.waits == 1
    gpu.stream = Stream("second")
    assert copy()[0] is made
    assert made.readers == ["second"]
    assert gpu.stream.waits == 0
    weight.add_(1)
    gpu.captures = True
    copy()
    assert gpu.stream.waits == 0  # which a capture forbids
