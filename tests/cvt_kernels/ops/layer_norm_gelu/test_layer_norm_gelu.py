"""LayerNorm, GELU and their combinations: the kinds of their calls, and their page."""

import pytest
import torch

from cvt_kernels import choose
from tests.checks import python_blocks, run_blocks, section_of

X, W, B = torch.randn(2, 5, 8), torch.randn(8), torch.randn(8)


def test_the_page_runs_as_it_stands(capsys):
    run_blocks(python_blocks(section_of("inside.md", "## LayerNorm and GELU")))
    assert capsys.readouterr().out == "torch.bfloat16 torch.float32 torch.bfloat16\n"


@pytest.mark.parametrize("operator", ["layer_norm", "add_layer_norm"])
def test_kinds_of_calls(operator):
    """On a CPU the dtype of x, given by name, is what the call gives without one."""
    tensors = (X, W, B) if operator == "layer_norm" else (X, X + 1, W, B)
    plain, same, other = (
        choose.cache_key(operator, *tensors, eps=1e-3, dtype=dtype)
        for dtype in (None, torch.float32, torch.bfloat16)
    )
    assert plain == same
    assert other == plain + ", to bfloat16"
    if operator == "layer_norm":
        assert choose.cache_key(operator, *tensors, eps=1e-3, shift=W) == plain + ", shifted"
