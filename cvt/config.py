"""The configuration of a CvT, and the presets of the paper's three models.

Source: Wu et al. 2021, "CvT: Introducing Convolutions to Vision Transformers", table 2, and the experiment
files of Microsoft's repository.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from cvt_kernels.checks import shown
from cvt_kernels.records import GeluVariant

Activation = Literal["quick_gelu", "gelu", "gelu_tanh"]
Scale = Literal["embed_dim", "head_dim"]
Pool = Literal["cls", "avg"]
EmbedNorm = Literal["layer_norm", "batch_layer_norm"]
DropPathSchedule = Literal["stage", "depth", "constant"]
Mixing = Literal["plain", "hybrid"]
Head = Literal["classify", "segment"]
#: How many tokens stay after a block: a fraction, or "entropy" to decide per image by attention's.
TokenKeep = float | Literal["entropy"]

#: The GELU of each activation.
ACTIVATIONS: dict[Activation, GeluVariant] = {"quick_gelu": "quick", "gelu": "none", "gelu_tanh": "tanh"}
#: The dtypes that models are measured and compiled in, by name.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

#: The largest accepted image size; a larger number is taken for a mistake.
LARGEST_IMAGE = 1 << 14
#: The most classes of a segmenter: labels have 8 bits, and 255 marks ignored pixels.
MOST_LABELS = 255
#: The most classes of an image.
MOST_CLASSES = 10_000_000
#: The largest seed: any that PyTorch, NumPy and Python take.
MOST_SEED = 2**63 - 1
#: The most images of a batch.
MOST_IMAGES = 1 << 20
#: The most stages.
MOST_STAGES = 8
# The most blocks of all stages.
_MOST_BLOCKS = 1000


class _Limits(NamedTuple):
    """The type of a number, its smallest value, and what it must be below, which is far above any model's."""

    kind: type
    least: float
    below: float


_CHANNELS = _Limits(int, 1, (1 << 16) + 1)
_PIXELS = _Limits(int, 1, 1025)
_YES_OR_NO = _Limits(bool, 0, 2)
_RATE = _Limits(float, 0, 1)
# The fields with one value per stage.
_PER_STAGE = {
    "embed_dims": _CHANNELS,
    "depths": _Limits(int, 1, _MOST_BLOCKS + 1),
    "num_heads": _Limits(int, 1, 4097),
    "patch_sizes": _PIXELS,
    "patch_strides": _PIXELS,
    "patch_paddings": _PIXELS._replace(least=0),
    "mlp_ratio": _Limits(float, 0, 1025),
    "qkv_bias": _YES_OR_NO,
    "kernel_size": _PIXELS,
    "stride_q": _PIXELS,
    "stride_kv": _PIXELS,
    "cls_token": _YES_OR_NO,
    "drop_rate": _RATE,
    "attn_drop_rate": _RATE,
    "drop_path_rate": _RATE,
    "head_dim": _CHANNELS,
}
# The other numbers.
_SINGLE = {
    "num_classes": _Limits(int, 0, MOST_CLASSES + 1),
    "in_chans": _CHANNELS,
    "decoder_dim": _CHANNELS,
    "position_bias": _YES_OR_NO,
    "position_bias_size": _Limits(int, 1, LARGEST_IMAGE + 1),
    "layer_scale": _Limits(float, -1_000_000, 1_000_000),
}
# The fields that are one of a few words.
_WORDS = {
    "activation": tuple(ACTIVATIONS),
    "scale": get_args(Scale),
    "pool": get_args(Pool),
    "embed_norm": get_args(EmbedNorm),
    "drop_path_schedule": get_args(DropPathSchedule),
    "mixing": get_args(Mixing),
    "head": get_args(Head),
}
# The fields that may be None.
_OPTIONAL = ("head_dim", "layer_scale")


