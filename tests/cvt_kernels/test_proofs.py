"""The proofs of kernels: wrong ones are found, right ones pass, and the caller notices nothing."""

import contextlib
import ctypes
import itertools
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import cvt_kernels as ck
from cvt_kernels import accuracy, backends, dispatch, measure, proofs, reference
from tests.checks import implementation, recorded_operators

HALF = (torch.bfloat16, torch.float16)


def standard_of(operator, *args, gradient=False, **kwargs):
    declared = backends.operators[operator]
    return proofs.Standard.of(declared.reference, proofs.Call(declared.bind(*args, **kwargs), gradient))


def check(function, standard) -> proofs.Trial:
    """Checks a function of the parameters of the operator of a standard."""
    operator = type(standard.sample.record).__name__.removesuffix("_call")
    return proofs.check(backends.operators[operator].passing_on(function), standard)


def gelu_flaw(function, x=None) -> str | None:
    standard = standard_of("gelu", torch.randn(7, 24) if x is None else x, approximate="none")
    return check(function, standard).flaw


def branches(channels=6, strides=(1, 2, 2), *, dtype=torch.float32, shared=False, affine=True):
    """Returns branches of conv_projection, with statistics and weights as after some training."""
    norm = nn.BatchNorm2d(channels, affine=affine)
    convs = []
    for stride in strides:
        conv = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        norm = norm if shared else nn.BatchNorm2d(channels, affine=affine)
        with torch.no_grad():
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            for parameter in norm.parameters():
                parameter.normal_(1, 0.1)
        convs.append(ck.ConvBatchNorm.from_modules(conv.to(dtype), norm.to(dtype)))
    return tuple(convs)


def flaws(operator, *args, **kwargs) -> dict[str, str | None]:
    """Checks every backend that can serve a call of an implementation; returns their flaws."""
    proof = dispatch.proof_of(operator, *args, **kwargs)
    with proofs.undisturbed(proof.sample.device):
        standard = proofs.Standard.of(proof.reference, proof.sample)
        return {name: proofs.check(each, standard).flaw for name, each in proof.candidates.items()}


def assert_native_passes(operator, *args, **kwargs):
    assert flaws(operator, *args, **kwargs).get("native", "was not tried") is None


# Wrong kernels --------------------------------------------------------------------------------------------


def _one_wrong(x, *, approximate):
    out = reference.gelu(x, approximate=approximate).clone()
    out.view(-1)[-1] += 0.01
    return out


def _one_nan(x, *, approximate):
    out = reference.gelu(x, approximate=approximate).clone()
    out[0, 0] = torch.nan
    return out


def _unwritten(x, *, approximate):
    out = torch.empty_like(x)
    out[:-1] = reference.gelu(x[:-1], approximate=approximate)
    return out


def _into_the_input(x, *, approximate):
    out = reference.gelu(x, approximate=approximate)
    x[0, 0] += 1
    return out


@pytest.mark.parametrize(
    ("function", "flaw"),
    [
        (_one_wrong, "wrong: output is off by 1.0e-02, allowed are"),
        (_one_nan, "wrong: output is off by nan, allowed are"),
        (_unwritten, "wrong: output is off by nan, allowed are"),
        (_into_the_input, "wrong: tensor 0 of the arguments, after the call, is off by"),
        (
            lambda x, **_: x.sum(0),
            "wrong: returns [(torch.float32, torch.Size([24]))], expected [(torch.float",
        ),
        (lambda x, **_: x.double(), "wrong: returns [(torch.float64, torch.Size([7, 24]))], expected"),
        (lambda x, **_: (x, x), "wrong: returns [(torch.float32, torch.Size([7, 24])), (torch.float32,"),
        (lambda x, **_: None, "fails: "),
        (lambda x, **_: 1 / 0, "fails: ZeroDivisionError: division by zero"),
        (lambda x, **_: [][x], "fails: TypeError: "),
    ],
)
def test_flaws_of_wrong_kernels(function, flaw):
    assert gelu_flaw(function).startswith(flaw)


def test_an_error_without_words():
    def fails(x, **_):
        raise RuntimeError

    assert gelu_flaw(fails) == "fails: RuntimeError: no reason given"


def test_an_error_is_described_with_its_cause():
    class CompilationError(Exception):
        """Stands for Triton's."""

    def fails(x, **_):
        try:
            raise CompilationError("at 36:21:\n    x = activate(x, SPEC.approximate)\n        ^") from error
        except CompilationError as inner:
            raise CompilationError("at 9:4:\n    y = _load(x)\n        ^") from inner

    error = AttributeError("'str' object has no attribute 'type'")
    expected = "fails: CompilationError: at 9:4: AttributeError: 'str' object has no attribute 'type'"
    assert gelu_flaw(fails) == expected
    error = CompilationError("at 1:2:\n    y = tl.load(x)\n        ^\nexpected a pointer\n")
    assert gelu_flaw(fails) == "fails: CompilationError: at 9:4: expected a pointer"


