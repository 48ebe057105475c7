"""The projection in Triton: statistics of many regions, images far apart, branches that it does not serve."""

import pytest
import torch
from torch.nn import functional as F

from cvt_kernels.ops.conv_projection.triton import backward, forward
from cvt_kernels.ops.conv_projection.triton.autograd import why_unsupported
from tests.checks import needs_float64
from tests.contract.examples import made_of, run, same_bits


def replaced(made, **fields):
    """Replaces arguments of a call."""
    return made._replace(call=made.call._replace(record=made.call.record._replace(**fields)))


@needs_float64
@pytest.mark.parametrize("regions", [1, 64, 65, 200])
def test_statistics_of_many_regions_are_merged(regions):
    """A lane has every 64th, and merges them one after the other; what is not there counts for nothing."""
    samples = torch.randn(2, regions, 5, 3, dtype=torch.float64) * 2 + torch.arange(3.0)
    means, variances = samples.mean(-2), samples.var(-2, correction=0)
    partial = torch.stack([means, 5 * variances], dim=1)
    partial = torch.cat([partial, torch.tensor([7.0, 0.0]).view(1, 2, 1, 1).expand(2, 2, 1, 3)], dim=2)
    counts = torch.tensor([5.0] * regions + [0.0], dtype=torch.float64).expand(2, -1).contiguous()
    mean, variance = forward._merged(partial, counts, *[[]] * 6)
    merged = samples.flatten(1, 2)
    torch.testing.assert_close(mean, merged.mean(1), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(variance, merged.var(1, correction=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1), (4, 4)])
def test_statistics_do_not_begin_at_taps_outside_of_the_map(size):
    """At one pixel only the middle one counts, which is small here."""
    weight = torch.randn(3, 1, 3, 3)
    weight[:, :, 1, 1] *= 2.0**-10
    x = torch.randn(5, size[0] * size[1], 3)
    image = x.double().transpose(1, 2).unflatten(2, size)
    outputs = F.conv2d(image, weight.double(), padding=1, groups=3).transpose(0, 1).flatten(1)
    mean, variance = forward.batch_statistics(x, list(size), [1], [weight], *[[]] * 6)
    torch.testing.assert_close(mean[0].double(), outputs.mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(variance[0].double(), outputs.var(1, correction=0), rtol=1e-5, atol=0)


@needs_float64
@pytest.mark.parametrize("regions", [1, 64, 65, 200])
def test_sums_of_many_regions(regions):
    """Rows of a group become columns: (C, n) of the first, then of the second."""
    partial = torch.randn(5, regions, 20, dtype=torch.float64)
    first, second = partial.sum(1).split([3, 2])
    ours = backward.sum_regions(partial, (3, 2), torch.float64)
    torch.testing.assert_close(ours, torch.cat([first.t().flatten(), second.t().flatten()]))


def test_images_two_billion_elements_apart():
    """Offsets of images take 64 bits; the memory between the two is never touched."""
    settings = {"height": 3, "width": 2, "channels": 8, "branches": 1, "stride": 2}
    made = made_of("conv_projection", "triton", **settings, dtype="float16", training=True)
    x = made.call.record.x.detach()
    memory = torch.empty(0, dtype=x.dtype, device=x.device)
    memory.untyped_storage().resize_(2 * (2**31 + 64))  # which, unlike a tensor, is not filled
    far = memory.as_strided(x.shape, (2**31, 8, 1)).copy_(x).requires_grad_()
    expected = run(made)
    assert same_bits(run(made, call=replaced(made, x=far).call), expected)


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """The same image throughout gives the same output; the last one lies beyond 32 bits."""
    settings = {"batch": 1, "height": 32, "width": 32, "channels": 1024, "branches": 3}
    made = made_of("conv_projection", "triton", **settings, dtype="float16", gradient="none")
    outs = made.public(made.call.record._replace(x=made.call.record.x.expand(2100, -1, -1)))
    assert outs[0].numel() > 2**31
    assert all(torch.equal(out[-1], out[0]) for out in outs)


def test_branches_that_one_launch_cannot_serve():
    call = made_of("conv_projection", "triton", gradient="none").call.record
    first, second = call.convs
    absent, strided = {"running_mean": None, "running_var": None}, first.running_mean.repeat(2)[::2]
    for changes, training, reason in (
        ({"running_mean": first.running_mean}, True, "two branches share their running statistics"),
        ({"process_group": object()}, True, "does not take the statistics of a batch over processes"),
        ({"momentum": None}, True, "a BatchNorm averages over all batches"),
        ({"running_mean": strided}, True, "running statistics are not contiguous"),
        (absent, False, "some branches have running statistics and some have none"),
    ):
        convs = first, second._replace(**changes)
        assert why_unsupported(call._replace(convs=convs, training=training)) == reason
