"""PyTorch's own ways to a linear layer of 8-bit numbers, against the reference."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.ops.linear_int8 import primitives
from tests.processes import run_python

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
exact = pytest.mark.skipif(
    primitives.why_int_mm_unavailable("cpu") is not None, reason="PyTorch has no exact products of int8 here"
)
BACKENDS = [pytest.param("int_mm", marks=exact), pytest.param("onednn", marks=exact)]

bind = backends.operators["linear_int8"].bind


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def arguments(dtype, rows=(3, 20), outputs=40, inputs=100):
    weight, scales = reference.quantize_rows(torch.randn(outputs, inputs) / inputs**0.5)
    x, residual = torch.randn(*rows, inputs).to(dtype), torch.randn(*rows, outputs).to(dtype)
    return x, weight, scales.flatten(), torch.randn(outputs).to(dtype), residual


def call(backend, x, *others, **settings):
    with ck.use_backend(backend):
        return ck.linear_int8(x, *others, **settings)


@exact
@pytest.mark.parametrize("backend", ["int_mm", "onednn"])
@pytest.mark.parametrize("inputs", [2, 7, 64, 1000, 65536])
def test_products_are_exact(backend, inputs):
    rows = torch.randint(-127, 128, (4, inputs), dtype=torch.int8)
    rows[0], rows[1] = 127, -127
    weight = rows.repeat(5, 1)
    quantized = ck.QuantizedRows(rows, torch.ones(4, 1))
    got = call(backend, quantized, weight, torch.ones(20))
    assert torch.equal(got, (rows.long() @ weight.long().t()).float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_finite_are_nan_and_no_others(backend):
    x, weight, scales, bias, residual = arguments(torch.float32, (30,))
    x[3, 5], x[17, 99], x[20, 0], x[25] = float("nan"), float("inf"), -float("inf"), 0
    out = call(backend, x, weight, scales, bias, residual=residual, approximate="quick")
    assert out.isnan().all(1).nonzero().flatten().tolist() == [3, 17, 20]
    assert out.isnan().sum() == 3 * 40
    rows = reference.quantize_rows(x)
    assert torch.equal(call(backend, rows, weight, scales, bias).isnan().all(1), out.isnan().all(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_other_strides(backend):
    x, weight, scales, _, _ = arguments(torch.float32)
    for view in (weight.t().contiguous().t(), torch.stack([weight, weight], -1)[..., 1]):
        got = call(backend, x, view, scales)
        expected = reference.linear_int8(x, weight, scales)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_scaled_mm_scales_rows_and_outputs(monkeypatch):
    def scaled_mm(a, b, scale_a, scale_b, *, bias, out_dtype):  # what PyTorch's documentation says of it
        assert (a.dtype, b.dtype, b.stride(0)) == (torch.float8_e4m3fn, torch.float8_e4m3fn, 1)
        assert (scale_a.shape, scale_b.shape) == ((a.shape[0], 1), (1, b.shape[1]))
        return (a.float() @ b.float() * scale_a * scale_b + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    x, residual = torch.randn(2, 3, 32).bfloat16(), torch.randn(2, 3, 48).bfloat16()
    weight, scales = reference.quantize_rows(torch.randn(48, 32), dtype=torch.float8_e4m3fn)
    args = x, weight, scales.flatten(), torch.randn(48).bfloat16()
    others = {"approximate": "quick", "residual": residual, "dtype": torch.bfloat16}
    got = primitives.by_scaled_mm(bind(*args, **others))
    expected = reference.linear_int8(*args, **others)
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


# Calls that they do not serve -----------------------------------------------------------------------------


def tensors(rows=4, outputs=16, inputs=32, dtype=torch.int8, device="meta"):
    x = torch.empty(rows, inputs, device=device)
    return (
        x,
        torch.empty(outputs, inputs, dtype=dtype, device=device),
        torch.empty(outputs, device=device),
        None,
    )


def test_reasons_of_calls():
    float8 = torch.float8_e4m3fn
    for ask, args, dtype, expected in (
        (primitives.why_int_mm_unsupported, tensors(), torch.float32, None),
        (primitives.why_int_mm_unsupported, tensors(dtype=float8), torch.float32, "multiplies int8 only"),
        (primitives.why_int_mm_unsupported, tensors(), torch.float64, "not for float64"),
        (primitives.why_int_mm_unsupported, tensors(rows=0), torch.float32, "empty tensors"),
        (primitives.why_int_mm_unsupported, tensors(inputs=1), torch.float32, "two inputs or more"),
        (primitives.why_onednn_unsupported, tensors(device="cpu"), torch.half, None),
        (primitives.why_onednn_unsupported, tensors(dtype=float8), torch.half, "multiplies int8 only"),
        (primitives.why_scaled_mm_unsupported, tensors(dtype=float8), torch.bfloat16, None),
        (primitives.why_scaled_mm_unsupported, tensors(), torch.bfloat16, "multiplies float8_e4m3fn only"),
        (primitives.why_scaled_mm_unsupported, tensors(dtype=float8), torch.half, "results of bfloat16 only"),
        (primitives.why_scaled_mm_unsupported, tensors(outputs=8, dtype=float8), torch.bfloat16, "of 16"),
    ):
        reason = ask(bind(*args, dtype=dtype))
        assert reason is None if expected is None else expected in reason


class OnGpu(torch.Tensor):
    """Says of itself that it is on a GPU."""

    is_cuda = True


def test_int_mm_on_a_gpu_wants_rows_and_multiples_of_eight():
    for rows, outputs, inputs, expected in (
        (17, 16, 32, None),
        (16, 16, 32, "17 rows or more"),
        (17, 12, 32, "multiples of 8"),
        (17, 16, 36, "multiples of 8"),
    ):
        x, *others = tensors(rows, outputs, inputs, device="cpu")
        call = bind(x.as_subclass(OnGpu), *others, dtype=torch.half)
        reason = primitives.why_int_mm_unsupported(call)
        assert reason is None if expected is None else expected in reason


#: Multiplies the largest numbers, or prints why a backend does not.
LARGEST = """
import torch, cvt_kernels as ck