@pytest.mark.parametrize(
    "allocate", [torch.empty_like, torch.zeros_like, torch.clone, torch.Tensor.contiguous]
)
@pytest.mark.parametrize("place", [-1, "behind"])
@pytest.mark.parametrize("way", ["strides", "address"])
def test_writes_outside_of_an_output_are_found(allocate, place, way):
    def writes(x, *, approximate):
        out = allocate(x.mT).mT.contiguous() if allocate is torch.Tensor.contiguous else allocate(x)
        out.copy_(reference.gelu(x, approximate=approximate))
        index = out.numel() if place == "behind" else place
        if way == "strides":
            out.as_strided((1,), (1,), out.storage_offset() + index).fill_(7.0)
        else:
            number = ctypes.c_float.from_address(out.data_ptr() + index * out.element_size())
            number.value = 7.0
        return out

    assert gelu_flaw(writes) == "wrong: writes outside of its tensors"


def test_writes_beside_an_input_are_found():
    def writes(x, *, approximate):
        ctypes.c_float.from_address(x.data_ptr() - 4).value = 7.0
        return reference.gelu(x, approximate=approximate)

    assert gelu_flaw(writes) == "wrong: writes outside of its tensors"


def test_a_tile_too_many_is_found_far_away():
    def writes(x, *, approximate):
        out = reference.gelu(x, approximate=approximate).clone()
        ctypes.memset(out.data_ptr() + out.nbytes + 30_000, 0, 4)
        return out

    assert gelu_flaw(writes) == "wrong: writes outside of its tensors"


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("side", [-2, 42])
def test_writes_beside_tensors_that_begin_or_end_within_a_word_are_found(where, side):
    def writes(x, *, approximate):
        out = torch.empty_like(x).copy_(reference.gelu(x, approximate=approximate))
        ctypes.memset((x if where == "input" else out).data_ptr() + side, 7, 2)
        return out

    x = torch.randn(22).bfloat16()[1:].view(3, 7)
    assert gelu_flaw(writes, x) == "wrong: writes outside of its tensors"


def test_what_is_read_outside_of_an_input_is_nan():
    def reads(x, *, approximate):
        beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
        return reference.gelu(x, approximate=approximate) + 0 * beyond

    assert gelu_flaw(reads).startswith("wrong: output is off by nan")


