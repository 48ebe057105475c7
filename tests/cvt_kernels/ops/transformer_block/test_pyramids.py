"""Blocks of SegFormer and PVT on a CPU: every backend against float64, what is accepted and what refused."""

import functools
import itertools

import pytest
import torch
from torch.autograd import gradcheck

import cvt_kernels as ck
from cvt_kernels import backends, dispatch, proofs, reference
from cvt_kernels.ops import packing
from cvt_kernels.records import DepthwiseConv, Reduction, TransformerBlock
from tests.cvt_kernels.ops.transformer_block import test_transformer_block
from tests.cvt_kernels.ops.transformer_block.test_quantized import decibels, with_quantized
from tests.cvt_kernels.ops.transformer_block.test_transformer_block import in_float64
from tests.cvt_kernels.test_reference import random_conv

#: The backends under test, each with those that serve its parts.
BACKENDS = {
    "reference": ("reference",),
    "composed": ("composed", "native", "reference"),
    "onednn": ("onednn", "native", "reference"),
    "native": ("native",),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
GRID = (6, 5)


def make(
    batch=2, grid=GRID, channels=24, *, heads=3, hidden=None, ratio=2, convolves=True, bias=True,
    approximate="none", dtype=torch.float32, width=None, scale=None,
):  # fmt: skip
    """Returns the arguments of a call; ``ratio`` 0 is no reduction, ``width`` the channels of all heads."""
    hidden, width = hidden or 3 * channels, width or channels

    def randn(*shape, scale=1.0):
        return (torch.randn(shape) * scale).to(dtype)

    def linear(outputs, inputs):
        return ck.Linear(randn(outputs, inputs, scale=inputs**-0.5), randn(outputs) if bias else None)

    def norm():
        return (
            ck.Norm(1 + randn(channels, scale=0.25), randn(channels), 1e-5)
            if bias
            else ck.Norm(None, None, 1e-3)
        )

    def reduction():
        weight = randn(channels, channels, ratio, ratio, scale=channels**-0.5 / ratio)
        return Reduction(weight, randn(channels) if bias else None, norm())

    block = TransformerBlock(
        norm1=norm(),
        linears=(linear(width, channels), linear(width, channels), linear(width, channels)),
        reduce=reduction() if ratio else None,
        num_heads=heads,
        scale=scale,
        proj=linear(channels, width),
        norm2=norm(),
        fc1=linear(hidden, channels),
        mix=DepthwiseConv(randn(hidden, 1, 3, 3, scale=1 / 3), randn(hidden) if bias else None)
        if convolves
        else None,
        approximate=approximate,
        fc2=linear(channels, hidden),
    )
    return randn(batch, grid[0] * grid[1], channels), grid, block


check = functools.partial(test_transformer_block.check, among=BACKENDS)


@every_backend
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("convolves", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
def test_values(backend, approximate, convolves, bias):
    check(backend, make(convolves=convolves, bias=bias, approximate=approximate))


@every_backend
@pytest.mark.parametrize(
    ("grid", "ratio"),
    [((6, 5), 0), ((4, 4), 1), ((7, 5), 2), ((11, 7), 3), ((17, 25), 8), ((8, 8), 8)],
    ids=str,
)
def test_ratios(backend, grid, ratio):
    check(backend, make(grid=grid, ratio=ratio))


@every_backend
@pytest.mark.parametrize("convolves", [True, False])
def test_bfloat16(backend, convolves):
    check(backend, make(dtype=torch.bfloat16, channels=48, convolves=convolves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["reference", "composed", "native"])
def test_other_dtypes(backend, dtype):
    if backend == "native" and dtype == torch.float64:
        return
    check(backend, make(dtype=dtype), floor=1000 if dtype == torch.float64 else 4)


@every_backend
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "grid": (1, 1), "ratio": 0},
        {"batch": 1, "grid": (1, 1), "channels": 5, "heads": 1, "ratio": 1},
        {"batch": 3, "grid": (7, 1), "channels": 21, "heads": 7, "ratio": 1},
        {"grid": (3, 130), "channels": 17, "heads": 1, "hidden": 33, "ratio": 3, "scale": 0.1},
        {"grid": (31, 8), "channels": 20, "width": 36, "heads": 2, "hidden": 530},
        {"grid": (1, 30), "ratio": 0, "convolves": False, "channels": 6, "hidden": 7},
    ],
    ids=str,
)
def test_odd_sizes(backend, sizes):
    check(backend, make(**sizes))


