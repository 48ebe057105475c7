"""The projection in Triton: CvT's stages, statistics of many regions, running ones, launches."""

import collections
import contextlib
import copy
from dataclasses import replace

import pytest
import torch
import triton

import cvt_kernels as ck
from cvt.tools.commands.compile import launches
from cvt_kernels import launch
from cvt_kernels.launch import launching
from cvt_kernels.ops.conv_projection.triton import backward, common, forward, sliding
from cvt_kernels.ops.conv_projection.triton.autograd import why_unsupported
from tests.checks import needs_float64
from tests.contract.examples import assert_right, run, same_bits
from tests.contract.test_contract import run_guarded
from tests.cvt_kernels.ops.agreement import made_of

KERNELS = ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input")


@pytest.fixture(autouse=True)
def _wide_strips(monkeypatch):
    """Gives sliding-row programs all columns: the interpreter takes hardly more time than for two.

    Programs of the real width are tested in test_sliding.py.
    """
    if torch.cuda.is_available():
        yield
    else:
        monkeypatch.setattr(sliding, "_pairs", lambda needed, most: triton.next_power_of_2(needed))
        sliding._tiling.cache_clear()
        yield
        sliding._tiling.cache_clear()


def sizes(grid, channels, **settings):
    return {"height": grid[0], "width": grid[1], "channels": channels, **settings}


def made_with(strides, **settings):
    """Makes a call whose branches have some strides."""
    made = made_of("conv_projection", "triton", branches=len(strides), **settings)
    convs = zip(made.call.record.convs, strides, strict=True)
    return replaced(made, convs=tuple(conv._replace(stride=stride) for conv, stride in convs))


def replaced(made, **fields):
    """Replaces arguments of a call."""
    return made._replace(call=made.call._replace(record=made.call.record._replace(**fields)))


# Tiles of the real size take the interpreter minutes; what they change is tested at small sizes below.
@pytest.mark.parametrize("stage", launches.stages_of("cvt_13"), ids=str)
def test_every_stage_of_cvt_13(stage):
    grid, channels, class_tokens, *_ = stage
    # Training at the larger ones would take the interpreter long.
    how = {"training": True} if class_tokens or torch.cuda.is_available() else {"gradient": "none"}
    made = made_with((1, 2, 2), **sizes(grid, channels, batch=1, class_token=class_tokens), **how)
    with contextlib.nullcontext() if torch.cuda.is_available() else wide_tiles(channels):
        assert_right(made, run_guarded(made))


@contextlib.contextmanager
def wide_tiles(channels):
    """Makes every kernel take all channels at once."""
    channels_of_all = 2 * triton.next_power_of_2(channels)
    x = torch.empty(1, 1, channels)
    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            config = replace(common.configuration(f"sliding_{name}", x), channels=channels_of_all)
            stack.enter_context(launch.overridden(f"conv_projection_sliding_{name}", config))
        yield


@pytest.mark.parametrize(
    ("strides", "settings"),
    [
        ((1, 2, 2), sizes((18, 5), 40)),  # several strips and blocks of channels
        ((1, 2), sizes((4, 4), 5, statistics="none", bare=True)),
        ((1, 2, 2), sizes((4, 3), 8, mixed=True, dtype="float16")),
        ((1, 2, 2), sizes((4, 3), 8, mixed=True, dtype="bfloat16")),
    ],
    ids=str,
)
def test_training(strides, settings):
    made = made_with(strides, **settings, training=True)
    assert_right(made, run_guarded(made))


def moments(size, *shape):
    """Returns partial statistics, the counts, and all that is merged: mean and biased variance in float64."""
    samples = torch.randn(*shape, size, 3, dtype=torch.float64) * 2 + torch.arange(3.0)
    means, variances = samples.mean(-2), samples.var(-2, correction=0)
    partial = torch.stack([means, size * variances], dim=1)
    counts = torch.full(shape, size, dtype=torch.float64)
    merged = samples.flatten(1, 2)
    return partial, counts, merged.mean(1), merged.var(1, correction=0)


def merged(partial, counts):
    return forward._merged(partial, counts, *[[]] * 6)


@needs_float64
@pytest.mark.parametrize("regions", [1, 2, 63, 64, 65, 129, 200])
def test_statistics_of_many_regions_are_merged(regions):
    """A lane has every 64th, and merges them one after the other."""
    partial, counts, mean, variance = moments(5, 2, regions)
    ours = merged(partial, counts)
    torch.testing.assert_close(ours[0], mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[1], variance, rtol=1e-9, atol=1e-9)
    # What is not there counts for nothing.
    partial[:, :, -1], counts[:, -1] = 7.0, 0.0
    if regions > 1:
        partial[:, 1, -1] = 0.0
        without = merged(partial[:, :, :-1].contiguous(), counts[:, :-1].contiguous())
        for with_empty, expected in zip(merged(partial, counts), without, strict=True):
            torch.testing.assert_close(with_empty, expected, rtol=1e-9, atol=1e-9)