class _WrongBackward(torch.autograd.Function):
    """LayerNorm whose gradient of x lacks a term."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return reference.layer_norm(x, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        rstd = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + ctx.eps)
        normalized = (x - x.mean(-1, keepdim=True)) * rstd
        g = dout * weight
        dx = rstd * (g - g.mean(-1, keepdim=True))
        return dx, (dout * normalized).sum((0, 1)), dout.sum((0, 1)), None


def test_a_wrong_backward_is_found_only_where_it_is_wanted():
    x, weight, bias = torch.randn(2, 9, 16, requires_grad=True), torch.randn(16), torch.randn(16)

    def function(x, weight, bias, *, eps, **_):
        return _WrongBackward.apply(x, weight, bias, eps)

    forward = standard_of("layer_norm", x.detach(), weight, bias, eps=1e-5)
    assert check(function, forward).flaw is None
    both = standard_of("layer_norm", x, weight, bias, eps=1e-5, gradient=True)
    assert check(function, both).flaw.startswith("wrong: gradient is off by")


def test_a_missing_backward_is_found():
    x = torch.randn(4, 8, requires_grad=True)
    standard = standard_of("gelu", x, approximate="none", gradient=True)

    def detached(x, *, approximate):
        return reference.gelu(x.detach(), approximate=approximate)

    assert check(detached, standard).flaw is not None


@pytest.mark.parametrize("wrong", ["running_mean", "running_var", "num_batches_tracked"])
def test_wrong_running_statistics_are_found(wrong):
    def function(x, grid, convs, *, training):
        outs = reference.conv_projection(x, grid, convs, training=training)
        getattr(convs[1], wrong).add_(1)
        return outs

    standard = standard_of("conv_projection", torch.randn(2, 12, 6), (3, 4), branches(), training=True)
    flaw = check(function, standard).flaw
    assert "of the arguments, after the call, is off by" in flaw


def test_statistics_that_are_not_updated_are_found():
    def function(x, grid, convs, *, training):
        copies = tuple(conv._replace(running_mean=conv.running_mean.clone()) for conv in convs)
        return reference.conv_projection(x, grid, copies, training=training)

    standard = standard_of("conv_projection", torch.randn(2, 12, 6), (3, 4), branches(), training=True)
    assert "of the arguments, after the call, is off by" in check(function, standard).flaw


def test_a_kernel_that_is_wrong_in_one_dtype_only():
    def function(x, *, approximate):
        out = reference.gelu(x, approximate=approximate)
        return out * 1.05 if x.dtype == torch.float16 else out

    x = torch.randn(5, 40)
    assert gelu_flaw(function, x) is None
    assert gelu_flaw(function, x.bfloat16()) is None
    assert gelu_flaw(function, x.half()).startswith("wrong: output is off by")


@pytest.mark.parametrize("ignored", ["weight", "bias"])
def test_weights_as_they_begin_do_not_hide_that_they_are_ignored(ignored):
    def function(x, weight, bias, *, eps, **_):
        weight, bias = (None, bias) if ignored == "weight" else (weight, None)
        return reference.layer_norm(x, weight, bias, eps=eps)

    standard = standard_of("layer_norm", torch.randn(4, 8), torch.ones(8), torch.zeros(8), eps=1e-5)
    assert check(function, standard).flaw.startswith("wrong: output is off by")


@pytest.mark.parametrize("value", [0.0, 3.0, torch.nan, torch.inf, 1e30])
def test_data_that_tell_nothing_do_not_hide_a_wrong_kernel(value):
    assert gelu_flaw(_one_wrong, torch.full((7, 24), value)) is not None
    assert gelu_flaw(_one_wrong, torch.full((1, 24), value).expand(7, 24)) is not None
    mixed = torch.randn(7, 24)
    mixed[3, 3] = value
    assert gelu_flaw(_one_wrong, mixed) is not None


def test_real_data_are_taken_where_they_tell():
    x, residual = torch.randn(4, 8), torch.zeros(4, 8)
    standard = standard_of("add_layer_norm", x, residual, torch.ones(8), None, eps=1e-5)
    assert torch.equal(standard.sample.record.x, x)
    assert torch.equal(residual, torch.zeros(4, 8))
    for replaced in standard.sample.record[1:3]:
        assert replaced.min() < replaced.max()


def test_errors_are_numbers_of_the_trial():
    x = torch.randn(7, 24)
    right = check(reference.gelu, standard_of("gelu", x, approximate="none"))
    assert 0 <= right.error <= right.allowed < 1e-4
    wrong = check(_one_wrong, standard_of("gelu", x, approximate="none"))
    assert wrong.error == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("gradient", [False, True])
def test_the_reference_runs_once_in_its_dtype_and_once_in_float64(gradient):
    dtypes = []

    def counted(x, *, approximate):
        dtypes.append(x.dtype)
        return reference.gelu(x, approximate=approximate)

    x = torch.randn(7, 24, requires_grad=gradient)
    for backend, each in {"reference": counted, "native": reference.gelu, "triton": reference.gelu}.items():
        backends.register("gelu", backend, implementation("gelu", each))
    proof = dispatch.proof_of("gelu", x, approximate="none")
    standard = proof.standard()
    trials = {name: proofs.check(function, standard) for name, function in proof.candidates.items()}
    assert dtypes == [torch.float32, torch.float64]
    assert len(trials) == 3
    assert len(set(trials.values())) == 1  # the reference has its error all the same
    assert trials["reference"].error > 0


# Right kernels --------------------------------------------------------------------------------------------


def data(kind: str, *shape: int) -> torch.Tensor:
    x = torch.randn(shape)
    flat = x.view(-1)
    if kind in ("zeros", "constant", "huge", "tiny"):
        return x * 0 + 2.5 if kind == "constant" else x * {"zeros": 0, "huge": 1e30, "tiny": 1e-30}[kind]
    if kind in ("nan", "inf", "outlier"):
        flat[flat.numel() // 2] = {"nan": torch.nan, "inf": -torch.inf, "outlier": 1e3}[kind]
    return x


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "misaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if layout == "sliced":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x[:1].expand(x.shape) if layout == "expanded" else x


KINDS = ("random", "zeros", "constant", "huge", "tiny", "nan", "inf", "outlier")
LAYOUTS = ("contiguous", "misaligned", "sliced", "transposed", "expanded")
CASES = [*((kind, "contiguous") for kind in KINDS), *(("random", layout) for layout in LAYOUTS[1:])]
DTYPES = (torch.float32, *HALF, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "gradient"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.float16, False),
        (torch.float64, True),
    ],
)
@pytest.mark.parametrize(("kind", "layout"), [*CASES, ("zeros", "expanded"), ("nan", "sliced")])
def test_layer_norm_and_gelu_pass(kind, layout, dtype, gradient):
    x, residual = (laid_out(data(kind, 3, 17, 64).to(dtype), layout) for _ in range(2))
    weight, bias = torch.randn(64).to(dtype), torch.ones(64, dtype=dtype)
    for t in (x, weight) if gradient else ():
        t.requires_grad_()
    for each in ((weight, bias), (None, None), (weight, None)):
        assert_native_passes("layer_norm", x, *each, eps=1e-5)
        assert_native_passes("add_layer_norm", x, residual, *each, eps=1e-5)
        assert_native_passes("layer_norm_gelu", x, *each, eps=1e-5, approximate="quick")
    for shift in (bias, bias.float()):
        assert_native_passes("layer_norm", x, weight, bias, eps=1e-5, shift=shift)
    for approximate in ("none", "tanh", "quick"):
        assert_native_passes("gelu", x, approximate=approximate)
        assert_native_passes("bias_gelu", x, weight, approximate=approximate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (5,), (1, 1, 385), (0,), (0, 4), (3, 0, 4)])
def test_odd_shapes_pass(shape, dtype):
    x = torch.randn(shape).to(dtype)
    assert_native_passes("gelu", x, approximate="none")
    assert_native_passes("gelu", x.requires_grad_(), approximate="tanh")
    if shape and shape != (0,):
        assert_native_passes("layer_norm", x.detach(), None, None, eps=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "layout"), [*CASES, ("inf", "expanded")])
def test_attention_passes(kind, layout, dtype):
    q, k, v = (laid_out(data(kind, 2, tokens, 3, 32).to(dtype), layout) for tokens in (50, 17, 17))
    for scale in (None, 96**-0.5):
        assert_native_passes("attention", q, k, v, scale=scale, bias=None, dropout_p=0.0)
    one_key = k[:, :1], v[:, :1]
    assert_native_passes("attention", q[:, :1], *one_key, scale=None, bias=None, dropout_p=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_conv_projection_passes(kind, layout, dtype):
    for i, convs in enumerate((
        branches(dtype=dtype),
        branches(dtype=dtype, shared=True),
        branches(dtype=dtype, affine=False),
        tuple(c._replace(weight=laid_out(c.weight.detach(), layout)) for c in branches(dtype=dtype)),
    )):  # fmt: skip
        for images in (1, 2):
            class_token = (i + images) % 2
            x = laid_out(data(kind, images, 20 + class_token, 6).to(dtype), layout)
            with torch.no_grad():
                assert_native_passes("conv_projection", x, (4, 5), convs, training=False)


@pytest.mark.parametrize("autocast", HALF)
def test_kernels_pass_under_autocast(autocast):
    x, weight = torch.randn(2, 21, 6), torch.randn(6, requires_grad=True)
    with torch.autocast("cpu", autocast):
        assert_native_passes("layer_norm", x, weight, weight, eps=1e-5)
        assert_native_passes("add_layer_norm", x, x.to(autocast), weight, None, eps=1e-5)
        assert_native_passes("bias_gelu", x.to(autocast), weight, approximate="none")
        q = torch.randn(2, 9, 3, 16)
        assert_native_passes("attention", q, q, q, scale=None, bias=None, dropout_p=0.0)
        with torch.no_grad():
            assert_native_passes("conv_projection", x, (4, 5), branches(), training=False)


@pytest.mark.parametrize(
    ("kind", "layout"), [("random", "contiguous"), ("zeros", "expanded"), ("nan", "sliced")]
)
@pytest.mark.parametrize("gradient", [False, True])
def test_triton_attention_passes(kind, layout, gradient):
    q, k, v = (laid_out(data(kind, 2, tokens, 2, 16), layout) for tokens in (9, 5, 5))
    for t in (q, k, v) if gradient else ():
        t.requires_grad_()
    mask = torch.zeros(9, 5).masked_fill(torch.rand(9, 5) < 0.3, -torch.inf)
    mask[:, 0] = 1
    with ck.use_backend("triton"):
        for keys, bias in ((5, None), (1, None), (5, mask)):
            settings = {"scale": 32**-0.5, "bias": bias, "dropout_p": 0.0}
            found = flaws("attention", q, k[:, :keys], v[:, :keys], **settings)
            assert found["triton"] is None


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "layout"), [("random", "contiguous"), ("constant", "expanded")])
def test_triton_conv_projection_passes(kind, layout, training):
    x = laid_out(data(kind, 2, 10, 8), layout).requires_grad_()
    convs = branches(8, (1, 2), shared=not training)
    if kind == "random":
        convs[0].weight.data = convs[0].weight.data.transpose(2, 3)
    with ck.use_backend("triton"):
        assert flaws("conv_projection", x, (3, 3), convs, training=training)["triton"] is None


def test_linear_passes():
    for dtype in (torch.float32, *HALF):
        for shape in ((8,), (1, 8), (2, 5, 8)):
            x, weight = torch.randn(shape).to(dtype), torch.randn(12, 8).to(dtype)
            assert set(flaws("linear", x, weight, weight[:, 0]).values()) == {None}
            assert set(flaws("linear", x, weight.requires_grad_(), None).values()) == {None}


def test_what_pytorch_itself_cannot_compute_is_not_judged():
    x, weight = torch.randn(4, 1).half(), torch.randn(1).half().requires_grad_()
    with pytest.raises(FloatingPointError, match="PyTorch's own results are not finite"):
        standard_of("layer_norm", x.requires_grad_(), weight, None, eps=1e-12, gradient=True)


# Guarded memory -------------------------------------------------------------------------------------------


def is_guarded(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= tensor.nbytes + 2 * 2**16


def native(operator):
    function, bind = (
        backends.registered(operator, "native").load().function,
        backends.operators[operator].bind,
    )
    return lambda *args, **kwargs: function(bind(*args, **kwargs))


def test_outputs_of_native_kernels_lie_in_guarded_memory():
    x, convs = torch.randn(2, 12, 6), branches()
    q = torch.randn(1, 5, 2, 8)
    calls = [
        lambda: [native("gelu")(x, approximate="none")],
        lambda: [native("layer_norm")(x, None, None, eps=1e-5)],
        lambda: native("add_layer_norm")(x, x, None, None, eps=1e-5),
        lambda: [native("attention")(q, q, q, scale=None, bias=None, dropout_p=0.0)],
        lambda: native("conv_projection")(x, (3, 4), convs, training=False),
    ]
    with torch.no_grad():
        for call in calls:
            with proofs.guarded_memory() as memory:
                assert all(is_guarded(out) for out in call())
            assert not memory.is_overwritten()
            assert not any(is_guarded(out) for out in call())


def test_gradients_of_native_kernels_lie_in_guarded_memory():
    x = torch.randn(4, 8, requires_grad=True)
    with proofs.guarded_memory():
        out = native("gelu")(x, approximate="none")
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert is_guarded(gradient)


def test_allocations_are_direct_again_after_an_error_and_after_the_last_of_nested_blocks():
    x = torch.randn(4, 8)
    with pytest.raises(ZeroDivisionError), proofs.guarded_memory():
        _ = 1 / 0
    with recorded_operators() as operators:
        native("gelu")(x, approximate="none")
    assert not any("empty" in name for name in operators)
    with proofs.guarded_memory():
        with proofs.guarded_memory():
            pass
        assert is_guarded(native("gelu")(x, approximate="none"))
    assert not is_guarded(native("gelu")(x, approximate="none"))


def test_guarded_memory_of_two_threads():
    x = torch.randn(4, 8)
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other():
        with proofs.guarded_memory():
            entered.set()
            left.wait(60)
            seen.append(is_guarded(native("gelu")(x, approximate="none")))

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    assert not is_guarded(native("gelu")(x, approximate="none"))  # not in this thread
    with proofs.guarded_memory():
        assert is_guarded(native("gelu")(x, approximate="none"))
    left.set()
    thread.join()
    assert seen == [True]
    assert not is_guarded(native("gelu")(x, approximate="none"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copies_in_guarded_memory(layout, dtype):
    x = laid_out((100 * torch.randn(3, 4, 5)).to(dtype), layout)
    memory = proofs.GuardedMemory()
    copy = memory.copy(x)
    assert torch.equal(copy, x)
    assert copy.stride() == x.stride()
    assert copy.data_ptr() % 64 == x.data_ptr() % 64
    assert copy.data_ptr() != x.data_ptr()
    assert not memory.is_overwritten()


# 8-bit numbers --------------------------------------------------------------------------------------------


def rows_of(dtype=torch.int8):
    """Returns rows for LayerNorm, GELU and rounding, and the settings that all of these take."""
    return torch.randn(6, 40, 24), {"scale": None, "dtype": dtype}


def settings_of(operator):
    return {"approximate": "none"} if operator == "gelu_quantize" else {}


def with_values(change):
    """Makes a kernel of the reference by a change of the values that it returns."""

    def make(operator):
        def kernel(x, *args, **kwargs):
            values, scales = getattr(reference, operator)(x, *args, **kwargs)
            return change(values.clone()), scales

        return kernel

    return make


def _one_more(values):
    values.view(torch.int8).view(-1)[5] += 1
    return values


def _nothing_written_at_the_end(values):
    out = torch.empty_like(values)
    out[:-1] = values[:-1]
    return out


def _unwritten_float(values):
    return torch.empty_like(values)


def _truncated(operator):
    """Rounds towards zero."""

    def kernel(x, *args, scale, dtype, **kwargs):
        wide = getattr(reference, operator)(x.double(), *args, scale=scale, dtype=dtype, **kwargs)
        return wide.values.trunc().to(dtype), wide.scales.float()

    return kernel


def _wrong_scales(operator):
    def kernel(x, *args, **kwargs):
        values, scales = getattr(reference, operator)(x, *args, **kwargs)
        return values, scales * (1 + 1e-4)

    return kernel


def _computed_in_float64(operator):
    """Rounds what is exact, so that ties of float32 fall otherwise."""

    def kernel(x, *args, scale, dtype, **kwargs):
        wide = getattr(reference, operator)(x.double(), *args, scale=scale, dtype=dtype, **kwargs)
        return accuracy.rounded(wide.values, dtype), wide.scales.float()

    return kernel


RIGHT = {"reference": with_values(lambda values: values), "exact": _computed_in_float64}
WRONG = {
    "one more": with_values(_one_more),
    "not written": with_values(_nothing_written_at_the_end),
    "nothing written": with_values(_unwritten_float),
    "truncated": _truncated,
    "scales": _wrong_scales,
    "zeros": with_values(torch.zeros_like),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("operator", ["quantize_rows", "layer_norm_quantize", "gelu_quantize"])
def test_right_and_wrong_rows_of_8_bit_numbers(operator, dtype):
    x, settings = rows_of(dtype)
    for scale in (None, torch.tensor(0.02 if dtype == torch.int8 else 0.006)):
        arguments = {**settings, **settings_of(operator), "scale": scale}
        proof = dispatch.proof_of(operator, x, **arguments)
        standard = proof.standard()
        for name, make in (RIGHT | WRONG).items():
            if name == "truncated" and dtype != torch.int8:
                continue  # a step is not 1
            flaw = check(make(operator), standard).flaw
            assert (flaw is None) == (name in RIGHT), (name, flaw)


def test_rows_of_integers_that_lie_at_ties():
    """Halves of integers: all but the last bit of a product decides on them."""
    x = torch.randint(-254, 255, (40, 64)) / 2
    x[:, 0] = 127
    proof = dispatch.proof_of("quantize_rows", x, scale=None, dtype=torch.int8)
    standard = proof.standard()
    assert check(reference.quantize_rows, standard).flaw is None

    def upwards(x, **settings):
        scales = reference.quantize_rows(x, **settings).scales
        return (x / scales + 0.5).floor().clamp(-127, 127).to(torch.int8), scales

    assert check(upwards, standard).flaw is None  # the nearest as well


def of_a_layer(dtype=torch.float32, weight_dtype=torch.int8, static=False, rows=False):
    """Returns the arguments of a linear layer."""
    x, weight = torch.randn(4, 20, 64).to(dtype), torch.randn(24, 64)
    values, scales = reference.quantize_rows(weight, dtype=weight_dtype)
    settings = {"x_scales": None, "input_scale": torch.tensor(0.03) if static else None}
    if rows:
        x, settings["x_scales"] = reference.quantize_rows(x, dtype=weight_dtype)
    settings |= {"approximate": "none", "residual": torch.randn(4, 20, 24).to(dtype), "dtype": dtype}
    return (x, values, scales.flatten(), torch.randn(24).to(dtype)), settings


def _with_truncated_input(x, weight, *args, x_scales, input_scale, **settings):
    if x_scales is None:
        wide = reference.quantize_rows(x.double(), scale=input_scale)
        x, x_scales = wide.values.trunc().to(torch.int8), wide.scales.float()
    return reference.linear_int8(x, weight, *args, x_scales=x_scales, **settings)


def _without_a_row(x, weight, *args, **settings):
    weight = weight.clone()
    weight[3] = 0
    return reference.linear_int8(x, weight, *args, **settings)


def _dequantized(x, weight, scale, bias, *, x_scales, input_scale, approximate, residual, dtype):
    rows = x if x_scales is None else x * x_scales
    if input_scale is not None:
        rows = rows.clamp(-127 * input_scale, 127 * input_scale)
    product = nn.functional.linear(rows, weight.float() * scale[:, None], bias)
    return (reference.gelu(product, approximate=approximate) + residual).to(dtype)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_right_and_wrong_products_of_8_bit_numbers(static, rows):
    args, settings = of_a_layer(static=static and not rows, rows=rows)
    proof = dispatch.proof_of("linear_int8", *args, **settings)
    standard = proof.standard()
    for right in (reference.linear_int8, _dequantized):
        assert check(right, standard).flaw is None
    wrong = [_without_a_row, lambda *args, **settings: torch.empty_like(settings["residual"])]
    wrong += [] if rows else [_with_truncated_input]
    for kernel in wrong:
        assert "wrong: output is off by" in check(kernel, standard).flaw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
def test_verdicts_of_products_of_8_bit_numbers(dtype, weight_dtype, monkeypatch):
    known = dict(backends.implementations["linear_int8"])
    monkeypatch.setitem(backends.implementations, "linear_int8", known)
    known["native"] = implementation("linear_int8", _without_a_row)
    args, settings = of_a_layer(dtype, weight_dtype)
    verdict = prove("linear_int8", *args, **settings)
    assert verdict.trials["reference"].flaw is None
    assert "wrong: output is off by" in verdict.trials["native"].flaw
    assert verdict.chosen != "native"


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize("operator", ["quantize_rows", "layer_norm_quantize", "gelu_quantize"])
def test_a_right_kernel_serves_and_a_wrong_one_does_not(operator, monkeypatch):
    known = {"reference": backends.implementations[operator]["reference"]}
    monkeypatch.setitem(backends.implementations, operator, known)
    x, _ = rows_of()
    known["native"] = implementation(operator, WRONG["one more"](operator))
    with pytest.warns(RuntimeWarning, match="the kernel of backend 'native' failed its check"):
        rows = getattr(ck, operator)(x)
    same = getattr(reference, operator)(x)
    assert torch.equal(rows.values, same.values)
    assert torch.equal(rows.scales, same.scales)


# The caller -----------------------------------------------------------------------------------------------


def prove(operator, *args, **kwargs):
    return proofs.prove(dispatch.proof_of(operator, *args, **kwargs))


def test_arguments_statistics_gradients_and_random_numbers_stay():
    x = torch.randn(2, 12, 6, requires_grad=True)
    x.grad = torch.ones_like(x)
    convs = branches(shared=True)
    backends.register(
        "conv_projection", "native", implementation("conv_projection", reference.conv_projection)
    )
    tensors = [x, x.grad, *(t for conv in convs for t in conv if isinstance(t, torch.Tensor))]
    before = [(t.clone(), t._version, t.grad) for t in tensors]
    state = torch.get_rng_state()

    verdict = prove("conv_projection", x, (3, 4), convs, training=True)
    assert verdict.trials.keys() == {"native", "reference"}
    assert torch.equal(torch.get_rng_state(), state)
    for tensor, (value, version, gradient) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, value)
        assert (tensor._version, tensor.grad) == (version, gradient)


def test_random_numbers_of_a_candidate_are_not_the_callers():
    def draws(x, *, approximate):
        torch.rand(5)
        return reference.gelu(x, approximate=approximate)

    backends.register("gelu", "native", implementation("gelu", draws))
    state = torch.get_rng_state()
    prove("gelu", torch.linspace(-1, 1, 12).view(3, 4), approximate="none")
    assert torch.equal(torch.get_rng_state(), state)


class _Refuses(TorchFunctionMode):
    """Lets only the properties of tensors be read."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function.__name__ == "__get__", f"{function} was seen"
        return function(*args, **(kwargs or {}))


