"""attention and attention_map: what they accept and what they refuse, on every backend of a CPU."""

import math

import pytest
import torch

import cvt_kernels as ck
from tests.checks import assert_accurate, record_calls


@pytest.fixture(params=["native", "sdpa", "reference"])
def _each_backend(request):
    """Runs the test by each backend; the reference serves what it cannot."""
    with ck.use_backend(request.param, "reference"):
        yield


def make(tokens, **changes):
    settings = {"batch": 2, "heads": 3, "dim": 8, "dtype": torch.float32, "device": "cpu"} | changes
    return torch.randn(
        settings["batch"], tokens, settings["heads"], settings["dim"],
        dtype=settings["dtype"], device=settings["device"],
    )  # fmt: skip


def test_a_backend_gets_the_arguments_as_they_are():
    calls = record_calls("attention")
    q, k, v, bias = make(9), make(4), make(4), torch.randn(3, 9, 4)
    with ck.use_backend("native"):
        out = ck.attention(q, k, v, scale=0.2, bias=bias, dropout_p=0.0)
    assert calls == [((q, k, v), {"scale": 0.2, "bias": bias, "dropout_p": 0.0, "position": None})]
    torch.testing.assert_close(out, by_hand(q, k, v, 0.2, bias=bias))


def by_hand(q, k, v, scale, *, bias=0.0, dropout=lambda p: p):
    """Computes the formula, head by head."""
    outs = []
    for h in range(q.shape[2]):
        scores = (q[:, :, h] @ k[:, :, h].transpose(1, 2)) * scale
        scores = scores + (bias[h] if isinstance(bias, torch.Tensor) else bias)
        outs.append(dropout(scores.softmax(-1)) @ v[:, :, h])
    return torch.stack(outs, dim=2)


@pytest.mark.usefixtures("_each_backend")
def test_slices_of_one_wider_tensor():
    qkv = torch.randn(2, 5, 3, 3, 8)
    q, k, v = qkv.unbind(2)
    torch.testing.assert_close(ck.attention(q, k, v), by_hand(q, k, v, 8**-0.5))


@pytest.mark.usefixtures("_each_backend")
def test_dropout_drops_probabilities_and_scales_up_the_others():
    q, k, eye = make(9, heads=1), make(8, heads=1), torch.eye(8).expand(2, 8, 8)[:, :, None]
    probabilities = by_hand(q, k, eye, 8**-0.5)
    kept = ck.attention(q, k, eye, dropout_p=0.5)  # v is the identity, so these are the probabilities
    dropped = kept == 0
    torch.testing.assert_close(kept[~dropped], 2 * probabilities[~dropped])
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(ck.attention(q, k, eye), probabilities)


