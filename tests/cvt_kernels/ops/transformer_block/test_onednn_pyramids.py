"""Blocks of SegFormer and PVT by oneDNN: a product for layers of the same tokens, packed once."""

import gc

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from cvt_kernels.ops import packed_linear, packing
from tests.cvt_kernels.ops.transformer_block.test_pyramids import BACKENDS, make


@pytest.fixture(autouse=True)
def _requested():
    with torch.no_grad(), ck.use_backend(*BACKENDS["onednn"]):
        yield


@pytest.mark.parametrize(
    ("ratio", "convolves", "packs"), [(2, True, 6), (0, True, 4), (0, False, 4)], ids=str
)
def test_weights_are_packed_once(monkeypatch, ratio, convolves, packs):
    made = []
    pack = packed_linear._pack
    monkeypatch.setattr(packed_linear, "_pack", lambda *args: made.append(args) or pack(*args))
    arguments = make(ratio=ratio, convolves=convolves, approximate="quick")
    for _ in range(3):
        ck.transformer_block(*arguments)
    assert len(made) == packs
    assert any(len(weights) == (2 if ratio else 3) for weights, *_ in made)
    made.clear()
    del arguments
    gc.collect()
    assert not packing._known


def weights_and_biases(block):
    return [t for part in (*block.linears, block.proj, block.fc1, block.fc2, block.reduce) for t in part[:2]]


@pytest.mark.parametrize("number", range(14))
def test_a_changed_tensor_is_packed_anew(number):
    x, grid, block = make(convolves=number % 2 == 0, approximate="quick")
    before = ck.transformer_block(x, grid, block)
    weights_and_biases(block)[number].mul_(2)
    out = ck.transformer_block(x, grid, block)
    # Constants added to all scores of a query change no probability.
    assert number == 3 or (out - before).abs().max() > 1e-3
    torch.testing.assert_close(out, reference.transformer_block(x, grid, block))


def test_some_layers_without_a_bias():
    x, grid, block = make()
    q, k, v = block.linears
    block = block._replace(linears=(q, k._replace(bias=None), v))
    torch.testing.assert_close(
        ck.transformer_block(x, grid, block), reference.transformer_block(x, grid, block)
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (lambda: make(dtype=torch.float64), "has no products of float64"),
        (lambda: make(batch=0), "serves no empty batch"),
    ],
    ids=["float64", "empty"],
)
def test_what_it_refuses(arguments, reason):
    with ck.use_backend("onednn"), pytest.raises(ck.BackendUnavailable, match=reason):
        ck.transformer_block(*arguments())


def test_weights_of_inference_mode_are_refused():
    with torch.inference_mode():
        arguments = make()
    with ck.use_backend("onednn"), pytest.raises(ck.BackendUnavailable, match="no weights of inference mode"):
        ck.transformer_block(*arguments)
