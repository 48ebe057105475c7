"""Runs the launches of operators as compiled for a GPU, on the CPU, and compares the results with float64."""

from __future__ import annotations

import contextlib
import importlib
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

import cvt_kernels as ck
from cvt_kernels import backends, machine
from cvt_kernels.launch import launching
from cvt_kernels.launch.launching import source_of, specialize
from cvt_kernels.tuning import accuracy
from tests import accesses
from tests.cvt_kernels.ops import test_accesses
from tests.emulator import calls
from tests.emulator.program import Program, Region, Result, tensor_map
from tests.emulator.ptx import UnsupportedError

_FORMATS = {"fp32": "f", "i32": "i", "i64": "q", "u1": "?"}


class _Interpreting:
    """The module ``machine`` for ``backends``, which lets kernels run on the CPU in the interpreter only."""

    INTERPRETING = True

    def __getattr__(self, name: str) -> Any:
        return getattr(machine, name)


class Ran(NamedTuple):
    """A launch that was run.

    Attributes:
        kernel: The name of the kernel.
        program: The kernel, decoded.
        result: What the run did.
    """

    kernel: str
    program: Program
    result: Result


class Runner:
    """Runs launches of Triton kernels.

    Args:
        arch: The GPU that they are compiled for, as 80.
    """

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self._programs: dict[str, Program] = {}
        self.ran: list[Ran] = []

    def run(self, launch: launching.Launch) -> None:
        """Compiles a launch, and runs it."""
        kernel = specialize(launch, self._arch)
        compiled = triton.compile(
            source_of(
                getattr(importlib.import_module(kernel.module), kernel.name),
                kernel.signature, kernel.constants, kernel.attributes,
            ),
            target=GPUTarget("cuda", self._arch, 32), options=kernel.options,
        )  # fmt: skip
        ptx = compiled.asm["ptx"]
        if ptx not in self._programs:
            self._programs[ptx] = Program(ptx)
        program = self._programs[ptx]
        boxes = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        arguments = [
            part
            for parameter in launch.kernel.params
            for part in _bytes(launch.arguments[parameter.name], kernel.signature[parameter.name], boxes)
        ]
        scratch = len(program.parameters) - len(arguments)  # memory that no kernel asks for
        arguments += [bytes(8)] * scratch
        shared = compiled.metadata.shared
        overlaps = bool(kernel.options.get("launch_pdl"))
        result = program.run(launch.grid, arguments, _regions(launch), shared, overlaps=overlaps)
        name = kernel.name.removeprefix("_").removesuffix("_kernel")
        self.ran.append(Ran(name, program, result))


