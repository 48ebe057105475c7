"""The work of launches: what each must compute and move, and the trips of its loops."""

import pytest
import torch

from benchmarks.machine_code import work
from cvt.commands.compile import launches
from cvt_kernels.machine import Chip


@pytest.mark.parametrize("operator", launches.TRITON_OPERATORS)
def test_every_large_kernel_has_its_work_described(operator):
    for number, stage in enumerate(launches.stages("cvt_13"), 1):
        training = operator != "conv_linear"
        for launch in launches.TRITON_OPERATORS[operator](
            stage, torch.bfloat16, Chip(90, 132), training=training
        ):
            described = work.work_of(launch)
            if launch.kernel.__name__ == "_update_running_kernel":
                assert described is None
                continue
            assert described.programs > 0
            assert described.outputs > 0
            assert described.bytes > 0
            assert all(count > 0 for count in described.trips), (number, launch.kernel.__name__)


def test_work_of_linear_layers():
    """Stage 3: 394 by 6 tiles for GELU, of 6 steps each; whole rows for LayerNorm, with K = C, then 4C."""
    stage = launches.stages("cvt_13")[2]
    rows, channels = 256 * 197, 384
    (gelu,) = launches.linear_gelu_launches(stage, torch.bfloat16, Chip(90, 132), training=True)
    described = work.work_of(gelu)
    assert (described.programs, described.outputs) == (132, rows * 4 * channels)
    assert described.bytes == 2 * (rows * channels * (1 + 4 + 4) + 4 * channels**2 + 4 * channels)
    assert described.flops == 2 * rows * 4 * channels**2
    assert described.trips == (6 * 394 * 6 / 132,)
    assert described.conditional == 1 / 6
    assert launches.linear_add_launches(stage, torch.bfloat16, Chip(90, 132), training=True) == []
    both = launches.linear_add_layer_norm_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    narrow, wide = map(work.work_of, both)
    assert narrow.bytes == 2 * (rows * channels * 4 + channels**2 + 3 * channels)
    assert (narrow.programs, narrow.trips, narrow.conditional) == (394, (6,), 1)
    assert wide.trips == (24,)
    (exact,) = launches.linear_gelu_launches(stage, torch.float32, Chip(90, 132), training=False)
    assert work.work_of(exact).flops == 0


def test_work_of_the_projection():
    """Stage 1: every program walks down 14 pairs of rows of 7 images, but for the last of 37."""
    stage = launches.stages("cvt_13")[0]
    launch, *_ = launches.conv_projection_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    elements = 256 * 64 * 56 * 56
    described = work.work_of(launch)
    assert described.outputs == elements * 3 // 2
    assert described.bytes == elements * 5 // 2 * 2
    assert described.programs == 37 * 2 * 7
    assert described.trips == (256 / 37, 14)


def test_work_of_the_general_projection(monkeypatch):
    """Stage 1: strips of 14 of 56 rows, 2 column blocks of 28; k and v have half of both."""
    from cvt_kernels.ops.conv_projection.triton import forward

    monkeypatch.setattr(forward, "is_walk", lambda geometry: False)
    stage = launches.stages("cvt_13")[0]
    launch, *_ = launches.conv_projection_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    tiles_of_region = [launch.arguments["TILE"].pixels // branch.columns * branch.rows
                       for branch in launch.arguments["BRANCHES"]]  # fmt: skip
    rows = [-(-size // tile) for size, tile in zip((14, 7, 7), tiles_of_region, strict=True)]
    columns = [
        -(-size // branch.columns)
        for size, branch in zip((28, 14, 14), launch.arguments["BRANCHES"], strict=True)
    ]
    assert work.work_of(launch).trips == (rows[0], columns[0], rows[1], columns[1], rows[2], columns[2])


def test_work_of_attention():
    """Stage 3: 197 queries in 4 tiles of 64, walked over by one program of a head; 50 keys in a tile."""
    stage = launches.stages("cvt_13")[2]
    launch, *_ = launches.attention_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    described = work.work_of(launch)
    assert described.programs == 256 * 6
    assert described.outputs == 256 * 197 * 384
    assert described.flops == 4 * 256 * 6 * 197 * 50 * 64
    assert described.trips == (4,)
    assert described.scores == 4 * 64 * 64
    launch, *_ = launches.attention_launches(stage, torch.float32, Chip(90, 132), training=False)
    assert work.work_of(launch).flops == 0  # without tensor cores


def test_work_of_the_mlp():
    """Stage 1 only: 6272 tiles of 128 rows, on 2 programs of each of 132 multiprocessors."""
    chip = Chip(90, 132)
    first, *others = launches.stages("cvt_13")
    assert all(launches.layer_norm_mlp_launches(other, torch.bfloat16, chip) == [] for other in others)
    assert launches.layer_norm_mlp_launches(first, torch.bfloat16, chip, training=True) == []
    (launch,) = launches.layer_norm_mlp_launches(first, torch.bfloat16, chip, training=False)
    rows = 256 * 56 * 56
    described = work.work_of(launch)
    assert described.programs == 264
    assert described.outputs == rows * 64
    assert described.bytes == 2 * (2 * rows * 64 + 2 * 64 * 256)
    assert described.trips == (6272 / 264,)
    assert described.flops == 4 * rows * 64 * 256
    (launch,) = launches.layer_norm_mlp_launches(first, torch.float32, chip, training=False)
    described = work.work_of(launch)
    assert described.trips == (12544 / 264, 8)  # tiles of 64 rows, and chunks of 32 hidden features
    assert described.flops == 0  # without tensor cores


def test_work_of_8_bit_numbers():
    """Stage 3: a byte per number and a scale per row; products at twice the speed of half precision."""
    stage, chip = launches.stages("cvt_13")[2], Chip(90, 132)
    rows = 256 * 197
    for operator, width in (("quantize_rows", 384), ("layer_norm_quantize", 384), ("gelu_quantize", 1536)):
        (launch,) = launches.TRITON_OPERATORS[operator](stage, torch.bfloat16, chip, training=False)
        described = work.work_of(launch)
        assert described.outputs == rows * width
        assert described.bytes == 3 * rows * width + 4 * rows
        assert (described.trips, described.flops) == ((), 0)
    query, proj, fc1, fc2 = launches.linear_int8_launches(stage, torch.bfloat16, chip, training=False)
    described = work.work_of(fc1)
    assert described.flops == 2 * rows * 384 * 1536
    assert described.speed == 2
    # Weights, a scale of each row, and a scale and a bias of each output beside the tokens.
    assert described.bytes == rows * (384 + 2 * 1536) + 384 * 1536 + 4 * rows + 6 * 1536
    assert described.trips == (3 * fc1.arguments["tiles"] / fc1.arguments["programs"],)
    assert work.work_of(fc2).trips == (12,)
    assert work.work_of(proj).bytes - work.work_of(query).bytes == 2 * rows * 384
    assert launches.linear_float8_launches(stage, torch.bfloat16, Chip(80, 108), training=False) == []
    assert len(launches.linear_float8_launches(stage, torch.bfloat16, chip, training=False)) == 7
    assert launches.linear_float8_launches(stage, torch.bfloat16, chip, training=True) == []
