"""Attention maps of a CvT over its image, and entropy and attention distance of every head.

The keys of CvT lie on a coarser grid than its tokens: key (i, j) at token (s·i, s·j), s the stride of its
convolution. A token between keys belongs to them in proportion to how near they are, and what a key receives
is shared among its tokens likewise.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

import cvt_kernels as ck
from cvt.config import CvTConfig
from cvt.extras import require
from cvt.huggingface import IMAGENET_MEAN, IMAGENET_STD
from cvt.model import Attention, Block, CvT, Grid, Stage
from cvt_kernels import checks
from cvt_kernels.messages import printable
from cvt_kernels.ops.rows import scatter_rows
from cvt_kernels.ops.token_selection import interpolation, spread_keys

_ROWS = 1024  # queries whose probabilities are in memory at once
_COLORS = ((0, 0, 0), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164))  # from dark to bright
_PANEL, _MARGIN, _TOP = 448, 24, 132  # pixels


class BlockAttention(NamedTuple):
    """The attention of one block, mean over the queries that it computes.

    Attributes:
        stage: Index of its stage.
        block: Index within the stage.
        keys: Number of keys; the entropy is at most ln(keys).
        entropy: (B, heads), in nats.
        distance: (B, heads), from query to attended keys, in pixels; see ``cvt_kernels.attention_map``.
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
    """Runs a model and records the attention of every block.

    Args:
        model: In evaluation mode. It is not changed: hooks on its linear layers read queries and keys.
        images: (B, in_chans, H, W), as the model takes them.

    Raises:
        TypeError: ``model`` is not a :class:`CvT`.
        ValueError: It is in training mode, or its logits are not finite.
    """
    if not isinstance(model, CvT):
        raise TypeError(f"model: got {type(model).__name__}, expected a CvT")
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
    probabilities = ck.attention_map(
        last.q, last.k, rows=rows, scale=last.attention.scale, position=last.attention.position_for(last.grid)
    ).probabilities
    seen = _mean(probabilities, last.kept[:, None, rows, None], 2)
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
        part = ck.attention_map(
            call.q,
            call.k,
            rows=rows.tolist(),
            scale=call.attention.scale,
            grid=call.key_grid,
            query_grid=call.grid,
            position=call.attention.position_for(call.grid),
        )
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


def heat_map(size: tuple[int, int], heat: Tensor, config: CvTConfig, stride: int = 1) -> Image.Image:
    """Draws a map in colors, from its least to its greatest value, each token where it is centered.

    Args:
        size: (width, height) of the image that the model saw.
        heat: (H, W), on every ``stride``-th token of the last stage.
        config: Of the model.
        stride: 1 for tokens, ``config.stride_kv[-1]`` for keys.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: A map or an image without pixels, or a stride that is not positive.
    """
    checks.check_pair("size", size, least=1)
    checks.check_float_tensor("heat", heat, "(H, W)")
    checks.check_rank("heat", heat, 2, "(H, W)")
    if not heat.numel():
        raise ValueError(f"heat: got shape {tuple(heat.shape)}, expected some places")
    checks.check_kind("config", config, CvTConfig)
    checks.check_int("stride", stride, 1, max(size))
    center, step = _first_token(config)
    heat = (heat - heat.min()) / (heat.max() - heat.min()).clamp_min(torch.finfo(heat.dtype).tiny)
    down, across = (
        interpolation((torch.arange(pixels) - center) / (step * stride), tokens).to(heat)
        for pixels, tokens in zip(reversed(size), heat.shape, strict=True)
    )
    return _colored((down @ heat @ across.T).cpu().numpy())


def _first_token(config: CvTConfig) -> tuple[float, int]:
    """Returns the pixel at which token 0 of the last stage is centered, and the pixels to the next one."""
    center, step = 0.0, 1
    for stage in config.stages:
        center += step * ((stage.patch_size - 1) / 2 - stage.patch_padding)
        step *= stage.patch_stride
    return center, step


def _colored(values: NDArray[np.float32]) -> Image.Image:
    """Returns the image of an array of values from 0 to 1."""
    levels = np.linspace(0, 1, len(_COLORS))
    colors = np.stack([np.interp(values, levels, channel) for channel in zip(*_COLORS, strict=True)], axis=-1)
    return Image.fromarray(colors.round().astype(np.uint8))


def overlay(photo: Image.Image, heat: Tensor, config: CvTConfig, stride: int = 1) -> Image.Image:
    """Lays :func:`heat_map` over the photograph ``photo`` as the model saw it."""
    return Image.blend(photo, heat_map(photo.size, heat, config, stride), 0.6)


