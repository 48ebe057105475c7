"""The public function: what it accepts and what it refuses."""

import pytest
import torch
from checks import record_calls

import cvt_kernels as ck


def make(tokens, **changes):
    settings = {"batch": 2, "heads": 3, "dim": 8, "dtype": torch.float32, "device": "cpu"} | changes
    return torch.randn(
        settings["batch"], tokens, settings["heads"], settings["dim"],
        dtype=settings["dtype"], device=settings["device"],
    )  # fmt: skip


def test_a_backend_gets_the_arguments_as_they_are():
    calls = record_calls("attention")
    q, k, v, bias = make(9), make(4), make(4), torch.randn(3, 9, 4)
    out = ck.attention(q, k, v, scale=0.2, bias=bias, dropout_p=0.0)
    assert calls == [((q, k, v), {"scale": 0.2, "bias": bias, "dropout_p": 0.0})]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.2 + bias
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))


def test_slices_of_one_wider_tensor():
    qkv = torch.randn(2, 5, 3, 3, 8)
    q, k, v = qkv.unbind(2)
    torch.testing.assert_close(
        ck.attention(q, k, v), ck.attention(q.contiguous(), k.contiguous(), v.contiguous())
    )


def test_dropout_is_passed_on():
    q, k, v = make(9), make(4), make(4)
    torch.manual_seed(1)
    out = ck.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(out, ck.reference.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(out, ck.attention(q, k, v))


def test_autocast_mixes_dtypes():
    with torch.autocast("cpu", torch.bfloat16):
        assert ck.attention(make(9), make(4, dtype=torch.bfloat16), make(4)).dtype == torch.bfloat16


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
