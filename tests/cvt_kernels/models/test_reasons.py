"""Reasons why a block, a stage or a layer runs its own modules: what coverage says, and that they run.

Each change of a module is made before and after ``accelerate``; what other changes there are is in
tests/changes.py.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cvt_kernels as ck
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests import microsoft_cvt
from tests.cvt_kernels.models.served import inputs, outermost_of
from tests.cvt_kernels.models.test_encoders import SIZES, TEXT, VIT, made
from tests.timm_models import timm_models
from tests.upstream import (
    assert_same_step,
    glpn,
    huggingface,
    images,
    logits,
    microsoft,
    ours,
    pvt_v2,
    pvt_v2_linear,
    relative,
    segformer,
    timm_pvt_v2,
    timm_vit,
)

# Changes, each of a module; one that returns a module puts it in the place. -------------------------------


def hook(module):
    module.register_forward_hook(lambda module, args, out: 1.5 * out if torch.is_tensor(out) else None)


def pre_hook(module):
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def backward_hook(module):
    module.register_full_backward_hook(lambda *args: None)


def own_forward(module):
    forward = module.forward
    module.forward = lambda x: 3 * forward(x)


def training(module):
    module.train()


def parametrized(module):
    parametrize.register_parametrization(module, "weight", Doubling())


def with_identity(module):
    return nn.Sequential(module, nn.Identity())


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


class Subclass(LinearInt8):
    pass


def by(make):
    """Returns a change that puts a module that is made so in the place."""
    return lambda module: make()


def setting(name, value):
    """Returns a change of an attribute."""
    return lambda module: setattr(module, name, value)


def of_class(name, base, home):
    """Returns a change that gives a module a class of somebody else's."""
    return lambda module: setattr(module, "__class__", type(name, (base,), {"__module__": home}))


def with_bias(conv):
    return nn.Conv2d(conv.in_channels, conv.in_channels, 3, 2, 1, groups=conv.groups)


def wider(conv):
    return nn.Conv2d(conv.in_channels, conv.in_channels, 5, 1, 2, groups=conv.groups)


def pointwise(bias, stride=1):
    """Returns a change that puts a convolution of single pixels in the place."""
    return lambda conv: nn.Conv2d(conv.in_channels, conv.out_channels, 1, stride, bias=bias)


def overlapping(conv):
    return nn.Conv2d(conv.in_channels, conv.in_channels, 2, 1)


# What is changed ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A change of the module ``path`` within ``row``, and the reason that coverage has for the row."""

    make: Any
    row: str
    path: str
    change: Any
    reason: str
    is_frozen: bool = False
    is_quantized: bool = False


def _parts(make):
    """Returns row, and the paths of a projection, its parts, a norm and an activation of a block."""
    if make is huggingface:
        row, names = "cvt.encoder.stages.1.layers.0", ("convolution", "normalization")
        projection = "attention.attention.convolution_projection_key.convolution_projection"
        others = "layernorm_after", "intermediate.activation"
    else:
        row, projection, names = "stage1.blocks.0", "attn.conv_proj_k", ("conv", "bn")
        others = "norm2", "mlp.act"
    return row, (projection, *(f"{projection}.{name}" for name in names), *others)


def _live_cvt():
    for make in (huggingface, microsoft):
        row, paths = _parts(make)
        _, conv, bn, norm, act = paths
        yield from (Case(make, row, path, hook, f"{path} has forward hooks") for path in paths)
        for path, change, reason in (
            (conv, pre_hook, "has forward hooks"),
            (bn, backward_hook, "has backward hooks"),
            (conv, parametrized, "is a ParametrizedConv2d, expected Conv2d"),
            (conv, with_bias, "a convolution has a bias"),
            (bn, by(Doubling), "is a Doubling, expected BatchNorm2d or SyncBatchNorm"),
            (norm, by(Doubling), "is a Doubling, expected LayerNorm"),
            (act, by(nn.SiLU), "is a SiLU, expected GELU"),
            (bn, own_forward, "has a forward of its own"),
            (bn, setting("momentum", 1.9), "a BatchNorm has momentum 1.9, expected a number in [0, 1] or"),
        ):
            yield Case(make, row, path, change, reason)


