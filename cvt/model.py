"""CvT, the Convolutional vision Transformer (Wu et al. 2021), on the operators of cvt_kernels.

Parameters have the names of Microsoft's ``cls_cvt.py``, so its checkpoints load unchanged. Activations are
tokens (B, T, C) throughout; the class token of a stage, if any, is token 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cvt_kernels.checks import check_kind, check_tensor
from cvt_kernels.models.blocks import BATCH_NORMS
from cvt_kernels.models.class_token import class_token_of, find_last, is_block_wanted, with_class_token_only
from cvt_kernels.models.families.cvt import OWN_BLOCK, OWN_CLASSIFIER
from cvt_kernels.models.forward import apply_layer_norm, forward_block
from cvt_kernels.models.matching import parts_if_fused
from cvt_kernels.modes import autocast_enabled, is_known, is_transformed
from cvt_kernels.ops.attention import attend_by_modules
from cvt_kernels.ops.layer_norm_gelu import gelu
from cvt_kernels.ops.rows import gather_rows, scatter_rows
from cvt_kernels.ops.token_selection import score_tokens, select_tokens
from cvt_kernels.records import PositionBias
from cvt_kernels.reference import resize_table

from .config import CvTConfig, Head, Mixing, Pool, StageConfig, TokenKeep
from .pretrained import PretrainedModel

Grid = tuple[int, int]


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016) per sample; in training the kept samples are scaled up."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep.div_(1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}"


class LayerScale(nn.Module):
    """A learned factor per channel (Touvron et al. 2021, "Going deeper with Image Transformers")."""

    def __init__(self, dim: int, init_value: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def _layer_scale(config: StageConfig) -> nn.Module:
    return nn.Identity() if config.layer_scale is None else LayerScale(config.embed_dim, config.layer_scale)


class ConvEmbed(nn.Module):
    """The convolutional token embedding (section 3.1), from images (B, C, H, W) to normalized tokens."""

    def __init__(self, config: StageConfig):
        super().__init__()
        dim, size, stride = config.embed_dim, config.patch_size, config.patch_stride
        self.proj = nn.Conv2d(config.in_chans, dim, size, stride, config.patch_padding)
        self.bn = nn.BatchNorm2d(dim) if config.embed_norm == "batch_layer_norm" else nn.Identity()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        if not is_transformed():  # torch.func.vmap knows no such memory
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.bn(self.proj(x))
        height, width = x.shape[2:]
        return apply_layer_norm(self.norm, x.permute(0, 2, 3, 1).flatten(1, 2)), (height, width)


class ConvProjection(nn.Module):
    """One branch of the convolutional projection, from maps (B, C, H, W) to maps; without a class token."""

    def __init__(self, dim: int, kernel_size: int, stride: int, mixing: Mixing = "plain"):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, kernel_size, stride, kernel_size // 2, groups=dim, bias=False)
        self.bn = nn.BatchNorm2d(dim)
        if mixing == "hybrid":
            self.dilated_conv = nn.Conv2d(dim, dim, 5, stride, padding=4, dilation=2, groups=dim, bias=False)
            self.dilated_bn = nn.BatchNorm2d(dim)
            nn.init.zeros_(self.dilated_bn.weight)  # the plain projection, until it has learned something

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return y if not hasattr(self, "dilated_conv") else y + self.dilated_bn(self.dilated_conv(x))

    def summands(self) -> list[tuple[nn.Module, nn.Module]]:
        """Returns each convolution with its BatchNorm; the branch is the sum of them."""
        parts = self._modules  # as attributes they would take far longer to find
        pairs = [("conv", "bn"), ("dilated_conv", "dilated_bn")][: len(parts) // 2]
        return [(cast(nn.Module, parts[conv]), cast(nn.Module, parts[bn])) for conv, bn in pairs]


class Attention(nn.Module):
    """Multi-head attention with convolutional projections (section 3.2)."""

    def __init__(self, config: StageConfig):
        super().__init__()
        dim, width = config.embed_dim, config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.scale = config.attention_scale
        self.stride_kv = config.stride_kv
        self.pool = config.pool
        self.conv_proj_q = ConvProjection(dim, config.kernel_size, 1, config.mixing)
        self.conv_proj_k = ConvProjection(dim, config.kernel_size, config.stride_kv, config.mixing)
        self.conv_proj_v = ConvProjection(dim, config.kernel_size, config.stride_kv, config.mixing)
        self.proj_q = nn.Linear(dim, width, bias=config.qkv_bias)
        self.proj_k = nn.Linear(dim, width, bias=config.qkv_bias)
        self.proj_v = nn.Linear(dim, width, bias=config.qkv_bias)
        self.attn_drop = nn.Dropout(config.attn_drop_rate)
        self.proj = nn.Linear(width, dim)
        self.proj_drop = nn.Dropout(config.drop_rate)
        self.position_bias: nn.Parameter | None = None
        if config.position_grid is not None:
            sizes = _table_size(config.position_grid, config.stride_kv)
            self.position_bias = nn.Parameter(torch.zeros(config.num_heads, *sizes))

    def forward(self, x: Tensor, grid: Grid, rows: Tensor | None = None, *, with_scores: bool = False) -> Any:
        """Attends from all tokens, or from the ``rows`` (B, K) of them, to all keys; calls its modules.

        Returns:
            (B, T, C) or (B, K, C); with ``with_scores`` also the scores (B, H·W) of the tokens, see
            :func:`cvt_kernels.ops.token_selection.score_tokens`.
        """
        branches = (self.conv_proj_q, self.conv_proj_k, self.conv_proj_v)
        projected = [self._project(branch, x, grid) for branch in branches]
        if rows is not None:
            projected[0] = gather_rows(projected[0], rows)
        linears = zip((self.proj_q, self.proj_k, self.proj_v), projected, strict=True)
        q, k, v = (linear(tokens).unflatten(2, (self.num_heads, -1)) for linear, tokens in linears)
        position = self.position_for(grid, rows)
        y = attend_by_modules(q, k, v, self.attn_drop, scale=self.scale, position=position)
        out = self.proj_drop(self.proj(y))
        if not with_scores:
            return out
        scores = score_tokens(q, k, grid, stride=self.stride_kv, scale=self.scale, pool=self.pool, rows=rows)
        return out, scores

    def position_for(self, grid: Grid, rows: Tensor | None = None) -> PositionBias | None:
        """Returns the bias for a grid, its table interpolated if made for another one; None without."""
        if self.position_bias is None:
            return None
        stride = self.stride_kv
        table = resize_table(self.position_bias, _table_size(grid, stride))
        height, width = ((n - 1) // stride + 1 for n in grid)
        return PositionBias(table, grid, (height, width), stride, rows)

    @staticmethod
    def _project(branch: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        y = branch(tokens_to_map(x, grid)).permute(0, 2, 3, 1).flatten(1, 2)
        class_token = x[:, : x.shape[1] - grid[0] * grid[1]]
        return torch.cat([class_token.to(y.dtype), y], dim=1)


class Mlp(nn.Module):
    """A linear layer, GELU, and a linear layer back to the width of the stage."""

    def __init__(self, config: StageConfig):
        super().__init__()
        hidden = int(config.embed_dim * config.mlp_ratio)
        self.approximate = config.approximate
        self.fc1 = nn.Linear(config.embed_dim, hidden)
        self.fc2 = nn.Linear(hidden, config.embed_dim)
        self.drop = nn.Dropout(config.drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.fc1(x), approximate=self.approximate)
        return self.drop(self.fc2(self.drop(x)))


class Block(nn.Module):
    """A pre-norm transformer block with convolutional projections."""

    def __init__(self, config: StageConfig, drop_path_rate: float, token_keep: TokenKeep = 1.0):
        super().__init__()
        self.token_keep = token_keep
        self.norm1 = nn.LayerNorm(config.embed_dim)
        self.attn = Attention(config)
        self.ls1 = _layer_scale(config)
        self.norm2 = nn.LayerNorm(config.embed_dim)
        self.mlp = Mlp(config)
        self.ls2 = _layer_scale(config)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, x: Tensor, grid: Grid, rows: Tensor | None = None, *, with_scores: bool = False) -> Any:
        """Computes the block on all tokens, or on the ``rows`` (B, K) of them; other tokens stay unchanged.

        Returns:
            (B, T, C); with ``with_scores`` also the scores (B, H·W) of the tokens.
        """
        only = not with_scores and is_block_wanted(self)
        if only:
            rows = class_token_of(x)
        parts = parts_if_fused(self, OWN_BLOCK)
        if parts is None:
            out, scores = self._call_modules(x, grid, rows, with_scores)
        else:
            out, scores = forward_block(parts, x, grid, rows, with_scores=with_scores, rows_only=only)
        return (out, scores) if with_scores else out

    def _call_modules(
        self, x: Tensor, grid: Grid, rows: Tensor | None, with_scores: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the block by calling its modules, for the case that one has a hook or was replaced."""
        scores, given = None, () if rows is None else (rows,)
        if with_scores:
            branch, scores = self.attn(self.norm1(x), grid, *given, with_scores=True)
        else:
            branch = self.attn(self.norm1(x), grid, *given)
        stream = self.drop_path(self.ls1(branch)) + (x if rows is None else gather_rows(x, rows))
        branch = self.drop_path(self.ls2(self.mlp(self.norm2(stream))))
        return stream + branch if rows is None else scatter_rows(x, rows, stream, branch), scores


