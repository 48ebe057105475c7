"""``prune_weights``: which units and heads it removes, and that the rest computes what it did."""

import copy
import dataclasses

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt import create_model, prune_weights, save_huggingface
from cvt.huggingface import Preprocessing
from cvt.weight_pruning import hidden_units, pruned_config
from tests.checks import assert_accurate
from tests.cvt.models import SMALL, equal, small

VARIANTS = {
    "plain": {},
    "layer scale and scale by heads": {"layer_scale": 0.5, "scale": "head_dim"},
    "without biases, with the mean": {"qkv_bias": False, "pool": "avg"},
    "bias by position": {"position_bias": True, "position_bias_size": 64},
    "hybrid": {"mixing": "hybrid"},
    "tokens that drop out": {"token_keep": 0.5},
}


def labeled(seed, count, size=48):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, size, size, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def blocks(model):
    return [block for stage in (model.stage0, model.stage1, model.stage2) for block in stage.blocks]


def places(rows, among):
    """Returns the indices of a matrix's rows in another matrix, which has all of them in the same order."""
    found = (rows[:, None] == among).all(2)
    assert (found.sum(1) == 1).all()
    indices = found.int().argmax(1)
    assert (indices.diff() > 0).all()
    return indices


def left(model, smaller):
    """Returns which units and which heads of each block are left, found by their weights."""
    for whole, part in zip(blocks(model), blocks(smaller), strict=True):
        units = places(part.mlp.fc1.weight, whole.mlp.fc1.weight)
        heads = [
            layer.weight.unflatten(0, (-1, 8)).flatten(1) for layer in (part.attn.proj_q, whole.attn.proj_q)
        ]
        yield units, places(*heads)


# The function ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_it_computes_the_whole_model_without_some_columns(overrides):
    model = small(**overrides).double().eval()
    heads = 0.0 if "token_keep" in overrides else 0.5  # whose attention chooses the tokens
    smaller = prune_weights(model, mlp=0.25, heads=heads)
    images = labeled(1, 2)[0].double()
    with torch.no_grad():
        whole, pruned = model(images), smaller(images)
        for block, (units, kept) in zip(blocks(model), left(model, smaller), strict=True):
            is_left = torch.zeros(block.mlp.fc2.in_features).index_fill(0, units, 1)
            block.mlp.fc2.weight.mul_(is_left)
            is_left = torch.zeros(block.attn.num_heads).index_fill(0, kept, 1).repeat_interleave(8)
            block.attn.proj.weight.mul_(is_left)
        masked = model(images)
    assert (pruned - masked).abs().max() <= 1e-10
    assert (pruned - whole).abs().max() > 1e-3
    assert hidden_units(smaller.config) == (24, 48, 72)
    assert [block.mlp.fc2.in_features for block in blocks(smaller)] == [24, 48, 48, 72, 72, 72]
    numbers = [1, 2, 2, 3, 3, 3] if not heads else [1, 1, 1, 2, 2, 2]
    assert [block.attn.num_heads for block in blocks(smaller)] == numbers
    assert [block.attn.scale for block in blocks(smaller)] == [block.attn.scale for block in blocks(model)]


def test_heads_of_a_model_that_drops_tokens():
    model = small(token_keep=0.5).eval()
    smaller = prune_weights(model, mlp=0.5, heads=0.5, batches=[labeled(1, 2)])
    assert smaller.config.token_keep == 0.5
    assert smaller(labeled(2, 2)[0]).isfinite().all()


# The choice -----------------------------------------------------------------------------------------------


def test_magnitude():
    model = small().double()
    for block in blocks(model):
        block.attn.proj_v.bias.data.mul_(50)  # or biases would not decide
    smaller = prune_weights(model, mlp=0.5, heads=0.5)
    for block, (units, heads) in zip(blocks(model), left(model, smaller), strict=True):
        mlp, attn = block.mlp, block.attn
        sizes = mlp.fc1.weight.square().sum(1) + mlp.fc1.bias.square() + mlp.fc2.weight.square().sum(0)
        assert units.tolist() == sorted(sizes.topk(len(units)).indices.tolist())
        sizes = attn.proj.weight.square().sum(0)
        for layer in (attn.proj_q, attn.proj_k, attn.proj_v):
            sizes = sizes + layer.weight.square().sum(1) + layer.bias.square()
        sizes = sizes.unflatten(0, (-1, 8)).sum(1)
        assert heads.tolist() == sorted(sizes.topk(len(heads)).indices.tolist())


