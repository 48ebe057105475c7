"""transformer_block with quantized layers: any of the six, with a scale per row or one for all rows."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import dispatch, proofs, reference
from tests.checks import assert_accurate, every_instruction_set, not_built, run_on_instruction_set
from tests.cvt_kernels.ops.transformer_block.test_transformer_block import BACKENDS, in_float64, make

ALL = range(6)
SERVING = ("reference", "composed", "native") if not not_built() else ("reference", "composed")
every_backend = pytest.mark.parametrize("backend", SERVING)
needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def quantized(layer, scale=None, dtype=torch.int8):
    values, scales = reference.quantize_rows(layer.weight, dtype=dtype)
    return ck.QuantizedLinear(
        values, scales.flatten(), layer.bias, None if scale is None else torch.tensor(scale)
    )


def with_quantized(arguments, which=ALL, scale=None, dtype=torch.int8):
    """Returns the arguments of a call with some of the six layers quantized."""
    x, grid, block = arguments
    layers = [
        quantized(layer, scale, dtype) if i in which else layer for i, layer in enumerate(block.layers())
    ]
    linears, (proj, fc1, fc2) = tuple(layers[:3]), layers[3:]
    return x, grid, block._replace(linears=linears, proj=proj, fc1=fc1, fc2=fc2)


def decibels(expected, actual):
    """Returns the ratio of a signal to the noise in another version of it."""
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise))


def check(backend, arguments, least=55.0, worst=25.0):
    """Compares a call with the reference, which may round a few numbers to the integer on the other side."""
    x, grid, block = arguments
    same, exact = reference.transformer_block(*arguments), reference.transformer_block(*in_float64(arguments))
    given = x.clone()
    with ck.use_backend(*BACKENDS[backend]):
        out = ck.transformer_block(*arguments)
        assert torch.equal(ck.transformer_block(*arguments), out)
        assert torch.equal(x, given)
        stream = x.clone()
        assert ck.transformer_block(stream, grid, block, inplace=True) is stream
    assert torch.equal(stream, out)
    assert decibels(same - x, out - x) > least
    assert decibels(exact - x, out - x) > worst
    assert_accurate(out, same, exact, floor=4)


# Values ---------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
def test_values(backend, approximate, scale):
    check(backend, with_quantized(make(class_tokens=1, approximate=approximate), scale=scale), worst=10)


@every_backend
@pytest.mark.parametrize(
    ("which", "scale"), [((0,), None), ((1, 2, 3), 0.05), ((4,), None), ((5,), None), ((3, 4), None)], ids=str
)
def test_layers_of_both_kinds(backend, which, scale):
    check(backend, with_quantized(make(channels=48, class_tokens=1), which, scale), worst=10)


@every_backend
def test_scales_of_both_kinds(backend):
    x, grid, block = with_quantized(make(), range(5))
    check(backend, (x, grid, block._replace(fc2=quantized(block.fc2, 0.02))), worst=10)


@every_backend
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "grid": (1, 1), "class_tokens": 1, "channels": 5, "heads": 1, "bias": False},
        {"batch": 3, "grid": (7, 1), "channels": 21, "heads": 7},
        {"grid": (3, 8), "strides": (1, 3, 3), "channels": 20, "width": 36, "heads": 2},
        {
            "batch": 1,
            "grid": (12, 11),
            "channels": 70,
            "heads": 2,
            "class_tokens": 1,
        },  # hidden rows in groups
    ],
    ids=str,
)
def test_odd_sizes(backend, sizes):
    check(backend, with_quantized(make(**sizes)))


INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
from tests.cvt_kernels.ops.transformer_block.test_quantized import check, decibels, with_quantized
from tests.cvt_kernels.ops.transformer_block.test_transformer_block import make
torch.manual_seed(0)
with torch.no_grad():
    for which, scale in ((range(6), None), ((0, 3, 5), 0.04), ((1, 4), None)):
        arguments = make(grid=(9, 8), channels=80, heads=2, width=144, class_tokens=1)
        x, *rest = arguments = with_quantized(arguments, which, scale)
        check("native", arguments, worst=10)
        with ck.use_backend("native"):
            out = ck.transformer_block(*arguments)
            alone = [ck.transformer_block(image[None], *rest) for image in x]
        assert torch.equal(torch.cat(alone), out)  # cut into other parts
"""


@needs_extension
@every_instruction_set
def test_instruction_sets(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


@needs_extension
def test_threads_change_nothing():
    arguments = with_quantized(make(batch=3, grid=(11, 12), class_tokens=1))
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with ck.use_backend("native"):
                outs.append(ck.transformer_block(*arguments))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)