@every_backend
def test_any_number_of_tokens_where_nothing_needs_their_places(backend):
    x, _, block = make(ratio=0, convolves=False)
    check(backend, (x[:, :29].contiguous(), (1, 1), block))


@every_backend
def test_strided_tokens(backend):
    x, grid, block = make()
    check(backend, (x.transpose(1, 2).contiguous().transpose(1, 2), grid, block))


@pytest.mark.parametrize("backend", ["reference", "composed", "onednn"])
@pytest.mark.parametrize("inplace", [False, True])
def test_some_tokens(backend, inplace):
    x, _, block = make(ratio=0, convolves=False)
    rows = torch.tensor([[0, 3, 29], [1, 2, -1]])
    with torch.no_grad():
        whole = reference.transformer_block(x, (1, 1), block)
        expected = reference.scatter_rows(x, rows, reference.gather_rows(whole, rows))
        with ck.use_backend(*BACKENDS[backend]):
            stream = x.clone()
            out = ck.transformer_block(stream, (1, 1), block, rows=rows, inplace=inplace)
    assert (out is stream) == inplace
    torch.testing.assert_close(out, expected)
    with ck.use_backend("native"), pytest.raises(ck.BackendUnavailable, match="computes some tokens"):
        ck.transformer_block(x, (1, 1), block, rows=rows)


@pytest.mark.parametrize("backend", ["reference", "composed", "onednn"])
def test_convolutional_projections_and_a_convolution_in_the_mlp(backend):
    x, grid, block = make()
    convs = tuple(random_conv(24, dtype=torch.float32, stride=stride, padding=1) for stride in (1, 2, 2))
    block = block._replace(reduce=convs)
    check(backend, (x, grid, block))
    with (
        ck.use_backend("native"),
        pytest.raises(ck.BackendUnavailable, match="has no convolution in the"),
    ):
        ck.transformer_block(x, grid, block)


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("convolves", [True, False])
def test_quantized_layers(backend, convolves):
    x, grid, block = make(convolves=convolves)
    layers = range(6)
    expected = reference.transformer_block(*in_float64((x, grid, block)))
    _, _, quantized = with_quantized((x, grid, block), layers)
    with torch.no_grad():
        with ck.use_backend(*BACKENDS[backend]):
            assert decibels(expected, ck.transformer_block(x, grid, quantized)) > 30
        for name, reason in (
            ("native", "with convolutional projections"),
            ("onednn", "no quantized"),
        ):
            with ck.use_backend(name), pytest.raises(ck.BackendUnavailable, match=reason):
                ck.transformer_block(x, grid, quantized)


def test_what_needs_all_tokens_or_convolutional_projections():
    x, grid, block = make()
    rows = torch.tensor([[0], [1]])
    with torch.no_grad():
        with pytest.raises(ValueError, match="rows: got some tokens of a block with a convolution"):
            ck.transformer_block(x, grid, block, rows=rows)
        with pytest.raises(ValueError, match="scores: got 'avg' without convolutional projections"):
            ck.transformer_block(x, grid, block, scores="avg")


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_gradients(backend, ratio):  # of a composition, by PyTorch's own operators
    x, grid, block = make(1, (2, 3), 4, heads=2, ratio=ratio, dtype=torch.float64)
    leaves = [x, block.linears[1].weight, block.fc1.bias, block.fc2.weight, block.mix.weight]
    leaves += [] if ratio == 0 else [block.reduce.weight, block.reduce.norm.bias]
    for leaf in leaves:
        leaf.requires_grad_()
    with ck.use_backend(backend, "reference"):
        assert gradcheck(lambda *_: ck.transformer_block(x, grid, block), leaves, fast_mode=True)


def test_compiled():
    torch.compiler.reset()
    x, grid, block = make()
    with torch.no_grad():
        compiled = torch.compile(ck.transformer_block, fullgraph=True, backend="aot_eager", dynamic=False)
        torch.testing.assert_close(compiled(x, grid, block), reference.transformer_block(x, grid, block))


def test_without_a_verdict_it_is_composed():
    with torch.no_grad():
        ck.transformer_block(*make())
    assert dispatch.chosen_backends("transformer_block", "cpu") == {}
    assert "CVT_KERNELS_PROVE=0" in backends.fallbacks()["transformer_block", "onednn"]


@pytest.mark.parametrize("backend", ["reference", "composed", "native"])
@pytest.mark.parametrize("inplace", [False, True])
def test_an_empty_batch(backend, inplace):
    x, grid, block = make()
    with torch.no_grad(), ck.use_backend(*BACKENDS[backend]):
        out = ck.transformer_block(x[:0], grid, block, inplace=inplace)
    assert out.shape == (0, *x.shape[1:])


