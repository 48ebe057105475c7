"""Facts about this machine: what is installed, the compiled extension, GPUs, and captures of CUDA graphs.

Nothing is looked up at import.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

from ..messages import stacklevel_of_caller
from .toolkit import CPU_SETS, cpu_flags, cpu_sets_here, find_nvcc

#: Whether Triton's interpreter runs the kernels, on the CPU.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

#: The compute capability that the kernels need.
OLDEST_GPU = (8, 0)
#: The first Triton whose products are right on compute capability 10.x (pytorch issue 181248, triton issues
#: 9871 and 10590).
_TRITON_FOR_10 = "3.7.1"

_EXTENSION = "cvt_kernels._C"
#: The command that builds the extension, for messages.
_BUILD = "in a checkout: pip install 'setuptools>=77' ninja && pip install --no-build-isolation ."


class ExtensionError(ImportError):
    """The compiled extension is installed but does not load; the message says why."""


class Machine(NamedTuple):
    """Facts about this machine, as text to print."""

    python: str
    torch: str
    triton: str
    cpu: str
    gpus: tuple[str, ...]
    nvcc: str
    extension: str


@functools.cache
def facts() -> Machine:
    """Returns the facts about this machine, cached; runs ``nvcc --version``, but creates no CUDA context."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return Machine(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        torch=torch.__version__,
        triton=installed_version("triton") or "not installed",
        cpu=f"{cpu_name()}, {torch.get_num_threads()} threads",
        gpus=tuple(f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB" for p in properties),
        nvcc=_nvcc(),
        extension=_extension(),
    )


def why_triton_unavailable(device_type: str) -> str | None:
    """Returns why this machine cannot run Triton kernels, or None."""
    if not INTERPRETING:
        if not torch.cuda.is_available():
            return "there is no NVIDIA GPU"
        if (reason := _why_no_gpu_runs("triton")) is not None:
            return reason
    if importlib.util.find_spec("triton") is None:
        hint = "; 'pip install triton' installs it" if platform.system() == "Linux" else ""
        return f"the package triton is not installed{hint}"
    return None


def why_gluon_unavailable(device_type: str) -> str | None:
    """Returns why this machine cannot run kernels in Gluon, Triton's lower language, or None."""
    reason = why_triton_unavailable(device_type) or _why_no_gpu_runs("gluon")
    if reason is not None:
        return reason
    if INTERPRETING:
        return "Triton's interpreter does not run Gluon"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return f"Triton {installed_version('triton')} has no Gluon"
    return None


@functools.cache
def why_not_importable(module: str) -> str | None:
    """Returns why a module of kernels cannot be imported, or None once it is.

    Gluon is experimental: its functions get other names from one version of Triton to the next.
    """
    try:
        importlib.import_module(module)
    except (ImportError, AttributeError, TypeError) as error:
        versions = f"torch {torch.__version__}, Triton {installed_version('triton')}"
        return f"its kernels cannot be imported ({versions}): {error}"
    return None


def why_extension_unavailable(device_type: str) -> str | None:
    """Returns why this machine has no kernels of the extension for a type of device, or None.

    It raises ExtensionError if the extension is installed but does not load.
    """
    if not has_extension():
        return f"the extension {_EXTENSION} is not installed: {_how_to_build()}"
    facts = load_extension()
    if device_type != "cuda":
        compiled = facts.cpu_sets.split()
        if set(compiled) & set(cpu_sets_here()):
            return None
        return f"the extension was built for {' '.join(compiled)}, which this CPU lacks; run {_BUILD}"
    return _why_cuda_unavailable(facts.cuda, facts.cuda_request) or _why_no_gpu_runs("cuda")


def _why_no_gpu_runs(backend: str) -> str | None:
    """Returns why no GPU here can run kernels of a backend; None if one can, or if there is no GPU."""
    reasons = [why_gpu_unsupported(backend, index) for index in range(torch.cuda.device_count())]
    return None if not reasons or None in reasons else reasons[0]


@functools.cache
def why_gpu_unsupported(backend: str, index: int) -> str | None:
    """Returns why a GPU cannot run kernels of ``"gluon"``, ``"triton"`` or ``"cuda"``, or None."""
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    if torch.version.hip is not None:
        return f"there are kernels for NVIDIA's GPUs only, not for {name}"
    if capability < OLDEST_GPU:
        needed, has = (".".join(map(str, numbers)) for numbers in (OLDEST_GPU, capability))
        return f"the kernels need a GPU of compute capability {needed} or newer, {name} has {has}"
    if backend == "gluon" and capability != (9, 0):
        has = ".".join(map(str, capability))
        return f"the kernels in Gluon are for GPUs of compute capability 9.0, {name} has {has}"
    if backend == "triton" and capability[0] == 10:
        version = installed_version("triton")
        if version is not None and TorchVersion(version) < _TRITON_FOR_10:
            return f"Triton below {_TRITON_FOR_10} computes wrong products on {name}; {version} is installed"
    if backend != "cuda":
        return None
    architectures = list(filter(None, load_extension().architectures.split(",")))
    if any(_runs_on(capability, architecture) for architecture in architectures):
        return None
    return f"the extension was built for {', '.join(architectures)}, which {name} cannot run; run {_BUILD}"


