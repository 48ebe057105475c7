"""Accelerated models work where the plain ones do."""

import copy
import functools
import signal

import pytest
import torch
import transformers
from safetensors.torch import save
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cvt_kernels as ck
from cvt_kernels import graphs
from cvt_kernels.ops import weight_cache
from cvt_kernels.tuning import choices, run
from tests import upstream
from tests.processes import run_pieces
from tests.tape import FakeCapture
from tests.upstream import (
    KERNELS_FIRST,
    glpn,
    huggingface,
    logits,
    microsoft_plain,
    ours,
    pvt,
    pvt_v2,
    segformer,
    timm_pvt_v2,
    timm_vit,
)

MAKERS = [huggingface, microsoft_plain, ours, segformer, pvt, pvt_v2, glpn, timm_vit, timm_pvt_v2]
every_model = pytest.mark.parametrize("make", MAKERS)
every_way = pytest.mark.parametrize("freeze", [None, True, False], ids=["live", "frozen", "by-block"])


def encoder_of(model):
    """Returns what may be frozen of a model: all but a head."""
    return getattr(model, "segformer", getattr(model, "glpn", model))


def images_for(make):
    size = {pvt: 70, timm_vit: 32}.get(make, 64)
    return upstream.images(height=size, width=size)


# Mixed dtypes -----------------------------------------------------------------------------------------------


@torch.no_grad()
@every_way
@every_model
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm2d])
def test_norms_in_float32(make, freeze, kind):
    own = make().eval().bfloat16()
    for module in own.modules():
        if isinstance(module, kind):
            module.float()
    x = images_for(make).bfloat16()
    expected = logits(own(x))
    if freeze and any(isinstance(module, kind) for module in encoder_of(own).modules()):
        with pytest.raises(ValueError, match="several dtypes"):
            ck.accelerate(own, freeze=True)
        return
    fused = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    exact = logits(copy.deepcopy(own).double()(x.double()))
    with ck.use_backend(*KERNELS_FIRST):
        ours, theirs = (upstream.relative(each.double(), exact) for each in (logits(fused(x)), expected))
    assert ours <= max(2 * theirs, 0.01)


# First calls ------------------------------------------------------------------------------------------------


FIRST = """
import torch
import cvt_kernels as ck
from tests import upstream
"""
FIRST_CALLS = {
    f"{make.__name__} in {mode}": f"""
model = ck.accelerate(upstream.{make.__name__}().eval(), freeze=True)
x = upstream.images(height={images_for(make).shape[2]}, width={images_for(make).shape[3]})
with torch.{mode}():
    out = upstream.logits(torch.compile(model, backend="aot_eager")(x))
    assert upstream.relative(out, upstream.logits(model(x))) < 1e-4
"""
    for make in (huggingface, segformer, pvt, pvt_v2, glpn)
    for mode in ("inference_mode", "no_grad")
}


@pytest.fixture(scope="module")
def first_calls():
    """Returns the exit code and the words of each first call, which is the first of a process."""
    return run_pieces(FIRST, FIRST_CALLS)


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_the_first_call_of_a_frozen_model_may_be_compiled(name, first_calls):
    code, words = first_calls[name]
    assert code == 0, words


@torch.no_grad()
@every_way
@every_model
def test_nothing_that_a_mode_has_made_of_fake_tensors_is_kept(make, freeze):
    own, x = make().eval(), images_for(make)
    fused = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    with ck.use_backend(*KERNELS_FIRST):
        with FakeTensorMode(allow_non_fake_inputs=True):
            fused(x)
        assert upstream.relative(logits(fused(x)), logits(own(x))) < 1e-4


# Maps -------------------------------------------------------------------------------------------------------


