"""Random calls of every operator: the settings of a case, and the tensors that it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cvt_kernels import backends, reference
from cvt_kernels.autotune import tuner
from cvt_kernels.records import (
    ConvBatchNorm,
    DepthwiseConv,
    Linear,
    Norm,
    PositionBias,
    QuantizedLinear,
    Reduction,
    TransformerBlock,
)

if TYPE_CHECKING:
    from .cases import Case


class Made(NamedTuple):
    """A case with its tensors.

    Attributes:
        call: The arguments of the implementations.
        douts: Makes the gradient of an output, given one like it.
        ignored: (B, K) of the rows of the first output that mean nothing; None for none.
    """

    call: tuner.Call
    douts: Callable[[Tensor], Tensor]
    ignored: Tensor | None = None


def make(case: Case) -> Made:
    """Makes the tensors of a case."""
    maker = _Maker(case)
    args, kwargs = _BUILDERS[case.subject](maker)
    call = tuner.Call(backends.operators[case.subject].bind(*args, **kwargs), False)
    call = call._replace(gradient=any(tensor.requires_grad for tensor in call.tensors()))
    return Made(call, maker.dout, maker.ignored)


# Tensors --------------------------------------------------------------------------------------------------


class _Maker:
    """Makes the tensors of a case, one after the other; its settings are attributes."""

    # What some operators have no setting for.
    gradient, upstream, training = "none", "contiguous", False

    def __init__(self, case: Case):
        self.__dict__.update(case.settings)
        self.dtype = getattr(torch, case.settings["dtype"])
        self.ignored: Tensor | None = None
        self._generator = torch.Generator().manual_seed(case.seed)
        if case.settings.get("inplace"):
            self.gradient, self.layout = "none", "contiguous"
        if case.subject in _NORMALIZING and 1 in (self.channels, case.settings.get("outputs")):
            self.gradient = "none"  # a LayerNorm of one channel does not depend on it: all would be rounding

    def activation(self, *shape: int) -> Tensor:
        """Returns numbers of the kind and in the layout that the case names."""
        return self._tensor(_KINDS[self.values](self._randn(*shape), self.dtype), self.layout)

    def parameter(self, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: Any = None) -> Tensor:
        """Returns a parameter; all are laid out alike."""
        numbers = _KINDS[self.parameters](self._randn(*shape) * scale + shift, dtype or self.dtype)
        return self._tensor(numbers, "offset" if self.layout == "offset" else "contiguous", dtype)

    def optional(self, *shape: int, **options: Any) -> Tensor | None:
        """Returns a parameter, or None where the case has none of those that may be left out."""
        return None if self.bare else self.parameter(*shape, **options)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        return self.parameter(outputs, inputs, scale=inputs**-0.5)

    def linear(self, outputs: int, inputs: int) -> Linear:
        return Linear(self.matrix(outputs, inputs), self.optional(outputs))

    def norm(self, channels: int) -> Norm:
        return Norm(self.optional(channels, scale=0.25, shift=1.0), self.optional(channels), self.eps)

    def conv(self, channels: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> ConvBatchNorm:
        """Returns a convolution with BatchNorm, whose statistics may be float32 beside half precision."""
        dtype = torch.float32 if self.mixed and self.dtype.itemsize == 2 else self.dtype
        mean, variance = self._randn(channels).to(dtype), self._randn(channels).abs().add(0.1).to(dtype)
        tracked = self.statistics != "none"
        weight = self.parameter(channels, 1, kernel, kernel, scale=1 / kernel)
        return ConvBatchNorm(
            weight,
            self.optional(channels, scale=0.25, shift=1.0, dtype=dtype),
            self.optional(channels, dtype=dtype),
            mean if tracked else None,
            variance if tracked else None,
            torch.tensor(3) if tracked else None,
            stride,
            padding,
            dilation,
            None if self.statistics == "averaged" else 0.1,
            self.eps,
        )

    def index(
        self, batch: int, tokens: int, count: int, *, ascending: bool = False, first: bool = False
    ) -> Tensor:
        """Returns ``count`` tokens of each image, with -1 among them, and with token 0 if ``first``."""
        drawn = [torch.randperm(tokens, generator=self._generator)[:count] for _ in range(batch)]
        rows = torch.stack(drawn) if drawn else torch.zeros(0, count, dtype=torch.int64)
        share = {"none": 0.0, "some": 0.3, "all": 1.0}[self.absent]
        rows[torch.rand(rows.shape, generator=self._generator) < share] = -1
        if ascending:
            rows = torch.where(rows < 0, tokens, rows).sort(1).values
            if first:
                rows = torch.where(rows == rows.new_tensor(0), tokens, rows)
                rows[:, 0] = 0
                rows = rows.sort(1).values
            rows[rows == tokens] = -1
        return rows

    def quantized(
        self, outputs: int, inputs: int, dtype: torch.dtype, scale: Tensor | None
    ) -> QuantizedLinear:
        weight = self._randn(outputs, inputs).float() * inputs**-0.5
        values, scales = reference.quantize_rows(weight, dtype=dtype)
        return QuantizedLinear(values, scales.flatten(), self.optional(outputs), scale)

    def row_scale(self) -> Tensor | None:
        """Returns the scale of all rows that are quantized, or None."""
        return None if self.one_scale == "none" else torch.tensor(float(self.one_scale))

    def integers(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=self._generator)

    def dout(self, out: Tensor) -> Tensor:
        """Returns a random gradient of an output; float64 numbers, rounded to its dtype."""
        return laid_out(self._randn(*out.shape).to(out.dtype), self.upstream)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def _tensor(self, numbers: Tensor, layout: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = laid_out(numbers.to(dtype or self.dtype), layout)
        wanted = self.gradient == "all" or (self.gradient == "some" and bool(self.integers(2)))
        return tensor.requires_grad_(wanted)


def _with_one(value: float) -> Callable[[Tensor, torch.dtype], Tensor]:
    def change(numbers: Tensor, dtype: torch.dtype) -> Tensor:
        if numbers.numel():
            numbers.view(-1)[numbers.numel() // 2] = value
        return numbers

    return change


def _with_row(value: float) -> Callable[[Tensor, torch.dtype], Tensor]:
    def change(numbers: Tensor, dtype: torch.dtype) -> Tensor:
        if numbers.numel():
            numbers.view(-1, numbers.shape[-1])[-1] = value
        return numbers

    return change


def _largest(dtype: torch.dtype) -> float:
    """Returns a number whose square float32, or what sums of this dtype are in, still holds."""
    return {torch.float16: 2.0**12, torch.float64: 2.0**100}.get(dtype, 2.0**40)


#: What numbers may be.
_KINDS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "normal": lambda numbers, dtype: numbers,
    "zeros": lambda numbers, dtype: torch.zeros_like(numbers),
    "constant": lambda numbers, dtype: numbers[..., :1].expand(numbers.shape).contiguous(),
    "shifted": lambda numbers, dtype: numbers + 100,
    "sparse": lambda numbers, dtype: numbers * (numbers > 1),
    "large": lambda numbers, dtype: numbers * 30,
    "small": lambda numbers, dtype: numbers * 2.0**-10,
    "tiny": lambda numbers, dtype: numbers * (torch.finfo(dtype).tiny / 4),
    "huge": lambda numbers, dtype: numbers * _largest(dtype),
    "infinite": _with_one(math.inf),
    "minus_infinite": _with_row(-math.inf),
    "nan": _with_one(math.nan),
    "nan_row": _with_row(math.nan),
    "largest": lambda numbers, dtype: numbers.sign() * torch.finfo(dtype).max,
}


def laid_out(numbers: Tensor, layout: str) -> Tensor:
    """Returns a tensor of these numbers in some order in memory; what lies between them is NaN."""
    if layout == "expanded" and numbers.ndim > 1:
        return numbers[:1].expand(numbers.shape)
    if layout == "transposed" and numbers.ndim > 1:
        return numbers.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "permuted" and numbers.ndim > 2:
        return numbers.transpose(1, 2).contiguous().transpose(1, 2)
    if layout in ("sliced", "chunk", "offset", "steps") and numbers.ndim:
        *others, last = numbers.shape
        size, places = {
            "sliced": ([*others, last + 1], (..., slice(last))),  # begins at 16 bytes, its rows do not
            "chunk": ([*others, 2 * last], (..., slice(last))),  # aligned rows
            "offset": ([numbers.numel() + 1], (slice(1, None),)),
            "steps": ([*others, 2 * last], (..., slice(0, None, 2))),
        }[layout]
        place = torch.full(size, math.nan, dtype=numbers.dtype)[places]
        return place.view(numbers.shape).copy_(numbers) if layout == "offset" else place.copy_(numbers)
    return numbers.contiguous()


#: The operators that have a LayerNorm.
_NORMALIZING = (
    "layer_norm", "add_layer_norm", "layer_norm_gelu", "linear_add_layer_norm", "layer_norm_mlp",
    "gather_add_layer_norm", "conv_embedding", "transformer_block", "transformer_blocks",
)  # fmt: skip


# Operators ------------------------------------------------------------------------------------------------

_FEW = (1, 2, 3, 0)
_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 23, 31, 32, 33)
_WIDE = (*_SIZES, 47, 48, 63, 64, 65, 96, 97, 127, 128, 129)
_WIDEST = (*_WIDE, 191, 192, 255, 256, 257, 383, 384, 385, 511, 513)
_BOTH = (False, True)
_VARIANTS = ("none", "tanh", "quick")
_FORWARD: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "values": tuple(_KINDS),
    "parameters": ("normal", "zeros", "large", "tiny"),
    "layout": ("contiguous", "offset", "sliced", "transposed", "permuted", "expanded", "steps", "chunk"),
    "threads": (1, 2, 3),
    "autocast": _BOTH,
}
_COMMON = _FORWARD | {
    "gradient": ("none", "all", "some"),
    "upstream": ("contiguous", "transposed", "sliced", "expanded", "steps"),
}
_NORM = {"eps": (1e-5, 1e-12, 1e-3, 1.0), "bare": _BOTH}
_TOKENS = {"batch": _FEW, "tokens": _SIZES, "channels": _WIDEST}
_LEADING = {"leading": ("rows", "tokens", "none", "grid"), "rows": (*_WIDE, 0), "channels": _WIDEST}
_GRID = {"batch": _FEW, "height": (1, 2, 3, 4, 5, 7, 8, 9, 14), "width": (1, 2, 3, 4, 5, 7, 8, 9, 17)}
_CONV = {
    "kernel": (1, 2, 3, 4, 5, 7), "stride": (1, 2, 3, 4), "padding": (0, 1, 2, 3), "dilation": (1, 2, 3),
}  # fmt: skip
_PROJECTION = _GRID | _CONV | {
    "channels": _WIDE, "class_token": _BOTH, "branches": (1, 2, 3), "summands": (1, 2, 3), "mixed": _BOTH,
    "statistics": ("running", "none", "averaged"), **_NORM,
}  # fmt: skip
_QUANTIZED = _FORWARD | _LEADING | {"to": ("int8", "float8_e4m3fn"), "one_scale": ("none", "0.05", "0.001")}
_BLOCK = _FORWARD | _GRID | _NORM | {
    # Large ones would make chance of what 16 bits round between its parts.
    "parameters": ("normal", "zeros", "tiny"),
    "gradient": ("none", "all"), "upstream": ("contiguous",), "channels": _WIDE, "heads": (1, 2, 3, 4),
    "head_dim": (*_SIZES, 64, 65, 128), "hidden": _WIDEST, "scale": (None, 0.1, 0.0, -1.0),
    "approximate": _VARIANTS, "inplace": _BOTH,
}  # fmt: skip


def _shape(m: Any) -> tuple[int, ...]:
    """Returns the shape of rows of channels, with some of the usual dimensions before these."""
    return {
        "rows": (m.rows, m.channels),
        "tokens": (2, m.rows, m.channels),
        "none": (m.channels,),
        "grid": (1, 2, m.rows, m.channels),
    }[m.leading]


def _out_dtype(m: Any) -> torch.dtype | None:
    return None if m.result == "none" else getattr(torch, m.result)


def _attention(m: Any) -> Any:
    queries, keys = m.queries, m.keys
    position = None
    if m.position != "none":
        class_tokens = int(m.class_token)
        tokens = m.height * m.width + class_tokens
        keys = m.key_height * m.key_width + class_tokens
        queries = tokens if m.position == "table" else min(queries, tokens)
        sizes = m.height + m.stride * (m.key_height - 1), m.width + m.stride * (m.key_width - 1)
        rows = None
        if m.position == "rows":
            rows = m.index(m.batch, tokens, queries)
            m.ignored = rows < 0
        table = m.parameter(m.heads, *sizes)
        position = PositionBias(table, (m.height, m.width), (m.key_height, m.key_width), m.stride, rows)
    q = m.activation(m.batch, queries, m.heads, m.channels)
    k, v = (m.activation(m.batch, keys, m.heads, m.channels) for _ in range(2))
    bias = None
    if m.bias != "none":
        shape = {
            "full": (m.batch, m.heads, queries, keys), "matrix": (queries, keys), "heads": (m.heads, 1, 1),
            "keys": (m.batch, 1, 1, keys), "queries": (1, m.heads, queries, 1),
        }[m.bias]  # fmt: skip
        bias = m.parameter(*shape).detach()
        least = {"none": math.inf, "some": 0.5, "most": -1.5, "all": -math.inf, "block": math.inf}[m.excluded]
        excluded = bias > least
        if m.excluded == "block":
            excluded[..., : -(-bias.shape[-1] // 2)] = True
        bias = bias.masked_fill(excluded, -math.inf).requires_grad_(m.gradient == "all")
    scale = m.scale
    return (q, k, v), {"scale": scale, "bias": bias, "dropout_p": 0.0, "position": position}


def _convs(m: Any) -> tuple[Any, ...]:
    """Returns the branches: the second and third of other strides, summands of larger kernels."""
    branches = []
    # PyTorch 2.13 crashes in 16 bits where a kernel of 1×1 or an image of width 1 has a dilation.
    dilation = 1 if m.kernel == 1 or m.width == 1 else m.dilation
    reach = dilation * (m.kernel - 1) + 1
    padding = max(m.padding, -((min(m.height, m.width) - reach) // 2))  # so that there is an output
    for i in range(m.branches):
        parts = tuple(
            m.conv(m.channels, m.kernel + 2 * j, m.stride + i, padding + dilation * j, dilation)
            for j in range(m.summands)
        )
        branches.append(parts[0] if len(parts) == 1 else parts)
    return tuple(branches)


def _conv_projection(m: Any) -> Any:
    tokens = m.height * m.width + m.class_token
    x = m.activation(m.batch, tokens, m.channels)
    return (x, (m.height, m.width), _convs(m)), {"training": m.training}


def _conv_linear(m: Any) -> Any:
    (x, grid, convs), _ = _conv_projection(m)
    return (x, grid, convs, tuple(tuple(m.linear(m.outputs, m.channels)) for _ in convs)), {}


def _layer_norm(m: Any) -> Any:
    x = m.activation(*_shape(m))
    shift = m.parameter(m.channels) if m.shifted else None
    return (x, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": _out_dtype(m), "shift": shift}


def _add_layer_norm(m: Any) -> Any:
    x, residual = m.activation(*_shape(m)), m.activation(*_shape(m)) if m.added else None
    return (x, residual, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": _out_dtype(m)}


def _gelu(m: Any) -> Any:
    return (m.activation(*_shape(m)),), {"approximate": m.approximate}


def _bias_gelu(m: Any) -> Any:
    return (m.activation(*_shape(m)), m.parameter(m.channels)), {"approximate": m.approximate}


def _layer_norm_gelu(m: Any) -> Any:
    return (m.activation(*_shape(m)), *m.norm(m.channels)[:2]), {"eps": m.eps, "approximate": m.approximate}


def _linear(m: Any) -> Any:
    return (m.activation(*_shape(m)), *m.linear(m.outputs, m.channels)), {}


def _linear_gelu(m: Any) -> Any:
    return _linear(m)[0], {"approximate": m.approximate}


def _linear_add(m: Any) -> Any:
    args = _linear(m)[0]
    residual, settings = m.activation(*_shape(m)[:-1], m.outputs), {"inplace": m.inplace}
    return (*args, residual), settings | ({} if m.inplace else _factors(m, residual))


def _factors(m: Any, residual: Tensor) -> dict[str, Any]:
    if not m.scaled or residual.ndim == 1:
        return {}
    scale = torch.rand(residual.shape[0], generator=m._generator, dtype=torch.float32)
    return {"scale": scale, "scales_sum": m.scales_sum}


def _linear_add_layer_norm(m: Any) -> Any:
    args = _linear(m)[0]
    args, settings = (*args, m.activation(*_shape(m)[:-1], m.outputs)), {"inplace": m.inplace}
    shift = m.parameter(m.outputs) if m.shifted else None
    return (*args, *m.norm(m.outputs)[:2]), {"eps": m.eps, "shift": shift, **settings}


def _layer_norm_mlp(m: Any) -> Any:
    x, c, hidden = m.activation(*_shape(m)), m.channels, m.outputs
    shift = m.parameter(c) if m.shifted else None
    args = (x, *m.norm(c)[:2], *m.linear(hidden, c), *m.linear(c, hidden))
    return args, {"eps": m.eps, "approximate": m.approximate, "shift": shift}


def _mlp_add(m: Any) -> Any:
    x, c, hidden = m.activation(*_shape(m)), m.channels, m.outputs
    residual = m.activation(*_shape(m))
    args = (x, *m.linear(hidden, c), *m.linear(c, hidden), residual)
    return args, {"approximate": m.approximate, **_factors(m, residual)}


def _image(m: Any, channels: int, height: int, width: int) -> Tensor:
    image = m.activation(m.batch, channels, height, width)
    if not m.channels_last:
        return image
    return image.detach().contiguous(memory_format=torch.channels_last).requires_grad_(image.requires_grad)


def _conv_embedding(m: Any) -> Any:
    image = _image(m, m.inputs, m.height, m.width)
    weight = m.parameter(m.channels, m.inputs, m.kernel, m.kernel, scale=(m.inputs * m.kernel**2) ** -0.5)
    token = m.parameter(m.channels) if m.class_token else None
    padding = max(m.padding, -((min(m.height, m.width) - m.kernel) // 2))  # so that there is an output
    args = (image, weight, m.optional(m.channels), *m.norm(m.channels)[:2])
    return args, {"stride": m.stride, "padding": padding, "eps": m.eps, "class_token": token}


def _segmentation_head(m: Any) -> Any:
    x = _image(m, m.inputs, m.height, m.width)
    others = []
    for i in range(m.others):
        sizes = [(-(-size // 2), -(-size // 3), size, 2 * size + 1)[i] for size in (m.height, m.width)]
        inputs = m.inputs + 3 * i
        others.append((_image(m, inputs, *sizes), m.matrix(m.channels, inputs)))
    args = (x, m.matrix(m.channels, m.inputs), m.optional(m.channels), tuple(others))
    return (*args, *m.linear(m.outputs, m.channels)), {}


def _depthwise_conv_gelu(m: Any) -> Any:
    x = m.activation(m.batch, m.height * m.width, m.channels)
    weight = m.parameter(m.channels, 1, 3, 3, scale=1 / 3)
    return (x, (m.height, m.width), weight, m.optional(m.channels)), {"approximate": m.approximate}


def _index(m: Any) -> Tensor:
    return m.index(m.batch, m.tokens, min(m.count, m.tokens))


def _gather_rows(m: Any) -> Any:
    return (m.activation(m.batch, m.tokens, m.channels), _index(m)), {}


def _gather_add_layer_norm(m: Any) -> Any:
    x, index = _gather_rows(m)[0]
    branch = m.activation(m.batch, index.shape[1], m.channels)
    return (x, index, branch, *m.norm(m.channels)[:2]), {"eps": m.eps, "dtype": _out_dtype(m)}


def _scatter_rows(m: Any) -> Any:
    x, index = _gather_rows(m)[0]
    values = m.activation(m.batch, index.shape[1], m.channels)
    branch = None if m.bare else m.activation(m.batch, index.shape[1], m.channels)
    return (x, index, values, branch), {"inplace": m.inplace}


def _quantize_rows(m: Any) -> Any:
    return (m.activation(*_shape(m)),), {"scale": m.row_scale(), "dtype": getattr(torch, m.to)}


def _layer_norm_quantize(m: Any) -> Any:
    x = m.activation(*_shape(m))
    shift = m.parameter(m.channels) if m.shifted else None
    settings = {"eps": m.eps, "shift": shift, "scale": m.row_scale(), "dtype": getattr(torch, m.to)}
    return (x, *m.norm(m.channels)[:2]), settings


def _gelu_quantize(m: Any) -> Any:
    settings = {"approximate": m.approximate, "scale": m.row_scale(), "dtype": getattr(torch, m.to)}
    return (m.activation(*_shape(m)), m.optional(m.channels)), settings


def _linear_int8(m: Any) -> Any:
    dtype = getattr(torch, m.to)
    layer = m.quantized(m.outputs, m.channels, dtype, None)
    x, scales, result = m.activation(*_shape(m)), None, m.dtype
    if m.autocast and m.dtype != torch.float64:
        result = torch.bfloat16
    residual = m.activation(*x.shape[:-1], m.outputs).to(result) if m.added else None
    settings: dict[str, Any] = {"approximate": None if m.approximate == "nothing" else m.approximate}
    if m.rounded and m.dtype != torch.float64:
        x, scales = reference.quantize_rows(x, dtype=dtype)
    else:
        settings["input_scale"] = m.row_scale()
    settings |= {"x_scales": scales, "residual": residual, "dtype": result}
    return (x, layer.weight, layer.weight_scale, layer.bias), {"input_scale": None, **settings}


def _transformer_block(m: Any) -> Any:
    has_convs, whole = m.reduce == "convolutions", m.mixes or m.reduce == "squares"
    class_token = 0 if whole else m.class_token
    width, tokens = m.heads * m.head_dim, m.height * m.width + class_token
    c, layers = m.channels, []
    m.statistics = "running"
    shapes = ((width, c),) * 3 + ((c, width), (m.hidden, c), (c, m.hidden))
    for i, shape in enumerate(shapes):
        if m.quantized_layers in ("all", str(i)):
            m.gradient = "none"
            layers.append(m.quantized(*shape, torch.int8, m.row_scale()))
        else:
            layers.append(m.linear(*shape))
    norms, fc1 = (m.norm(c), m.norm(c)), layers[4]
    block = TransformerBlock(
        norms[0],
        _reduce(m),
        tuple(layers[:3]),
        m.heads,
        m.scale,
        layers[3],
        norms[1],
        fc1,
        m.approximate,
        layers[5],
        DepthwiseConv(m.parameter(m.hidden, 1, 3, 3, scale=1 / 3), m.optional(m.hidden)) if m.mixes else None,
    )
    for tensor in block.tensors():
        if tensor is not None and m.gradient == "none":
            tensor.requires_grad_(False)
    settings: dict[str, Any] = {"inplace": m.inplace}
    scores = None if m.scores == "none" or (m.scores == "cls" and not class_token) else m.scores
    if m.dtype == torch.bfloat16 or m.autocast or not has_convs:
        scores = None  # they are made of a single query that is rounded: chance would decide
    if m.count and not m.mixes:
        settings["rows"] = m.index(
            m.batch, tokens, min(m.count, tokens), ascending=True, first=scores == "cls"
        )
    if scores is not None:
        settings["scores"] = scores
    return (m.activation(m.batch, tokens, c), (m.height, m.width), block), settings


def _transformer_blocks(m: Any) -> Any:
    m.count, m.scores = 0, "none"
    (x, grid, block), settings = _transformer_block(m)
    others = (_transformer_block(m)[0][2] for _ in range(m.depth - 1))
    return (x, grid, (block, *others)), settings


def _reduce(m: Any) -> Any:
    """Returns what makes the tokens of queries, keys and values of a block."""
    c, k = m.channels, m.kernel
    if m.reduce == "convolutions":
        return tuple(m.conv(c, k, stride, k // 2) for stride in (1, m.stride, m.stride))
    if m.reduce == "nothing":
        return None
    ratio = min(m.ratio, m.height, m.width)
    weight = m.parameter(c, c, ratio, ratio, scale=c**-0.5 / ratio)
    return Reduction(weight, m.optional(c), m.norm(c))


_APPROXIMATE = {"approximate": _VARIANTS}
_RESULT = {"result": ("none", "float32", "bfloat16", "float16")}
_ABSENT = {"absent": ("none", "some", "all")}
_OUTPUTS = {"outputs": _WIDE}
_SHIFTED = {"shifted": _BOTH}
_INPLACE = {"inplace": _BOTH}
#: The choices of every setting of an operator, the simplest first.
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "conv_projection": _COMMON | _PROJECTION | {"training": _BOTH},
    "attention": _COMMON | {
        "batch": _FEW, "queries": _WIDE, "keys": (*_WIDE, 223, 224, 225, 257), "heads": (1, 2, 3),
        "channels": (*_WIDE, 255, 256, 257), "scale": (None, 0.0, 0.1, -1.0, 10.0, 1e-30),
        "bias": ("none", "full", "matrix", "keys", "heads", "queries"),
        "excluded": ("none", "some", "most", "block", "all"),
        "position": ("none", "table", "rows"), "height": (1, 2, 3, 4, 5, 7), "width": (1, 2, 3, 4, 5, 8),
        "key_height": (1, 2, 3, 4), "key_width": (1, 2, 3, 5), "stride": (1, 2, 3),
        "class_token": _BOTH, **_ABSENT,
    },
    "layer_norm": _COMMON | _LEADING | _NORM | _SHIFTED | _RESULT,
    "add_layer_norm": _COMMON | _LEADING | _NORM | _RESULT | {"added": (True, False)},
    "gelu": _COMMON | _LEADING | _APPROXIMATE,
    "bias_gelu": _COMMON | _LEADING | _APPROXIMATE,
    "layer_norm_gelu": _COMMON | _LEADING | _NORM | _APPROXIMATE,
    "linear": _COMMON | _LEADING | _OUTPUTS | {"bare": _BOTH},
    "linear_gelu": _COMMON | _LEADING | _OUTPUTS | {"bare": _BOTH} | _APPROXIMATE,
    "linear_add": _COMMON | _LEADING | _OUTPUTS | _INPLACE | {
        "bare": _BOTH, "scaled": _BOTH, "scales_sum": _BOTH,
    },
    "linear_add_layer_norm": _COMMON | _LEADING | _OUTPUTS | _NORM | _SHIFTED | _INPLACE,
    "layer_norm_mlp": _COMMON | _LEADING | _OUTPUTS | _NORM | _SHIFTED | _APPROXIMATE,
    "mlp_add": _COMMON | _LEADING | _OUTPUTS | _APPROXIMATE | {
        "bare": _BOTH, "scaled": _BOTH, "scales_sum": _BOTH,
    },
    "conv_linear": _COMMON | _PROJECTION | _OUTPUTS,
    "conv_embedding": _COMMON | _GRID | _NORM | {
        "inputs": (1, 2, 3, 5, 8, 17, 64), "channels": _WIDE, "kernel": (1, 2, 3, 4, 7),
        "stride": (1, 2, 3, 4), "padding": (0, 1, 2, 3), "class_token": _BOTH, "channels_last": _BOTH,
    },
    "segmentation_head": _COMMON | _GRID | _OUTPUTS | {
        "inputs": (1, 2, 3, 5, 8, 17, 64), "channels": _WIDE, "others": (3, 2, 1, 0, 4), "bare": _BOTH,
        "channels_last": _BOTH,
    },
    "transformer_block": _BLOCK | {
        "kernel": (1, 3, 5), "stride": (1, 2, 3), "class_token": _BOTH, "mixed": _BOTH, **_ABSENT,
        "count": (0, 1, 2, 3, 5, 9, 17), "scores": ("none", "cls", "avg"), "one_scale": ("none", "0.05"),
        "quantized_layers": ("none", "all", "0", "1", "2", "3", "4", "5"),
        "reduce": ("convolutions", "squares", "nothing"), "ratio": (1, 2, 3, 4, 8), "mixes": _BOTH,
    },
    "transformer_blocks": _BLOCK | {
        "depth": (1, 2, 3),
        "kernel": (1, 3, 5), "stride": (1, 2, 3), "class_token": _BOTH, "mixed": _BOTH, **_ABSENT,
        "one_scale": ("none", "0.05"),
        "quantized_layers": ("none", "all", "0", "1", "2", "3", "4", "5"),
        "reduce": ("convolutions", "squares", "nothing"), "ratio": (1, 2, 3, 4, 8), "mixes": _BOTH,
    },
    "depthwise_conv_gelu": _COMMON | _GRID | {"channels": _WIDE, "bare": _BOTH} | _APPROXIMATE,
    "quantize_rows": _QUANTIZED,
    "layer_norm_quantize": _QUANTIZED | _NORM | _SHIFTED,
    "gelu_quantize": _QUANTIZED | _APPROXIMATE | {"bare": _BOTH},
    "linear_int8": _QUANTIZED | _OUTPUTS | {
        "rounded": _BOTH, "bare": _BOTH, "added": _BOTH, "approximate": ("nothing", *_VARIANTS),
    },
    "gather_rows": _COMMON | _TOKENS | _ABSENT | {"count": (*_SIZES, 0)},
    "gather_add_layer_norm": _COMMON | _TOKENS | _ABSENT | {"count": (*_SIZES, 0)} | _NORM | _RESULT,
    "scatter_rows": _COMMON | _TOKENS | _ABSENT | {"count": (*_SIZES, 0), "bare": _BOTH} | _INPLACE,
}  # fmt: skip
_BUILDERS: dict[str, Callable[[Any], Any]] = {name: globals()[f"_{name}"] for name in CHOICES}
