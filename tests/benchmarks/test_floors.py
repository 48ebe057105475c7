"""The least that launches have to move and to multiply."""

import pytest
import torch

from benchmarks import floors
from cvt.tools.commands.compile import launches
from cvt_kernels.launch.launching import Chip
from tests.benchmarks import forwards

STAGES = launches.stages_of("cvt_13")
ROWS = 256 * 197  # of tokens in stage 3


def launches_of(operator, stage, *, dtype=torch.bfloat16, training=False, arch=90):
    """Returns the launches of an operator in a stage of CvT-13, or in another stage."""
    stage = STAGES[stage - 1] if isinstance(stage, int) else stage
    return launches.TRITON_OPERATORS[operator](stage, dtype, Chip(arch, 132), training=training)


def works_of(operator, stage, **settings):
    return list(map(floors.work_of, launches_of(operator, stage, **settings)))


@pytest.mark.parametrize("operator", launches.TRITON_OPERATORS)
def test_every_large_kernel_has_its_work_described(operator):
    for stage in (1, 2, 3):
        for launch in launches_of(operator, stage, training=operator != "conv_linear"):
            assert floors.work_of(launch).bytes > 0


def test_work_of_linear_layers():
    gelu, start, _ = works_of("linear_gelu", 3, training=True)
    assert gelu.bytes == 2 * (ROWS * 384 * (1 + 4 + 4) + 4 * 384**2 + 4 * 384)
    assert gelu.flops == 2 * ROWS * 4 * 384**2
    # Three tensors of hidden features, and a row of partial sums of 88 programs for each 128 columns.
    assert start.bytes == 3 * 2 * ROWS * 4 * 384 + 88 * 4 * 4 * 384
    narrow, _ = works_of("linear_add_layer_norm", 3)
    assert narrow.bytes == 2 * (ROWS * 384 * 4 + 384**2 + 3 * 384)
    assert works_of("linear_gelu", 3, dtype=torch.float32)[0].flops == 0  # without tensor cores


def test_work_of_the_projection_and_of_attention():
    described, *_ = works_of("conv_projection", 1)
    assert described.bytes == 256 * 64 * 56 * 56 * 5 // 2 * 2
    described, *_ = works_of("attention", 3)
    assert described.flops == 4 * 256 * 6 * 197 * 50 * 64
    assert works_of("attention", 3, dtype=torch.float32)[0].flops == 0  # without tensor cores


def test_launches_of_a_forward():
    noted = forwards.forward_launches()
    assert len(noted) <= 90
    # Besides the kernels of this project: two convolutions, the head, and a copy of the class token.
    assert sorted(each.kernel for each in noted if each.operator == "PyTorch") == ["addmm", "clone"]
    convolutions = [each for each in noted if each.kernel == "convolution"]
    assert [each.part for each in convolutions] == ["stage 2", "stage 3"]
    assert sum(each.floor() for each in noted) / 256 <= 25
    # The paper counts 4.5 G multiply-adds for an image; depthwise convolutions are no matrix products, and
    # the last block computes the class token alone.
    assert 2 * 4.1e9 < sum(each.flops for each in noted) / 256 < 2 * 4.4e9


def test_layer_norm_takes_no_launch_within_a_stage_on_sm_90():
    """Those that stay are of stage 1; of many tokens also before the first block and of the class token."""
    products = ["pingpong_product"] * 4
    for settings, expected, blocks in (
        ({}, [1, 0, 0], ["conv_linear_few", "attention_add", *products[:2]] * 12),
        ({"batch": 256}, [1, 1, 2], ["conv_projection_sliding_fwd", *products] * 11),
        ({"arch": 80}, [1, 2, 10], []),
        ({"dtype": torch.float32}, [1, 2, 10], []),
    ):
        noted = forwards.forward_launches(**{"batch": 1} | settings)
        norms = [each.part for each in noted if each.operator == "layer_norm"]
        assert [norms.count(f"stage {n}") for n in (1, 2, 3)] == expected
        assert [each.kernel for each in noted if each.operator == "transformer_blocks"] == blocks


def test_pytorchs_operators_are_noted_once():
    x, bias = torch.randn(8, 4), torch.randn(4)
    recorder = floors.Recorder()
    with torch.no_grad(), recorder.recording():
        y = x.add(bias.expand(8, 4))
        y.view(4, 8)
        x.copy_(y)
    assert [each.kernel for each in recorder.launches] == ["add", "copy_"]
    assert [each.bytes for each in recorder.launches] == [4 * (32 + 4 + 32), 4 * (32 + 32)]