_FIRST_LAYERS = {
    segformer: ("segformer.stages.0.blocks.0", "mlp.activation_fn", "layernorm_before"),
    pvt_v2: ("pvt_v2.encoder.layers.0.blocks.0", "mlp.intermediate_act_fn", "layer_norm_1"),
    glpn: ("glpn.encoder.block.0.0", "mlp.intermediate_act_fn", "layer_norm_1"),
}


def _reduction(make, row):
    """Returns the path of the convolution that makes fewer keys, whose name differs by the version."""
    modules = make().get_submodule(row).named_modules()
    return next(path for path, m in modules if isinstance(m, nn.Conv2d) and m.groups == 1)


def _live_pyramids():
    for make, (row, act, norm) in _FIRST_LAYERS.items():
        for path, change, reason in (
            (act, setting("act", torch.relu), "the function of GELUActivation has been replaced"),
            (norm, setting("eps", 0.0), "LayerNorm has eps = 0, expected more than 0"),
            (act, by(nn.ReLU), "is a ReLU, expected GELU or "),
            ("mlp.dwconv.dwconv", wider, "the convolution is not one of 3×3"),
            (_reduction(make, row), overlapping, "the reduction has stride (1, 1), expected its kernel size"),
        ):
            yield Case(make, row, path, change, reason)


class Louder(microsoft_cvt.Mlp):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(microsoft_cvt.Attention):
    def forward_conv(self, x, h, w):
        return super().forward_conv(x + 1, h, w)


def _projection():
    """Returns the path of a projection of a decode head, which differs by the version."""
    modules = segformer().decode_head.named_modules()
    return next(path for path, module in modules if path.endswith(".1.proj"))


_OF_OTHERS = [
    (segformer, "segformer.stages.0.blocks.0", "attention", setting("head_dim", 4), "heads of 4 channels"),
    (microsoft, "stage0.blocks.0", "mlp", setting("__class__", Louder), "mlp is a Louder"),
    (
        *(microsoft, "stage2.blocks.1", "attn", setting("__class__", Shifted)),
        "forward_conv of attn is not that of Microsoft's Attention",
    ),
    (segformer, "decode_head", _projection(), hook, "1.proj has forward hooks"),
    (segformer, "decode_head", "linear_fuse", pointwise(True), "linear_fuse has a bias"),
    (segformer, "decode_head", "classifier", pointwise(True, 2), "classifier is not a 1×1 convolution"),
]

