"""Rows on a CPU: those that x lacks, negative ones, and calls without copies."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import checks, reference
from cvt_kernels.ops.rows import gather_rows, scatter_rows
from tests.checks import needs_extension


def make(batch=3, tokens=21, count=13, channels=40, dtype=torch.float32):
    """Returns tokens, an index with -1 in it, and values."""
    x = torch.randn(batch, tokens, channels).to(dtype)
    rows = torch.stack([torch.randperm(tokens)[:count] for _ in range(batch)])
    rows[0, -2:] = -1
    return x, rows, torch.randn(batch, count, channels).to(dtype)


@needs_extension
@pytest.mark.parametrize("row", [21, 2**40])
@torch.no_grad()
def test_rows_that_x_does_not_have_are_refused(row, monkeypatch):
    monkeypatch.setattr(checks, "check_row_values", lambda *args: None)  # as under torch.compile
    x, rows, values = make()
    rows[2, 5] = row
    before = x.clone()
    for call in (
        lambda: gather_rows(x, rows),
        lambda: scatter_rows(x, rows, values),
        lambda: scatter_rows(x, rows, values, inplace=True),
    ):
        with ck.use_backend("cpu"), pytest.raises(RuntimeError, match=f"rows: got {row}, expected"):
            call()
    assert torch.equal(x, before)


@needs_extension
@torch.no_grad()
def test_every_negative_row_is_one_of_zeros():
    x, rows, values = make()
    other = torch.where(rows < 0, torch.tensor(-(2**40)), rows)
    with ck.use_backend("cpu"):
        assert torch.equal(gather_rows(x, other), gather_rows(x, rows))
        assert torch.equal(scatter_rows(x, other, values), reference.scatter_rows(x, rows, values))
