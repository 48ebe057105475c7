"""The Triton kernels of 8-bit numbers, on a GPU or else in Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import language as tl

import cvt_kernels as ck
from cvt_kernels import backends, launch, launching, machine, reference
from cvt_kernels.launch.records import Product
from cvt_kernels.ops.linear_int8.triton import common, forward, operator
from cvt_kernels.ops.linear_int8.triton import rows as rounding
from tests.checks import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NUMBERS = [torch.int8, torch.float8_e4m3fn]
every_number = pytest.mark.parametrize("number", NUMBERS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SCALE = 0.02


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def by(backend, function, *args, **options):
    with ck.use_backend(backend):
        return function(*args, **options)


def both(function, *args, **options):
    return (by(backend, function, *args, **options) for backend in ("triton", "reference"))


def one_scale(value=SCALE):
    return torch.tensor(value, device=DEVICE)


def make_layer(rows, inputs, outputs, number=torch.int8, dtype=torch.float32):
    """Returns rounded rows, a weight of 8-bit numbers with its scales, a bias and a residual."""
    x = reference.quantize_rows(randn(*rows, inputs), dtype=number)
    weight = reference.quantize_rows(randn(outputs, inputs) / inputs**0.5, dtype=number)
    return (
        x,
        weight.values,
        weight.scales.flatten(),
        randn(outputs, dtype=dtype),
        randn(*rows, outputs, dtype=dtype),
    )


def assert_same_rows(ours, theirs):
    """Fails unless two results have the same bits, but for the sign of zero."""
    assert ours.values.dtype == theirs.values.dtype
    assert torch.equal(ours.values.float(), theirs.values.float())
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=0, atol=0, equal_nan=True)


def assert_near_rows(ours, theirs, *, rtol=2e-6):
    """Fails where scales differ in more than their last digits, or a number is not the same or the next."""
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=rtol, atol=0, equal_nan=True)
    values, expected = ours.values.double(), theirs.values.double()
    steps = 1.0 if ours.values.dtype == torch.int8 else (expected.abs() / 8).clamp(min=2.0**-9)
    assert ((values - expected).abs() <= steps).all()
    assert (values != expected).double().mean() < 0.01


# Rows -----------------------------------------------------------------------------------------------------


def special_rows(channels, dtype):
    """Returns rows of every kind: ties, zeros, tiny and huge numbers, NaN, infinities."""
    x = randn(24, channels)
    limits = torch.finfo(dtype)
    x[0] = 0
    x[1, 0] = torch.nan
    x[2, -1] = torch.inf
    x[3, 0] = -torch.inf
    x[4] *= limits.max / x[4].abs().max()
    x[5] *= limits.tiny
    x[6] *= 2.0**-117 / x[6].abs().max()
    x[7] *= 2.0**-118 / x[7].abs().max()
    x[8] = torch.linspace(-126.5, 126.5, channels).div(0.5).round().mul(0.5)  # ties, where 127 is the largest
    x[8, 0] = 127
    x[6, x[6].abs() < 2.0**-126] = 0  # which Triton's interpreter widens wrongly
    return x.to(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets
@every_number
@every_dtype
@pytest.mark.parametrize("scale", [None, SCALE])
def test_rows_have_the_bits_of_the_reference(scale, dtype, number):
    for channels in (1, 7, 64, 192, 100):
        x = special_rows(channels, dtype)
        scale_of_all = None if scale is None else one_scale()
        assert_same_rows(*both(ck.quantize_rows, x, scale=scale_of_all, dtype=number))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_of_odd_sizes(data):
    shape = [data.draw(st.sampled_from([1, 2, 5, 33])) for _ in range(2)]
    channels = data.draw(st.integers(1, 200))
    number, dtype = (data.draw(st.sampled_from(each)) for each in (NUMBERS, DTYPES))
    scale = data.draw(st.sampled_from([None, 0.001, 0.03]))
    x = (10 ** data.draw(st.integers(-6, 3)) * torch.randn(*shape, channels)).to(DEVICE, dtype)
    if data.draw(st.booleans()):
        x = x.transpose(0, 1)
    options = {"scale": None if scale is None else one_scale(scale), "dtype": number}
    assert_same_rows(*both(ck.quantize_rows, x, **options))


def test_the_longest_rows():
    assert_same_rows(*both(ck.quantize_rows, randn(3, 5000)))


@every_number
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layer_norm(dtype, number):
    """Not in bfloat16, to which Triton's interpreter rounds a shifted row wrongly."""
    for channels, scale in ((64, None), (192, one_scale()), (50, None)):
        x = randn(9, 3, channels, dtype=dtype)
        x[0, 0] = 5
        vectors = [randn(channels, dtype=dtype) for _ in range(3)]
        options = {"scale": scale, "dtype": number}
        assert_near_rows(*both(ck.layer_norm_quantize, x, *vectors[:2], shift=vectors[2], **options))
        assert_near_rows(*both(ck.layer_norm_quantize, x + 30, eps=0.1, **options), rtol=1e-5)


