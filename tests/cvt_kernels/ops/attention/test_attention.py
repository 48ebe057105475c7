"""Samples of large images for tuning, and attention_map."""

import math

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends


def make(tokens, *, heads=3, dtype=torch.float32):
    return torch.randn(2, tokens, heads, 8, dtype=dtype)


# Samples for tuning -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [None, (1, 2, 4096, 2048), (4096, 1), (2048,), (1, 2, 1, 2048)], ids=str)
def test_a_sample_of_a_large_image_has_fewer_queries(shape):
    """4096 queries and 2048 keys of two heads are 2²⁴ scores, four times what the check takes."""
    declared = backends.operators["attention"]
    q, k = torch.empty(3, 4096, 2, 1), torch.empty(3, 2048, 2, 1)
    bias = None if shape is None else torch.randn(shape)
    call = declared.bind(q, k, k, bias=bias)
    sample = declared.sample(1, call)
    assert [tuple(t.shape) for t in sample[:3]] == [(1, 1024, 2, 1), (1, 2048, 2, 1), (1, 2048, 2, 1)]
    assert all(t.is_contiguous() for t in sample[:3])
    if bias is not None:
        expected = bias[..., :1024, :] if 4096 in shape else bias
        assert torch.equal(sample.bias, expected)
    assert declared.sample(32, call).q.shape == (2, 4096, 2, 1)  # for the timing, whole images
    ordinary = declared.bind(q[:, :1024], k, k)
    assert declared.sample(1, ordinary).q.shape == (1, 1024, 2, 1)


def test_a_sample_with_a_bias_by_position_has_all_queries():
    declared = backends.operators["attention"]
    q, k = torch.empty(1, 4096, 2, 1), torch.empty(1, 4096, 2, 1)
    position = ck.PositionBias(torch.zeros(2, 127, 127), (64, 64), (64, 64), 1)
    assert declared.sample(1, declared.bind(q, k, k, position=position)).q.shape == q.shape


# attention_map --------------------------------------------------------------------------------------------


def test_map_agrees_with_the_whole_matrix():
    q, k = make(9, dtype=torch.float64), make(4, dtype=torch.float64)
    bias = torch.randn(3, 9, 4).double()
    bias[:, 5] = -torch.inf
    whole = (torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 + bias).softmax(-1).nan_to_num(0.0)
    chosen = whole[:, :, [0, 5, 8]]
    result = ck.attention_map(q, k, rows=[0, 5, -1], scale=0.3, bias=bias)
    torch.testing.assert_close(result.probabilities, chosen)
    torch.testing.assert_close(result.entropy, -torch.xlogy(chosen, chosen).sum(-1))
    assert result.distance is None
    default = torch.einsum("bhd,bkhd->bhk", q[:, 0], k).mul(8**-0.5).softmax(-1)
    torch.testing.assert_close(ck.attention_map(q, k).probabilities, default[:, :, None])


def test_map_of_equal_keys():
    result = ck.attention_map(make(4), torch.zeros(2, 4, 3, 8), rows=(0, 3), grid=(2, 2))
    torch.testing.assert_close(result.entropy, torch.full((2, 3, 2), math.log(4)))
    torch.testing.assert_close(result.distance, torch.full((2, 3, 2), (0 + 1 + 1 + math.sqrt(2)) / 4))


def attend_to(key, tokens, *, queries):
    """Returns queries and keys of one head for which every query attends to ``key`` only."""
    k = torch.zeros(1, tokens, 1, 2)
    k[:, key] = 1
    return torch.full((1, queries, 1, 2), 1e3), k


def test_distance_from_a_finer_grid():
    """4×6 queries over 2×3 keys: key (1, 2), at query (2, 4), seen from query (3, 1)."""
    result = ck.attention_map(*attend_to(5, 6, queries=24), rows=3 * 6 + 1, grid=(2, 3))
    assert result.distance.item() == pytest.approx(math.hypot(3 / 2 - 1, 1 / 2 - 2))
    assert result.entropy.item() == pytest.approx(0)
    odd = ck.attention_map(*attend_to(3, 4, queries=9), rows=8, grid=(2, 2), query_grid=(3, 3))
    assert odd.distance.item() == 0  # key (1, 1) lies at query (2, 2)


def test_class_token_has_no_place():
    """Among 1 + 2×2 keys and 1 + 4×4 queries."""
    q, k = attend_to(0, 5, queries=17)
    k[:, 4] = 1  # half of the probability each to the class token and to key (1, 1)
    result = ck.attention_map(q, k, rows=(0, 1), grid=(2, 2))
    torch.testing.assert_close(result.probabilities[0, 0, 0], torch.tensor([0.5, 0, 0, 0, 0.5]))
    assert result.distance[0, 0, 0].isnan()
    assert result.distance[0, 0, 1].item() == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_map_is_computed_in_float32(dtype):
    q, k = make(9, dtype=dtype), make(4, dtype=dtype)
    expected = ck.attention_map(q.double(), k.double(), rows=(0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        result = ck.attention_map(q.requires_grad_(), k, rows=(0, 1))
    assert result.probabilities.dtype == result.entropy.dtype == torch.float32
    assert not result.probabilities.requires_grad
    torch.testing.assert_close(result.probabilities.double(), expected.probabilities, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [*range(10**5)]}, r"rows: got .{,80}, expected at least one index into 9 queries"),
        ({"q": make(11), "grid": (2, 2)}, "query_grid: got 2×2 for 11 queries"),
        ({"bias": torch.zeros(1, 2, 3, 9, 4)}, "bias: got shape"),
    ],
)
def test_bad_arguments_of_a_map(arguments, message):
    with pytest.raises(ValueError, match=message):
        ck.attention_map(**{"q": make(9), "k": make(4)} | arguments)
