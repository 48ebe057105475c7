"""PyTorch's own ways to a linear layer of 8-bit numbers, against the reference."""

import pytest
import torch

from cvt_kernels import backends, reference
from cvt_kernels.ops.linear_int8 import primitives

bind = backends.operators["linear_int8"].bind


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def arguments(dtype, rows=(3, 20), outputs=40, inputs=100):
    weight, scales = reference.quantize_rows(torch.randn(outputs, inputs) / inputs**0.5)
    x, residual = torch.randn(*rows, inputs).to(dtype), torch.randn(*rows, outputs).to(dtype)
    return x, weight, scales.flatten(), torch.randn(outputs).to(dtype), residual


def test_int_mm_is_followed_by_scales_bias_gelu_and_residual(monkeypatch):
    def int_mm(a, b):  # what PyTorch's documentation says of it; on a CPU without VNNI it is not exact
        return (a.long() @ b.long()).int()

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    *args, residual = arguments(torch.float32)
    others = {"approximate": "quick", "residual": residual, "dtype": torch.float32}
    got = primitives.by_int_mm(bind(*args, **others))
    torch.testing.assert_close(got, reference.linear_int8(*args, **others), rtol=1e-5, atol=1e-5)


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
        (primitives.why_int_mm_unsupported, tensors(rows=17), torch.float32, None),
        (primitives.why_int_mm_unsupported, tensors(), torch.float32, "17 rows or more"),
        (primitives.why_int_mm_unsupported, tensors(17, outputs=12), torch.float32, "multiples of 8"),
        (primitives.why_int_mm_unsupported, tensors(17, inputs=36), torch.float32, "multiples of 8"),
        (primitives.why_int_mm_unsupported, tensors(dtype=float8), torch.float32, "multiplies int8 only"),
        (primitives.why_int_mm_unsupported, tensors(), torch.float64, "not for float64"),
        (primitives.why_int_mm_unsupported, tensors(rows=0), torch.float32, "empty tensors"),
        (primitives.why_scaled_mm_unsupported, tensors(dtype=float8), torch.bfloat16, None),
        (primitives.why_scaled_mm_unsupported, tensors(), torch.bfloat16, "multiplies float8_e4m3fn only"),
        (primitives.why_scaled_mm_unsupported, tensors(dtype=float8), torch.half, "results of bfloat16 only"),
        (primitives.why_scaled_mm_unsupported, tensors(outputs=8, dtype=float8), torch.bfloat16, "of 16"),
    ):
        reason = ask(bind(*args, dtype=dtype))
        assert reason is None if expected is None else expected in reason


def test_reasons_of_machines(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU" in primitives.why_scaled_mm_unavailable("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, served in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert (primitives.why_scaled_mm_unavailable("cuda") is None) == served