@contextlib.contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the buffers of a module after a block that computes again what has updated them."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    """Returns a block whose backward computes its activations again, without another step of BatchNorm."""
    run = functools.partial(checkpoint, block, use_reentrant=False)
    if torch.compiler.is_compiling():  # which takes the change of the buffers out of what is computed again
        return run
    return functools.partial(run, context_fn=lambda: (contextlib.nullcontext(), _same_buffers(block)))


class Stage(nn.Module):
    """A token embedding and its blocks; Microsoft's ``VisionTransformer``."""

    #: Whether the backward computes the activations of blocks again.
    grad_checkpointing = False

    def __init__(self, config: StageConfig):
        super().__init__()
        dim = config.embed_dim
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if config.cls_token else None
        self.patch_embed = ConvEmbed(config)
        self.pos_drop = nn.Dropout(config.drop_rate)
        blocks = zip(config.drop_path_rates, config.token_keep, strict=True)
        self.blocks = nn.ModuleList(Block(config, rate, keep) for rate, keep in blocks)
        self.token_keep_bounds = config.token_keep_bounds

    def forward(self, image: Tensor) -> tuple[Tensor, Grid]:
        """Turns images or feature maps (B, C, H, W) into tokens (B, T, C) and their grid."""
        x, grid = self.patch_embed(image)
        if self.cls_token is not None:
            # Not by the size of the batch, which torch.onnx.export(dynamo=False) takes for a constant.
            x = torch.cat([self.cls_token.expand_as(x[:, :1]), x], dim=1)
        x = self.pos_drop(x)
        rows = None
        for block in self.blocks:
            keep = getattr(block, "token_keep", 1.0)  # other modules may be in the places of blocks
            given = () if rows is None else (rows,)
            is_recomputed = self.grad_checkpointing and self.training and torch.is_grad_enabled()
            run = _checkpointed(block) if is_recomputed else block
            if keep == 1:
                x = run(x, grid, *given)
                continue
            x, scores = run(x, grid, *given, with_scores=True)
            class_token = self.cls_token is not None
            rows = select_tokens(scores, rows, keep, self.token_keep_bounds, class_token=class_token)
        return x, grid


