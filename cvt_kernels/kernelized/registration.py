"""Registers the layers with the ``kernels`` package, for ``use_kernels=True`` of transformers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..machine import warn_of_missing_kernels
from ..models.families import recognize
from ..models.matching import why_mismatched
from . import layers

_NEEDED = "transformers>=5.20 and the version of kernels that it asks for"


def register_layers() -> None:
    """Registers fused layers of transformers' CvT, SegFormer, PVT, PVT v2 and GLPN with ``kernels``.

    In this process, a model of these that is loaded with ``use_kernels=True``, or has
    ``model.use_kernels = True`` set, then computes its blocks, embeddings, stages and decode head by the
    forwards of :func:`accelerate`, on CPUs and NVIDIA GPUs. A layer that differs from transformers' own keeps
    its forward.

    ``accelerate`` does more for a classifier, whose last block then computes the class token alone.
    :func:`coverage` reports on these layers too; :func:`restore` leaves them as they are.

    Raises:
        ImportError: ``kernels`` or transformers is not installed, or they do not fit each other.
    """
    try:
        from kernels import LocalLayerRepository, register_kernel_mapping, replace_kernel_forward_from_hub
        from transformers.integrations.hub_kernels import kernelize as _  # noqa: F401
        from transformers.utils import is_kernels_available
    except ImportError as error:
        raise type(error)(f"register_layers: {error}; expected {_NEEDED}", name=error.name) from error
    if not is_kernels_available():
        raise ImportError(f"register_layers: got another version of kernels, expected {_NEEDED}")
    warn_of_missing_kernels()
    for upstream in layers.upstream_classes():
        name = upstream.__name__
        replace_kernel_forward_from_hub(upstream, name, _is_as_upstream)
        repository = LocalLayerRepository(Path(__file__).parent, layer_name=name)
        register_kernel_mapping({name: {"cpu": repository, "cuda": repository}})


def _is_as_upstream(module: nn.Module) -> bool:
    """Returns whether a module may have the layer's forward, which ``kernels`` asks of every module."""
    entry = recognize(module, None)
    return entry is None or why_mismatched(module, entry) is None
