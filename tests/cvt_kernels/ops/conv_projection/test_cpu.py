"""The projection on a CPU: a mean of many deviations, and what it refuses."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from tests.checks import assert_accurate, needs_extension

DTYPES = "float32", "bfloat16", "float16", "float64"
STRIDES = 1, 2, 2  # of q, k, v

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"):
        yield


def make_branch(channels, kernel=3, stride=1, dtype=torch.float32):
    """Returns a branch of random parameters."""
    weight, gamma, beta, mean = (torch.randn(channels, *n) for n in ((1, kernel, kernel), (), (), ()))
    tensors = [t.to(dtype) for t in (weight, gamma, beta, mean, torch.rand(channels) + 0.5)]
    return ck.ConvBatchNorm(*tensors, stride=stride, padding=kernel // 2, eps=1e-3)


def make(grid, channels, *, class_token=False, batch=2, dtype=torch.float32):
    """Returns tokens and the branches of q, k and v."""
    x = torch.randn(batch, grid[0] * grid[1] + class_token, channels).to(dtype)
    return x, [make_branch(channels, stride=stride, dtype=dtype) for stride in STRIDES]


def infer(function, x, grid, branches):
    with torch.no_grad():
        return function(x, grid, branches, training=False)


def sizes(grid, channels, **settings):
    return {"height": grid[0], "width": grid[1], "channels": channels, "mixed": True, **settings}


def test_a_mean_of_many_deviations():
    """Folded into the shift, it would cancel against the sum of products."""
    x, (branch, *_) = make((8, 8), 32)
    weight = torch.zeros(32, 1, 3, 3)
    weight[:, :, 1, 1] = 1
    mean, variance = torch.full((2, 32), 1e4).unbind()
    branches = [branch._replace(weight=weight, running_mean=mean, running_var=variance * 1e-8)]
    x = x * 1e-2 + 1e4
    ours, theirs = (infer(f.conv_projection, x, (8, 8), branches)[0] for f in (ck, reference))
    doubles = [branches[0]._replace(**{f: getattr(branches[0], f).double() for f in branch._fields[:5]})]
    exact = infer(reference.conv_projection, x.double(), (8, 8), doubles)[0]
    assert_accurate(ours, theirs, exact, factor=1)


# The backend ------------------------------------------------------------------------------------------------


def test_refusals():
    from cvt_kernels.ops.conv_projection import cpu

    def why(x, branch, training=False):
        call = backends.operators["conv_projection"].bind(x, (4, 5), [branch], training=training)
        return cpu.why_unsupported(call)

    x, (branch, *_) = make((4, 5), 4)
    assert why(x, make_branch(4, kernel=17)) == "has kernels of up to 16×16, not 17×17"
    assert why(x[:0], branch._replace(running_mean=None, running_var=None)) == "the batch is empty"
    assert why(x[:0], branch) is None
    assert why(x[:0].requires_grad_(), branch) == "the batch is empty"
    shared = branch._replace(process_group=object())
    assert why(x, shared, training=True) == "does not take the statistics of a batch over processes"
    assert why(x, shared) is None