class FeatureInfo(list[dict[str, Any]]):
    """A list of one ``dict(num_chs, reduction, module)`` per feature map, as in timm."""

    def channels(self) -> list[int]:
        """Returns the channels of each map."""
        return [info["num_chs"] for info in self]

    def reduction(self) -> list[int]:
        """Returns the stride of each map with respect to the image."""
        return [info["reduction"] for info in self]

    def module_name(self) -> list[str]:
        """Returns the name of the module that makes each map."""
        return [info["module"] for info in self]


class Stages(nn.Module):
    """The base class of all models: the stages ``stage0``, ``stage1``, …, the first ``count`` or all."""

    def __init__(self, config: CvTConfig, *, head: Head | None = None, count: int | None = None):
        check_kind("config", config, CvTConfig)
        if head is not None and config.head != head:
            raise ValueError(f"config: has head={config.head!r}, expected {head!r}")
        super().__init__()
        self.config = config
        self.feature_info = FeatureInfo()
        self._stage_names: list[str] = []
        reduction = 1
        for i, stage in enumerate(config.stages[:count]):
            name = f"stage{i}"
            self.add_module(name, Stage(stage))
            self._stage_names.append(name)
            reduction *= stage.patch_stride
            self.feature_info.append({"num_chs": stage.embed_dim, "reduction": reduction, "module": name})

    def _built_stages(self) -> list[Stage]:
        return [cast(Stage, self.get_submodule(name)) for name in self._stage_names]

    def set_token_keep(
        self, token_keep: TokenKeep | Sequence[TokenKeep], bounds: tuple[float, float] | None = None
    ) -> None:
        """Sets the token pruning of the last stage, which needs no weights.

        Args:
            token_keep: As in :class:`CvTConfig`.
            bounds: ``token_keep_bounds``; None keeps the present ones.
        """
        bounds = self.config.token_keep_bounds if bounds is None else bounds
        config = dataclasses.replace(self.config, token_keep=cast(Any, token_keep), token_keep_bounds=bounds)
        self.config = config
        for stage, built in zip(config.stages, self._built_stages(), strict=False):
            built.token_keep_bounds = config.token_keep_bounds
            for block, value in zip(built.blocks, stage.token_keep, strict=True):
                cast(Block, block).token_keep = value

    def _check_images(self, images: Tensor) -> None:
        if torch.jit.is_tracing():  # sizes are tensors then, and what is compared becomes part of the record
            return
        check_tensor("images", images, "(batch, channels, height, width)")
        if images.ndim != 4 or images.shape[1] != self.config.in_chans:
            raise ValueError(
                f"images: got shape {tuple(images.shape)}, "
                f"expected (batch, {self.config.in_chans}, height, width)"
            )
        # Other modules may be in the places of a stage, its embedding and the convolution.
        embedding = getattr(self._built_stages()[0], "patch_embed", None)
        weight = getattr(getattr(embedding, "proj", None), "weight", None)
        if isinstance(weight, Tensor):
            _check_like(images, weight)
        self._check_image_size(images)

    def _check_image_size(self, images: Tensor) -> None:
        height, width = images.shape[2:]
        for stage, built in zip(self.config.stages, self._built_stages(), strict=False):
            height, width = stage.grid(height, width)
            if is_known(height < 1) or is_known(width < 1):
                raise ValueError(
                    f"images: {images.shape[2]}×{images.shape[3]} pixels are too few, "
                    f"the embedding with patch size {stage.patch_size} gets an empty grid"
                )
            keys = [(n - 1) // stage.stride_kv + 1 for n in (height, width)]
            if _normalizes_by_batch(built) and is_known(images.shape[0] * keys[0] * keys[1] == 1):
                raise ValueError(
                    f"images: one of {images.shape[2]}×{images.shape[3]} leaves BatchNorm a single value per "
                    "channel, expected a larger batch or larger images in training"
                )

    def maps(self, images: Tensor) -> list[Tensor]:
        """Turns images into the map (B, C, H, W) of every stage, as channels-last views."""
        self._check_images(images)
        maps: list[Tensor] = []
        for stage in self._built_stages():
            images = tokens_to_map(*stage(images))
            maps.append(images)
        return maps

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Sets whether the backward of a training step computes the activations of blocks again, as in timm.

        It saves memory for time. BatchNorm's statistics are updated once per step all the same.
        """
        for stage in self._built_stages():
            stage.grad_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns patterns that group parameters by depth, for timm's layer decay.

        The groups are the first embedding, every block, with the embedding before it or the LayerNorm after
        it, and the head; with ``coarse`` the stages in the place of blocks.
        """
        blocks = [
            (r"^stage(\d+)\.(?:patch_embed|cls_token)", (0,)),
            (r"^stage(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),  # timm's number for the group before
        ]
        return {"stem": r"^stage0\.patch_embed", "blocks": r"^stage(\d+)" if coarse else blocks}

    def no_weight_decay(self) -> set[str]:
        """Returns the names of parameters that weight decay should leave alone, besides biases and norms."""
        return {name for name, _ in self.named_parameters() if name.endswith(("cls_token", "position_bias"))}


class CvT(Stages, PretrainedModel):
    """A CvT with a classification head.

    Args:
        config: The sizes and choices; ``create_model`` has them by the names of the paper.

    Attributes:
        config: The configuration as it stands (``reset_classifier`` replaces it).
        num_classes: Outputs of the head, 0 for none.
        num_features: Channels of the last stage.
        feature_info: Channels and reduction of every stage's feature map, as in timm.

    Shape:
        Input (B, in_chans, H, W), any H and W of at least 32 with the strides of the paper; output
        (B, num_classes), or (B, num_features) without a head.

    A block computes its modules by fused operators, without calling them. If attention, the MLP, a LayerNorm,
    convolution, BatchNorm or ``attn.attn_drop`` has hooks, parametrizations or another forward or class, the
    block calls all its modules one by one. Linear layers, ``drop_path`` and other dropout are called where
    they have hooks or another class, and the rest stays fused. ``cvt_kernels.coverage`` says which blocks
    call their modules, and why.
    """

    def __init__(self, config: CvTConfig):
        super().__init__(config, head="classify")
        self.num_features = config.embed_dims[-1]
        self.norm = nn.LayerNorm(self.num_features)
        self.head = self._build_head(config.num_classes)
        self.apply(init_weights)

    @property
    def num_classes(self) -> int:
        """The number of outputs of the head; 0 for none."""
        return self.config.num_classes

    def _build_head(self, num_classes: int) -> nn.Module:
        return nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        """Returns the head: ``nn.Linear``, or ``nn.Identity`` for ``num_classes=0``."""
        return self.head

    def reset_classifier(self, num_classes: int, pool: Pool | None = None) -> None:
        """Replaces the head by a freshly initialized one, on the same device and of the same dtype.

        Args:
            num_classes: Outputs of the new head; 0 for none.
            pool: ``"cls"`` or ``"avg"``; None keeps the present one.
        """
        pool = self.config.pool if pool is None else pool
        self.config = dataclasses.replace(self.config, num_classes=num_classes, pool=pool)
        self.head = self._build_head(num_classes).to(next(self.parameters()))
        self.head.apply(init_weights)
        self.labels = None
        for module in self.modules():
            if isinstance(module, Attention):
                module.pool = self.config.pool

    def forward_features(self, images: Tensor) -> Tensor:
        """Turns images into the normalized tokens of the last stage (B, T, C), a class token first."""
        return apply_layer_norm(self.norm, self._tokens(images))

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Turns images into the maps of stages, and what ``forward_features`` returns, as timm's models do.

        Args:
            images: (B, in_chans, H, W).
            indices: The stages whose maps are returned, in their order; negative ones count from the end. A
                number for so many last ones, None for all.
            norm: Whether the last LayerNorm normalizes the map of the last stage too.
            stop_early: Whether stages after the last requested one are left out, with ``intermediates_only``.
            output_fmt: ``"NCHW"`` for contiguous maps (B, C, H, W), ``"NHWC"`` for (B, H, W, C).
            intermediates_only: Whether the maps alone are returned.

        Returns:
            The tokens of ``forward_features`` and a list of maps, or the list.
        """
        stages = self._built_stages()
        count = len(stages)
        if isinstance(indices, int):
            chosen = set(range(count - indices, count) if 0 < indices <= count else [count])
        else:
            chosen = {i + count if i < 0 else i for i in (range(count) if indices is None else indices)}
        if not all(0 <= i < count for i in chosen):
            raise ValueError(f"indices: got {indices}, expected indices of {count} stages, or how many")
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt: got {output_fmt!r}, expected 'NCHW' or 'NHWC'")
        self._check_images(images)
        maps = []
        for i, stage in enumerate(stages):
            if stop_early and intermediates_only and i > max(chosen, default=-1):
                break
            tokens, grid = stage(images)
            images = tokens_to_map(tokens, grid)
            if i in chosen:
                is_normalized = norm and i == count - 1
                image = tokens_to_map(apply_layer_norm(self.norm, tokens), grid) if is_normalized else images
                maps.append((image if output_fmt == "NCHW" else image.permute(0, 2, 3, 1)).contiguous())
        return maps if intermediates_only else (apply_layer_norm(self.norm, tokens), maps)

    def _tokens(self, images: Tensor) -> Tensor:
        """Turns images into the tokens of the last stage (B, T, C), before the last LayerNorm."""
        self._check_images(images)
        for stage in self._built_stages():
            tokens, grid = stage(images)
            images = tokens_to_map(tokens, grid)
        return tokens

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Turns the tokens of ``forward_features`` into logits, with ``pre_logits`` into the head's input."""
        if self.config.pool == "cls":
            pooled = tokens[:, 0]
        else:
            pooled = tokens[:, int(self.config.cls_token[-1]) :].mean(dim=1)
        return pooled if pre_logits else self.head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        last = find_last(self, OWN_CLASSIFIER, (images,), {})
        if last is None:
            tokens = self._tokens(images)
        else:
            tokens = with_class_token_only(*last, lambda: self._tokens(images))
        if self.config.pool == "cls":
            tokens = tokens[:, :1]  # the head reads no other
        return self.forward_head(apply_layer_norm(self.norm, tokens))


class CvTFeatures(Stages):
    """The stages of a CvT as a backbone, from images to a list of feature maps (B, C, H, W).

    Parameters have the names of :class:`CvT`; stages after the last requested one are not built.

    Args:
        config: The sizes and choices.
        out_indices: The stages whose maps are returned, in this order; negative ones count from the end.

    Attributes:
        feature_info: Channels and reduction of each returned map, as in timm.
    """

    def __init__(self, config: CvTConfig, out_indices: Sequence[int] | None = None):
        check_kind("config", config, CvTConfig)
        stages = len(config.embed_dims)
        chosen = tuple(range(stages)) if out_indices is None else out_indices
        if not isinstance(chosen, tuple | list) or any(type(i) is not int for i in chosen):
            raise TypeError(f"out_indices: got {chosen!r}, expected a tuple of integers")
        if not chosen or any(not -stages <= i < stages for i in chosen):
            raise ValueError(f"out_indices: got {tuple(chosen)}, expected indices of {stages} stages")
        self.out_indices = tuple(i % stages for i in chosen)
        super().__init__(config, count=max(self.out_indices) + 1)
        self.feature_info = FeatureInfo(self.feature_info[i] for i in self.out_indices)
        self.apply(init_weights)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.maps(images)
        return [maps[i] for i in self.out_indices]


def tokens_to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """Returns the map (B, C, H, W) of tokens (B, T, C), a channels-last view without the class token."""
    height, width = grid
    spatial = tokens[:, tokens.shape[1] - height * width :]
    return spatial.unflatten(1, (height, width)).permute(0, 3, 1, 2)


def _table_size(grid: Grid, stride: int) -> Grid:
    """Returns the height and width of a table of offsets from the keys to the tokens of a grid."""
    height, width = grid
    return height + stride * ((height - 1) // stride), width + stride * ((width - 1) // stride)


def _check_like(images: Tensor, weight: Tensor) -> None:
    if images.device != weight.device:
        raise ValueError(f"images: are on {images.device}, expected {weight.device} as the model")
    castable = images.is_floating_point() and images.dtype != torch.float64 and autocast_enabled(images)
    if images.dtype != weight.dtype and not castable:
        raise TypeError(f"images: have dtype {images.dtype}, expected {weight.dtype} as the model")


def _normalizes_by_batch(stage: nn.Module) -> bool:
    """Returns whether the first block of a stage normalizes its keys by batch statistics."""
    block = next(iter(getattr(stage, "blocks", ())), None)
    branch = getattr(getattr(block, "attn", None), "conv_proj_k", None)
    batch_norm = getattr(branch, "bn", None)
    return isinstance(batch_norm, BATCH_NORMS) and batch_norm.training


def init_weights(module: nn.Module) -> None:
    """Applies Microsoft's ``trunc_norm`` initialization; convolutions and norms keep PyTorch's own."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, Stage) and module.cls_token is not None:
        nn.init.trunc_normal_(module.cls_token, std=0.02)
