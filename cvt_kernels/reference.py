"""The operators of cvt_kernels in plain PyTorch: specification, oracle, fallback and baseline.

Each function has the signature of the public operator of the same name, takes any floating-point dtype
(float64 included, so that ``torch.autograd.gradcheck`` applies), and checks nothing: the public functions do.

Activations are tokens ``(B, T, C)``; the spatial tokens lie in row-major ``(H, W)`` order, which is NHWC
memory. Where there is a class token it is token 0, and ``T = H·W + 1``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from . import checks

#: Names of the GELU variants; see :func:`gelu`.
GeluVariant = Literal["none", "tanh", "quick"]

#: What the head of a model reads: the class token, or the mean of the others.
Pool = Literal["cls", "avg"]


class ConvBatchNorm(NamedTuple):
    """A depthwise convolution without bias followed by BatchNorm: one branch of ``conv_projection``.

    Attributes:
        weight: Convolution weight, ``(C, 1, k, k)``.
        bn_weight: BatchNorm scale γ, ``(C,)``, or None for 1.
        bn_bias: BatchNorm shift β, ``(C,)``, or None for 0.
        running_mean: Buffer ``(C,)``, updated in place in training; None normalizes by the batch always.
        running_var: Buffer ``(C,)``, likewise. It takes the unbiased variance.
        num_batches_tracked: Integer scalar buffer, incremented in training; needed if ``momentum`` is None.
        stride: Convolution stride, the same in both directions.
        padding: Zero padding on each side.
        dilation: Spacing of the taps.
        momentum: Weight of the new batch in the running statistics; None averages over all batches.
        eps: Added to the variance.
        process_group: If given, training takes the statistics of the batch over all its processes, as
            ``nn.SyncBatchNorm`` does; no process may have an empty share.
    """

    weight: Tensor
    bn_weight: Tensor | None
    bn_bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None = None
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    momentum: float | None = 0.1
    eps: float = 1e-5
    process_group: dist.ProcessGroup | None = None

    @classmethod
    def from_modules(cls, conv: nn.Conv2d, bn: nn.BatchNorm2d | nn.SyncBatchNorm) -> ConvBatchNorm:
        """Collects the tensors and settings of two live modules; nothing is copied.

        Raises:
            TypeError: If they are other modules.
            ValueError: If the convolution has a bias, a padding mode other than zeros, or different settings
                in the two directions.
        """
        checks.check_kind("conv", conv, nn.Conv2d)
        checks.check_kind("bn", bn, nn.modules.batchnorm._BatchNorm)
        bias, *tensors = _tensors_of(conv, bn)
        weight, bn_weight, bn_bias, running_mean, running_var, num_batches_tracked = tensors
        if bias is not None:
            raise ValueError("conv: has a bias; expected bias=False, since BatchNorm subtracts it again")
        if conv.padding_mode != "zeros":
            raise ValueError(f"conv: padding_mode is {conv.padding_mode!r}; expected 'zeros'")
        stride, padding, dilation = conv.stride, conv.padding, conv.dilation
        for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
            if isinstance(value, str) or value[0] != value[-1]:
                raise ValueError(f"conv: {name} is {value!r}; expected one number for both directions")
        # By position, since this is called for every branch of every forward.
        return cls(
            weight, bn_weight, bn_bias, running_mean, running_var, num_batches_tracked,
            stride[0], int(padding[0]), dilation[0], bn.momentum, bn.eps, _process_group(bn),
        )  # fmt: skip

    def output_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Returns the (H, W) of the output for an input of ``grid``; below 1 means that it is empty."""
        reach = self.dilation * (self.weight.shape[-1] - 1) + 1
        height, width = ((n + 2 * self.padding - reach) // self.stride + 1 for n in grid)
        return height, width


#: A branch of ``conv_projection``: one convolution with its BatchNorm, or several whose results are summed.
Branch = ConvBatchNorm | tuple[ConvBatchNorm, ...]


def summands(branch: Branch) -> tuple[ConvBatchNorm, ...]:
    """Returns the convolutions of a branch, one or several."""
    return (branch,) if isinstance(branch, ConvBatchNorm) else branch


def flattened(branches: Sequence[Branch]) -> tuple[tuple[ConvBatchNorm, ...], tuple[int, ...]]:
    """Returns the convolutions of all branches, one after the other, and for each the length of its sum.

    That is how many convolutions the branch has that begins with it; 0 for the others of a branch.
    """
    if all(type(branch) is ConvBatchNorm for branch in branches):
        return cast(tuple[ConvBatchNorm, ...], tuple(branches)), (1,) * len(branches)
    convs: list[ConvBatchNorm] = []
    lengths: list[int] = []
    for branch in branches:
        parts = summands(branch)
        convs += parts
        lengths += [len(parts), *[0] * (len(parts) - 1)]
    return tuple(convs), tuple(lengths)


class PositionBias(NamedTuple):
    """A learned bias of attention for each head and each offset from key to query (CvT-v2).

    Key (a, b) of the key grid lies at token (s·a, s·b) of the query grid, where the convolution that makes
    it is centered. An offset is counted in tokens, so in units of 1/s of the key grid: the query at (i, j)
    has the offset (i − s·a, j − s·b), at index (i − s·a + s·(Hk − 1), j − s·b + s·(Wk − 1)) of the table. A
    class token, token and key 0, has no place: its scores get no bias.

    Attributes:
        table: ``(heads, H + s·(Hk − 1), W + s·(Wk − 1))``, finite; of the dtype of q, but under autocast it
            may have another.
        query_grid: ``(H, W)`` of the tokens.
        key_grid: ``(Hk, Wk)``.
        stride: s.
        rows: ``(B, Nq)`` int64, the tokens that the queries are, as of :func:`gather_rows`, each at most
            once; None where there is a query for each token. The result of a row of −1 means nothing.
    """

    table: Tensor
    query_grid: tuple[int, int]
    key_grid: tuple[int, int]
    stride: int
    rows: Tensor | None = None


class Norm(NamedTuple):
    """A LayerNorm over the last dimension.

    Attributes:
        weight: ``(C,)``, or None for 1.
        bias: ``(C,)``, or None for 0.
        eps: Added to the variance.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float = 1e-5


class Linear(NamedTuple):
    """A linear layer: weight ``(outputs, inputs)`` and bias ``(outputs,)``, or None for 0."""

    weight: Tensor
    bias: Tensor | None = None


class QuantizedRows(NamedTuple):
    """Rows of 8-bit numbers, each row with a scale: ``values · scales`` is what they stand for.

    Attributes:
        values: ``(..., C)``; int8 between -127 and 127, or float8_e4m3fn.
        scales: ``(..., 1)``, float32, not negative; NaN for a row that had NaN or an infinity.
    """

    values: Tensor
    scales: Tensor


class QuantizedLinear(NamedTuple):
    """A linear layer whose weight is of 8-bit numbers.

    Attributes:
        weight: ``(outputs, inputs)``; int8 between -127 and 127, or float8_e4m3fn.
        weight_scale: ``(outputs,)``, float32: the weight stands for ``weight · weight_scale[:, None]``.
        bias: ``(outputs,)``, or None for 0.
        input_scale: The scale of all rows of the input, a float32 scalar; None for one per row.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None = None
    input_scale: Tensor | None = None


AnyLinear = Linear | QuantizedLinear


class TransformerBlock(NamedTuple):
    """The parameters of a convolutional transformer block (Wu et al. 2021, section 3).

    Attributes:
        norm1: The LayerNorm before attention.
        convs: The convolutional projections of Q, of K and of V, normalized by running statistics.
        linears: The linear layers behind them.
        num_heads: Heads of attention.
        scale: Factor on the scores; None for the root of the reciprocal of a head's channels.
        proj: The linear layer after attention.
        norm2: The LayerNorm before the MLP.
        fc1: The first linear layer of the MLP.
        approximate: Its GELU, as :func:`cvt_kernels.gelu` names it.
        fc2: The second linear layer.
    """

    norm1: Norm
    convs: tuple[ConvBatchNorm, ConvBatchNorm, ConvBatchNorm]
    linears: tuple[AnyLinear, AnyLinear, AnyLinear]
    num_heads: int
    scale: float | None
    proj: AnyLinear
    norm2: Norm
    fc1: AnyLinear
    approximate: GeluVariant
    fc2: AnyLinear

    def layers(self) -> tuple[AnyLinear, ...]:
        """Returns the linear layers of Q, K and V, that after attention and the two of the MLP."""
        return (*self.linears, self.proj, self.fc1, self.fc2)

    def quantized_layers(self) -> list[QuantizedLinear]:
        """Returns the quantized layers among them."""
        return [layer for layer in self.layers() if isinstance(layer, QuantizedLinear)]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors that the block reads, in one order; None for those that it does without."""
        q, k, v = self.linears
        norm1, norm2, (of_q, of_k, of_v) = self.norm1, self.norm2, self.convs
        return (
            norm1[0], norm1[1], *of_q[:5], *of_k[:5], *of_v[:5], *q, *k, *v,
            *self.proj, norm2[0], norm2[1], *self.fc1, *self.fc2,
        )  # fmt: skip


class DepthwiseConv(NamedTuple):
    """A depthwise 3×3 convolution of stride 1, padded by zeros.

    Attributes:
        weight: ``(C, 1, 3, 3)``.
        bias: ``(C,)``, or None for 0.
    """

    weight: Tensor
    bias: Tensor | None = None


class Reduction(NamedTuple):
    """A convolution whose stride is its kernel size, and a LayerNorm: fewer tokens for keys and values (PVT).

    Attributes:
        weight: ``(C, C, r, r)``. Rows and columns of tokens that make no whole square of r×r are left out.
        bias: ``(C,)``, or None for 0.
        norm: The LayerNorm.
    """

    weight: Tensor
    bias: Tensor | None
    norm: Norm

    def output_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Returns the (H, W) of the output for an input of ``grid``."""
        ratio = self.weight.shape[-1]
        return grid[0] // ratio, grid[1] // ratio


class PyramidBlock(NamedTuple):
    """The parameters of a block of SegFormer (Xie et al. 2021), PVT or PVT v2 (Wang et al. 2021, 2022).

    Attributes:
        norm1: The LayerNorm before attention.
        linears: The linear layers of Q, of K and of V.
        reduction: Makes the tokens of keys and values; None where these are all tokens.
        num_heads: Heads of attention.
        scale: Factor on the scores; None for the root of the reciprocal of a head's channels.
        proj: The linear layer after attention.
        norm2: The LayerNorm before the feed-forward layers.
        fc1: The first of these.
        conv: The convolution of its result; None where there is none, as in PVT.
        approximate: The GELU after it, as :func:`cvt_kernels.gelu` names it.
        fc2: The last layer.
    """

    norm1: Norm
    linears: tuple[Linear, Linear, Linear]
    reduction: Reduction | None
    num_heads: int
    scale: float | None
    proj: Linear
    norm2: Norm
    fc1: Linear
    conv: DepthwiseConv | None
    approximate: GeluVariant
    fc2: Linear

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors that the block reads, in one order; None for those that it does without."""
        reduction = (None,) * 4 if self.reduction is None else (*self.reduction[:2], *self.reduction.norm[:2])
        conv = (None, None) if self.conv is None else self.conv
        layers = (*self.linears, self.proj, self.fc1, self.fc2)
        norms = (*self.norm1[:2], *self.norm2[:2])
        return (*norms, *(tensor for layer in layers for tensor in layer), *reduction, *conv)


def _tensors_of(conv: nn.Conv2d, bn: nn.BatchNorm2d | nn.SyncBatchNorm) -> tuple[Any, ...]:
    """Returns the bias of a convolution, then the tensors of a ConvBatchNorm in its order."""
    if not torch.compiler.is_compiling():
        of_conv, of_bn, buffers = conv._parameters, bn._parameters, bn._buffers
        try:  # as attributes of the modules they would take ten times as long to find
            return (
                of_conv["bias"], of_conv["weight"], of_bn["weight"], of_bn["bias"],
                buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"],
            )  # fmt: skip
        except KeyError:  # one is computed from others, as by nn.utils.parametrize
            pass
    return (
        conv.bias, conv.weight, bn.weight, bn.bias,
        bn.running_mean, bn.running_var, bn.num_batches_tracked,
    )  # fmt: skip


def _process_group(bn: nn.Module) -> dist.ProcessGroup | None:
    """Returns the processes that ``bn`` synchronizes over now, as SyncBatchNorm does in training."""
    if not (
        isinstance(bn, nn.SyncBatchNorm) and bn.training and dist.is_available() and dist.is_initialized()
    ):
        return None
    group = bn.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _plain(size: int) -> int:
    """Returns a size as a plain number, which it is not where ``torch.jit.trace`` records."""
    return int(size) if torch.jit.is_tracing() else size


def conv_projection(
    x: Tensor, grid: tuple[int, int], convs: Sequence[Branch], *, training: bool
) -> tuple[Tensor, ...]:
    """Computes BatchNorm(depthwise_conv(x)) for each of ``convs``; the class token passes through.

    A branch of several convolutions is the sum of theirs.

    The convolutional projection of CvT (Wu et al. 2021, section 3.2) before its linear layers; upstream
    ``Attention.forward_conv`` in Microsoft's ``cls_cvt.py``. See ``cvt_kernels.conv_projection``.
    """
    height, width = grid
    tokens, channels = x.shape[1], _plain(x.shape[2])
    class_token, spatial = x.split([tokens - height * width, height * width], dim=1)
    # In this order: for B = 1, the strides that transpose and unflatten would leave make the CPU's
    # batch_norm compute wrong gradients in evaluation (seen in torch 2.13).
    image = spatial.unflatten(1, (height, width)).permute(0, 3, 1, 2)  # (B, C, H, W), channels last in memory
    outputs = []
    for branch in convs:
        maps = []
        for conv in summands(branch):
            y = F.conv2d(image, conv.weight, None, conv.stride, conv.padding, conv.dilation, groups=channels)
            maps.append(_batch_norm(y, conv, training))
        y = functools.reduce(torch.add, maps).permute(0, 2, 3, 1).flatten(1, 2)
        if tokens > height * width:
            outputs.append(torch.cat([class_token.to(y.dtype), y], dim=1))  # the dtype of autocast for all
        else:
            outputs.append(y.contiguous())
    return tuple(outputs)


def _batch_norm(y: Tensor, conv: ConvBatchNorm, training: bool) -> Tensor:
    """Computes ``nn.BatchNorm2d.forward`` on the tensors of ``conv``."""
    tracked = conv.running_mean is not None
    momentum = conv.momentum
    if training and tracked and conv.num_batches_tracked is not None:
        conv.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1.0 / conv.num_batches_tracked.item()
    if training and conv.process_group is not None:
        return _synchronized_batch_norm(y, conv, momentum)
    return F.batch_norm(
        y,
        conv.running_mean,
        conv.running_var,
        conv.bn_weight,
        conv.bn_bias,
        training=training or not tracked,
        momentum=0.0 if momentum is None else momentum,
        eps=conv.eps,
    )


class _SumOverProcesses(torch.autograd.Function):
    """Sums over processes. Every output depends on every input, so the gradients are summed likewise."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the sum, which is equal in every process."""
        ctx.group = group
        total = share.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the sum of the gradients."""
        return _SumOverProcesses.apply(gradient.contiguous(), ctx.group), None


def _synchronized_batch_norm(y: Tensor, conv: ConvBatchNorm, momentum: float | None) -> Tensor:
    """Normalizes this process's share y (B, C, H, W) by the statistics of the whole batch of the group."""
    dtype = y.dtype
    y = y.to(torch.promote_types(dtype, torch.float32))
    group, dims = conv.process_group, (0, 2, 3)
    count = _SumOverProcesses.apply(y.new_tensor(y.numel() // y.shape[1]), group)
    mean = _SumOverProcesses.apply(y.sum(dims), group) / count
    deviation = y - mean[:, None, None]
    variance = _SumOverProcesses.apply((deviation**2).sum(dims), group) / count
    if conv.running_mean is not None and conv.running_var is not None:
        with torch.no_grad():
            for running, batch in (
                (conv.running_mean, mean),
                (conv.running_var, variance * count / (count - 1)),
            ):
                running.copy_(running + (momentum or 0.0) * (batch - running))
    y = deviation * (variance + conv.eps).rsqrt()[:, None, None]
    if conv.bn_weight is not None:
        y = y * conv.bn_weight[:, None, None]
    if conv.bn_bias is not None:
        y = y + conv.bn_bias[:, None, None]
    return y.to(dtype)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    position: PositionBias | None = None,
) -> Tensor:
    """Computes softmax(scale · q kᵀ + bias) v per head; a row whose bias is −inf throughout gives zeros.

    See ``cvt_kernels.attention``.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = torch.einsum("bqhd,bkhd->bhqk", q * scale, k)  # scaling q first keeps float16 in range
    if position is not None:
        scores = scores + position_bias(position, q.shape[1], k.shape[1])
    if bias is None:
        probabilities = scores.softmax(dim=-1)
    else:
        scores = scores + bias
        excluded = (scores == -torch.inf).all(dim=-1, keepdim=True)
        probabilities = scores.masked_fill(excluded, 0.0).softmax(dim=-1).masked_fill(excluded, 0.0)
    if dropout_p > 0:
        probabilities = F.dropout(probabilities, dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v).contiguous()


def position_bias(position: PositionBias, queries: int, keys: int) -> Tensor:
    """Returns the bias of a table, ``(heads, Nq, Nkv)``, or ``(B, heads, Nq, Nkv)`` with rows."""
    table, (_, width), (key_height, key_width), stride, rows = position
    token = torch.arange(queries, device=table.device) if rows is None else rows
    token = token[..., None] - (keys - key_height * key_width)  # as many class tokens as there are of keys
    key = torch.arange(keys, device=table.device) - (keys - key_height * key_width)
    has_place = (token >= 0) & (key >= 0)
    token, key = token.clamp_min(0), key.clamp_min(0)
    down = token // width - stride * (key // key_width) + stride * (key_height - 1)
    across = token % width - stride * (key % key_width) + stride * (key_width - 1)
    bias = table[:, down, across].masked_fill(~has_place, 0.0)
    return bias if rows is None else bias.transpose(0, 1)


def resize_table(table: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Returns the table (heads, …) of a bias by position for other grids: bilinear, corner to corner."""
    if not torch.jit.is_tracing() and table.shape[1:] == sizes:  # sizes that are recorded are not compared
        return table
    return F.interpolate(table[None], sizes, mode="bilinear", align_corners=True)[0]


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the tokens (B, K, C) of x (B, T, C) at ``rows`` (B, K); zeros where a row is −1."""
    index = rows.clamp_min(0)[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index).masked_fill((rows < 0)[..., None], 0.0)


def gather_add_layer_norm(
    x: Tensor,
    rows: Tensor,
    branch: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (h, layer_norm(h)) with h = gather_rows(x, rows) + branch."""
    h = gather_rows(x, rows) + branch
    return h, layer_norm(h, weight, bias, eps=eps, dtype=dtype)


def scatter_rows(
    x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None = None, *, inplace: bool = False
) -> Tensor:
    """Returns x (B, T, C) with values + branch (B, K, C) at ``rows`` (B, K), none of it where a row is −1."""
    values = values if branch is None else values + branch
    tokens = x.shape[1]
    # One place more takes what goes nowhere, and tokens that x does not have lie beyond it.
    index = torch.where(rows < 0, tokens, rows + (rows >= tokens))[..., None].expand_as(values)
    out = F.pad(x, (0, 0, 0, 1)).scatter(1, index, values.to(x.dtype))[:, :tokens]
    return x.copy_(out) if inplace else out


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """Computes (x − mean) / sqrt(variance + eps) · weight + bias over the last dimension, variance biased.

    A shift is added to x before. The result is rounded to ``dtype`` if one is given, but for float64.
    """
    if shift is not None:
        x = (x + shift).to(x.dtype)
    shape = (_plain(x.shape[-1]),)
    if _are_wider(x, weight, bias):
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
        out = F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)
    else:
        out = F.layer_norm(x, shape, weight, bias, eps)
    return out if dtype is None or x.dtype == torch.float64 else out.to(dtype)


def _are_wider(x: Tensor, *parameters: Tensor | None) -> bool:
    """Says whether parameters are of float32 and x is not: F.layer_norm takes them on a CPU only."""
    if x.dtype not in (torch.bfloat16, torch.float16) or checks.autocast_enabled(x):
        return False
    return any(p is not None and p.dtype == torch.float32 for p in parameters)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (h, layer_norm(h)) with h = x + residual."""
    h = x + residual
    return h, layer_norm(h, weight, bias, eps=eps, dtype=dtype)


def gelu(x: Tensor, *, approximate: GeluVariant = "none") -> Tensor:
    """Computes GELU (Hendrycks and Gimpel 2016), x · Φ(x), or one of its two approximations.

    ``"none"``: Φ exactly, by erf. ``"tanh"``: 0.5 · x · (1 + tanh(sqrt(2/π) · (x + 0.044715 · x³))).
    ``"quick"``: x · sigmoid(1.702 · x), Microsoft's ``QuickGELU``.
    """
    if approximate == "quick":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate=approximate)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: GeluVariant = "none") -> Tensor:
    """Computes gelu(x + bias), bias over the last dimension."""
    return gelu(x + bias, approximate=approximate)


def layer_norm_gelu(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    approximate: GeluVariant = "none",
) -> Tensor:
    """Computes gelu(layer_norm(x))."""
    return gelu(layer_norm(x, weight, bias, eps=eps), approximate=approximate)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x · weightᵀ + bias."""
    return F.linear(x, weight, bias)


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: GeluVariant = "none"
) -> Tensor:
    """Computes gelu(x · weightᵀ + bias)."""
    return gelu(F.linear(x, weight, bias), approximate=approximate)


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, *, inplace: bool = False
) -> Tensor:
    """Computes residual + x · weightᵀ + bias, in the place of the residual if ``inplace``."""
    product = F.linear(x, weight, bias)
    return residual.add_(product) if inplace else residual + product