_PEFT = "is a peft.tuners.lora.layer.Linear; merge_and_unload() of the model"
#: Of the second stage of ours, and of the first layer of a PVT v2.
_OF_STAGE = [
    ("blocks.0.norm2", hook, "blocks.0 is not as upstream has it: norm2 has forward hooks"),
    ("blocks.0.mlp", backward_hook, "blocks.0 is not as upstream has it: mlp has backward hooks"),
    ("blocks.0.attn.proj_q", own_forward, "blocks.0.attn.proj_q has a forward of its own"),
    ("blocks.0.mlp.fc1", with_identity, "is a Sequential, expected a plain nn.Linear or LinearInt8"),
    ("blocks.0.attn.conv_proj_v.bn", training, "a module within it is in training mode"),
    ("blocks.0.attn.conv_proj_q.conv", setting("padding_mode", "reflect"), "a convolution pads by 'reflect'"),
    ("blocks.0.norm1", by(nn.Identity), "norm1 is a Identity, expected LayerNorm"),
    *(
        (place, by(make), f"{place} is a {name}, which upstream does not have there")
        for place in ("pos_drop", "blocks.0.attn.proj_drop", "blocks.0.drop_path")
        for name, make in (
            ("Linear", lambda: nn.Linear(32, 32)),
            ("LayerNorm", lambda: nn.LayerNorm(32)),
            ("GELU", nn.GELU),
            ("LinearInt8", lambda: LinearInt8.from_float(nn.Linear(32, 32))),
        )
    ),
]
_OF_LAYER = [
    ("mlp.dense1", with_identity, "mlp.dense1 is a Sequential, expected a plain nn.Linear or LinearInt8"),
    ("attention.query", of_class("Linear", nn.Linear, "peft.tuners.lora.layer"), f"attention.query {_PEFT}"),
    ("layer_norm_2", of_class("LayerNorm", nn.LayerNorm, "apex"), "layer_norm_2 is a apex.LayerNorm"),
    ("attention.value", parametrized, "attention.value is a ParametrizedLinear"),
    ("mlp.intermediate_act_fn", by(nn.ReLU), "mlp.intermediate_act_fn is a ReLU"),
    ("attention.spatial_reduction", setting("stride", (1, 1)), "the reduction has stride (1, 1)"),
    ("mlp.dropout", training, "a module within it is in training mode"),
    ("drop_path", by(lambda: nn.LayerNorm(16)), "drop_path is a LayerNorm, which upstream does not have"),
]
_QUANTIZED = [
    ("blocks.0.mlp.fc1", hook, "blocks.0.mlp.fc1 has forward hooks"),
    ("blocks.0.mlp.fc1", setting("__class__", Subclass), "blocks.0.mlp.fc1 is a Subclass"),
]
CASES = [
    *_live_cvt(),
    *_live_pyramids(),
    *(Case(*case) for case in _OF_OTHERS),
    *(Case(ours, "stage1", *case, is_frozen=True) for case in _OF_STAGE),
    *(Case(microsoft, "stage1", *case, is_frozen=True) for case in _OF_STAGE if "upstream does" in case[2]),
    *(Case(pvt_v2, _FIRST_LAYERS[pvt_v2][0], *case, is_frozen=True) for case in _OF_LAYER),
    *(Case(ours, "stage1", *case, is_frozen=True, is_quantized=True) for case in _QUANTIZED),
]


def changed(model, case):
    """Makes the change, with the same weights each time for a module that has some; returns the model."""
    path = f"{case.row}.{case.path}"
    torch.manual_seed(0)
    made = case.change(model.get_submodule(path))
    if isinstance(made, nn.Module):
        model.set_submodule(path, made.eval())
    return model


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.make.__name__}-{case.path}-{case.reason}")
def test_modules_run_and_coverage_says_why(case, served):
    own, x = case.make().eval(), inputs(case.make, 4)
    if case.is_quantized:
        ck.quantize(own)
    later = ck.accelerate(copy.deepcopy(own), freeze=case.is_frozen)
    later(x)
    plain = changed(own, case)
    models = [changed(later, case)]
    if not case.is_frozen:
        models.append(ck.accelerate(copy.deepcopy(plain), freeze=False))
    expected = logits(plain(x))
    for model in models:
        served.clear()
        # A difference may decide what is rounded.
        rounds = 0.1 if case.is_quantized else 1e-3 if "LinearInt8" in case.reason else 1e-5
        assert relative(logits(model(x)), expected) < rounds
        assert len(served) == (len(outermost_of(own)) - 1 if case.is_frozen else 0)
        rows = {row.path: row for row in ck.coverage(model)}
        assert not rows[case.row].fused
        assert case.reason in rows[case.row].reason


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("case", [*_live_cvt()], ids=lambda case: f"{case.make.__name__}-{case.reason}")
def test_a_training_step_runs_them(case, is_later):
    own = case.make().train()
    fused = copy.deepcopy(own)
    if is_later:
        ck.accelerate(fused, freeze=False)
    fused = ck.accelerate(changed(fused, case), freeze=False)
    assert_same_step(changed(own, case), fused, images(), 2e-5)


# Models that are refused whole ----------------------------------------------------------------------------


class OtherBlock(microsoft_cvt.Block):
    def forward(self, x, size):
        return super().forward(x, *size)


OtherBlock.__name__ = "Block"


def of_another_signature():
    block = microsoft().stage0.blocks[0]
    block.__class__ = OtherBlock
    return block


def hooked():
    model = microsoft().eval()
    for stage in (model.stage0, model.stage1, model.stage2):
        hook(stage.get_submodule("blocks.0.mlp.fc1"))
    return model


