"""The accuracy rule as an assertion, and other helpers that several tests share."""

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cvt_kernels import backends, choose, machine, reference
from cvt_kernels.tuning import accuracy, choices
from cvt_kernels.tuning.choices import Entry
from tests.processes import run_python

#: The programs that tests compile.
BUILD = Path(__file__).parents[1] / "build" / "tests"
#: The pages of the documentation.
DOCS = Path(__file__).parents[1] / "docs"


def assert_accurate(
    actual: Tensor,
    same_dtype: Tensor,
    exact: Tensor,
    *,
    factor: float = accuracy.VALUE_FACTOR,
    floor: float = 1.0,
) -> None:
    """Fails if our error against float64 is larger than ``cvt_kernels.tuning.accuracy`` allows.

    Args:
        actual: Our result, in the dtype under test.
        same_dtype: An independent composition of PyTorch's own operators in that dtype.
        exact: The float64 result.
        factor: 2 for values, 3 for gradients.
        floor: Also allowed, in units in the last place of the largest exact value.
    """
    assert exact.numel(), "there is nothing to compare"
    error = accuracy.compare(actual, same_dtype, exact, factor=factor, units=floor)
    assert error.passed, str(error)


class Terminal(io.StringIO):
    """A standard error that says of itself that it is a terminal, on which bars are drawn."""

    def isatty(self) -> bool:
        return True


def compiler() -> list[str]:
    """Returns the command of the C++ compiler that builds the extension."""
    return shlex.split(os.environ.get("CXX") or "c++")


def compiled(command: list[str], sources: list[Path], suffix: str = "") -> Path:
    """Returns what a command compiles, in build/; it runs only where a source or the command changed."""
    read = b"".join(path.read_bytes() for path in sources)
    path = BUILD / f"{hashlib.sha256(read + repr(command).encode()).hexdigest()[:16]}{suffix}"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            made = Path(folder) / f"made{suffix}"
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(path)
    return path


