"""Token pruning in the model: which tokens stay, what they cost, gradients, and ways to run such a model."""

import copy
import dataclasses
import functools
import json
import math
import re

import pytest
import torch

import cvt_kernels as ck
from cvt import create_model
from cvt.config import PRESETS
from cvt.factory import randomize
from cvt.images import sample_photos
from cvt.model import tokens_to_map
from cvt.tools.commands import main
from cvt.tools.commands.export import export
from cvt.tools.evaluation import cost
from cvt.tools.explanation import explain
from cvt.tools.training.recipe import MODELS
from cvt_kernels.ops.token_selection import spread_keys
from tests.checks import bad, python_blocks, run_blocks, section_of
from tests.processes import run_python

DEEP = dataclasses.replace(
    MODELS["cvt_nano"], embed_dims=(8, 16), depths=(1, 4), num_classes=5, stride_kv=2,
    patch_sizes=(7, 3), patch_strides=(4, 2), patch_paddings=(2, 1),
)  # fmt: skip
X = torch.randn(3, 3, 64, 48, generator=torch.Generator().manual_seed(3))


def deep(**overrides):
    """Returns a model whose attention prefers some tokens: the grid of its last stage is 8×6."""
    model = create_model(DEEP, **overrides).eval()
    randomize(model)
    with torch.no_grad():
        for block in model.stage1.blocks:
            block.attn.proj_q.weight.mul_(6.0)
    return model


@pytest.fixture(autouse=True)
def _reference():
    with ck.use_backend("reference"):
        yield


# What is computed -----------------------------------------------------------------------------------------


def by_masks(model, images, keep_count):
    """Returns the last tokens of a model whose blocks compute everything and change kept tokens only."""
    stage = model.stage1
    x, grid = stage.patch_embed(tokens_to_map(*model.stage0(images)))
    x = torch.cat([stage.cls_token.expand(len(x), 1, -1), x], 1)
    kept = torch.ones(x.shape[:2], dtype=torch.bool)
    masks = []
    for block in stage.blocks:
        masks.append(kept[:, 1:])
        seen = {}
        layers = (block.attn.proj_q, block.attn.proj_k)
        keep_result = functools.partial(lambda kept, module, inputs, out: kept.update({module: out}), seen)
        hooks = [layer.register_forward_hook(keep_result) for layer in layers]
        x = torch.where(kept[..., None], block(x, grid), x)
        for hook in hooks:
            hook.remove()
        if block.token_keep == 1:
            continue
        q, k = (seen[layer].unflatten(2, (2, -1)) for layer in layers)
        if model.config.pool == "cls":
            query = q[:, :1]
        else:
            query = (q * kept[..., None, None])[:, 1:].sum(1, keepdim=True)
            query = query / kept[:, 1:].sum(1)[:, None, None, None]
        p = torch.einsum("bqhd,bkhd->bhqk", query * block.attn.scale, k).softmax(-1).sum(1)[:, 0]
        scores = (p.float() @ spread_keys(grid, 2, class_token=True))[:, 1:].masked_fill(~kept[:, 1:], -1.0)
        earlier_first = 1 - 1e-3 * torch.arange(48) / 48
        kept = kept.clone()  # the backward needs the one before
        for i in range(len(x)):
            best = (scores[i] * earlier_first).topk(keep_count(scores[i], block.token_keep)).indices
            kept[i, 1:] = False
            kept[i, 1 + best] = True
    return x, torch.stack(masks, 1)


def count_by_fraction(scores, keep):
    return math.ceil(keep * int((scores >= 0).sum()))


def count_by_entropy(scores, keep):
    present = scores[scores >= 0]
    p = present / present.sum()
    spread = math.exp(-(p * p.log()).sum())
    least, most = 0.3 * len(present), 0.95 * len(present)
    return math.ceil(min(max(spread, least), most))


@pytest.mark.parametrize("pool", ["cls", "avg"])
@pytest.mark.parametrize(("keep", "count"), [(0.6, count_by_fraction), ("entropy", count_by_entropy)])
def test_it_is_the_model_in_which_only_kept_tokens_change(pool, keep, count):
    model = deep(pool=pool, token_keep=keep, token_keep_bounds=(0.3, 0.95))
    with torch.no_grad():
        expected, masks = by_masks(model, X, count)
    counts = masks.sum(-1)
    assert (counts[:, -1] < 48 * 0.7).all()
    if keep == "entropy":
        assert len(set(counts[:, -1].tolist())) > 1  # the images differ in their budgets
    explanation = explain(model, X)
    assert torch.equal(explanation.kept.flatten(2), masks)
    with torch.no_grad():
        torch.testing.assert_close(model._tokens(X), expected)
        alone = torch.cat([model(image[None]) for image in X])
        torch.testing.assert_close(alone, model(X))
        assert not torch.allclose(model(X), deep(pool=pool)(X), rtol=1e-3)


