"""Starts of compiled Triton kernels with all but the stream and the addresses of tensors known in advance.

Triton's launcher takes every argument of a kernel apart at every launch, constants included, and encodes the
tensor maps of descriptors again. The compiled extension (``csrc/launches``) keeps the parameters and calls
the driver. Triton's launcher serves where the extension was not built, where ``CVT_KERNELS_DIRECT_LAUNCHES``
is 0, and kernels that need more, such as scratch memory; :func:`prepared` says why.
"""

from __future__ import annotations

import functools
import inspect
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import launching, machine

#: What starts a kernel: takes the stream, then the address of every tensor and of every descriptor's base.
Start = Callable[..., Any]

#: How the driver takes numbers, by Triton's names of types; as in Triton's launcher.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_NO_ADDRESS = bytes(8)
_MAP_BYTES = 128


class Prepared(NamedTuple):
    """A kernel that is ready to be started.

    Attributes:
        start: Starts it.
        why_by_triton: Why Triton's launcher does; None if the extension calls the driver.
    """

    start: Start
    why_by_triton: str | None


class _CannotBePreparedError(Exception):
    """The message says what the extension does not do."""


class _Address(int):
    """An address, as Triton's launcher takes it: a pointer, or the base of a descriptor."""

    def data_ptr(self) -> int:
        return int(self)


