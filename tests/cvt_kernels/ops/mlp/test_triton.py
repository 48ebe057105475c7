"""The MLP in Triton: a shift of float32, several tiles of a program, fast GELU."""

import pytest
import torch

from cvt_kernels import launch
from cvt_kernels.launch.records import Mlp
from cvt_kernels.ops import triton_gelu
from tests.contract.examples import assert_agrees, assert_right, made_of, run_guarded


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shift_may_be_float32(dtype):
    made = made_of("layer_norm_mlp", "triton", dtype=dtype, shifted=True)
    shift = torch.randn_like(made.call.record.shift, dtype=torch.float32)
    made = made._replace(call=made.call._replace(record=made.call.record._replace(shift=shift)))
    assert_right(made, run_guarded(made))


@pytest.mark.parametrize(("kernel", "dtype"), [("fwd_resident", "float16"), ("fwd", "float32")])
def test_programs_take_several_tiles(kernel, dtype):
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("weights are resident on sm_90")
    config = Mlp(resident=kernel == "fwd_resident", block_rows=16, block_hidden=32, num_warps=4)
    with launch.overridden("layer_norm_mlp", config):
        settings = {"leading": "rows", "rows": 100, "channels": 24, "outputs": 80}
        assert_agrees("layer_norm_mlp", "triton", **settings, dtype=dtype)


def test_fast_exact_gelu_is_exact_enough():
    """The polynomial inside of tanh, without the GPU's approximation of tanh itself."""
    x = torch.linspace(-20, 20, 40001, dtype=torch.float64)
    half = x / 2
    square = (half * half).clamp(max=triton_gelu.LARGEST_SQUARE.value)
    linear, cubic, quintic = (
        getattr(triton_gelu, f"ERF_{name}").value for name in ("LINEAR", "CUBIC", "QUINTIC")
    )
    approximated = half + half * torch.tanh(half * (linear + square * (cubic + square * quintic)))
    exact = torch.nn.functional.gelu(x)
    assert (approximated - exact).abs().max() < 2.7e-5