def test_modes_and_hooks_see_nothing():
    def seen(tensor):
        raise AssertionError("the proof was seen")

    x = torch.randn(4, 8, requires_grad=True)
    proof = dispatch.proof_of("gelu", x, approximate="none")
    with recorded_operators() as operators, torch.autograd.graph.saved_tensors_hooks(seen, seen), _Refuses():
        proofs.prove(proof)
    assert operators == []


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.float64),
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_proofs_in_any_context(context):
    x = torch.zeros(3, 8, requires_grad=True)
    with context():
        verdict = prove("gelu", x, approximate="none")
        grad_mode, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    assert {trial.flaw for trial in verdict.trials.values()} == {None}
    with context():
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (grad_mode, inference)
    # Nothing that the proof has left is bound to its context.
    assert {trial.flaw for trial in prove("gelu", x, approximate="tanh").trials.values()} == {None}


def test_tensors_of_inference_mode():
    with torch.inference_mode():
        x, convs = torch.randn(2, 12, 6), tuple(conv._replace(weight=conv.weight + 0) for conv in branches())
        assert prove("conv_projection", x, (3, 4), convs, training=False).trials["native"].flaw is None
    with torch.no_grad():
        assert prove("conv_projection", x, (3, 4), convs, training=False).trials["native"].flaw is None


