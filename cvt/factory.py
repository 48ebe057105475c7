"""Construction of a CvT, with weights from a checkpoint (``create_model``) or random ones (``randomize``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from cvt_kernels import checks
from cvt_kernels.machine import warn_of_missing_kernels

from .checkpoints import Checkpoint, build_fitting, load_checkpoint, read_checkpoint, warn_of_activation
from .config import MOST_SEED, CvTConfig, resolve_config
from .hub import PRETRAINED
from .model import CvT, CvTFeatures
from .segmentation import CvTSegmenter, build

#: The seed of :func:`randomize`.
SEED = 0


@overload
def create_model(
    model: str | CvTConfig | None = None, *, features_only: Literal[True], **options: Any
) -> CvTFeatures: ...


@overload
def create_model(
    model: str | CvTConfig | None = None, *, head: Literal["segment"], **options: Any
) -> CvTSegmenter: ...


@overload
def create_model(model: str | CvTConfig | None = None, **options: Any) -> CvT: ...


def create_model(
    model: str | CvTConfig | None = None,
    *,
    pretrained: bool = False,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    features_only: bool = False,
    out_indices: Sequence[int] | None = None,
    **overrides: Any,
) -> CvT | CvTFeatures | CvTSegmenter:
    """Builds one of the paper's CvT models or your own, and loads weights into it.

    Args:
        model: ``"cvt_13"``, ``"cvt_21"``, ``"cvt_w24"``, or a :class:`CvTConfig`; None for the model of the
            checkpoint. A model that is not given by a configuration gets as many classes as the checkpoint
            has, its activation and its ``head``; with another ``num_classes`` or ``head`` the model's head is
            left freshly initialized.
        pretrained: Load the published weights of that name from the Hugging Face Hub: ``microsoft/cvt-13``,
            ``microsoft/cvt-21`` or ``microsoft/cvt-w24-384-22k``.
        checkpoint: A path, or ``"owner/name"`` on the Hub, as for :func:`read_checkpoint`. A Hugging Face
            model that is not known as Microsoft's comes with a warning about its activation, unless
            ``activation`` is given.
        features_only: Build a :class:`CvTFeatures`, which has no head.
        out_indices: With ``features_only``, the stages whose maps are returned; None for all.
        **overrides: Fields of :class:`CvTConfig` to change, such as ``num_classes=10``, or
            ``head="segment"`` for a :class:`CvTSegmenter`.

    Returns:
        A :class:`CvT` (or :class:`CvTFeatures`, or :class:`CvTSegmenter`) in training mode, on the CPU, in
        float32.

    Raises:
        TypeError: An override that is not a field, or of the wrong type; or neither model nor checkpoint.
        ValueError: A wrong name or value.
        FileNotFoundError: There is no such checkpoint.
        CheckpointError: A file that is not a checkpoint of this model, or one that cannot be fetched.
    """
    checks.check_flag("pretrained", pretrained)
    checks.check_flag("features_only", features_only)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):
        checks.check_path("checkpoint", checkpoint, "a path, a name on the Hub or a Checkpoint")
    if out_indices is not None and not features_only:
        raise ValueError("out_indices: is for features_only=True")
    warn_of_missing_kernels()
    if pretrained:
        if checkpoint is not None:
            raise ValueError(f"pretrained: got True beside checkpoint={checkpoint!r}, expected one of them")
        if not isinstance(model, str):
            names = ", ".join(PRETRAINED)
            raise ValueError(f"pretrained: got True for {model!r}, which is not one of the models {names}")
        resolve_config(model)
        checkpoint = f"hf-hub:{PRETRAINED[model]}"
    if checkpoint is None:
        if model is None:
            raise TypeError("model: got None and no checkpoint, expected one of them")
        config = resolve_config(model, **overrides)
        return CvTFeatures(config, out_indices) if features_only else build(config)
    if model is not None:
        resolve_config(model, **overrides)  # which fails before anything is fetched
    state = read_checkpoint(checkpoint)
    config = state.configuration(model, **overrides)
    if not isinstance(model, CvTConfig) and "activation" not in overrides:
        warn_of_activation(state)
    built: CvT | CvTFeatures | CvTSegmenter = build_fitting(
        state, lambda: CvTFeatures(config, out_indices) if features_only else build(config)
    )
    load_checkpoint(built, state)
    return built


def randomize(model: nn.Module, seed: int = SEED) -> None:
    """Fills a model with reproducible random weights, such that every parameter affects the output.

    A freshly initialized model has biases of 0, norms of 1 and logits that hardly depend on the image, which
    would hide errors.
    """
    checks.check_kind("model", model, nn.Module)
    checks.check_int("seed", seed, 0, MOST_SEED)
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
