"""The bias of attention by position: every backend against the explicit matrix, and the gradient of its table."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import cvt_kernels as ck
from cvt_kernels.reference import PositionBias, gather_rows
from tests.checks import assert_accurate, not_built, recorded_operators, remember_verdict, run_sanitized

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
NATIVE = pytest.param("native", marks=needs_extension)
FORWARD = ["triton", "sdpa", NATIVE]
#: Grid of the tokens, grid of the keys, stride, class tokens.
GRIDS = [
    ((4, 6), (2, 3), 2, 0),
    ((5, 7), (3, 4), 2, 1),
    ((3, 20), (3, 20), 1, 1),  # more than a tile of columns
    ((7, 4), (3, 2), 3, 0),
    ((1, 1), (1, 1), 2, 1),
    ((2, 3), (4, 5), 1, 0),  # some offsets are those of no pair
]


def make(grids, *, batch=2, heads=2, dim=8, dtype=torch.float64, table=1.0, rows=None):
    """Returns q, k, v and the bias; ``table`` is how far its numbers spread."""
    (height, width), (key_height, key_width), stride, class_tokens = grids
    tokens, keys = height * width + class_tokens, key_height * key_width + class_tokens
    queries = tokens if rows is None else rows.shape[1]
    q, k, v = (
        torch.randn(batch, n, heads, dim, dtype=torch.float64).to(DEVICE, dtype) for n in (queries, keys, keys)
    )
    sizes = heads, height + stride * (key_height - 1), width + stride * (key_width - 1)
    numbers = table * torch.randn(sizes, dtype=torch.float64)
    return q, k, v, PositionBias(numbers.to(DEVICE, dtype), *grids[:3], rows)


def by_hand(position, class_tokens):
    """Returns the matrix (h, T, Nkv) by loops over tokens and keys."""
    table, (height, width), (key_height, key_width), stride, _ = position
    tokens, keys = height * width + class_tokens, key_height * key_width + class_tokens
    bias = table.new_zeros(len(table), tokens, keys)
    for token in range(height * width):
        for key in range(key_height * key_width):
            down = token // width - stride * (key // key_width - key_height + 1)
            across = token % width - stride * (key % key_width - key_width + 1)
            bias[:, token + class_tokens, key + class_tokens] = table[:, down, across]
    return bias


def run(backend, q, k, v, position, *, scale=0.4, bias=None):
    """Returns the output and the gradients of q, k, v and the table."""
    live = [t.detach().requires_grad_() for t in (q, k, v, position.table)]
    with ck.use_backend(backend):
        out = ck.attention(*live[:3], scale=scale, bias=bias, position=position._replace(table=live[3]))
    pattern = torch.linspace(-1, 1, 7, dtype=out.dtype, device=DEVICE).repeat(out.numel() // 7 + 1)
    return [out.detach(), *torch.autograd.grad(out, live, pattern[: out.numel()].view_as(out))]


def chosen(batch, tokens, *numbers):
    """Returns rows (batch, max(numbers)): token 0 and some others, ascending, and -1 after them."""
    rows = torch.full((batch, max(numbers)), -1, device=DEVICE)
    for image, number in enumerate(numbers):
        rows[image, :number] = torch.randperm(tokens - 1)[: number - 1].sort().values.add(1).new_tensor(
            [0, *(torch.randperm(tokens - 1)[: number - 1].sort().values + 1).tolist()]
        )
    return rows


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("backend", ["reference", *FORWARD])
def test_forward_agrees_with_the_matrix_by_hand(backend, grids):
    q, k, v, position = make(grids)
    with torch.no_grad():
        with ck.use_backend(backend):
            out = ck.attention(q, k, v, scale=-0.4, position=position)
        with ck.use_backend("reference"):
            expected = ck.attention(q, k, v, scale=-0.4, bias=by_hand(position, grids[3]))
            plain = ck.attention(q, k, v, scale=-0.4)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if q.shape[1] > 2:
        assert (out - plain).abs().max() > 0.1


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_gradients_agree_with_the_matrix_by_hand(backend, grids):
    q, k, v, position = make(grids)
    ours = run(backend, q, k, v, position)
    live = [t.requires_grad_() for t in (q, k, v, position.table)]
    bias = by_hand(position._replace(table=live[3]), grids[3])
    with ck.use_backend("reference"):
        out = ck.attention(*live[:3], scale=0.4, bias=bias)
    pattern = torch.linspace(-1, 1, 7, dtype=out.dtype, device=DEVICE).repeat(out.numel() // 7 + 1)
    expected = torch.autograd.grad(out, live, pattern[: out.numel()].view_as(out))
    for a, b in zip(ours, [out.detach(), *expected], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
