"""Construction of a CvT with weights from a checkpoint (``create_model``) or made up (``randomize``)."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from cvt_kernels.missing import warn_of_missing_kernels

from .checkpoints import Checkpoint, load_checkpoint, read_checkpoint
from .config import CvTConfig, resolve_config
from .model import CvT, CvTFeatures

#: The seed of :func:`randomize`.
SEED = 0


@overload
def create_model(
    model: str | CvTConfig,
    *,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    features_only: Literal[False] = False,
    **overrides: Any,
) -> CvT: ...


@overload
def create_model(
    model: str | CvTConfig,
    *,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    features_only: Literal[True],
    out_indices: Sequence[int] | None = None,
    **overrides: Any,
) -> CvTFeatures: ...


def create_model(
    model: str | CvTConfig,
    *,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    features_only: bool = False,
    out_indices: Sequence[int] | None = None,
    **overrides: Any,
) -> CvT | CvTFeatures:
    """Builds a CvT, of the paper or of your own, and loads weights into it.

    Args:
        model: ``"cvt_13"``, ``"cvt_21"``, ``"cvt_w24"``, or a :class:`CvTConfig`.
        checkpoint: What :func:`load_checkpoint` reads. A model given by name and without ``num_classes`` gets
            as many classes as the checkpoint has; with another number, its head is left freshly initialized.
            Weights of a Hugging Face directory run the preset's activation too, with a warning, unless
            ``activation`` is given.
        features_only: Build a :class:`CvTFeatures` instead of a classifier.
        out_indices: With ``features_only``, the stages whose maps are returned; None for all.
        **overrides: Fields of :class:`CvTConfig` to change, such as ``num_classes=10``.

    Returns:
        A :class:`CvT` (or :class:`CvTFeatures`) in training mode, on the CPU, in float32.

    Raises:
        TypeError: An override that is not a field, or of the wrong type.
        ValueError: A wrong name or value.
        CheckpointError: A file that is not a checkpoint of this model.
    """
    config = resolve_config(model, **overrides)
    if out_indices is not None and not features_only:
        raise ValueError("out_indices: is for features_only=True")
    warn_of_missing_kernels()
    if checkpoint is None:
        return CvTFeatures(config, out_indices) if features_only else CvT(config)
    state = read_checkpoint(checkpoint)
    by_name = isinstance(model, str)
    if by_name and state.hf_config is not None and "activation" not in overrides:
        warnings.warn(
            f"{state.path} is a Hugging Face model, which runs exact GELU; this one runs quick_gelu, with "
            "which the published weights were trained; choose by activation='gelu' or 'quick_gelu'",
            stacklevel=2,
        )
    if features_only:
        built: CvT | CvTFeatures = CvTFeatures(config, out_indices)
    else:
        if by_name and "num_classes" not in overrides and state.num_classes is not None:
            config = dataclasses.replace(config, num_classes=state.num_classes)
        built = CvT(config)
    load_checkpoint(built, state)
    return built


def randomize(model: nn.Module, seed: int = SEED) -> None:
    """Fills a model with reproducible weights whose every parameter and statistic matters to the output.

    A freshly initialized model has biases of 0, norms of 1 and logits that hardly depend on the image, which
    would hide errors.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
                tensor.copy_(noise.mul(0.2).exp())
            elif tensor.ndim == 1:
                tensor.copy_(noise.mul(0.1))
            else:
                fan_in = tensor[0].numel()
                tensor.copy_(noise / fan_in**0.5)
