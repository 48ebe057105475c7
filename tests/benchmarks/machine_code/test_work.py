"""The work of launches: what each must compute and move, and the trips of its loops."""

import pytest
import torch

from benchmarks.machine_code import work
from cvt.commands.compile import launches
from cvt_kernels.launching import Chip
from cvt_kernels.ops.conv_projection.triton import forward

STAGES = launches.stages("cvt_13")
ROWS = 256 * 197  # of tokens in stage 3


def launches_of(operator, stage, *, dtype=torch.bfloat16, training=False, arch=90):
    """Returns the launches of an operator in a stage of CvT-13, or in another stage."""
    stage = STAGES[stage - 1] if isinstance(stage, int) else stage
    return launches.TRITON_OPERATORS[operator](stage, dtype, Chip(arch, 132), training=training)


def works_of(operator, stage, **settings):
    return list(map(work.work_of, launches_of(operator, stage, **settings)))


@pytest.mark.parametrize("operator", launches.TRITON_OPERATORS)
def test_every_large_kernel_has_its_work_described(operator):
    for stage in (1, 2, 3):
        for launch in launches_of(operator, stage, training=operator != "conv_linear"):
            described = work.work_of(launch)
            if launch.kernel.__name__ == "_update_running_kernel":
                assert described is None
                continue
            assert min(described.programs, described.outputs, described.bytes, *described.trips) > 0


def test_work_of_linear_layers():
    """Stage 3: 394 by 6 tiles for GELU, of 6 steps each; whole rows for LayerNorm, with K = C, then 4C."""
    (gelu,) = works_of("linear_gelu", 3, training=True)
    assert (gelu.programs, gelu.outputs) == (132, ROWS * 4 * 384)
    assert gelu.bytes == 2 * (ROWS * 384 * (1 + 4 + 4) + 4 * 384**2 + 4 * 384)
    assert gelu.flops == 2 * ROWS * 4 * 384**2
    assert (gelu.trips, gelu.conditional) == ((6 * 394 * 6 / 132,), 1 / 6)
    assert works_of("linear_add", 3, training=True) == []
    narrow, wide = works_of("linear_add_layer_norm", 3)
    assert narrow.bytes == 2 * (ROWS * 384 * 4 + 384**2 + 3 * 384)
    assert (narrow.programs, narrow.trips, narrow.conditional) == (394, (6,), 1)
    assert wide.trips == (24,)
    assert works_of("linear_gelu", 3, dtype=torch.float32)[0].flops == 0  # without tensor cores