def has_extension() -> bool:
    """Returns whether the compiled extension is installed, without loading it."""
    return importlib.util.find_spec(_EXTENSION) is not None


def _how_to_build() -> str:
    """Returns what prevents building the extension here, and the command that builds it."""
    if platform.system() != "Linux":
        return "it is built on Linux only"
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        return (
            f"there is no C++ compiler {compiler!r} here; install one of C++20, such as GCC 11 or newer, and "
            f"run {_BUILD}"
        )
    return f"pip leaves it out where the build does not see torch; run {_BUILD}"


def _why_cuda_unavailable(toolkit: str, requested: str) -> str | None:
    """Returns why the extension has no CUDA kernels that this driver can run, or None."""
    if not toolkit and requested == "0":
        return "the extension was built with CVT_KERNELS_CUDA=0"
    driver = cuda_driver_version() // 1000  # the newest major version
    if driver == 0:
        return "there is no NVIDIA driver"
    if not toolkit:
        lacking = "" if find_nvcc() else "install one, such as PyPI's nvidia-cuda-nvcc, and "
        return f"the extension was built where there was no NVIDIA GPU or no nvcc; {lacking}run {_BUILD}"
    if driver < int(toolkit.split(".")[0]):
        return f"the extension was built with CUDA {toolkit}, but the driver serves CUDA {driver} at most"
    return None


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Returns whether code for ``sm_86`` (or PTX, ``compute_86``) runs on a GPU of a compute capability."""
    kind, _, number = architecture.partition("_")
    if not number.isdigit():  # sm_90a and sm_100f are for exactly that capability
        number = number[:-1]
        return capability == (int(number[:-1]), int(number[-1]))
    built = int(number[:-1]), int(number[-1])
    return capability >= built and (kind == "compute" or capability[0] == built[0])


def cuda_driver_version() -> int:
    """Returns the newest version of CUDA that the driver supports, such as 13000; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


@functools.cache
def load_extension() -> ModuleType:
    """Imports the compiled extension, which registers its operators as ``torch.ops.cvt_kernels``.

    Raises:
        ExtensionError: It does not load.
        ValueError: ``CVT_KERNELS_CPU`` is no instruction set of this CPU and of the extension.
    """
    try:
        extension = importlib.import_module(_EXTENSION)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torch refuses a registration
        raise ExtensionError(
            f"{_EXTENSION} is installed but does not load; build it again with "
            f"'pip install --no-build-isolation .' (torch {torch.__version__}): {error}"
        ) from error
    if os.environ.get("CVT_KERNELS_CPU"):
        _check_instruction_set()
    return extension


def _check_instruction_set() -> None:
    """Raises ValueError if the extension refuses ``CVT_KERNELS_CPU``.

    It reads the variable at the first call of each family of kernels.
    """
    try:
        with _disable_current_modes():  # a mode of fake tensors, for example, would not run the kernel
            torch.ops.cvt_kernels.gelu(torch.zeros(1, device="cpu"), None, "none")
    except RuntimeError as error:
        _, name, reason = str(error).partition("\n")[0].partition("CVT_KERNELS_CPU: ")
        if not name:
            raise
        raise ValueError(name + reason) from error


def _extension() -> str:
    try:
        reason = why_extension_unavailable("cpu")
    except ExtensionError as error:
        return str(error)
    if reason is not None:
        return "not built" if not has_extension() else reason
    facts = load_extension()
    cuda = f"CUDA {facts.cuda} for {facts.architectures.replace(',', ', ')}" if facts.cuda else "no CUDA"
    return f"{facts.version}, CPU {_cpu_sets(facts.cpu_sets.split())}, {cuda}, {facts.compiler}"


def _cpu_sets(compiled: list[str]) -> str:
    """Returns the instruction sets of the extension, and the newest of the CPU if it is not among them."""
    newest = cpu_sets_here()[-1]
    return " ".join(compiled) + ("" if newest in compiled else f" (built here again: {newest})")


@functools.cache
def cpu_sets() -> frozenset[str]:
    """Returns the instruction sets of this CPU up to the one that serves: ``CVT_KERNELS_CPU``, or the best.

    ``avx512_fp16``, which only PyTorch uses, is among them where the CPU has it.
    """
    names, order = cpu_sets_here(), list(CPU_SETS)
    most = os.environ.get("CVT_KERNELS_CPU")
    most = most if most in names else names[-1]
    served = {name for name in names if order.index(name) <= order.index(most)}
    return frozenset(served | cpu_flags() & {"avx512_fp16"})