def linear_add_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    shift: Tensor | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (h, layer_norm(h + shift)) with h = residual + x · weightᵀ + bias."""
    h = linear_add(x, weight, bias, residual, inplace=inplace)
    return h, layer_norm(h, norm_weight, norm_bias, eps=eps, shift=shift)


def layer_norm_mlp(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-5,
    approximate: GeluVariant = "none",
    shift: Tensor | None = None,
) -> Tensor:
    """Computes x + fc2(gelu(fc1(layer_norm(x + shift))))."""
    y = layer_norm(x, norm_weight, norm_bias, eps=eps, shift=shift)
    hidden = linear_gelu(y, fc1_weight, fc1_bias, approximate=approximate)
    return linear_add(hidden, fc2_weight, fc2_bias, x)


#: The largest 8-bit numbers.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
#: A row whose largest number is smaller counts as zeros: the reciprocal of its scale would overflow.
LEAST = 2.0**-117


def quantize_rows(
    x: Tensor, *, scale: Tensor | None = None, dtype: torch.dtype = torch.int8
) -> QuantizedRows:
    """Rounds rows to 8-bit numbers, half to even, each with the scale max |x| / limit or all with ``scale``.

    All is computed in float32, so that every implementation gives the same bits. Rows with NaN or infinities
    become zeros with the scale NaN. In float64, where checks of accuracy take the exact result, nothing is
    rounded, but all the same limited.
    """
    limit, exact = LIMITS[dtype], x.dtype == torch.float64
    x = x if exact else x.float()
    largest = x.abs().amax(-1, keepdim=True)
    is_zero = largest < LEAST if scale is None else torch.zeros_like(largest, dtype=torch.bool)
    if scale is None:
        # What PyTorch makes of a number divided by a tensor is not rounded correctly.
        limits = torch.full_like(largest, limit)
        scales = (largest / limits).masked_fill(is_zero, 0.0)
        factor = (limits / largest).masked_fill(is_zero, 0.0)
    else:
        scales = scale.to(x.dtype).expand(largest.shape)
        factor = 1 / scales
    finite = largest.isfinite()
    values = (x * factor).masked_fill(~finite, 0.0)
    scales = scales.masked_fill(~finite, torch.nan)
    if dtype == torch.int8 and not exact:
        values = values.round()
    values = values.clamp(-limit, limit)
    return QuantizedRows(values if exact else values.to(dtype), scales)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> QuantizedRows:
    """Returns quantize_rows(layer_norm(x)), the LayerNorm not rounded to the dtype of ``x``."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if t is None else t.to(wide) for t in (weight, bias))
    shifted = x if shift is None else (x + shift).to(x.dtype)
    return quantize_rows(layer_norm(shifted.to(wide), weight, bias, eps=eps), scale=scale, dtype=dtype)


