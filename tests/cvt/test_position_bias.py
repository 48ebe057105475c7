"""Biases of attention by position in models: what they change, where their tables go, and what reads them."""

import copy
import warnings

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvT, create_model
from cvt.checkpoints import CheckpointError, load_checkpoint
from cvt.explanation import explain
from cvt_kernels.records import PositionBias
from cvt_kernels.reference import position_bias, resize_table
from tests.checks import not_built, recorded_operators
from tests.cvt.models import SMALL, small
from tests.upstream import ONE_STAGE

NATIVE = pytest.param("native", marks=pytest.mark.skipif(not_built(), reason="there is no extension"))
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
@pytest.mark.parametrize("backend", ["reference", "sdpa", NATIVE])
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
@pytest.mark.parametrize("backend", ["sdpa", NATIVE])
def test_every_table_is_added_to_the_scores(backend):
    """Compares with the softmax that calls the modules one by one, which a hook asks for."""
    model = biased(
        pool="avg"
    )  # the head reads no query with a bias of the last block where it reads a class token
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
    height, width = 12 + 2 * 5, 10 + 2 * 4
    expected = nn.functional.interpolate(
        attention.position_bias[None], (height, width), mode="bilinear", align_corners=True
    )[0]
    assert torch.equal(position.table, expected)
    assert position[1:] == ((12, 10), (6, 5), 2, None)
    assert attention.position_for((16, 16)).table is attention.position_bias
    other = biased()
    for table in tables_of(other).values():
        table.zero_()
    assert not torch.equal(model(IMAGES), other(IMAGES))


@torch.no_grad()
def test_a_checkpoint_for_images_of_another_size(tmp_path):
    model = biased()
    torch.save(model.state_dict(), tmp_path / "64.pth")
    larger = create_model(
        SMALL, position_bias=True, position_bias_size=96, checkpoint=tmp_path / "64.pth"
    ).eval()
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
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {name: table.detach().clone() for name, table in tables_of(model).items()}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IMAGES).float().sin().sum()
    loss.backward()
    optimizer.step()
    for name, table in tables_of(model).items():
        assert table.dtype == table.grad.dtype == torch.float32
        assert table.grad.abs().max() > 0
        assert not torch.equal(table, before[name])


def test_a_table_learns_what_only_position_tells():
    """Each query is to find the value left of it, where all queries and keys are alike."""
    torch.manual_seed(0)
    grid = (3, 4)
    table = torch.zeros(1, 5, 7, requires_grad=True)
    alike, values = torch.zeros(8, 12, 1, 4), torch.randn(8, 12, 1, 4)
    wanted = values.unflatten(1, grid).roll(1, 2)[:, :, 1:]
    optimizer = torch.optim.Adam([table], 0.3)
    for _ in range(60):
        out = ck.attention(alike, alike, values, position=PositionBias(table, grid, grid, 1))
        loss = (out.unflatten(1, grid)[:, :, 1:] - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01
    assert table[0].argmax() == 2 * 7 + 4  # no row down, one column to the right of its key


def test_compiles_without_graph_breaks():
    model = create_model(ONE_STAGE, position_bias=True, position_bias_size=48, pool="avg").eval()
    table = model.stage0.blocks[0].attn.position_bias
    nn.init.normal_(table)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    results = model(IMAGES), compiled(IMAGES)
    torch.testing.assert_close(results[1], results[0])
    # Gradients of the others are those of models without a table.
    ours, theirs = (torch.autograd.grad(result.sin().sum(), table)[0] for result in results)
    assert ours.any()
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_exports():
    model = create_model(ONE_STAGE, position_bias=True, position_bias_size=48).eval()
    expected = model(IMAGES)
    torch.testing.assert_close(torch.export.export(model, (IMAGES,)).module()(IMAGES), expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_records():
    model = biased()
    traced = torch.jit.trace(model, IMAGES, check_trace=False)
    torch.testing.assert_close(traced(IMAGES), model(IMAGES))
    torch.testing.assert_close(traced(IMAGES[:1]), model(IMAGES[:1]))


def test_data_parallel_training_step(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = biased(drop_path_rate=0.0).train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DDP's own deprecations
            wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
            wrapped(IMAGES).sin().sum().backward()
        model(IMAGES).sin().sum().backward()
        for ours, theirs in zip(tables_of(model).values(), tables_of(wrapped.module).values(), strict=True):
            torch.testing.assert_close(theirs.grad, ours.grad)
    finally:
        torch.distributed.destroy_process_group()


@torch.no_grad()
def test_explain_looks_at_the_probabilities_with_the_bias():
    model = biased()
    seen = []
    attention = model.stage2.blocks[-1].attn
    handle = attention.attn_drop.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    model(IMAGES)
    handle.remove()
    shown = explain(model, IMAGES)
    torch.testing.assert_close(shown.attention.flatten(2), seen[0][:, :, 0, 1:])
    expected = torch.special.entr(seen[0]).sum(-1).mean(-1)
    torch.testing.assert_close(shown.blocks[-1].entropy, expected)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", NATIVE])
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
    before = {name: table.clone() for name, table in tables_of(model).items()}
    expected = model(IMAGES)
    with pytest.raises(ValueError, match="stage0: attention has a bias by position"):
        ck.accelerate(model, freeze=True)
    quantized = copy.deepcopy(model)
    ck.quantize(quantized, [IMAGES])
    for name, table in tables_of(quantized).items():
        assert torch.equal(table, before[name])
        assert table.dtype == torch.float32
    assert not torch.equal(quantized(IMAGES), expected)


@torch.no_grad()
@pytest.mark.skipif(not_built(), reason="there is no extension")
def test_no_matrix_is_made_of_a_table():
    model = create_model("cvt_13", position_bias=True, depths=(1, 1, 1)).eval()
    tables = tables_of(model)
    attention = model.stage1.blocks[0].attn
    q, k = torch.randn(1, 784, 3, 64), torch.randn(1, 196, 3, 64)
    with ck.use_backend("native"), recorded_operators() as called:
        ck.attention(q, k, k, position=attention.position_for((28, 28)))
    assert called == ["cvt_kernels.attention_by_position.default"]
    matrix = position_bias(attention.position_for((28, 28)), 784, 196)
    assert matrix.numel() > 50 * tables["stage1.blocks.0.attn.position_bias"].numel()
