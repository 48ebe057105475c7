"""The bias of attention by position: the reference against a loop, chosen queries, and the map."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels.records import PositionBias
from cvt_kernels.reference import gather_rows
from tests.checks import CPU_KERNELS, python_blocks, run_blocks, section_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Grid of the tokens, grid of the keys, stride, class tokens.
GRIDS = [
    ((4, 6), (2, 3), 2, 0),
    ((3, 5), (2, 3), 2, 1),
    ((4, 3), (2, 1), 3, 0),
    ((1, 1), (1, 1), 2, 1),
    ((2, 3), (3, 4), 1, 0),  # some offsets occur in no pair
]


def make(grids, *, rows=None):
    """Returns q, k, v and the bias, in float64."""
    (height, width), (key_height, key_width), stride, class_tokens = grids
    tokens, keys = height * width + class_tokens, key_height * key_width + class_tokens
    queries = tokens if rows is None else rows.shape[1]
    q, k, v = (torch.randn(2, n, 2, 8, dtype=torch.float64).to(DEVICE) for n in (queries, keys, keys))
    sizes = 2, height + stride * (key_height - 1), width + stride * (key_width - 1)
    table = torch.randn(sizes, dtype=torch.float64).to(DEVICE)
    return q, k, v, PositionBias(table, *grids[:3], rows)


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


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_the_reference_is_the_matrix_by_hand(grids):
    q, k, v, position = make(grids)
    leaves = [t.requires_grad_() for t in (q, k, v, position.table)]
    results = []
    for bias in ({"position": position}, {"bias": by_hand(position, grids[3])}):
        out = ck.reference.attention(q, k, v, scale=-0.4, **bias)
        results.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


#: Tokens of two images of 3×5 and a class token; the second image has fewer.
ROWS = torch.tensor([[0, 1, 2, 7, 11, 15], [0, 6, 14, -1, -1, -1]], device=DEVICE)


@pytest.mark.parametrize("backend", ["reference", "sdpa", CPU_KERNELS])
def test_chosen_queries_are_those_of_all_tokens(backend):
    q, k, v, position = make(GRIDS[1])
    some = gather_rows(q.flatten(2), ROWS).unflatten(2, (2, -1))
    whole = attend(backend, q, k, v, position=position)
    out = attend(backend, some, k, v, position=position._replace(rows=ROWS))
    expected = gather_rows(whole.flatten(2), ROWS).unflatten(2, (2, -1))
    torch.testing.assert_close(out[ROWS >= 0], expected[ROWS >= 0], rtol=1e-12, atol=1e-12)
    assert out.isfinite().all()


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
