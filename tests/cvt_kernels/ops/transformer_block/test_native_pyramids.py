"""Blocks of SegFormer and PVT by the compiled extension: instruction sets, threads, sanitizers."""

import shutil

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import reference
from tests.checks import compiler, every_instruction_set, not_built, run_on_instruction_set, run_sanitized
from tests.cvt_kernels.ops.transformer_block.test_pyramids import make

needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")

INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
from tests.cvt_kernels.ops.transformer_block.test_pyramids import in_float64, make
torch.manual_seed(0)
for dtype, atol in ((torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 2e-2)):
    for convolves in (True, False):
        arguments = make(3, (11, 9), 40, heads=5, hidden=600, ratio=2, convolves=convolves, dtype=dtype)
        with ck.use_backend("native"), torch.no_grad():
            torch.set_num_threads(2)
            out = ck.transformer_block(*arguments)
            torch.set_num_threads(1)
            x, *rest = arguments
            alone = [ck.transformer_block(image[None], *rest) for image in x]
        torch.testing.assert_close(torch.cat(alone), out, rtol=0, atol=0)  # cut into other parts
        torch.testing.assert_close(
            out.double(), ck.reference.transformer_block(*in_float64(arguments)), rtol=0, atol=atol
        )
"""


@needs_extension
@every_instruction_set
def test_values(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


@pytest.mark.sanitized
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
def test_loops_are_right_and_stay_within_their_buffers(tmp_path):
    run_sanitized("transformer_block_pyramids", tmp_path, "-DKERNELS_VECTOR_BYTES=64 -DKERNELS_TILES")


@needs_extension
@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("grid", [(14, 14), (3, 64), (1, 1)], ids=str)
def test_the_same_bits_for_any_number_of_threads(grid, threads):
    arguments = make(1, grid, ratio=1 if grid == (1, 1) else 2)
    before = torch.get_num_threads()
    with ck.use_backend("native"):
        expected = ck.transformer_block(*arguments)
        try:
            torch.set_num_threads(threads)
            assert torch.equal(ck.transformer_block(*arguments), expected)
        finally:
            torch.set_num_threads(before)


@needs_extension
@torch.no_grad()
def test_every_changed_parameter_is_packed_anew():
    x, grid, block = make()
    names = [
        "norm1",
        "norm2",
        *[f"linears[{i}]" for i in range(3)],
        "proj",
        "fc1",
        "fc2",
        "reduction",
        "conv",
    ]
    parts = [
        block.norm1,
        block.norm2,
        *block.linears,
        block.proj,
        block.fc1,
        block.fc2,
        block.reduce,
        block.mix,
    ]
    parameters = {f"{name}.{i}": part[i] for name, part in zip(names, parts, strict=True) for i in range(2)}
    parameters |= {f"reduction.norm.{i}": block.reduce.norm[i] for i in range(2)}
    with ck.use_backend("native"):
        for name, tensor in parameters.items():
            before = ck.transformer_block(x, grid, block)
            tensor.add_(0.5)
            out = ck.transformer_block(x, grid, block)
            torch.testing.assert_close(out, reference.transformer_block(x, grid, block), rtol=1e-4, atol=1e-4)
            # Constants added to all scores of a query change no probability, and LayerNorm takes out a mean.
            assert name in ("linears[1].1", "reduction.1") or not torch.equal(out, before), name


@needs_extension
@torch.no_grad()
def test_more_images_than_find_room_between_the_steps():
    x, grid, block = make(5, (128, 128), 64, heads=1, hidden=1, ratio=16)
    with ck.use_backend("native"):
        out = ck.transformer_block(x, grid, block)
        alone = [ck.transformer_block(image[None], grid, block) for image in x]
    assert torch.equal(torch.cat(alone), out)


@needs_extension
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
        with pytest.raises(ck.BackendUnavailable, match="serves float32, bfloat16 and float16"):
            ck.transformer_block(*make(dtype=torch.float64))
        with pytest.raises(ck.BackendUnavailable, match="heads have 260 channels, more than 256"):
            ck.transformer_block(*make(channels=260, heads=1))
        with torch.enable_grad(), pytest.raises(ck.BackendUnavailable, match="has no gradients"):
            ck.transformer_block(x.requires_grad_(), grid, block)


@needs_extension
def test_the_operators_check_what_they_are_given():
    ops = torch.ops.cvt_kernels
    x, _, block = make(ratio=1, convolves=False)
    packed = [ops.pack_linear(layer.weight) for layer in (*block.linears, block.proj, block.fc1, block.fc2)]
    vectors = [*block.norm1[:2], *block.norm2[:2], *(layer.bias for layer in block.linears)]
    vectors += [block.proj.bias, block.fc1.bias, block.fc2.bias]
    right = {
        "x": x, "height": 6, "width": 5, "packed": packed, "reduction": [], "conv": None, "vectors": vectors,
        "widths": [24, 72, 3], "eps": [1e-5, 1e-5], "scale": 1.0, "activation": "none",
    }  # fmt: skip
    assert ops.pyramid_block_packed(*right.values()).shape == x.shape
    for name, wrong, message in (
        ("height", 7, "x: got .*, expected contiguous"),
        ("x", x.double(), "x: got .*, expected float32, bfloat16 or float16"),
        ("packed", packed[:5], "packed: got 5 of them, expected 6"),
        ("packed", [packed[5], *packed[1:]], "packed: got .*, expected a weight"),
        ("vectors", [x[0, 0, :3], *vectors[1:]], "vectors: got .*, expected float32 of the channels"),
        ("widths", [24, 72, 5], "widths: got 24, expected channels of 5 heads"),
        ("reduction", [packed[0]], "vectors: got 10 of them, expected 13"),
        ("conv", torch.ones(3), "conv: got .*, expected a convolution"),
        ("activation", "fast", "activation: got 'fast', expected none, tanh or quick"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.pyramid_block_packed(*(right | {name: wrong}).values())
    with pytest.raises(RuntimeError, match=r"weight: got .*, expected contiguous"):
        ops.pack_depthwise(torch.ones(3, 1, 3, 2), None)
    with pytest.raises(RuntimeError, match=r"bias: got .*, expected contiguous"):
        ops.pack_depthwise(torch.ones(3, 1, 3, 3), torch.ones(2))
