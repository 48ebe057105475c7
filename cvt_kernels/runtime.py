"""Which implementation serves a call, and why: backends, their choice, and the facts of this machine.

A kernel file registers its implementations with :func:`register` and serves its public function with
:func:`call`. Nothing here asks the machine anything at import. The choice is plain Python over module
globals, so that ``torch.compile(fullgraph=True)`` traces through it and recompiles when it changes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: Every backend, in the order in which ``auto`` tries them. ``native`` is csrc (CPU or CUDA).
BACKENDS = ("triton", "native", "reference")

#: Every operator of the package.
OPERATORS = (
    "conv_projection",
    "attention",
    "layer_norm",
    "add_layer_norm",
    "gelu",
    "bias_gelu",
    "layer_norm_gelu",
)

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class BackendUnavailable(RuntimeError):  # noqa: N818 (the public name; it says what happened)
    """An explicitly requested backend cannot serve a call.

    Attributes:
        operator: Name of the operator.
        backend: Name of the backend.
        reason: Why it cannot.
    """

    def __init__(self, operator: str, backend: str, reason: str):
        super().__init__(f"{operator}: backend {backend!r} is unavailable: {reason}")
        self.operator, self.backend, self.reason = operator, backend, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.operator, self.backend, self.reason)


class ExtensionError(ImportError):
    """The compiled extension is installed but does not load; the message says why."""


class Implementation(NamedTuple):
    """One operator on one backend.

    Attributes:
        function: Takes the arguments of the public function.
        devices: Device types that it serves; None for every one.
        missing: Given a device type, why this machine cannot run it there at all, or None if it can. Asked
            once, at the first call.
        refuses: Given the arguments of one call, why it cannot serve that call, or None if it can.
        opt_in: By device type, why ``auto`` leaves it alone and only an explicit request takes it.
    """

    function: Callable[..., Any]
    devices: tuple[str, ...] | None = None
    missing: Callable[[str], str | None] | None = None
    refuses: Callable[..., str | None] | None = None
    opt_in: Mapping[str, str] = {}


_implementations: dict[str, dict[str, Implementation]] = {operator: {} for operator in OPERATORS}
_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
_requested = os.environ.get("CVT_KERNELS_BACKEND") or "auto"
_step_downs: dict[tuple[str, str], str] = {}


def register(operator: str, backend: str, implementation: Implementation) -> None:
    """Makes ``backend`` known for ``operator``, replacing what was registered before.

    Raises:
        ValueError: If the operator or the backend is unknown.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator: got {operator!r}, expected one of {', '.join(OPERATORS)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(BACKENDS)}")
    _implementations[operator][backend] = implementation
    _ask_missing.cache_clear()


class use_backend:  # noqa: N801 (lower case as torch.no_grad)
    """Chooses the backend of every later call in this process, in all threads.

    Takes effect at once; as a context manager it restores the previous choice on exit::

        use_backend("reference")            # from now on
        with use_backend("triton"): ...     # only here

    ``"auto"``, the default, takes the first of ``BACKENDS`` that can serve the call. Any other choice that
    cannot serve a call raises :class:`BackendUnavailable`. The environment variable ``CVT_KERNELS_BACKEND``,
    read at import, sets the choice that a process starts with.

    Raises:
        ValueError: If the name is unknown.
    """

    def __init__(self, name: str):
        global _requested
        _check_backend(name, "backend")
        self._name, self._previous = name, _requested
        _requested = name

    def __enter__(self) -> use_backend:
        global _requested
        _requested = self._name  # again, for an object that is entered more than once
        return self

    def __exit__(self, *exception: object) -> None:
        global _requested
        _requested = self._previous


def _check_backend(name: str, argument: str) -> None:
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"{argument}: got {name!r}, expected one of auto, {', '.join(BACKENDS)}")


def requested_backend() -> str:
    """The backend chosen by :class:`use_backend` or ``CVT_KERNELS_BACKEND``.

    Raises:
        ValueError: If the environment variable holds an unknown name.
    """
    _check_backend(_requested, "CVT_KERNELS_BACKEND")
    return _requested