x, weight, scale = torch.full((16, 64), 127.0), torch.full((16, 64), 127, dtype=torch.int8), torch.ones(16)
for backend in ("int_mm", "onednn"):
    try:
        with ck.use_backend(backend, "reference"):
            out = ck.linear_int8(x, weight, scale)
        assert (out == 64 * 127 * 127).all(), f"{backend}: {out}"
        with ck.use_backend(backend):
            ck.linear_int8(x, weight, scale)
        print(backend, "serves")
    except ck.BackendUnavailable as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ONEDNN_MAX_CPU_ISA", "AVX2"), ("DNNL_MAX_CPU_ISA", "avx512_core"), ("ONEDNN_MAX_CPU_ISA", "ALL")],
)
def test_products_are_exact_whatever_onednn_is_held_to(variable, value):
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    child = run_python(LARGEST, **dict.fromkeys(names, "") | {variable: value})
    assert child.returncode == 0, child.stderr
    if torch.cpu._is_vnni_supported():
        told = "serves" if value == "ALL" else f"{variable} is {value}, and without VNNI"
        assert child.stdout.count(told) == 2, child.stdout


def test_reasons_of_machines(monkeypatch):
    for variable in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    assert "no VNNI" in primitives.why_int_mm_unavailable("cpu")
    assert "no VNNI" in primitives.why_onednn_unavailable("cpu")
    assert primitives.why_int_mm_unavailable("cuda") is None
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    monkeypatch.setattr(primitives, "_library", lambda: None)
    assert "no packed linear layers" in primitives.why_onednn_unavailable("cpu")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "no oneDNN" in primitives.why_int_mm_unavailable("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU" in primitives.why_scaled_mm_unavailable("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, served in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert (primitives.why_scaled_mm_unavailable("cuda") is None) == served
