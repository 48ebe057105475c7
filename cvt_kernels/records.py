"""NamedTuples that operators take and return: parameters of layers and blocks, and quantized rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checks

#: The GELU variants; see :func:`gelu`.
GeluVariant = Literal["none", "tanh", "quick"]


#: The input of a model's head: the class token, or the mean of the other tokens.
Pool = Literal["cls", "avg"]

_DETECTORS = (
    *("ConditionalDetr", "DFine", "DabDetr", "DeformableDetr", "Deimv2", "Detr", "GroundingDino"),
    *("MMGroundingDino", "PPDocLayoutV2", "PPDocLayoutV3", "PPDocLayoutV4", "RTDetr", "RTDetrV2"),
    "TableTransformer",
)
#: Names of BatchNorms without parameters, which never normalize by the batch: torchvision's, and its copies
#: that the detectors of transformers put in the places of a backbone's BatchNorms.
FROZEN_BATCH_NORMS = frozenset(f"{detector}FrozenBatchNorm2d" for detector in ("", *_DETECTORS))


class ConvBatchNorm(NamedTuple):
    """A depthwise convolution without bias followed by BatchNorm: one branch of ``conv_projection``.

    Attributes:
        weight: Convolution weight, ``(C, 1, k, k)``.
        bn_weight: BatchNorm scale γ, ``(C,)``, or None for 1.
        bn_bias: BatchNorm shift β, ``(C,)``, or None for 0.
        running_mean: Buffer ``(C,)``, updated in place in training; None always normalizes by the batch.
        running_var: Buffer ``(C,)``, likewise, updated by the unbiased variance.
        num_batches_tracked: Integer scalar buffer, incremented in training; needed if ``momentum`` is None.
        stride: Convolution stride, the same in both directions.
        padding: Zero padding on each side.
        dilation: Spacing of the taps.
        momentum: Weight of the new batch in the running statistics; None averages over all batches.
        eps: Added to the variance.
        process_group: If given, training computes the batch statistics over all its processes, like
            ``nn.SyncBatchNorm``; no process may have an empty share.
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
    def from_modules(cls, conv: nn.Conv2d, bn: nn.Module) -> ConvBatchNorm:
        """Returns the tensors and settings of two modules, without copies.

        Args:
            conv: The convolution.
            bn: ``nn.BatchNorm2d``, ``nn.SyncBatchNorm``, or the ``FrozenBatchNorm2d`` of torchvision or of a
                detector of transformers, which has only running statistics.

        Raises:
            TypeError: They are of other types.
            ValueError: The convolution has a bias, a padding mode other than zeros, or different settings in
                the two directions.
        """
        checks.check_kind("conv", conv, nn.Conv2d)
        momentum, eps = _settings_of(bn)
        if conv.bias is not None:
            raise ValueError("conv: has a bias; expected bias=False, since BatchNorm subtracts it again")
        if conv.padding_mode != "zeros":
            raise ValueError(f"conv: padding_mode is {conv.padding_mode!r}; expected 'zeros'")
        stride, padding, dilation = conv.stride, conv.padding, conv.dilation
        for name, value in (("stride", stride), ("padding", padding), ("dilation", dilation)):
            if isinstance(value, str) or value[0] != value[-1]:
                raise ValueError(f"conv: {name} is {value!r}; expected one number for both directions")
        fields: list[Any] = [conv.weight, bn.weight, bn.bias, *written_of(bn)]
        fields += [stride[0], int(padding[0]), dilation[0], momentum, eps, _process_group(bn)]
        return cls(*fields)

    def output_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Returns the output's (H, W) for an input of ``grid``; below 1 means that the output is empty."""
        reach = self.dilation * (self.weight.shape[-1] - 1) + 1
        height, width = ((n + 2 * self.padding - reach) // self.stride + 1 for n in grid)
        return height, width


#: A branch of ``conv_projection``: one convolution with its BatchNorm, or several whose results are summed.
Branch = ConvBatchNorm | tuple[ConvBatchNorm, ...]


def summands(branch: Branch) -> tuple[ConvBatchNorm, ...]:
    """Returns the convolutions of a branch, one or several."""
    return (branch,) if isinstance(branch, ConvBatchNorm) else branch


def flattened(branches: Sequence[Branch]) -> tuple[tuple[ConvBatchNorm, ...], tuple[int, ...]]:
    """Returns the convolutions of all branches in one tuple, and the length of each sum.

    The length stands at the first convolution of a branch; the others of the branch have 0.
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


def unflattened(convs: Sequence[ConvBatchNorm], lengths: Sequence[int]) -> tuple[Branch, ...]:
    """Returns the branches of :func:`flattened`."""
    starts = [i for i, length in enumerate(lengths) if length]
    return tuple([convs[i] if lengths[i] == 1 else tuple(convs[i : i + lengths[i]]) for i in starts])


class PositionBias(NamedTuple):
    """A learned relative position bias of attention, for each head and offset from key to query (CvT-v2).

    Key (a, b) of the key grid is at token (s·a, s·b) of the query grid, the center of its convolution. The
    query at (i, j) has the offset (i − s·a, j − s·b), counted in tokens, at index
    (i − s·a + s·(Hk − 1), j − s·b + s·(Wk − 1)) of the table. A class token, token and key 0, has no
    position: its scores get no bias.

    Attributes:
        table: ``(heads, H + s·(Hk − 1), W + s·(Wk − 1))``, finite, in q's dtype; under autocast it may have
            another.
        query_grid: ``(H, W)`` of the tokens.
        key_grid: ``(Hk, Wk)``.
        stride: s.
        rows: ``(B, Nq)`` int64, the token of each query, as of :func:`gather_rows`, each at most once; None
            where every token has a query. The result of a row of −1 is undefined.
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
    """Rows of 8-bit numbers with a scale for each row; they stand for ``values · scales``.

    Attributes:
        values: ``(..., C)``; int8 between -127 and 127, or float8_e4m3fn.
        scales: ``(..., 1)``, float32, not negative; NaN for a row that had NaN or an infinity.
    """

    values: Tensor
    scales: Tensor


class QuantizedLinear(NamedTuple):
    """A linear layer with an 8-bit weight.

    Attributes:
        weight: ``(outputs, inputs)``; int8 between -127 and 127, or float8_e4m3fn.
        weight_scale: ``(outputs,)``, float32: the weight stands for ``weight · weight_scale[:, None]``.
        bias: ``(outputs,)``, or None for 0.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None = None


AnyLinear = Linear | QuantizedLinear


class DepthwiseConv(NamedTuple):
    """A depthwise 3×3 convolution with stride 1 and zero padding.

    Attributes:
        weight: ``(C, 1, 3, 3)``.
        bias: ``(C,)``, or None for 0.
    """

    weight: Tensor
    bias: Tensor | None = None


class Reduction(NamedTuple):
    """A convolution whose stride is its kernel size, and a LayerNorm, for fewer keys and values (PVT).

    Attributes:
        weight: ``(C, C, r, r)``. Rows and columns of tokens beyond the last whole r×r square are left out.
        bias: ``(C,)``, or None for 0.
        norm: The LayerNorm.
    """

    weight: Tensor
    bias: Tensor | None
    norm: Norm

    def output_grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Returns the output's (H, W) for an input of ``grid``."""
        ratio = self.weight.shape[-1]
        return grid[0] // ratio, grid[1] // ratio


class TransformerBlock(NamedTuple):
    """The parameters of a pre-norm transformer block of CvT, SegFormer or PVT.

    Attributes:
        norm1: The LayerNorm before attention.
        reduce: The convolutional projections of Q, K and V, normalized by running statistics (CvT); a
            reduction for K and V (SegFormer, PVT); or None, if Q, K and V are made from all tokens.
        linears: The linear layers of Q, K and V.
        num_heads: The number of attention heads.
        scale: Factor on the scores; None for 1/√(head channels).
        proj: The linear layer after attention.
        norm2: The LayerNorm before the MLP.
        fc1: The first linear layer of the MLP.
        approximate: The variant of GELU, see :func:`cvt_kernels.gelu`.
        fc2: The second linear layer of the MLP.
        mix: The convolution before the GELU (SegFormer, PVT v2), or None.
    """

    norm1: Norm
    reduce: tuple[ConvBatchNorm, ConvBatchNorm, ConvBatchNorm] | Reduction | None
    linears: tuple[AnyLinear, AnyLinear, AnyLinear]
    num_heads: int
    scale: float | None
    proj: AnyLinear
    norm2: Norm
    fc1: AnyLinear
    approximate: GeluVariant
    fc2: AnyLinear
    mix: DepthwiseConv | None = None

    @property
    def convs(self) -> tuple[ConvBatchNorm, ...]:
        """The convolutional projections of Q, K and V; empty for a block without."""
        return () if self.reduce is None or isinstance(self.reduce, Reduction) else self.reduce

    def layers(self) -> tuple[AnyLinear, ...]:
        """Returns the linear layers: of Q, K and V, after attention, and the two of the MLP."""
        return (*self.linears, self.proj, self.fc1, self.fc2)

    def packed_tensors(self) -> tuple[Tensor | None, ...]:
        """Returns the tensors by which copies of the parameters are outdated.

        They include the numbers of batches, since PyTorch counts no other write of running statistics.
        """
        return (*self.tensors(), *(conv.num_batches_tracked for conv in self.convs))

    def quantized_layers(self) -> list[QuantizedLinear]:
        """Returns the quantized layers among :meth:`layers`."""
        return [layer for layer in self.layers() if isinstance(layer, QuantizedLinear)]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns all tensors that the block reads, in a fixed order, with None for missing ones."""
        q, k, v = self.linears
        norm1, norm2, reduce = self.norm1, self.norm2, self.reduce
        of_reduce: tuple[Tensor | None, ...] = ()
        if isinstance(reduce, Reduction):
            of_reduce = (*reduce[:2], *reduce.norm[:2])
        elif reduce is not None:
            of_q, of_k, of_v = reduce
            of_reduce = (*of_q[:5], *of_k[:5], *of_v[:5])
        return (
            norm1[0], norm1[1], *of_reduce, *q, *k, *v,
            *self.proj, norm2[0], norm2[1], *self.fc1, *self.fc2, *(self.mix or ()),
        )  # fmt: skip


def is_frozen_batch_norm(bn: nn.Module) -> bool:
    """Returns whether a BatchNorm is one of :data:`FROZEN_BATCH_NORMS`."""
    return type(bn).__name__ in FROZEN_BATCH_NORMS


def trains(bn: nn.Module) -> bool:
    """Returns whether a BatchNorm normalizes by the batch now."""
    return bn.training and not is_frozen_batch_norm(bn)


def written_of(bn: Any) -> tuple[Tensor | None, ...]:
    """Returns the buffers that training writes: PyTorch counts this in the number of batches only."""
    return bn.running_mean, bn.running_var, getattr(bn, "num_batches_tracked", None)


def is_shadowed(module: nn.Module) -> bool:
    """Returns whether attributes shadow parameters or buffers; their values may differ in every call."""
    attributes = vars(module)  # asked name by name, since Dynamo of PyTorch 2.11 makes no set of them
    return any(name in attributes for name in ("weight", "bias", "running_mean", "running_var"))


def _settings_of(bn: Any) -> tuple[float | None, float]:
    """Returns the momentum and eps of a BatchNorm."""
    if is_frozen_batch_norm(bn):
        return 0.1, getattr(bn, "eps", 1e-5)  # those of transformers have no attribute of it
    checks.check_kind("bn", bn, nn.modules.batchnorm._BatchNorm)
    return bn.momentum, bn.eps


def _process_group(bn: nn.Module) -> dist.ProcessGroup | None:
    """Returns the process group that ``bn`` synchronizes over now, like SyncBatchNorm, or None."""
    if not (
        isinstance(bn, nn.SyncBatchNorm) and bn.training and dist.is_available() and dist.is_initialized()
    ):
        return None
    group = bn.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


#: The largest 8-bit numbers.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


#: Rows whose largest number is smaller count as zeros: the reciprocal of their scale would overflow.
LEAST = 2.0**-117
