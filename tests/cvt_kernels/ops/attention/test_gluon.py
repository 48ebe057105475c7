"""The calls whose keys and values get their gradients by the kernel in Gluon.

What it computes is tested in the emulator of compiled kernels (tests/emulator).
"""

import sys

import pytest
import torch
from triton.experimental.gluon.language.nvidia import hopper

from cvt_kernels import launch, launching, machine
from cvt_kernels.launch.records import Ring
from cvt_kernels.ops.attention.triton.backward import attention_backward

H200, STREAMED = launching.Chip(90, 132), "_attention_bwd_dkdv_streamed_kernel"


def tokens(count, heads=3, channels=64, *, batch=2, dtype=torch.bfloat16, row=0, start=0):
    """Returns tokens without memory, ``row`` elements apart if not adjacent, from an element on."""
    wide = torch.empty(batch * count * max(row, heads * channels) + start, dtype=dtype, device="meta")
    rows = wide[start:].view(batch, count, -1)[..., : heads * channels]
    return rows.unflatten(2, (heads, channels))


def launched(q, k, v, chip=H200, *, bias=None, dout=None):
    """Returns the launches of a backward."""
    batch, queries, heads, _ = q.shape
    stats = q.new_empty(batch, heads, 2, queries, dtype=torch.float32)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    with launching.recorded_launches(chip) as launches:
        attention_backward(q, k, v, bias, out, stats, out if dout is None else dout, 0.125)
    return launches


def is_streamed(*tensors, **settings):
    """Returns whether the kernel in Gluon computes dk and dv; another one of two does otherwise."""
    names = [each.kernel.__name__ for each in launched(*tensors, **settings)]
    assert names[0] == "_attention_bwd_dq_kernel"
    assert names[1] in (STREAMED, "_attention_bwd_dkdv_kernel")
    return names[1] == STREAMED


def three(queries=300, keys=200, **settings):
    return tokens(queries, **settings), tokens(keys, **settings), tokens(keys, **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "row"),
    [(3136, 784, 1, 0), (784, 196, 3, 0), (64, 65, 2, 0), (100, 300, 2, 256)],
)
def test_calls_of_heads_of_64_channels_are_streamed(queries, keys, heads, row, dtype):
    assert is_streamed(*three(queries, keys, heads=heads, row=row, dtype=dtype))


def test_keys_and_values_of_one_product_are_streamed():
    q, both = tokens(300), tokens(200, heads=6)
    assert is_streamed(q, both[:, :, :3], both[:, :, 3:])


@pytest.mark.parametrize(
    "settings",
    [
        {"channels": 32},
        {"channels": 128},
        {"dtype": torch.float32},
        {"queries": 63},
        {"row": 196},
        {"start": 4},
    ],
    ids=str,
)
def test_other_calls_are_not(settings):
    assert not is_streamed(*three(**settings))


def test_layouts_that_are_no_rows_are_not():
    q, k, v = three()
    assert not is_streamed(q.transpose(0, 1).contiguous().transpose(0, 1), k, v)  # images within tokens
    assert not is_streamed(q, tokens(200, heads=6)[:, :, ::2], v)  # heads apart
    assert not is_streamed(q, k, v, bias=torch.empty(300, 200, dtype=q.dtype, device="meta"))
    assert not is_streamed(q, k, v, dout=q[:1, :1, :1].expand(q.shape))


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_gpus_have_triton_s_kernel(capability):
    assert not is_streamed(*three(), chip=launching.Chip(capability, 132))


def test_a_ring_without_buffers_leaves_it_to_triton():
    with launch.overridden("attention_bwd_dkdv_streamed", Ring(stages=0)):
        assert not is_streamed(*three())


def test_a_program_has_128_keys_of_a_head():
    _, streamed = launched(*three(keys=200, heads=3))
    assert streamed.grid == (2 * 3 * 2,)
    _, streamed = launched(*three(keys=256, heads=1, batch=5))
    assert streamed.grid == (5 * 2,)


def test_a_triton_whose_gluon_has_other_names_takes_the_other_kernel(monkeypatch):
    q, k, v = three()
    assert is_streamed(q, k, v)
    monkeypatch.delattr(hopper, "warpgroup_mma_wait")
    monkeypatch.delitem(sys.modules, "cvt_kernels.ops.attention.gluon")
    machine.why_not_importable.cache_clear()
    try:
        assert not is_streamed(q, k, v)
        reason = machine.why_not_importable("cvt_kernels.ops.attention.gluon")
    finally:
        machine.why_not_importable.cache_clear()
    assert "warpgroup_mma_wait" in reason
