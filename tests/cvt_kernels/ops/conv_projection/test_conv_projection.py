"""conv_projection: what it refuses, and batches that several processes share."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import cvt_kernels as ck
from tests.processes import run_ranks

GRID = (4, 5)


def make_conv(channels=6, k=3, **changes):
    conv2d = nn.Conv2d(channels, channels, k, padding=k // 2, groups=channels, bias=False)
    return ck.ConvBatchNorm.from_modules(conv2d, nn.BatchNorm2d(channels))._replace(**changes)


def make_x(tokens=20, channels=6, **settings):
    return torch.randn(2, tokens, channels, **settings)


def test_branches_may_come_from_a_generator():
    assert len(ck.conv_projection(make_x(), GRID, (make_conv() for _ in range(2)), training=False)) == 2


def test_one_value_per_channel_cannot_be_normalized_and_changes_nothing():
    q, k = make_conv(), make_conv(stride=2)
    x = torch.randn(1, 4, 6)  # q keeps 2×2 values, k one
    with pytest.raises(ValueError, match=r"convs\[1\]: expected more than 1 value per channel when training"):
        ck.conv_projection(x, (2, 2), [q, k], training=True)
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
    _train_on_a_share(rank)
    gc.collect()  # of what still holds the group, whose threads abort a process if they outlive Python
    dist.barrier()
    dist.destroy_process_group()


def _train_on_a_share(rank):
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
