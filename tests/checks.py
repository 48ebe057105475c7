"""The accuracy rule, and other helpers that several tests share."""

import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from cvt_kernels import backends, reference


def assert_accurate(
    actual: Tensor, same_dtype: Tensor, exact: Tensor, *, factor: float = 2.0, floor: float = 1.0
) -> None:
    """Our error against float64 may be at most ``factor`` times that of PyTorch in the same dtype.

    Args:
        actual: Our result, in the dtype under test.
        same_dtype: An independent composition of PyTorch's own operators in that dtype.
        exact: The float64 result.
        factor: 2 for values, 3 for gradients.
        floor: Also allowed, in units in the last place of the largest exact value.
    """
    assert exact.dtype == torch.float64
    assert actual.dtype == same_dtype.dtype
    assert actual.shape == same_dtype.shape == exact.shape
    ours = (actual.double() - exact).abs().max().item()
    theirs = (same_dtype.double() - exact).abs().max().item()
    ulp = torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert ours <= factor * theirs + floor * ulp, (
        f"error {ours:.3e}, PyTorch's {theirs:.3e}, one ulp {ulp:.3e}"
    )


def compiler() -> list[str]:
    """The C++ compiler that builds the extension."""
    return shlex.split(os.environ.get("CXX") or "c++")


def instruction_sets_here() -> tuple[str, ...]:
    """Values of CVT_KERNELS_CPU beside ``plain`` that this CPU has."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"AVX2": ("avx2",), "AVX512": ("avx2", "avx512")}.get(capability, ())


def run_sanitized(family: str, scratch: Path, flags: str = "") -> None:
    """Runs tests/csrc/<family>_sanitized.cpp on the loops of csrc, with AddressSanitizer and UBSan."""
    root, program = Path(__file__).parents[1], scratch / "sanitized"
    sources = [root / f"csrc/{family}_simd.cpp", root / f"tests/csrc/{family}_sanitized.cpp"]
    sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all"
    options = shlex.split(f"-std=c++20 -O0 -g1 -Wno-psabi {sanitizers} {flags} -DKERNELS=kernels_plain")
    subprocess.run([*compiler(), *options, *map(str, sources), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


def not_built() -> bool:
    """Whether the extension is missing for want of a compiler."""
    return importlib.util.find_spec("cvt_kernels._C") is None and shutil.which(compiler()[0]) is None


def record_calls(operator: str) -> list[tuple[tuple, dict]]:
    """Registers a native backend that notes its arguments before the reference serves the call."""
    calls = []

    def function(*args, **kwargs):
        calls.append((args, kwargs))
        return getattr(reference, operator)(*args, **kwargs)

    backends.register(operator, "native", backends.Implementation(function))
    return calls


def record_all_calls() -> list[str]:
    """Names of the operators as they are called, through a backend that ``auto`` takes."""
    called: list[str] = []
    for operator in backends.OPERATORS:

        def function(*args, operator=operator, **kwargs):
            called.append(operator)
            return getattr(reference, operator)(*args, **kwargs)

        backends.register(operator, "native", backends.Implementation(function))
    return called


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
