"""Calls of other settings than the contract's examples, compared with the reference in the same way."""

from typing import Any

from tests.contract.examples import Example, assert_right, example, has_gradients
from tests.contract.test_contract import run_guarded


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
