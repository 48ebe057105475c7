"""transformer_block by the compiled extension: every instruction set, and its loops under sanitizers."""

import shutil

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import (
    compiler,
    every_instruction_set,
    not_built,
    run_on_instruction_set,
    run_sanitized,
)
from tests.cvt_kernels.ops.transformer_block.test_transformer_block import make

TILES = "-DKERNELS_VECTOR_BYTES=64 -DKERNELS_TILES"

INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
from torch.utils import _pytree as pytree
from tests.cvt_kernels.ops.transformer_block.test_transformer_block import in_float64, make
torch.manual_seed(0)
for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 2e-2)):
    arguments = make(grid=(9, 8), channels=80, heads=2, width=144, class_tokens=1, dtype=dtype)
    with ck.use_backend("native"), torch.no_grad():
        out = ck.transformer_block(*arguments)
        x, *rest = arguments
        alone = [ck.transformer_block(image[None], *rest) for image in x]
    torch.testing.assert_close(torch.cat(alone), out, rtol=0, atol=0)  # cut into other parts
    torch.testing.assert_close(
        out.double(), ck.reference.transformer_block(*in_float64(arguments)), rtol=0, atol=atol
    )
"""


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@every_instruction_set
def test_values(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


@pytest.mark.sanitized
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("family", "flags"), [("linear", TILES), ("transformer_block", ""), ("transformer_block", TILES)]
)
def test_loops_are_right_and_stay_within_their_buffers(tmp_path, family, flags):
    run_sanitized(family, tmp_path, flags)


def parameters(block):
    """Returns every parameter and statistic of a block, by a name for each."""
    named = {f"{name}.{field}": t for name in ("norm1", "norm2", "proj", "fc1", "fc2")
             for field, t in zip(("weight", "bias"), getattr(block, name)[:2], strict=True)}  # fmt: skip
    for i, conv in enumerate(block.convs):
        named |= {f"convs[{i}].{field}": t for field, t in zip(conv._fields[:5], conv[:5], strict=True)}
        named |= {
            f"linears[{i}].weight": block.linears[i].weight,
            f"linears[{i}].bias": block.linears[i].bias,
        }
    return named


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@torch.no_grad()
def test_every_changed_parameter_is_packed_anew():
    x, grid, block = make()
    with ck.use_backend("native"):
        for name, tensor in parameters(block).items():
            before = ck.transformer_block(x, grid, block)
            tensor.add_(0.5)
            out = ck.transformer_block(x, grid, block)
            expected = reference.transformer_block(x, grid, block)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            # A constant added to all scores of a query changes no probability.
            assert name == "linears[1].bias" or not torch.equal(out, before), name


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@torch.no_grad()
def test_every_changed_setting_is_packed_anew():
    x, grid, block = make()
    convs, heads = block.convs, block.num_heads
    others = [
        block._replace(num_heads=1 if heads > 1 else 2),
        block._replace(reduce=tuple(conv._replace(eps=0.5) for conv in convs)),
        block._replace(reduce=(convs[0], *(conv._replace(stride=3) for conv in convs[1:]))),
    ]
    with ck.use_backend("native"):
        for other in (block, *others):
            expected = reference.transformer_block(x, grid, other)
            torch.testing.assert_close(ck.transformer_block(x, grid, other), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@torch.no_grad()
def test_the_memory_that_it_works_in_is_kept_and_released():
    from cvt_kernels import _C

    x, grid, block = make()
    with ck.use_backend("native"):
        before = ck.transformer_block(x, grid, block)
        assert 0 < _C.workspace_bytes() < 2**24
        ck.release_memory()
        assert _C.workspace_bytes() == 0
        assert torch.equal(ck.transformer_block(x, grid, block), before)


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@torch.no_grad()
def test_a_change_in_place_is_counted():
    x, grid, block = make()
    with ck.use_backend("native"):
        version = x._version
        assert ck.transformer_block(x, grid, block, inplace=True) is x
        assert x._version > version


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
@torch.no_grad()
def test_what_it_refuses():
    x, grid, block = make()

    class Subclass(torch.Tensor):
        pass

    compiled = torch.compile(ck.transformer_block, backend="eager")
    with ck.use_backend("native"):
        with pytest.raises(Exception, match=r"is not for torch\.compile"):
            compiled(x, grid, block)
        with pytest.raises(ck.BackendUnavailable, match="packs plain tensors only"):
            ck.transformer_block(x.as_subclass(Subclass), grid, block)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ck.BackendUnavailable, match="autocast"):
            ck.transformer_block(x, grid, block)
