"""The CPU kernels of attention against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import machine, reference
from tests.checks import assert_accurate, every_instruction_set, needs_extension
from tests.cvt_kernels.ops.agreement import assert_agrees, assert_agrees_on

DTYPES = "float32", "bfloat16", "float16", "float64"
#: Queries, keys and heads of CvT-13's stages at 224×224, and of its first at 384×384.
SHAPES = [(3136, 784, 1), (784, 196, 3), (197, 50, 6), (577, 2304, 1)]

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"), torch.no_grad():
        yield


def make(batch, queries, keys, heads, dim, dtype=torch.float32):
    """Returns q, k and v, laid out as linear layers leave them."""
    return [torch.randn(batch, n, heads, dim).to(dtype) for n in (queries, keys, keys)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys", "heads"), SHAPES, ids=str)
def test_accuracy(queries, keys, heads, dtype):
    sizes = {"batch": 1, "queries": queries, "keys": keys, "heads": heads, "channels": 64}
    assert_agrees("attention", "cpu", **sizes, scale=(64 * heads) ** -0.5, dtype=dtype)


@pytest.mark.parametrize("factor", [30.0, -30.0, 0.0])
def test_sharp_and_flat_softmax(factor):
    """Scores of hundreds, where one key of some block takes nearly all; or all alike."""
    q, k, v = make(1, 50, 600, 2, 64)
    exact = reference.attention(q.double(), k.double(), v.double(), scale=factor)
    ours, theirs = (f.attention(q, k, v, scale=factor) for f in (ck, reference))
    assert_accurate(ours, theirs, exact, floor=100.0)


def test_wide_heads_are_summed_in_parts():
    """Products of one sign, whose roundings do not cancel, are as accurate as sums of 32 channels each."""
    q, k = (torch.rand(1, n, 2, 1).add(0.5).expand(-1, -1, -1, 256) for n in (20, 60))
    v = torch.randn(1, 60, 2, 256)
    parts = zip(q.transpose(1, 2).split(32, -1), k.permute(0, 2, 3, 1).split(32, -2), strict=True)
    scores = sum(queries @ keys for queries, keys in parts) / 16
    in_parts = (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)
    exact = reference.attention(q.double(), k.double(), v.double(), scale=1 / 16)
    assert_accurate(ck.attention(q, k, v, scale=1 / 16), in_parts, exact)


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 60),
    keys=st.integers(1, 300),
    heads=st.integers(1, 4),
    channels=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "sliced", "permuted", "transposed", "offset", "steps"]),
)
def test_any_shape_and_strides(**settings):
    assert_agrees("attention", "cpu", **settings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_image_is_the_same_in_any_batch(dtype):
    tensors = make(3, 130, 70, 2, 64, getattr(torch, dtype))
    alone = [ck.attention(*(t[i : i + 1] for t in tensors)) for i in range(3)]
    assert torch.equal(ck.attention(*tensors), torch.cat(alone))


def test_nan_stays_in_its_row():
    q, k, v = make(1, 30, 40, 2, 16)
    q[0, 7, 1, 3] = torch.nan
    out = ck.attention(q, k, v)
    assert out[0, 7, 1].isnan().all()
    assert out.isnan().sum() == 16


@pytest.mark.parametrize(
    ("settings", "dim", "reason"),
    [
        ({"bias": torch.zeros(5, 4)}, 8, "takes no bias on a CPU"),
        ({"dropout_p": 0.1}, 8, "dropout of the probabilities is not supported"),
        ({}, 257, "heads have 257 channels, more than 256"),
    ],
)
def test_refusals(settings, dim, reason):
    tensors = make(2, 5, 4, 1, dim)
    with ck.use_backend("auto"):
        ck.attention(*tensors, **settings)
    assert ck.fallbacks()["attention", "cpu"] == reason
    with pytest.raises(ck.BackendUnavailable, match=reason):
        ck.attention(*tensors, **settings)


def test_operator_checks_what_it_would_read():
    q, k, v = make(2, 5, 4, 1, 8)
    op = machine.load_extension() and torch.ops.cvt_kernels.attention_inference
    for arguments, message in (
        ((q, k[:1], v, 1.0), r"k: got float32 \(1, 4, 1, 8\).*, expected \(batch, tokens, heads, head_dim\)"),
        ((q, k, v[:, :3], 1.0), r"v: got .*, expected \(batch, tokens, heads, head_dim\)"),
        ((q, k, v.half(), 1.0), "v: got float16 .*, expected dtype and device of q"),
        ((q.long(), k.long(), v.long(), 1.0), "q: got int64, expected float64, float32, bfloat16 or float16"),
        ((q, k[:, :0], v[:, :0], 1.0), "k: got .*, expected .* of at least one token"),
    ):
        with pytest.raises(RuntimeError, match=message):
            op(*arguments)


@every_instruction_set
def test_other_instruction_sets(name):
    sizes = {"queries": 31, "keys": 300, "heads": 3, "channels": 20}
    assert_agrees_on(name, "attention", sizes)
