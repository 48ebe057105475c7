"""Biases of attention by position in models: what they change, where their tables go, and what reads them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt import CvT, create_model
from cvt.checkpoints import CheckpointError, load_checkpoint
from cvt_kernels.reference import resize_table
from tests.checks import not_built
from tests.cvt.models import SMALL, equal, small

CPU_KERNELS = pytest.param("cpu", marks=pytest.mark.skipif(not_built(), reason="there is no extension"))
IMAGES = torch.randn(2, 3, 64, 80, generator=torch.Generator().manual_seed(0))


def biased(**overrides):
    """Returns a small model whose tables matter, made for images of 64×64."""
    model = small(position_bias=True, position_bias_size=64, **overrides).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("position_bias"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    return model


def tables_of(model):
    return {name: p for name, p in model.named_parameters() if name.endswith("attn.position_bias")}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "sdpa", CPU_KERNELS])
def test_weights_without_tables_give_the_very_bits_of_the_plain_model(backend, tmp_path):
    plain = small().eval()
    torch.save(plain.state_dict(), tmp_path / "plain.pth")
    model = create_model(SMALL, position_bias=True, checkpoint=tmp_path / "plain.pth").eval()
    assert len(tables_of(model)) == sum(SMALL.depths)
    assert not any(table.any() for table in tables_of(model).values())
    with ck.use_backend(backend, "reference"):
        assert torch.equal(model(IMAGES), plain(IMAGES))
        nn.init.normal_(model.stage2.blocks[0].attn.position_bias)
        assert not torch.equal(model(IMAGES), plain(IMAGES))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", CPU_KERNELS])
def test_every_table_is_added_to_the_scores(backend):
    """Compares with the softmax that calls the modules one by one, which a hook asks for."""
    model = biased(pool="avg")  # a class token in the last block has no bias
    with ck.use_backend(backend, "reference"):
        fused = model(IMAGES)
    seen = {}
    for name, module in model.named_modules():
        if name.endswith("attn_drop"):
            module.register_forward_hook(lambda _, inputs, __, name=name: seen.update({name: inputs[0]}))
    torch.testing.assert_close(model(IMAGES), fused, rtol=1e-4, atol=1e-4)
    assert len(seen) == sum(SMALL.depths)
    for table in tables_of(model).values():
        before = table.clone()
        table.zero_()
        assert (model(IMAGES) - fused).abs().max() > 1e-5
        table.copy_(before)


def test_names_and_sizes():
    model = create_model("cvt_13", position_bias=True)
    tables = tables_of(model)
    assert {name: tuple(table.shape) for name, table in tables.items() if "blocks.0" in name} == {
        "stage0.blocks.0.attn.position_bias": (1, 110, 110),
        "stage1.blocks.0.attn.position_bias": (3, 54, 54),
        "stage2.blocks.0.attn.position_bias": (6, 26, 26),
    }
    assert set(tables) <= model.no_weight_decay()
    assert not tables_of(create_model("cvt_13"))


@torch.no_grad()
def test_other_images_read_an_interpolated_table():
    model = biased()
    attention = model.stage0.blocks[0].attn
    position = attention.position_for((12, 10))
    sizes = 12 + 2 * 5, 10 + 2 * 4
    expected = F.interpolate(attention.position_bias[None], sizes, mode="bilinear", align_corners=True)[0]
    assert torch.equal(position.table, expected)
    assert position[1:] == ((12, 10), (6, 5), 2, None)
    assert attention.position_for((16, 16)).table is attention.position_bias


@torch.no_grad()
def test_a_checkpoint_for_images_of_another_size(tmp_path):
    model = biased()
    torch.save(model.state_dict(), tmp_path / "64.pth")
    options = {"position_bias": True, "position_bias_size": 96}
    larger = create_model(SMALL, **options, checkpoint=tmp_path / "64.pth").eval()
    for name, table in tables_of(larger).items():
        given = model.get_parameter(name)
        assert torch.equal(table, resize_table(given, tuple(table.shape[1:])))
        assert torch.equal(table[:, :: table.shape[1] - 1, 0], given[:, :: given.shape[1] - 1, 0])  # corners
    images = torch.randn(1, 3, 96, 96)
    torch.testing.assert_close(larger(images), model(images))
    model.save_pretrained(tmp_path / "saved")
    again = CvT.from_pretrained(tmp_path / "saved", position_bias_size=96).eval()
    torch.testing.assert_close(again(images), model(images))
    tensors = model.state_dict()
    tensors["stage1.blocks.0.attn.position_bias"] = torch.zeros(3, 14, 14)
    torch.save(tensors, tmp_path / "heads.pth")
    with pytest.raises(CheckpointError, match=r"position_bias \(3, 14, 14\) for \(2, 14, 14\)"):
        load_checkpoint(model, tmp_path / "heads.pth")


def test_tables_train():
    model = biased(drop_path_rate=0.0, pool="avg").train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IMAGES).float().sin().sum()
    loss.backward()
    for table in tables_of(model).values():
        assert table.grad.dtype == torch.float32
        assert table.grad.any()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_exports_and_traces():
    model = biased()
    traced = torch.jit.trace(model, IMAGES, check_trace=False)
    for program in (torch.export.export(model, (IMAGES,)).module(), traced):
        torch.testing.assert_close(program(IMAGES), model(IMAGES))
    torch.testing.assert_close(traced(IMAGES[:1]), model(IMAGES[:1]))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", CPU_KERNELS])
def test_tokens_that_drop_out_keep_the_bias_of_the_others(backend):
    model = biased(token_keep=0.6)
    with ck.use_backend(backend, "reference"):
        fused = model(IMAGES)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(IMAGES), fused, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(fused, biased()(IMAGES))


@torch.no_grad()
def test_quantizing_leaves_the_tables_alone_and_freezing_refuses_them():
    model = biased()
    with pytest.raises(ValueError, match="stage0: attention has a bias by position"):
        ck.accelerate(model, freeze=True)
    quantized = copy.deepcopy(model)
    ck.quantize(quantized, [IMAGES])
    assert equal(tables_of(quantized), tables_of(model))
    assert not torch.equal(quantized(IMAGES), model(IMAGES))