def gelu_quantize(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluVariant = "none",
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.int8,
) -> QuantizedRows:
    """Returns quantize_rows(gelu(x + bias)), neither the sum nor GELU rounded to the dtype of ``x``."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if bias is None else wide + bias
    return quantize_rows(gelu(wide, approximate=approximate), scale=scale, dtype=dtype)


def linear_int8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scales: Tensor | None = None,
    input_scale: Tensor | None = None,
    approximate: GeluVariant | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes (x · weightᵀ) · x_scales · weight_scale + bias, then GELU or the sum with a residual.

    Without ``x_scales``, x is quantized first. The sums of products of int8 are exact. In float64, of x or of
    its scales, everything is, and the result is not rounded to ``dtype``.
    """
    dtype = dtype or (x.dtype if x_scales is None else torch.float32)
    if x_scales is None:
        x, x_scales = quantize_rows(x, scale=input_scale, dtype=weight.dtype)
    exact = x_scales.dtype == torch.float64
    y = F.linear(x.double(), weight.double()) if exact else _product(x, weight)
    y = y * x_scales * weight_scale.to(x_scales.dtype)
    if bias is not None:
        y = y + bias
    if approximate is not None:
        y = gelu(y, approximate=approximate)
    if residual is not None:
        y = y + residual
    return y if exact else y.to(dtype)


