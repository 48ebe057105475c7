"""Attention maps of a CvT over its image, and entropy and attention distance of every head.

The keys of CvT lie on a coarser grid than its tokens: key (i, j) at token (s·i, s·j), s the stride of its
convolution. A token between keys belongs to them in proportion to how near they are, and what a key receives
is shared among its tokens likewise.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

import cvt_kernels as ck
from cvt.config import CvTConfig
from cvt.extras import require
from cvt.huggingface import IMAGENET_MEAN, IMAGENET_STD
from cvt.model import Attention, Block, CvT, Grid, Stage
from cvt_kernels.messages import printable
from cvt_kernels.ops.rows import scatter_rows
from cvt_kernels.ops.token_selection import interpolation, spread_keys

_ROWS = 1024  # queries whose probabilities are in memory at once
_LONGEST_TITLE = 80


class BlockAttention(NamedTuple):
    """The attention of one block of a stage, mean over the queries that it computes.

    ``entropy`` and ``distance`` are (B, heads): in nats, at most ln(keys), and from query to attended keys in
    pixels; see ``cvt_kernels.attention_map``.
    """

    stage: int
    block: int
    keys: int
    entropy: Tensor
    distance: Tensor


class Explanation(NamedTuple):
    """The maps and figures that :func:`explain` returns.

    Attributes:
        logits: (B, num_classes).
        attention: (B, heads, H, W) on the keys of the last block, without the class token: what the class
            token attends to; if the head averages tokens, the mean over those that the block computed.
        rollout: (B, H, W) on the tokens of the last stage, attention rollout through all its blocks.
        blocks: Every block of the model, in order.
        kept: (B, blocks, H, W) bool, the tokens that each block of the last stage computed (``token_keep``).
    """

    logits: Tensor
    attention: Tensor
    rollout: Tensor
    blocks: tuple[BlockAttention, ...]
    kept: Tensor


@torch.inference_mode()
def explain(model: CvT, images: Tensor) -> Explanation:
    """Runs a model on images (B, in_chans, H, W) and records the attention of every block.

    The model is not changed: hooks on its linear layers read queries and keys. ValueError is raised for a
    model in training mode, and for logits that are not finite.
    """
    if model.training:
        raise ValueError("model: is in training mode, expected model.eval()")
    logits, calls = _record(model, images)
    if not logits.isfinite().all():
        raise ValueError("model: gives logits that are not finite")
    last = calls[-1]
    summaries = [_summarize(call, keep=call.stage == last.stage) for call in calls]
    matrices = [matrix for _, matrix in summaries if matrix is not None]

    queries, tokens = last.q.shape[1], last.grid[0] * last.grid[1]
    rows = [0] if model.config.pool == "cls" else list(range(queries - tokens, queries))
    start = torch.zeros(queries).to(matrices[0])
    start[rows] = 1 / len(rows)
    seen = _mean(last.map(rows).probabilities, last.kept[:, None, rows, None], 2)
    attention = seen[..., -math.prod(last.key_grid) :].unflatten(-1, last.key_grid)
    spread = spread_keys(last.grid, last.stride, class_token=queries > tokens).to(start)
    in_last = torch.stack([call.kept for call in calls if call.stage == last.stage], 1)
    rolled = rollout(matrices, spread, start, in_last)[:, -tokens:].unflatten(-1, last.grid)
    kept = in_last[:, :, -tokens:].unflatten(-1, last.grid)
    return Explanation(logits, attention, rolled, tuple(block for block, _ in summaries), kept)


def rollout(matrices: Sequence[Tensor], spread: Tensor, start: Tensor, kept: Tensor | None = None) -> Tensor:
    """Computes attention rollout (Abnar and Zuidema 2020): each token's share in some outputs.

    A block passes on half of a token (the residual) and half of what its attention collects, mean over the
    heads: Ã = (A · spread + 1) / 2. The rollout is start · Ã_L … Ã_1. A token that a block does not compute
    passes on all of itself.

    Args:
        matrices: (B, T, S) for each block, first block first: attention probabilities.
        spread: (S, T), as from :func:`spread_keys`.
        start: (T,), weights of the tokens that are looked at after the last block, of sum 1.
        kept: (B, blocks, T) bool, the tokens that each block computes; None for all.

    Returns:
        (B, T), of sum 1.
    """
    seen = start.expand(len(matrices[0]), 1, -1)
    for block in reversed(range(len(matrices))):
        computed = seen if kept is None else seen * kept[:, block, None]
        seen = seen + (computed @ matrices[block] @ spread - computed) / 2
    return seen[:, 0]


class _AttentionCall(NamedTuple):
    """One call of an attention module: its queries (B, T, h, D), keys (B, S, h, D), computed tokens (B, T).

    The queries of tokens that were not computed are 0.
    """

    attention: Attention
    stage: int
    block: int
    reduction: int
    grid: Grid
    q: Tensor
    k: Tensor
    kept: Tensor

    @property
    def stride(self) -> int:
        return self.attention.conv_proj_k.conv.stride[0]

    @property
    def key_grid(self) -> Grid:
        height, width = ((tokens - 1) // self.stride + 1 for tokens in self.grid)
        return height, width

    def map(self, rows: list[int]) -> ck.AttentionMap:
        """Returns what some of the queries attend to."""
        options: dict[str, Any] = {"grid": self.key_grid, "query_grid": self.grid}
        options |= {"scale": self.attention.scale, "position": self.attention.position_for(self.grid)}
        return ck.attention_map(self.q, self.k, rows=rows, **options)


def _record(model: CvT, images: Tensor) -> tuple[Tensor, list[_AttentionCall]]:
    """Returns the logits, and what the attention of every block was called with, in order."""
    stages = [module for module in model.children() if isinstance(module, Stage)]
    attentions = [[cast(Block, block).attn for block in stage.blocks] for stage in stages]
    seen: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen[module] = inputs if isinstance(module, Attention) else output

    with contextlib.ExitStack() as hooks:
        for attention in itertools.chain(*attentions):
            for module in (attention, attention.proj_q, attention.proj_k):
                hooks.enter_context(module.register_forward_hook(keep))
        logits = model(images)
    calls = []
    for i, reduction in enumerate(model.feature_info.reduction()):
        for j, attention in enumerate(attentions[i]):
            x, grid, *given = seen[attention]
            q, k = seen[attention.proj_q], seen[attention.proj_k]
            kept = torch.ones_like(x[..., 0], dtype=torch.bool)
            if given:
                (rows,) = given
                q = scatter_rows(q.new_zeros(*x.shape[:2], q.shape[2]), rows, q)
                ones = q.new_ones(*rows.shape, 1)
                kept = scatter_rows(ones.new_zeros(*x.shape[:2], 1), rows, ones)[..., 0] > 0
            q, k = (each.unflatten(2, (attention.num_heads, -1)) for each in (q, k))
            calls.append(_AttentionCall(attention, i, j, reduction, grid, q, k, kept))
    return logits, calls


def _mean(values: Tensor, kept: Tensor, dim: int) -> Tensor:
    """Returns the mean over a dimension of the values that are kept and not NaN, or NaN without any."""
    return values.masked_fill(~kept, torch.nan).nanmean(dim)


def _summarize(call: _AttentionCall, keep: bool) -> tuple[BlockAttention, Tensor | None]:
    """Summarizes a block; also returns, if ``keep``, the mean over its heads of the matrix (B, T, S)."""
    entropy: list[Tensor] = []
    distance: list[Tensor] = []
    matrix: list[Tensor] = []
    for rows in torch.arange(call.q.shape[1]).split(_ROWS):
        part = call.map(rows.tolist())
        entropy.append(part.entropy)
        distance.append(cast(Tensor, part.distance))  # there is a grid
        if keep:
            matrix.append(part.probabilities.mean(1))
    # The class token has no place: its distance is NaN.
    kept = call.kept[:, None]
    mean_distance = _mean(torch.cat(distance, -1), kept, -1) * (call.stride * call.reduction)
    mean_entropy = _mean(torch.cat(entropy, -1), kept, -1)
    summary = BlockAttention(call.stage, call.block, call.k.shape[1], mean_entropy, mean_distance)
    return summary, torch.cat(matrix, 1) if keep else None


# Pictures -------------------------------------------------------------------------------------------------


def photograph(image: Tensor) -> Image.Image:
    """Returns the photo as the model saw it: ``image`` (3, H, W) before :func:`cvt.images.normalize`."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = (image.cpu() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


