"""Accelerated SegFormer, PVT, PVT v2 and GLPN: what is special about them, beside test_accelerate.py."""

import collections
import copy
import types
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import modes
from cvt_kernels.launch import launching
from tests.checks import assert_accurate, python_blocks, record_all_calls, run_blocks, section_of
from tests.cvt_kernels.models.served import noted_backends
from tests.cvt_kernels.models.test_accelerate import inputs
from tests.upstream import (
    PYRAMIDS,
    glpn,
    huggingface,
    images,
    logits,
    microsoft,
    pair,
    pvt,
    pvt_v2,
    pvt_v2_linear,
    relative,
    segformer,
)

ROOT = Path(__file__).parents[3]


every_pyramid = pytest.mark.parametrize("make", PYRAMIDS)


# Training -------------------------------------------------------------------------------------------------


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    """Lets blocks choose the dtypes of their layers as on a GPU."""
    monkeypatch.setattr(modes, "dtype_for_layers", modes.autocast_dtype)


def enable_checkpointing(model):
    # its name from transformers 5.24 on, which warns of the old one
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def gradients_of(model, x, dtype=None):
    """Returns the gradients of a training step, under autocast if a dtype is given."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = logits(model(x))
    out.to(torch.promote_types(out.dtype, torch.float32)).square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.usefixtures("_as_on_a_gpu")
@every_pyramid
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast(make, dtype):
    """The weights of a block are cast together, and K and V are one product."""
    own, accelerated = pair(make, "train")
    exact = gradients_of(copy.deepcopy(own).double(), inputs(make).double())
    theirs, ours = (gradients_of(model, inputs(make), dtype) for model in (own, accelerated))
    largest = max(each.abs().max() for each in exact.values())
    # The gradients of keys' biases are zero but for rounding: the worst of upstream's says how much that is.
    zero = [name for name, each in exact.items() if each.norm() < 1e-9 * largest]
    noise = max(((theirs[name] - exact[name]).norm() for name in zero), default=0.0)
    for name, each in exact.items():
        assert ours[name].dtype == torch.float32
        error, allowed = ((got[name] - each).norm() for got in (ours, theirs))
        allowed = noise if name in zero else allowed
        assert error <= 3 * allowed + torch.finfo(dtype).eps * max(largest * 1e-2, each.norm()), name


def errors_of_gradients(precise, own, accelerated, x):
    """Returns the norms of the errors of a step's gradients, ours and upstream's, and of the right ones."""
    for model in (precise, own, accelerated):
        model.zero_grad()
    exact, theirs = gradients_of(precise, x.double()), gradients_of(own, x)
    with ck.use_backend("triton", "cpu", "reference"):
        ours = gradients_of(accelerated, x)
    assert all(ours[name].dtype == x.dtype for name in exact)
    return {
        name: tuple(each.norm().item() for each in (ours[name] - right, theirs[name] - right, right))
        for name, right in exact.items()
    }


def missed(draws, dtype):
    """Returns the names of gradients whose largest errors miss the rule."""
    largest = {
        name: [max(each) for each in zip(*(draw[name] for draw in draws), strict=True)] for name in draws[0]
    }
    eps, most = torch.finfo(dtype).eps, max(right for *_, right in largest.values())
    # Those of the keys' bias, and of biases before a BatchNorm, are zero but for rounding.
    return [
        name
        for name, (ours, theirs, right) in largest.items()
        if ours > 3 * theirs + eps * (most if right < 1e-10 * most else right)
    ]


@pytest.mark.parametrize(
    "make",
    [segformer, pvt, pvt_v2, *(pytest.param(each, marks=pytest.mark.rest) for each in (pvt_v2_linear, glpn))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_models_of_one_dtype(make, dtype):
    """Without autocast Triton's kernels serve every block, forward and backward.

    Where a gradient is a small difference of large numbers, PyTorch's error may be small by luck. Where one
    step misses the rule, the largest errors of eight are compared, of images that differ in the last place.
    """
    own, accelerated = (model.to(dtype) for model in pair(make, "train"))
    precise, x = copy.deepcopy(own).double(), inputs(make, dtype=dtype)
    with noted_backends() as served:
        draws = [errors_of_gradients(precise, own, accelerated, x)]
    if missed(draws, dtype):
        noise = torch.rand(7, *x.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        images = x * (1 + 4 * torch.finfo(dtype).eps * (2 * noise - 1))
        draws += [errors_of_gradients(precise, own, accelerated, image) for image in images]
        assert missed(draws, dtype) == []
    expected = {"attention", "mlp_add"} if make is pvt else {"attention", "depthwise_conv_gelu", "linear_add"}
    assert {(operator, name) for operator, name in served if operator in expected} == {
        (operator, "triton") for operator in expected
    }
    assert ("linear", "triton") in served  # and PyTorch's, of the head, where there is no bias


@pytest.mark.skipif(
    "not segformer().supports_gradient_checkpointing", reason="this transformers has none for SegFormer"
)
@pytest.mark.usefixtures("_as_on_a_gpu")
def test_checkpoints_under_autocast_give_the_same_gradients():
    _, model = pair(segformer, "train", drop_path=0.3)
    steps = []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        steps.append(gradients_of(model, inputs(segformer), torch.bfloat16))
        enable_checkpointing(model)
    for name, each in steps[0].items():
        assert torch.equal(steps[1][name], each), name


@pytest.mark.usefixtures("_as_on_a_gpu")
@every_pyramid
def test_kernels_of_a_training_step(make):
    """By their launches, which do not run."""
    _, model = pair(make, "train", drop_path=0.3)
    found = collections.Counter()
    noting = launching.intercepted_launches(lambda launch: found.update([launch.kernel.__name__]))
    with noting, ck.use_backend("triton", "reference"):
        gradients_of(model, inputs(make), torch.bfloat16)
    blocks = 4 if make is glpn else 3
    assert found["_attention_fwd_kernel"] == blocks
    assert found["_linear_ends_kernel"] >= blocks  # fc2, and proj where images are dropped
    # The backward of Q, of K and V or of all three, of proj, fc1 and fc2, and of reductions.
    assert found["_linear_starts_kernel"] >= 4 * blocks
    mixing = 0 if make is pvt else blocks
    assert found["_depthwise_conv_gelu_fwd_kernel"] == mixing
    assert found["_depthwise_conv_gelu_bwd_conv_kernel"] == mixing
    assert found["_linear_gelu_kernel"] == blocks - mixing


# The operators that are called ----------------------------------------------------------------------------


_CVT = {"layer_norm", "conv_projection", "linear", "attention", "add_layer_norm", "linear_add"}
_PYRAMID = {"conv_embedding", "layer_norm", "attention", "add_layer_norm", "depthwise_conv_gelu"}
OPERATORS = {
    huggingface: _CVT,
    microsoft: _CVT,
    segformer: _PYRAMID | {"linear", "linear_add"},
    pvt: {"conv_embedding", "layer_norm", "linear", "attention", "add_layer_norm", "linear_gelu"},
    pvt_v2: _PYRAMID | {"linear", "linear_add"},
    pvt_v2_linear: {"conv_embedding", "layer_norm_gelu", "attention", "depthwise_conv_gelu"},
    glpn: _PYRAMID,
}


@pytest.mark.parametrize("make", OPERATORS)
@torch.no_grad()
def test_the_operators_that_are_called(make):
    _, fused = pair(make)
    called = record_all_calls()
    fused(inputs(make))
    assert set(called) >= OPERATORS[make]
    assert ck.coverage(fused, inputs(make)).called.keys() == set(called)
    called.clear()
    ck.restore(fused)(inputs(make))
    assert called == []


# What a fused forward leaves to the block -----------------------------------------------------------------


@pytest.mark.parametrize("make", [segformer, pvt, pvt_v2, glpn])
def test_an_image_that_upstream_refuses_is_refused(make):
    own, fused = pair(make)
    for model in (own, fused):
        with pytest.raises((RuntimeError, ValueError)):
            model(images(1, 3, 3))


def test_a_pvt_says_which_image_size_it_takes():
    expected = (
        "pixel_values: got 64×96 pixels, a grid of 16×24 patches, expected 70×70 pixels, a grid of 17×17: "
        "this PVT has position embeddings for images of its config's image_size alone"
    )
    for model in (ck.accelerate(pvt().eval()), ck.accelerate(pvt().eval(), freeze=True)):
        with pytest.raises(ValueError, match=f"^{expected}$"):
            model(images(1, 64, 96))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [False, True])
def test_tokens_of_a_pvt_have_upstreams_dtype(autocast, dtype):
    own, accelerated = pair(pvt)
    if not autocast:
        own, accelerated = own.to(dtype), accelerated.to(dtype)
    x = inputs(pvt) if autocast else inputs(pvt).to(dtype)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
        expected, actual = (model(x, output_hidden_states=True).hidden_states for model in (own, accelerated))
    assert [each.dtype for each in actual] == [each.dtype for each in expected]


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pvt_by_the_kernels_of_a_gpu(dtype, freeze):
    """Positions are added in float32, where upstream rounds twice."""
    own = pvt().eval()
    exact = copy.deepcopy(own).double()
    accelerated = ck.accelerate(copy.deepcopy(own).to(dtype), freeze=freeze)
    x = inputs(pvt).to(dtype)
    with torch.no_grad():
        expected, theirs = logits(exact(x.double())), logits(own.to(dtype)(x))
        with ck.use_backend("triton", "composed", "cpu", "reference"):
            ours = logits(accelerated(x))
    assert_accurate(ours, theirs, expected)


@pytest.mark.parametrize("hidden_act", ["gelu_new", "gelu_pytorch_tanh", "quick_gelu", "gelu_python"])
def test_every_gelu_of_transformers(hidden_act):
    own, fused = pair(pvt_v2, hidden_act=hidden_act)
    with torch.no_grad():
        assert relative(logits(fused(inputs(pvt_v2))), logits(own(inputs(pvt_v2)))) < 1e-5


def test_the_page():
    (block,) = python_blocks(section_of("accelerated.md", "## SegFormer, PVT, PVT v2 and GLPN"))
    assert run_blocks([block])["after"].shape == (1, 2, 24, 16)


def test_a_forward_that_is_only_bound_again_is_no_other_forward():
    """``use_kernels=True`` of transformers does so to activations for which it has no kernel."""
    model = segformer().eval()
    for module in model.modules():
        if type(module).__name__ == "GELUActivation":
            module.forward = types.MethodType(type(module).forward, module)
    ck.accelerate(model)
    assert all(row.fused for row in ck.coverage(model))
