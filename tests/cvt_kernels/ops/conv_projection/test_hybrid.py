"""Branches of conv_projection that are sums of convolutions, and models with hybrid mixing."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn

import cvt_kernels as ck
from cvt import create_model
from cvt_kernels import backends, reference
from tests.checks import not_built
from tests.cvt.models import small

HYBRID = (3, 1, 1), (5, 4, 2)  # kernel size, padding and dilation of each summand
GRID = (4, 5)


def make_conv(channels, kernel_size, padding, dilation, *, stride=1, dtype=torch.float32):
    weight = torch.randn(channels, 1, kernel_size, kernel_size) / kernel_size
    gamma, variance = torch.rand(2, channels).add(0.5).unbind()
    beta, mean = torch.randn(2, channels).unbind()
    tensors = [t.to(dtype) for t in (weight, gamma, beta, mean, variance)]
    tracked = torch.tensor(3)
    return ck.ConvBatchNorm(*tensors, tracked, stride=stride, padding=padding, dilation=dilation)


def make_branches(channels, *, strides=(1, 2), **settings):
    return [
        tuple(make_conv(channels, *each, stride=stride, **settings) for each in HYBRID) for stride in strides
    ]


def make_x(grid, channels, *, dtype=torch.float32):
    return torch.randn(2, grid[0] * grid[1] + 1, channels).to(dtype)


def project(x, branches, grid=GRID):
    return ck.conv_projection(x, grid, branches, training=False)


# What is computed -----------------------------------------------------------------------------------------


def test_the_reference_sums_normalized_maps_and_has_the_class_token_once():
    x, branches = make_x(GRID, 6), make_branches(6, strides=(2,))
    y = reference.conv_projection(x, GRID, branches, training=False)[0]
    parts = reference.conv_projection(x, GRID, branches[0], training=False)
    torch.testing.assert_close(y[:, 1:], parts[0][:, 1:] + parts[1][:, 1:])
    assert torch.equal(y[:, 0], x[:, 0])


# Calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branch", "message"),
    [
        ((), r"convs\[1\]: got an empty tuple, expected at least one convolution to sum"),
        (
            (make_conv(6, 3, 1, 1), make_conv(6, 5, 4, 1)),
            r"convs\[1\]\[1\]: gives a grid of 8×9, expected that of convs\[1\]\[0\], 4×5",
        ),
        ((make_conv(6, 3, 1, 1), make_conv(5, 3, 1, 1)), r"convs\[1\]\[1\].weight: "),
    ],
)
def test_bad_sums(branch, message):
    with pytest.raises(ValueError, match=message):
        project(make_x(GRID, 6), [make_conv(6, 3, 1, 1), branch])


def test_summands_share_a_process_group_and_the_sample_has_none():
    group = dist.ProcessGroup(0, 2)
    branch = tuple(conv._replace(process_group=group) for conv in make_branches(4, strides=(1,))[0])
    declared = backends.operators["conv_projection"]
    (alone,) = declared.sample(1, declared.bind(make_x((2, 3), 4), (2, 3), [branch], training=True)).convs
    assert [conv.process_group for conv in alone] == [None, None]
    with pytest.raises(ValueError, match="x: got an empty batch, expected at least one image"):
        ck.conv_projection(make_x((2, 3), 4)[:0], (2, 3), [branch], training=True)


# merge_convolutions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kinds", [HYBRID, ((3, 1, 1), (1, 0, 1)), ((5, 2, 1),), ((3, 3, 3), (5, 2, 1))])
def test_a_merged_convolution_is_the_sum(kinds, stride):
    x = make_x((7, 9), 6, dtype=torch.float64)
    first, *others = (make_conv(6, *each, stride=stride, dtype=torch.float64) for each in kinds)
    convs = (first._replace(bn_weight=None), *others)
    merged = ck.merge_convolutions(convs)
    assert merged.weight.shape[3] == 9 or kinds != HYBRID
    expected = reference.conv_projection(x, (7, 9), [convs], training=False)[0]
    y = ck.conv_projection(x, (7, 9), [merged], training=False)[0]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    conv = nn.Conv2d(6, 6, merged.weight.shape[3], stride, merged.padding, groups=6).double()
    conv.load_state_dict({"weight": merged.weight, "bias": merged.bn_bias})
    maps = conv(x[:, 1:].transpose(1, 2).unflatten(2, (7, 9))).flatten(2).transpose(1, 2)
    torch.testing.assert_close(maps, expected[:, 1:], rtol=0, atol=1e-12)


ONE = make_conv(6, 3, 1, 1)


@pytest.mark.parametrize(
    ("convs", "message"),
    [
        ((), "convs: got none"),
        ((ONE._replace(running_mean=None, running_var=None),), r"convs\[0\]: has no running statistics"),
        ((ONE, make_conv(5, 3, 1, 1)), r"convs\[1\]: has 5 channels, expected 6"),
        ((ONE, make_conv(6, 3, 1, 1, stride=2)), r"convs\[1\].stride: got 2, expected 1"),
        ((ONE, make_conv(6, 5, 1, 1)), r"convs\[1\]: .* different grids"),
        ((make_conv(6, 3, 600, 600), ONE), "convs: need a kernel of 1201×1201 together, expected 1024 rows"),
    ],
)
def test_convolutions_that_cannot_be_merged(convs, message):
    with pytest.raises(ValueError, match=message):
        ck.merge_convolutions(convs)


# The model ------------------------------------------------------------------------------------------------

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def branch_of(model):
    return model.stage1.blocks[0].attn.conv_proj_k


def test_a_plain_checkpoint_makes_an_equal_hybrid_model(tmp_path):
    plain = small().eval()
    plain.save_pretrained(tmp_path)
    model = create_model(plain.config, mixing="hybrid", checkpoint=tmp_path).eval()
    keys = [f"stage1.blocks.0.attn.conv_proj_k.dilated_{name}" for name in ("conv.weight", "bn.weight")]
    assert set(keys) <= set(model.state_dict()) - set(plain.state_dict())
    for backend in ("reference", *([] if not_built() else ["cpu"])):
        with torch.no_grad(), ck.use_backend(backend, "reference"):
            assert torch.equal(model(IMAGES), plain(IMAGES))
    with torch.no_grad():
        branch_of(model).dilated_bn.weight.fill_(1)
        assert not torch.equal(model(IMAGES), plain(IMAGES))


@pytest.mark.parametrize("part", ["dilated_conv", "dilated_bn"])
def test_hooks_on_the_dilated_part_are_called(part):
    model, calls = small(mixing="hybrid").eval(), []
    with torch.no_grad():
        expected = model(IMAGES)
        assert "conv_projection" in str(ck.coverage(model, IMAGES))
        handle = getattr(branch_of(model), part).register_forward_hook(lambda *args: calls.append(part))
        torch.testing.assert_close(model(IMAGES), expected)
        assert calls == [part]
        report = str(ck.coverage(model))
        assert f"conv_proj_k.{part} has" in report
        handle.remove()
        model(IMAGES)
    assert calls == [part]


def test_a_step_of_training_moves_the_dilated_part():
    torch.manual_seed(0)
    model = create_model(small().config, mixing="hybrid").train()
    before = copy.deepcopy(branch_of(model).state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(IMAGES).float(), torch.tensor([1, 2]))
    loss.backward()
    optimizer.step()
    for name in ("bn.weight", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"):
        after = branch_of(model).state_dict()[f"dilated_{name}"]
        assert not torch.equal(after, before[f"dilated_{name}"])


def test_no_stage_of_a_hybrid_model_can_be_frozen():
    message = r"none of the 3 stages of CvT can be frozen; .*convolutions are summed"
    with pytest.raises(ValueError, match=message):
        ck.accelerate(small(mixing="hybrid").eval(), freeze=True)
