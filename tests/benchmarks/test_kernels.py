"""Kernels of a profile beside the launches that were noted, and their floors."""

import pytest

from benchmarks import kernels
from benchmarks.floors import Ceilings, ForwardLaunch
from benchmarks.kernels import Kernel


def launch(kernel, operator):
    return ForwardLaunch("", operator, kernel, 10**6, 10**9)


def test_kernels_are_set_beside_their_launches():
    profile = [
        Kernel("_linear_gelu_kernel", 5.0),
        Kernel("Memset (Device)", 1.0),
        Kernel("sm90_xmma_fprop_implicit_gemm", 2.0),
        Kernel("void cvt_kernels::layer_norm_gelu::cuda::layer_norm_kernel<float>(int)", 3.0),
        Kernel("_linear_add_kernel", 4.0),
        Kernel("nvjet_hsh_128x128", 6.0),
    ]
    names = ["linear_gelu", "convolution", "linear_add", "addmm"]
    noted = [launch(name, name if name.startswith("linear") else "PyTorch") for name in names]
    groups = kernels.grouped(profile, noted)
    assert [len(group.kernels) for group in groups] == [1, 3, 1, 1]
    assert [[each.kernel for each in group.launches] for group in groups] == [[name] for name in names]
    row = groups[1].row(Ceilings(copy=1e12, product=1e15))
    assert row["us"] == pytest.approx(6.0)
    assert row["floor_us"] == pytest.approx(1.0)  # memory and products take as long
    assert row["operators"] == ["PyTorch: convolution"]