@dataclass(frozen=True)
class StageConfig:
    """The configuration of one stage: the fields of :class:`CvTConfig` for this stage."""

    in_chans: int
    embed_dim: int
    depth: int
    num_heads: int
    patch_size: int
    patch_stride: int
    patch_padding: int
    mlp_ratio: float
    qkv_bias: bool
    kernel_size: int
    stride_kv: int
    cls_token: bool
    drop_rate: float
    attn_drop_rate: float
    drop_path_rates: tuple[float, ...]
    approximate: GeluVariant
    attention_scale: float
    embed_norm: EmbedNorm
    layer_scale: float | None
    head_dim: int
    mixing: Mixing
    position_grid: tuple[int, int] | None
    token_keep: tuple[TokenKeep, ...]
    token_keep_bounds: tuple[float, float]
    pool: Pool

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the grid of the tokens of images or maps of this size; below 1 where they are too small."""
        size, stride, padding = self.patch_size, self.patch_stride, self.patch_padding
        return _patches(height, size, stride, padding), _patches(width, size, stride, padding)


@dataclass(frozen=True)
class CvTConfig:
    """The configuration of a CvT. Tuples have one value per stage; a single value serves every stage.

    The defaults are CvT-13, as Microsoft published it.

    Attributes:
        embed_dims: Channels.
        depths: Number of blocks.
        num_heads: Attention heads; without ``head_dim`` each must divide the stage's ``embed_dims``.
        patch_sizes: Kernel of the convolutional token embedding.
        patch_strides: Its stride.
        patch_paddings: Its zero padding.
        mlp_ratio: Hidden channels of the MLP over ``embed_dims``.
        qkv_bias: Whether the linear projections of Q, K and V have a bias.
        kernel_size: Kernel of the depthwise convolutions of Q, K and V, odd; padded by half of it.
        stride_q: Stride of the query convolution. Only 1: the residual needs one query per token.
        stride_kv: Stride of the key and value convolutions.
        cls_token: Whether the stage has a class token. It ends with its stage.
        drop_rate: Dropout after the embedding, the attention projection and both MLP layers.
        attn_drop_rate: Dropout on the attention probabilities.
        drop_path_rate: Stochastic depth; see ``drop_path_schedule``.
        drop_path_schedule: ``"stage"``: from 0 to ``drop_path_rate`` over the blocks of each stage
            (Microsoft). ``"depth"``: from 0 to the largest ``drop_path_rate`` over all blocks.
            ``"constant"``: ``drop_path_rate`` in every block of the stage.
        activation: ``"quick_gelu"`` (Microsoft; the published weights were trained with it), ``"gelu"``
            (what Hugging Face runs) or ``"gelu_tanh"``.
        scale: Attention scores are multiplied by the ``"embed_dim"`` or the ``"head_dim"`` to the power −0.5.
        pool: The head reads the class token (``"cls"``) or the mean of the spatial tokens (``"avg"``).
        embed_norm: ``"layer_norm"`` after the embedding convolution, or ``"batch_layer_norm"`` for a
            BatchNorm before it.
        layer_scale: Initial value of a learned per-channel factor on both residual branches; None for none.
        head_dim: Channels of an attention head; None for ``embed_dims / num_heads``. Pruned models have fewer
            heads than fill the width of their stage.
        mixing: The convolutions of Q, K and V: ``"plain"`` for one of ``kernel_size``, ``"hybrid"`` for the
            sum of that and a 5×5 convolution of dilation 2, each with a BatchNorm.
        position_bias: Whether attention adds a learned bias for each head and each offset from key to query.
        position_bias_size: The image size that the bias tables are made for; they are interpolated for
            other sizes.
        token_keep: The fraction of the tokens of the last stage that stays after a block, above 0 and at most
            1, or ``"entropy"``, which keeps more if the attention of the head's query is widespread. One
            value for each block of the last stage (1 after the last), or a single one, which applies after a
            quarter, half and three quarters of the blocks. The other tokens keep the values that they have.
        token_keep_bounds: The least and the greatest fraction that ``"entropy"`` keeps.
        head: ``"classify"``, or ``"segment"`` for a class per pixel.
        decoder_dim: Channels within the head of ``"segment"``.
        num_classes: Outputs of the head; 0 for no head. A head of ``"segment"`` has 2 to 255.
        in_chans: Channels of the images.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A value out of range, or values that contradict each other.
    """

    embed_dims: tuple[int, ...] = (64, 192, 384)
    depths: tuple[int, ...] = (1, 2, 10)
    num_heads: tuple[int, ...] = (1, 3, 6)
    patch_sizes: tuple[int, ...] = (7, 3, 3)
    patch_strides: tuple[int, ...] = (4, 2, 2)
    patch_paddings: tuple[int, ...] = (2, 1, 1)
    mlp_ratio: tuple[float, ...] = (4.0, 4.0, 4.0)
    qkv_bias: tuple[bool, ...] = (True, True, True)
    kernel_size: tuple[int, ...] = (3, 3, 3)
    stride_q: tuple[int, ...] = (1, 1, 1)
    stride_kv: tuple[int, ...] = (2, 2, 2)
    cls_token: tuple[bool, ...] = (False, False, True)
    drop_rate: tuple[float, ...] = (0.0, 0.0, 0.0)
    attn_drop_rate: tuple[float, ...] = (0.0, 0.0, 0.0)
    drop_path_rate: tuple[float, ...] = (0.0, 0.0, 0.1)
    drop_path_schedule: DropPathSchedule = "stage"
    activation: Activation = "quick_gelu"
    scale: Scale = "embed_dim"
    pool: Pool = "cls"
    embed_norm: EmbedNorm = "layer_norm"
    layer_scale: float | None = None
    num_classes: int = 1000
    in_chans: int = 3
    head_dim: tuple[int, ...] | None = None
    mixing: Mixing = "plain"
    position_bias: bool = False
    position_bias_size: int = 224
    token_keep: TokenKeep | tuple[TokenKeep, ...] = 1.0
    token_keep_bounds: tuple[float, float] = (0.5, 0.9)
    head: Head = "classify"
    decoder_dim: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.embed_dims, tuple | list) or not self.embed_dims:
            raise TypeError(f"embed_dims: got {shown(self.embed_dims)}, expected one integer per stage")
        stages = len(self.embed_dims)
        if stages > MOST_STAGES:
            raise ValueError(f"embed_dims: got {stages} stages, expected at most {MOST_STAGES}")
        for name, choices in _WORDS.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ValueError(f"{name}: got {shown(value)}, expected one of {', '.join(choices)}")
        for name in (*_PER_STAGE, *_SINGLE):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if name in _PER_STAGE:
                value = _per_stage(name, value, stages)
            else:
                value = as_number(name, value, *_SINGLE[name])
            object.__setattr__(self, name, value)
        if sum(self.depths) > _MOST_BLOCKS:
            raise ValueError(f"depths: got {self.depths}, expected at most {_MOST_BLOCKS} blocks altogether")
        self._check_token_keep()
        self._check_consistency()

    @classmethod
    def from_dict(cls, content: Any) -> CvTConfig:
        """Builds a configuration from ``dataclasses.asdict`` of one."""
        if not isinstance(content, Mapping):
            raise TypeError(f"config: got {shown(content)}, expected an object of fields")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = [name for name in content if name not in known]
        if unknown:
            raise ValueError(f"config: got the field {shown(unknown[0])}, which is not known")
        return cls(**content)

    def _check_token_keep(self) -> None:
        keep, depth = self.token_keep, self.depths[-1]
        if isinstance(keep, tuple | list):
            if len(keep) != depth:
                raise ValueError(
                    f"token_keep: got {len(keep)} values, expected a single one, or one for each of the "
                    f"{depth} blocks of the last stage"
                )
            object.__setattr__(self, "token_keep", tuple(map(_check_keep, keep)))
        else:
            object.__setattr__(self, "token_keep", _check_keep(keep))
        last = keep[-1] if isinstance(keep, tuple | list) else keep if depth == 1 else 1
        if last != 1:
            raise ValueError(f"token_keep: got {last!r} after the last block, expected 1: nothing follows")
        bounds = self.token_keep_bounds
        if not isinstance(bounds, tuple | list) or len(bounds) != 2:
            raise TypeError(f"token_keep_bounds: got {shown(bounds)}, expected two fractions")
        least, most = (check_fraction("token_keep_bounds", each) for each in bounds)
        if least > most:
            raise ValueError(f"token_keep_bounds: got {least} and {most}, expected the smaller one first")
        object.__setattr__(self, "token_keep_bounds", (least, most))

    def _check_consistency(self) -> None:
        for i, (dim, heads) in enumerate(zip(self.embed_dims, self.num_heads, strict=True)):
            if self.head_dim is None and dim % heads:
                raise ValueError(f"num_heads: {heads} heads do not divide embed_dims[{i}] = {dim}")
            if int(dim * self.mlp_ratio[i]) < 1:
                raise ValueError(f"mlp_ratio: {self.mlp_ratio[i]} leaves stage {i} no hidden channel")
        for padding, size in zip(self.patch_paddings, self.patch_sizes, strict=True):
            if padding >= size:
                raise ValueError(f"patch_paddings: got {padding} for a patch of {size}, expected less")
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(f"kernel_size: got {self.kernel_size}, expected odd numbers")
        if any(stride != 1 for stride in self.stride_q):
            raise ValueError(f"stride_q: got {self.stride_q}, expected 1: each token is a query")
        if self.head == "segment" and not 2 <= self.num_classes <= MOST_LABELS:
            raise ValueError(
                f"num_classes: got {self.num_classes} with head='segment', expected 2 to {MOST_LABELS}"
            )
        if self.pool == "cls" and not self.cls_token[-1]:
            raise ValueError("pool: 'cls' needs a class token in the last stage; expected 'avg'")

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """The configurations of the stages, first stage first."""
        return tuple(self._stage(i) for i in range(len(self.embed_dims)))

    def _stage(self, i: int) -> StageConfig:
        dim = self.embed_dims[i]
        head_dim = dim // self.num_heads[i] if self.head_dim is None else self.head_dim[i]
        return StageConfig(
            in_chans=self.embed_dims[i - 1] if i else self.in_chans,
            embed_dim=dim,
            depth=self.depths[i],
            num_heads=self.num_heads[i],
            patch_size=self.patch_sizes[i],
            patch_stride=self.patch_strides[i],
            patch_padding=self.patch_paddings[i],
            mlp_ratio=self.mlp_ratio[i],
            qkv_bias=self.qkv_bias[i],
            kernel_size=self.kernel_size[i],
            stride_kv=self.stride_kv[i],
            cls_token=self.cls_token[i],
            drop_rate=self.drop_rate[i],
            attn_drop_rate=self.attn_drop_rate[i],
            drop_path_rates=self._drop_path_rates(i),
            approximate=ACTIVATIONS[self.activation],
            attention_scale=(dim if self.scale == "embed_dim" else head_dim) ** -0.5,
            embed_norm=self.embed_norm,
            layer_scale=self.layer_scale,
            head_dim=head_dim,
            mixing=self.mixing,
            position_grid=self._position_grid(i) if self.position_bias else None,
            token_keep=self._token_keep() if i == len(self.depths) - 1 else (1.0,) * self.depths[i],
            token_keep_bounds=self.token_keep_bounds,
            pool=self.pool,
        )

    def _position_grid(self, i: int) -> tuple[int, int]:
        """Returns the grid of a stage for images of ``position_bias_size``."""
        side = self.position_bias_size
        for j in range(i + 1):
            side = _patches(side, self.patch_sizes[j], self.patch_strides[j], self.patch_paddings[j])
        if side < 1:
            raise ValueError(f"position_bias_size: got {self.position_bias_size}, too few for stage {i}")
        return side, side

    def _token_keep(self) -> tuple[TokenKeep, ...]:
        """Returns how many tokens stay after each block of the last stage."""
        if isinstance(self.token_keep, tuple):
            return self.token_keep
        depth = self.depths[-1]
        after = {depth * quarter // 4 for quarter in (1, 2, 3)} - {0}
        return tuple(self.token_keep if block in after else 1.0 for block in range(1, depth + 1))

    def _drop_path_rates(self, i: int) -> tuple[float, ...]:
        rate, depth = self.drop_path_rate[i], self.depths[i]
        if self.drop_path_schedule == "constant":
            return (rate,) * depth
        if self.drop_path_schedule == "stage":
            return _ramp(rate, depth)
        before = sum(self.depths[:i])
        return _ramp(max(self.drop_path_rate), sum(self.depths))[before : before + depth]


def _patches(pixels: int, size: int, stride: int, padding: int) -> int:
    return (pixels + 2 * padding - size) // stride + 1


def _ramp(last: float, count: int) -> tuple[float, ...]:
    """Returns ``count`` equally spaced values from 0 to ``last``; a single one is 0, as in torch.linspace."""
    return tuple(last * j / max(count - 1, 1) for j in range(count))


def _per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,) * stages
    if len(values) != stages:
        raise ValueError(f"{name}: got {len(values)} values, expected {stages}, one per stage")
    return tuple(as_number(name, v, *_PER_STAGE[name]) for v in values)


def check_fraction(name: str, value: Any) -> float:
    """Returns a number in (0, 1] as a float; raises for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {shown(value)}, expected a number")
    if not 0 < value <= 1:
        raise ValueError(f"{name}: got {shown(value)}, expected a fraction above 0 and at most 1")
    return float(value)