def test_a_shift_is_added_in_the_dtype_of_x():
    x, shift = torch.full((1, 4), 1024.0), torch.tensor([0.2, 0.4, 0.6, 0.8])
    x, shift = x.to(DEVICE, torch.float16), shift.to(DEVICE)
    ours, theirs = both(ck.layer_norm_quantize, x, shift=shift)
    assert_near_rows(ours, theirs, rtol=1e-4)
    assert len(ours.values.unique()) == 2  # the sums are 1024 and 1025


@every_number
@pytest.mark.parametrize("approximate", ["none", "tanh", "quick"])
def test_gelu(approximate, number):
    for dtype, channels, scale in ((torch.float32, 64, None), (torch.bfloat16, 100, one_scale())):
        x, bias = 3 * randn(30, channels, dtype=dtype), randn(channels, dtype=dtype)
        options = {"approximate": approximate, "scale": scale, "dtype": number}
        assert_near_rows(*both(ck.gelu_quantize, x, bias, **options))
        assert_near_rows(*both(ck.gelu_quantize, x - 4, **options))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets
@every_number
def test_rows_that_are_not_finite(number):
    x = randn(6, 40)
    x[1, 3], x[2, 0], x[4, 39] = torch.nan, torch.inf, -torch.inf
    for function in (ck.quantize_rows, ck.layer_norm_quantize, ck.gelu_quantize):
        ours = by("triton", function, x, dtype=number)
        assert ours.scales.isnan().flatten().tolist() == [False, True, True, False, True, False]
        assert not ours.values[[1, 2, 4]].float().any()
        assert ours.values[[0, 3, 5]].float().any(1).all()


# Products -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [65536, 1040, 33])
def test_sums_are_exact(inputs):
    """All numbers are as large as can be in one row, and anything in others."""
    x = torch.randint(-127, 128, (18, inputs), dtype=torch.int8, device=DEVICE)
    weight = torch.randint(-127, 128, (20, inputs), dtype=torch.int8, device=DEVICE)
    x[0], weight[1], weight[2] = 127, -127, 127
    ones = torch.ones(18, 1, device=DEVICE), torch.ones(20, device=DEVICE)
    out = by("triton", ck.linear_int8, ck.QuantizedRows(x, ones[0]), weight, ones[1])
    assert torch.equal(
        out.double(), (x.cpu().double() @ weight.cpu().double().t()).float().double().to(DEVICE)
    )


#: Inputs, outputs and dtype of a product, whether it has a residual → its kind of tile.
KINDS = {
    (64, 384, torch.bfloat16, False): "usual",
    (64, 512, torch.bfloat16, False): "wide",
    (64, 512, torch.bfloat16, True): "usual",  # a residual has no room beside a wide tile
    (64, 512, torch.float32, False): "float32",
    (64, 192, torch.float32, True): "narrow",
    (64, 200, torch.bfloat16, False): "usual",
    (72, 512, torch.bfloat16, False): "odd",
    (64, 508, torch.bfloat16, False): "odd",
}
MEDIUM, NARROW = (128, 128, 1), (128, 64, 3)
#: Rows, columns of a part and parts of each kind of tile.
TILES = {
    (80, torch.int8): {"narrow": (128, 64, 1)},
    (80, torch.float8_e4m3fn): {"narrow": (128, 64, 1)},
    (90, torch.int8): {"usual": (256, 128, 1), "wide": (128, 256, 1), "narrow": NARROW},
    (90, torch.float8_e4m3fn): {"narrow": NARROW},
    (100, torch.int8): {"narrow": NARROW},
    (100, torch.float8_e4m3fn): {"wide": (128, 256, 1), "narrow": NARROW},
}


@every_number
@pytest.mark.parametrize("generation", [80, 90, 100])
def test_the_configuration_of_a_product(generation, number):
    tiles = dict.fromkeys(KINDS.values(), MEDIUM) | {"odd": (64, 64, 1)} | TILES[generation, number]
    for (inputs, outputs, dtype, added), kind in KINDS.items():
        x = torch.empty(10**5, inputs, dtype=number, device="meta")
        out = torch.empty(10**5, outputs, dtype=dtype, device="meta")
        with launching.recorded_launches(launching.Chip(generation, 132)):
            config = common.configuration_for(x, out, out if added else None)
        assert (config.block_m, config.width, config.parts) == tiles[kind], (inputs, outputs, dtype, added)


