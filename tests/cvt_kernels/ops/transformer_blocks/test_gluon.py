"""Blocks of CvT in Gluon: what they refuse, their plans, their copies of weights; the emulator runs them."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops import weight_cache
from cvt_kernels.records import Linear, Norm, TransformerBlock
from tests.cvt_kernels.ops.test_accesses import random_conv
from tests.processes import run_python

gluon = pytest.importorskip(
    "cvt_kernels.ops.transformer_blocks.gluon", reason="this Triton has no Gluon", exc_type=ImportError
)

CHANNELS, GRID = 128, (5, 4)


def layer(inputs, outputs, dtype=torch.bfloat16):
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    return Linear(weight, torch.randn(outputs).to(dtype))


def block(dtype=torch.bfloat16, **changes):
    c = CHANNELS
    norms = [Norm(torch.rand(c).add(0.5).to(dtype), torch.randn(c).to(dtype), 1e-5) for _ in range(2)]
    made = TransformerBlock(
        norm1=norms[0],
        reduce=tuple(random_conv(c, dtype=dtype, stride=n, padding=1) for n in (1, 2, 2)),
        linears=tuple(layer(c, c, dtype) for _ in range(3)),
        num_heads=2,
        scale=None,
        proj=layer(c, c, dtype),
        norm2=norms[1],
        fc1=layer(c, 4 * c, dtype),
        approximate="quick",
        fc2=layer(4 * c, c, dtype),
    )
    return made._replace(**changes)


def call(blocks=2, dtype=torch.bfloat16, tokens=1, inplace=False, **changes):
    x = torch.randn(3, tokens + GRID[0] * GRID[1], CHANNELS).to(dtype)
    made = [block(dtype, **changes) for _ in range(blocks)]
    return backends.operators["transformer_blocks"].bind(x, GRID, made, inplace=inplace)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: call(), None),
        (lambda: call(dtype=torch.float16), None),
        (lambda: call(dtype=torch.float32), "not float32"),
        (lambda: call(reduce=None), "not one of CvT's"),
        (lambda: call(norm1=Norm(None, None, 1e-5)), "has no weight or no bias"),
        (lambda: call(fc1=layer(CHANNELS, 100)), "rows do not begin at multiples of 16 bytes"),
        (lambda: call()._replace(x=torch.empty(0, 20, CHANNELS).bfloat16()), "the batch is empty"),
        (lambda: call()._replace(x=torch.empty(3, 42, CHANNELS).bfloat16()[:, ::2]), "not contiguous"),
    ],
)
def test_what_it_refuses(made, reason):
    with launching.recorded_launches(launching.Chip(90, 132)):
        found = gluon.why_unsupported(made())
    assert found is None if reason is None else reason in found


def test_a_gradient_is_refused():
    record = call()
    record.x.requires_grad_()
    with launching.recorded_launches(launching.Chip(90, 132)):
        assert gluon.why_unsupported(record) == "has no gradients"


def launched(record, multiprocessors):
    """Returns the names of the kernels that a call launches."""
    with (
        launching.recorded_launches(launching.Chip(90, multiprocessors)) as launches,
        ck.use_backend("reference"),
    ):
        gluon.transformer_blocks(record)
    return [launch.kernel.__name__.strip("_").removesuffix("_kernel") for launch in launches]


def test_a_block_is_six_launches():
    projected, product = "conv_projection_sliding_fwd", "pingpong_product"
    # Attention is served by PyTorch here, and so is LayerNorm before the first block.
    assert launched(call(), 3) == [projected, *[product] * 4] * 2


def test_a_block_of_few_tokens_is_four_launches():
    assert launched(call(), 132) == ["conv_linear_few", "attention_add", *["pingpong_product"] * 2] * 2


#: Blocks of which the second has a narrower MLP, whose statistics have other parts, and parameters that begin
#: between two words.
UNLIKE = """
import torch
import cvt_kernels as ck
from cvt_kernels.launch import launching
from cvt_kernels.ops.transformer_blocks import transformer_blocks
from tests.cvt_kernels.ops.transformer_blocks.test_gluon import CHANNELS, block, call, gluon, layer
from tests.emulator.launches import Runner


def shifted(tensor):
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


torch.manual_seed(0)
narrow = block(fc1=layer(CHANNELS, 64), fc2=layer(64, CHANNELS))
convs = tuple(conv._replace(weight=shifted(conv.weight)) for conv in narrow.reduce)
norm = narrow.norm1._replace(weight=shifted(narrow.norm1.weight))
record = call(1)._replace(blocks=[narrow, block(), narrow._replace(reduce=convs, norm1=norm)])
chip, runner = launching.Chip(90, MULTIPROCESSORS), Runner(90)
with launching.intercepted_launches(runner.run, chip), torch.no_grad(), ck.use_backend("reference"):
    out = gluon.transformer_blocks(record)
    widths = [gluon._width(record.x, each) for each in record.blocks]
assert not any(ran.result.faults for ran in runner.ran)
assert len(set(widths)) == 2 or MULTIPROCESSORS > 1, widths
with ck.use_backend("reference"):
    plain = transformer_blocks(*record[:3])
assert (out.double() - plain.double()).norm() < 0.02 * plain.double().norm()
"""


@pytest.mark.parametrize("multiprocessors", [pytest.param(1, marks=pytest.mark.rest), 132])
def test_blocks_that_are_unlike(multiprocessors):
    child = run_python(f"MULTIPROCESSORS = {multiprocessors}\n{UNLIKE}", TRITON_INTERPRET="0")
    assert child.returncode == 0, child.stderr


def test_changes_of_weights_are_noticed():
    made = block()
    before, (packed, _) = gluon._folded_fc1(made), weight_cache.packed_linears(made.linears)
    assert gluon._folded_fc1(made)[0] is before[0]
    assert weight_cache.packed_linears(made.linears)[0] is packed
    made.norm2.bias.add_(1)
    made.linears[2].weight.mul_(2)
    after = gluon._folded_fc1(made)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])
    assert torch.equal(
        weight_cache.packed_linears(made.linears)[0], torch.cat([each.weight for each in made.linears])
    )
