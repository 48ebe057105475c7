"""Transformer blocks on a CPU with oneDNN's linear layers, whose weights are packed once: inference only.

PyTorch's own operators for linear layers lay out the weights anew at every call, or multiply them as they
lie. Those that ``torch.compile`` calls with frozen weights take packed ones, and do what follows a product
(GELU, the residual sum) as part of it; they have no public names. Everything else is done by this package's
operators, each by its own verdict. oneDNN has ``swish(x) = x · sigmoid(x)`` only, of which QuickGELU is a
multiple: ``x · sigmoid(1.702 x) = swish(1.702 x) / 1.702``. The factors are part of the packed weights.

MKL has packed products for float32 too (``torch.ops.mkl``). They are not among the backends: a packed weight
serves one number of rows only, and nothing that follows a product is part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks, dispatch
from ...reference import AnyLinear, Pool, TransformerBlock, attended_keys
from ..attention import attention
from ..conv_projection import conv_projection
from ..layer_norm_gelu import layer_norm
from ..packing import packed
from ..rows import gather_rows, scatter_rows

_QUICK = 1.702  # of QuickGELU


class _Library(NamedTuple):
    """PyTorch's operators of oneDNN.

    Attributes:
        pack: Lays out a weight.
        linear: A linear layer with a packed weight, and a function of its result.
        linear_add: The same, and a sum with another tensor.
        has_bfloat16: Says whether the CPU has what its products of bfloat16 need.
        has_float16: The same for float16.
    """

    pack: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_add: Callable[..., Tensor]
    has_bfloat16: Callable[[], bool]
    has_float16: Callable[[], bool]


class _Activation(NamedTuple):
    """A GELU as the operators call it.

    Attributes:
        name: Of the function.
        algorithm: Its variant.
        factor: By which weight and bias before it are multiplied, and the weight behind it divided.
    """

    name: str
    algorithm: str = ""
    factor: float = 1.0


_ACTIVATIONS = {
    "none": _Activation("gelu", "none"),
    "tanh": _Activation("gelu", "tanh"),
    "quick": _Activation("swish", factor=_QUICK),
}


@functools.cache
def _library() -> _Library | None:
    """Returns the operators; None where this PyTorch has none."""
    found = torch.ops.mkldnn
    try:
        return _Library(
            pack=found._reorder_linear_weight.default,
            linear=found._linear_pointwise.default,
            linear_add=found._linear_pointwise.binary,
            has_bfloat16=found._is_mkldnn_bf16_supported.default,
            has_float16=found._is_mkldnn_fp16_supported.default,
        )
    except AttributeError:
        return None


def why_unavailable(device_type: str) -> str | None:
    """Says why this PyTorch has no packed linear layers; None if it has."""
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    return "this PyTorch has no packed linear layers of oneDNN" if _library() is None else None


def why_unsupported(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool | None = None,
    inplace: bool = False,
) -> str | None:
    """Says why these linear layers cannot serve a call; None if they can."""
    library = _library()
    assert library is not None
    if torch.compiler.is_compiling():
        return "is not for torch.compile, which packs weights by itself"
    if checks.wants_gradient(*block.tensors(), x):
        return "has no gradients"
    if checks.autocast_enabled(x):
        return "does not follow autocast"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"has no products of {checks.dtype_name(x.dtype)}"
    has_products = {torch.bfloat16: library.has_bfloat16, torch.float16: library.has_float16}.get(x.dtype)
    if has_products is not None and not has_products():
        return f"this CPU has no products of {checks.dtype_name(x.dtype)} for oneDNN"
    if x.numel() == 0:
        return "serves no empty batch"
    if block.quantized_layers():
        return "has no quantized layers"
    weights = [layer.weight for layer in block.layers()]
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in (x, *weights)):
        return "packs plain tensors only"
    if any(weight.is_inference() for weight in weights):
        return "packs no weights of inference mode, where changes cannot be noticed"
    return None


def _prepare(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool | None = None,
    inplace: bool = False,
) -> Callable[..., Any]:
    return lambda x, block, rows: transformer_block(x, grid, block, rows=rows, scores=scores, inplace=inplace)


@dispatch.prepared_by(_prepare)
def transformer_block(
    x: Tensor,
    grid: tuple[int, int],
    block: TransformerBlock,
    *,
    rows: Tensor | None = None,
    scores: Pool | None = None,
    inplace: bool = False,
) -> Any:
    """Computes ``cvt_kernels.transformer_block``, whose checks it relies on."""
    norm1, norm2, heads = block.norm1, block.norm2, block.num_heads
    activation = _ACTIVATIONS[block.approximate]
    y = layer_norm(x, norm1.weight, norm1.bias, eps=norm1.eps)
    projected = list(conv_projection(y, grid, block.convs, training=False))
    if rows is not None:
        projected[0] = gather_rows(projected[0], rows)
    q, k, v = (
        _linear(tokens, each).unflatten(2, (heads, -1))
        for tokens, each in zip(projected, block.linears, strict=True)
    )
    y = attention(q, k, v, scale=block.scale).flatten(2)
    stream = _linear_add(y, block.proj, x.contiguous() if rows is None else gather_rows(x, rows))
    y = layer_norm(stream, norm2.weight, norm2.bias, eps=norm2.eps)
    y = _linear(y, block.fc1, activation.name, activation.algorithm, activation.factor)
    y = _linear_add(y, block.fc2, stream, 1 / activation.factor)
    out = y if rows is None else scatter_rows(x, rows, y, inplace=inplace)
    out = x.copy_(out) if inplace and out is not x else out
    if scores is None:
        return out
    class_tokens = x.shape[1] - grid[0] * grid[1]
    return out, attended_keys(q, k, scale=block.scale, pool=scores, class_tokens=class_tokens, rows=rows)


def _linear(
    x: Tensor, layer: AnyLinear, name: str = "none", algorithm: str = "", factor: float = 1.0
) -> Tensor:
    """Computes a function of a linear layer, whose weight and bias are multiplied by ``factor``."""
    library, bias = _library(), layer.bias
    assert library is not None
    if factor != 1.0 and bias is not None:
        bias = packed(bias, ("onednn", factor), lambda: _scaled(layer.bias, factor))
    return library.linear(x, _packed_weight(layer.weight, factor), bias, name, [], algorithm)


def _linear_add(x: Tensor, layer: AnyLinear, residual: Tensor, factor: float = 1.0) -> Tensor:
    """Computes the sum of a residual and a linear layer, whose weight is multiplied by ``factor``."""
    library = _library()
    assert library is not None
    return library.linear_add(x, residual, _packed_weight(layer.weight, factor), layer.bias, "add")


def _packed_weight(weight: Tensor, factor: float) -> Tensor:
    return packed(weight, ("onednn", factor), lambda: _pack(weight, factor))


@torch.inference_mode(False)
@torch.no_grad()
def _pack(weight: Tensor, factor: float) -> Tensor:
    library = _library()
    assert library is not None
    return library.pack(weight.detach() if factor == 1.0 else _scaled(weight, factor))


@torch.inference_mode(False)
@torch.no_grad()
def _scaled(tensor: Any, factor: float) -> Tensor:
    return (tensor.float() * factor).to(tensor.dtype)
