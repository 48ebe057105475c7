"""transformer_block by other operators: layers of the same tokens as one product, and packed weights."""

import pytest
import torch
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels import machine, reference
from cvt_kernels.launch import launching
from cvt_kernels.ops import weight_cache
from cvt_kernels.ops.transformer_block import transformer_block
from tests.cvt_kernels.ops.transformer_block.calls import call, check, pyramid


def products_of(arguments, monkeypatch):
    """Returns the outputs of the linear layers that a call makes by ``linear``."""
    from cvt_kernels.ops import reduction_linear
    from cvt_kernels.ops.transformer_block import composed

    outputs, own = [], composed.linear
    for module in (composed, reduction_linear):
        monkeypatch.setattr(
            module, "linear", lambda x, weight, bias=None: outputs.append(len(weight)) or own(x, weight, bias)
        )
    call("composed", arguments)
    return outputs


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(2, [24, 48, 72]), (0, [72, 72])],
    ids=["Q, then K and V, then fc1", "Q, K and V, then fc1"],
)
def test_layers_of_the_same_tokens_are_one_product(ratio, expected, monkeypatch):
    assert products_of(pyramid(ratio=ratio), monkeypatch) == expected


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_some_layers_without_a_bias(ratio, which):
    x, grid, block = pyramid(ratio=ratio)
    linears = tuple(
        layer._replace(bias=None) if i == which else layer for i, layer in enumerate(block.linears)
    )
    check("composed", (x, grid, block._replace(linears=linears)))


def test_weights_are_packed_once(monkeypatch):
    packs, own = [], weight_cache._pack
    monkeypatch.setattr(
        weight_cache, "_pack", lambda copy, *args: packs.append(copy.place[1]) or own(copy, *args)
    )
    arguments = pyramid()
    for _ in range(3):
        call("composed", arguments)
    of_block = "channels last", "2 layers side by side"
    assert [key for key in packs if key in of_block] == [*of_block]


@pytest.mark.gpu
@torch.no_grad()
def test_nothing_that_a_graph_captures_is_kept():
    """Its copies are not computed until it is replayed."""
    x, grid, block = pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, pyramid())
    expected = reference.transformer_block(x, grid, block)
    with ck.use_backend("composed", "reference"):
        transformer_block(x, grid, block)  # which loads cuBLAS
        weight_cache.release_memory()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            transformer_block(x, grid, block)
        torch.testing.assert_close(transformer_block(x, grid, block), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not machine.INTERPRETING, reason="the kernels are compiled, not interpreted")
@torch.no_grad()
def test_launches_of_triton_kernels_of_a_block():
    """The rest are two or three products, and LayerNorm, which has no Triton kernel."""
    mlp = ["_depthwise_conv_gelu_fwd_kernel", "_linear_add_kernel"]
    behind = ["_attention_fwd_kernel", "_linear_add_layer_norm_kernel", *mlp]
    for ratio, expected in ((2, ["_reduction_linear_kernel", *behind]), (0, behind)):
        x, grid, block = pyramid(ratio=ratio, dtype=torch.float16)
        recorded = launching.recorded_launches(launching.Chip(90, 132))
        with recorded as launches, ck.use_backend("triton", "composed", "reference"):
            transformer_block(x, grid, block)
        assert [each.kernel.__name__ for each in launches] == expected