@every_backend
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_image(backend, bad):
    x, grid, block = with_quantized(make(batch=3, class_tokens=1))
    broken = x.clone()
    broken[1, 3, 0] = bad
    with ck.use_backend(*BACKENDS[backend]):
        out, whole = ck.transformer_block(broken, grid, block), ck.transformer_block(x, grid, block)
    assert torch.equal(out[[0, 2]], whole[[0, 2]])
    assert out[1].isnan().equal(reference.transformer_block(broken, grid, block)[1].isnan())
    assert out[1].isnan().all()  # every query attends to a key that is NaN


@every_backend
def test_zeros(backend):
    x, grid, block = with_quantized(make(bias=False))
    with ck.use_backend(*BACKENDS[backend]):
        out = ck.transformer_block(torch.zeros_like(x), grid, block)
    assert out.isfinite().all()
    assert decibels(reference.transformer_block(torch.zeros_like(x), grid, block), out) > 55


@every_backend
def test_an_empty_batch(backend):
    x, grid, block = with_quantized(make())
    with ck.use_backend(*BACKENDS[backend]):
        assert ck.transformer_block(x[:0], grid, block).shape == (0, *x.shape[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_composed(dtype):
    x, grid, block = with_quantized(make(dtype=dtype, class_tokens=1))
    expected = reference.transformer_block(*in_float64((x, grid, block)))
    with ck.use_backend("composed", "native", "reference"):
        out = ck.transformer_block(x, grid, block)
        stream = x.clone()
        assert ck.transformer_block(stream, grid, block, inplace=True) is stream
    assert out.dtype == dtype
    assert torch.equal(stream, out)
    assert decibels(expected, out) > 25


# Which backends serve -------------------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.bfloat16}, "has quantized layers for float32 only, not for bfloat16"),
        ({"dtype": torch.float16}, "has quantized layers for float32 only, not for float16"),
    ],
    ids=["bfloat16", "float16"],
)
def test_dtypes_that_native_refuses(arguments, message):
    with pytest.raises(ck.BackendUnavailable, match=message), ck.use_backend("native"):
        ck.transformer_block(*with_quantized(make(**arguments), (2,)))


@needs_extension
def test_native_refuses_other_numbers_and_scales():
    with ck.use_backend("native"):
        with pytest.raises(ck.BackendUnavailable, match="has quantized layers of int8 only"):
            ck.transformer_block(*with_quantized(make(), (4,), dtype=torch.float8_e4m3fn))
        for scale in (0.0, -1.0, float("nan")):
            with pytest.raises(ValueError, match=r"input_scale: got .*, expected a positive number"):
                ck.transformer_block(*with_quantized(make(), (4,), scale))


def test_onednn_refuses():
    with pytest.raises(ck.BackendUnavailable, match="has no quantized layers"), ck.use_backend("onednn"):
        ck.transformer_block(*with_quantized(make(), (4,)))


def test_float8_is_composed():
    arguments = with_quantized(make(), dtype=torch.float8_e4m3fn)
    with ck.use_backend("composed", "reference"):
        out = ck.transformer_block(*arguments)
    assert decibels(reference.transformer_block(*arguments), out) > 45


def test_kinds_of_calls():
    kinds = [with_quantized(make(), which, scale) for which, scale in
             (((), None), (ALL, None), (ALL, 1.0), ((5,), None), ((5,), 1.0), ((4,), None))]  # fmt: skip
    questions = [dispatch.question("transformer_block", *each, inplace=False) for each in kinds]
    assert len(set(questions)) == len(kinds)
    assert questions[1] == f"{questions[0]}, int8 in q k v proj fc1 fc2"
    assert questions[4] == f"{questions[0]}, int8 with one scale in fc2"


def test_another_kind_of_layer_is_another_call():
    for which in (ALL, (0,), (), (5,)):
        arguments = with_quantized(make(), which)
        with ck.use_backend("composed", "native", "reference"):
            for _ in range(2):
                out = ck.transformer_block(*arguments)
        assert decibels(reference.transformer_block(*arguments), out) > 55