@every_number
@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [
        (64, 64, torch.bfloat16),
        (32, 192, torch.float16),
        (48, 384, torch.bfloat16),
        (64, 256, torch.float16),
        (64, 256, torch.float32),
        (37, 100, torch.float32),
    ],
    ids=str,
)
def test_results(inputs, outputs, dtype, number):
    """The kernels of every width: narrow, in one tile, wide, and of sizes that descriptors do not take."""
    x, *layer, residual = make_layer((2, 70), inputs, outputs, number, dtype)
    for options in (
        {},
        {"approximate": "quick"},
        {"residual": residual},
        {"approximate": "none", "residual": residual},
    ):
        assert_agree(x, layer, dtype, **options)
    assert_agree(x, [*layer[:2], None], dtype)


def assert_agree(x, layer, dtype, **options):
    """Compares with the reference's own error, against the same call on the same 8-bit numbers in float64."""
    ours, theirs = both(ck.linear_int8, x, *layer, dtype=dtype, **options)
    wide = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    bias = None if layer[2] is None else layer[2].double()
    exact = reference.linear_int8(
        x.values.double(), layer[0], layer[1].double(), bias, x_scales=x.scales.double(), dtype=torch.float64,
        **wide,
    )  # fmt: skip
    assert ours.is_contiguous()
    assert_accurate(ours, theirs, exact, floor=2)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_products_of_odd_sizes(data):
    rows, outputs = (data.draw(st.sampled_from([1, 2, 7, 33, 130])) for _ in range(2))
    inputs = data.draw(st.sampled_from([1, 3, 16, 24, 72]))
    dtype, number = (data.draw(st.sampled_from(each)) for each in (DTYPES, NUMBERS))
    x, *layer, residual = make_layer((rows,), inputs, outputs, number, dtype)
    residual = data.draw(st.sampled_from([None, residual]))
    assert_agree(x, layer, dtype, approximate=data.draw(st.sampled_from([None, "tanh"])), residual=residual)


@every_number
@pytest.mark.parametrize("scale", [None, SCALE])
def test_x_in_floating_point(scale, number):
    _, weight, weight_scale, bias, _ = make_layer((1,), 40, 24, number)
    weight = weight.t().contiguous().t()  # which the kernel copies
    x = special_rows(40, torch.float32)[[0, 1, 2, 6, 8, 9, 10]]
    scale = None if scale is None else one_scale()
    ours, theirs = both(ck.linear_int8, x, weight, weight_scale, bias, input_scale=scale)
    assert ours.isnan().any(1).tolist() == [False, True, True, False, False, False, False]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True)


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: ck.quantize_rows(randn(0, 4)), "the batch is empty"),
        (lambda: ck.quantize_rows(randn(2, 8193)), "rows of 8193 channels, more than 8192"),
        (lambda: ck.gelu_quantize(randn(2, 4).double()), "float64 is not rounded"),
        (lambda: linear(randn(0, 8)), "the batch is empty"),
        (lambda: linear(randn(2, 8).double()), "float64 is not rounded"),
        (lambda: linear(randn(2, 8), outputs=0), "the weight is empty"),
        (lambda: linear(randn(2, 9000)), "rows of 9000 channels, more than 8192"),
    ],
)
def test_calls_that_are_refused(call, reason):
    with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable, match=reason):
        call()


def linear(x, outputs=4):
    weight = torch.zeros(outputs, x.shape[-1], dtype=torch.int8, device=DEVICE)
    return ck.linear_int8(x, weight, torch.zeros(outputs, device=DEVICE))


def test_float8_needs_a_chip_that_has_it():
    call = backends.operators["quantize_rows"].bind(randn(2, 4), dtype=torch.float8_e4m3fn)
    with launching.recorded_launches(launching.Chip(80, 108)):
        assert "needs compute capability 8.9, got 8.0" in operator.why_rows_unsupported(call)
        assert operator.why_rows_unsupported(call._replace(dtype=torch.int8)) is None


# Configurations -------------------------------------------------------------------------------------------


