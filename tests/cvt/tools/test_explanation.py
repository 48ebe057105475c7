"""Maps of attention: by hand, by loops, by what a pixel reaches."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import cvt_kernels as ck
from cvt import CvTConfig
from cvt.images import load_images, read_image, sample_photos
from cvt.tools.explanation import class_title, explain, heat_map, photograph, pictures, rollout, spread_keys
from tests.cvt import models


def small(**overrides):
    return models.small(depths=(1, 1, 2), **overrides).eval()


# Rollout and keys -----------------------------------------------------------------------------------------


def test_keys_share_with_the_tokens_around_them():
    # Three tokens in a row, keys at the first and the last: the one between is half of each.
    row = torch.tensor([[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]])
    for grid in ((1, 3), (3, 1)):
        torch.testing.assert_close(spread_keys(grid, 2, class_token=False), row)
    both = spread_keys((3, 3), 2, class_token=True)
    assert both[0].tolist() == [1] + [0] * 9
    assert both[:, 0].tolist() == [1, 0, 0, 0, 0]
    torch.testing.assert_close(both[3, 1:].view(3, 3), torch.outer(row[1], row[0]))  # key (1, 0)
    # A fourth token lies beyond the last key and is all its own.
    torch.testing.assert_close(spread_keys((1, 4), 2, class_token=False)[1], torch.tensor([0, 0.2, 0.4, 0.4]))
    assert torch.equal(spread_keys((2, 3), 1, class_token=False), torch.eye(6))


def test_rollout_of_a_hand_made_example():
    # A class token and three tokens, keys: class token, first token, last token.
    first = torch.tensor([[0.2, 0.5, 0.3], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    second = torch.tensor([[0.0, 0.0, 1.0], [0.1, 0.2, 0.7], [0.1, 0.2, 0.7], [0.1, 0.2, 0.7]])
    spread = spread_keys((1, 3), 2, class_token=True)
    start = torch.tensor([1.0, 0, 0, 0])
    # Second block: half stays with the class token, half goes to the last key: 1/3 token 1, 2/3 token 2.
    after_second = [1 / 2, 0, 1 / 6, 1 / 3]
    assert rollout([second[None]], spread, start)[0].tolist() == pytest.approx(after_second)
    # First block, by its definition: each of these stays by half and attends by half.
    expected = [share / 2 for share in after_second]
    for share, row in zip(after_second, first.tolist(), strict=True):
        expected[0] += share / 2 * row[0]
        expected[1] += share / 2 * row[1] * 2 / 3
        expected[2] += share / 2 * (row[1] + row[2]) / 3
        expected[3] += share / 2 * row[2] * 2 / 3
    rolled = rollout([first[None], second[None]], spread, start)[0]
    assert rolled.tolist() == pytest.approx(expected)
    assert sum(expected) == pytest.approx(1)
    # A token that the first block does not compute passes on all of itself.
    kept = torch.ones(1, 2, 4, dtype=torch.bool)
    kept[0, 0, 2] = False
    assert rollout([first[None], second[None]], spread, start, kept).sum().item() == pytest.approx(1)
    # The order of the blocks matters.
    assert rollout([second[None], first[None]], spread, start)[0].tolist() != pytest.approx(expected)


# The model ------------------------------------------------------------------------------------------------


def true_attention(model, x):
    """Probabilities (B, h, T, S) of every block, from what goes through the reference's softmax."""
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is torch.Tensor.softmax:
                seen.append(result)
            return result

    with ck.use_backend("reference"), Watch(), torch.no_grad():
        model.forward_features(x)  # all queries of the last block too
    return seen


@pytest.mark.parametrize("pool", ["cls", "avg"])
def test_maps_are_those_of_the_models_own_softmax(pool):
    model = small(pool=pool)
    x = torch.randn(2, 3, 96, 64)
    own = true_attention(model, x)
    assert len(own) == 4
    explanation = explain(model, x)
    torch.testing.assert_close(explanation.logits, model(x).detach())
    queries = slice(0, 1) if pool == "cls" else slice(1, None)
    expected = own[-1][:, :, queries, 1:].mean(2)
    torch.testing.assert_close(explanation.attention.flatten(2), expected)
    assert explanation.attention.shape == (2, 3, 3, 2)
    assert explanation.rollout.shape == (2, 6, 4)
    blocks = [block[:3] for block in explanation.blocks]
    assert blocks == [(0, 0, 96), (1, 0, 24), (2, 0, 7), (2, 1, 7)]
    for block, p in zip(explanation.blocks, own, strict=True):
        torch.testing.assert_close(block.entropy, -(p * p.log()).sum(-1).mean(-1))
        assert (block.entropy < math.log(block.keys)).all()
    start = torch.zeros(25)
    start[queries] = 1 if pool == "cls" else 1 / 24
    rolled = rollout([p.mean(1) for p in own[-2:]], spread_keys((6, 4), 2, class_token=True), start)
    torch.testing.assert_close(explanation.rollout.flatten(1), rolled[:, 1:])


def test_distance_is_in_pixels_and_large_matrices_are_looked_at_in_parts(monkeypatch):
    model = small()
    for name, parameter in model.named_parameters():
        if ".proj_q." in name:
            parameter.data.zero_()  # every query attends to all keys alike
    x = torch.randn(1, 3, 64, 64)
    whole = explain(model, x)
    monkeypatch.setattr("cvt.tools.explanation._ROWS", 7)
    parts = explain(model, x)
    for block, other, tokens, reduction in zip(
        whole.blocks, parts.blocks, (16, 8, 4, 4), (4, 8, 16, 16), strict=True
    ):
        axis = torch.arange(tokens).double() * reduction
        place = torch.cartesian_prod(axis, axis)
        expected = torch.cdist(place, place.view(tokens, tokens, 2)[::2, ::2].flatten(0, 1)).mean().item()
        assert block.distance.tolist()[0] == pytest.approx([expected] * block.distance.shape[1])
        assert block.entropy.tolist()[0] == pytest.approx([math.log(block.keys)] * block.entropy.shape[1])
        torch.testing.assert_close(block.distance, other.distance)
        torch.testing.assert_close(block.entropy, other.entropy)
    torch.testing.assert_close(whole.rollout, parts.rollout)


