"""Operators on rows by the compiled extension: accuracy, instruction sets, rows that x does not have."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import checks, reference
from cvt_kernels.ops.rows import gather_add_layer_norm, gather_rows, scatter_rows
from tests.checks import needs_extension, recorded_operators, run_on_instruction_set


def make(batch=3, tokens=21, count=13, channels=40, dtype=torch.float32):
    """Returns tokens, an index with -1 in it, and values."""
    x = torch.randn(batch, tokens, channels).to(dtype)
    rows = torch.stack([torch.randperm(tokens)[:count] for _ in range(batch)])
    rows[0, -2:] = -1
    return x, rows, torch.randn(batch, count, channels).to(dtype)


INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
torch.manual_seed(0)
rows = torch.tensor([[4, 0, -1], [1, 2, 6]])
tolerances = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
for dtype, atol in tolerances.items():
    x, branch = torch.randn(2, 7, 83).to(dtype), torch.randn(2, 3, 83).to(dtype)
    vectors = torch.randn(2, 83).to(dtype)
    with ck.use_backend("cpu"), torch.no_grad():
        h, y = gather_add_layer_norm(x, rows, branch, *vectors)
        out = scatter_rows(x, rows, h, branch)
    expected = ck.reference.gather_add_layer_norm(x, rows, branch)[0]
    assert torch.equal(h, expected)
    exact = ck.reference.layer_norm(h.double(), *vectors.double())
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=atol)
    assert torch.equal(out, ck.reference.scatter_rows(x, rows, h, branch))
"""


@needs_extension
@pytest.mark.parametrize("name", ["plain", "avx2", "avx512", "avx512_bf16"])  # the ones in its tables
def test_values(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


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
        lambda: gather_add_layer_norm(x, rows, values),
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


@needs_extension
@torch.no_grad()
def test_a_call_is_one_operator_without_copies():
    x, rows, values = make()
    vector = torch.randn(40)
    calls = {
        "gather_rows": lambda: gather_rows(x[:, 1:], rows.clamp(max=19)),
        "gather_add_layer_norm": lambda: gather_add_layer_norm(x, rows, values, vector, vector),
        "scatter_rows": lambda: scatter_rows(x, rows, values, values),
        "scatter_rows_": lambda: scatter_rows(x, rows, values, values, inplace=True),
    }
    for operator, call in calls.items():
        with ck.use_backend("cpu"):
            call()
            with recorded_operators() as names:
                call()
        names = [name for name in names if "clamp" not in name and "slice" not in name]
        assert names == [f"cvt_kernels.{operator}.default"]