@every_number
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_configurations(capability, number):
    """Descriptors, a persistent loop and precise sums where there are such things."""

    def launch_of(inputs, outputs, dtype, *, adds=False):
        x, weight = (torch.empty(n, inputs, dtype=number, device="meta") for n in (3000, outputs))
        vector = torch.empty(outputs, device="meta")
        residual = torch.empty(3000, outputs, dtype=dtype, device="meta") if adds else None
        with launching.recorded_launches(launching.Chip(capability, 2)) as launches:
            forward.linear_int8_forward(x, vector, weight, vector, vector, None, residual, dtype)
        return launches[0].arguments["SPEC"], launches[0].grid[0]

    has_descriptors = capability in (90, 100)
    spec, _ = launch_of(64, 384, torch.bfloat16)
    assert (spec.has_descriptors, spec.writes_descriptors) == (has_descriptors, has_descriptors)
    assert spec.sum == (tl.int32 if number == torch.int8 else tl.float32)
    assert spec.adds_steps == (number == torch.float8_e4m3fn)
    odd = launch_of(72, 384, torch.bfloat16)[0]  # rows do not begin at multiples of 16 bytes
    assert (odd.has_descriptors, odd.block_m) == (False, 64)
    assert launch_of(64, 301, torch.bfloat16)[0].block_m == 64
    assert not launch_of(64, 384, torch.float32)[0].writes_descriptors
    spec, programs = launch_of(384, 512, torch.float16)
    has_wide_tiles = (capability, number) in ((90, torch.int8), (100, torch.float8_e4m3fn))
    assert spec.is_persistent == has_wide_tiles
    assert not has_wide_tiles or programs == 2
    assert not launch_of(384, 512, torch.float16, adds=True)[0].is_persistent
    generation = 100 if capability == 100 else 90 if capability == 90 else 80
    narrow = launch_of(64, 192, torch.float16)[0]
    assert narrow.block_m == 128
    assert narrow.columns == (3 if generation == 80 else 1)


def test_other_configurations():
    config = Product(block_m=16, width=32, parts=2, block_k=32, num_warps=4, num_stages=2)
    x, *layer, _ = make_layer((70,), 40, 100)
    usual = by("triton", ck.linear_int8, x, *layer)
    with launch.overridden("linear_int8", config):
        torch.testing.assert_close(by("triton", ck.linear_int8, x, *layer), usual, rtol=0, atol=0)


# On a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_number
@every_dtype
def test_cvts_shapes_on_a_gpu(dtype, number):
    if number == torch.float8_e4m3fn and launching.chip(torch.device("cuda", 0)).capability < 89:
        pytest.skip("needs compute capability 8.9")
    for channels in (64, 192, 384):
        for inputs, outputs in ((channels, channels), (channels, 4 * channels), (4 * channels, channels)):
            x = randn(4, 197, inputs, dtype=dtype)
            assert_same_rows(*both(ck.quantize_rows, x, dtype=number))
            assert_near_rows(*both(ck.layer_norm_quantize, x, shift=x[0, 0], dtype=number))
            for approximate in ("none", "tanh", "quick"):
                assert_near_rows(*both(ck.gelu_quantize, x, approximate=approximate, dtype=number))
            rows, *layer, residual = make_layer((4, 197), inputs, outputs, number, dtype)
            assert_agree(rows, layer, dtype, residual=residual)
            assert_agree(rows, layer, dtype, approximate="quick")


@pytest.mark.gpu
def test_captured_in_a_graph():
    _, weight, weight_scale, bias, _ = make_layer((1,), 64, 64)
    x = randn(2, 50, 64)
    scale = one_scale()

    def function():
        rows = ck.layer_norm_quantize(x, scale=scale)
        hidden = ck.linear_int8(rows, weight, weight_scale, bias)
        return ck.linear_int8(ck.gelu_quantize(hidden), weight, weight_scale, bias, residual=x)

    with ck.use_backend("triton"):
        expected = function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function()
        scale.mul_(1.5)  # read when it is replayed
        graph.replay()
        assert not torch.equal(out, expected)
        torch.testing.assert_close(out, function(), rtol=0, atol=0)


@pytest.mark.parametrize(("capability", "converts_exactly"), [(89, False), (90, True), (100, True)])
def test_float8_is_rounded_once(capability, converts_exactly, monkeypatch):
    """The conversion of sm_89 rounds to float16 first: there the kernel rounds before it."""
    monkeypatch.setattr(machine, "INTERPRETING", False)
    x = torch.empty(8, 64, device="meta")
    with launching.recorded_launches(launching.Chip(capability, 1)) as launches:
        rounding.quantize_rows_forward(x, None, torch.float8_e4m3fn)
    assert launches[0].arguments["SPEC"].converts_exactly == converts_exactly