def heat_map(size: tuple[int, int], heat: Tensor, config: CvTConfig, stride: int = 1) -> NDArray[np.float32]:
    """Interpolates a map (H, W) on every ``stride``-th token of the last stage to the pixels of an image.

    Each token is where it is centered; ``size`` is the (width, height) of the image that the model saw.
    """
    center, step = _first_token(config)
    down, across = (
        interpolation((torch.arange(pixels) - center) / (step * stride), tokens).to(heat)
        for pixels, tokens in zip(reversed(size), heat.shape, strict=True)
    )
    return (down @ heat @ across.T).cpu().numpy()


def _first_token(config: CvTConfig) -> tuple[float, int]:
    """Returns the pixel at which token 0 of the last stage is centered, and the pixels to the next one."""
    center, step = 0.0, 1
    for stage in config.stages:
        center += step * ((stage.patch_size - 1) / 2 - stage.patch_padding)
        step *= stage.patch_stride
    return center, step


def pictures(explanation: Explanation, photo: Image.Image, config: CvTConfig, title: str) -> dict[str, Any]:
    """Draws the maps ``attention`` and ``rollout`` of the first image, ``photo``, as Matplotlib's figures.

    If tokens dropped out, ``tokens`` shows which ones.
    """
    reader = "the class token" if config.pool == "cls" else "the mean token"
    attends = f"What {reader} attends to in the last block, mean of {config.num_heads[-1]} heads"
    reaches = f"What reaches {reader} through all blocks of the last stage (attention rollout)"
    heads, rolled = explanation.attention[0].mean(0), explanation.rollout[0]
    drawn = {
        "attention": picture(photo, heads, config, config.stride_kv[-1], title=f"{title}\n{attends}"),
        "rollout": picture(photo, rolled, config, title=f"{title}\n{reaches}"),
    }
    if not explanation.kept[0].all():
        drawn["tokens"] = kept_tokens(photo, explanation.kept[0], config, title=title)
    return drawn


