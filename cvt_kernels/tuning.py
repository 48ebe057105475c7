"""Autotuning of the calls of a model ahead of time, in this process: :func:`tune`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from . import backends, checks
from .autotune import run_until_tuned, unlimited
from .graphs import ungraphed


def tune(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, str]:
    """Autotunes all operators of a call of a model, for as long as it takes.

    A first call tunes for two seconds only. After ``tune``, calls with arguments like these need no tuning:
    call it before a service starts, before ``torch.compile``, or before a CUDA graph is captured. It works
    whatever ``CVT_KERNELS_AUTOTUNE`` and the requested backends are. Results are cached, so that other
    processes on this machine have them too.

    In evaluation mode it tunes the calls without gradients, as they are within ``torch.inference_mode()``; in
    training mode those of a training step, forward and backward. The model and the random number generators
    stay as they are: a copy is called, without ``torch.compile`` and CUDA graphs. (Your own hooks are copied,
    and run.)

    Args:
        model: Any module that calls operators of this package, such as an accelerated one.
        args: The positional arguments of its call.
        kwargs: The keyword arguments.

    Returns:
        Cache key → the backend that serves its calls from now on, for each that was tuned; nothing where all
        were tuned before. ``fallbacks`` says why others could not be tuned.

    Raises:
        TypeError: ``model`` is not a module.
        Exception: What the call raises, such as the RuntimeError of a frozen model in training mode.
    """
    checks.check_kind("model", model, nn.Module)
    backends.forget()  # what is cached was chosen without entries
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        torch.random.fork_rng(devices=cuda),
        torch.inference_mode(False),
        torch.set_grad_enabled(model.training),
        torch.compiler.set_stance("force_eager"),
        backends.requesting("auto"),
        unlimited(is_requested=True) as call,
    ):
        copied = ungraphed(copy.deepcopy(model))
        run_until_tuned(lambda: copied(*args, **kwargs))
    return {cache_key: entry.chosen for cache_key, entry in call.tuned.items()}
