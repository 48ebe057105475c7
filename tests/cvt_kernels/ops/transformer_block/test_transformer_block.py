"""transformer_block on a CPU: every backend against float64, what it accepts and what it refuses."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import backends, dispatch, proofs, reference
from cvt_kernels.ops import packing
from tests.checks import assert_accurate
from tests.cvt_kernels.test_reference import random_conv

#: The backends under test, each with those that serve its parts.
BACKENDS = {
    "reference": ("reference",),
    "composed": ("composed", "native"),
    "onednn": ("onednn", "native"),
    "native": ("native",),
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
GRID = (4, 5)


def make(
    batch=2, grid=GRID, channels=24, heads=3, class_tokens=0, *, bias=True, approximate="none",
    dtype=torch.float32, strides=(1, 2, 2), width=None, scale=None,
):  # fmt: skip
    """Returns the arguments of a call; the block attends in ``width`` channels."""
    width = width or channels

    def linear(outputs, inputs):
        weight = torch.randn(outputs, inputs) * inputs**-0.5
        return ck.Linear(weight.to(dtype), torch.randn(outputs).to(dtype) if bias else None)

    def norm():
        weight, shift = (1 + torch.randn(channels) / 4).to(dtype), torch.randn(channels).to(dtype)
        return ck.Norm(weight, shift, 1e-5) if bias else ck.Norm(None, None, 1e-3)

    block = ck.TransformerBlock(
        norm1=norm(),
        reduce=tuple(random_conv(channels, dtype=dtype, stride=stride, padding=1) for stride in strides),
        linears=tuple(linear(width, channels) for _ in range(3)),
        num_heads=heads,
        scale=scale,
        proj=linear(channels, width),
        norm2=norm(),
        fc1=linear(3 * channels, channels),
        approximate=approximate,
        fc2=linear(channels, 3 * channels),
    )
    x = torch.randn(batch, class_tokens + grid[0] * grid[1], channels).to(dtype)
    return x, grid, block


def in_float64(arguments):
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments)


def check(backend, arguments, among=BACKENDS, **assertions):
    """Compares a call, a second one like it, and one in place, with the reference and with float64."""
    x, grid, block = arguments
    same, exact = reference.transformer_block(*arguments), reference.transformer_block(*in_float64(arguments))
    given = x.clone()
    with torch.no_grad(), ck.use_backend(*among[backend]):
        out = ck.transformer_block(*arguments)
        assert torch.equal(ck.transformer_block(*arguments), out)
        assert torch.equal(x, given)
        if x.is_contiguous():
            assert out.is_contiguous()
            for _ in range(2):
                stream = x.clone()
                assert ck.transformer_block(stream, grid, block, inplace=True) is stream
                assert torch.equal(stream, out)
    # The sums of oneDNN's products are in another order than those of MKL, with their own luck.
    assert_accurate(out, same, exact, **({"floor": 4.0} | assertions))


@every_backend
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("class_tokens", [0, 1])
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
def test_values(backend, approximate, class_tokens, bias):
    check(backend, make(class_tokens=class_tokens, bias=bias, approximate=approximate))


@every_backend
@pytest.mark.parametrize("approximate", ["none", "quick"])
def test_bfloat16(backend, approximate):
    check(backend, make(dtype=torch.bfloat16, class_tokens=1, channels=48, approximate=approximate))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_other_dtypes(backend, dtype):
    check(backend, make(dtype=dtype, class_tokens=1), floor=1000 if dtype == torch.float64 else 4)


@every_backend
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "grid": (1, 1)},
        {"batch": 1, "grid": (1, 1), "class_tokens": 1, "channels": 5, "heads": 1},
        {"batch": 3, "grid": (7, 1), "channels": 21, "heads": 7},
        {"grid": (3, 3), "strides": (1, 1, 1), "scale": 0.1},
        {"grid": (3, 8), "strides": (1, 3, 3), "channels": 20, "width": 36, "heads": 2},
    ],
    ids=str,
)
def test_odd_sizes(backend, sizes):
    check(backend, make(**sizes))


@every_backend
def test_strided_tokens(backend):
    x, grid, block = make(class_tokens=1)
    check(backend, (x.transpose(1, 2).contiguous().transpose(1, 2), grid, block))


@every_backend
def test_batch_norm_of_float32_beside_half_precision(backend):
    x, grid, block = make(dtype=torch.bfloat16)
    convs = [
        conv._replace(**{name: getattr(conv, name).float() for name in conv._fields[1:5]})
        for conv in block.convs
    ]
    check(backend, (x, grid, block._replace(reduce=tuple(convs))))


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_gradients(backend):  # of a composition, by PyTorch's own operators
    x, grid, block = make(batch=1, grid=(2, 2), channels=4, heads=2, class_tokens=1, dtype=torch.float64)
    leaves = [x, block.linears[1].weight, block.fc1.bias, block.fc2.weight, block.norm2.weight]
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
    arguments = make()
    with torch.no_grad():
        ck.transformer_block(*arguments)
    assert dispatch.chosen_backends("transformer_block", "cpu") == {}
    assert "CVT_KERNELS_PROVE=0" in backends.fallbacks()["transformer_block", "onednn"]


def test_an_empty_batch():
    x, grid, block = make()
    with torch.no_grad():
        assert ck.transformer_block(x[:0], grid, block).shape == (0, *x.shape[1:])


def test_under_autocast():
    x, grid, block = make()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out, expected = ck.transformer_block(x, grid, block), reference.transformer_block(x, grid, block)
        with pytest.raises(ck.BackendUnavailable, match="does not follow autocast"), ck.use_backend("onednn"):
            ck.transformer_block(x, grid, block)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, atol=0.1, rtol=0.1)


# Proofs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_every_backend_passes_its_proof(inplace):
    x, grid, block = make(class_tokens=1)
    given, before = x.clone(), set(packing._known)
    with torch.no_grad(), proofs.undisturbed(x.device):
        proof = dispatch.proof_of("transformer_block", x, grid, block, inplace=inplace)
        standard = proofs.Standard.of(proof.reference, proof.sample)
        trials = {name: proofs.check(function, standard) for name, function in proof.candidates.items()}
        timed = proofs.time_in_turns(proof.candidates, proof.timed, trials)
    assert set(trials) == set(BACKENDS)
    assert {name: trial.flaw for name, trial in timed.items()} == dict.fromkeys(BACKENDS)
    assert torch.equal(x, given)
    assert set(packing._known) <= before  # timed runs pack copies of the tensors, which are gone


def test_kinds_of_calls():
    kinds = {
        "plain": make(),
        "batch": make(batch=4),
        "hidden": make(channels=48, heads=3),
        "heads": make(heads=2),
        "class token": make(class_tokens=1),
        "quick": make(approximate="quick"),
        "strides": make(strides=(1, 1, 1)),
        "bfloat16": make(dtype=torch.bfloat16),
        "width": make(width=48),
    }
    questions = {
        (name, inplace): dispatch.question("transformer_block", *arguments, inplace=inplace)
        for (name, arguments), inplace in itertools.product(kinds.items(), (False, True))
    }
    assert len(set(questions.values())) == 2 * len(kinds)
    assert questions["plain", True] == (
        "transformer_block, forward, float32, exact, 1+ images, 24 channels, kernel/stride/padding/dilation "
        "3x3/1/1/1 3x3/2/1/1 3x3/2/1/1, 16+ pixels, 3 heads of 8, 72 hidden, in place"
    )


# Calls that are like an earlier one -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["composed", "onednn"])
@pytest.mark.parametrize(
    "change",
    [
        lambda block: block._replace(approximate="quick"),
        lambda block: block._replace(num_heads=1),
        lambda block: block._replace(scale=2.0),
        lambda block: block._replace(norm1=block.norm1._replace(eps=1.0)),
        lambda block: block._replace(norm2=block.norm2._replace(eps=1.0)),
        lambda block: block._replace(reduce=(*block.convs[:2], block.convs[2]._replace(eps=1.0))),
        lambda block: block._replace(proj=ck.Linear(block.proj.weight, None)),
        lambda block: block._replace(fc1=ck.Linear(block.fc1.weight[:24]), fc2=ck.Linear(block.proj.weight)),
    ],
    ids=["GELU", "heads", "scale", "norm1", "norm2", "BatchNorm", "bias", "hidden"],
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


def with_linear(field, **changes):
    def change(x, grid, block):
        return x, grid, block._replace(**{field: getattr(block, field)._replace(**changes)})

    return change


def with_first(field, **changes):
    def change(x, grid, block):
        parts = getattr(block, field)
        return x, grid, block._replace(**{field: (parts[0]._replace(**changes), *parts[1:])})

    return change


def with_block(**changes):
    return lambda x, grid, block: (x, grid, block._replace(**changes))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, grid, block: (x, grid, tuple(block)), TypeError,
         "block: got tuple, expected TransformerBlock"),
        (lambda x, grid, block: (3.0, grid, block), TypeError, "x: got float, expected a tensor"),
        (lambda x, grid, block: (x[0], grid, block), ValueError, "x: got shape"),
        (lambda x, grid, block: (x.int(), grid, block), TypeError, "x: got dtype int32"),
        (lambda x, grid, block: (x, (4, 6), block), ValueError, "grid: got 4×6 for 20 tokens"),
        (lambda x, grid, block: (x, [4, 5], block), TypeError, r"grid: got \[4, 5\], expected a tuple"),
        (with_block(reduce=[]), TypeError, "block.reduce: got list, expected a tuple"),
        (with_block(reduce=()), ValueError, "block.reduce: got 0, expected those of Q, of K and of V"),
        (with_block(linears=(1, 2)), ValueError, "block.linears: got 2, expected those of Q"),
        (with_block(linears=(1, 2, 3)), TypeError, r"block.linears\[0\]: got int, expected Linear"),
        (with_block(reduce=(None,) * 3), TypeError, r"block.reduce\[0\]: got NoneType, expected Conv"),
        (with_block(proj=None), TypeError, "block.proj: got NoneType, expected Linear"),
        (with_block(fc1=torch.ones(3)), TypeError, "block.fc1: got Tensor, expected Linear"),
        (with_block(norm2=1e-5), TypeError, "block.norm2: got float, expected Norm"),
        (with_block(approximate="fast"), ValueError, "approximate: got 'fast'"),
        (with_block(num_heads=5), ValueError, "block.num_heads: got 5, expected a divisor of 24 channels"),
        (with_block(num_heads=0), ValueError, "block.num_heads: got 0"),
        (with_block(num_heads=3.0), TypeError, "block.num_heads: got 3.0"),
        (with_block(scale=float("inf")), ValueError, "block.scale: got inf, expected a finite number"),
        (with_first("reduce", stride=2), ValueError, r"block.reduce\[0\]: makes 2×3 of the 4×5 grid"),
        (with_first("reduce", running_mean=None, running_var=None), ValueError,
         r"block.reduce\[0\].running_mean: got None, expected running statistics"),
        (with_first("reduce", weight=torch.ones(24, 1, 3)), ValueError, r"convs\[0\].weight: got shape"),
        (lambda x, grid, block: (x, grid, block._replace(reduce=(block.convs[0], *block.convs[:2]))),
         ValueError, "block.reduce: got 4×5 keys and 2×3 values, expected as many"),
        (with_first("linears", weight=torch.ones(24, 5)), ValueError,
         r"block.linears\[0\].weight: got shape \(24, 5\), expected \(24, 24\)"),
        (with_first("linears", weight=torch.ones(30, 24), bias=None), ValueError,
         "block.linears: got 30, 24 and 24 channels of Q, K and V, expected as many"),
        (with_first("linears", bias=torch.ones(5)), ValueError, r"block.linears\[0\].bias: got shape \(5,\)"),
        (with_linear("norm1", weight=torch.ones(5)), ValueError, r"block.norm1.weight: got shape \(5,\)"),
        (with_linear("norm2", bias=torch.ones(24).half()), TypeError, "block.norm2.bias: has dtype float16"),
        (with_linear("norm2", eps=0.0), ValueError, "block.norm2.eps: got 0.0, expected a positive number"),
        (with_linear("proj", weight=torch.ones(24, 23)), ValueError, r"block.proj.weight: got shape"),
        (with_linear("fc1", weight=None), TypeError, "block.fc1.weight: got NoneType, expected a tensor"),
        (with_linear("fc1", weight=torch.ones(24)), ValueError, "block.fc1.weight: got shape"),
        (with_linear("fc2", weight=torch.ones(24, 24)), ValueError,
         r"block.fc2.weight: got shape \(24, 24\), expected \(24, 72\)"),
        (with_linear("fc2", weight=torch.ones(24, 72).double()), TypeError,
         "block.fc2.weight: has dtype float64, expected float32 as x"),
        (with_linear("fc2", bias=torch.ones(24).to("meta")), ValueError, "block.fc2.bias: is on meta"),
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
    with pytest.raises(ValueError, match="inplace: got True where a gradient is wanted, expected False"):
        ck.transformer_block(x, grid, block, inplace=True)