@every_backend
def test_views_of_one_weight_are_told_apart(backend):
    x, grid, block = make(grid=(8, 8), ratio=4)
    weight = block.reduce.weight
    for ratio in (4, 2, 4):
        reduction = block.reduce._replace(weight=weight[:, :, :ratio, :ratio])
        check(backend, (x, grid, block._replace(reduce=reduction)))


# Proofs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_every_backend_passes_its_proof(inplace):
    x, grid, block = make()
    given, before = x.clone(), set(packing._known)
    with torch.no_grad(), proofs.undisturbed(x.device):
        proof = dispatch.proof_of("transformer_block", x, grid, block, inplace=inplace)
        standard = proofs.Standard.of(proof.reference, proof.sample)
        trials = {name: proofs.check(function, standard) for name, function in proof.candidates.items()}
    assert {name: trial.flaw for name, trial in trials.items()} == dict.fromkeys(BACKENDS)
    assert torch.equal(x, given)
    assert set(packing._known) <= before  # trials pack copies of the tensors, which are gone


def test_kinds_of_calls():
    kinds = {
        "plain": make(),
        "batch": make(batch=4),
        "hidden": make(hidden=48),
        "heads": make(heads=2),
        "ratio": make(ratio=3),
        "ratio of 1": make(ratio=1),
        "no reduction": make(ratio=0),
        "no convolution": make(convolves=False),
        "quick": make(approximate="quick"),
        "bfloat16": make(dtype=torch.bfloat16),
        "width": make(width=48),
    }
    questions = {
        (name, inplace): dispatch.question("transformer_block", *arguments, inplace=inplace)
        for (name, arguments), inplace in itertools.product(kinds.items(), (False, True))
    }
    assert len(set(questions.values())) == 2 * len(kinds)
    assert questions["plain", True] == (
        "transformer_block, forward, float32, exact, 1+ images, 24 channels, 16+ tokens, keys of 2x2 tokens, "
        "3 heads of 8, 72 hidden, with a convolution, in place"
    )


# Calls that are like an earlier one -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["composed", "onednn", "native"])
@pytest.mark.parametrize(
    "change",
    [
        lambda block: block._replace(approximate="quick"),
        lambda block: block._replace(num_heads=1),
        lambda block: block._replace(scale=2.0),
        lambda block: block._replace(norm1=block.norm1._replace(eps=1.0)),
        lambda block: block._replace(norm2=block.norm2._replace(eps=1.0)),
        lambda block: block._replace(reduce=block.reduce._replace(norm=block.reduce.norm._replace(eps=1.0))),
        lambda block: block._replace(reduce=None),
        lambda block: block._replace(mix=None),
        lambda block: block._replace(proj=ck.Linear(block.proj.weight, None)),
        lambda block: block._replace(linears=(block.linears[0], *block.linears[:2])),
    ],
    ids=[
        "GELU",
        "heads",
        "scale",
        "norm1",
        "norm2",
        "norm of keys",
        "reduction",
        "convolution",
        "bias",
        "layers",
    ],
)
def test_another_setting_is_another_call(change, backend):
    x, grid, block = make()
    with torch.no_grad(), ck.use_backend(*BACKENDS[backend]):
        before = [ck.transformer_block(x, grid, block) for _ in range(2)][1]
        other = change(block)
        out = ck.transformer_block(x, grid, other)
    assert (out - before).abs().max() > 1e-2
    torch.testing.assert_close(out, reference.transformer_block(x, grid, other))


@every_backend
def test_wrong_arguments_after_a_right_call(backend):
    x, grid, block = make()
    with torch.no_grad(), ck.use_backend(*BACKENDS[backend]):
        ck.transformer_block(x, grid, block)
        with pytest.raises(ValueError, match=r"block.fc2.bias: got shape \(3,\)"):
            ck.transformer_block(x, grid, block._replace(fc2=block.fc2._replace(bias=torch.ones(3))))


# Wrong arguments ------------------------------------------------------------------------------------------


def with_block(**changes):
    return lambda x, grid, block: (x, grid, block._replace(**changes))


def with_part(field, **changes):
    return lambda x, grid, block: (
        x,
        grid,
        block._replace(**{field: getattr(block, field)._replace(**changes)}),
    )


