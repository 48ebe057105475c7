"""Linear layers in Triton: persistent programs, descriptors, dtypes side by side, launches."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launch
from cvt_kernels.launch import launching
from cvt_kernels.launch.records import Product
from cvt_kernels.ops.linear.triton import autograd
from tests.checks import assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(*shapes, dtype=torch.float32):
    """Returns random tensors; a matrix (outputs, inputs) has a norm that keeps products near 1."""
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    tensors = [t / t.shape[1] ** 0.5 if i == 1 else t for i, t in enumerate(tensors)]
    return [t.to(DEVICE, dtype) for t in tensors]


def make_layer(rows, inputs, outputs, dtype=torch.float32):
    """Returns x, weight, bias and a residual."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    return make((*rows, inputs), (outputs, inputs), (outputs,), (*rows, outputs), dtype=dtype)


def wide(tensors):
    return [None if t is None else t.double() for t in tensors]


def assert_agree(function, tensors, *, floor=1.0, **options):
    """Compares a call by Triton with one by PyTorch's own operators, both against float64."""
    with ck.use_backend("triton"):
        ours = function(*tensors, **options)
    with ck.use_backend("reference"):
        wide_options = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
        theirs, exact = function(*tensors, **options), function(*wide(tensors), **wide_options)
    if not isinstance(ours, tuple):
        ours, theirs, exact = (ours,), (theirs,), (exact,)
    for results in zip(ours, theirs, exact, strict=True):
        assert results[0].is_contiguous()
        if results[0].dtype == torch.float64:
            torch.testing.assert_close(results[0], results[2], rtol=1e-11, atol=1e-11)
        else:
            assert_accurate(*results, floor=floor)


def launches_of(function, *args, chip=None, **options):
    """Returns the launches of a call by Triton, which start unless they are planned for another chip."""
    launches = []

    def take(launch):
        launches.append(launch)
        if chip is None:
            launch.start()

    with launching.intercepted_launches(take, chip), ck.use_backend("triton"):
        function(*args, **options)
    return launches


def test_many_tiles_in_one_program():
    """A persistent program goes from row to row of tiles, and the last ones of both are not whole."""
    x, weight, bias, _ = make_layer(140, 24, 520, torch.float16)
    (launch,) = launches_of(ck.linear_gelu, x, weight, bias, approximate="quick")
    if DEVICE == "cpu":
        assert launch.arguments["SPEC"].is_persistent
        assert (launch.grid, launch.arguments["tiles"]) == ((2,), 18)
    assert_agree(ck.linear_gelu, [x, weight, bias], approximate="quick")


def test_weights_that_are_not_aligned_are_read_without_descriptors():
    x, weight, bias, residual = make_layer((4, 6), 32, 32, torch.float16)
    unaligned = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view_as(weight)
    (launch,) = launches_of(ck.linear_add, x, unaligned, bias, residual)
    assert not launch.arguments["SPEC"].has_descriptors
    assert_agree(ck.linear_add, [x, unaligned, bias, residual])


def test_float32_parameters_of_the_norm_beside_16_bits():
    """Under autocast the model's own are float32."""
    tensors = make_layer(20, 24, 48, torch.bfloat16)
    norm = [torch.randn(48, device=DEVICE) for _ in range(3)]
    bind = backends.operators["linear_add_layer_norm"].bind
    h, y = autograd.linear_add_layer_norm(bind(*tensors, *norm[:2], shift=norm[2]))
    narrow = [t.bfloat16() for t in norm]
    with ck.use_backend("reference"):
        _, same = ck.linear_add_layer_norm(*tensors, *narrow[:2], shift=narrow[2])
        _, exact = ck.linear_add_layer_norm(*wide([*tensors, *norm[:2]]), shift=norm[2].double())
    assert h.dtype == y.dtype == torch.bfloat16
    assert_accurate(y, same, exact)


def test_rows_far_from_zero():
    """The variance is the mean of squared differences, which a large mean does not swallow."""
    x, weight, bias, residual = make_layer(16, 24, 64)
    assert_agree(ck.linear_add_layer_norm, [x, weight, bias, residual + 1000], floor=4)


# Gradients ------------------------------------------------------------------------------------------------


def test_what_gelu_is_applied_to_is_written_for_gradients_only():
    x, weight, bias, _ = make_layer(4, 8, 16)
    compiled = torch.compile(ck.linear_gelu, fullgraph=True, backend="aot_eager")
    for function, context, x_given, expected in (
        (ck.linear_gelu, nullcontext(), x, False),
        (compiled, nullcontext(), x, False),
        (ck.linear_gelu, torch.no_grad(), x.clone().requires_grad_(), False),
        (ck.linear_gelu, nullcontext(), x.clone().requires_grad_(), True),
        (compiled, nullcontext(), x.clone().requires_grad_(), True),
    ):
        with context:
            (launch,) = launches_of(function, x_given, weight, bias)
        assert (launch.arguments["pre"] is not None) == expected


# Calls and configurations ---------------------------------------------------------------------------------


def test_other_configurations():
    x, weight, bias, residual = make_layer(70, 40, 100, torch.float16)
    config = Product(block_m=16, width=32, parts=2, block_k=16, num_warps=4, num_stages=2)
    (usual,) = launches_of(ck.linear_add, x, weight, bias, residual)
    with launch.overridden("linear_add", config):
        (other,) = launches_of(ck.linear_add, x, weight, bias, residual)
        assert_agree(ck.linear_add, [x, weight, bias, residual])
    specs = [launch.arguments["SPEC"] for launch in (usual, other)]
    assert [(spec.block_m, spec.width * spec.parts, spec.columns) for spec in specs][1] == (16, 64, 2)
    assert specs[0] != specs[1]
    with launch.overridden("linear_gelu", dataclasses.replace(config, parts=1, programs=3)):
        assert_agree(ck.linear_gelu, [x, weight, bias])


@pytest.mark.parametrize("operator", [ck.linear_add, ck.linear_add_layer_norm])
def test_a_stream_of_float32_is_written_in_place_under_autocast(operator):
    x, weight, bias, residual = make_layer((2, 30), 32, 64, torch.float32)
    stream = residual.clone()
    with torch.autocast(DEVICE, torch.bfloat16):
        with ck.use_backend("triton"):
            out = operator(x, weight, bias, stream, inplace=True)
        with ck.use_backend("reference"):
            same = operator(x, weight, bias, residual)
    assert (out[0] if isinstance(out, tuple) else out) is stream
    torch.testing.assert_close(out, same, rtol=0.05, atol=0.05)
