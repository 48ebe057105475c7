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
from tests.contract.examples import assert_right, made_of, run_guarded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(operator, rows, channels, outputs, **settings):
    sizes = {"leading": "rows", "rows": rows, "channels": channels, "outputs": outputs}
    return made_of(operator, "triton", **sizes, gradient="none", **settings)


def replaced(made, **fields):
    """Replaces arguments of a call."""
    return made._replace(call=made.call._replace(record=made.call.record._replace(**fields)))


def launch_of(made):
    """Fails unless a call is right; returns the arguments of its launch."""
    launches = []

    def take(launch):
        launches.append(launch)
        launch.start()

    with launching.intercepted_launches(take):
        results = run_guarded(made)
    assert_right(made, results)
    (launched,) = launches
    return launched


def test_many_tiles_in_one_program():
    """A persistent program goes from row to row of tiles, and the last ones of both are not whole."""
    launched = launch_of(made("linear_gelu", 140, 24, 520, approximate="quick", dtype="float16"))
    if DEVICE == "cpu":
        assert launched.arguments["SPEC"].is_persistent
        assert (launched.grid, launched.arguments["tiles"]) == ((2,), 18)


def test_weights_that_are_not_aligned_are_read_without_descriptors():
    aligned = made("linear_add", 24, 32, 32, dtype="float16")
    weight = aligned.call.record.weight
    unaligned = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view_as(weight)
    assert not launch_of(replaced(aligned, weight=unaligned)).arguments["SPEC"].has_descriptors


def test_float32_parameters_of_the_norm_beside_16_bits():
    """Under autocast the model's own are float32."""
    tensors = made("linear_add_layer_norm", 20, 24, 48, dtype="bfloat16").call.record[:4]
    norm = [torch.randn(48, device=DEVICE) for _ in range(3)]
    bind = backends.operators["linear_add_layer_norm"].bind
    h, y = autograd.linear_add_layer_norm(bind(*tensors, *norm[:2], shift=norm[2]))
    narrow, wide = [t.bfloat16() for t in norm], [t.double() for t in (*tensors, *norm)]
    with ck.use_backend("reference"):
        _, same = ck.linear_add_layer_norm(*tensors, *narrow[:2], shift=narrow[2])
        _, exact = ck.linear_add_layer_norm(*wide[:6], shift=wide[6])
    assert h.dtype == y.dtype == torch.bfloat16
    assert_accurate(y, same, exact)


def test_rows_far_from_zero():
    """The variance is the mean of squared differences, which a large mean does not swallow."""
    usual = made("linear_add_layer_norm", 16, 24, 64)
    launch_of(replaced(usual, residual=usual.call.record.residual + 1000))


# Gradients ------------------------------------------------------------------------------------------------


def test_what_gelu_is_applied_to_is_written_for_gradients_only():
    x, weight, bias = made("linear_gelu", 4, 8, 16).call.record[:3]
    launches, compiled = [], torch.compile(ck.linear_gelu, fullgraph=True, backend="aot_eager")
    for function, context, x_given, expected in (
        (ck.linear_gelu, nullcontext(), x, False),
        (compiled, nullcontext(), x, False),
        (ck.linear_gelu, torch.no_grad(), x.clone().requires_grad_(), False),
        (ck.linear_gelu, nullcontext(), x.clone().requires_grad_(), True),
        (compiled, nullcontext(), x.clone().requires_grad_(), True),
    ):
        launched = launching.intercepted_launches(lambda launch: launches.append(launch) or launch.start())
        with context, launched, ck.use_backend("triton"):
            function(x_given, weight, bias)
        launch = launches.pop()
        assert not launches
        assert (launch.arguments["pre"] is not None) == expected


# Calls and configurations ---------------------------------------------------------------------------------


def test_other_configurations():
    call = made("linear_add", 70, 40, 100, dtype="float16")
    config = Product(block_m=16, width=32, parts=2, block_k=16, num_warps=4, num_stages=2)
    usual = launch_of(call).arguments["SPEC"]
    with launch.overridden("linear_add", config):
        spec = launch_of(call).arguments["SPEC"]
    assert (spec.block_m, spec.width * spec.parts, spec.columns) == (16, 64, 2)
    assert spec != usual
    with launch.overridden("linear_gelu", dataclasses.replace(config, parts=1, programs=3)):
        launch_of(made("linear_gelu", 70, 40, 100, dtype="float16"))


@pytest.mark.parametrize("operator", [ck.linear_add, ck.linear_add_layer_norm])
def test_a_stream_of_float32_is_written_in_place_under_autocast(operator):
    x, weight, bias, residual = made("linear_add", 60, 32, 64).call.record[:4]
    stream = residual.clone()
    with torch.autocast(DEVICE, torch.bfloat16):
        with ck.use_backend("triton"):
            out = operator(x, weight, bias, stream, inplace=True)
        with ck.use_backend("reference"):
            same = operator(x, weight, bias, residual)
    assert (out[0] if isinstance(out, tuple) else out) is stream
    torch.testing.assert_close(out, same, rtol=0.05, atol=0.05)
