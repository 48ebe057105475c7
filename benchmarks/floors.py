"""The floor of every launch: the least time in which a GPU moves its bytes and multiplies its matrices.

:func:`work_of` says what a launch of a Triton kernel has to move and to multiply, by a function for each
kernel. :class:`Recorder` notes all launches of a block, PyTorch's too, on a GPU or on tensors without memory.
:func:`forward_launches` lists those of a frozen CvT's forward without a GPU, :func:`pyramid_launches` those
of SegFormer, PVT and PVT v2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from cvt.config import default_image_size
from cvt.factory import create_model
from cvt.tools.commands.compile.gpus import LIMITS
from cvt.tools.commands.pyramids import PYRAMIDS, build_pyramid
from cvt_kernels import accelerate, backends, launching
from cvt_kernels.acceleration.class_token import with_class_token_only
from cvt_kernels.cards import Work, all_cards, bytes_of, tensors_of
from cvt_kernels.ops import weight_cache


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

    @contextlib.contextmanager
    def without_packing(self) -> Iterator[None]:
        """Leaves out what packs weights, which tensors without memory cannot keep."""
        packed = weight_cache.packed

        def unnoted(*args: Any, **settings: Any) -> Any:
            noted = len(self.launches)
            made = packed(*args, **settings)
            del self.launches[noted:]
            return made

        weight_cache.packed = unnoted
        try:
            yield
        finally:
            weight_cache.packed = packed

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


def kernel_name(function: str) -> str:
    """Returns the name of a kernel of this project by that of its function in Triton."""
    return function.strip("_").removesuffix("_kernel")


#: PyTorch's operators that are not views and launch nothing all the same, and those that do not read their
#: first argument.
_WITHOUT_LAUNCH = (
    "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "promote_types",
)  # fmt: skip
_OVERWRITING = ("copy_", "fill_", "zero_")


# A forward without a GPU ----------------------------------------------------------------------------------


def forward_launches(
    model: str = "cvt_13",
    *,
    batch: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = 90,
    image_size: int | None = None,
) -> list[ForwardLaunch]:
    """Lists the launches of a frozen model's forward, with this project's kernels wherever they can serve.

    Args:
        model: A name of ``PRESETS``.
        batch: Images of the batch.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
        image_size: Pixels of a side; None for the model's own.
    """
    size = image_size or default_image_size(model)
    recorder = Recorder()
    with torch.device("meta"):
        built = accelerate(create_model(model).to(dtype).eval(), freeze=True)
        images = torch.empty(batch, 3, size, size, dtype=dtype)
    stages = built._built_stages()
    last = stages[-1], stages[-1].blocks[-1]
    for number, stage in enumerate(stages, start=1):
        stage.register_forward_pre_hook(lambda *_, part=f"stage {number}": setattr(recorder, "part", part))
        stage.register_forward_hook(lambda *_: setattr(recorder, "part", "head"))
    chip = launching.Chip(arch, LIMITS[arch].multiprocessors)
    with torch.no_grad(), backends.replaced(_serving_everywhere), backends.requesting(*_OURS):
        with launching.intercepted_launches(lambda launch: None, chip):
            built(images)  # folds the weights
        with recorder.recording(chip), recorder.without_packing():
            with_class_token_only(*last, lambda: built(images))  # in spite of the hooks
    return recorder.launches


def pyramid_launches(
    model: str = "segformer_b0",
    *,
    batch: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = 90,
    freeze: bool | None = True,
) -> list[ForwardLaunch]:
    """Lists the launches of a warm forward of a model of transformers, by this project's kernels.

    Args:
        model: A name of ``cvt.tools.commands.pyramids.PYRAMIDS``.
        batch: Images of the batch.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
        freeze: As of ``accelerate``; None for a live model in evaluation.
    """
    size = PYRAMIDS[model].image_size
    built = build_pyramid(model, None, size)
    return evaluation_launches(built, (batch, 3, size, size), dtype=dtype, arch=arch, freeze=freeze)


def evaluation_launches(
    model: torch.nn.Module,
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = 90,
    freeze: bool | None = True,
) -> list[ForwardLaunch]:
    """Lists the launches of a warm forward of a model of transformers, which becomes one without memory.

    Args:
        model: Any model that ``accelerate`` takes.
        shape: Of its images.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
        freeze: As of ``accelerate``. A CvT's stages are served as one only where it is True, since nothing
            may count operators of live ones.
    """
    built = accelerate(model.to(dtype).eval(), freeze=freeze).to("meta")
    images = torch.empty(shape, dtype=dtype, device="meta")
    recorder, chip = Recorder(), launching.Chip(arch, LIMITS[arch].multiprocessors)
    with torch.no_grad(), backends.replaced(_serving_everywhere), backends.requesting(*_OURS):
        with launching.intercepted_launches(lambda launch: None, chip):
            built(images)  # examines the modules
        with mock.patch.object(weight_cache, "packed", _packed_before), recorder.recording(chip):
            built(images)
    return recorder.launches


def _packed_before(weight: Tensor, key: Any, make: Callable[[], Any], others: Any = ()) -> Any:
    """Returns a packed copy without noting launches; by their addresses those on meta are not told apart."""
    with _disable_current_modes():
        return make()


_OURS: tuple[backends.Backend, ...] = ("gluon", "triton", "cuda", "composed", "reference")


def _serving_everywhere(
    operator: str, backend: str, implementation: backends.Implementation
) -> backends.Implementation:
    """Returns an implementation that serves tensors without memory."""
    if backend not in _OURS:
        return implementation
    loaded = implementation.load()
    return backends.Implementation(loaded.function, why_unsupported=loaded.why_unsupported)


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
