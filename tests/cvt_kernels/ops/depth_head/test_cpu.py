"""depth_head by the compiled extension, on every instruction set."""

import pytest

from tests.checks import every_instruction_set, needs_extension
from tests.cvt_kernels.ops.agreement import DTYPES, assert_agrees, assert_agrees_on


@needs_extension
@every_instruction_set
def test_values(name):
    sizes = {"height": 9, "width": 17, "inputs": 17, "channels": 9}
    assert_agrees_on(name, "depth_head", sizes, sizes | {"channels_last": True}, dtypes=DTYPES[:3])


@needs_extension
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize(
    "size", [(1, 1), (1, 33), (33, 1), (2, 15), (3, 16), (18, 31), (5, 32), (4, 63)], ids=str
)
def test_every_edge_of_a_vector_and_of_the_rows_that_pass_together(size, dtype):
    sizes = dict(zip(("height", "width"), size, strict=True))
    assert_agrees("depth_head", "cpu", dtype=dtype, inputs=5, channels=6, **sizes)