def picture(photo: Image.Image, heat: Tensor, config: CvTConfig, stride: int = 1, *, title: str) -> Any:
    """Draws photograph, map and overlay side by side, and what the colors mean.

    The map holds parts of a whole; it and ``stride`` are as of :func:`heat_map`.
    """
    panels = "photograph, as the model saw it", "map", "overlay: the map's colors over the photograph"
    figure, axes = _page(panels, photo, title)
    values, limits = heat_map(photo.size, heat, config, stride), (heat.min().item(), heat.max().item())
    for panel, alpha in ((axes[1], 1.0), (axes[2], 0.6)):
        drawn = panel.imshow(values, cmap="inferno", vmin=limits[0], vmax=limits[1], alpha=alpha)
        if alpha == 1.0:
            bar = figure.colorbar(drawn, ax=axes, location="bottom", shrink=0.5, aspect=40)
    rows, columns = heat.shape
    least, most = (f"{limit:.2%}" for limit in limits)
    bar.set_ticks(limits, labels=[f"least: {least}", f"most: {most}"])
    bar.set_label(f"share of the attention, for each of {columns} x {rows} places")
    return figure


def kept_tokens(photo: Image.Image, kept: Tensor, config: CvTConfig, *, title: str) -> Any:
    """Draws which tokens each block of the last stage computed: where they had dropped out, all is pale.

    Blocks that follow each other with the same tokens of ``kept`` (blocks, H, W) share a panel.
    """
    center, step = _first_token(config)
    panels = {}
    for _, group in itertools.groupby(range(len(kept)), key=lambda i: kept[i].flatten().tolist()):
        first, *others = group
        blocks = f"blocks {first + 1} to {others[-1] + 1}" if others else f"block {first + 1}"
        panels[f"{blocks}: {int(kept[first].sum())} of {kept[first].numel()} tokens"] = kept[first].cpu()
    what = "Tokens that the blocks of the last stage compute; the others have dropped out"
    figure, axes = _page(panels, photo, f"{title}\n{what}")
    for panel, tokens in zip(axes, panels.values(), strict=True):
        down, across = (
            ((torch.arange(pixels) - center) / step).round().long().clamp(0, count - 1)
            for pixels, count in zip(reversed(photo.size), tokens.shape, strict=True)
        )
        dropped = ~tokens[down][:, across].numpy()
        panel.imshow(np.ones(dropped.shape), cmap="gray", vmin=0, vmax=1, alpha=0.8 * dropped)
    return figure


def _page(captions: Iterable[str], photo: Image.Image, title: str) -> tuple[Any, Any]:
    """Returns a figure with the photograph below each caption, side by side, and its axes."""
    captions = list(captions)
    size = 5 * len(captions), 5 * photo.height / photo.width + 2
    new = require("matplotlib.figure", "explain").Figure  # outside of pyplot, which would ask for a display
    figure = new(figsize=size, dpi=100, layout="constrained")
    figure.suptitle(title, parse_math=False)
    axes = figure.subplots(1, len(captions), squeeze=False)[0]
    for panel, caption in zip(axes, captions, strict=True):
        panel.imshow(photo)
        panel.set_title(caption, fontsize=10)
        panel.set_axis_off()
    return figure, axes


def class_title(index: int, label: str | None, probability: float) -> str:
    """Returns a line that says what the model takes an image for.

    A name beyond Latin-1 is left out, since Matplotlib's font could not draw it.
    """
    plain = printable(" ".join((label or "").split()))
    is_drawn = plain.encode("latin-1", "ignore").decode("latin-1") == plain != ""
    name = f"{textwrap.shorten(plain, _LONGEST_TITLE)} (class {index})" if is_drawn else f"class {index}"
    return f"{probability:.1%}  {name}"


def as_json(explanation: Explanation, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the numbers of the first image, with its five most probable classes and maps of mean heads."""
    probabilities = explanation.logits[0].softmax(-1)
    top = probabilities.topk(min(5, len(probabilities)))
    return {
        "classes": [
            {"index": index, "label": labels[index] if labels else None, "probability": probability}
            for index, probability in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ],
        "attention": explanation.attention[0].mean(0).tolist(),
        "rollout": explanation.rollout[0].tolist(),
        "blocks": [
            block._asdict() | {"entropy": block.entropy[0].tolist(), "distance": block.distance[0].tolist()}
            for block in explanation.blocks
        ],
        "kept": explanation.kept[0].int().tolist(),
    }
