"""The public operators where torch.jit.trace and torch.export record them."""

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from cvt_kernels import backends, proofs, reference
from cvt_kernels.records import (
    ConvBatchNorm,
    DepthwiseConv,
    Linear,
    Norm,
    Reduction,
    TransformerBlock,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.usefixtures("proving"),
]

GRID = 4, 3
CHANNELS = 8
TOKENS = GRID[0] * GRID[1] + 1


def tensor(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


def branch(stride=1):
    vectors = [tensor(CHANNELS) + i for i in range(4)]
    tracked = torch.tensor(1)
    return ConvBatchNorm(tensor(CHANNELS, 1, 3, 3), *vectors, tracked, stride, 1, 1, 0.1, 1e-5)


CONVS = branch(), branch(2), branch(2)
LINEAR = Linear(tensor(CHANNELS, CHANNELS), tensor(CHANNELS))
NORM = Norm(tensor(CHANNELS), tensor(CHANNELS))
BLOCK = TransformerBlock(NORM, CONVS, (LINEAR,) * 3, 2, None, LINEAR, NORM, LINEAR, "quick", LINEAR)
REDUCTION, DEPTHWISE = Reduction(tensor(CHANNELS, CHANNELS, 2, 2), None, NORM), DepthwiseConv(CONVS[0].weight)
PYRAMID = BLOCK._replace(reduce=REDUCTION, mix=DEPTHWISE)
BIAS = tensor(TOKENS, TOKENS)
ROWS = torch.tensor([[0, 3, -1]])
INTEGERS, SCALES = reference.quantize_rows(LINEAR.weight)

#: Each operator as a function of tokens (batch, TOKENS, CHANNELS).
CALLS = {
    "conv_projection": lambda x: ck.conv_projection(x, GRID, CONVS, training=False),
    "depthwise_conv_gelu": lambda x: ck.depthwise_conv_gelu(x[:, 1:], GRID, CONVS[0].weight, NORM.bias),
    "attention": lambda x: ck.attention(*[x.unflatten(2, (2, -1))] * 3, bias=BIAS),
    "layer_norm": lambda x: ck.layer_norm(x, *NORM[:2], shift=NORM.bias),
    "add_layer_norm": lambda x: ck.add_layer_norm(x, x, *NORM[:2]),
    "gelu": lambda x: ck.gelu(x, approximate="quick"),
    "bias_gelu": lambda x: ck.bias_gelu(x, NORM.bias),
    "layer_norm_gelu": lambda x: ck.layer_norm_gelu(x),
    "linear": lambda x: ck.linear(x, *LINEAR),
    "linear_gelu": lambda x: ck.linear_gelu(x, *LINEAR),
    "linear_add": lambda x: ck.linear_add(x, *LINEAR, x.clone(), inplace=True),
    "linear_add_layer_norm": lambda x: ck.linear_add_layer_norm(x, *LINEAR, x, *NORM[:2]),
    "layer_norm_mlp": lambda x: ck.layer_norm_mlp(x, *NORM[:2], *LINEAR, *LINEAR),
    "conv_linear": lambda x: ck.conv_linear(x, GRID, CONVS, [LINEAR] * 3),
    "conv_embedding": lambda x: ck.conv_embedding(
        x.unsqueeze(1), CONVS[0].weight, NORM.bias, *NORM[:2], stride=2, padding=1, class_token=NORM.bias
    ),
    "transformer_block": lambda x: ck.transformer_block(x, GRID, BLOCK),
    "transformer_block of SegFormer": lambda x: ck.transformer_block(x[:, 1:], GRID, PYRAMID),
    "quantize_rows": lambda x: ck.quantize_rows(x, scale=SCALES[0, 0]),
    "layer_norm_quantize": lambda x: ck.layer_norm_quantize(x, *NORM[:2], shift=NORM.bias),
    "gelu_quantize": lambda x: ck.gelu_quantize(x, NORM.bias, approximate="quick"),
    "gather_rows": lambda x: ck.gather_rows(x, ROWS.expand(x.shape[0], -1)),
    "gather_add_layer_norm": lambda x: ck.gather_add_layer_norm(
        x, ROWS.expand(x.shape[0], -1), x[:, :3], *NORM[:2]
    ),
    "scatter_rows": lambda x: ck.scatter_rows(x, ROWS.expand(x.shape[0], -1), x[:, :3], x[:, 1:4]),
    "linear_int8": lambda x: ck.linear_int8(
        ck.quantize_rows(x), INTEGERS, SCALES.flatten(), LINEAR.bias, approximate="quick", residual=x
    ),
}

every_operator = pytest.mark.parametrize("operator", backends.operators)


class Model(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, x):
        return CALLS[self.operator](x)


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _nothing_proven(monkeypatch):
    monkeypatch.setattr(proofs, "prove", lambda proof: pytest.fail(f"proves {proof.question}"))


def assert_nothing_remembered():
    assert (backends.plans, ck.fallbacks()) == ({}, {})


def eager(model, x):
    with ck.use_backend("sdpa", "reference"):
        return model(x)


@torch.no_grad()
@every_operator
def test_traces_hold_pytorchs_own(operator):
    model, x = Model(operator), tensor(2, TOKENS, CHANNELS)
    traced = torch.jit.trace(model, x, check_trace=False)
    kinds = {node.kind().partition("::")[0] for node in traced.inlined_graph.nodes()}
    assert kinds <= {"aten", "prim"}
    more = tensor(5, TOKENS, CHANNELS)
    assert_nothing_remembered()
    assert_same(traced(more), eager(model, more))


def test_traces_have_gradients():
    model, x = Model("conv_projection"), tensor(2, TOKENS, CHANNELS)
    traced = torch.jit.trace(model, x.clone().requires_grad_(), check_trace=False)
    gradients = []
    with ck.use_backend("reference"):
        for run in (traced, model):
            leaf = x.clone().requires_grad_()
            run(leaf)[0].sin().sum().backward()
            gradients.append(leaf.grad)
    assert_same(*gradients)


@torch.no_grad()
def test_training_can_be_traced():
    x = tensor(2, TOKENS, CHANNELS)
    bn = nn.BatchNorm2d(CHANNELS)
    conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)

    class Training(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = conv, bn

        def forward(self, x):
            return ck.conv_projection(x, GRID, [ConvBatchNorm.from_modules(conv, bn)], training=True)[0]

    model = Training()
    traced = torch.jit.trace(model, x, check_trace=False)
    before = int(bn.num_batches_tracked)
    out = traced(x)
    assert int(bn.num_batches_tracked) == before + 1
    with ck.use_backend("reference"):
        assert_same(out, model(x))


@torch.no_grad()
def test_a_trace_takes_other_sizes():
    traced = torch.jit.trace(Model("attention"), tensor(2, TOKENS, CHANNELS), check_trace=False)
    assert traced(tensor(3, TOKENS, CHANNELS)).shape == (3, TOKENS, 2, CHANNELS // 2)
    traced = torch.jit.trace(lambda x: ck.layer_norm(x), tensor(2, 5, CHANNELS), check_trace=False)
    x = tensor(7, 3, CHANNELS)
    assert_same(traced(x), nn.functional.layer_norm(x, (CHANNELS,)))


@torch.no_grad()
def test_requested_kernels_cannot_be_traced():
    model, x = Model("gelu"), tensor(2, TOKENS, CHANNELS)
    with ck.use_backend("native"):
        with pytest.raises(
            ck.BackendUnavailable, match=r"gelu: backend 'native' .* records PyTorch's own operators only"
        ):
            torch.jit.trace(model, x)
        torch.jit.trace(Model("linear"), x, check_trace=False)  # which has no kernels of ours
    with ck.use_backend("native", "reference"):
        assert_same(torch.jit.trace(model, x)(x), x * torch.sigmoid(1.702 * x))


@torch.no_grad()
@every_operator
def test_exported_programs_hold_pytorchs_own(operator):
    model, x = Model(operator), tensor(2, TOKENS, CHANNELS)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert not [node for node in program.graph.nodes if "cvt_kernels" in str(node.target)]
    more = tensor(5, TOKENS, CHANNELS)
    assert_nothing_remembered()
    assert_same(program.module()(more), eager(model, more))
