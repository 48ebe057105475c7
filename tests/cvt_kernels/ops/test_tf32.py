"""Triton kernels where PyTorch allows TF32 for float32; ``tests/emulator`` runs them as compiled."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from cvt_kernels import choose, machine
from cvt_kernels.ops.cards import all_cards
from tests.checks import precision_of
from tests.contract.examples import same_bits, served, tensors_of

MATMUL = torch.backends.cuda.matmul
#: Operators whose products follow PyTorch's linear layers, and their factors that are arguments.
LINEAR = {operator: card.factors for operator, card in all_cards().items() if card.factors}


def to_tf32(tensor):
    """Returns the nearest numbers of 11 bits, as cuBLAS rounds."""
    if tensor is None or tensor.ndim < 2:
        return tensor
    return ((tensor.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


def results(made, record):
    with torch.no_grad():
        return tensors_of(made.public(record))


@pytest.mark.skipif(not machine.INTERPRETING, reason="a GPU's sums may differ in the last bit")
@pytest.mark.parametrize("operator", LINEAR)
def test_linear_layers_round_their_factors_to_nearest(operator):
    made = served(operator, "triton", "usual", dtype="float32")
    record = made.call.record
    rounded = record._replace(**{
        name: pytree.tree_map(to_tf32, getattr(record, name)) for name in LINEAR[operator]
    })  # fmt: skip
    for precision, is_rounded in (("tf32", True), ("ieee", False)):
        with precision_of(MATMUL, precision):
            assert same_bits(results(made, record), results(made, rounded)) == is_rounded


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [(torch.float32, "tf32", True), (torch.float32, "ieee", False), (torch.bfloat16, "tf32", False)],
)
def test_cache_keys_name_the_precision(dtype, precision, expected):
    with FakeTensorMode(), precision_of(MATMUL, precision):
        x, weight = (torch.empty(8, 8, dtype=dtype, device="cuda") for _ in range(2))
        key = choose.cache_key("linear_gelu", x, weight, None)
    assert ("multiplied in tf32" in key) == expected


@pytest.mark.parametrize("value", [1 + 2**-11, 1 + 2**-11 - 2**-23, -1 - 2**-11, torch.nan, 0.0])
@pytest.mark.skipif(not machine.INTERPRETING, reason="what a GPU's instruction does")
def test_halves_go_away_from_zero(value):
    expected = {1 + 2**-11: 1 + 2**-10, 1 + 2**-11 - 2**-23: 1.0, -1 - 2**-11: -1 - 2**-10}.get(value, value)
    made = served("linear_add", "triton", "bare=True", dtype="float32", channels=1, outputs=1, rows=1)
    x, weight, residual = (torch.full((1, 1), number) for number in (value, 1.0, 0.0))
    record = made.call.record._replace(x=x, weight=weight, residual=residual)
    with precision_of(MATMUL, "tf32"):
        (result,) = results(made, record)
    torch.testing.assert_close(result, torch.full((1, 1), expected), rtol=0, atol=0, equal_nan=True)
