"""Structured pruning: a smaller CvT without the least important hidden units and heads.

A hidden unit of an MLP is a row of ``fc1`` with its bias, and a column of ``fc2``; a head is its rows of
``proj_q``, ``proj_k`` and ``proj_v``, its columns of ``proj``, and its table of ``position_bias``. The
smaller model is dense, and computes the same as the whole one with zeros in those columns. One exception:
with token pruning the scores of tokens lack the removed heads, so other tokens may stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels import checks

from .config import CvTConfig, as_number
from .factory import create_model
from .model import Block
from .pretrained import PretrainedModel
from .quantized import quantized_layers
from .segmentation import IGNORED

Saliency = Literal["magnitude", "taylor"]

_Model = TypeVar("_Model", bound=PretrainedModel)

_UNITS = 8  # hidden units that kernels like to have a multiple of
_ROUNDING = 1e-9  # of products such as 0.29 · 100


@torch.inference_mode(False)  # whose tensors would have no gradients, here or later
def prune_weights(
    model: _Model,
    *,
    mlp: float = 0.0,
    heads: float = 0.0,
    batches: Iterable[tuple[Tensor, Tensor]] | None = None,
    saliency: Saliency | None = None,
) -> _Model:
    """Returns a smaller model without the least important hidden units and heads of each block.

    Args:
        model: A model of this package in floating point, which is left as it is. It may be accelerated; the
            new one is not.
        mlp: The fraction of the hidden units of every MLP that is removed; see :func:`pruned_config`.
        heads: The fraction of the heads of every block that is removed.
        batches: Images (B, …) with labels, for ``"taylor"``: (B,), or (B, H, W) for a model that gives every
            pixel a class, where 255 does not count.
        saliency: The importance score. ``"magnitude"``: the norm of all its weights. ``"taylor"``:
            by how much, to first order, the loss would change without it: the absolute sum of gradient ·
            activation over the tokens of an image, summed over the images (Molchanov et al. 2017 and 2019).
            None for ``"taylor"`` with batches and ``"magnitude"`` without.

    Returns:
        The new model, in the same mode, on the same device and of the same dtype.

    Raises:
        TypeError: The model is none of this package.
        ValueError: A fraction out of range, or one that leaves a stage nothing or removes nothing; the model
            is quantized, or has other modules than its configuration says; ``"taylor"`` without images,
            labels or a head.
    """
    whole_config = getattr(model, "config", None)
    if not isinstance(model, PretrainedModel) or not isinstance(whole_config, CvTConfig):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvT with its head")
    reason = why_unprunable(model)
    if reason is not None:
        raise ValueError(f"model: {reason}")
    config = pruned_config(whole_config, mlp=mlp, heads=heads)
    if saliency is not None:
        checks.check_choice("saliency", saliency, get_args(Saliency))
    if batches is not None:
        checks.check_kind("batches", batches, Iterable)
    chosen = saliency or ("magnitude" if batches is None else "taylor")
    whole = create_model(whole_config).to(next(model.parameters())).eval()  # without hooks
    try:
        whole.load_state_dict(model.state_dict())
    except RuntimeError as error:
        raise ValueError(f"model: has other modules than its configuration says: {error}") from error
    if chosen == "magnitude":
        saliencies = {path: _magnitudes(block) for path, block in _blocks(whole).items()}
    elif batches is None:
        raise ValueError("batches: got None, expected images with labels for saliency='taylor'")
    else:
        saliencies = _taylor(whole, whole_config, batches)
    smaller = cast(_Model, create_model(config).to(next(model.parameters())))
    smaller.load_state_dict(_what_is_left(whole, saliencies, config))
    smaller.labels, smaller.preprocessing = model.labels, model.preprocessing
    return smaller.train(model.training)


def why_unprunable(model: nn.Module) -> str | None:
    """Says why units cannot be removed from a model, or returns None."""
    layers = quantized_layers(model.state_dict())
    if layers:
        return f"is quantized ({layers[0]}), expected floating point: prune first, then quantize"
    return None


# Sizes ----------------------------------------------------------------------------------------------------


def pruned_config(config: CvTConfig, *, mlp: float = 0.0, heads: float = 0.0) -> CvTConfig:
    """Returns the configuration of a model after pruning fractions of its hidden units and heads.

    All blocks of a stage lose the same number. The number of hidden units that stay is rounded to a multiple
    of 8, or, if that would be all or none, to an integer. The number of removed heads is rounded down; the
    others keep their width, ``head_dim``.
    """
    for name, fraction in (("mlp", mlp), ("heads", heads)):
        as_number(name, fraction, float, 0, 1)
    if not mlp and not heads:
        raise ValueError("mlp, heads: got 0 for both, expected a fraction above 0 of one of them")
    changes: dict[str, Any] = {}
    if mlp:
        hidden = hidden_units(config)
        left = tuple(_units_left(units, mlp) for units in hidden)
        _check_left(f"mlp: {mlp:g}", "hidden units", hidden, left)
        changes["mlp_ratio"] = tuple(map(_ratio, config.embed_dims, left))
    if heads:
        left = tuple(each - math.floor(each * heads + _ROUNDING) for each in config.num_heads)
        _check_left(f"heads: {heads:g}", "heads", config.num_heads, left)
        changes["num_heads"] = left
        changes["head_dim"] = tuple(stage.head_dim for stage in config.stages)
    return dataclasses.replace(config, **changes)


def hidden_units(config: CvTConfig) -> tuple[int, ...]:
    """Returns the hidden units of an MLP of each stage."""
    return tuple(int(dim * ratio) for dim, ratio in zip(config.embed_dims, config.mlp_ratio, strict=True))


def _units_left(units: int, fraction: float) -> int:
    left = units * (1 - fraction)
    multiple = _UNITS * math.floor(left / _UNITS + 0.5)  # of two that are as near the larger
    return multiple if 0 < multiple < units else round(left)


def _ratio(dim: int, hidden: int) -> float:
    """Returns the ``mlp_ratio`` of so many hidden units, to which it is rounded down."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def _check_left(option: str, units: str, before: tuple[int, ...], left: tuple[int, ...]) -> None:
    for stage, (count, rest) in enumerate(zip(before, left, strict=True)):
        if rest < 1:
            raise ValueError(f"{option} removes all {count} {units} of stage {stage}")
    if before == left:
        raise ValueError(f"{option} removes none of the {', '.join(map(str, before))} {units} of the stages")


