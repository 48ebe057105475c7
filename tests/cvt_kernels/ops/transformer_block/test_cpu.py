"""transformer_block by the compiled extension: instruction sets, threads, packed parameters, refusals."""

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from cvt_kernels.ops.transformer_block import transformer_block
from tests.checks import needs_extension
from tests.cvt_kernels.ops.transformer_block.calls import (
    call,
    check_images_apart,
    decibels,
    is_computed,
    make,
    pyramid,
    some_rows,
    with_quantized,
)


def check_values():
    """Checks all kinds of blocks, for ``tests/contract/test_sizes.py`` on every instruction set."""
    torch.manual_seed(0)
    for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 2e-2)):
        wide = {"channels": 40, "heads": 5, "hidden": 600, "dtype": dtype}
        for arguments in (
            make(grid=(9, 8), channels=80, heads=2, width=144, class_tokens=1, dtype=dtype),
            *(pyramid(3, (11, 9), **wide, convolves=convolves) for convolves in (True, False)),
        ):
            check_images_apart(arguments, atol)
        usual = make(grid=(5, 8), channels=40, heads=2, width=72, class_tokens=1, dtype=dtype)
        without = (make(3, (12, 15), 40, 2, ratio=ratio, dtype=dtype) for ratio in (0, 3))
        for x, grid, block in (usual, with_quantized(usual), *without):
            rows = some_rows(x, grid, 23)
            among_all = torch.where(is_computed(x, rows), call("cpu", (x, grid, block)), x)
            assert torch.equal(call("cpu", (x, grid, block), rows=rows), among_all)
            for empty in ({}, {"rows": rows[:0]}):
                assert call("cpu", (x[:0], grid, block), **empty).shape == x[:0].shape
    for which in (range(6), (0, 3, 5), (1, 4)):
        arguments = make(grid=(9, 8), channels=80, heads=2, width=144, class_tokens=1)
        x, *_ = arguments = with_quantized(arguments, which)
        same = reference.transformer_block(*arguments)
        # A number close to a tie leaves 49 and more.
        assert decibels(same - x, call("cpu", arguments) - x) > 40
        check_images_apart(arguments, 1.0)


def of_some_tokens(**settings):
    x, grid, _ = arguments = make(batch=3, grid=(11, 12), class_tokens=1, **settings)
    return arguments, {"rows": some_rows(x, grid, 70)} | ({} if settings else {"scores": "avg"})


@needs_extension
@pytest.mark.parametrize(
    "made",
    [
        lambda: (pyramid(1, (14, 14)), {}),
        lambda: (pyramid(1, (3, 64)), {}),
        lambda: (pyramid(1, (1, 1), ratio=1), {}),
        # Two threads share a band from both ends: of an image, of its parts, of some images.
        lambda: (pyramid(1, (18, 10)), {}),
        lambda: (pyramid(1, (70, 3)), {}),
        lambda: (pyramid(5, (6, 5)), {}),
        lambda: (with_quantized(pyramid(3, (18, 10))), {}),
        lambda: (with_quantized(make(batch=3, grid=(11, 12), class_tokens=1)), {}),
        of_some_tokens,
        lambda: of_some_tokens(ratio=0),
    ],
    ids=[
        *("squares", "rows", "one", "shared image", "shared parts", "shared images", "shared and quantized"),
        *("quantized", "some tokens", "some tokens of all that ask all"),
    ],
)
def test_threads_change_nothing(made):
    arguments, settings = made()
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(call("cpu", arguments, **settings))
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=0)


@needs_extension
@pytest.mark.parametrize("rows", [0, 300])
def test_more_images_than_find_room_between_the_steps(rows):
    if rows:
        x, grid, block = make(batch=320, grid=(20, 20), class_tokens=1, channels=16, heads=2)
        given = [{"rows": some_rows(x, grid, rows)[part]} for part in (slice(None), slice(0, 40))]
    else:
        (x, grid, block), given = pyramid(5, (128, 128), 64, heads=1, hidden=1, ratio=16), [{}, {}]
    out = call("cpu", (x, grid, block), **given[0])
    part = x[:40] if rows else x[:1]
    assert torch.equal(call("cpu", (part, grid, block), **given[1]), out[: len(part)])


@needs_extension
def test_the_memory_that_it_works_in_is_kept_and_released():
    from cvt_kernels import _C

    arguments = make()
    before = call("cpu", arguments)
    assert 0 < _C.workspace_bytes() < 2**24
    ck.release_memory()
    assert _C.workspace_bytes() == 0
    assert torch.equal(call("cpu", arguments), before)


class Subclass(torch.Tensor):
    """A tensor that kernels must not read as a plain one."""


@needs_extension
@pytest.mark.parametrize("made", [make, pyramid])
def test_what_it_refuses(made):
    x, grid, block = made()
    with torch.no_grad(), ck.use_backend("cpu"):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ck.BackendUnavailable, match="autocast"):
            transformer_block(x, grid, block)
        with pytest.raises(ck.BackendUnavailable, match="packs plain tensors only"):
            transformer_block(x.as_subclass(Subclass), grid, block)
