"""The bias of attention by position: every backend against the explicit matrix, and the table's gradient."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.records import PositionBias
from cvt_kernels.reference import gather_rows
from tests.checks import (
    CPU_KERNELS,
    python_blocks,
    run_blocks,
    section_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORWARD = ["sdpa", CPU_KERNELS]
#: Grid of the tokens, grid of the keys, stride, class tokens.
GRIDS = [
    ((4, 6), (2, 3), 2, 0),
    ((3, 5), (2, 3), 2, 1),
    ((2, 20), (2, 20), 1, 1),  # more than a tile of columns
    ((4, 3), (2, 1), 3, 0),
    ((1, 1), (1, 1), 2, 1),
    ((2, 3), (3, 4), 1, 0),  # some offsets occur in no pair
]


def make(grids, *, batch=2, heads=2, dim=8, dtype=torch.float64, table=1.0, rows=None):
    """Returns q, k, v and the bias; ``table`` is how far its numbers spread."""
    (height, width), (key_height, key_width), stride, class_tokens = grids
    tokens, keys = height * width + class_tokens, key_height * key_width + class_tokens
    queries = tokens if rows is None else rows.shape[1]
    q, k, v = (
        torch.randn(batch, n, heads, dim, dtype=torch.float64).to(DEVICE, dtype)
        for n in (queries, keys, keys)
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


def attend(backend, *tensors, **settings):
    with torch.no_grad(), ck.use_backend(backend):
        return ck.attention(*tensors, **settings)


def pattern_like(out):
    """Returns a fixed pattern of output gradients."""
    return torch.arange(out.numel(), device=DEVICE).remainder(7).view_as(out).sub(3).to(out.dtype)


def run(backend, q, k, v, position, *, matrix=None, valid=None, attention=ck.attention):
    """Returns the output and the gradients of q, k, v and the table.

    ``matrix`` makes the bias of the table instead; ``valid`` says which outputs count.
    """
    live = [t.detach().requires_grad_() for t in (q, k, v, position.table)]
    position = position._replace(table=live[3])
    settings = {"position": position} if matrix is None else {"bias": matrix(position)}
    with ck.use_backend(backend):
        out = attention(*live[:3], scale=0.4, **settings)
    pattern = pattern_like(out)
    if valid is not None:
        pattern = pattern * valid[..., None, None]
    return [out.detach(), *torch.autograd.grad(out, live, pattern)]


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("backend", ["reference", *FORWARD])
def test_forward_agrees_with_the_matrix_by_hand(backend, grids):
    q, k, v, position = make(grids)
    out = attend(backend, q, k, v, scale=-0.4, position=position)
    expected = attend("reference", q, k, v, scale=-0.4, bias=by_hand(position, grids[3]))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if q.shape[1] > 2:
        assert (out - attend("reference", q, k, v, scale=-0.4)).abs().max() > 0.1


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_gradients_agree_with_the_matrix_by_hand(grids):
    tensors = make(grids)
    expected = run("reference", *tensors, matrix=lambda position: by_hand(position, grids[3]))
    torch.testing.assert_close(run("sdpa", *tensors), expected, rtol=1e-10, atol=1e-10)


#: Tokens of two images of 3×5 and a class token; the second image has fewer.
ROWS = torch.tensor([[0, 1, 2, 7, 11, 15], [0, 6, 14, -1, -1, -1]], device=DEVICE)


@pytest.mark.parametrize("backend", ["reference", *FORWARD])
def test_chosen_queries_are_those_of_all_tokens(backend):
    q, k, v, position = make(GRIDS[1])
    some = gather_rows(q.flatten(2), ROWS).unflatten(2, (2, -1))
    whole = attend(backend, q, k, v, position=position)
    out = attend(backend, some, k, v, position=position._replace(rows=ROWS))
    expected = gather_rows(whole.flatten(2), ROWS).unflatten(2, (2, -1))
    torch.testing.assert_close(out[ROWS >= 0], expected[ROWS >= 0], rtol=1e-12, atol=1e-12)
    assert out.isfinite().all()


def test_gradients_of_chosen_queries():
    """Nothing reads the results of what is no token, so their gradients are 0."""
    tensors = make(GRIDS[1], rows=ROWS)
    (_, *ours), (_, *expected) = (run(name, *tensors, valid=ROWS >= 0) for name in ("sdpa", "reference"))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    assert ours[3].abs().max() > 1e-3


# The rest of the interface --------------------------------------------------------------------------------


@pytest.mark.parametrize("with_rows", [False, True])
def test_map_has_the_probabilities_of_attention(with_rows):
    q, k, v, position = make(GRIDS[1], rows=ROWS if with_rows else None)
    out = attend("reference", q, k, v, scale=0.3, position=position)
    seen = ck.attention_map(q, k, rows=[0, 3, -1], scale=0.3, position=position).probabilities
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", seen, v), out[:, [0, 3, -1]])


def test_the_page_about_attention_runs():
    names = run_blocks(python_blocks(section_of("inside.md", "## attention")))
    assert names["out"].shape == names["queries"].shape


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_queries_that_are_no_tokens_are_refused(backend):
    q, kv, table = torch.randn(1, 2, 1, 8), torch.randn(1, 4, 1, 8), torch.randn(1, 5, 5)
    position = ck.PositionBias(table, (4, 4), (2, 2), 1, torch.tensor([[3, 16]]))
    with pytest.raises(ValueError, match=r"position\.rows: got 16, expected the tokens 0 to 15, or -1"):
        attend(backend, q, kv, kv, position=position)
