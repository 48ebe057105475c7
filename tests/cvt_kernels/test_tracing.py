"""The public operators where torch.jit.trace and torch.export record them."""

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.records import ConvBatchNorm
from tests.contract.examples import EXAMPLES, example
from tests.fuzz.judge import call_public

pytestmark = [pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")]

CASES = [(operator, "usual") for operator in backends.operators]
CASES += [
    ("transformer_block", "SegFormer"),
    ("linear_add", "inplace=True"),
    ("attention", "position"),
    ("transformer_block", "rows"),
]
every_operator = pytest.mark.parametrize(("operator", "name"), CASES)


class Model(nn.Module):
    """An operator as a function of the tensors of its arguments."""

    def __init__(self, operator, name="usual"):
        super().__init__()
        self.operator, self.name = operator, name
        self.call = example(operator, "reference", name).call

    def inputs(self, images=None):
        """Returns the tensors of the example, or of one of another number of images."""
        size = (
            {}
            if images is None
            else {"rows" if "rows" in EXAMPLES[self.operator]["usual"] else "batch": images}
        )
        return tuple(example(self.operator, "reference", self.name, **size).call.map(torch.clone).tensors())

    def forward(self, *tensors):
        given = iter(tensors)
        return call_public(self.operator, self.call.map(lambda _: next(given)).record)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def assert_recorded(recorded, model):
    """Fails unless nothing is remembered, and another number of images gives the same results."""
    assert (backends.dispatch_cache, ck.fallbacks()) == ({}, {})
    inputs = model.inputs(5)
    with ck.use_backend("sdpa", "reference"):
        expected = model(*(tensor.clone() for tensor in inputs))
    assert_same(recorded(*inputs), expected)


@torch.no_grad()
@every_operator
def test_traces_hold_pytorchs_own(operator, name):
    model = Model(operator, name)
    traced = torch.jit.trace(model, model.inputs(), check_trace=False)
    kinds = {node.kind().partition("::")[0] for node in traced.inlined_graph.nodes()}
    assert kinds <= {"aten", "prim"}
    assert_recorded(traced, model)


@torch.no_grad()
@every_operator
def test_exported_programs_hold_pytorchs_own(operator, name):
    model = Model(operator, name)
    inputs, others = model.inputs(), model.inputs(5)
    sizes = [
        {i: torch.export.Dim.AUTO for i, (a, b) in enumerate(zip(t.shape, u.shape, strict=True)) if a != b}
        for t, u in zip(inputs, others, strict=True)
    ]
    program = torch.export.export(model, inputs, dynamic_shapes=(tuple(sizes),))
    assert not [node for node in program.graph.nodes if "cvt_kernels" in str(node.target)]
    assert_recorded(program.module(), model)


def test_traces_have_gradients():
    model = Model("conv_projection")
    x, *others = model.inputs()
    traced = torch.jit.trace(model, (x.clone().requires_grad_(), *others), check_trace=False)
    gradients = []
    with ck.use_backend("reference"):
        for run in (traced, model):
            leaf = x.clone().requires_grad_()
            run(leaf, *others)[0].sin().sum().backward()
            gradients.append(leaf.grad)
    assert_same(*gradients)


@torch.no_grad()
def test_training_can_be_traced():
    x, bn = torch.rand(2, 13, 8), nn.BatchNorm2d(8)
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)

    class Training(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = conv, bn

        def forward(self, x):
            return ck.conv_projection(x, (4, 3), [ConvBatchNorm.from_modules(conv, bn)], training=True)[0]

    model = Training()
    traced = torch.jit.trace(model, x, check_trace=False)
    before = int(bn.num_batches_tracked)
    out = traced(x)
    assert int(bn.num_batches_tracked) == before + 1
    with ck.use_backend("reference"):
        assert_same(out, model(x))


@torch.no_grad()
def test_requested_kernels_cannot_be_traced():
    model = Model("gelu")
    with ck.use_backend("cpu"):
        with pytest.raises(ck.BackendUnavailable, match=r"gelu: backend 'cpu' .* PyTorch's own operators"):
            torch.jit.trace(model, model.inputs())
        linear = Model("linear")  # which has no kernels of ours
        torch.jit.trace(linear, linear.inputs(), check_trace=False)
    with ck.use_backend("cpu", "reference"):
        assert_recorded(torch.jit.trace(model, model.inputs(), check_trace=False), model)
