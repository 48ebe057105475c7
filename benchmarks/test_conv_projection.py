"""The projection of CvT-13 (q stride 1, k and v stride 2): PyTorch, compiled, the kernels where they run.

What must move, in units of B·T·C: x once and the outputs once in evaluation, 2.5; in a training step x twice
and the outputs once forward (3.5), then x, the gradients of the outputs and dx once (3.5).
"""

import functools

import pytest
import torch
from torch import nn

import cvt_kernels as ck

from . import suites

pytestmark = pytest.mark.benchmark(**suites.TIMER)

UNITS = {"evaluation": 2.5, "training": 7.0}


@functools.cache
def setting(stage, dtype, images):
    """Returns x, its grid and the three branches, whose BatchNorm stays in float32."""
    grid, channels, class_tokens = suites.stages()[stage]
    torch.manual_seed(0)
    x = suites.randn(images, grid[0] * grid[1] + class_tokens, channels, dtype=dtype, seed=0)
    branches = []
    for stride in (1, 2, 2):
        conv = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        branches.append(
            ck.ConvBatchNorm.from_modules(
                conv.to(suites.DEVICE, dtype), nn.BatchNorm2d(channels).to(suites.DEVICE)
            )
        )
    return x, grid, branches


def leaves_of(x, branches):
    """Returns what gradients are wanted of."""
    return [x, *(t for branch in branches for t in (branch.weight, branch.bn_weight, branch.bn_bias))]


def gradients(x, grid, branches):
    """Returns gradients of the outputs."""
    class_tokens = x.shape[1] - grid[0] * grid[1]
    tokens = (h * w + class_tokens for h, w in (branch.output_grid(grid) for branch in branches))
    return [suites.randn(x.shape[0], t, x.shape[2], dtype=x.dtype, seed=i) for i, t in enumerate(tokens)]


def contender(function, grid, branches, training):
    """Returns an implementation as a function of x and each branch's weight, γ and β.

    Running statistics are ``branches``' own.
    """

    def call(x, *parameters):
        groups = (parameters[i : i + 3] for i in range(0, len(parameters), 3))
        convs = [
            branch._replace(weight=w, bn_weight=g, bn_bias=b)
            for branch, (w, g, b) in zip(branches, groups, strict=True)
        ]
        return function(x, grid, convs, training=training)

    return call


def doubled(branches):
    return [
        ck.ConvBatchNorm(*(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in branch))
        for branch in branches
    ]


@pytest.mark.parametrize("dtype", suites.dtypes(), ids=suites.short)
@pytest.mark.parametrize("mode", UNITS)
@pytest.mark.parametrize("stage", suites.stages())
@pytest.mark.parametrize("name", suites.contenders("conv_projection"))
def test_conv_projection(benchmark, stage, mode, dtype, name):
    x, grid, branches = setting(stage, dtype, suites.batch())
    training = mode == "training"
    leaves = leaves_of(x, branches)
    call, reference = (
        contender(suites.implementation("conv_projection", which), grid, branches, training)
        for which in (name, "reference")
    )
    douts = gradients(x, grid, branches) if training else None
    wide = doubled(branches)
    exact = suites.results(
        contender(suites.implementation("conv_projection", "reference"), grid, wide, training),
        leaves_of(x.double(), wide),
        douts and [t.double() for t in douts],
    )
    case = f"{stage}, {grid[0]}×{grid[1]}×{x.shape[2]}, {mode}"
    suites.compare(
        benchmark,
        {"suite": "conv_projection", "case": case, "contender": name},
        call, reference, leaves, douts, exact=exact, moved=int(UNITS[mode] * x.nbytes),
    )  # fmt: skip