def with_query(**changes):
    def change(x, grid, block):
        return x, grid, block._replace(linears=(block.linears[0]._replace(**changes), *block.linears[1:]))

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, grid, block: (x, grid, tuple(block)), TypeError,
         "block: got tuple, expected TransformerBlock"),
        (lambda x, grid, block: (3.0, grid, block), TypeError, "x: got float, expected a tensor"),
        (lambda x, grid, block: (x[0], grid, block), ValueError, "x: got shape"),
        (lambda x, grid, block: (x.int(), grid, block), TypeError, "x: got dtype int32"),
        (lambda x, grid, block: (x, (6, 6), block), ValueError, "grid: got 6×6 for 30 tokens"),
        (lambda x, grid, block: (x, [6, 5], block), TypeError, r"grid: got \[6, 5\], expected a tuple"),
        (with_block(linears=[]), TypeError, "block.linears: got list, expected a tuple"),
        (with_block(linears=()), ValueError, "block.linears: got 0, expected those of Q, of K and of V"),
        (with_block(linears=(1, 2, 3)), TypeError, r"block.linears\[0\]: got int, expected Linear"),
        (with_block(reduce=3), TypeError, "block.reduce: got int, expected a tuple, a Reduction or None"),
        (with_part("reduce", norm=None), TypeError, "block.reduce.norm: got NoneType, expected Norm"),
        (with_part("reduce", weight=torch.ones(24, 24)), ValueError, "block.reduce.weight: got shape"),
        (with_part("reduce", weight=torch.ones(24, 24, 2, 3)), ValueError,
         "block.reduce.weight: got shape"),
        (with_part("reduce", weight=torch.ones(24, 24, 6, 6)), ValueError,
         "block.reduce.weight: got a kernel of 6×6 for a grid of 6×5, expected at most its sizes"),
        (with_part("reduce", bias=torch.ones(5)), ValueError, r"block.reduce.bias: got shape \(5,\)"),
        (with_part("reduce", norm=ck.Norm(torch.ones(3), None)), ValueError,
         "block.reduce.norm.weight: got shape"),
        (with_block(mix=torch.ones(3)), TypeError, "block.mix: got Tensor, expected DepthwiseConv"),
        (with_part("mix", weight=torch.ones(24, 1, 3, 3)), ValueError, "block.mix.weight: got shape"),
        (with_part("mix", bias=torch.ones(24)), ValueError, "block.mix.bias: got shape"),
        (with_block(proj=None), TypeError, "block.proj: got NoneType, expected Linear"),
        (with_block(norm2=1e-5), TypeError, "block.norm2: got float, expected Norm"),
        (with_block(approximate="fast"), ValueError, "approximate: got 'fast'"),
        (with_block(num_heads=5), ValueError, "block.num_heads: got 5, expected a divisor of 24 channels"),
        (with_block(num_heads=3.0), TypeError, "block.num_heads: got 3.0"),
        (with_block(scale=float("inf")), ValueError, "block.scale: got inf, expected a finite number"),
        (with_query(weight=torch.ones(24, 5)), ValueError, r"block.linears\[0\].weight: got shape \(24, 5\)"),
        (with_query(bias=torch.ones(5)), ValueError, r"block.linears\[0\].bias: got shape \(5,\)"),
        (with_part("norm1", weight=torch.ones(5)), ValueError, r"block.norm1.weight: got shape \(5,\)"),
        (with_part("norm2", bias=torch.ones(24).half()), TypeError, "block.norm2.bias: has dtype float16"),
        (with_part("norm2", eps=0.0), ValueError, "block.norm2.eps: got 0.0, expected a positive number"),
        (with_part("proj", weight=torch.ones(24, 23)), ValueError, r"block.proj.weight: got shape"),
        (with_part("fc1", weight=None), TypeError, "block.fc1.weight: got NoneType, expected a tensor"),
        (with_part("fc2", weight=torch.ones(24, 24)), ValueError, r"block.fc2.weight: got shape \(24, 24\)"),
        (with_part("fc2", bias=torch.ones(24).to("meta")), ValueError, "block.fc2.bias: is on meta"),
    ],
)  # fmt: skip
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message), torch.no_grad():
        ck.transformer_block(*change(*make()))


def test_bad_calls_in_place():
    x, grid, block = make()
    with torch.no_grad(), pytest.raises(ValueError, match="x: is not contiguous"):
        ck.transformer_block(x.transpose(1, 2).contiguous().transpose(1, 2), grid, block, inplace=True)
    block.fc1.weight.requires_grad_()
    with pytest.raises(ValueError, match="inplace: got True where a gradient is wanted"):
        ck.transformer_block(x, grid, block, inplace=True)