def test_a_branch_without_gradients():
    x, convs = torch.randn(2, 12, 6), branches()
    frozen = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in convs[0])
    backends.register(
        "conv_projection", "native", implementation("conv_projection", reference.conv_projection)
    )
    verdict = prove("conv_projection", x, (3, 4), (ck.ConvBatchNorm(*frozen), convs[1]), training=True)
    assert verdict.trials["native"].flaw is None
    assert verdict.trials["native"].seconds is not None


def test_no_call_of_a_proof_exchanges_data_with_other_processes():
    convs = tuple(conv._replace(process_group=object()) for conv in branches())
    proof = dispatch.proof_of("conv_projection", torch.randn(3, 12, 6), (3, 4), convs, training=True)
    for call in (proof.sample, proof.timed):
        assert call.record.x.shape[0] == 3
        assert all(conv.process_group is None for conv in call.record.convs)


# Timing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milliseconds", "rounds", "chosen"),
    [
        ({"native": [1], "reference": [1.6]}, 3, "native"),
        ({"native": [9, 1, 1], "reference": [1.6]}, 3, "native"),  # the first was interrupted
        ({"native": [1.6], "reference": [1]}, 3, "reference"),
        ({"native": [1], "reference": [3]}, 3, "native"),
        ({"native": [10], "reference": [30]}, 2, "native"),  # no interruption is that long
        ({"native": [20], "reference": [31]}, 2, "native"),
        ({"native": [20], "reference": [51]}, 1, "native"),
        ({"native": [1], "reference": [1.3]}, 5, "native"),
        ({"native": [1], "reference": [1.05]}, 5, "reference"),  # which is the default
        ({"native": [1], "reference": [1.15]}, 40, "native"),
        ({"native": [1], "sdpa": [1.15]}, 40, "native"),  # nor is either of them the default
        ({"native": [10], "sdpa": [19], "reference": [50]}, 3, "native"),
        ({"native": [10], "sdpa": [50], "reference": [11.5]}, 40, "native"),
        ({"native": [(1, 9)], "reference": [(3, 2)]}, 40, "reference"),  # the host takes longer
        ({"native": [(1, 2)], "reference": [(3, 5)]}, 3, "native"),
    ],
)
def test_timing_ends_where_the_winner_is_clear(monkeypatch, milliseconds, rounds, chosen):
    ran = []

    def run_cold(function, device, taken):
        function()
        times = milliseconds[ran[-1]]
        time = times[min(len(taken.device), len(times) - 1)]
        seconds, *host_seconds = time if isinstance(time, tuple) else (time,)
        taken.device.append(seconds / 1000)
        taken.host.extend(each / 1000 for each in host_seconds)
        return 0.0

    monkeypatch.setattr(measure, "_run_cold", run_cold)
    candidates = {name: lambda x, name=name: ran.append(name) for name in milliseconds}
    call = proofs.Call((torch.ones(2, 2),), False)
    trials = proofs.time_in_turns(candidates, call, dict.fromkeys(candidates, trial(None)), "reference")
    assert proofs.choose(trials, "reference").chosen == chosen
    assert ran.count(chosen) == 1 + rounds  # the first run is not timed
    assert [ran.count(name) for name in candidates if milliseconds[name] == [50]] in ([], [1 + 1])