def tensors_in(value, path=""):
    """Yields path and tensor of everything in the results of a model."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | tuple | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from tensors_in(each, f"{path}.{key}")


#: Every kind of model that returns maps.
RETURNING_MAPS = {
    "CvtModel": huggingface,
    "CvtForImageClassification": huggingface,
    "SegformerModel": segformer,
    "SegformerForImageClassification": segformer,
    "SegformerForSemanticSegmentation": segformer,
    "PvtModel": pvt,
    "PvtForImageClassification": pvt,
    "PvtV2Model": pvt_v2,
    "PvtV2ForImageClassification": pvt_v2,
    "PvtV2Backbone": functools.partial(pvt_v2, out_features=["stage1", "stage2"]),
    "GLPNModel": glpn,
    "GLPNForDepthEstimation": glpn,
}


@pytest.mark.parametrize("name", RETURNING_MAPS)
@pytest.mark.parametrize("way", ["live", "frozen", "by-block", "training", "compiled"])
@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.spread
def test_results_have_the_strides_of_upstreams(name, way, return_dict):
    own = RETURNING_MAPS[name](model_class=getattr(transformers, name)).train(way == "training")
    x = images_for(pvt if name in ("PvtModel", "PvtForImageClassification") else None)
    fused = ck.accelerate(copy.deepcopy(own), freeze={"frozen": True, "by-block": False}.get(way))
    run = torch.compile(fused, backend="eager") if way == "compiled" else fused
    with torch.set_grad_enabled(way == "training"):
        for settings in ({}, {"output_hidden_states": True}):
            expected = dict(tensors_in(own(x, return_dict=return_dict, **settings)))
            found = dict(tensors_in(run(x, return_dict=return_dict, **settings)))
            assert {k: v.stride() for k, v in found.items()} == {k: v.stride() for k, v in expected.items()}
            for key, each in found.items():
                assert upstream.relative(each, expected[key]) < 1e-3, key


@torch.no_grad()
def test_maps_that_nobody_asked_for_are_not_copied():
    copies, model = [], ck.accelerate(segformer())
    model.decode_head.register_forward_pre_hook(lambda _, args: copies.extend(args[0]))
    model(upstream.images())
    assert not any(each.is_contiguous() for each in copies)
    assert save({"last": model.segformer(upstream.images()).last_hidden_state})


@pytest.mark.parametrize("make", [huggingface, segformer, pvt, pvt_v2, glpn])
def test_maps_may_be_written_in_training(make):
    """Upstream's may be, such as where a decoder begins with a ReLU in place."""
    own, x = make().train(), images_for(make)
    fused = ck.accelerate(copy.deepcopy(own))
    for i in range(len(own(x, output_hidden_states=True).hidden_states)):
        outcomes = []
        for model in (own, fused):
            outputs = model(x, output_hidden_states=True)
            try:
                written = torch.relu_(outputs.hidden_states[i])
                (logits(outputs).sum() + written.sum()).backward()
                outcomes.append("works")
            except RuntimeError:
                outcomes.append("raises")
        assert outcomes[1] == "works" or outcomes[0] == "raises", i


# Tensors that compute in their own way ----------------------------------------------------------------------

FORBIDDEN = {
    *("matmul", "mm", "bmm", "addmm", "einsum", "mul", "add", "flatten", "reshape", "view", "permute"),
    *("transpose", "t", "chunk", "cat", "split", "clone", "to", "contiguous", "unsqueeze", "float"),
    *("__matmul__", "__rmatmul__", "__getitem__", "__mul__", "__rmul__"),
}