def test_the_model_is_left_without_hooks_even_if_it_raises():
    model = small()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    explain(model, torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="images: got shape"):
        explain(model, torch.randn(1, 1, 32, 32))
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_a_single_token_and_a_model_without_class_token():
    explanation = explain(small(), torch.randn(1, 3, 16, 16))
    assert explanation.rollout.shape == (1, 1, 1)
    assert all(block.distance.abs().max() == 0 for block in explanation.blocks if block.stage == 2)
    explanation = explain(small(cls_token=False, pool="avg"), torch.randn(1, 3, 32, 32))
    assert explanation.attention.sum((-1, -2)).tolist()[0] == pytest.approx([1, 1, 1])
    assert explanation.rollout.sum().item() == pytest.approx(1)


def test_bad_models():
    x, broken = torch.randn(1, 3, 32, 32), small()
    broken.head.bias.data.fill_(math.nan)
    for model, error, message in (
        (small().train(), ValueError, r"expected model\.eval\(\)"),
        (broken, ValueError, "not finite"),
    ):
        with pytest.raises(error, match=message):
            explain(model, x)


# Pictures -------------------------------------------------------------------------------------------------


def test_the_photograph_is_the_crop_that_the_model_saw():
    path = sample_photos()[0]
    image = read_image(path)  # 640×427
    expected = image.resize((383, 256), Image.Resampling.BICUBIC).crop((80, 16, 304, 240))
    assert np.array_equal(photograph(load_images([path])[0]), expected)


def test_a_token_lies_where_its_embeddings_are_centered():
    config = CvTConfig()
    image = torch.zeros(1, 1, 224, 224, requires_grad=True)
    x = image
    for stage in config.stages:
        kernel = torch.ones(1, 1, stage.patch_size, stage.patch_size)
        x = F.conv2d(x, kernel, stride=stage.patch_stride, padding=stage.patch_padding)
    x[0, 0, 4, 6].backward()  # of 14×14
    reach = image.grad[0, 0]
    center = [(reach.sum(1 - axis) * torch.arange(224)).sum() / reach.sum() for axis in (0, 1)]
    for stride in (1, 2):
        heat = torch.zeros(14, 14)[::stride, ::stride].clone()
        heat[4 // stride, 6 // stride] = 3
        pixels = heat_map((224, 224), heat, config, stride)
        assert np.unravel_index(pixels.argmax(), pixels.shape) == tuple(round(c.item()) for c in center)
        assert pixels[65, 97 + 8 * stride] == pytest.approx(pixels[65, 97 - 8 * stride])
        assert pixels[65, 97 + 16 * stride] == 0


def test_pictures_show_the_photograph_the_map_and_both():
    """Half of the tokens drop out after the first of four blocks."""
    model = models.small(depths=(1, 1, 4), token_keep=(0.5, 1.0, 1.0, 1.0)).eval()
    explanation = explain(model, torch.randn(1, 3, 96, 64))
    photo = Image.linear_gradient("L").convert("RGB").resize((64, 96))
    drawn = pictures(explanation, photo, model.config, "87.0%  tench")
    assert list(drawn) == ["attention", "rollout", "tokens"]
    for kind, heat, stride in (
        ("attention", explanation.attention[0].mean(0), 2),
        ("rollout", explanation.rollout[0], 1),
    ):
        seen, alone, over, *_ = drawn[kind].axes
        for axes in (seen, alone, over):
            assert np.array_equal(axes.images[0].get_array(), np.asarray(photo))
        expected = heat_map(photo.size, heat, model.config, stride)
        for axes, alpha in ((alone, 1.0), (over, 0.6)):
            assert np.array_equal(axes.images[1].get_array(), expected)
            assert axes.images[1].get_clim() == (heat.min(), heat.max())
            assert axes.images[1].get_alpha() == alpha
        words = [each.get_text() for each in drawn[kind].findobj(lambda each: hasattr(each, "get_text"))]
        assert {f"least: {heat.min():.2%}", f"most: {heat.max():.2%}"} <= {*words}
        assert any(text.startswith("87.0%  tench\nWhat ") for text in words)
    first, others = drawn["tokens"].axes
    count = int(explanation.kept[0, 1].sum())
    assert 0 < count < 24
    titles = "block 1: 24 of 24 tokens", f"blocks 2 to 4: {count} of 24 tokens"
    assert (first.get_title(), others.get_title()) == titles
    assert np.asarray(first.images[1].get_alpha()).max() == 0
    pale = np.asarray(others.images[1].get_alpha())
    assert np.array_equal(pale[8::16, 8::16] == 0.8, ~explanation.kept[0, 1].numpy())


def test_class_titles():
    labels = "tench", "Crêpe\nSuzette", "金魚", None, "", "$x$ " * 100
    titles = [class_title(3, label, 0.8714) for label in labels]
    assert titles[:2] == ["87.1%  tench (class 3)", "87.1%  Crêpe Suzette (class 3)"]
    assert titles[2:5] == ["87.1%  class 3"] * 3
    assert titles[5].endswith("$x$ [...] (class 3)")
    assert len(titles[5]) < 110