@pytest.mark.parametrize("is_planned", [True, False])
@pytest.mark.parametrize("gradient", [True, False])
def test_what_serves_later_calls_is_timed(is_planned, gradient):
    ran = []

    def prepare(call):
        def serve(x, bias, _):
            ran.append("planned")
            return reference.bias_gelu(x, bias, approximate=call.approximate)

        return serve if is_planned else None

    @backends.prepared_by(prepare)
    def function(call):
        ran.append("by name")
        return reference.bias_gelu(call.x, call.bias, approximate=call.approximate)

    record = backends.operators["bias_gelu"].bind(
        torch.randn(3, 4, requires_grad=gradient), torch.randn(4), approximate="tanh"
    )
    call = proofs.Call(record, gradient)
    trials = dict.fromkeys(("native", "reference"), trial(None))
    proofs.time_in_turns({"native": function, "reference": lambda call: call.x + 1}, call, trials)
    assert set(ran) == {"planned" if is_planned and not gradient else "by name"}


# Choice ---------------------------------------------------------------------------------------------------


def trial(seconds, host_seconds=None, flaw=None):
    return proofs.Trial(0.0, 0.0, seconds, host_seconds, flaw)


def test_the_fastest_is_chosen_if_it_wins_clearly():
    verdict = proofs.choose({"native": trial(1.0), "reference": trial(1.09)}, "reference")
    assert verdict.chosen == verdict.chosen_in_graphs == "reference"
    verdict = proofs.choose({"native": trial(1.0), "reference": trial(1.11)}, "reference")
    assert verdict.chosen == verdict.chosen_in_graphs == "native"