def with_gates():
    model = timm_vit()
    for block in model.blocks:
        block.attn.gate = nn.Linear(32, 32)
    return model


def with_attention_by_name():
    model = segformer()
    model.config._attn_implementation = "eager"
    return model


def of_timms(name):
    return getattr(timm_models("vision_transformer"), name)


_TRAINING = r"model: is in training mode, expected model.eval\(\)"
_NORM = "a timm.layers.norm.LayerNorm, expected Identity"
_IMAGES = VIT | {"image_size": [32, 32], "patch_size": [8, 8]}
_SWIN = {"image_size": 32, "embed_dim": 16, "depths": [1], "num_heads": [1]}
#: Makers of models, and what ``accelerate`` says of them.
REFUSED = [
    (lambda: nn.Sequential(nn.LayerNorm(4)), "got Sequential of torch, expected a model with blocks"),
    (lambda: microsoft(method="linear").stage0.blocks[0], "itself: conv_proj_q is not a Sequential"),
    (of_another_signature, "forward takes x, size; expected x, h, w"),
    (lambda: made("Dinov2Model", **SIZES, use_swiglu_ffn=True), "the MLP is a SwiGLU"),
    (lambda: made("BeitModel", **VIT, use_relative_position_bias=True), "its scores have a bias by position"),
    (lambda: made("SwinModel", **_SWIN), "it attends in windows"),
    (lambda: made("DINOv3ViTModel", **VIT), r"its queries and keys are rotated by position \(RoPE\)"),
    (lambda: made("InternVLVisionModel", **_IMAGES), "its queries and keys may be normalized"),
    (lambda: made("CLIPTextModel", **TEXT), "attention is causal"),
    (lambda: made("ViTModel", **VIT, hidden_act="relu"), "is a ReLU, expected GELU or QuickGELU"),
    (lambda: timm_vit(qk_norm=True), f"attn.q_norm is {_NORM}"),
    (lambda: timm_vit(scale_attn_norm=True), f"attn.norm is {_NORM}"),
    (lambda: timm_vit(scale_mlp_norm=True), f"mlp.norm is {_NORM}"),
    (with_gates, "attn.gate is a Linear, expected Identity"),
    (lambda: timm_vit(mlp_layer=of_timms("SwiGLUPacked")), "mlp is a GluMlp"),
    (lambda: timm_vit(act_layer=nn.ReLU), "mlp.act is a ReLU, expected GELU or QuickGELU"),
    (lambda: timm_vit(norm_layer=nn.RMSNorm), "norm1 is a RMSNorm, expected LayerNorm"),
    (lambda: timm_vit(block_fn=of_timms("ResPostBlock")), "its LayerNorms come after attention and the MLP"),
    (lambda: timm_pvt_v2(linear=True), "its attention is linear"),
]
#: The same with ``freeze=True``.
NOT_FROZEN = [
    (lambda: huggingface().train(), _TRAINING),
    (lambda: pvt_v2().train(), _TRAINING),
    (lambda: ours().eval().stage0.blocks[0], "got Block of cvt, expected one with a whole stage"),
    (lambda: pvt_v2().pvt_v2.encoder.layers[0].blocks[0].attention, "got PvtV2SelfAttention of transformers"),
    (pvt_v2_linear, r"none of the 3 layers .*: its attention is linear, which no operator"),
    (hooked, r"none of the 3 stages .*stage0: blocks.0.mlp.fc1 has forward hooks"),
    (with_attention_by_name, r"none of the 3 layers of SegformerFor\w+ can be frozen.*'eager'"),
]


@pytest.mark.parametrize(
    ("make", "message", "freeze"),
    [*((*each, None) for each in REFUSED), *((*each, True) for each in NOT_FROZEN)],
)
def test_models_that_are_refused_stay_as_they_are(make, message, freeze):
    model = make()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message) as error:
        ck.accelerate(model, freeze=freeze)
    assert [type(module) for module in model.modules()] == classes
    if "is supported; the first" in str(error.value):
        assert str(error.value).endswith(ck.coverage(model)[0].reason)
