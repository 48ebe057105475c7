"""transformer_block by the compiled extension: every instruction set, and its loops under sanitizers."""

import shutil

import pytest

from tests.checks import (
    compiler,
    every_instruction_set,
    not_built,
    run_on_instruction_set,
    run_sanitized,
)

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


@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("flags", ["", "-DKERNELS_VECTOR_BYTES=64 -DKERNELS_TILES"], ids=["plain", "tiles"])
@pytest.mark.parametrize("family", ["linear", "transformer_block"])
def test_loops_are_right_and_stay_within_their_buffers(tmp_path, family, flags):
    run_sanitized(family, tmp_path, flags)