def test_the_host_counts_outside_of_graphs_only():
    trials = {"triton": trial(1.0, 9.0), "reference": trial(3.0, 2.0)}
    verdict = proofs.choose(trials, "reference")
    assert (verdict.chosen, verdict.chosen_in_graphs) == ("reference", "triton")


def test_a_timing_that_was_disturbed_is_noted(monkeypatch):
    for waits in (False, True):
        seconds = itertools.count(step=1e6 * waits)
        monkeypatch.setattr(measure, "waited_seconds", lambda seconds=seconds: next(seconds))
        monkeypatch.setattr(measure, "_is_disturbed", lambda times: False)
        verdict = prove("linear", torch.randn(40, 16), torch.randn(8, 16), None)
        assert verdict.is_unsure is waits


def test_timed_again_what_failed_its_check_stays_out(monkeypatch):
    x = torch.randn(7, 24)
    backends.register("gelu", "native", implementation("gelu", lambda x, **_: pytest.fail("is wrong")))
    backends.register("gelu", "triton", implementation("gelu", reference.gelu))
    proof = dispatch.proof_of("gelu", x, approximate="none")
    wrong, busy = trial(None, flaw="wrong: all of it"), trial(9.0)._replace(is_disturbed=True)
    known = proofs.Verdict("triton", "triton", {"native": wrong, "triton": busy, "reference": trial(10.0)})
    monkeypatch.setattr(measure, "waited_seconds", lambda: 0.0)
    monkeypatch.setattr(measure, "_is_disturbed", lambda times: False)
    again = proofs.time_again(proof, known)
    assert again.trials["native"] == wrong
    assert (again.timings, again.is_unsure) == (2, False)
    assert max(again.trials[name].seconds for name in ("triton", "reference")) < 1.0


def test_a_default_with_a_flaw_is_not_chosen_unless_all_have_one():
    wrong = trial(None, flaw="wrong: all of it")
    assert proofs.choose({"native": trial(5.0), "reference": wrong}, "reference").chosen == "native"
    assert proofs.choose({"sdpa": wrong, "reference": trial(None)}, "sdpa").chosen == "reference"  # not timed
    assert proofs.choose({"native": wrong, "reference": wrong}, "reference").chosen == "reference"
    assert proofs.choose({}, "reference").chosen == "reference"


def test_a_lack_of_memory_is_no_flaw():
    def lacks(x, **_):
        return torch.empty(2**60)

    with pytest.raises(RuntimeError) as caught:
        gelu_flaw(lacks)
    assert proofs.is_out_of_memory(caught.value)
    assert proofs.is_out_of_memory(torch.OutOfMemoryError())
    assert not proofs.is_out_of_memory(RuntimeError("no memory of it"))