#: Parametrizes by the values of CVT_KERNELS_CPU, all of them relevant to matrix products.
every_instruction_set = pytest.mark.parametrize(
    "name", ["plain", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"]
)


def instruction_sets_here() -> tuple[str, ...]:
    """Returns the values of CVT_KERNELS_CPU beside ``plain`` that this CPU has."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return ()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    names = {"avx2_vnni": "avx_vnni"}  # those that Linux calls otherwise
    if capability == "AVX512":
        names |= {"avx512": "avx512f", "avx512_vnni": "avx512_vnni"}
        names |= {"avx512_bf16": "avx512_bf16", "amx_bf16": "amx_bf16"}
    return "avx2", *(name for name, flag in names.items() if flag in flags)


#: Skips what is compiled for AVX2 where it does not run.
needs_avx2 = pytest.mark.skipif("avx2" not in instruction_sets_here(), reason="this CPU has no avx2")


def run_on_instruction_set(name: str, code: str) -> None:
    """Runs code in a child process that takes the CPU kernels of an instruction set; skips without it.

    It needs a process of its own, since the instruction set is chosen once. A build of ``native`` has the
    newest set of this CPU alone; that of CI has all.
    """
    if name != "plain" and name not in instruction_sets_here():
        pytest.skip("an instruction set that this CPU lacks")
    if name not in machine.load_extension().cpu_sets.split():
        pytest.skip("an instruction set that this build lacks: CVT_KERNELS_CPU_SETS=all builds all")
    result = run_python(code, CVT_KERNELS_CPU=name)
    assert result.returncode == 0, result.stderr


#: The widest dtype that all Triton kernels take here: float64 is for the interpreter.
WIDEST = torch.float32 if torch.cuda.is_available() else torch.float64
#: Skips what takes derivatives by differences, for which float32 is too coarse.
needs_float64 = pytest.mark.skipif(torch.float64 != WIDEST, reason="float64 is for Triton's interpreter")

#: The compiler's option by which UBSan ends a program without a message.
TRAPS = "-fsanitize-undefined-trap-on-error"


def not_built() -> bool:
    """Returns whether the extension is missing because there is no compiler."""
    return importlib.util.find_spec("cvt_kernels._C") is None and shutil.which(compiler()[0]) is None


#: Skips what the extension computes. Where a compiler was at hand and it is missing all the same, tests fail.
needs_extension = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
#: The backend of the extension, as a parameter.
CPU_KERNELS = pytest.param("cpu", marks=needs_extension)


def implementation(operator: str, function: Callable[..., Any], **conditions: Any) -> backends.Implementation:
    """Returns an implementation of an operator by functions of its parameters."""
    passing_on = backends.operators[operator].passing_on
    if "why_unsupported" in conditions:
        conditions["why_unsupported"] = passing_on(conditions["why_unsupported"])
    return backends.Implementation(passing_on(function), **conditions)


def add_marked_backend(backend: str, mark: float, operator: str = "gelu", **conditions: Any) -> None:
    """Registers a backend of an operator that adds ``mark`` to its argument."""
    backends.register(operator, backend, implementation(operator, lambda x, *_, **__: x + mark, **conditions))


def remember_entry(backend: str, operator: str, *args: Any, **kwargs: Any) -> None:
    """Lets a backend serve calls with such arguments (the implementations'), as if it had been tuned."""
    choices.use(args[0].device, {choose.cache_key(operator, *args, **kwargs): Entry(backend, {})})
    backends.forget()


def leave_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test run commands as without ``TRITON_INTERPRET``.

    Kernels are imported before: those that a command imports then would not be interpreted in later tests.
    """
    for known in backends.implementations.values():
        for each in known.values():
            with contextlib.suppress(ImportError):
                each.load()
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def record_calls(operator: str) -> list[tuple[tuple, dict]]:
    """Registers a backend ``cpu`` that notes its arguments before the reference serves the call."""
    calls = []

    def function(*args, **kwargs):
        calls.append((args, kwargs))
        return getattr(reference, operator)(*args, **kwargs)

    backends.register(operator, "cpu", implementation(operator, function))
    return calls


def record_all_calls() -> list[str]:
    """Lists the names of the operators as they are called, by a backend ``cpu`` that each of them gets."""
    called: list[str] = []
    for operator in backends.operators:

        def function(call, operator=operator):
            called.append(operator)
            return backends.operators[operator].reference(call)

        backends.register(operator, "cpu", backends.Implementation(function))
    return called


class _Dispatches(TorchDispatchMode):
    """Notes every operator that PyTorch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_operators() -> Iterator[list[str]]:
    """Lists the operators that PyTorch dispatches within a block, such as ``aten.add.Tensor``."""
    with _Dispatches() as dispatches:
        yield dispatches.names


@contextlib.contextmanager
def precision_of(products: Any, precision: str) -> Iterator[None]:
    """Sets the ``fp32_precision`` of ``torch.backends.cuda.matmul`` or ``cudnn.conv`` within a block."""
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        yield
    finally:
        products.fp32_precision = before


def section_of(page: str, heading: str, until: str | None = None) -> str:
    """Returns a section of a page in docs/, up to the next heading of its level or to another heading.

    Args:
        page: The name of the page's file.
        heading: The line of the section's heading, such as ``"## In Python"``.
        until: The line of the heading at which it ends; None for the next one of its level or above.
    """
    level, found, is_code, is_inside = heading.index(" "), [], False, False
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines(keepends=True):
        is_code ^= line.startswith("```")
        if not is_code and re.match("#+ ", line):
            title = line.rstrip()
            is_inside = title == heading or (is_inside and title != until and line.index(" ") > level)
        if is_inside:
            found.append(line)
    assert found, f"{page} has no heading {heading}"
    return "".join(found)


def python_blocks(page: str) -> list[str]:
    """Returns the blocks of Python of a Markdown page."""
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def run_blocks(blocks: list[str]) -> dict[str, Any]:
    """Runs blocks of Python one after another, and returns the names that they leave."""
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    return names


def run(main, *arguments) -> tuple[str, str]:
    """Runs a command that must succeed; returns what it prints, and what it says beside that."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main([str(argument) for argument in arguments]) == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def bad(capsys, main, *arguments) -> str:
    """Runs a command that must fail with one clear line and nothing on stdout; returns the line."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as caught:  # argparse, after printing the usage
        code = caught.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert sum("error:" in line for line in err.splitlines()) == 1
    return err.splitlines()[-1]