def test_all_tokens_kept_are_the_model_as_it_is():
    plain = deep()
    with torch.no_grad():
        expected = plain(X)
        assert torch.equal(deep(token_keep=(1.0, 1, 1.0, 1.0))(X), expected)
        everything = deep(token_keep="entropy", token_keep_bounds=(1.0, 1.0))
        assert torch.equal(everything(X), expected)
    assert list(plain.state_dict()) == list(deep(token_keep=0.5).state_dict())


def test_features_other_fractions_and_other_pools():
    with torch.no_grad():
        plain, pruned = deep(), deep(token_keep=0.5)
        (last,) = create_model(DEEP, features_only=True, out_indices=(1,), token_keep=0.5).eval()(X)
        assert last.shape == (3, 16, 8, 6)
        logits = pruned(X)
        pruned.set_token_keep(1.0)
        assert torch.equal(pruned(X), plain(X))
        pruned.set_token_keep([0.5, 0.5, 0.5, 1])
        assert torch.equal(pruned(X), logits)
        with pytest.raises(ValueError, match="token_keep: got 0, expected a fraction above 0"):
            pruned.set_token_keep(0)
        assert pruned.config.token_keep == (0.5, 0.5, 0.5, 1.0)
        pruned.reset_classifier(5, pool="avg")
        averaged = deep(token_keep=0.5, pool="avg")
        averaged.head.load_state_dict(pruned.head.state_dict())
        torch.testing.assert_close(pruned(X), averaged(X))


