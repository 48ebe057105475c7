"""The launches of models' forwards without a GPU: on tensors without memory, by this project's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.floors import ForwardLaunch, Recorder
from cvt.factory import create_model
from cvt.tools.commands.compile.gpus import LIMITS
from cvt_kernels import accelerate, backends
from cvt_kernels.launch import launching
from cvt_kernels.models.class_token import with_class_token_only
from cvt_kernels.ops import weight_cache


def forward_launches(
    *, batch: int = 256, dtype: torch.dtype = torch.bfloat16, arch: int = 90
) -> list[ForwardLaunch]:
    """Lists the launches of a forward of CvT-13, frozen, with this project's kernels wherever they can serve.

    Args:
        batch: Images of the batch.
        dtype: Of weights and images.
        arch: Compute capability of the GPU, 90 for sm_90.
    """
    recorder = Recorder()
    with torch.device("meta"):
        built = accelerate(create_model("cvt_13").to(dtype).eval(), freeze=True)
        images = torch.empty(batch, 3, 224, 224, dtype=dtype)
    stages = built._built_stages()
    last = stages[-1], stages[-1].blocks[-1]
    for number, stage in enumerate(stages, start=1):
        stage.register_forward_pre_hook(lambda *_, part=f"stage {number}": setattr(recorder, "part", part))
        stage.register_forward_hook(lambda *_: setattr(recorder, "part", "head"))
    chip = launching.Chip(arch, LIMITS[arch].multiprocessors)
    with torch.no_grad(), backends.replaced(_serving_everywhere), backends.requesting(*_OURS):
        with launching.intercepted_launches(lambda launch: None, chip):
            built(images)  # folds the weights
        with recorder.recording(chip), without_packing(recorder):
            with_class_token_only(*last, lambda: built(images))  # in spite of the hooks
    return recorder.launches


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


@contextlib.contextmanager
def without_packing(recorder):
    """Leaves out what packs weights, which tensors without memory cannot keep."""
    packed = weight_cache.packed

    def unnoted(*args: Any, **settings: Any) -> Any:
        noted = len(recorder.launches)
        made = packed(*args, **settings)
        del recorder.launches[noted:]
        return made

    weight_cache.packed = unnoted
    try:
        yield
    finally:
        weight_cache.packed = packed