class OnlyLayers(torch.Tensor):
    """A weight, such as torchao's, with which only its own layer can compute."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (F.linear, F.conv2d, torch.conv2d):
            x, weight, *others = args
            return function(x, weight.as_subclass(torch.Tensor), *others, **(kwargs or {}))
        if getattr(function, "__name__", "") in FORBIDDEN:
            raise NotImplementedError(f"{cls.__name__}: {function.__name__}")
        return super().__torch_function__(function, types, args, kwargs or {})


def with_own_weights(model, kind):
    for module in model.modules():
        if type(module) is kind:
            weight = module.weight.detach().as_subclass(OnlyLayers)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


@torch.no_grad()
@every_way
@every_model
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("order", ["before", "after"])
def test_tensor_subclasses_are_left_to_their_layers(make, freeze, kind, order):
    own, x = make().eval(), images_for(make)
    expected = logits(own(x))
    if order == "before":
        model = with_own_weights(own, kind)
        in_some = make in (pvt, timm_vit) and kind is nn.Conv2d  # the last layers of a PVT have none
        in_all = make is timm_pvt_v2 and kind is nn.Conv2d  # and nothing else is supported
        if (freeze and not in_some) or in_all:
            with pytest.raises(ValueError, match="OnlyLayers"):
                ck.accelerate(model, freeze=freeze)
            return
        ck.accelerate(model, freeze=freeze)
    else:
        model = ck.accelerate(own, freeze=freeze)
        model(x)
        with_own_weights(model, kind)
    with ck.use_backend(*KERNELS_FIRST):
        assert upstream.relative(logits(model(x)), expected) < 1e-4


def test_coverage_says_which_tensor_is_not_plain():
    model = ck.accelerate(with_own_weights(segformer(), nn.Linear))
    row = next(row for row in ck.coverage(model) if row.path == "decode_head")
    assert not row.fused
    assert "OnlyLayers as weight, expected a plain tensor" in row.reason


# Second derivatives -----------------------------------------------------------------------------------------


def penalty(model, x):
    """Returns the gradients of a gradient penalty."""
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(logits(model(x)).sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [slope, *(each.grad for each in model.parameters())]


@pytest.mark.parametrize("make", [make for make in MAKERS if make not in upstream.TIMMS])
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("freeze", [None, False], ids=["live", "by-block"])
def test_a_gradient_penalty(make, mode, freeze):
    own, x = getattr(make(), mode)(), images_for(make)
    fused = copy.deepcopy(own)
    if make is not ours or freeze is None:
        ck.accelerate(fused, freeze=freeze)
    with sdpa_kernel(SDPBackend.MATH), ck.use_backend("reference"):  # SegFormer's own has none
        expected = penalty(own, x)
    with ck.use_backend(*KERNELS_FIRST):
        found = penalty(fused, x)
    largest = max(each.abs().max() for each in expected[1:] if each is not None)
    assert upstream.relative(found[0], expected[0]) < 1e-4
    for a, b in zip(found[1:], expected[1:], strict=True):
        a, b = (torch.zeros(()) if each is None else each for each in (a, b))
        assert (a - b).abs().max() < 1e-4 * largest


# Exceptions of signal handlers ------------------------------------------------------------------------------


class TimeLimit(Exception):  # noqa: N818 (like celery's SoftTimeLimitExceeded)
    """The exception of a signal handler."""


@pytest.fixture(params=[TimeLimit, TimeoutError, RuntimeError])
def ring(request):
    """Returns a function in which a signal handler raises its ``kind``; a second call does nothing."""
    rung = []

    def handle(number, frame):
        raise request.param("time is up")

    def ring(*_, **__):
        rung.append(1)
        if len(rung) == 1:
            signal.raise_signal(signal.SIGALRM)

    ring.kind = request.param
    before = signal.signal(signal.SIGALRM, handle)
    yield ring
    signal.signal(signal.SIGALRM, before)


def test_a_time_limit_while_weights_are_packed(ring):
    weight = torch.ones(3)

    def make():
        ring()
        return weight + 1

    with pytest.raises(ring.kind, match="time is up"):
        weight_cache.packed(weight, "time limit", make)
    assert torch.equal(weight_cache.packed(weight, "time limit", make), weight + 1)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_a_time_limit_while_a_graph_is_captured(ring, monkeypatch, gradients):
    monkeypatch.setattr(graphs, "_CudaCapture", FakeCapture)
    record = FakeCapture.record

    def late(self, *functions):
        ring()
        return record(self, *functions)

    monkeypatch.setattr(FakeCapture, "record", late)
    model = ck.graphed(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train(gradients))
    x = torch.randn(2, 4)

    def run():
        out = model(x)
        if gradients:
            out.sum().backward()

    with torch.set_grad_enabled(gradients), ck.use_backend("reference"):
        if gradients:
            run()  # not captured yet
        with pytest.raises(ring.kind, match="time is up"):
            run()
        run()
        assert FakeCapture.tapes
        assert graphs.why_not_graphed(model, x) is None


def test_a_time_limit_while_kernels_are_tuned(ring, monkeypatch):
    tuned = run.tune_call
    monkeypatch.setattr(run, "tune_call", lambda call, worker: ring() or tuned(call, worker))
    gelu, x = nn.Sequential(ours_gelu()), torch.randn(3, 8)
    with pytest.raises(ring.kind, match="time is up"):
        ck.tune(gelu, x)
    assert len(ck.tune(gelu, x)) == 1
    assert not any("time is up" in reason for reason in ck.fallbacks().values())
    files = [each for each in choices.cache_directory().rglob("*") if each.is_file()]
    assert files
    assert not any("time is up" in each.read_text(errors="ignore") for each in files)


def ours_gelu():
    class Gelu(nn.Module):
        def forward(self, x):
            return ck.gelu(x)

    return Gelu()