@needs_float64
@pytest.mark.parametrize("regions", [1, 64, 65, 200])
def test_sums_of_many_regions(regions):
    """Rows of a group become columns: (C, n) of the first, then of the second."""
    partial = torch.randn(5, regions, 20, dtype=torch.float64)
    first, second = partial.sum(1).split([3, 2])
    ours = backward.sum_regions(partial, (3, 2), torch.float64)
    torch.testing.assert_close(ours, torch.cat([first.t().flatten(), second.t().flatten()]))


Running = collections.namedtuple("Running", "rows means variances tracked momenta corrections")


def running_statistics(channels, momenta):
    """Returns running statistics of the first and the third of three branches, with their own tensors."""
    given = [torch.rand(channels, dtype=torch.float64) for _ in range(4)]
    tracked = [torch.tensor(0), torch.tensor(3)]
    return Running((0, 2), given[:2], given[2:], tracked, momenta, (1.25, 1.5))


def assert_updated(running, before, mean, variance):
    assert [int(count) for count in running.tracked] == [1, 4]
    for i, (row, weight) in enumerate(zip(running.rows, running.momenta, strict=True)):
        torch.testing.assert_close(running.means[i], before.means[i].lerp(mean[row], weight))
        unbiased = variance[row] * running.corrections[i]
        torch.testing.assert_close(running.variances[i], before.variances[i].lerp(unbiased, weight))


@needs_float64
def test_the_launch_that_merges_statistics_updates_running_ones():
    partial, counts, mean, variance = moments(5, 3, 65)
    running = running_statistics(3, (0.2, 0.0))
    before = copy.deepcopy(running)
    forward._merged(partial, counts, *running)
    assert_updated(running, before, mean, variance)


def test_training_takes_three_launches():
    made = made_with((1, 2), **sizes((6, 5), 8), training=True)
    x, grid, convs, training = made.call.record
    noted = []
    with (
        launching.intercepted_launches(noted.append, launching.chip(x.device)),
        ck.use_backend("triton"),
        torch.no_grad(),
    ):
        ck.conv_projection(x, grid, convs, training=training)
    names = [each.kernel.__name__.removeprefix("_conv_projection_sliding").strip("_") for each in noted]
    assert [name.removesuffix("_kernel") for name in names] == ["stats", "merge_stats", "fwd"]


def test_a_huge_mean_beside_a_small_deviation():
    """Σy² − (Σy)²/n would be left with nothing there, and β − mean · scale with little."""
    made = made_with((1,), **sizes((6, 6), 32, statistics="none"))
    (conv,), x = made.call.record.convs, made.call.record.x
    center = torch.zeros_like(conv.weight)
    center[:, :, 1, 1] = 1
    conv = conv._replace(weight=center.requires_grad_())
    made = replaced(made, x=(x.detach() + 1e3).requires_grad_(), convs=(conv,))
    assert_right(made, run_guarded(made))


def test_images_two_billion_elements_apart():
    """Offsets of images take 64 bits; the memory between the two is never touched."""
    made = made_with((2,), **sizes((3, 2), 8), dtype="float16", training=True)
    x = made.call.record.x.detach()
    memory = torch.empty(0, dtype=x.dtype, device=x.device)
    memory.untyped_storage().resize_(2 * (2**31 + 64))  # which, unlike a tensor, is not filled
    far = memory.as_strided(x.shape, (2**31, 8, 1)).copy_(x).requires_grad_()
    expected = run(made)
    assert same_bits(run(made, call=replaced(made, x=far).call), expected)


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """The same image throughout gives the same output; the last one lies beyond 32 bits."""
    made = made_with((1, 2, 2), **sizes((32, 32), 1024), batch=1, dtype="float16", gradient="none")
    outs = made.public(made.call.record._replace(x=made.call.record.x.expand(2100, -1, -1)))
    assert outs[0].numel() > 2**31
    assert all(torch.equal(out[-1], out[0]) for out in outs)


# Launches -------------------------------------------------------------------------------------------------


def name_of(kernel):
    """Returns the name of a kernel."""
    return kernel.__name__.removeprefix("_conv_projection").strip("_").removesuffix("_kernel")


def test_branches_that_one_launch_cannot_serve():
    call = made_with((1, 2), gradient="none").call.record
    first, second = call.convs
    absent, strided = {"running_mean": None, "running_var": None}, first.running_mean.repeat(2)[::2]
    of_3x3 = "serves at most 3 convolutions of 3×3 with padding 1 and stride 1 or 2"
    others = first._replace(stride=3), (first, second), first._replace(padding=2), first._replace(dilation=2)
    for branch, reason in zip(others, (of_3x3, "a branch is a sum", of_3x3, of_3x3), strict=True):
        assert why_unsupported(call._replace(convs=(branch,))).startswith(reason)
    for changes, training, reason in (
        ({"running_mean": first.running_mean}, True, "two branches share their running statistics"),
        ({"process_group": object()}, True, "does not take the statistics of a batch over processes"),
        ({"momentum": None}, True, "a BatchNorm averages over all batches"),
        ({"running_mean": strided}, True, "running statistics are not contiguous"),
        (absent, False, "some branches have running statistics and some have none"),
    ):
        convs = first, second._replace(**changes)
        assert why_unsupported(call._replace(convs=convs, training=training)) == reason