def call(operator: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Serves ``operator(x, ...)`` with the requested backend, or under ``auto`` the first that can.

    Raises:
        BackendUnavailable: If the requested backend cannot serve the call.
    """
    requested = requested_backend()
    for backend in BACKENDS if requested == "auto" else (requested,):
        reason = unavailable(operator, backend, x.device.type)
        if reason is None:
            implementation = _implementations[operator][backend]
            if implementation.refuses is not None:
                reason = implementation.refuses(x, *args, **kwargs)
            if reason is None:
                return implementation.function(x, *args, **kwargs)
        _step_downs[operator, backend] = reason
    raise BackendUnavailable(operator, backend, _step_downs[operator, backend])


def unavailable(operator: str, backend: str, device_type: str) -> str | None:
    """Why ``backend`` cannot run ``operator`` on a type of device here; None if it can."""
    implementation = _implementations[operator].get(backend)
    if implementation is None:
        return "not implemented in this version"
    reason = _missing(operator, backend, device_type)
    if reason is not None:
        return reason
    # With TRITON_INTERPRET=1 Triton's kernels run on the CPU, far too slowly for anyone who did not ask.
    interpreted = _INTERPRETING and backend == _requested == "triton" and device_type == "cpu"
    if implementation.devices is not None and device_type not in implementation.devices and not interpreted:
        return f"serves {' and '.join(implementation.devices)} tensors, not {device_type}"
    return None if _requested == backend else implementation.opt_in.get(device_type)


def step_downs() -> dict[tuple[str, str], str]:
    """(operator, backend) → why it was last passed over by ``auto``, or refused a call, in this process."""
    return dict(_step_downs)


def backend_for(operator: str, device_type: str) -> str | None:
    """The backend that serves ``operator`` on a type of device, as far as that depends on no other argument.

    Returns:
        Its name, or None if the requested backend cannot.
    """
    requested = requested_backend()
    for backend in BACKENDS if requested == "auto" else (requested,):
        if unavailable(operator, backend, device_type) is None:
            return backend
    return None


def _missing(operator: str, backend: str, device_type: str) -> str | None:
    return _ask_missing(operator, backend, device_type)


# What is installed does not change under a compiled graph. This is what torch.compiler.assume_constant_result
# does; to call it would import torch._dynamo, and with it Triton, and double the time of our import.
_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _ask_missing(operator: str, backend: str, device_type: str) -> str | None:
    missing = _implementations[operator][backend].missing
    return missing(device_type) if missing is not None else None


# Facts of this machine ------------------------------------------------------------------------------------


class Machine(NamedTuple):
    """What this machine has; every field is ready to print."""

    python: str
    torch: str
    triton: str
    cpu: str
    gpus: tuple[str, ...]
    nvcc: str
    native: str


@functools.cache
def machine() -> Machine:
    """Looks at this machine once, on first use. Starts ``nvcc --version`` but no CUDA context."""
    return Machine(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        torch=torch.__version__,
        triton=_installed_version("triton") or "not installed",
        cpu=f"{_cpu_name()}, {torch.get_num_threads()} threads",
        gpus=_gpus(),
        nvcc=_nvcc(),
        native=_native(),
    )


class Chip(NamedTuple):
    """What launch configurations depend on: compute capability (90 for sm_90), number of multiprocessors."""

    capability: int
    multiprocessors: int


def chip(device: torch.device) -> Chip:
    """The GPU of a tensor's device. Triton's interpreter on the CPU is one multiprocessor of an sm_90."""
    return _cuda_chip(device.index) if device.type == "cuda" else Chip(90, 1)


@functools.cache
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    return Chip(10 * properties.major + properties.minor, properties.multi_processor_count)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, config: Any, **constants: Any) -> None:
    """Starts a Triton kernel on the device of the first argument, on its current stream.

    Args:
        kernel: The kernel.
        grid: Programs along each axis.
        args: Its arguments; the first is a tensor.
        config: Its launch configuration, whose ``options`` are Triton's.
        constants: Its ``tl.constexpr`` arguments.
    """
    with torch.cuda.device_of(args[0]):
        kernel[grid](*args, **constants, **config.options)


def triton_missing(device_type: str) -> str | None:
    """Why this machine cannot run Triton kernels, or None; ``missing`` of their implementations."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available() and not _INTERPRETING:
        return "there is no NVIDIA GPU"
    return None


_EXTENSION = "cvt_kernels._C"


def native_missing(device_type: str) -> str | None:
    """Why there are no native kernels for a type of device, or None; ``missing`` of their implementations.

    Raises:
        ExtensionError: They are installed but do not load.
    """
    if importlib.util.find_spec(_EXTENSION) is not None:
        facts = load_extension()
        return _cuda_missing(facts.cuda, _split(facts.architectures)) if device_type == "cuda" else None
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    lacking = "" if shutil.which(compiler) else f" (there is no C++ compiler {compiler!r} here)"
    return (
        "the extension is not part of this installation; with torch and a C++ compiler installed, "
        f"'pip install --no-build-isolation .' builds it{lacking}"
    )


def _cuda_missing(toolkit: str, architectures: tuple[str, ...]) -> str | None:
    """Why what a CUDA toolkit compiled for some architectures does not run on the GPUs of this machine."""
    if torch.version.hip is not None:
        return "the extension has kernels for NVIDIA's GPUs only"
    if not toolkit:
        return "the extension was built where there was no CUDA toolkit (nvcc), or with CVT_KERNELS_CUDA=0"
    for index in range(torch.cuda.device_count()):
        if not any(_runs_on(torch.cuda.get_device_capability(index), name) for name in architectures):
            name = torch.cuda.get_device_name(index)
            return f"the extension was built for {', '.join(architectures)}, which {name} cannot run"
    driver = _cuda_driver()
    if driver == 0:
        return "there is no NVIDIA driver"
    if driver < int(toolkit.split(".")[0]):
        return f"the extension was built with CUDA {toolkit}, but the driver serves CUDA {driver} at most"
    return None


def _runs_on(capability: tuple[int, int], architecture: str) -> bool:
    """Whether code for ``sm_86`` (or PTX, ``compute_86``) runs on a GPU."""
    kind, _, number = architecture.partition("_")
    if not number.isdigit():  # sm_90a and sm_100f are for what they name
        number = number[:-1]
        return capability == (int(number[:-1]), int(number[-1]))
    built = int(number[:-1]), int(number[-1])
    return capability >= built and (kind == "compute" or capability[0] == built[0])


def _cuda_driver() -> int:
    """The major version of CUDA that the driver serves at most; 0 if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000


def _split(names: str) -> tuple[str, ...]:
    return tuple(filter(None, names.split(",")))


@functools.cache
def load_extension() -> ModuleType:
    """Imports the compiled extension, which registers its operators as ``torch.ops.cvt_kernels``.

    Raises:
        ExtensionError: It does not load.
    """
    try:
        return importlib.import_module(_EXTENSION)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torch refuses a registration
        raise ExtensionError(
            f"{_EXTENSION} is installed but does not load; build it again with "
            f"'pip install --no-build-isolation .' (torch {torch.__version__}): {error}"
        ) from error


def _native() -> str:
    try:
        missing = native_missing("cpu")
    except ExtensionError as error:
        return str(error)
    if missing is not None:
        return "not built"
    facts = load_extension()
    cuda = f"CUDA {facts.cuda} for {', '.join(_split(facts.architectures))}" if facts.cuda else "no CUDA"
    return f"{facts.version}, {cuda}, {facts.compiler}"


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> tuple[str, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return tuple(f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB" for p in properties)


def find_nvcc() -> str | None:
    """The CUDA compiler of ``CUDA_HOME`` or the PATH, if there is one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")


def _nvcc() -> str:
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


def doctor() -> str:
    """The facts of this machine and the table of operators × backends, with the reason for each "no"."""
    facts = machine()
    lines = [
        f"python   {facts.python}",
        f"torch    {facts.torch}",
        f"triton   {facts.triton}",
        f"cpu      {facts.cpu}",
        *(f"gpu      {gpu}" for gpu in facts.gpus or ("none",)),
        f"nvcc     {facts.nvcc}",
        f"native   {facts.native}",
        f"backend  {requested_backend()} requested",
        "",
    ]
    device_types = ("cpu", "cuda") if facts.gpus else ("cpu",)
    reasons: list[str] = []
    rows = [("operator", *BACKENDS, *(f"auto on {device}" for device in device_types))]
    for operator in OPERATORS:
        answers = [_doctor_answer(operator, backend, device_types, reasons) for backend in BACKENDS]
        chosen = [_first_available(operator, device) for device in device_types]
        rows.append((operator, *answers, *chosen))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))]
    if _step_downs:
        lines += ["", "passed over in this process:"]
        lines += [f"  {operator}, {backend}: {reason}" for (operator, backend), reason in _step_downs.items()]
    return "\n".join(lines)