# Saliency -------------------------------------------------------------------------------------------------


class _Saliency(NamedTuple):
    """The importance of each head and each hidden unit of a block, in float64."""

    heads: Tensor
    units: Tensor


def _blocks(model: nn.Module) -> dict[str, Block]:
    """Returns the blocks of a model, by the names of their modules."""
    return {path: block for path, block in model.named_modules() if isinstance(block, Block)}


@torch.no_grad()
def _magnitudes(block: Block) -> _Saliency:
    attention, mlp = block.attn, block.mlp
    parts = [mlp.fc1.weight, mlp.fc1.bias[:, None], mlp.fc2.weight.T]
    of_heads = [attention.proj.weight.T]
    for layer in (attention.proj_q, attention.proj_k, attention.proj_v):
        of_heads += [layer.weight] if layer.bias is None else [layer.weight, layer.bias[:, None]]
    rows = torch.cat(of_heads, 1).double().unflatten(0, (attention.num_heads, -1))
    return _Saliency(rows.flatten(1).norm(dim=1), torch.cat(parts, 1).double().norm(dim=1))


@torch.enable_grad()
def _taylor(
    model: nn.Module, config: CvTConfig, batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, _Saliency]:
    """Returns how much the loss of an image changes with each head and unit, summed over the images."""
    if not config.num_classes:
        raise ValueError("model: has no head whose loss could tell, expected one or saliency='magnitude'")
    device = next(model.parameters()).device
    blocks, inputs, sums = _blocks(model), dict[nn.Module, Tensor](), {}

    def keep(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs[layer] = given[0]

    for path, block in blocks.items():
        for layer in (block.attn.proj, block.mlp.fc2):
            layer.register_forward_pre_hook(keep)
        sizes = block.attn.num_heads, block.mlp.fc2.in_features
        sums[path] = _Saliency(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))
    images_seen = 0
    for number, batch in enumerate(batches):
        if not isinstance(batch, tuple | list) or [isinstance(each, Tensor) for each in batch] != [True] * 2:
            got = checks.shown(batch)
            raise TypeError(f"batches[{number}]: got {got}, expected images with their labels")
        images, labels = batch
        images_seen += len(images)
        loss = _loss(f"batches[{number}]", model(images.to(device)), labels.to(device))
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        parts = zip(inputs.items(), gradients, strict=True)
        changes = {layer: (x.detach() * gradient).double() for (layer, x), gradient in parts}
        for path, block in blocks.items():
            of_heads = changes[block.attn.proj].unflatten(2, (block.attn.num_heads, -1)).sum((1, 3))
            sums[path].heads.add_(of_heads.abs().sum(0))
            sums[path].units.add_(changes[block.mlp.fc2].sum(1).abs().sum(0))
    if not images_seen:
        raise ValueError("batches: got no images, expected at least one")
    return sums


def _loss(name: str, logits: Tensor, labels: Tensor) -> Tensor:
    expected = logits.shape[:1] + logits.shape[2:]
    if labels.shape != expected or labels.dtype != torch.int64:
        got = f"{tuple(labels.shape)} of {labels.dtype}"
        raise ValueError(f"{name}: got labels {got}, expected {tuple(expected)} of torch.int64")
    ignored = IGNORED if logits.ndim > 2 else -100
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=ignored)


# Weights --------------------------------------------------------------------------------------------------


def _what_is_left(model: nn.Module, saliencies: dict[str, _Saliency], config: CvTConfig) -> dict[str, Tensor]:
    """Returns the weights of a model with the most salient heads and units only, for a smaller one."""
    tensors = model.state_dict()
    for path, saliency in saliencies.items():
        if not all(values.isfinite().all() for values in saliency):
            raise ValueError(f"model: {path} has weights or activations that are not finite")
        stage = config.stages[int(path.split(".")[0].removeprefix("stage"))]
        units = _most_salient(saliency.units, int(stage.embed_dim * stage.mlp_ratio))
        heads = _most_salient(saliency.heads, stage.num_heads)
        channels = torch.arange(len(saliency.heads) * stage.head_dim, device=heads.device)
        channels = channels.unflatten(0, (-1, stage.head_dim))[heads].flatten()
        attention = tuple(f"attn.proj_{letter}.{kind}" for letter in "qkv" for kind in ("weight", "bias"))
        for names, dim, chosen in (
            (("mlp.fc1.weight", "mlp.fc1.bias"), 0, units),
            (("mlp.fc2.weight",), 1, units),
            (attention, 0, channels),
            (("attn.proj.weight",), 1, channels),
            (("attn.position_bias",), 0, heads),
        ):
            for name in (f"{path}.{name}" for name in names):
                if name in tensors:  # a bias may not be there
                    tensors[name] = tensors[name].index_select(dim, chosen)
    return tensors


def _most_salient(values: Tensor, count: int) -> Tensor:
    """Returns the indices of the largest values, ascending; among equals the first."""
    return values.argsort(descending=True, stable=True)[:count].sort().values