def _bytes(value: Any, kind: Any, boxes: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Returns the bytes of a parameter for each part of an argument.

    `boxes` are those of the tensor descriptors to come.
    """
    if isinstance(kind, tuple):
        for part, part_kind in zip(value, kind, strict=True):
            yield from _bytes(part, part_kind, boxes)
    elif launching.is_descriptor(value):
        box = next(boxes, None)
        if box is None or len(value.shape) != 2 or box["fp4_padded"]:
            raise UnsupportedError(f"a descriptor as {kind}")
        matrix = value.base.as_strided(value.shape, value.strides)
        yield tensor_map(matrix, box["block_size"], box["swizzle"])
        yield from (struct.pack("i", size) for size in value.shape)
        yield from (struct.pack("q", stride) for stride in value.strides)
    elif isinstance(value, Tensor) and kind.startswith("*"):
        yield struct.pack("q", value.data_ptr())
    elif kind in _FORMATS:
        yield struct.pack(_FORMATS[kind], value)
    elif kind != "constexpr":
        raise UnsupportedError(f"an argument of {kind}")


def _regions(launch: launching.Launch) -> list[Region]:
    """Returns the storages of a launch's tensors; only the elements of the tensors may be touched."""
    allowed: dict[int, np.ndarray] = {}
    for tensor in accesses.tensors_of(launch.arguments):
        mask = accesses._elements(tensor, 1).view(np.uint8)
        start = accesses._start(tensor)
        allowed[start] = allowed[start] | mask if start in allowed else mask
    return [Region(start, mask) for start, mask in allowed.items()]


# Comparing ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    """Lets the operators choose the kernels in Triton and Gluon without a GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backends, "machine", _Interpreting()))
        for by_backend in backends.implementations.values():
            for backend in {"gluon", "triton"} & set(by_backend):
                stack.enter_context(mock.patch.object(by_backend[backend], "why_unavailable", None))
        yield


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Lets calls compute with the same numbers in float64; 8-bit operands stay what they are."""

    def widen(tensor: Tensor) -> Tensor:
        return (
            tensor.detach().double().requires_grad_(tensor.requires_grad)
            if tensor.is_floating_point()
            else tensor
        )

    def widened(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: pytree.tree_map_only(Tensor, widen, function(*args, **kwargs))

    def exact(operator: str, record: backends.Record) -> Any:
        described = backends.operators[operator]
        return (described.exact or described.reference)(record)

    with contextlib.ExitStack() as stack:
        for name, value in {
            "randn": widened(test_accesses.randn),
            "random_conv": widened(test_accesses.random_conv),
            "made": widened(test_accesses.made),
            "call_public": exact,
        }.items():
            stack.enter_context(mock.patch.object(test_accesses, name, value))
        yield


def _gradients(outs: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Returns outputs and gradients, as ``test_accesses.gradients``, of numbers that every dtype has.

    Ones would not do: with them, a BatchNorm's in training are zero.
    """
    outs = outs if isinstance(outs, tuple) else (outs,)
    numbers = torch.Generator().manual_seed(1)
    douts = [torch.randint(-8, 9, out.shape, generator=numbers).to(out.dtype) / 4 for out in outs]
    return *outs, *torch.autograd.grad(outs, inputs, douts)


def results_of(call: Callable[[], Any]) -> list[Tensor]:
    """Returns the results of a call, with the same random numbers every time."""
    torch.manual_seed(0)
    with mock.patch.object(test_accesses, "gradients", _gradients):
        results = call()
    return [r.detach().clone() for r in pytree.tree_leaves(results) if isinstance(r, Tensor)]


class Outcome(NamedTuple):
    """A call that was run.

    Attributes:
        ran: Its launches.
        errors: The errors of the results.
    """

    ran: list[Ran]
    errors: list[accuracy.Error]

    @property
    def is_good(self) -> bool:
        """True if all results are accurate and no access was wrong."""
        return all(e.passed for e in self.errors) and not any(r.result.faults for r in self.ran)

    @property
    def worst(self) -> accuracy.Error:
        """The largest error, compared with what is allowed."""
        return max(
            self.errors, key=lambda e: math.inf if math.isnan(e.ours) else e.ours / (e.allowed or 1e-300)
        )


#: How much larger errors in TF32 may be than those of factors that are rounded to nearest. Where one factor
#: is cut off instead, they are 1.3 to 2.0 times as large, and where both are, 2.3 to 2.7 times.
_AS_CUBLAS = 1.25


class _AsCublas(TorchDispatchMode):
    """Rounds the factors of linear layers to TF32 as cuBLAS does: to nearest, halves away from zero.

    Attention stays as it is: PyTorch's is as exact as float32 whatever the setting.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            args = *args[:-2], *map(_rounded, args[-2:])
        return function(*args, **(kwargs or {}))


def _rounded(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 2**12) & -(2**13)).view(torch.float32)


class Check:
    """A call, and the results of the reference in the same dtype and in float64.

    Args:
        call: The call.
    """

    def __init__(self, call: calls.Call) -> None:
        self._call = call
        with self._precision(), ck.use_backend("reference"):
            with _AsCublas() if call.precision == "tf32" else contextlib.nullcontext():
                self._same = results_of(call.case.call)
            with _in_float64():
                self._exact = results_of(call.case.call)

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        flags = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        before = [flag.fp32_precision for flag in flags]
        for flag in flags:
            flag.fp32_precision = self._call.precision
        try:
            yield
        finally:
            for flag, precision in zip(flags, before, strict=True):
                flag.fp32_precision = precision

    def run(self) -> Outcome:
        """Runs the call, and compares its results with the reference's."""
        runner = Runner(self._call.arch)
        with (
            self._precision(), _enabled(), ck.use_backend(*self._call.backends),
            launching.intercepted_launches(
                runner.run, self._call.case.chip._replace(capability=self._call.arch)
            ),
        ):  # fmt: skip
            actual = results_of(self._call.case.call)
        errors = []
        factor = _AS_CUBLAS if self._call.precision == "tf32" else accuracy.GRADIENT_FACTOR
        for ours, pytorchs, oracle in zip(actual, self._same, self._exact, strict=True):
            errors.append(accuracy.compare(ours, pytorchs.to(ours.dtype), oracle.double(), factor=factor))
        return Outcome(runner.ran, errors)
