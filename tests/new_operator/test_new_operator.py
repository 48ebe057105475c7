"""An operator with a Triton kernel is one folder and one line: whatever iterates over operators finds it."""

import re
import shutil
from pathlib import Path

import pytest

from tests.processes import run_python

FOLDER = Path(__file__).parent / "scaled_rows"
#: What the folder in cvt_kernels/ops and the line in cvt_kernels/__init__.py do.
ADDED = """
import sys
import cvt_kernels, cvt_kernels.ops
cvt_kernels.ops.__path__.append({!r})
from cvt_kernels.ops.scaled_rows import scaled_rows
cvt_kernels.scaled_rows = scaled_rows
"""
TESTED = """
import pytest
# This process may have imported a plugin's module before.
options = "-p no:cacheprovider -p no:benchmark -W ignore:Module -rfp -k scaled_rows {}"
sys.exit(pytest.main(options.split()))
"""
FUZZED = """
from tests.fuzz import subjects
ask = subjects.asking(triton=True)
print(*(flaw for seed in range(40) for flaw in ask(f"scaled_rows:{seed}").flaws))
"""
EMULATED = """
from tests.emulator import __main__ as emulator
sys.argv[1:] = ["--arch", "90", "ones: scaled_rows", "float32: scaled_rows", "bfloat16: scaled_rows"]
sys.exit(emulator.main())
"""
COMPILED = """
from cvt.tools.commands import main
sys.exit(main("compile --operator scaled_rows --model cvt_13 --stage 1 --jobs 1".split()))
"""
#: The tests that iterate over cards.
OVER_CARDS = (
    *("tests/contract", "tests/fuzz", "tests/benchmarks/test_floors.py"),
    *(f"tests/cvt_kernels/{name}.py" for name in ("test_arguments", "test_declaration", "ops/test_accesses")),
)
#: Some tests that must be among them.
NAMES = {
    "test_values", "test_autocast", "test_transforms_are_right_or_refused", "test_compiled",
    "test_operators_are_registered_right", "test_every_program_keeps_to_its_own_memory",
    "test_launches_move_the_bytes_that_are_said", "test_every_large_kernel_has_its_work_described",
    "test_bad_arguments_are_refused_by_name", "test_a_public_function_looks_as_it_was_declared",
    "test_cases_of_operators",
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """Runs code beside a copy of the operator, in which a text is replaced."""

    def run(code, old="", new="", *, interpreter=True):
        folder = shutil.copytree(FOLDER, tmp_path / "scaled_rows")
        texts = {path: path.read_text("utf-8") for path in folder.glob("*.py")}
        assert sum(text.count(old) for text in texts.values()) == 1 or not old
        for path, text in texts.items():
            path.write_text(text.replace(old, new) if old else text, "utf-8")
        return run_python(ADDED.format(str(tmp_path)) + code, TRITON_INTERPRET=str(int(interpreter)))

    return run


def test_the_tests_of_all_operators_take_it(run):
    told = run(TESTED.format(" ".join(OVER_CARDS)))
    assert told.returncode == 0, told.stdout[-3000:] + told.stderr[-2000:]
    assert set(re.findall(r"^PASSED .*::(\w+)", told.stdout, re.MULTILINE)) >= NAMES


@pytest.mark.parametrize("code", [EMULATED, COMPILED], ids=["emulator", "compile"])
def test_its_kernel_is_compiled_and_emulated(run, code):
    told = run(code, interpreter=False)
    assert told.returncode == 0, told.stdout + told.stderr[-2000:]
    assert told.stdout.count("scaled_rows") >= 3


#: What is changed in the folder, what finds it, and what that says.
ACCESSES = "tests/cvt_kernels/ops/test_accesses.py"
FAULTS = {
    "values": (" * scale.to(WIDE)", " + scale.to(WIDE)", "tests/contract", "::test_values"),
    "gradients": ('"has no gradients"', "None", "tests/contract", "::test_gradients_are_refused"),
    "shapes": (
        '("scaled_rows", _scaled)',
        '("scaled_rows", lambda x, scale: x[0])',
        "tests/contract",
        "::test_compiled",
    ),
    "bounds": (".element_ty), mask=i < elements)", ".element_ty))", ACCESSES, "outside of its tensors"),
    "bytes": ('names="x out"', 'names="x"', ACCESSES, "::test_launches_move_the_bytes_that_are_said"),
    "arguments": (
        'checks.check_tensor_like("s',
        'print("s',
        "tests/cvt_kernels/test_arguments.py",
        "::test_bad",
    ),
    "channels": ("i % channels", "(i + 1) % channels", FUZZED, "triton outputs 0 is off by"),
    "overlapping": ("    grid_dependency_synchronize()\n", "", EMULATED, "before griddepcontrol.wait"),
}


@pytest.mark.rest
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_it_is_found(run, fault):
    old, new, code, said = FAULTS[fault]
    code = code if "\n" in code else TESTED.format(code)
    assert said in run(code, old, new, interpreter=code not in (EMULATED, COMPILED)).stdout
