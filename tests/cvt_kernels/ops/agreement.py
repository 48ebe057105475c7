"""Calls of other settings than the contract's examples, compared with the reference in the same way."""

from typing import Any

from tests.checks import run_on_instruction_set
from tests.contract.examples import Example, assert_right, example, has_gradients
from tests.contract.test_contract import run_guarded

DTYPES = "float32", "bfloat16", "float16", "float64"


def made_of(operator: str, backend: str, **settings: Any) -> Example:
    """Makes a call that a backend must serve, with all gradients that it has.

    Args:
        operator: The operator.
        backend: The backend.
        settings: What differs from the usual example (the card's choices).
    """
    gradient = "all" if has_gradients(operator, backend) else "none"
    made = example(operator, backend, "usual", **{"gradient": gradient} | settings)
    assert made.why_refused() is None
    return made


def assert_agrees(operator: str, backend: str, **settings: Any) -> None:
    """Fails unless results, gradients and statistics are right, and all memory is written that should be."""
    made = made_of(operator, backend, **settings)
    assert_right(made, run_guarded(made))


def assert_agrees_on(
    instruction_set: str, operator: str, *cases: dict[str, Any], dtypes: tuple[str, ...] = DTYPES
) -> None:
    """Fails unless CPU kernels are right in some dtypes on an instruction set; skips without it."""
    lines = [
        f"assert_agrees({operator!r}, 'cpu', dtype={dtype!r}, **{case!r})"
        for case in cases
        for dtype in dtypes
    ]
    run_on_instruction_set(instruction_set, "\n".join([f"from {__name__} import assert_agrees", *lines]))