@needs_extension
@pytest.mark.parametrize("field", ["weight", "weight_scale", "bias", "input_scale"])
@pytest.mark.parametrize("layer", range(6))
def test_changed_layers_are_packed_anew(layer, field):
    x, grid, block = with_quantized(make(), scale=0.05)
    with ck.use_backend("native"):
        before = ck.transformer_block(x, grid, block)
        tensor = getattr(block.layers()[layer], field)
        tensor.copy_(tensor // 2 if field == "weight" else tensor * 3)
        out = ck.transformer_block(x, grid, block)
    expected = reference.transformer_block(x, grid, block)
    assert decibels(expected - x, out - x) > 55
    assert (layer, field) == (1, "bias") or decibels(expected - x, before - x) < 45


def test_compiled():
    torch.compiler.reset()
    arguments = with_quantized(make(), (0, 3, 4))
    compiled = torch.compile(ck.transformer_block, fullgraph=True, backend="aot_eager", dynamic=False)
    assert decibels(reference.transformer_block(*arguments), compiled(*arguments)) > 80
    torch.compiler.reset()


# Proofs ---------------------------------------------------------------------------------------------------


def trials_of(arguments, change=lambda out, x, block: out, inplace=False):
    """Returns the trials of the candidates, and of the composition with a change."""
    proof = dispatch.proof_of("transformer_block", *arguments, inplace=inplace)
    standard = proof.standard()

    def changed(call):
        return change(proof.candidates["composed"](call), call.x, call.block)

    candidates = {**proof.candidates, "changed": changed}
    return {name: proofs.check(function, standard) for name, function in candidates.items()}


@pytest.mark.parametrize(("scale", "inplace"), [(None, False), (0.1, False), (None, True)])
def test_proofs_pass_right_kernels(scale, inplace):
    arguments = with_quantized(make(class_tokens=1), scale=scale)
    with proofs.undisturbed(torch.device("cpu")):
        trials = trials_of(arguments, inplace=inplace)
    assert {name: trial.flaw for name, trial in trials.items()} == dict.fromkeys((*SERVING, "changed"))


def a_token_is_left_out(out, x, block):
    return torch.cat([x[:, :1], out[:, 1:]], 1)


def rounded_coarsely(out, x, block):
    """Returns what 6 bits would give, about."""
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    return out + (out - x).std() / 8 * noise


def a_scale_is_forgotten(out, x, block):
    return out + block.fc2.weight_scale.mean() * torch.ones_like(out) * 60


@pytest.mark.parametrize("change", [a_token_is_left_out, rounded_coarsely, a_scale_is_forgotten])
def test_proofs_fail_wrong_kernels(change):
    with proofs.undisturbed(torch.device("cpu")):
        trials = trials_of(with_quantized(make(class_tokens=1)), change)
    assert "wrong: output is off by" in trials["changed"].flaw


# Wrong arguments ------------------------------------------------------------------------------------------


def with_fc1(**changes):
    return lambda x, grid, block: (x, grid, block._replace(fc1=block.fc1._replace(**changes)))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (with_fc1(weight=torch.ones(72, 24, dtype=torch.int16)), TypeError,
         "block.fc1.weight: got dtype int16, expected int8 or float8_e4m3fn"),
        (with_fc1(weight=torch.ones(72, 24)), TypeError, "block.fc1.weight: got dtype float32"),
        (with_fc1(weight=torch.ones(72, 5, dtype=torch.int8)), ValueError,
         r"block.fc1.weight: got shape \(72, 5\), expected \(72, 24\)"),
        (with_fc1(weight=torch.ones(72, dtype=torch.int8)), ValueError, "block.fc1.weight: got shape"),
        (with_fc1(weight=torch.ones(72, 24, dtype=torch.int8, device="meta")), ValueError,
         "block.fc1.weight: is on meta, expected cpu as x"),
        (with_fc1(weight_scale=None), TypeError, "block.fc1.weight_scale: got NoneType, expected a tensor"),
        (with_fc1(weight_scale=torch.ones(72).half()), TypeError,
         "block.fc1.weight_scale: got dtype float16, expected float32"),
        (with_fc1(weight_scale=torch.ones(71)), ValueError,
         r"block.fc1.weight_scale: got shape \(71,\), expected \(72,\)"),
        (with_fc1(input_scale=0.1), TypeError, "block.fc1.input_scale: got float, expected a tensor"),
        (with_fc1(input_scale=torch.ones(1)), ValueError,
         r"block.fc1.input_scale: got shape \(1,\), expected \(\) \(\), a scalar"),
        (with_fc1(bias=torch.ones(3)), ValueError, r"block.fc1.bias: got shape \(3,\)"),
        (lambda x, grid, block: (x, grid, block._replace(fc2=tuple(block.fc2))), TypeError,
         "block.fc2: got tuple, expected Linear or QuantizedLinear"),
    ],
)  # fmt: skip
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        ck.transformer_block(*change(*with_quantized(make())))


def test_there_are_no_gradients():
    x, grid, block = with_quantized(make(), (5,))
    with torch.enable_grad(), pytest.raises(ValueError, match="x: a gradient is wanted, expected none"):
        ck.transformer_block(x.requires_grad_(), grid, block)
