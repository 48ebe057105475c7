"""Launches of Triton kernels, hooks that record or intercept them, and compiling without a launch."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import machine


class Chip(NamedTuple):
    """The compute capability of a GPU, 90 for sm_90, its streaming multiprocessors, and its name."""

    capability: int
    multiprocessors: int
    name: str = ""


class Launch(NamedTuple):
    """A launch of a Triton kernel: all parameters by name, constants included, and Triton's options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]

    def start(self) -> None:
        """Launches the kernel on the current GPU and stream."""
        settle_key(self.kernel)
        self.kernel[self.grid](**self.arguments, **self.options)


class _Interception(NamedTuple):
    chip: Chip | None
    take: Callable[[Launch], Any]


#: The hook that gets launches instead of the GPU, or None.
interception: _Interception | None = None


@contextlib.contextmanager
def recorded_launches(chip: Chip) -> Iterator[list[Launch]]:
    """Records a block's launches of Triton kernels, planned for ``chip``, without running them."""
    launches: list[Launch] = []
    with intercepted_launches(launches.append, chip):
        yield launches


@contextlib.contextmanager
def intercepted_launches(take: Callable[[Launch], Any], chip: Chip | None = None) -> Iterator[None]:
    """Passes a block's launches of Triton kernels to ``take``, which may run them.

    They are planned for ``chip``, by default this machine's GPU.
    """
    global interception
    previous, interception = interception, _Interception(chip, take)
    try:
        yield
    finally:
        interception = previous


def chip(device: torch.device) -> Chip:
    """Returns the chip of a device; for Triton's interpreter on the CPU, sm_90 with one multiprocessor."""
    if interception is not None and interception.chip is not None:
        return interception.chip
    return _cuda_chip(device.index) if device.type == "cuda" else Chip(90, 1)


@functools.cache
def _cuda_chip(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    return Chip(capability, properties.multi_processor_count, properties.name)


#: The first version of CUDA whose graphs keep programmatic dependent launches.
_GRAPHS_KEEP_OVERLAPS = 12_030


def overlaps(device: torch.device) -> bool:
    """Returns whether launches on a device overlap the kernel before: programmatic dependent launch.

    They do on GPUs of compute capability 9.0 and newer, unless ``CVT_KERNELS_PDL`` is 0. Such a kernel may
    start while the one before on the stream, whatever kernel that is, still runs, and waits for its end
    before it touches memory. Copies, events and other streams order it as they order any launch.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    requested = os.environ.get("CVT_KERNELS_PDL") or "1"
    if requested not in ("0", "1"):
        raise ValueError(f"CVT_KERNELS_PDL: got {requested!r}, expected 0 or 1")
    return requested == "1" and chip(device).capability >= 90 and _graphs_keep_overlaps()


@functools.cache
def _graphs_keep_overlaps() -> bool:
    """Returns whether CUDA graphs keep such launches with this driver; True without a driver."""
    version = machine.cuda_driver_version()
    return not version or version >= _GRAPHS_KEEP_OVERLAPS


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, options: dict[str, int], **arguments: Any) -> None:
    """Launches a Triton kernel on the current stream of the device of ``on``, with arguments by name.

    The kernel begins with ``grid_dependency_synchronize`` of ``ops/triton_launch``.
    """
    options = {"enable_fp_fusion": True, **options}  # Triton's default up to 3.9
    if overlaps(on.device):
        options["launch_pdl"] = True
    if interception is not None:
        interception.take(Launch(kernel, grid, arguments, options))
        return
    settle_key(kernel)
    with current_device_of(on):
        kernel[grid](**arguments, **options)


_settled: set[int] = set()  # ids, since the hash of a kernel is made of its key


def settle_key(kernel: Any) -> None:
    """Computes the keys of a kernel and of the functions that it calls in Triton's cache, the called first.

    A function's key has the constants of a called one only if that has its key by then (Triton 3.6 and 3.7).
    So the keys would depend on which kernel comes first, and another process would compile again what is
    cached.
    """
    if id(kernel) in _settled:
        return
    _settled.add(id(kernel))
    if hasattr(type(kernel), "cache_key"):  # not in Triton's interpreter
        names = getattr(kernel, "__globals__", {})
        for node in ast.walk(kernel.parse()) if hasattr(kernel, "parse") else ():
            called = _value_of(node, names)
            if hasattr(type(called), "cache_key"):
                settle_key(called)
        kernel.cache_key  # noqa: B018 (a property that keeps its value)


def _value_of(node: ast.AST, names: dict[str, Any]) -> Any:
    """Returns what a name, or an attribute of a module, stands for; None if that is nothing global."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = names.get(node.value.id)
        return getattr(module, node.attr, None) if isinstance(module, types.ModuleType) else None
    return None


def is_descriptor(value: object) -> bool:
    """Returns whether a kernel's argument is a tensor descriptor, of Triton or Gluon."""
    return hasattr(value, "block_shape")


_NOTHING = contextlib.nullcontext()


def current_device_of(on: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes a tensor's device the current one within a block; fast if it is current already."""
    if not on.is_cuda or on.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device_of(on)


# Compiled without a launch, into Triton's cache, where launches find them ---------------------------------


class TritonKernel(NamedTuple):
    """A Triton kernel specialized for some arguments; plain data, which can go to another process.

    Attributes:
        arch: Compute capability, 90 for sm_90.
        module: The module of the kernel.
        name: The name of the kernel in its module.
        signature, constants, attributes: Triton's description of the arguments, the last two by the path to
            an argument: its index, then indices within tuples.
        options: Triton's options, such as ``num_warps``.
    """

    arch: int
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    def compile(self) -> Any:
        """Compiles the kernel into Triton's cache, under the key of a launch, or finds it there."""
        import triton

        try:
            return triton.compile(self.source(), target=self.target(), options=self.options)
        except Exception as error:  # Triton's own do not all survive the way to another process
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error

    def is_compiled(self) -> bool:
        """Returns whether the kernel is in Triton's cache, in less than a hundredth of a second."""
        import triton

        source = self.source()
        source.make_ir = None  # would be called for what is not there
        with contextlib.suppress(Exception):
            return triton.compile(source, target=self.target(), options=self.options) is not None
        return False

    def compile_into_cache(self) -> None:
        """Compiles the kernel, and the launcher in C that Triton up to 3.6 has for each signature."""
        compiled = self.compile()
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if hasattr(driver, "make_launcher"):
            driver.CudaLauncher(compiled.src, compiled.metadata)

    def source(self) -> Any:
        """Returns Triton's description of the kernel."""
        kernel = getattr(importlib.import_module(self.module), self.name)
        settle_key(kernel)
        return source_of(kernel, self.signature, self.constants, self.attributes)

    def target(self) -> Any:
        """Returns Triton's description of the GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def source_of(kernel: Any, *facts: dict[Any, Any]) -> Any:
    """Returns the source of a kernel in Triton or Gluon, by its signature, constants and attributes."""
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(kernel, *facts)
    from triton.compiler import ASTSource

    return ASTSource(kernel, *facts)


def specialize(launch: Launch, arch: int) -> TritonKernel:
    """Returns the kernel of a launch, specialized as Triton specializes it for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments)
    _, signature, constants, attributes = kernel._pack_args(
        backend, launch.options, bound, specialization, {}
    )
    names = kernel.__module__, kernel.__name__
    return TritonKernel(arch, *names, signature, constants, attributes, launch.options)