def _check_keep(value: Any) -> TokenKeep:
    if isinstance(value, str):
        if value != "entropy":
            raise ValueError(f"token_keep: got {shown(value)}, expected a fraction or 'entropy'")
        return "entropy"
    return check_fraction("token_keep", value)


def as_number(name: str, value: Any, kind: type, least: float, below: float) -> Any:
    """Returns ``value`` as ``kind``; an integer passes for a float, and nothing but a bool for a bool."""
    accepted = (int, float) if kind is float else kind
    right_type = isinstance(value, accepted) and isinstance(value, bool) == (kind is bool)
    if not right_type:
        raise TypeError(f"{name}: got {shown(value)}, expected {kind.__name__}")
    if not least <= value < below:
        upper = " and finite" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name}: got {shown(value)}, expected at least {least:g}{upper}")
    return kind(value)


def check_images(image_size: int, crop_fraction: float | None) -> None:
    """Raises unless :func:`cvt.images.preprocess` can prepare images like this."""
    as_number("image_size", image_size, int, 1, LARGEST_IMAGE + 1)
    if crop_fraction is None:
        return
    as_number("crop_fraction", crop_fraction, float, 0, 1 + 1e-9)
    if not image_size / LARGEST_IMAGE <= crop_fraction <= 1:
        raise ValueError(f"crop_fraction: got {crop_fraction!r}, expected a part of the image, 1 at most")