def test_work_of_the_projection(monkeypatch):
    """Stage 1: every program goes down 14 pairs of rows of 7 images, but for the last of 37."""
    described, *_ = works_of("conv_projection", 1)
    elements = 256 * 64 * 56 * 56
    assert (described.outputs, described.bytes) == (elements * 3 // 2, elements * 5 // 2 * 2)
    assert (described.programs, described.trips) == (37 * 2 * 7, (256 / 37, 14))
    # The kernel over regions: strips of 14 of 56 rows, 2 column blocks of 28; k and v have half of both.
    monkeypatch.setattr(forward, "has_sliding_kernel", lambda geometry: False)
    launch, *_ = launches_of("conv_projection", 1)
    pixels, trips = launch.arguments["TILE"].pixels, []
    for branch, rows, columns in zip(launch.arguments["BRANCHES"], (14, 7, 7), (28, 14, 14), strict=True):
        trips += [-(-rows // (pixels // branch.columns * branch.rows)), -(-columns // branch.columns)]
    assert work.work_of(launch).trips == tuple(trips)


def test_work_of_attention():
    """Stage 3: 197 queries in 4 tiles of 64, for one program of a head; 50 keys in a tile."""
    described, *_ = works_of("attention", 3)
    assert (described.programs, described.outputs) == (256 * 6, ROWS * 384)
    assert described.flops == 4 * 256 * 6 * 197 * 50 * 64
    assert (described.trips, described.scores) == ((4,), 4 * 64 * 64)
    assert works_of("attention", 3, dtype=torch.float32)[0].flops == 0  # without tensor cores


def test_work_of_the_mlp():
    """Stage 1 only: 6272 tiles of 128 rows, on 2 programs of each of 132 multiprocessors."""
    assert works_of("layer_norm_mlp", 2) == works_of("layer_norm_mlp", 1, training=True) == []
    (described,) = works_of("layer_norm_mlp", 1)
    rows = 256 * 56 * 56
    assert (described.programs, described.outputs) == (264, rows * 64)
    assert described.bytes == 2 * (2 * rows * 64 + 2 * 64 * 256)
    assert (described.trips, described.flops) == ((6272 / 264,), 4 * rows * 64 * 256)
    (described,) = works_of("layer_norm_mlp", 1, dtype=torch.float32)
    # Tiles of 64 rows, and chunks of 32 hidden features; no tensor cores.
    assert (described.trips, described.flops) == ((12544 / 264, 8), 0)


def test_work_of_depthwise_conv_gelu():
    """A unit is read and one is written; the backward reads two and writes one, and then as the forward."""
    stage = launches.stages_of("pvt_v2_b2", 224)[0]
    own, backward, _, dx = launches_of("depthwise_conv_gelu", stage, training=True)
    unit = 256 * 56 * 56 * 512
    for launch, units in ((own, 2), (backward, 3), (dx, 2)):
        described = work.work_of(launch)
        partial = launch.arguments.get("partial_ptr")
        sums = 0 if partial is None else partial.numel() * 4
        assert (described.outputs, described.bytes) == (unit, 2 * units * unit + sums)
        assert described.trips == (256 / launch.arguments["groups"], 28 / launch.arguments["strips"])
    assert backward.arguments["partial_ptr"].shape[0] == 10


def test_each_row_of_tokens_is_moved_once():
    tokens, kept, index, places = ROWS * 384, 256 * 138 * 384, 8 * 256 * 138, 4 * 256 * 197
    assert {
        launch.kernel.__name__.removesuffix("_kernel").strip("_"): work.work_of(launch).bytes
        for operator in ("gather_rows", "gather_add_layer_norm", "scatter_rows")
        for launch in launches_of(operator, 3)
    } == {
        "gather_rows": index + 2 * 2 * kept,
        "gather_add_layer_norm": index + 4 * 2 * kept,
        "scatter_rows_places": index + places,
        "scatter_rows": places + 2 * (tokens - kept + 2 * kept + tokens),
        "scatter_rows_inplace": index + 3 * 2 * kept,
    }


def test_work_of_8_bit_numbers():
    """Stage 3: a byte per number and a scale per row; products at twice the speed of half precision."""
    for operator, width in (("quantize_rows", 384), ("layer_norm_quantize", 384), ("gelu_quantize", 1536)):
        (described,) = works_of(operator, 3)
        assert (described.outputs, described.bytes) == (ROWS * width, 3 * ROWS * width + 4 * ROWS)
        assert (described.trips, described.flops) == ((), 0)
    query, proj, fc1, fc2 = launches_of("linear_int8", 3)
    described = work.work_of(fc1)
    assert (described.flops, described.speed) == (2 * ROWS * 384 * 1536, 2)
    # Weights, a scale of each row, and a scale and a bias of each output beside the tokens.
    assert described.bytes == ROWS * (384 + 2 * 1536) + 384 * 1536 + 4 * ROWS + 6 * 1536
    assert described.trips == (3 * fc1.arguments["tiles"] / fc1.arguments["programs"],)
    assert work.work_of(fc2).trips == (12,)
    assert work.work_of(proj).bytes - work.work_of(query).bytes == 2 * ROWS * 384
    assert launches_of("linear_float8", 3, arch=80) == launches_of("linear_float8", 3, training=True) == []
    assert len(launches_of("linear_float8", 3)) == 7