@pytest.mark.usefixtures("_each_backend")
def test_autocast_mixes_dtypes():
    q, k, v = make(9), make(4, dtype=torch.bfloat16), make(4)
    with torch.autocast("cpu", torch.bfloat16):
        out = ck.attention(q, k, v)
    exact = by_hand(*(t.bfloat16().double() for t in (q, k, v)), 8**-0.5)
    assert_accurate(out, by_hand(*(t.bfloat16() for t in (q, k, v)), 8**-0.5), exact)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": make(4, heads=1)}, ValueError, r"k: got shape \(2, 4, 1, 8\), expected \(2, 4, 3, 8\)"),
        ({"k": make(4, dim=16)}, ValueError, r"k: got shape \(2, 4, 3, 16\)"),
        ({"v": make(5)}, ValueError, r"v: got shape \(2, 5, 3, 8\), expected \(2, 4, 3, 8\)"),
        ({"v": make(4, batch=1)}, ValueError, "v: got shape"),
        ({"k": make(0), "v": make(0)}, ValueError, "k: got no tokens"),
        ({"q": make(0)}, ValueError, "q: got no tokens"),
        ({"q": make(9)[0]}, ValueError, "q: got shape .* expected 4 dimensions"),
        ({"k": make(4, dtype=torch.float16)}, TypeError, "k: has dtype float16, expected float32 as q"),
        ({"v": make(4, device="meta")}, ValueError, "v: is on meta, expected cpu as q"),
        ({"q": make(9).long()}, TypeError, "q: got dtype int64"),
        ({"q": None}, TypeError, "q: got NoneType, expected a tensor"),
        (
            {"q": make(9, dim=0), "k": make(4, dim=0), "v": make(4, dim=0)},
            ValueError,
            "q: got shape .* one channel",
        ),
        ({"scale": float("nan")}, ValueError, "scale: got nan"),
        ({"scale": float("inf")}, ValueError, "scale: got inf"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1"),
        ({"bias": torch.zeros(3, 9, 5)}, ValueError, r"bias: .* does not broadcast to \(2, 3, 9, 4\)"),
        ({"bias": torch.zeros(1, 2, 3, 9, 4)}, ValueError, "bias: .* does not broadcast"),
        ({"bias": torch.zeros(9, 4).bool()}, TypeError, "bias: got dtype bool"),
        ({"bias": torch.zeros(9, 4).double()}, TypeError, "bias: has dtype float64"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        ck.attention(**{"q": make(9), "k": make(4), "v": make(4)} | arguments)


# attention_map --------------------------------------------------------------------------------------------


def test_map_agrees_with_the_whole_matrix():
    q, k, bias = make(9, dtype=torch.float64), make(4, dtype=torch.float64), torch.randn(3, 1, 4).double()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.3 + bias
    whole = scores.softmax(-1)
    result = ck.attention_map(q, k, rows=[0, 5, -1], scale=0.3, bias=bias)
    torch.testing.assert_close(result.probabilities, whole[:, :, [0, 5, 8]])
    entropy = torch.distributions.Categorical(whole[:, :, [0, 5, 8]]).entropy()
    torch.testing.assert_close(result.entropy, entropy)
    assert result.distance is None
    default = ck.attention_map(q, k).probabilities
    torch.testing.assert_close(
        default, torch.einsum("bhd,bkhd->bhk", q[:, 0], k).mul(8**-0.5).softmax(-1)[:, :, None]
    )


@pytest.mark.usefixtures("_each_backend")
def test_map_reproduces_the_output_of_attention():
    q, k, v = make(9), make(4), make(4)
    p = ck.attention_map(q, k, rows=range(9)).probabilities
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", p, v), ck.attention(q, k, v))


def test_map_of_equal_keys():
    q, k = make(4), torch.zeros(2, 4, 3, 8)
    result = ck.attention_map(q, k, rows=(0, 3), grid=(2, 2))
    torch.testing.assert_close(result.entropy, torch.full((2, 3, 2), math.log(4)))
    torch.testing.assert_close(result.distance, torch.full((2, 3, 2), (0 + 1 + 1 + math.sqrt(2)) / 4))


def attend_to(key, tokens, *, queries):
    """Queries and keys of one head for which every query attends to ``key`` only."""
    k = torch.zeros(1, tokens, 1, 2)
    k[:, key] = 1
    return torch.full((1, queries, 1, 2), 1e3), k


def test_distance_from_a_finer_grid():
    """4×6 queries over 2×3 keys: key (1, 2), at query (2, 4), seen from query (3, 1)."""
    q, k = attend_to(5, 6, queries=24)
    result = ck.attention_map(q, k, rows=3 * 6 + 1, grid=(2, 3))
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


def test_map_of_an_excluded_row():
    bias = torch.zeros(9, 4)
    bias[0] = -torch.inf
    result = ck.attention_map(make(9), make(4), rows=(0, 1), bias=bias)
    assert not result.probabilities[:, :, 0].any()
    assert not result.entropy[:, :, 0].any()
    torch.testing.assert_close(result.probabilities[:, :, 1].sum(-1), torch.ones(2, 3))


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
        ({"rows": 9}, r"rows: got \[9\], expected at least one index into 9 queries"),
        ({"rows": ()}, r"rows: got \[\]"),
        ({"rows": [*range(10**5)]}, r"rows: got .{,80}, expected at least one index into 9 queries"),
        ({"k": make(4, heads=1)}, r"k: got shape \(2, 4, 1, 8\), expected \(2, 4, 3, 8\)"),
        ({"grid": (3, 3)}, "grid: got 3×3 for 4 keys"),
        ({"grid": (2, 2), "query_grid": (2, 3)}, "query_grid: got 2×3 for 9 queries"),
        ({"q": make(11), "grid": (2, 2)}, "query_grid: got 2×2 for 11 queries"),
        ({"scale": math.inf}, "scale: got inf"),
        ({"bias": torch.zeros(9, 5)}, "bias: got shape"),
    ],
)
def test_bad_arguments_of_a_map(arguments, message):
    with pytest.raises(ValueError, match=message):
        ck.attention_map(**{"q": make(9), "k": make(4)} | arguments)