def installed_version(package: str) -> str | None:
    """Returns the version of a package without importing it, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_device() -> str:
    """Returns the name of the CPU and its instruction set: figures of one are not those of another."""
    requested = os.environ.get("CVT_KERNELS_CPU")
    return f"{cpu_name()} ({requested or cpu_sets_here()[-1]})"


def cpu_name() -> str:
    """Returns the name of the CPU, such as ``AMD EPYC 9554 64-Core Processor``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _nvcc() -> str:
    """Returns the version and path of nvcc, such as ``13.0 (/usr/local/cuda/bin/nvcc)``."""
    path = find_nvcc()
    if path is None:
        return "not found"
    try:
        output = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path} does not run: {error}"
    release = next((line.split("release", 1)[1] for line in output.splitlines() if "release" in line), " ?")
    return f"{release.split(',')[0].strip()} ({path})"


def is_thread_of_autograd() -> bool:
    """Returns whether this is PyTorch's thread for the backward on a GPU, for which another one waits."""
    if torch._C._current_autograd_node() is None:
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)


class _Rehearsal(threading.local):
    """A flag in each thread: whether its work rehearses a capture."""

    is_on = False


_rehearsal = _Rehearsal()


def is_capturing(x: Tensor) -> bool:
    """Returns whether work on a tensor is captured in a CUDA graph, or rehearses a capture."""
    return x.is_cuda and (_rehearsal.is_on or torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def rehearsed_capture() -> Iterator[None]:
    """Lets this thread launch the kernels of a later capture, so that all are compiled and loaded before."""
    previous, _rehearsal.is_on = _rehearsal.is_on, True
    try:
        yield
    finally:
        _rehearsal.is_on = previous


#: Held by captures, and to be held by synchronizations of a whole device: one fails while any other thread of
#: the process captures.
device_wide = threading.RLock()


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """Captures the work of a block into a CUDA graph, and cleans up after a failed capture.

    After a failure, torch itself leaves the stream current, the allocator in the graph's pool and, up to
    torch 2.11, random numbers unusable until another capture succeeds. All of that is undone here. Other
    threads may meanwhile do what a capture forbids, except for captures of this package, which take turns.

    Raises:
        Exception: The block's error, or torch's if the capture fails.
    """
    failures: list[Exception] = []
    with device_wide, torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    yield
                except Exception as error:
                    failures.append(error)
                    raise
        except Exception as error:
            with torch.cuda.stream(stream):
                _undo_capture(graph, pool)
            # The end of a failed capture raises another error; the block's own is raised instead. It is not
            # kept here, since its traceback keeps the block's tensors alive.
            raise (failures.pop() if failures else error) from None


def _undo_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Cleans up after a failed capture on the current stream."""
    device = torch.cuda.current_device()
    try:
        graph.pool()  # exists after the end of a capture; the graph's destructor then releases it
    except RuntimeError:
        for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):  # the capture did not get that far, or is past it
                give_back(device, pool)
    with contextlib.suppress(RuntimeError):  # the GPU is no longer usable
        generator = torch.cuda.CUDAGraph()
        generator.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")  # or torch warns of an empty graph
        generator.capture_end()


# Kernels that are not installed --------------------------------------------------------------------------
#
# Without them PyTorch's own operators serve and nothing fails, so an incomplete installation would go
# unnoticed.

_said_missing = False


def warn_of_missing_kernels() -> None:
    """Warns once per process if kernels for this machine are not installed."""
    global _said_missing
    if _said_missing:
        return
    _said_missing = True
    reason = why_kernels_are_missing()
    if reason is not None:
        warnings.warn(
            f"kernels are missing, and PyTorch's own operators serve in their place: {reason}",
            RuntimeWarning,
            stacklevel=stacklevel_of_caller(),
        )


def why_kernels_are_missing() -> str | None:
    """Returns which kernels for this machine are not installed and how to install them, or None."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    gpus = range(torch.cuda.device_count()) if torch.version.cuda and torch.cuda.is_available() else ()
    has_gpu = any(torch.cuda.get_device_capability(index) >= OLDEST_GPU for index in gpus)
    reasons = []
    with contextlib.suppress(ExtensionError):  # the first call will raise it
        reasons.append(why_extension_unavailable("cpu"))
        if has_gpu and has_extension() and load_extension().cuda_request != "0":
            reasons.append(why_extension_unavailable("cuda"))  # 0: left out on purpose
    if has_gpu:
        reasons.append(why_triton_unavailable("cuda"))
    return "; ".join(reason for reason in reasons if reason is not None) or None