def pictures(
    explanation: Explanation, photo: Image.Image, config: CvTConfig, title: str
) -> dict[str, Image.Image]:
    """Draws :func:`picture` of the maps ``attention`` and ``rollout`` of the first image, ``photo``.

    If tokens dropped out, ``tokens`` is :func:`kept_tokens`.
    """
    reader = "the class token" if config.pool == "cls" else "the mean token"
    words = {
        "attention": f"What {reader} attends to in the last block, mean of {config.num_heads[-1]} heads",
        "rollout": f"What reaches {reader} through all blocks of the last stage (attention rollout)",
    }
    maps = {
        "attention": (explanation.attention[0].mean(0), config.stride_kv[-1]),
        "rollout": (explanation.rollout[0], 1),
    }
    drawn = {
        kind: picture(photo, heat, config, stride, title=title, subtitle=words[kind])
        for kind, (heat, stride) in maps.items()
    }
    if not explanation.kept[0].all():
        drawn["tokens"] = kept_tokens(photo, explanation.kept[0], config, title=title)
    return drawn


def picture(
    photo: Image.Image, heat: Tensor, config: CvTConfig, stride: int = 1, *, title: str, subtitle: str
) -> Image.Image:
    """Draws photograph, map and overlay side by side, each at least 448 pixels wide, and what colors mean.

    Args:
        photo: As the model saw it.
        heat: As for :func:`heat_map`: parts of a whole.
        config: Of the model.
        stride: As for :func:`heat_map`.
        title: The largest line, above all. This and the subtitle are ASCII, as is Pillow's font.
        subtitle: What the map shows.
    """
    panels = {
        "photograph, as the model saw it": photo,
        "map": heat_map(photo.size, heat, config, stride),
        "overlay: the map's colors over the photograph": overlay(photo, heat, config, stride),
    }
    page, (width, height) = _page(panels, 76, title=title, subtitle=subtitle)
    draw, normal = ImageDraw.Draw(page), ImageFont.load_default(18)
    total, top = page.width, _TOP
    left, right, bar = 2 * _MARGIN + width, total - _MARGIN, top + height + 16
    page.paste(_colored(np.tile(np.linspace(0, 1, right - left, dtype=np.float32), (18, 1))), (left, bar))
    rows, columns = heat.shape
    words = (
        (left, "l", f"least: {heat.min():.2%}"),
        ((left + right) // 2, "m", f"share of the attention, for each of {columns} x {rows} places"),
        (right, "r", f"most: {heat.max():.2%}"),
    )
    for x, side, text in words:
        draw.text((x, bar + 26), text, "black", normal, anchor=f"{side}a")
    return page


def kept_tokens(photo: Image.Image, kept: Tensor, config: CvTConfig, *, title: str) -> Image.Image:
    """Draws which tokens each block of the last stage computed: where they had dropped out, all is pale.

    Args:
        photo: As the model saw it.
        kept: (blocks, H, W) bool. Blocks that follow each other with the same tokens share a panel.
        config: Of the model.
        title: As for :func:`picture`.
    """
    panels = {}
    first = 0
    for i in range(len(kept)):
        if i + 1 < len(kept) and torch.equal(kept[i], kept[i + 1]):
            continue
        blocks = f"block {i + 1}" if first == i else f"blocks {first + 1} to {i + 1}"
        caption = f"{blocks}: {int(kept[i].sum())} of {kept[i].numel()} tokens"
        panels[caption] = _without_dropped(photo, kept[i], config)
        first = i + 1
    subtitle = "Tokens that the blocks of the last stage compute; the others have dropped out"
    return _page(panels, _MARGIN, title=title, subtitle=subtitle)[0]


def _without_dropped(photo: Image.Image, kept: Tensor, config: CvTConfig) -> Image.Image:
    """Returns the photograph, pale where the nearest token is not kept."""
    center, step = _first_token(config)
    down, across = (
        ((torch.arange(pixels) - center) / step).round().long().clamp(0, tokens - 1)
        for pixels, tokens in zip(reversed(photo.size), kept.shape, strict=True)
    )
    mask = Image.fromarray((kept.cpu()[down][:, across].numpy() * 255).astype(np.uint8))
    pale = Image.blend(photo, Image.new("RGB", photo.size, "white"), 0.8)
    return Image.composite(photo, pale, mask)


def _page(
    panels: Mapping[str, Image.Image], bottom: int, *, title: str, subtitle: str
) -> tuple[Image.Image, tuple[int, int]]:
    """Draws images of one size side by side below their captions.

    Returns:
        The page, with ``bottom`` empty pixels below them, and the width and height of each.
    """
    first = next(iter(panels.values()))
    zoom = max(1.0, _PANEL / first.width)
    width, height = round(zoom * first.width), round(zoom * first.height)
    page = Image.new("RGB", (_MARGIN + len(panels) * (width + _MARGIN), _TOP + height + bottom), "white")
    draw = ImageDraw.Draw(page)
    large, normal = ImageFont.load_default(30), ImageFont.load_default(18)
    draw.text((_MARGIN, 14), _shortened(title, large, page.width - 2 * _MARGIN), "black", large)
    draw.text((_MARGIN, 58), subtitle, "black", normal)
    for i, (caption, panel) in enumerate(panels.items()):
        left = _MARGIN + i * (width + _MARGIN)
        draw.text((left, _TOP - 8), caption, "black", normal, anchor="ls")
        page.paste(panel.resize((width, height), Image.Resampling.BICUBIC), (left, _TOP))
    return page, (width, height)


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Returns as much of a line as there is room for."""
    if font.getlength(text) <= width:
        return text
    fitting = bisect.bisect_right(
        range(len(text)), width, key=lambda n: math.ceil(font.getlength(f"{text[:n]}..."))
    )
    return f"{text[: fitting - 1]}..."


def class_title(index: int, label: str | None, probability: float) -> str:
    """Returns a line of ASCII that says what the model takes an image for.

    Accents are left out, and so is a name in another alphabet, which Pillow's font could not draw.
    """
    plain = "".join(c for c in unicodedata.normalize("NFKD", label or "") if not unicodedata.combining(c))
    plain = printable(" ".join(plain.split()))
    name = f"{plain} (class {index})" if plain.isascii() and plain else f"class {index}"
    return f"{probability:.1%}  {name}"  # first what must not be cut off


def as_json(explanation: Explanation, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the numbers of the first image, with its five most probable classes.

    Maps are means over the heads.
    """
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


def plot_heads(explanations: Sequence[Explanation], path: str | os.PathLike[str]) -> None:
    """Writes a PNG of entropy and distance of every head in every block, mean over the images.

    Raises:
        ModuleNotFoundError: The ``explain`` extra is not installed.
        OSError: The file cannot be written.
    """
    blocks = explanations[0].blocks
    heads = max(block.entropy.shape[1] for block in blocks)
    entropy, distance = np.full((2, heads, len(blocks)), np.nan)
    for i, block in enumerate(blocks):
        for table, field in ((entropy, "entropy"), (distance, "distance")):
            values = torch.cat([getattr(e.blocks[i], field) for e in explanations]).mean(0).tolist()
            table[: len(values), i] = values
        entropy[:, i] /= math.log(max(block.keys, 2))
    size = max(7, 3 + 0.5 * len(blocks)), 3 + 0.7 * heads
    figure = figure_class()(figsize=size, dpi=120, layout="constrained")
    count = sum(len(explanation.logits) for explanation in explanations)
    figure.suptitle(f"Heads of attention, mean over {count} photograph{'s' if count > 1 else ''}")
    upper, lower = figure.subplots(2, 1, sharex=True)
    bar = _draw_heads(upper, entropy, 1, "Entropy, as a part of the largest possible")
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0: one key", "0.25", "0.50", "0.75", "1: all keys alike"])
    bar = _draw_heads(lower, distance, max(np.nanmax(distance), 1), "Mean distance from query to key")
    bar.set_label("pixels")
    names = [f"stage {block.stage + 1}, block {block.block + 1}" for block in blocks]
    lower.set_xticks(range(len(blocks)), names, rotation=90)
    figure.savefig(path, format="png")


def _draw_heads(axes: Any, values: NDArray[np.float64], largest: float, title: str) -> Any:
    """Draws a cell for every head (row) of every block (column), empty where there is none.

    Returns:
        The bar that says what the colors mean.
    """
    cells = axes.imshow(values, cmap="cividis", vmin=0, vmax=largest, aspect="auto")
    axes.set_title(title)
    axes.set_yticks(range(len(values)), [f"head {i}" for i in range(1, len(values) + 1)])
    digits = 2 if largest < 10 else 0
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            color = "black" if value > 0.5 * largest else "white"
            axes.text(column, row, f"{value:.{digits}f}", color=color, ha="center", va="center", fontsize=8)
    return axes.figure.colorbar(cells, ax=axes)


def figure_class() -> Any:
    """Returns Matplotlib's ``Figure``.

    Raises:
        ModuleNotFoundError: The ``explain`` extra is not installed.
    """
    return require("matplotlib.figure", "explain").Figure  # not pyplot, which asks for a window system