def _doctor_answer(operator: str, backend: str, device_types: tuple[str, ...], reasons: list[str]) -> str:
    """Answers "yes", or "no (n)" with the n-th of ``reasons``, to which a new reason is appended."""
    refusals = [_unavailable_or_broken(operator, backend, device) for device in device_types]
    if None in refusals:
        return "yes"
    reason = f"{backend}: {refusals[0]}"
    if reason not in reasons:
        reasons.append(reason)
    return f"no ({reasons.index(reason) + 1})"


def _first_available(operator: str, device_type: str) -> str:
    served = (b for b in BACKENDS if _unavailable_or_broken(operator, b, device_type) is None)
    return next(served, "none")


def _unavailable_or_broken(operator: str, backend: str, device_type: str) -> str | None:
    """As :func:`unavailable`, for a report that goes on where a call would raise."""
    try:
        return unavailable(operator, backend, device_type)
    except ExtensionError:
        return "the extension does not load, see above"


# Argument checks that the public functions share ----------------------------------------------------------


def check_float_tensor(name: str, value: object, shape: str) -> None:
    """Raises TypeError unless ``value`` is a tensor of a floating dtype; ``shape`` is for the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor {shape}")
    if value.dtype not in _FLOAT_DTYPES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOAT_DTYPES)
        raise TypeError(
            f"{name}: got dtype {str(value.dtype).removeprefix('torch.')}, expected one of {expected}"
        )


def check_rank(name: str, tensor: Tensor, rank: int, shape: str) -> None:
    """Raises ValueError unless ``tensor`` has ``rank`` dimensions."""
    if tensor.ndim != rank:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {rank} dimensions {shape}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless ``tensor.shape == expected``."""
    if tensor.shape != expected:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(expected)} {meaning}")


def check_like(name: str, tensor: Tensor, x_name: str, x: Tensor, also: tuple[torch.dtype, ...] = ()) -> None:
    """Raises unless ``tensor`` is on the device of ``x`` and has its dtype (or one in ``also``).

    Under autocast the dtypes may differ, but for float64, as with PyTorch's own operators.

    Raises:
        ValueError: Another device.
        TypeError: Another dtype.
    """
    if tensor.device != x.device:
        raise ValueError(f"{name}: is on {tensor.device}, expected {x.device} as {x_name}")
    if tensor.dtype == x.dtype or tensor.dtype in also:
        return
    if torch.float64 in (tensor.dtype, x.dtype) or not autocast_enabled(x):
        got, expected = (str(t.dtype).removeprefix("torch.") for t in (tensor, x))
        raise TypeError(f"{name}: has dtype {got}, expected {expected} as {x_name}")


def wants_gradient(*values: object) -> bool:
    """Whether autograd must see what is computed from these arguments, in reverse or in forward mode."""
    # There is no public way to ask; without this one, the answer is on the safe side.
    if getattr(forward_ad, "_current_level", 0) >= 0:
        return True
    return torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for the device of ``x``."""
    device_type = x.device.type
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