def prepared(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> Prepared:
    """Returns what starts a kernel that Triton has compiled and loaded, on the current device.

    Args:
        compiled: The kernel, which stays loaded.
        grid: Its programs, three numbers.
        arguments: What it was compiled for, in order, constants included. Addresses of later launches are
            aligned as these are.
    """
    why = why_not_prepared()
    if why is None:
        try:
            return Prepared(_by_driver(compiled, grid, arguments), None)
        except _CannotBePreparedError as error:
            why = str(error)
        except (AttributeError, TypeError) as error:
            why = f"this Triton describes its kernels in another way: {error}"
    return Prepared(_by_triton(compiled, grid, arguments), why)


@functools.cache
def why_not_prepared() -> str | None:
    """Returns why the extension does not start kernels here, or None.

    Raises:
        ValueError: ``CVT_KERNELS_DIRECT_LAUNCHES`` is neither 0 nor 1.
    """
    requested = os.environ.get("CVT_KERNELS_DIRECT_LAUNCHES") or "1"
    if requested not in ("0", "1"):
        raise ValueError(f"CVT_KERNELS_DIRECT_LAUNCHES: got {requested!r}, expected 0 or 1")
    if requested == "0":
        return "CVT_KERNELS_DIRECT_LAUNCHES is 0"
    try:
        if (reason := machine.why_extension_unavailable("cpu")) is not None:
            return reason
        extension = machine.load_extension()
    except machine.ExtensionError as error:  # which every other use of the extension reports
        return str(error)
    return None if hasattr(extension, "prepare_launch") else "the extension is of an older version"


def addressed(value: Any) -> list[Any]:
    """Returns the tensors and descriptors in an argument of a kernel, in the order of their addresses."""
    if isinstance(value, tuple):
        return [found for each in value for found in addressed(each)]
    return [value] if isinstance(value, Tensor) or launching.is_descriptor(value) else []


# By the driver ----------------------------------------------------------------------------------------------


def _by_driver(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> Start:
    run = compiled.run
    if type(run).__module__ != "triton.backends.nvidia.driver":
        raise _CannotBePreparedError("the kernel has another launcher than Triton's for NVIDIA")
    facts = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid"):
        if getattr(facts, name):
            raise _CannotBePreparedError(f"the kernel has {name}={getattr(facts, name)}")
    if facts.num_ctas != 1 or getattr(run, "gsan_enabled", False) or min(grid) < 1:
        raise _CannotBePreparedError("the kernel runs in clusters, under a sanitizer, or has no programs")
    metas = iter(getattr(facts, "tensordesc_meta", None) or ())
    types = tuple(compiled.src.signature.values())
    parameters = [each for pair in _taken(types, tuple(arguments)) for each in _parameters(*pair, metas)]
    parameters += [("c", _NO_ADDRESS)] * 2  # no scratch memory of either kind
    try:
        start: Start = machine.load_extension().prepare_launch(
            compiled.name, compiled.function, grid, 32 * facts.num_warps, facts.shared,
            bool(facts.launch_pdl), parameters,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:  # such as a driver that lacks a function
        raise _CannotBePreparedError(str(error)) from error
    return start


def _taken(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arguments that a kernel takes, with Triton's names of their types."""
    if isinstance(kind, tuple):
        if len(kind) != len(value):
            raise _CannotBePreparedError(f"the kernel has {len(kind)} arguments, given are {len(value)}")
        for pair in zip(kind, value, strict=True):
            yield from _taken(*pair)
    elif kind != "constexpr":
        yield kind, value


def _parameters(kind: str, value: Any, metas: Iterator[Any]) -> list[tuple[str, bytes]]:
    """Returns the parameters of a kernel for one of its arguments."""
    if kind.startswith("*"):
        return [("p" if isinstance(value, Tensor) else "c", _NO_ADDRESS)]
    if launching.is_descriptor(value):
        sizes = [("c", struct.pack("<i", each)) for each in value.shape]
        strides = [("c", struct.pack("<q", each)) for each in value.strides]
        return [_tensor_map(value, next(metas, None)), *sizes, *strides]
    if kind not in _FORMATS:
        raise _CannotBePreparedError(f"the kernel has an argument of type {kind}")
    return [("c", struct.pack(f"<{_FORMATS[kind]}", value))]


def _tensor_map(descriptor: Any, meta: Any) -> tuple[str, bytes]:
    """Returns the tensor map that Triton encodes for a descriptor, if the driver can move it."""
    if meta is None:
        raise _CannotBePreparedError("the kernel takes descriptors apart")
    address = descriptor.base.data_ptr()
    here, there = (_encoded(descriptor, meta, address + offset) for offset in (0, 4096))
    try:
        moved = machine.load_extension().moved_tensor_map(here, address + 4096)
    except RuntimeError as error:
        raise _CannotBePreparedError(str(error)) from error
    if moved != there:
        raise _CannotBePreparedError("this Triton keeps tensor maps in another way")
    return "m", here


def _encoded(descriptor: Any, meta: Any, address: int) -> bytes:
    """Returns the bytes of a descriptor's tensor map at another address, as Triton encodes it."""
    from triton.backends.nvidia import driver

    like = descriptor_on(descriptor, _Address(address))
    make = driver.make_tensordesc_arg
    given = (like, meta, None)[: len(inspect.signature(make).parameters)]  # Triton 3.9 has a third one
    made = make(*given)[0]
    return machine.load_extension().bytes_at_end(made, _MAP_BYTES)


# By Triton --------------------------------------------------------------------------------------------------


def _by_triton(compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any]) -> Start:
    """Returns a function that calls Triton's launcher, written out, since it runs at every launch."""
    scope: dict[str, Any] = {
        "compiled": compiled, "run": compiled.run, "function": compiled.function, "address": _Address,
        "metadata": compiled.packed_metadata, "descriptor": descriptor_on,
    }  # fmt: skip
    names: list[str] = []

    def written(value: Any) -> str:
        if isinstance(value, tuple) and addressed(value):
            return f"({''.join(f'{written(each)}, ' for each in value)})"
        if isinstance(value, Tensor) or launching.is_descriptor(value):
            names.append(f"a{len(names)}")
            if isinstance(value, Tensor):
                return names[-1]
            scope[f"c{len(scope)}"] = descriptor_on(value, None)  # which keeps no tensor
            return f"descriptor(c{len(scope) - 1}, address({names[-1]}))"
        scope[f"c{len(scope)}"] = value
        return f"c{len(scope) - 1}"

    given = "".join(f"{written(value)}, " for value in arguments)
    blocks = ", ".join(map(str, grid))
    source = f"run({blocks}, stream, function, metadata, None, None, None, {given})"
    start: Start = eval(f"lambda {', '.join(['stream', *names])}: {source}", scope)
    return start


def descriptor_on(like: Any, base: Any) -> Any:
    """Returns a copy of a checked tensor descriptor on another base, without checking again."""
    made = object.__new__(type(like))
    made.__dict__.update(like.__dict__)
    made.base = base
    return made
