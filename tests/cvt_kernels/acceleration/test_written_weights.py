"""Accelerated and frozen models whose weights change, by optimizers or where PyTorch does not count it."""

import copy
import inspect
import os

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt_kernels.acceleration import freezing
from cvt_kernels.ops import weight_cache
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
    own_fold = freezing.fold
    monkeypatch.setattr(freezing, "fold", lambda *args: folded.append(args) or own_fold(*args))
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


def _through_data(parameter, values):
    parameter.data.copy_(values)


def _through_numpy(parameter, values):
    parameter.detach().numpy()[...] = values.numpy()


def _through_dlpack(parameter, values):
    torch.from_dlpack(parameter.detach()).copy_(values)
    np.from_dlpack(parameter.detach())[...] = values.numpy()


def _through_storage(parameter, values):
    parameter.untyped_storage().copy_(values.untyped_storage())


def _through_another_tensor(parameter, values):
    torch.empty(0).set_(parameter.untyped_storage(), 0, parameter.shape).copy_(values)


WRITES = [_through_data, _through_numpy, _through_dlpack, _through_storage, _through_another_tensor]


@pytest.mark.parametrize("make", [ours, segformer], ids=lambda make: make.__name__)
@pytest.mark.parametrize("write", WRITES)
def test_refresh_after_writes_that_are_not_counted(make, write):
    models = Sharing(make)
    for parameter in models.own.parameters():
        if parameter.ndim > 1:
            write(parameter, parameter.detach() * 1.1)
    ck.refresh(models.own)  # whose memory the others share
    models.assert_followed()


@pytest.mark.parametrize("make", [ours, segformer], ids=lambda make: make.__name__)
def test_refresh_after_writes_of_another_process(make):
    models = Sharing(make)
    written = [
        (parameter, 1.1 * parameter.detach()) for parameter in models.own.parameters() if parameter.ndim > 1
    ]
    for parameter, _ in written:
        parameter.data = parameter.data.share_memory_()
    child = os.fork()
    if not child:
        try:
            for parameter, values in written:
                parameter.data.copy_(values)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    ck.refresh(models.own)
    models.assert_followed()


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


# CUDA graphs ----------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_a_graph_of_the_users_reads_no_cached_copy(monkeypatch):
    """It would read it for ever; graphed looks at the weights before each replay."""
    weight, made, capturing = torch.randn(3).as_subclass(OnGpu), [], [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def copy():
        return weight_cache.packed(weight, "a test", lambda: made.append(0) or len(made))

    assert [copy(), copy()] == [1, 1]
    capturing[0] = True
    assert [copy(), copy()] == [2, 3]
    with weight_cache.noted_uses():
        assert copy() == 1
        weight.add_(1)
        assert [copy(), copy()] == [4, 5]  # made in the capture, and not kept
    capturing[0] = False
    assert [copy(), copy()] == [6, 6]
