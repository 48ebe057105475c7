"""The MLP in Triton: a shift of float32, several tiles, launches by generation, fast GELU."""

import pytest
import torch

import cvt_kernels as ck
from benchmarks import floors
from cvt.tools.commands.compile import launches
from cvt_kernels import launch
from cvt_kernels.launch import launching
from cvt_kernels.launch.records import Mlp
from cvt_kernels.ops import triton_gelu
from cvt_kernels.ops.mlp.triton import forward
from tests.checks import WIDEST, assert_accurate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_AND_SINGLE = [torch.float16, torch.bfloat16, torch.float32]
PARAMETERS = ("norm_weight", "norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")


def make(rows, channels, hidden, *, dtype=WIDEST, absent=()):
    """Returns (x, parameters in the order of the operator) in the dtype; ``absent`` ones are None."""
    shapes = (channels,), (channels,), (hidden, channels), (hidden,), (channels, hidden), (channels,)
    scales = 0.3, 0.5, channels**-0.5, 0.5, hidden**-0.5, 0.5
    x = 2 * torch.randn(rows, channels, dtype=torch.float64) + 1
    tensors = [torch.randn(s, dtype=torch.float64) * k for s, k in zip(shapes, scales, strict=True)]
    tensors[0] += 1
    tensors = [None if name in absent else t for name, t in zip(PARAMETERS, tensors, strict=True)]
    return [None if t is None else t.to(DEVICE, dtype) for t in (x, *tensors)]


def run(backend, tensors, *, double=False, **settings):
    if double:
        tensors = [None if t is None else t.double() for t in tensors]
        settings = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in settings.items()}
    with ck.use_backend(backend), torch.no_grad():
        return ck.layer_norm_mlp(*tensors, **settings)


def assert_backends_agree(tensors, **settings):
    ours, exact = run("triton", tensors, **settings), run("reference", tensors, double=True, **settings)
    assert ours.dtype == tensors[0].dtype
    assert ours.is_contiguous()
    if ours.dtype == torch.float64:
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_accurate(ours, run("reference", tensors, **settings), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shift_may_be_float32(dtype):
    assert_backends_agree(make(20, 24, 48, dtype=dtype), shift=torch.randn(24, device=DEVICE))


@pytest.mark.parametrize(("kernel", "dtype"), [("fwd_resident", torch.float16), ("fwd", torch.float32)])
def test_programs_take_several_tiles(kernel, dtype):
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("weights are resident on sm_90")
    config = Mlp(resident=kernel == "fwd_resident", block_rows=16, block_hidden=32, num_warps=4)
    with launch.overridden("layer_norm_mlp", config):
        assert_backends_agree(make(100, 24, 80, dtype=dtype))


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
def test_launches_of_every_generation(capability, dtype):
    x = torch.empty(1000, 64, dtype=dtype, device="meta")
    weight = torch.empty(256, 64, dtype=dtype, device="meta")
    chip = launching.Chip(capability, 10)
    with launching.recorded_launches(chip) as launches:
        forward.layer_norm_mlp_forward(
            x, None, None, weight, None, weight.t(), None, None, 1e-5, "none", dtype
        )
    (launch,) = launches
    kernel = "fwd_resident" if capability == 90 and dtype != torch.float32 else "fwd"
    assert launch.kernel.__name__ == f"_layer_norm_mlp_{kernel}_kernel"
    tiles = -(-1000 // launch.arguments["BLOCK_ROWS"])
    assert launch.grid[0] in (tiles, min(tiles, 10), min(tiles, 20))


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


def test_work():
    stage = launches.stages_of("cvt_13")[0]
    record = launches.TRITON_OPERATORS["layer_norm_mlp"]
    (found,) = record(stage, torch.bfloat16, launching.Chip(90, 132), training=False)
    described, rows = floors.work_of(found), 256 * 56 * 56
    assert described.bytes == 2 * (2 * rows * 64 + 2 * 64 * 256)
    assert described.flops == 4 * rows * 64 * 256
