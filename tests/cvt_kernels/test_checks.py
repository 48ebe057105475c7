"""Tests of the checks of arguments, and of what autocast does to them."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import checks


def test_names_of_dtypes():
    assert [checks.dtype_name(dtype) for dtype in (torch.bfloat16, torch.int64)] == ["bfloat16", "int64"]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, None)],
    ids=str,
)
def test_autocast_gives_its_dtype_to_all_but_float64(dtype, expected):
    x = torch.zeros(1, dtype=dtype)
    assert checks.autocast_dtype(x) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert checks.autocast_dtype(x) == expected
    with torch.autocast("cpu", enabled=False):
        assert checks.autocast_dtype(x) is None


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_autocast_leaves_a_projection_of_float64(backend):
    x = torch.randn(1, 16, 8, dtype=torch.float64)
    conv = ck.ConvBatchNorm(
        weight=torch.randn(8, 1, 3, 3, dtype=torch.float64),
        bn_weight=None,
        bn_bias=None,
        running_mean=torch.zeros(8, dtype=torch.float64),
        running_var=torch.ones(8, dtype=torch.float64),
    )
    with ck.use_backend(backend):
        (expected,) = ck.conv_projection(x, (4, 4), [conv], training=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (y,) = ck.conv_projection(x, (4, 4), [conv], training=False)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
