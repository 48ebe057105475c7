"""Packed copies of weights: which steps of optimizers outdate them, and when they are kept on a GPU."""

import types

import pytest
import torch
from torch import nn

from cvt_kernels.ops import weight_cache


def test_a_step_of_other_parameters_outdates_nothing():
    weight, student = torch.ones(2, 2), nn.Linear(2, 2)
    assert weight_cache.packed(weight, "another", lambda: 1) == 1
    student(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(student.parameters(), lr=0.1, fused=True).step()
    assert weight_cache.packed(weight, "another", lambda: 2) == 1


def test_numbers_that_are_none_are_no_change():
    weight = torch.full((2, 2), float("nan"))
    assert weight_cache.packed(weight, "nan", lambda: 1) == 1
    assert weight_cache.packed(weight, "nan", lambda: 2) == 1
    weight.data[0, 0] = 1.0
    assert weight_cache.packed(weight, "nan", lambda: 3) == 3


class _Subclass(nn.Parameter):
    """A parameter of a subclass, as in FSDP2."""


def _as_fsdp1_marks_it(parameter):
    parameter._fsdp_flattened = True
    return parameter


@pytest.mark.parametrize("shard", [_Subclass, _as_fsdp1_marks_it])
def test_a_step_of_sharded_parameters_outdates_everything(shard):
    """A module computes with a gathered copy, which the optimizer does not hold."""
    weight = torch.ones(2, 2)
    assert weight_cache.packed(weight, "a", lambda: 1) == 1
    torch.optim.SGD([shard(nn.Parameter(torch.ones(2)))], lr=0.1).step()
    assert weight_cache.packed(weight, "a", lambda: 2) == 2


# On a GPU -------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True

    def record_stream(self, stream):
        self.readers = [*getattr(self, "readers", []), stream.name]


class Stream:
    """A stream that notes when somebody waits for it."""

    device = torch.device("cpu")

    def __init__(self, name):
        self.name, self.waits = name, 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch):
    """Puts switches in the place of CUDA's state: the current stream, and whether it is captured."""
    state = types.SimpleNamespace(stream=Stream("first"), captures=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    return state


def test_only_frozen_models_keep_copies_on_a_gpu(gpu):
    """Nobody could see in time that the weights of others were written through ``.data``."""
    weight, made = torch.randn(3).as_subclass(OnGpu), []

    def copy():
        return weight_cache.packed(weight, "a test", lambda: made.append(0) or len(made))

    assert [copy(), copy()] == [1, 2]
    with weight_cache.kept_on_gpu():
        assert [copy(), copy()] == [3, 3]
    assert copy() == 4


def test_a_graph_of_the_users_reads_no_cached_copy(gpu):
    """It would read it for ever; graphed looks at the weights before each replay."""
    weight, made = torch.randn(3).as_subclass(OnGpu), []

    def copy():
        with weight_cache.kept_on_gpu():
            return weight_cache.packed(weight, "a test", lambda: made.append(0) or len(made))

    assert [copy(), copy()] == [1, 1]
    gpu.captures = True
    assert [copy(), copy()] == [2, 3]
    with weight_cache.noted_uses():
        assert copy() == 1
        weight.add_(1)
        assert [copy(), copy()] == [4, 5]  # made in the capture, and not kept
    gpu.captures = False
    assert [copy(), copy()] == [6, 6]


def test_copies_on_a_gpu_are_written_before_any_stream_reads_them(gpu):
    """And their memory is not used again before every stream that has read it is done."""
    weight, first = torch.randn(3).as_subclass(OnGpu), gpu.stream

    def copy():
        with weight_cache.kept_on_gpu():
            return weight_cache.packed(weight, "a test", lambda: (torch.zeros(3).as_subclass(OnGpu), 1))

    made = copy()[0]
    assert copy()[0] is made
    assert first.waits == 1
    gpu.stream = Stream("second")
    assert copy()[0] is made
    assert made.readers == ["second"]
    assert gpu.stream.waits == 0
    weight.add_(1)
    gpu.captures = True
    copy()
    assert gpu.stream.waits == 0  # which a capture forbids
