"""Tests of the memory of a call, and of the ceilings."""

import pytest
import torch

from cvt_kernels.tuning import ceilings, clock


@pytest.mark.gpu
def test_a_gpu_is_timed_with_and_without_a_graph():
    x = torch.randn(4096, 4096, device="cuda")
    alone = ceilings.fastest(lambda: x @ x, "cuda")
    replay = clock.graph_replay(lambda: x @ x)
    assert replay is not None
    assert 0.5 < ceilings.fastest(replay, "cuda") / alone < 2


def test_peak_memory_counts_tensors_that_live_at_once():
    def call():
        first = torch.empty(1000, dtype=torch.float64)
        second = torch.empty(500, dtype=torch.float64)
        del first, second
        return torch.empty(1200, dtype=torch.float64)

    assert ceilings.peak_bytes(call, "cpu") == 12000
    assert ceilings.peak_bytes(lambda: None, "cpu") == 0


def test_rates_by_a_clock_that_stands(monkeypatch):
    calls = []

    def fastest(function, device):
        function()
        calls.append(function)
        return 0.5 * len(calls)

    monkeypatch.setattr(ceilings, "fastest", fastest)
    assert ceilings.copy_bandwidth("cpu", 1000) == 2 * 1000 / 0.5
    # The product by a linear layer, and the same by a convolution, which is slower here.
    assert ceilings.product_rate("cpu", torch.float32, 16) == 2 * 16**3 / 1.0
    assert len(calls) == 3
