"""Every launch of a model's forward on a GPU, counted without one: what each moves and computes.

The model is frozen (``accelerate(freeze=True)``) and runs on tensors without memory, with this project's
kernels wherever they can serve. ``python -m benchmarks.machine_code.forward docs/kernels.md`` puts the table
into the page.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from cvt.commands.compile.gpus import LIMITS
from cvt.config import default_image_size
from cvt.factory import create_model
from cvt_kernels import accelerate, backends, launching
from cvt_kernels.acceleration.class_token import with_class_token_only
from cvt_kernels.tables import markdown

from .page import put_into
from .rates import RATES
from .work import work_of

_BACKENDS: tuple[backends.Backend, ...] = ("triton", "cuda", "reference")


class ForwardLaunch(NamedTuple):
    """One launch of a forward.

    Attributes:
        part: Where it is: ``"stage 1"`` and so on, or ``"head"``.
        operator: The operator of this project that makes it, or PyTorch's.
        kernel: The kernel of this project, or PyTorch's operator.
        bytes: Bytes that must be read from memory or written to it, each tensor once.
        flops: Operations of matrix products.
    """

    part: str
    operator: str
    kernel: str
    bytes: int
    flops: int

    def floor_microseconds(self, arch: int) -> float:
        """Returns the time that memory or tensor cores need at their full rate, the longer one: predicted."""
        rates, chips = RATES[arch], LIMITS[arch].multiprocessors
        clocks = max(self.bytes / rates.dram_bytes, self.flops / rates.tensor_flops) / chips
        return clocks / rates.clock


def forward_launches(
    model: str = "cvt_13",
    *,
    batch: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    arch: int = 90,
    image_size: int | None = None,
) -> list[ForwardLaunch]:
    """Lists the launches of a frozen model's forward, in their order.

    Args:
        model: A name of ``PRESETS``.
        batch: Images of the batch.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
        image_size: Pixels of a side; None for the model's own.
    """
    size = image_size or default_image_size(model)
    recorder = _Recorder()
    chip = launching.Chip(arch, LIMITS[arch].multiprocessors)
    with torch.device("meta"):
        built = accelerate(create_model(model).to(dtype).eval(), freeze=True)
        images = torch.empty(batch, 3, size, size, dtype=dtype)
    stages = built._built_stages()
    last = stages[-1], stages[-1].blocks[-1]
    for number, stage in enumerate(stages, start=1):
        stage.register_forward_pre_hook(lambda *_, part=f"stage {number}": recorder.enter(part))
        stage.register_forward_hook(lambda *_: recorder.enter("head"))
    with (
        torch.no_grad(),
        backends.replaced(recorder.serving_everywhere),
        backends.requesting(*_BACKENDS),
        launching.intercepted_launches(recorder.take, chip),
    ):
        built(images)  # folds the weights
        recorder.launches.clear()
        with recorder:
            with_class_token_only(*last, lambda: built(images))  # in spite of the hooks
    return recorder.launches


class _Recorder(TorchDispatchMode):
    """The launches of a forward on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[ForwardLaunch] = []
        self._part = "head"
        self._operator: str | None = None

    def enter(self, part: str) -> None:
        """Notes where the launches are from now on."""
        self._part = part

    def serving_everywhere(
        self, operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        """Returns an implementation that serves tensors without memory, and notes whose launches they are."""
        if backend not in _BACKENDS:
            return implementation
        implementation.load()
        function = implementation.function

        def serve(call: backends.Record) -> Any:
            with self._within(operator):
                return function(call)

        return backends.Implementation(serve, why_unsupported=implementation.why_unsupported)

    @contextlib.contextmanager
    def _within(self, operator: str) -> Iterator[None]:
        outer, self._operator = self._operator, operator
        try:
            yield
        finally:
            self._operator = outer

    def take(self, launch: launching.Launch) -> None:
        """Notes the launch of a Triton kernel."""
        work = work_of(launch)
        name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
        if work is None:
            raise ValueError(f"{name}: nothing describes its work")
        self._note(name, work.bytes, work.flops)

    def _note(self, kernel: str, size: int, flops: int) -> None:
        operator = self._operator or "PyTorch"
        self.launches.append(ForwardLaunch(self._part, operator, kernel, size, flops))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not function.is_view and function.overloadpacket.__name__ not in _WITHOUT_LAUNCH:
            size = sum(_bytes(value) for value in (args, kwargs, result))
            name = function.overloadpacket.__name__
            if name == "convolution":  # as cuDNN's lies for maps with channels last
                result = result.contiguous(memory_format=torch.channels_last)
            count = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None))
            flops = 0 if count is None else count(*args, **kwargs, out_val=result)
            self._note(name, size, flops)
        return result


#: PyTorch's operators that are not views and launch nothing all the same.
_WITHOUT_LAUNCH = (
    "_reshape_alias", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "promote_types",
)  # fmt: skip


def _bytes(values: Any) -> int:
    """Returns the bytes of the tensors in a value."""
    tensors = (value for value in pytree.tree_leaves(values) if isinstance(value, Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# The page -------------------------------------------------------------------------------------------------


def table(launches: Iterable[ForwardLaunch], arch: int = 90) -> list[str]:
    """Returns the launches as a Markdown table, equal ones in one row, with their sums."""
    rows = [["part", "operator", "kernel", "launches", "MB", "GFLOP", "floor µs"]]
    counts: dict[ForwardLaunch, int] = {}
    for launch in launches:
        counts[launch] = counts.get(launch, 0) + 1
    for launch, count in counts.items():
        rows.append(
            [launch.part, f"`{launch.operator}`", f"`{launch.kernel}`", *_sums([launch] * count, arch)]
        )
    rows.append(["all", "", "", *_sums(list(itertools.chain(launches)), arch)])
    return markdown(rows)


def _sums(launches: Sequence[ForwardLaunch], arch: int) -> list[str]:
    return [
        str(len(launches)),
        f"{sum(each.bytes for each in launches) / 1e6:.1f}",
        f"{sum(each.flops for each in launches) / 1e9:.1f}",
        f"{sum(each.floor_microseconds(arch) for each in launches):.0f}",
    ]


def main(arguments: Sequence[str | Path]) -> None:
    """Puts the table of CvT-13 into a page, between ``<!-- forward -->`` and ``<!-- end -->``.

    Raises:
        ValueError: The page lacks the marks.
    """
    (path,) = map(Path, arguments)
    put_into(path, {"forward": "\n".join(table(forward_launches()))})


if __name__ == "__main__":
    main(sys.argv[1:])
