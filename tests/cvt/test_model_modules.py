"""Hooks on the modules of a block, and other modules in their places, act as in a model of plain modules.

Other hooks and replacements, patched classes and forwards of a module's own are in tests/changes.py and in
``tests/cvt_kernels/models/test_reasons.py``.
"""

import copy

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize
from cvt.model import Attention, Block, ConvEmbed, Mlp, Stage
from tests.upstream import KERNELS_FIRST, assert_same_step, images, ours, relative

#: All layers keep the number of tokens and channels, so that any of them can be left out.
SQUARE = CvTConfig(
    embed_dims=(16, 32, 48),
    num_heads=(2, 2, 3),
    depths=(1, 1, 1),
    mlp_ratio=1,
    stride_kv=1,
    cls_token=True,
    embed_norm="batch_layer_norm",
)

CONVS = [f"attn.conv_proj_{letter}" for letter in "qkv"]
BYPASSED = ["norm1", "norm2", "attn.attn_drop", *CONVS]
BYPASSED += [f"{path}.{name}" for path in CONVS for name in ("conv", "bn")]
LINEARS = ["attn.proj_q", "attn.proj_k", "attn.proj_v", "attn.proj", "mlp.fc1", "mlp.fc2"]
EMBEDDING = ["patch_embed.proj", "patch_embed.bn", "patch_embed.norm", "pos_drop"]
OTHERS = ["attn", "attn.proj_drop", "mlp", "mlp.drop", "ls1", "ls2", "drop_path"]


# The model of plain modules -------------------------------------------------------------------------------


class PlainConvEmbed(ConvEmbed):
    def forward(self, x):
        x = self.bn(self.proj(x))
        return self.norm(x.flatten(2).transpose(1, 2)), tuple(x.shape[2:])


class PlainAttention(Attention):
    def forward(self, x, grid):
        q, k, v = (self._branch(letter, x, grid) for letter in "qkv")
        probabilities = self.attn_drop((q @ k.transpose(2, 3) * self.scale).softmax(-1))
        return self.proj_drop(self.proj((probabilities @ v).transpose(1, 2).flatten(2)))

    def _branch(self, letter, x, grid):
        image = x[:, 1:].unflatten(1, grid).permute(0, 3, 1, 2)
        y = getattr(self, f"conv_proj_{letter}")(image).flatten(2).transpose(1, 2)
        y = getattr(self, f"proj_{letter}")(torch.cat([x[:, :1], y], dim=1).contiguous())
        return y.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class PlainMlp(Mlp):
    def forward(self, x):
        x = self.fc1(x)
        return self.drop(self.fc2(self.drop(x * torch.sigmoid(1.702 * x))))


class PlainBlock(Block):
    def forward(self, x, grid):
        x = x + self.drop_path(self.ls1(self.attn(self.norm1(x), grid)))
        return x + self.drop_path(self.ls2(self.mlp(self.norm2(x))))


PLAIN = {ConvEmbed: PlainConvEmbed, Attention: PlainAttention, Mlp: PlainMlp, Block: PlainBlock}


class Tokens(nn.Module):
    """A stage that returns tokens alone."""

    def __init__(self, **overrides):
        super().__init__()
        self.stage = Stage(create_model(SQUARE, **overrides).config.stages[0])
        randomize(self)

    def forward(self, x):
        return self.stage(x)[0]


def pair(mode, **overrides):
    """Returns a stage and the same one of plain modules."""
    fused = Tokens(**overrides)
    getattr(fused, mode)()
    plain = copy.deepcopy(fused)
    for module in plain.modules():
        module.__class__ = PLAIN.get(type(module), type(module))
    return fused, plain


def module_at(model, place):
    """Returns the module of a stage, or of its block, that has this name."""
    return model.stage.get_submodule(place if place in EMBEDDING else f"blocks.0.{place}")


def replace(model, place, make):
    """Puts ``make(module)`` in the place of a module."""
    parent, _, name = place.rpartition(".")
    parent = model.stage.get_submodule(parent if place in EMBEDDING else f"blocks.0.{parent}".rstrip("."))
    setattr(parent, name, make(getattr(parent, name)))


def reasons(model):
    return [row.reason for row in ck.coverage(model) if not row.fused]


def assert_same(fused, plain):
    x = images(2, 16, 20)
    with ck.use_backend(*KERNELS_FIRST):
        if fused.training:
            assert_same_step(plain, fused, x, 2e-5)
        else:
            with torch.no_grad():
                assert relative(fused(x), plain(x)) < 1e-5


# Hooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("place", [*BYPASSED, *LINEARS, *OTHERS, *EMBEDDING])
def test_a_hook_fires_and_what_it_returns_counts(place, mode):
    models, fired = pair(mode, attn_drop_rate=0.2, drop_rate=0.2), []
    assert reasons(models[0]) == []
    for model in models:
        calls = []
        module_at(model, place).register_forward_hook(
            lambda module, args, out, calls=calls: calls.append(out.shape) or 1.5 * out + 0.1
        )
        fired.append(calls)
    assert_same(*models)
    assert fired[0] == fired[1]
    assert len(fired[0]) == (2 if place in ("mlp.drop", "drop_path") else 1)
    unseen = (*BYPASSED, "attn", "mlp", "patch_embed.norm")
    reason = f"{place.removeprefix('patch_embed.')} has forward hooks"
    assert reasons(models[0]) == ([reason] if place in unseen else [])


# Other modules --------------------------------------------------------------------------------------------


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


def without(module):
    return nn.Identity()


def with_fixed_bias(module):
    """Gives a convolution a bias that is no parameter."""
    del module.bias
    module.bias = torch.ones(16)
    return module


REPLACEMENTS = [
    *[(place, without) for place in (*BYPASSED, *LINEARS)],
    ("attn.conv_proj_v.conv", with_fixed_bias),
    *[(place, without) for place in ("attn.proj_drop", "mlp", "mlp.drop", "drop_path")],
    *[(place, lambda module: nn.Sequential(module, Doubling())) for place in EMBEDDING[:3]],
    ("attn.attn_drop", lambda module: nn.Dropout2d(0.0)),
    ("attn.conv_proj_q", lambda module: nn.Sequential(module, nn.Identity())),
    ("norm1", lambda module: nn.LayerNorm(16, elementwise_affine=False)),
    ("norm2", lambda module: nn.RMSNorm(16)),
]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("place", "make"), REPLACEMENTS, ids=[f"{place}-{i}" for i, (place, _) in enumerate(REPLACEMENTS)]
)
def test_another_module_in_the_place_of_one(place, make, mode):
    fused, plain = pair(mode)
    replace(fused, place, make)
    randomize(fused)
    replace(plain, place, make)
    plain.load_state_dict(fused.state_dict())
    assert_same(fused.train(mode == "train"), plain.train(mode == "train"))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


@pytest.mark.parametrize("place", ["stage0", "stage1", "stage0.patch_embed", "stage1.blocks.0"])
def test_a_wrapped_part_of_the_model(place):
    model, x = ours().train(), images(2, 32, 32)
    wrapped = copy.deepcopy(model)
    wrapped.set_submodule(place, Wrapper(wrapped.get_submodule(place)))
    assert relative(wrapped(x), model(x)) < 1e-5


def test_a_stage_without_blocks():
    model = ours().train()
    model.stage1.blocks = nn.ModuleList()
    assert model(images(2, 32, 32)).isfinite().all()


def test_images_are_checked_whatever_the_first_convolution_is():
    model = ours().train()
    model.stage0.patch_embed.proj = nn.Sequential(model.stage0.patch_embed.proj, Doubling())
    model.stage0.blocks[0].attn.conv_proj_k.bn = nn.Identity()
    with pytest.raises(ValueError, match="images: one of 32×32 leaves BatchNorm a single value"):
        model(images(1, 32, 32))
    assert model(images(2, 32, 32)).isfinite().all()


def test_a_block_in_which_modules_are_called_compiles_to_one_graph():
    fused, plain = pair("eval")
    for model in (fused, plain):
        replace(model, "attn.conv_proj_k.bn", without)
        replace(model, "norm2", lambda module: nn.RMSNorm(16))
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    x = images(2, 16, 20)
    assert relative(compiled(x), plain(x)) < 1e-5


# Tools ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantization_finds_every_linear_layer():
    if torch.backends.quantized.engine == "none":
        pytest.skip("this PyTorch has no engine for quantized layers")
    model = ours().eval()
    count = 4 * 6 + 1
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    kind = torch.ao.nn.quantized.dynamic.Linear
    assert sum(type(module) is kind for module in quantized.modules()) == count
    assert not any(type(module) is nn.Linear for module in quantized.modules())
    x = images(2, 32, 32)
    out = quantized(x)
    assert 0 < (out - model(x)).abs().max() < 0.2 * model(x).abs().max()
    assert all(row.fused for row in ck.coverage(quantized))