@pytest.mark.parametrize(
    ("depth", "after"), [(2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (8, [2, 4, 6]), (10, [2, 5, 7])]
)
def test_a_single_number_applies_after_quarters(depth, after):
    stage = dataclasses.replace(DEEP, depths=(1, depth), token_keep=0.7).stages[-1]
    assert [i + 1 for i, keep in enumerate(stage.token_keep) if keep == 0.7] == after
    assert stage.token_keep[-1] == 1
    assert dataclasses.replace(DEEP, token_keep=0.7).stages[0].token_keep == (1.0,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"token_keep": (0.7, 1.0)}, "got 2 values, expected .* one for each of the 4 blocks"),
        ({"token_keep": (0.7, 1.0, 0.7, 0.7)}, "token_keep: got 0.7 after the last block, expected 1"),
        ({"token_keep": (0.7, "all", 0.7, 1)}, "token_keep: got 'all', expected a fraction or 'entropy'"),
        ({"token_keep": 0.7, "depths": (1, 1)}, "token_keep: got 0.7 after the last block"),
        ({"token_keep": "entropy", "depths": (1, 1)}, "got 'entropy' after the last block"),
    ],
)
def test_settings_that_are_refused(overrides, message):
    """Single values are in test_arguments.py."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(DEEP, **overrides)


# Cost -----------------------------------------------------------------------------------------------------


def test_multiply_adds_of_cvt_13_are_those_of_the_page():
    page = section_of("pruning.md", "## Token pruning")
    keeps = (1.0, 0.9, 0.7, 0.5)
    configs = [dataclasses.replace(PRESETS["cvt_13"], token_keep=keep) for keep in keeps]
    dense, *others = (cost(config, 224).multiply_adds for config in configs)
    for keep, multiply_adds in zip(keeps[1:], others, strict=True):
        figures = f"| {multiply_adds / 1e9:.2f} | {100 * multiply_adds / dense:.1f} % |"
        assert re.search(rf"^\| {keep} \| .* {re.escape(figures)}$", page, re.MULTILINE)
    assert others[1] <= 0.82 * dense
    names = run_blocks(python_blocks(page))
    assert names["model"].config.stages[-1].token_keep[3:7] == (0.8, 1.0, 1.0, 0.6)


# Training -------------------------------------------------------------------------------------------------


def gradients(model, step):
    model.zero_grad()
    step(model).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("keep", [0.6, "entropy"])
def test_every_parameter_gets_a_gradient(keep):
    model = deep(token_keep=keep).train()
    plain = gradients(deep().train(), lambda m: m(X))
    for gradient, of_all in zip(gradients(model, lambda m: m(X)), plain, strict=True):
        assert gradient.isfinite().all()
        assert gradient.any() == of_all.any()  # the query of a class token has no convolution
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(X)
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()


def test_gradients_are_those_of_the_model_in_which_only_kept_tokens_change():
    model, x = deep(token_keep=0.6).double(), X.double()

    def masked(model):
        return model.head(model.norm(by_masks(model, x, count_by_fraction)[0][:, 0]))

    torch.testing.assert_close(
        gradients(model, lambda m: m(x)), gradients(model, masked), rtol=1e-9, atol=1e-12
    )


@pytest.mark.slow
def test_compiled_without_a_break():
    x = X[:2, :, :32, :32]
    model = deep(depths=(1, 2), token_keep=("entropy", 1.0)).train()
    expected = gradients(copy.deepcopy(model), lambda m: m(x))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, lambda m: m(x)), expected, rtol=1e-3, atol=1e-4)


# Explanation ----------------------------------------------------------------------------------------------


def test_explanation_of_a_model_that_drops_tokens():
    model = deep(token_keep=0.5)
    explanation = explain(model, X)
    assert explanation.kept.flatten(2).sum(-1).tolist() == [[48, 24, 12, 6]] * 3
    assert explanation.rollout.flatten(1).sum(1).max() <= 1.0001
    # A token that drops out after the first block reaches the class token by keys and its own values only:
    # attended by the later blocks, it has a share; what it collected itself ends with the first block.
    assert (explanation.rollout > 0).all()
    assert all(block.entropy.isfinite().all() for block in explanation.blocks)
    assert all(block.distance.isfinite().all() for block in explanation.blocks)
    assert explain(deep(), X).kept.all()


# Commands -------------------------------------------------------------------------------------------------


def test_train_remembers_what_stays_and_explain_draws_it(capsys, tmp_path):
    output = str(tmp_path / "run")
    options = ["train", "--data", "digits", "--checkpoint", "digits", "--output", output, "--epochs", "1"]
    assert main([*options, "--token-keep", "0.7,1"]) == 0
    model = create_model(checkpoint=output)
    assert model.config.token_keep == (0.7, 1.0)
    assert [block.token_keep for block in model.stage1.blocks] == [0.7, 1.0]
    capsys.readouterr()
    refused = bad(capsys, main, *options, "--resume", "--token-keep", "0.5")
    assert "was trained with token_keep (0.7, 1.0), now 0.5" in refused
    assert main([*options, "--resume", "--token-keep", "0.7,1"]) == 0
    photo = str(sample_photos()[0])
    seen = tmp_path / "seen"
    assert main(["explain", photo, "--checkpoint", output, "--output", str(seen)]) == 0
    assert sorted(file.name for file in seen.glob("*.tokens.png")) == ["china.tokens.png"]
    (entry,) = json.loads((seen / "explain.json").read_text())["photos"]
    assert [sum(map(sum, block)) for block in entry["kept"]] == [16, 12]


@pytest.mark.slow
def test_exported(tmp_path):
    model = deep(depths=(1, 3), token_keep=("entropy", 0.6, 1.0))
    with ck.use_backend("auto"):
        assert export(model, tmp_path / "model", "onnx", image_size=32).difference < 1e-4
    # In a process of its own, since onnxruntime ends it by a signal where it cannot sort nothing.
    code = f"""
import numpy, onnxruntime
session = onnxruntime.InferenceSession({str(tmp_path / "model")!r}, providers=["CPUExecutionProvider"])
print(session.run(None, {{"images": numpy.zeros((0, 3, 32, 32), numpy.float32)}})[0].shape)
"""
    result = run_python(code)
    assert (result.stdout, result.returncode) == ("(0, 5)\n", 0), result.stderr


@pytest.mark.parametrize("keep", ["entropy", 0.6, 1e-9])
@pytest.mark.parametrize("pool", ["cls", "avg"])
def test_an_image_that_is_not_a_number_spoils_itself_only(keep, pool):
    model = deep(token_keep=keep, pool=pool)
    spoilt = X.clone()
    spoilt[1] = torch.nan
    with torch.no_grad():
        logits, whole = model(spoilt), model(X)
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize("keep", ["entropy", 0.6])
def test_a_batch_without_images(keep):
    assert deep(token_keep=keep)(X[:0]).shape == (0, 5)
