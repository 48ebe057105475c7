"""conv_projection: what it accepts and what it refuses, on every backend of a CPU."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from tests.checks import assert_accurate, record_calls
from tests.processes import run_ranks

GRID = (4, 5)


@pytest.fixture(params=["native", "reference"])
def _each_backend(request):
    """Runs the test by each backend, without gradients; the reference serves what it cannot."""
    with ck.use_backend(request.param, "reference"), torch.no_grad():
        yield


def make_conv(channels=6, k=3, **changes):
    conv2d = nn.Conv2d(channels, channels, k, padding=k // 2, groups=channels, bias=False)
    return ck.ConvBatchNorm.from_modules(conv2d, nn.BatchNorm2d(channels))._replace(**changes)


def make_x(tokens=20, channels=6, **settings):
    return torch.randn(2, tokens, channels, **settings)


def convolved(x, conv, dtype):
    image = x.to(dtype).transpose(1, 2).unflatten(2, GRID)
    return F.conv2d(image, conv.weight.to(dtype), padding=conv.padding, groups=x.shape[2])


def by_hand(x, conv, *, training, dtype=None):
    """Computes a branch of stride 1 in a dtype, or the convolution in that of x and the rest in float32."""
    y = convolved(x, conv, dtype or x.dtype)
    out_dtype, y = y.dtype, y.to(dtype or torch.float32)
    mean, variance = conv.running_mean, conv.running_var
    if training:
        mean, variance = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)
    scale, shift = (t[:, None, None].to(y.dtype) for t in (conv.bn_weight, conv.bn_bias))
    y = (y - mean[:, None, None]) / (variance[:, None, None] + conv.eps).sqrt() * scale + shift
    return y.flatten(2).transpose(1, 2).to(out_dtype)


@pytest.mark.parametrize("tokens", [20, 21])
def test_a_backend_gets_the_arguments_as_they_are(tokens):
    calls = record_calls("conv_projection")
    x, convs = make_x(tokens), (make_conv(), make_conv(stride=2), make_conv(stride=2))
    with ck.use_backend("native"):
        outs = ck.conv_projection(x, GRID, convs, training=False)
    (((got, grid, branches), keywords),) = calls
    assert got is x
    assert grid == GRID
    assert all(a is b for a, b in zip(branches, convs, strict=True))
    assert keywords == {"training": False}
    assert [tuple(out.shape) for out in outs] == [(2, n + tokens - 20, 6) for n in (20, 6, 6)]
    if tokens == 21:
        assert all(torch.equal(out[:, 0], x[:, 0]) for out in outs)


@pytest.mark.usefixtures("_each_backend")
def test_accepts_any_strides_of_x():
    x, conv = make_x(), make_conv()
    expected = by_hand(x, conv, training=False)
    wide = torch.randn(2, 20, 12)
    wide[:, :, ::2] = x
    for view in (wide[:, :, ::2], x.transpose(1, 2).contiguous().transpose(1, 2)):
        (out,) = ck.conv_projection(view, GRID, [conv], training=False)
        torch.testing.assert_close(out, expected)
        assert out.is_contiguous()


def test_half_precision_beside_float32_batch_norm():
    conv = make_conv()
    conv = conv._replace(weight=conv.weight.bfloat16())
    x = make_x(dtype=torch.bfloat16)
    (out,) = ck.conv_projection(x, GRID, [conv], training=True)
    exact = by_hand(x, conv, training=True, dtype=torch.float64)
    assert_accurate(out, by_hand(x, conv, training=True), exact)
    batch_mean = convolved(x, conv, torch.float64).mean((0, 2, 3))
    assert conv.running_mean.dtype == torch.float32
    torch.testing.assert_close(conv.running_mean.double(), 0.1 * batch_mean, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_batch_norm_dtypes_that_pytorch_refuses_change_nothing(dtype):
    conv = make_conv()
    conv = conv._replace(weight=conv.weight.to(dtype))
    if dtype == torch.bfloat16:
        conv = conv._replace(bn_weight=conv.bn_weight.bfloat16(), bn_bias=conv.bn_bias.bfloat16())
    with pytest.raises(TypeError, match="dtype"):
        ck.conv_projection(make_x(dtype=dtype), GRID, [conv], training=True)
    assert conv.num_batches_tracked == 0


@pytest.mark.usefixtures("_each_backend")
def test_branches_may_come_from_a_generator():
    assert len(ck.conv_projection(make_x(), GRID, (make_conv() for _ in range(2)), training=False)) == 2


@pytest.mark.usefixtures("_each_backend")
def test_autocast_mixes_dtypes():
    x, conv = make_x(), make_conv()
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = ck.conv_projection(x, GRID, [conv], training=False)
    exact = by_hand(x, conv, training=False, dtype=torch.float64)
    rounded = conv._replace(weight=conv.weight.bfloat16())
    assert_accurate(out, by_hand(x.bfloat16(), rounded, training=False), exact)


C = 6
BAD_CONVS = [
    ({"weight": torch.randn(C, 2, 3, 3)}, ValueError, r"convs\[1\].weight: got shape \(6, 2, 3, 3\)"),
    (
        {"weight": torch.randn(5, 1, 3, 3)},
        ValueError,
        r"convs\[1\].weight: got shape .* expected \(6, 1, 3, 3\)",
    ),
    ({"weight": torch.randn(C, 1, 3, 5)}, ValueError, r"convs\[1\].weight: .* square"),
    ({"weight": torch.randn(C, 1, 3)}, ValueError, r"convs\[1\].weight: .* expected 4 dimensions"),
    (
        {"weight": torch.randn(C, 1, 3, 3).double()},
        TypeError,
        r"convs\[1\].weight: has dtype float64.*float32 as x",
    ),
    (
        {"weight": torch.randn(C, 1, 3, 3, device="meta")},
        ValueError,
        r"convs\[1\].weight: is on meta, expected cpu",
    ),
    ({"weight": torch.ones(C, 1, 3, 3, dtype=torch.int64)}, TypeError, r"convs\[1\].weight: got dtype int64"),
    ({"weight": None}, TypeError, r"convs\[1\].weight: got NoneType, expected a tensor"),
    ({"bn_weight": torch.ones(5)}, ValueError, r"convs\[1\].bn_weight: got shape \(5,\), expected \(6,\)"),
    ({"bn_bias": torch.ones(C, dtype=torch.float16)}, TypeError, r"convs\[1\].bn_bias: has dtype float16"),
    ({"running_var": None}, ValueError, r"convs\[1\]: running_mean and running_var"),
    (
        {"bn_bias": torch.ones(C).double()},
        TypeError,
        r"convs\[1\].bn_bias: has dtype float64, expected float32",
    ),
    (
        {"num_batches_tracked": torch.ones(2)},
        TypeError,
        r"convs\[1\].num_batches_tracked: got .* integer scalar",
    ),
    ({"momentum": 5.0}, ValueError, r"convs\[1\].momentum: got 5.0, expected a number in \[0, 1\]"),
    ({"process_group": "gloo"}, TypeError, r"convs\[1\].process_group: got str, expected a ProcessGroup"),
    ({"momentum": "a"}, TypeError, r"convs\[1\].momentum: got 'a'"),
    ({"weight": torch.ones(C, 1, 0, 0)}, ValueError, r"convs\[1\].weight: .* at least 1×1"),
    ({"stride": -2}, ValueError, r"convs\[1\].stride: got -2, expected an integer of at least 1"),
    ({"stride": (2, 2)}, TypeError, r"convs\[1\].stride: got \(2, 2\)"),
    ({"padding": -1}, ValueError, r"convs\[1\].padding: got -1"),
    ({"dilation": 0}, ValueError, r"convs\[1\].dilation: got 0"),
    ({"dilation": 4}, ValueError, r"convs\[1\]: output of the 4×5 grid is empty"),
    ({"eps": 0.0}, ValueError, r"convs\[1\].eps: got 0.0, expected a positive number"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CONVS)
def test_bad_branches(change, error, message):
    good = make_conv()
    before = good.running_mean.clone(), good.num_batches_tracked.clone()
    with pytest.raises(error, match=message):
        ck.conv_projection(make_x(), GRID, [good, make_conv()._replace(**change)], training=True)
    assert torch.equal(good.running_mean, before[0])
    assert torch.equal(good.num_batches_tracked, before[1])


@pytest.mark.parametrize(
    ("x", "grid", "convs", "error", "message"),
    [
        (make_x(19), GRID, None, ValueError, "grid: got 4×5 for 19 tokens"),
        (make_x(22), GRID, None, ValueError, "grid: got 4×5 for 22 tokens"),
        (make_x(), (0, 20), None, ValueError, "grid: got 0×20"),
        (make_x(), 20, None, TypeError, r"grid: got 20, expected a tuple \(H, W\)"),
        (
            make_x(),
            (4.0, 5.0),
            None,
            TypeError,
            r"grid: got \(4.0, 5.0\), expected a tuple \(H, W\) of integers",
        ),
        (make_x()[0], GRID, None, ValueError, "x: got shape .* expected 3 dimensions"),
        (make_x().int(), GRID, None, TypeError, "x: got dtype int32"),
        ([1.0], GRID, None, TypeError, "x: got list, expected a tensor"),
        (make_x(), GRID, [], ValueError, "convs: got none"),
        (make_x(), GRID, [nn.Conv2d(6, 6, 3)], TypeError, r"convs\[0\]: got Conv2d, expected ConvBatchNorm"),
    ],
)
def test_bad_arguments(x, grid, convs, error, message):
    with pytest.raises(error, match=message):
        ck.conv_projection(x, grid, [make_conv()] if convs is None else convs, training=False)


def test_one_value_per_channel_cannot_be_normalized_and_changes_nothing():
    q, k = make_conv(), make_conv(stride=2)
    x = torch.randn(1, 4, 6)  # q keeps 2×2 values, k one
    before = q.running_mean.clone()
    with pytest.raises(ValueError, match=r"convs\[1\]: expected more than 1 value per channel when training"):
        ck.conv_projection(x, (2, 2), [q, k], training=True)
    assert torch.equal(q.running_mean, before)
    assert q.num_batches_tracked == 0
    ck.conv_projection(x, (2, 2), [q, k], training=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bias": True}, "conv: has a bias"),
        ({"padding_mode": "reflect", "padding": 1}, "conv: padding_mode is 'reflect'"),
        ({"stride": (1, 2)}, r"conv: stride is \(1, 2\)"),
        ({"padding": "same"}, "conv: padding is 'same'"),
    ],
)
def test_modules_that_are_not_a_branch(settings, message):
    conv2d = nn.Conv2d(4, 4, 3, groups=4, **{"bias": False, **settings})
    with pytest.raises(ValueError, match=message):
        ck.ConvBatchNorm.from_modules(conv2d, nn.BatchNorm2d(4))


def test_sync_batch_norm_synchronizes_only_in_training_among_several():
    conv2d, bn = nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.SyncBatchNorm(4)
    assert ck.ConvBatchNorm.from_modules(conv2d, bn).process_group is None


SHARES = 3, 2  # images per process, not equal


def _process(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/init", rank=rank, world_size=2)
    for backend in ("reference", "triton"):
        _train_on_a_share(rank, backend)
    gc.collect()  # of what still holds the group, whose threads abort a process if they outlive Python
    dist.barrier()
    dist.destroy_process_group()


def _train_on_a_share(rank, backend):
    """Compares a step in two processes with BatchNorm on the joined batch and, on a GPU, nn.SyncBatchNorm."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(sum(SHARES), 20, 6, dtype=torch.float64).to(device)
    convs = [nn.Conv2d(6, 6, 3, stride=s, padding=1, groups=6, bias=False) for s in (1, 2)]
    convs = [conv.double().to(device) for conv in convs]
    ours, joined = (
        [kind(6).double().to(device) for _ in convs] for kind in (nn.SyncBatchNorm, nn.BatchNorm2d)
    )
    own = slice(0, SHARES[0]) if rank == 0 else slice(SHARES[0], None)
    branches = [ck.ConvBatchNorm.from_modules(*pair) for pair in zip(convs, ours, strict=True)]
    assert all(branch.process_group is dist.group.WORLD for branch in branches)
    share = x[own].clone().requires_grad_()
    with ck.use_backend(backend):
        outs = ck.conv_projection(share, (4, 5), branches, training=True)
        sum(out.sin().sum() for out in outs).backward()
    dweights = [conv.weight.grad.clone() for conv in convs]

    def compare(bns, x, own):
        [conv.zero_grad() for conv in convs]
        x = x.clone().requires_grad_()
        image = x.transpose(1, 2).unflatten(2, (4, 5))
        expected = [bn(conv(image)).flatten(2).transpose(1, 2) for conv, bn in zip(convs, bns, strict=True)]
        sum(out.sin().sum() for out in expected).backward()
        torch.testing.assert_close(list(outs), [out[own] for out in expected])
        torch.testing.assert_close(share.grad, x.grad[own])
        for our, bn in zip(ours, bns, strict=True):
            torch.testing.assert_close(dict(our.named_buffers()), dict(bn.named_buffers()))

    compare(joined, x, own)
    local = [*dweights, *(p.grad for bn in ours for p in bn.parameters())]
    for gradient in local:
        dist.all_reduce(gradient)  # as DistributedDataParallel does; its mean aside
    whole = [*(conv.weight.grad for conv in convs), *(p.grad for bn in joined for p in bn.parameters())]
    torch.testing.assert_close(local, whole)
    if device == "cuda":  # nn.SyncBatchNorm refuses CPU tensors
        compare([nn.SyncBatchNorm(6).double().to(device) for _ in convs], x[own], slice(None))


@pytest.mark.slow
def test_two_processes_share_a_batch(tmp_path):
    run_ranks(_process, str(tmp_path))


def test_an_empty_share_is_refused():
    x, conv = make_x()[:0], make_conv(process_group=dist.ProcessGroup(0, 2))
    with pytest.raises(ValueError, match="x: got an empty batch, expected at least one image"):
        ck.conv_projection(x, GRID, [conv], training=True)
    ck.conv_projection(x, GRID, [conv], training=False)
