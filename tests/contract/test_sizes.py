"""The calls of ``sizes.py``: right on their backends, right on every instruction set, and refused by name."""

import importlib
import re

import pytest

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.ops.cards import call_public, worded
from tests.checks import every_instruction_set, needs_extension, run_on_instruction_set
from tests.contract.examples import EXAMPLES, assert_right, example, made_of, run_guarded
from tests.contract.sizes import IN_EVERY_SET, REFUSED, SIZES
from tests.contract.test_contract import DTYPES

#: What families check on every instruction set besides.
CHECKS = {
    "tests.cvt_kernels.ops.attention.test_infinite_scores": "check_blocks",
    "tests.cvt_kernels.ops.linear_int8.test_cpu": "check_integers",
    "tests.cvt_kernels.ops.transformer_block.test_cpu": "check_values",
}


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


def check(operator, backend, words, name="usual", run=run_guarded, **settings):
    """Fails unless a call is right, gradients included, and writes all that it should and nothing else."""
    made = made_of(operator, backend, name, **worded(words) | settings)
    assert_right(made, run(made))


CALLS = [
    pytest.param(operator, backend, words, id=f"{operator}-{backend}-{words}")
    for operator, by_backend in SIZES.items()
    for backend, text in by_backend.items()
    for words in lines(text)
]


@pytest.mark.parametrize(("operator", "backend", "words"), CALLS)
def test_sizes(operator, backend, words):
    check(operator, backend, words)


def check_all(run=run_guarded, names=("usual",)) -> None:
    """Checks every operator on the instruction set of this process.

    Args:
        run: Runs an example.
        names: The examples, beside the calls of ``IN_EVERY_SET``.
    """
    for operator in (each for each, known in backends.implementations.items() if "cpu" in known):
        of_usual = [("usual", words) for words in lines(IN_EVERY_SET.get(operator, ""))]
        for name, words in [*((name, "") for name in names if name in EXAMPLES[operator]), *of_usual]:
            for dtype in DTYPES:
                if example(operator, "cpu", name, dtype=dtype, **worded(words)).why_refused() is None:
                    check(operator, "cpu", words, name, run, dtype=dtype)
    for module, name in CHECKS.items():
        getattr(importlib.import_module(module), name)()


@needs_extension
@every_instruction_set
def test_every_instruction_set(name):
    """A process chooses its instruction set once."""
    run_on_instruction_set(name, f"from {__name__} import check_all; check_all()")


@pytest.mark.parametrize("line", lines(REFUSED))
def test_refusals(line):
    """A request says why; where others may serve, they do, and the reason is kept."""
    called, reason = line.split(" | ")
    names, words = called.split(": ")
    operator, backend = names.split()
    made = example(operator, backend, "usual", **worded(words))
    with ck.use_backend(backend), pytest.raises(ck.BackendUnavailable, match=re.escape(reason)):
        call_public(operator, made.call.record)
    with ck.use_backend(backend, "reference"):
        call_public(operator, made.call.record)
    assert ck.fallbacks()[operator, backend].startswith(reason)
