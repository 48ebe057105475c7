"""Tests of the checks of arguments, and of what autocast does to them."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import checks
from cvt_kernels.ops.linear_int8.modules import ConvInt8, LinearInt8
from cvt_kernels.ops.transformer_block import transformer_block
from cvt_kernels.records import PositionBias
from tests.cvt_kernels.ops.transformer_block.calls import make


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint64, lambda n: torch.tensor(n).char()])
def test_grids_of_integers_that_may_overflow_are_refused(kind):
    grid, x = (kind(12), kind(12)), torch.zeros(1, 144, 8)
    conv, q = ck.ConvBatchNorm(torch.zeros(8, 1, 3, 3), None, None, *torch.ones(2, 8)), x[:, :, None]
    for name, call in {
        "grid": lambda grid: ck.conv_projection(x, grid, [conv], training=False),
        "position.key_grid": lambda grid: ck.attention(
            q, q, q, position=PositionBias(torch.zeros(1, 23, 23), (12, 12), grid, 1)
        ),
        "query_grid": lambda grid: ck.attention_map(q, q, rows=0, grid=(12, 12), query_grid=grid),
    }.items():
        call((np.int32(12), torch.tensor(12)))
        with pytest.raises(TypeError, match=rf"^{name}: got .*, expected a tuple \(H, W\) of integers"):
            call(grid)


def test_classes_of_the_same_name_are_told_apart_by_their_modules():
    x, grid, block = make()
    linears = (nn.Linear(24, 24), *block.linears[1:])
    with pytest.raises(
        TypeError,
        match=r"^block.linears\[0\]: got torch.nn.modules.linear.Linear, expected cvt_kernels.records.Linear "
        "or QuantizedLinear$",
    ):
        transformer_block(x, grid, block._replace(linears=linears))
    with pytest.raises(
        TypeError, match=r"^linear: got cvt_kernels.records.Linear, expected torch.nn.modules."
    ):
        LinearInt8.from_float(block.linears[0])
    with pytest.raises(TypeError, match=r"^linear: got Conv2d, expected Linear$"):
        LinearInt8.from_float(nn.Conv2d(1, 1, 1))


def test_integers_of_numpy_are_taken():
    checks.check_pair("size", [np.int64(1), 2], 1)
    checks.check_int("n", np.int64(3), 1, 3)
    with pytest.raises(ValueError, match=r"n: got np\.int64\(4\), expected an integer of at most 3"):
        checks.check_int("n", np.int64(4), 1, 3)
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(8, 3, 3, 3)
    tokens = ck.conv_embedding(image, weight, None, stride=np.int8(2), padding=np.int64(1))
    assert torch.equal(tokens, ck.conv_embedding(image, weight, None, stride=2, padding=1))
    assert checks.check_geometry("", 100, (200, 200), np.int8(1), np.int8(100)) == (301, 301)
    conv = nn.Conv2d(3, 4, np.int64(3))
    assert ConvInt8.from_float(conv).kernel_size == ConvInt8(3, 4, [3, 3]).kernel_size == (3, 3)
    assert type(LinearInt8(np.int64(8), 4).in_features) is int


@pytest.mark.parametrize(
    ("check", "value", "got"),
    [
        (lambda value: checks.check_int("x", value, 1, 10), 10**5000, "int"),
        (lambda value: checks.check_pair("x", value, 1), [10**5000], "list"),
        (lambda value: checks.check_pair("x", value, 1), [torch.zeros(9)] * 9, "[Tensor, Tensor, Tensor, "),
        (lambda value: checks.check_positive("x", value), 10**5000, "int"),
        (lambda value: checks.check_choice("x", value, ("a",)), "y" * 10**6, "'yyy"),
    ],
    ids=["int", "list", "tensors", "number", "text"],
)
def test_large_values_are_shortened(check, value, got):
    with pytest.raises((TypeError, ValueError), match=f"^x: got {re.escape(got)}.*, expected") as caught:
        check(value)
    assert len(str(caught.value)) < 150


def test_float64_is_like_no_other_dtype_under_autocast():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="w: has dtype float64"):
        checks.check_like("w", torch.ones(2, dtype=torch.float64), "x", torch.ones(2))