#: The models of the paper by name.
PRESETS: dict[str, CvTConfig] = {
    "cvt_13": CvTConfig(),
    "cvt_21": CvTConfig(depths=(1, 4, 16)),
    "cvt_w24": CvTConfig(
        embed_dims=(192, 768, 1024), depths=(2, 2, 20), num_heads=(3, 12, 16), drop_path_rate=(0.0, 0.0, 0.3)
    ),
}


def preset_of(embed_dims: tuple[int, ...], depths: tuple[int, ...]) -> str | None:
    """Returns the name of the paper's model with these channels and blocks, or None."""
    names = (name for name, c in PRESETS.items() if (c.embed_dims, c.depths) == (embed_dims, depths))
    return next(names, None)


def default_image_size(model: str | CvTConfig) -> int:
    """Returns 384 for ``"cvt_w24"``, with which its published weights were trained, and 224 for others."""
    return 384 if model == "cvt_w24" else 224


def resolve_config(model: str | CvTConfig, **overrides: Any) -> CvTConfig:
    """Returns the preset of that name, or the given configuration, with some fields replaced."""
    if isinstance(model, str):
        if model not in PRESETS:
            raise ValueError(f"model: got {model!r}, expected one of {', '.join(PRESETS)}")
        model = PRESETS[model]
    if not isinstance(model, CvTConfig):
        raise TypeError(f"model: got {type(model).__name__}, expected a name or a CvTConfig")
    fields = [field.name for field in dataclasses.fields(CvTConfig)]
    for name in overrides:
        if name not in fields:
            raise TypeError(f"{name}: is not a field of CvTConfig; expected one of {', '.join(fields)}")
    return dataclasses.replace(model, **overrides)
