"""The projection on a CPU: a mean of many deviations, and what it refuses."""

import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from tests.checks import assert_accurate, needs_extension
from tests.contract.examples import made_of

pytestmark = needs_extension


@torch.no_grad()
def test_a_mean_of_many_deviations():
    """Folded into the shift, it would cancel against the sum of products."""
    settings = {"height": 8, "width": 8, "channels": 32, "branches": 1, "class_token": False}
    (x, grid, (branch,), _) = made_of("conv_projection", "cpu", gradient="none", **settings).call.record
    weight = torch.zeros(32, 1, 3, 3)
    weight[:, :, 1, 1] = 1
    mean, variance = torch.full((2, 32), 1e4).unbind()
    branch = branch._replace(weight=weight, running_mean=mean, running_var=variance * 1e-8)
    x = x * 1e-2 + 1e4
    with ck.use_backend("cpu"):
        (ours,) = ck.conv_projection(x, grid, [branch], training=False)
    (theirs,) = reference.conv_projection(x, grid, [branch], training=False)
    wide = branch._replace(**{f: getattr(branch, f).double() for f in branch._fields[:5]})
    (exact,) = reference.conv_projection(x.double(), grid, [wide], training=False)
    assert_accurate(ours, theirs, exact, factor=1)


def test_refusals():
    from cvt_kernels.ops.conv_projection import cpu

    x, grid, (branch, _), _ = made_of("conv_projection", "cpu", gradient="none").call.record
    bind = backends.operators["conv_projection"].bind

    def why(x, branch, training=False):
        return cpu.why_unsupported(bind(x, grid, [branch], training=training))

    assert why(x[:0], branch._replace(running_mean=None, running_var=None)) == "the batch is empty"
    assert why(x[:0], branch) is None
    assert why(x[:0].requires_grad_(), branch) == "the batch is empty"
    assert "of one stride" in why(x, (branch, branch._replace(stride=2)))
    shared = branch._replace(process_group=object())
    assert why(x, shared, training=True) == "does not take the statistics of a batch over processes"
    assert why(x, shared) is None
