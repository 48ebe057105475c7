"""timm's ViT, DeiT, DINOv2 and PVT v2: what is special about them, beside test_encoders.py."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from tests.checks import assert_accurate
from tests.conftest import DATA
from tests.timm_models import is_installed, timm_models
from tests.upstream import TIMMS, images, relative, timm_pvt_v2, timm_vit


def blocks_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Block")]


@pytest.mark.parametrize("make", TIMMS)
def test_the_models_compute_what_timm_1_0_31_does(make):
    """The timm that is installed does, or the stand-ins."""
    with np.load(DATA / "timm_tiny.npz") as arrays:
        names, output, gradient = (arrays[f"{make.__name__} {what}"] for what in _KEPT)
    model, x = make(), images(2, 32, 32).requires_grad_()
    assert [f"{name} {tuple(t.shape)}" for name, t in model.state_dict().items()] == names.tolist()
    out = model(x)
    out.sin().sum().backward()
    assert relative(out.detach(), torch.from_numpy(output)) < 1e-5
    assert relative(x.grad[:, :, ::4, ::4], torch.from_numpy(gradient)) < 1e-5


_KEPT = "names", "output", "gradient"


#: Models, each with the operators of its rows in the order of ``coverage``.
_STAGE = ["conv_embedding", "transformer_block", "layer_norm"]
MODELS = {
    "ViT": (functools.partial(timm_vit, init_values=None, reg_tokens=0), 2 * [["transformer_block"]]),
    "DINOv2": (timm_vit, 2 * [["transformer_block"]]),
    "without biases": (functools.partial(timm_vit, qkv_bias=False), 2 * [["transformer_block"]]),
    "tanh": (
        functools.partial(timm_vit, act_layer=functools.partial(nn.GELU, approximate="tanh")),
        2 * [["transformer_block"]],
    ),
    "PyTorch's LayerNorm": (
        functools.partial(timm_vit, norm_layer=nn.LayerNorm),
        2 * [["transformer_block"]],
    ),
    "PVT v2": (timm_pvt_v2, [["transformer_block"], _STAGE, [], []]),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("freeze", [None, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_served(name, freeze, dtype):
    make, operators = MODELS[name]
    own, x = make().to(dtype), images(2, 32, 32, dtype)
    classes = [type(module) for module in own.modules()]
    exact = copy.deepcopy(own).double()(x.double())
    model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    for _ in range(2):
        assert_accurate(model(x), own(x), exact, floor=4)
    rows = ck.coverage(model, x)
    assert [(row.fused, [*row.backends]) for row in rows] == [(True, each) for each in operators]
    assert {backend for row in rows for backend in row.backends.values()} == {"cpu"}
    assert [type(module) for module in ck.restore(model).modules()] == classes


def test_a_block_that_looks_like_timms_is_not_taken_for_it():
    """Its arithmetic may be another one."""
    model = timm_vit()
    for block in blocks_of(model):
        kind = type(block)
        members = {"forward": lambda self, x: x, "__init__": kind.__init__, "__module__": "vendored"}
        block.__class__ = type("Block", (nn.Module,), members)
    with pytest.raises(ValueError, match="expected a model with blocks of one of these"):
        ck.accelerate(model)


@torch.no_grad()
def test_calls_that_are_left_to_timm(served):
    """Those with a mask, of causal attention, under autocast, and with gradients."""
    own, x = timm_vit(), images(2, 32, 32)
    model = ck.accelerate(copy.deepcopy(own))
    mask = torch.zeros(19, 19)
    mask[:, 3:] = -torch.inf
    for settings in ({"attn_mask": mask}, {"is_causal": True}):
        out, expected = (each.forward_features(x, **settings) for each in (model, own))
        assert torch.equal(out, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), own(x))
    with torch.enable_grad():
        assert model(x).requires_grad
    assert not served
    tokens = torch.randn(2, 5, 32)
    for arguments in ({}, {"attn_mask": None, "is_causal": False}):
        out = model.blocks[0](tokens, **arguments)
        assert relative(out, own.blocks[0](tokens)) < 1e-6
    assert len(served) == 2


@torch.no_grad()
def test_grids_in_one_argument(served):
    own = timm_pvt_v2()
    block, same = ck.accelerate(copy.deepcopy(own)).stages[0].blocks[0], own.stages[0].blocks[0]
    x = torch.randn(2, 24, 16)
    for grid in ((4, 6), [6, 4], torch.Size((4, 6))):
        assert relative(block(x, grid), same(x, grid)) < 1e-5
    assert relative(block(x=x, feat_size=(4, 6)), same(x, (4, 6))) < 1e-5
    assert len(served) == 4
    with pytest.raises(RuntimeError):
        block(x, (5, 6))
    with pytest.raises(TypeError):
        block(x)
    with pytest.raises(TypeError, match="unflatten"):
        block(x, 24)


@torch.no_grad()
def test_maps_have_the_strides_of_timms():
    own, x = timm_pvt_v2(), images(1, 32, 48)
    model = ck.accelerate(copy.deepcopy(own))
    for i in range(2):
        stage, same = (nn.Sequential(each.patch_embed, *each.stages[: i + 1]) for each in (model, own))
        assert stage(x).stride() == same(x).stride()


#: Names of timm's, with what makes them small.
PUBLISHED = {
    "vit_small_patch16_224": ("vision_transformer", {"depth": 1}),
    "deit_small_patch16_224": ("deit", {"depth": 1}),
    "vit_small_patch14_dinov2": ("vision_transformer", {"depth": 1, "img_size": 224}),
    "vit_small_patch14_reg4_dinov2": ("vision_transformer", {"depth": 1, "img_size": 224}),
    "vit_base_patch16_siglip_224": ("vision_transformer", {"depth": 1}),
    "pvt_v2_b0": ("pvt_v2", {}),
}


@torch.no_grad()
@pytest.mark.skipif(not is_installed(), reason="timm is not installed")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name):
    module, config = PUBLISHED[name]
    torch.manual_seed(0)
    own, x = getattr(timm_models(module), name)(**config).eval(), images(1, 224, 224)
    exact = copy.deepcopy(own).double()(x.double())
    model = ck.accelerate(copy.deepcopy(own))
    assert_accurate(model(x), own(x), exact, floor=4)
    assert all(row.fused for row in ck.coverage(model))