def test_taylor_is_the_gradient_of_gates():
    """Each image by itself: a unit's gate, 1, has the gradient that removing it follows to first order."""
    model = small(layer_scale=0.5).double().eval()
    images, labels = labeled(3, 3)
    smaller = prune_weights(model, mlp=0.5, heads=0.5, batches=[(images.double(), labels)])
    gates = {}
    for block in blocks(model):
        for layer, width in ((block.mlp.fc2, 1), (block.attn.proj, 8)):
            gate = torch.ones(layer.in_features // width, dtype=torch.float64, requires_grad=True)
            gates[layer] = gate
            layer.register_forward_pre_hook(
                lambda layer, inputs, gate=gate, width=width: inputs[0] * gate.repeat_interleave(width)
            )
    sums = dict.fromkeys(gates, 0.0)
    for i in range(len(images)):
        loss = F.cross_entropy(model(images[i : i + 1].double()), labels[i : i + 1])
        for layer, gradient in zip(gates, torch.autograd.grad(loss, list(gates.values())), strict=True):
            sums[layer] = sums[layer] + gradient.abs()
    for block, (units, heads) in zip(blocks(model), left(model, smaller), strict=True):
        for layer, chosen in ((block.mlp.fc2, units), (block.attn.proj, heads)):
            assert chosen.tolist() == sorted(sums[layer].topk(len(chosen)).indices.tolist())
    by_size = prune_weights(model, mlp=0.5, heads=0.5, batches=[(images, labels)], saliency="magnitude")
    assert not equal(by_size.state_dict(), smaller.state_dict())


def test_batches_do_not_matter_and_the_model_stays_as_it_is():
    model = small(num_classes=10).double().train()
    model.labels = [f"class {i}" for i in range(10)]
    model.preprocessing = Preprocessing(48, 0.9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images, labels = labeled(4, 4)
    images = images.double()
    together = prune_weights(model, mlp=0.25, heads=0.5, batches=[(images, labels)])
    parts = [(images[:1], labels[:1]), (images[1:], labels[1:])]
    with torch.inference_mode():
        apart = prune_weights(model, mlp=0.25, heads=0.5, batches=parts)
    assert equal(together.state_dict(), apart.state_dict())
    assert equal(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.training
    assert together.training
    assert (together.labels, together.preprocessing) == (model.labels, model.preprocessing)
    assert not prune_weights(model.eval(), heads=0.5).training


def test_equal_units_stay_in_order():
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        for block in blocks(model):
            block.mlp.fc1.bias.copy_(torch.arange(block.mlp.fc1.out_features) % 2)
    smaller = prune_weights(model, mlp=0.75)
    assert all(block.mlp.fc1.bias.eq(1).all() for block in blocks(smaller))


# Sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("units", "fraction", "rest"),
    [
        (256, 0.25, 192),
        (1536, 0.3, 1072),
        (64, 0.1, 56),
        (16, 0.25, 12),
        (16, 0.5, 8),
        (20, 0.25, 16),
        (6, 0.5, 3),
    ],
)
def test_numbers_of_hidden_units(units, fraction, rest):
    config = dataclasses.replace(SMALL, mlp_ratio=(units / 8, 4.0, 4.0))
    assert hidden_units(pruned_config(config, mlp=fraction))[0] == rest


def test_numbers_of_heads():
    config = pruned_config(create_model("cvt_13").config, heads=0.34)
    assert (config.num_heads, config.head_dim, config.mlp_ratio) == ((1, 2, 4), (64, 64, 64), (4.0,) * 3)
    again = pruned_config(config, heads=0.5)
    assert (again.num_heads, again.head_dim) == ((1, 1, 2), (64, 64, 64))
    hundred = dataclasses.replace(SMALL, embed_dims=(100, 200, 300), num_heads=(100, 100, 100))
    assert pruned_config(hundred, heads=0.29).num_heads == (71, 71, 71)


# What takes the smaller model -----------------------------------------------------------------------------


def test_directories_and_prune_again(tmp_path):
    model = prune_weights(small(activation="gelu"), mlp=0.25, heads=0.5)
    model.save_pretrained(tmp_path)
    again = create_model(checkpoint=tmp_path)
    assert again.config == model.config
    assert equal(again.state_dict(), model.state_dict())
    with pytest.raises(ValueError, match="has no heads that do not fill the width of their stage"):
        save_huggingface(model, tmp_path / "hf")
    twice = prune_weights(again, mlp=0.5, heads=0.5)
    assert (hidden_units(twice.config), twice.config.num_heads) == ((16, 24, 40), (1, 1, 1))
    assert twice(labeled(1, 2)[0]).shape == (2, 10)


def test_hugging_face_takes_fewer_hidden_units(tmp_path):
    from transformers import CvtForImageClassification

    model = prune_weights(small(activation="gelu").eval(), mlp=0.3)
    assert hidden_units(model.config) == (24, 48, 64)
    save_huggingface(model, tmp_path)
    theirs = CvtForImageClassification.from_pretrained(tmp_path).eval()
    images = labeled(1, 2)[0]
    with torch.no_grad():
        assert torch.allclose(theirs(images).logits, model(images), atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["cpu", "composed"])
def test_frozen_stages_whose_heads_do_not_fill_them(backend):
    model, images = prune_weights(small().eval(), mlp=0.3, heads=0.5), labeled(1, 2)[0]
    with ck.use_backend("reference"):
        plain = model(images)
    exact = copy.deepcopy(model).double()(images.double())
    frozen = ck.accelerate(copy.deepcopy(model), freeze=True)
    with ck.use_backend(backend, "cpu", "sdpa", "reference"):
        assert_accurate(frozen(images), plain, exact, floor=4)
        rows = ck.coverage(frozen, images)
    served = [row.backends["transformer_block"] for row in rows if row.class_name == "Stage"]
    assert served == [backend] * 3


def test_quantized_models():
    pruned = prune_weights(small().eval(), mlp=0.25, heads=0.5)
    images = labeled(1, 2)[0]
    exact = pruned(images)
    ck.quantize(pruned)
    assert (pruned(images) - exact).norm() < 0.05 * exact.norm()
    with pytest.raises(ValueError, match=r"model: is quantized \(stage0\.blocks\.0\..*prune first"):
        prune_weights(pruned, mlp=0.5)


# Bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mlp": 0.99}, "mlp: 0.99 removes all 32 hidden units of stage 0"),
        ({"heads": 1 - 1e-12}, "heads: 1 removes all 1 heads of stage 0"),
        ({"heads": 0.3}, "heads: 0.3 removes none of the 1, 2, 3 heads of the stages"),
        ({"mlp": 0.001}, "mlp: 0.001 removes none of the 32, 64, 96 hidden units"),
        ({"mlp": 0.5, "saliency": "taylor"}, "batches: got None, expected images with labels"),
        ({"mlp": 0.5, "batches": []}, "batches: got no images"),
        (
            {"mlp": 0.5, "batches": [labeled(0, 1), (labeled(0, 2)[0], torch.zeros(3).long())]},
            r"batches\[1\]: got labels \(3,\) of torch.int64, expected \(2,\)",
        ),
    ],
)
def test_bad_settings(settings, message):
    """Single values are in test_arguments.py."""
    with pytest.raises(ValueError, match=message):
        prune_weights(small(), **settings)


def broken(model):
    model.stage0.blocks[0].mlp.fc1.weight.data[0, 0] = torch.nan


def other_modules(model):
    model.stage0.blocks[0].norm1 = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.reset_classifier(0), "has no head"),
        (broken, r"stage0\.blocks\.0 has weights or activations that are not finite"),
        (other_modules, "has other modules than its configuration says"),
    ],
)
def test_bad_models(change, message):
    model = small()
    change(model)
    with pytest.raises(ValueError, match=f"model: {message}"):
        prune_weights(model, mlp=0.5, batches=[labeled(0, 1)])
