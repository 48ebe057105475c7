"""Functions that launch kernels, and that graphs of torch.compile call as operators."""

import pytest
import torch
from torch import Tensor

from cvt.tools.commands.compile import launches
from cvt_kernels.launch import launching
from cvt_kernels.ops.graph_operators import launcher
from tests.checks import recorded_operators


def allocated(x: Tensor, scale: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float64)


@launcher("test_scaled", allocated)
def scaled(x: Tensor, scale: float) -> Tensor:
    """Returns scale · x."""
    return allocated(x, scale).copy_(x.detach()).mul_(scale)


@launcher("test_double_", mutates=("x", "others"))
def double_(x: Tensor, others: list[Tensor]) -> None:
    """Doubles tensors, without autograd's knowledge."""
    for each in (x, *others):
        each.data.mul_(2)


def test_a_launcher_is_called_directly():
    with recorded_operators() as called:
        assert torch.equal(scaled(torch.ones(3), 2.0), torch.full((3,), 2.0, dtype=torch.float64))
    assert called
    assert "cvt_kernels.test_scaled.default" not in called
    assert scaled.__doc__ == "Returns scale · x."


def test_graphs_call_its_operator():
    graphs = []

    def backend(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    compiled = torch.compile(lambda x: scaled(x, 3.0), backend=backend, fullgraph=True)
    x = torch.randn(4)
    assert torch.equal(compiled(x), x.double() * 3)
    assert graphs == [["cvt_kernels.test_scaled.default"]]


def test_shapes_may_change_in_a_graph():
    compiled = torch.compile(lambda x: scaled(x, 3.0) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (4, 7):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(x), x.double() * 3 + 1)


@pytest.mark.parametrize("run", [double_, torch.ops.cvt_kernels.test_double_.default], ids=["call", "op"])
def test_changes_of_what_is_written_to_are_counted(run):
    x, y, z = (torch.ones(2) for _ in range(3))
    versions = [each._version for each in (x, y, z)]
    run(x, [y, z])
    assert [each._version - before for each, before in zip((x, y, z), versions, strict=True)] == [1, 1, 1]
    assert [each[0].item() for each in (x, y, z)] == [2, 2, 2]
    with torch.inference_mode():
        inference = torch.ones(2)
    run(inference, [])  # whose changes are not counted
    assert inference[0].item() == 2


#: The arguments that another launch goes on with.
HANDED_ON = {f"{name}_ptr" for name in ("partial", "counts", "mean", "var", "delta", "dtiles", "scratch")}


@pytest.mark.parametrize("operator", launches.TRITON_OPERATORS)
def test_sums_that_other_launches_go_on_with_are_float32(operator):
    """Beside tensors of 16 bits; sums of few tiles would hardly show it if they were narrower."""
    record, chip = launches.TRITON_OPERATORS[operator], launching.Chip(90, 132)
    for model in ("cvt_13", "segformer_b0"):
        stage = launches.stages_of(model, launches.image_size_of(model))[0]
        for launch in record(stage, torch.bfloat16, chip, batch=4, training=True):
            given = {name: launch.arguments[name] for name in HANDED_ON & set(launch.arguments)}
            dtypes = {name: tensor.dtype for name, tensor in given.items() if tensor is not None}
            assert set(dtypes.values()) <= {torch.float32}, (launch.kernel.__name__, dtypes)
