"""oneDNN's packed linear layers in transformer_block, and the packed copies of weights."""

import contextlib
import gc
import os
import threading

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, reference
from cvt_kernels.ops import onednn_layers, weight_cache
from tests.cvt_kernels.ops.transformer_block.calls import BACKENDS, make, pyramid, with_quantized


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Lets each test begin without packed weights, requests the backend, and records no gradients."""
    monkeypatch.setattr(weight_cache, "_known", {})
    with torch.no_grad(), ck.use_backend(*BACKENDS["onednn"]):
        yield


@contextlib.contextmanager
def refused(reason):
    """Expects that the backend alone cannot serve a call."""
    with ck.use_backend("onednn"), pytest.raises(ck.BackendUnavailable, match=reason):
        yield


def write_in_place(weight):
    weight.mul_(2)


def replace_data(weight):
    weight.data = weight.data * 2


def replace_data_often(weight):
    """Changes the storage so often that the allocator may give an address again."""
    for _ in range(8):
        weight.data = weight.data * 2**0.125


def turn(weight):
    weight.data = weight.data.t()


@pytest.mark.parametrize("change", [write_in_place, replace_data, replace_data_often, turn])
def test_a_changed_weight_is_packed_anew(change):
    x, grid, block = make(approximate="quick")
    before = ck.transformer_block(x, grid, block)
    change(block.proj.weight)
    out = ck.transformer_block(x, grid, block)
    assert (out - before).abs().max() > 1e-2
    torch.testing.assert_close(out, reference.transformer_block(x, grid, block))
    assert len(weight_cache._known) == 7  # six weights, and the scaled bias


@pytest.mark.parametrize(
    ("made", "packs", "most"),
    [
        (make, 6, 1),
        (pyramid, 6, 2),
        (lambda **settings: pyramid(ratio=0, **settings), 4, 3),
        (lambda **settings: pyramid(ratio=0, convolves=False, **settings), 4, 3),
    ],
    ids=["CvT", "reduction", "no reduction", "PVT"],
)
def test_weights_are_packed_once(monkeypatch, made, packs, most):
    """Layers of the same tokens are one product: ``most`` weights together."""
    packed, pack = [], onednn_layers._pack
    monkeypatch.setattr(onednn_layers, "_pack", lambda *args: packed.append(args) or pack(*args))
    x, grid, block = made(approximate="quick")
    for inplace in (False, True, False):
        ck.transformer_block(x, grid, block, inplace=inplace)
        ck.transformer_block(x[:1], grid, block)
    assert len(packed) == packs
    assert max(len(weights) for weights, *_ in packed) == most


def test_copies_die_with_their_weights():
    x, grid, block = make(approximate="quick")
    ck.transformer_block(x, grid, block)
    assert len(weight_cache._known) == 7
    del block
    gc.collect()
    assert not weight_cache._known


def resident_mib():
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_release_memory_gives_it_back_to_the_system():
    weights = torch.ones(4000, 1).unbind()
    for weight in weights:
        weight_cache.packed(weight, "a", lambda: torch.ones(4096))
    staying = torch.ones(4096)  # above the others: the heap does not get shorter by itself
    before = resident_mib()
    ck.release_memory()
    assert resident_mib() < before - 40
    assert staying.sum() == 4096


def test_each_copy_of_a_weight_is_made_once():
    weight, made, together = torch.ones(2, 2), [], threading.Barrier(4)

    def make_copy():
        made.append(threading.get_ident())
        return weight * 2

    def ask():
        together.wait()
        copies.append(weight_cache.packed(weight, "a", make_copy))

    copies = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert all(copy is copies[0] for copy in copies)
    assert weight_cache.packed(weight, "b", lambda: "another") == "another"
    assert weight_cache.packed(weight, "a", make_copy) is copies[0]


def test_weights_of_inference_mode_are_kept_until_they_are_written():
    with torch.inference_mode():
        x, grid, block = make()
        for _ in range(2):
            with ck.use_backend("onednn", "reference"):
                out = ck.transformer_block(x, grid, block)
            torch.testing.assert_close(out, reference.transformer_block(x, grid, block), rtol=1e-4, atol=1e-5)
            assert weight_cache._known
            block.fc1.weight.mul_(2)


def test_weights_of_inference_mode_like_others_that_were_served():
    x, grid, block = make()
    out = ck.transformer_block(x, grid, block)
    with torch.inference_mode():
        ck.transformer_block(x, grid, block)
        copies = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, block)
        torch.testing.assert_close(ck.transformer_block(x, grid, copies), out)
        copies.fc1.weight.mul_(2)
        torch.testing.assert_close(
            ck.transformer_block(x, grid, copies), reference.transformer_block(x, grid, copies)
        )


class Subclass(torch.Tensor):
    """A tensor that must not be packed as a plain one."""


@pytest.mark.parametrize("made", [make, pyramid])
def test_calls_that_it_refuses(made):
    x, grid, block = made()
    fc1 = block.fc1._replace(weight=block.fc1.weight.as_subclass(Subclass))
    for arguments, reason in (
        (made(dtype=torch.float64), "has no products of float64"),
        (made(batch=0), "serves no empty batch"),
        ((x, grid, block._replace(fc1=fc1)), "packs plain tensors only"),
        (with_quantized(made(), (4,)), "has no quantized layers"),
    ):
        with refused(reason):
            ck.transformer_block(*arguments)
    with torch.autocast("cpu", torch.bfloat16), refused("does not follow autocast"):
        ck.transformer_block(x, grid, block)


def test_some_layers_without_a_bias():
    x, grid, block = pyramid()
    q, k, v = block.linears
    block = block._replace(linears=(q, k._replace(bias=None), v))
    torch.testing.assert_close(
        ck.transformer_block(x, grid, block), reference.transformer_block(x, grid, block)
    )


def test_16_bits_that_the_cpu_does_not_multiply_are_refused(monkeypatch):
    library = onednn_layers._library()._replace(has_bfloat16=lambda: False, has_float16=lambda: False)
    monkeypatch.setattr(onednn_layers, "_library", lambda: library)
    for dtype in (torch.bfloat16, torch.float16):
        with refused(r"this CPU has no products of b?float16 for oneDNN"):
            ck.transformer_block(*make(dtype=dtype))


@pytest.mark.parametrize("lacks", ["library", "operators"])
def test_a_torch_without_the_operators(monkeypatch, lacks):
    onednn_layers._library.cache_clear()
    if lacks == "library":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    else:
        monkeypatch.setattr(torch.ops, "mkldnn", object())
    backends.forget()
    try:
        with refused("this PyTorch has no .*oneDNN"):
            ck.transformer_block(*make())
    finally:
        onednn_layers._library.cache_clear()
