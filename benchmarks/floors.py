"""The floor of every launch: the least time in which a GPU moves its bytes and multiplies its matrices.

:func:`work_of` says what a launch of a Triton kernel has to move and to multiply, by a function for each
kernel. :class:`Recorder` notes all launches of a block, PyTorch's too, on a GPU or on tensors without memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cvt.tools.commands.compile.launches import kernel_name
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops.cards import Work, all_cards, bytes_of, tensors_of


class Ceilings(NamedTuple):
    """The rates that a GPU reaches: bytes per second of a copy, operations per second of a large product."""

    copy: float
    product: float


#: As measured on 2026-11-26; the product is of bfloat16.
H200 = Ceilings(4.27e12, 8.0e14)


class ForwardLaunch(NamedTuple):
    """One launch.

    Attributes:
        part: Where it is: ``"stage 1"`` and so on, ``"head"``, or ``""``.
        operator: The operator of this project that makes it, or ``"PyTorch"``.
        kernel: The kernel of this project, or PyTorch's operator.
        bytes: As of :class:`Work`; of PyTorch's operators, all tensors that come in or go out.
        flops: As of :class:`Work`.
        is_ours: Whether it is a kernel of this project.
    """

    part: str
    operator: str
    kernel: str
    bytes: int
    flops: int
    is_ours: bool = True

    def __str__(self) -> str:
        """Returns the kernel, after the operator that it is not named after."""
        if self.kernel.startswith(self.operator):
            return self.kernel
        return f"{self.operator}: {self.kernel}"

    def floor(self, ceilings: Ceilings = H200) -> float:
        """Returns the microseconds that memory or tensor cores need at their full rate, the longer ones."""
        return 1e6 * max(self.bytes / ceilings.copy, self.flops / ceilings.product)


# Recording ------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Notes the launches of a block: ``with recorder.recording(): …``.

    Attributes:
        launches: The launches, in their order.
        part: Where the next ones are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[ForwardLaunch] = []
        self.part = ""
        self._operator: str | None = None

    @contextlib.contextmanager
    def recording(self, chip: launching.Chip | None = None) -> Iterator[None]:
        """Notes the launches of a block, which run. Planned for a ``chip``, they do not."""
        with (
            backends.replaced(self._noting),
            launching.intercepted_launches(functools.partial(self._take, start=chip is None), chip),
            self,
        ):
            yield

    def _noting(
        self, operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        """Returns an implementation that notes whose launches they are."""

        def serve(call: backends.Record) -> Any:
            outer, self._operator = self._operator, operator
            try:
                return implementation.load().function(call)
            finally:
                self._operator = outer

        return dataclasses.replace(implementation, function=serve)

    def _take(self, launch: launching.Launch, *, start: bool) -> None:
        work = work_of(launch)
        self._note(kernel_name(launch.kernel.__name__), *(work or Work(0)))
        if start:
            launch.start()

    def _note(self, kernel: str, size: int, flops: int, *, is_ours: bool = True) -> None:
        operator = self._operator or "PyTorch"
        self.launches.append(ForwardLaunch(self.part, operator, kernel, size, flops, is_ours))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        noted = len(self.launches)
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        # An operator around Triton kernels has been noted by their launches.
        if not function.is_view and name not in _WITHOUT_LAUNCH and len(self.launches) == noted:
            read = args[1:] if name in _OVERWRITING else args
            size = sum(bytes_of(tensor) for tensor in tensors_of((read, kwargs, result)))
            if name == "convolution" and result.is_meta:  # as cuDNN's lies for maps with channels last
                result = result.contiguous(memory_format=torch.channels_last)
            count = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None))
            flops = count(*args, **kwargs, out_val=result) if count is not None else 0
            self._note(name, size, flops, is_ours=function.namespace == "cvt_kernels")
        return result


#: PyTorch's operators that are not views and launch nothing all the same, and those that do not read their
#: first argument.
_WITHOUT_LAUNCH = (
    "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "promote_types",
)  # fmt: skip
_OVERWRITING = ("copy_", "fill_", "zero_")


# The work of each kernel ----------------------------------------------------------------------------------


def work_of(launch: launching.Launch) -> Work | None:
    """Returns the work of a launch; None for a kernel that nothing here describes."""
    name = kernel_name(launch.kernel.__name__)
    describe = _works().get(name.replace("_sliding_", "_"))  # both kinds of kernels move the same
    return None if describe is None else describe(launch.arguments)


@functools.cache
def _works() -> dict[str, Callable[[dict[str, Any]], Work]]:
    """Returns the description of each kernel, by its name."""
    return {kernel: describe for card in all_cards().values() for kernel, describe in card.work.items()}
