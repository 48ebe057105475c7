"""A convolutional transformer block as one operator, for serving.

``onednn`` takes PyTorch's packed linear layers for CPUs. The composition takes other operators of this
package one after the other, each by its own verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks, reference
from ...backends import Implementation, Record
from ...declaration import facts_of_tensor, native_kernels, operator
from ...records import LIMITS, AnyLinear, ConvBatchNorm, Linear, Norm, Pool, QuantizedLinear, TransformerBlock
from ...reference import attended_keys
from ..attention import attention, check_scale
from ..conv_linear import conv_linear
from ..conv_projection import check_arguments, conv_projection, geometry_of
from ..kinds import first_images, gelu_words, images_within, size_class
from ..layer_norm_gelu import check_approximate, check_norm, layer_norm
from ..linear import linear, linear_add, linear_add_layer_norm, linear_gelu
from ..linear_int8 import layer_norm_quantize, linear_int8
from ..packed_linear import why_unavailable
from ..rows import gather_rows, scatter_rows
from . import onednn

_SAMPLE = 2**17  # elements
_NAMES = ("q", "k", "v", "proj", "fc1", "fc2")  # of the linear layers


# The composition of other operators -----------------------------------------------------------------------


def _compose(call: Record) -> Any:
    x, grid, block, rows, scores, inplace = call
    y = layer_norm(x, block.norm1.weight, block.norm1.bias, eps=block.norm1.eps)
    q, k, v = (tokens.unflatten(2, (block.num_heads, -1)) for tokens in _project(y, grid, block, rows))
    y = attention(q, k, v, scale=block.scale).flatten(2)
    if rows is None:
        out = _finish(y, x, block, inplace)
        out = x.copy_(out) if inplace and out is not x else out
    else:
        gathered = gather_rows(x, rows)
        may_replace = checks.may_change(gathered, *block.tensors())
        out = scatter_rows(x, rows, _finish(y, gathered, block, may_replace), inplace=inplace)
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, attended_keys(q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows)


def _finish(y: Tensor, x: Tensor, block: TransformerBlock, inplace: bool) -> Tensor:
    """Returns x after the block, from the result of attention."""
    stream, y = _add_and_hide(y, x, block, inplace)
    # PyTorch lays out a sum as its first summand.
    may_replace = stream.is_contiguous() and checks.may_change(stream, y, *block.fc2)
    return _add(y, block.fc2, stream, inplace=may_replace)


def _project(
    y: Tensor, grid: tuple[int, int], block: TransformerBlock, rows: Tensor | None
) -> Sequence[Tensor]:
    """Returns queries, keys and values."""
    plain = [layer for layer in block.linears if isinstance(layer, Linear)]
    if rows is None and len(plain) == len(block.linears):
        return conv_linear(y, grid, block.convs, plain)
    projected = list(conv_projection(y, grid, block.convs, training=False))
    if rows is not None:
        projected[0] = gather_rows(projected[0], rows)
    return [
        linear(tokens, *layer) if isinstance(layer, Linear) else linear_int8(tokens, **layer._asdict())
        for tokens, layer in zip(projected, block.linears, strict=True)
    ]


def _add_and_hide(y: Tensor, x: Tensor, block: TransformerBlock, inplace: bool) -> tuple[Tensor, Tensor]:
    """Returns the stream, x + proj(y), and the hidden channels of the MLP after their GELU."""
    norm, proj, fc1, approximate = block.norm2, block.proj, block.fc1, block.approximate
    if isinstance(fc1, QuantizedLinear):
        stream = _add(y, proj, x, inplace)
        weight, scale, bias, input_scale = fc1
        rows = layer_norm_quantize(
            stream, norm.weight, norm.bias, eps=norm.eps, scale=input_scale, dtype=weight.dtype
        )
        return stream, linear_int8(rows, weight, scale, bias, approximate=approximate, dtype=stream.dtype)
    if isinstance(proj, Linear):
        stream, y = linear_add_layer_norm(y, *proj, x, norm.weight, norm.bias, eps=norm.eps, inplace=inplace)
    else:
        stream = _add(y, proj, x, inplace)
        y = layer_norm(stream, norm.weight, norm.bias, eps=norm.eps)
    return stream, linear_gelu(y, *fc1, approximate=approximate)


def _add(y: Tensor, layer: AnyLinear, stream: Tensor, inplace: bool) -> Tensor:
    """Returns the sum of the stream and a linear layer, for a float layer in the place of the stream."""
    if isinstance(layer, Linear):
        return linear_add(y, *layer, stream, inplace=inplace)
    return linear_int8(y, **layer._asdict(), residual=stream, dtype=stream.dtype)


# Checks ---------------------------------------------------------------------------------------------------

_LAYERS = (Linear, QuantizedLinear)


def _check(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    rows: Tensor | None,
    scores: Pool | None,
    inplace: bool,
) -> None:
    _check_parts(block)
    check_arguments(x, grid, block.convs, training=False)
    _check_grids(grid, block.convs)
    check_approximate(block.approximate)
    for name in ("norm1", "norm2"):
        check_norm(f"block.{name}", getattr(block, name), x)
    _check_layers(x, block)
    if rows is not None:
        _check_rows(rows, x)
    if scores is not None:
        _check_scores(scores, x.shape[1] - grid[0] * grid[1])
    checks.check_flag("inplace", inplace)
    if block.quantized_layers() and checks.wants_gradient(x, *block.tensors()):
        raise ValueError("x: a gradient is wanted, expected none, since quantized layers have none")
    if inplace and checks.wants_gradient(x, *block.tensors()):
        raise ValueError("inplace: got True where a gradient is wanted, expected False")
    if inplace and not x.is_contiguous():
        raise ValueError("x: is not contiguous, expected it to be with inplace=True")


def _check_rows(rows: Any, x: Tensor) -> None:
    """Raises for rows that are no indices of the tokens of x; their values are left to the backends."""
    meaning = "(batch, rows)"
    checks.check_dtype("rows", rows, meaning, torch.int64)
    checks.check_rank("rows", rows, 2, meaning)
    batch, tokens = x.shape[:2]
    if not _are_rows_of(rows, x):
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, expected ({batch}, 1 to {tokens}) {meaning}")
    checks.check_device("rows", rows, "x", x)


def _are_rows_of(rows: Tensor, x: Tensor) -> bool:
    """Says whether an index has the shape of one of the tokens of x, and its dtype."""
    if rows.dtype != torch.int64 or rows.ndim != 2 or x.ndim != 3:
        return False
    return rows.shape[0] == x.shape[0] and 1 <= rows.shape[1] <= x.shape[1]


def _check_scores(scores: object, class_tokens: int) -> None:
    if not isinstance(scores, str) or scores not in get_args(Pool):
        raise ValueError(f"scores: got {checks.shown(scores)}, expected 'cls', 'avg' or None")
    if scores == "cls" and not class_tokens:
        raise ValueError("scores: got 'cls' for tokens without a class token, expected 'avg'")


def _check_parts(block: TransformerBlock) -> None:
    """Raises TypeError or ValueError for a block whose parts are of other types or numbers."""
    checks.check_kind("block", block, TransformerBlock)
    for name, kinds in (("convs", (ConvBatchNorm,)), ("linears", _LAYERS)):
        parts = getattr(block, name)
        if not isinstance(parts, tuple):
            raise TypeError(f"block.{name}: got {type(parts).__name__}, expected a tuple")
        if len(parts) != 3:
            raise ValueError(f"block.{name}: got {len(parts)}, expected those of Q, of K and of V")
        for i, part in enumerate(parts):
            checks.check_kind(f"block.{name}[{i}]", part, *kinds)
    for name in ("proj", "fc1", "fc2"):
        checks.check_kind(f"block.{name}", getattr(block, name), *_LAYERS)
    for name in ("norm1", "norm2"):
        checks.check_kind(f"block.{name}", getattr(block, name), Norm)


def _check_grids(grid: tuple[int, int], convs: Sequence[ConvBatchNorm]) -> None:
    """Raises ValueError for branches that do not fit together or have no running statistics."""
    for i, conv in enumerate(convs):
        if conv.running_mean is None:
            raise ValueError(f"block.convs[{i}].running_mean: got None, expected running statistics")
    of_queries, of_keys, of_values = (conv.output_grid(grid) for conv in convs)
    if of_queries != grid:
        got, expected = ("×".join(map(str, sizes)) for sizes in (of_queries, grid))
        raise ValueError(f"block.convs[0]: makes {got} of the {expected} grid, expected as many queries")
    if of_keys != of_values:
        keys, values = ("×".join(map(str, sizes)) for sizes in (of_keys, of_values))
        raise ValueError(f"block.convs: got {keys} keys and {values} values, expected as many")


def _check_layers(x: Tensor, block: TransformerBlock) -> None:
    """Raises TypeError or ValueError for linear layers that do not follow one another, and wrong heads."""
    channels = x.shape[2]
    widths = [
        _check_linear(f"block.linears[{i}]", linear, channels, x) for i, linear in enumerate(block.linears)
    ]
    width, heads, scale = widths[0], block.num_heads, block.scale
    if widths != [width] * 3:
        of_q, of_k, of_v = widths
        raise ValueError(
            f"block.linears: got {of_q}, {of_k} and {of_v} channels of Q, K and V, expected as many"
        )
    checks.check_int("block.num_heads", heads, 1)
    if width < 1 or width % heads:
        raise ValueError(f"block.num_heads: got {heads!r}, expected a divisor of {width} channels")
    check_scale("block.scale", scale)
    _check_linear("block.proj", block.proj, width, x, channels)
    hidden = _check_linear("block.fc1", block.fc1, channels, x)
    _check_linear("block.fc2", block.fc2, hidden, x, channels)


def _check_linear(name: str, layer: AnyLinear, inputs: int, x: Tensor, outputs: int | None = None) -> int:
    """Returns the outputs of a linear layer; raises TypeError or ValueError for a wrong one."""
    weight, meaning = layer.weight, "(outputs, inputs)"
    if isinstance(layer, Linear):
        checks.check_float_tensor(f"{name}.weight", weight, meaning)
    else:
        checks.check_dtype(f"{name}.weight", weight, meaning, *LIMITS)
    checks.check_rank(f"{name}.weight", weight, 2, meaning)
    outputs = weight.shape[0] if outputs is None else outputs
    if isinstance(layer, Linear):
        checks.check_tensor_like(f"{name}.weight", weight, (outputs, inputs), meaning, x)
    else:
        _check_placed(f"{name}.weight", weight, (outputs, inputs), meaning, x)
        _check_scale(f"{name}.weight_scale", layer.weight_scale, (outputs,), "(outputs,)", x)
        if layer.input_scale is not None:
            _check_scale(f"{name}.input_scale", layer.input_scale, (), "(), a scalar", x)
    if layer.bias is not None:
        checks.check_tensor_like(f"{name}.bias", layer.bias, (outputs,), "(outputs,)", x)
    return outputs


def _check_scale(name: str, scale: Tensor, shape: tuple[int, ...], meaning: str, x: Tensor) -> None:
    checks.check_dtype(name, scale, meaning, torch.float32)
    _check_placed(name, scale, shape, meaning, x)


def _check_placed(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str, x: Tensor) -> None:
    checks.check_shape(name, tensor, shape, meaning)
    checks.check_device(name, tensor, "x", x)


# The operator ---------------------------------------------------------------------------------------------


def _kind_of(layer: AnyLinear) -> str:
    """Returns what a quantized layer computes in; "" of another."""
    if isinstance(layer, Linear):
        return ""
    return checks.dtype_name(layer.weight.dtype) + ("" if layer.input_scale is None else " with one scale")


def _kind(call: Record) -> str:
    x, block = call.x, call.block
    batch, tokens, channels = x.shape
    pixels, mean = call.grid[0] * call.grid[1], block.convs[0].running_mean
    branches = " ".join(f"{k}x{k}/{s}/{p}/{d}" for k, s, p, d in geometry_of(block.convs))
    words = gelu_words(block.approximate)
    words += f", {size_class(batch)} images, {channels} channels, kernel/stride/padding/dilation {branches}"
    words += f", {size_class(pixels)} pixels" + (" and a class token" if tokens > pixels else "")
    words += f", {block.num_heads} heads of {block.linears[0].weight.shape[0] // block.num_heads}"
    words += f", {block.fc1.weight.shape[0]} hidden"
    words += ", BatchNorm of another dtype" if mean is not None and mean.dtype != x.dtype else ""
    kinds = [_kind_of(layer) for layer in block.layers()]
    for kind in dict.fromkeys(filter(None, kinds)):
        words += f", {kind} in " + " ".join(
            name for name, each in zip(_NAMES, kinds, strict=True) if each == kind
        )
    words += "" if call.rows is None else f", {size_class(call.rows.shape[1], 2)} tokens computed"
    words += "" if call.scores is None else f", with scores of {call.scores}"
    return words + (", in place" if call.inplace else "") + ("" if x.is_contiguous() else ", strided")


def _sample(factor: int, call: Record) -> Record:
    images = images_within(_SAMPLE * factor, call.x.shape[0], call.x.numel())
    # The scores of bfloat16 are made of a single query that is rounded: chance would decide which is better.
    scores = None if call.x.dtype == torch.bfloat16 else call.scores
    copied = "x" if call.inplace else None
    return first_images(call._replace(scores=scores), images, "x", "rows", copied=copied)


def _apply(x: Tensor, layer: AnyLinear) -> Tensor:
    """Computes a linear layer, quantized or not, in plain PyTorch."""
    if isinstance(layer, Linear):
        return F.linear(x, *layer)
    return reference.linear_int8(
        x, layer.weight, layer.weight_scale, layer.bias, input_scale=layer.input_scale
    )


def _facts_of_block(block: TransformerBlock, grad: bool) -> tuple[Any, ...]:
    if type(block) is not TransformerBlock:
        raise TypeError
    numbers: list[Any] = [block.num_heads, block.scale, block.norm1.eps, block.norm2.eps]
    for conv in block.convs:
        numbers += conv[6:11]
    kinds = map(type, (*numbers, *block.layers()))
    # Weights of inference mode are not packed: their changes are not counted.
    numbers += [layer.weight.is_inference() for layer in block.layers()]
    return *numbers, *kinds, block.approximate, *[facts_of_tensor(t, grad) for t in block.tensors()]


def _check_all(call: Any) -> None:
    _check_row_values(call)
    _check(*call)


def _check_row_values(call: Any) -> None:
    x, rows, scores = call.x, call.rows, call.scores
    if isinstance(rows, Tensor) and isinstance(x, Tensor) and _are_rows_of(rows, x):
        is_cls = isinstance(scores, str) and scores == "cls"
        checks.check_row_values("rows", rows, x.shape[1], ascending=True, class_token=is_cls)


@overload
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: None = None,
    inplace: bool = False,
) -> Tensor: ...


@overload
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]: ...


@operator(
    backends={
        "native": native_kernels(),
        "composed": Implementation(_compose, ("cpu", "cuda")),
        "onednn": Implementation(onednn.transformer_block, ("cpu",), why_unavailable, onednn.why_unsupported),
    },
    kind=_kind,
    sample=_sample,
    defaults=("composed", "reference"),
    check=_check_all,
    values=("rows", _check_row_values),
    facts={"block": (_facts_of_block,)},
)
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool | None = None,
    inplace: bool = False,
) -> Any:
    """Computes a block of CvT: x + attention and x + MLP, each of a LayerNorm (Wu et al. 2021, section 3).

    BatchNorm normalizes by the running statistics. Quantized layers, any of the six, serve only: there is no
    gradient.

    Args:
        x: Tokens ``(B, T, C)`` as of :func:`cvt_kernels.conv_projection`.
        grid: ``(H, W)`` of the spatial tokens.
        block: The parameters. Kernels may keep packed copies of its weights for as long as these live and are
            not changed.
        rows: ``(B, K)`` int64, the tokens of each image that are computed, ascending, then -1 to fill up; the
            others stay as they are, but all have keys and values. None for all tokens.
        scores: ``"cls"`` to return how much the class token attends to each key too, which must be among the
            rows, ``"avg"`` for the mean query of the other tokens that are computed; None for neither.
        inplace: Whether the result takes the place of ``x``. Autograd does not follow it.

    Returns:
        The shape and dtype of ``x``; ``x`` itself if ``inplace``. With ``scores`` a second tensor
        ``(B, Nkv)``, float32 (float64 for float64), the probabilities summed over the heads, without a
        gradient.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, an invalid setting, ``inplace`` or quantized layers where a
            gradient is wanted, or ``inplace`` where ``x`` is not contiguous.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    y = reference.layer_norm(x, block.norm1.weight, block.norm1.bias, eps=block.norm1.eps)
    projected = list(reference.conv_projection(y, grid, block.convs, training=False))
    if rows is not None:
        projected[0] = reference.gather_rows(projected[0], rows)
    layers = zip(projected, block.linears, strict=True)
    q, k, v = (_apply(t, layer).unflatten(2, (block.num_heads, -1)) for t, layer in layers)
    y = reference.attention(q, k, v, scale=block.scale).flatten(2)
    y = (x if rows is None else reference.gather_rows(x, rows)) + _apply(y, block.proj)
    hidden = reference.layer_norm(y, block.norm2.weight, block.norm2.bias, eps=block.norm2.eps)
    hidden = reference.gelu(_apply(hidden, block.fc1), approximate=block.approximate)
    hidden = _apply(hidden, block.fc2)
    if rows is not None:
        out = reference.scatter_rows(x, rows, y, hidden, inplace=inplace)
    else:
        out = x.copy_(y + hidden) if inplace else y + hidden
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, reference.attended_keys(
        q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows
    )