#: As many products of int8 are summed exactly in float32: 2^24 / 127², rounded down to a power of two.
_EXACT = 1024


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x · weightᵀ of 8-bit numbers in float32, rounded once."""
    with checks.without_autocast(x):
        parts = zip(x.split(_EXACT, -1), weight.split(_EXACT, -1), strict=True)
        sums = [F.linear(a.float(), b.float()) for a, b in parts]
    if len(sums) == 1:
        return sums[0]
    exact = torch.int32 if weight.dtype == torch.int8 else torch.float32
    return torch.stack([each.to(exact) for each in sums]).sum(0).float()


def apply_linear(x: Tensor, layer: AnyLinear) -> Tensor:
    """Computes a linear layer, quantized or not."""
    if isinstance(layer, Linear):
        return F.linear(x, *layer)
    return linear_int8(x, layer.weight, layer.weight_scale, layer.bias, input_scale=layer.input_scale)


def conv_linear(
    x: Tensor,
    grid: tuple[int, int],
    convs: Sequence[Branch],
    linears: Sequence[tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, ...]:
    """Computes linearᵢ(BatchNormᵢ(convᵢ(x))) for every branch, by the running statistics."""
    projected = conv_projection(x, grid, convs, training=False)
    return tuple(F.linear(y, *linear) for y, linear in zip(projected, linears, strict=True))


def conv_embedding(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    stride: int,
    padding: int,
    eps: float = 1e-5,
    class_token: Tensor | None = None,
) -> Tensor:
    """Computes layer_norm(conv(image)) as tokens (B, H·W, C), after the class token (C,) if there is one."""
    y = F.conv2d(image, weight, bias, stride, padding)
    tokens = layer_norm(y.flatten(2).transpose(1, 2), norm_weight, norm_bias, eps=eps)
    if class_token is None:
        return tokens
    return torch.cat([class_token.to(tokens.dtype).expand(tokens.shape[0], 1, -1), tokens], dim=1)


def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool | None = None,
    inplace: bool = False,
) -> Any:
    """Computes y = x + proj(attention(linear(conv(norm1(x))))) and y + fc2(gelu(fc1(norm2(y)))).

    With ``rows`` (B, K) only these tokens have queries and change. The result takes the place of ``x`` if
    ``inplace``; with ``scores`` there is a second one, that of :func:`attended_keys`.
    """
    y = layer_norm(x, block.norm1.weight, block.norm1.bias, eps=block.norm1.eps)
    projected = list(conv_projection(y, grid, block.convs, training=False))
    if rows is not None:
        projected[0] = gather_rows(projected[0], rows)
    layers = zip(projected, block.linears, strict=True)
    q, k, v = (apply_linear(t, layer).unflatten(2, (block.num_heads, -1)) for t, layer in layers)
    y = attention(q, k, v, scale=block.scale).flatten(2)
    y = (x if rows is None else gather_rows(x, rows)) + apply_linear(y, block.proj)
    hidden = layer_norm(y, block.norm2.weight, block.norm2.bias, eps=block.norm2.eps)
    hidden = gelu(apply_linear(hidden, block.fc1), approximate=block.approximate)
    hidden = apply_linear(hidden, block.fc2)
    if rows is not None:
        out = scatter_rows(x, rows, y, hidden, inplace=inplace)
    else:
        out = x.copy_(y + hidden) if inplace else y + hidden
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, attended_keys(q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows)


def depthwise_conv_gelu(
    x: Tensor,
    grid: tuple[int, int],
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: GeluVariant = "none",
) -> Tensor:
    """Computes gelu(depthwise_conv(x) + bias) of tokens (B, H·W, C), by a 3×3 convolution."""
    image = x.unflatten(1, grid).permute(0, 3, 1, 2)
    y = F.conv2d(image, weight, bias, padding=1, groups=weight.shape[0])
    return gelu(y.permute(0, 2, 3, 1).flatten(1, 2), approximate=approximate)


def reduce_tokens(x: Tensor, grid: tuple[int, int], reduction: Reduction) -> Tensor:
    """Returns the tokens (B, H'·W', C) that a reduction makes of tokens (B, H·W, C)."""
    ratio = reduction.weight.shape[-1]
    y = F.conv2d(x.unflatten(1, grid).permute(0, 3, 1, 2), reduction.weight, reduction.bias, ratio)
    return layer_norm(y.flatten(2).transpose(1, 2), *reduction.norm[:2], eps=reduction.norm.eps)


def pyramid_block(x: Tensor, grid: tuple[int, int], block: PyramidBlock, *, inplace: bool = False) -> Tensor:
    """Computes y = x + proj(attention(q, k, v)) and y + fc2(gelu(conv(fc1(norm2(y))))).

    q is linear(norm1(x)); k and v are linear(reduction(norm1(x))). The result takes the place of ``x`` if
    ``inplace``.
    """
    y = layer_norm(x, *block.norm1[:2], eps=block.norm1.eps)
    kept = y if block.reduction is None else reduce_tokens(y, grid, block.reduction)
    tokens = zip((y, kept, kept), block.linears, strict=True)
    q, k, v = (F.linear(each, *layer).unflatten(2, (block.num_heads, -1)) for each, layer in tokens)
    y = x + F.linear(attention(q, k, v, scale=block.scale).flatten(2), *block.proj)
    hidden = F.linear(layer_norm(y, *block.norm2[:2], eps=block.norm2.eps), *block.fc1)
    if block.conv is None:
        hidden = gelu(hidden, approximate=block.approximate)
    else:
        hidden = depthwise_conv_gelu(hidden, grid, *block.conv, approximate=block.approximate)
    out = y + F.linear(hidden, *block.fc2)
    return x.copy_(out) if inplace else out


@torch.no_grad()
def attended_keys(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    pool: Pool,
    class_tokens: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Returns how much a query attends to each key (B, Nkv), summed over the heads; without a gradient.

    With ``"cls"`` it is the first query, with ``"avg"`` the mean of all that are of no class token, and of
    no row that is -1; zero if there are none. Of float32, or float64 for float64.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if pool == "cls":
        query = q[:, :1].to(dtype)
    elif rows is None:
        query = q[:, class_tokens:].mean(1, keepdim=True, dtype=dtype)
    else:
        present = (rows >= class_tokens)[..., None, None]
        query = (q * present).sum(1, keepdim=True, dtype=dtype) / present.sum(1, keepdim=True).clamp_min(1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = (query * scale * k.to(dtype)).sum(3)  # no product of matrices, which autocast would round
    return products.softmax(1).sum(2)
