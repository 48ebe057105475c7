"""The fused forward of a block, and of its submodules, by the public operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import backends, choose, modes
from ..changes import is_plain
from ..ops.attention import attention
from ..ops.autograd import cast_together
from ..ops.conv_embedding import conv_embedding, needs_channels_first
from ..ops.conv_projection import conv_projection
from ..ops.conv_projection.modules import project
from ..ops.depthwise_conv_gelu import depthwise_conv_gelu
from ..ops.layer_norm_gelu import add_layer_norm, gelu, layer_norm, layer_norm_gelu
from ..ops.linear import linear, linear_add, linear_gelu
from ..ops.linear_int8 import layer_norm_quantize
from ..ops.linear_int8.modules import LinearInt8
from ..ops.mlp import mlp_add
from ..ops.reduction_linear import reduction_linear
from ..ops.rows import gather_rows, scatter_rows
from ..ops.token_selection import score_tokens
from ..ops.transformer_block.composed import matrix_of, squares_of
from ..records import ConvBatchNorm, GeluVariant, Linear, QuantizedRows, trains
from .blocks import BlockParts, gelu_variant, is_stochastic_depth
from .watching import is_plain_linear, is_watched


def normalize(norm: nn.LayerNorm, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes LayerNorm over the last dimension, PyTorch's or Microsoft's; rounds to ``dtype``, if given."""
    if type(norm) is not nn.LayerNorm:  # Microsoft's, which computes in float32 whatever comes
        out = layer_norm(x.float(), norm.weight, norm.bias, eps=norm.eps, dtype=dtype)
        return out if dtype is not None else out.type(x.dtype)
    weight = norm.weight
    if _dtypes_differ(x, weight):
        return norm(x)  # PyTorch knows which mixtures it takes
    return layer_norm(x, weight, norm.bias, eps=norm.eps, dtype=dtype)


def apply_layer_norm(module: Any, x: Tensor) -> Tensor:
    """Computes ``module(x)``: by the operator if it is a LayerNorm over channels that nobody watches."""
    is_plain_norm = type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.eps > 0
    return normalize(module, x) if is_plain_norm and not is_watched(module) else module(x)


def normalize_for_layers(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Computes LayerNorm for the layers after it, on a GPU in the dtype that autocast has for them."""
    return normalize(norm, x, modes.dtype_for_layers(x))


def pass_on_and_normalize(norm: nn.LayerNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the residual stream and its LayerNorm for layers; one kernel adds up their gradients."""
    if type(norm) is not nn.LayerNorm or not modes.wants_gradient(x) or _dtypes_differ(x, norm.weight):
        return x, normalize_for_layers(norm, x)
    return add_layer_norm(x, None, norm.weight, norm.bias, eps=norm.eps, dtype=modes.dtype_for_layers(x))


def add_and_normalize(norm: nn.LayerNorm, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of a branch and the residual stream, and the LayerNorm of this sum for layers."""
    weight, dtype = norm.weight, branch.dtype
    casts = type(norm) is not nn.LayerNorm and not dtype == stream.dtype == torch.float32
    mixed = dtype != stream.dtype or (weight is not None and weight.dtype != dtype)
    if casts or (mixed and (_dtypes_differ(branch, stream) or _dtypes_differ(branch, weight))):
        stream = branch + stream
        return stream, normalize_for_layers(norm, stream)
    for_layers = modes.dtype_for_layers(stream)
    return add_layer_norm(branch, stream, weight, norm.bias, eps=norm.eps, dtype=for_layers)


def add_and_normalize_for(
    layer: Any, norm: nn.LayerNorm, branch: Tensor, stream: Tensor
) -> tuple[Tensor, Any]:
    """Returns :func:`add_and_normalize`, with quantized rows if ``layer``, which reads them, is quantized."""
    if type(layer) is Linear or not _is_plain_int8(layer) or layer.bias is None or torch.jit.is_tracing():
        return add_and_normalize(norm, branch, stream)
    differ = _dtypes_differ(branch, stream) or _dtypes_differ(stream, norm.weight)
    if differ or modes.wants_gradient(branch, stream, norm.weight, norm.bias, layer.bias):
        return add_and_normalize(norm, branch, stream)
    stream = branch + stream
    return stream, layer_norm_quantize(stream, norm.weight, norm.bias, eps=norm.eps, dtype=layer.weight.dtype)


def _dtypes_differ(x: Tensor, other: Tensor | None) -> bool:
    return other is not None and other.dtype != x.dtype and not modes.autocast_enabled(x)


def apply_linear(module: Any, x: Tensor) -> Tensor:
    """Computes ``module(x)``: by the fastest primitive if it is a linear layer that nobody watches."""
    if type(module) is Linear:  # from prepared parts: a call less
        return linear(x, *module)
    return linear(x, module.weight, module.bias) if is_plain_linear(module) else module(x)


def _is_plain_int8(module: Any) -> bool:
    return type(module) is LinearInt8 and not is_watched(module)


def apply_linear_and_gelu(module: Any, x: Tensor | QuantizedRows, *, approximate: GeluVariant) -> Tensor:
    """Computes a linear layer and its GELU, of quantized ``x`` too after :func:`add_and_normalize_for`."""
    if type(module) is Linear or is_plain_linear(module):
        assert isinstance(x, Tensor)
        if _dtypes_differ(x, module.weight):
            return gelu(F.linear(x, module.weight, module.bias), approximate=approximate)
        return linear_gelu(x, module.weight, module.bias, approximate=approximate)
    if _is_plain_int8(module) and not modes.wants_gradient(x, module.bias):
        return module.product(x, approximate=approximate)
    return gelu(module(x), approximate=approximate)


def check_images(name: str, images: Any, projection: nn.Module) -> None:
    """Raises TypeError or ValueError unless what an embedding gets is images or maps (B, C, H, W)."""
    expected = f"(batch, {getattr(projection, 'in_channels', 'channels')}, height, width)"
    if not isinstance(images, Tensor):
        raise TypeError(f"{name}: got {type(images).__name__}, expected a tensor {expected}")
    if images.ndim != 4:
        raise ValueError(f"{name}: got shape {tuple(images.shape)}, expected {expected}")


def call(module: Any, x: Tensor, then: Any = None) -> Tensor:
    """Computes ``then(module(x))``; None, and dropout in evaluation that nobody watches, are not called."""
    for each in (module, then):
        if each is not None and (each.training or type(each) is not nn.Dropout or is_watched(each)):
            x = each(x)
    return x


def drop(dropout: Any, x: Tensor) -> Tensor:
    """Calls the dropout after a convolution, on tokens or a map, so that it drops what it drops upstream.

    Random numbers follow the order in memory; upstream's views of a batch of one have their channels first.
    """
    is_active = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
    if is_active and modes.is_known(x.shape[0] == 1):
        x = x.contiguous() if x.ndim == 4 else x.transpose(1, 2).contiguous().transpose(1, 2)
    return call(dropout, x)


def as_map(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Returns the map (B, C, H, W) of tokens, channels last in memory."""
    # In this order a batch of one has the strides by which PyTorch knows that channels are last.
    return tokens.unflatten(1, tuple(grid)).permute(0, 3, 1, 2)


def tokens_of(image: Tensor) -> Tensor:
    """Returns the tokens (B, T, C) of a map (B, C, H, W)."""
    return image.permute(0, 2, 3, 1).flatten(1, 2)


def _channels_last(projection: nn.Module, image: Tensor) -> Tensor:
    """Returns an image of 16 bits, or under autocast to these, on a GPU as tensor cores read it.

    With channels first, cuDNN has no kernel of tensor cores for three channels, and converts all gradients.
    """
    dtype = modes.autocast_dtype(image) or image.dtype
    if not image.is_cuda or dtype.itemsize != 2:
        return image
    if type(projection) is not nn.Conv2d or is_watched(projection):
        return image
    return image.to(dtype=dtype, memory_format=torch.channels_last)


def embed(projection: nn.Module, norm: nn.LayerNorm, image: Tensor, name: str = "pixel_values") -> Tensor:
    """Computes an embedding: images (B, C, H, W), which upstream calls ``name``, to maps (B, C', H', W')."""
    check_images(name, image, projection)
    if is_plain_embedding(projection) and _has_kernel_of_embeddings(image, projection, norm):
        tokens, *grid = embed_tokens(projection, norm, image)
        return as_map(tokens, grid)
    image = projection(_channels_last(projection, image))
    tokens = normalize(norm, image.flatten(2).transpose(1, 2))
    return tokens.transpose(1, 2).unflatten(2, image.shape[2:])


def embed_tokens(
    projection: Any,
    norm: Any,
    image: Tensor,
    class_token: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, int, int]:
    """Computes an embedding: images or maps (B, C, H, W) to normalized tokens (B, H'·W', C'), H' and W'.

    ``class_token`` and ``positions`` are those of ``conv_embedding``, for embeddings that it computes
    (:func:`is_one_embedding`).
    """
    check_images("pixel_values", image, projection)
    if needs_channels_first(image, getattr(projection, "weight", None)):
        image = image.contiguous()
    if is_one_embedding(projection, norm, image):
        grid = output_grid(image, projection)
        tensors = image, projection.weight, projection.bias, norm.weight, norm.bias
        settings = {"stride": projection.stride[0], "padding": projection.padding[0], "eps": norm.eps}
        return conv_embedding(*tensors, **settings, class_token=class_token, positions=positions), *grid
    image = projection(image)
    height, width = image.shape[2:]
    return normalize(norm, image.flatten(2).transpose(1, 2)), height, width


def is_one_embedding(projection: Any, norm: Any, image: Tensor, *others: Tensor | None) -> bool:
    """Returns whether ``conv_embedding`` computes an embedding of images, with ``others`` of one dtype."""
    if not is_plain_embedding(projection):
        return False
    tensors = projection.weight, norm.weight, *others
    return all(each is None or each.dtype == image.dtype for each in tensors)


def _has_kernel_of_embeddings(x: Tensor, conv: Any, norm: Any) -> bool:
    """Returns whether Triton's kernels may compute a convolution and its LayerNorm from x as it lies.

    They have no gradients. On a CPU reductions stay products of copies, unless Triton is asked for.
    """
    tensors = x, conv.weight, conv.bias, norm.weight, norm.bias
    if modes.wants_gradient(*tensors) or modes.autocast_enabled(x) or type(norm) is not nn.LayerNorm:
        return False
    if any(each is not None and each.dtype != x.dtype for each in tensors):
        return False
    return x.device.type != "cpu" or "triton" in backends.requested_backends()


def output_grid(image: Tensor, conv: Any) -> tuple[int, int]:
    """Returns the height and width of what a convolution, alike in both directions, makes of an image."""
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    height, width = image.shape[2:]
    return (height + 2 * padding - kernel) // stride + 1, (width + 2 * padding - kernel) // stride + 1


def is_plain_embedding(conv: Any) -> bool:
    """Returns whether ``conv_embedding`` computes a convolution, which nobody watches."""
    if type(conv) is not nn.Conv2d or not is_plain(conv.weight) or is_watched(conv):
        return False
    if conv.padding_mode != "zeros" or conv.groups != 1:
        return False
    sizes = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return conv.dilation[0] == 1 and all(not isinstance(n, str) and n[0] == n[1] for n in sizes)


# A block --------------------------------------------------------------------------------------------------


def forward_block(
    parts: BlockParts,
    x: Tensor,
    grid: tuple[int, int],
    rows: Tensor | None = None,
    *,
    with_scores: bool = False,
    rows_only: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Runs a block by the operators, with the gradients, BatchNorm statistics and dropout of its modules.

    Args:
        parts: Its modules. Linear layers, dropout and stochastic depth are called if they are watched.
        x: Tokens (B, T, C).
        grid: (H, W) of the spatial tokens.
        rows: (B, K), the tokens to compute; None for all. The others stay as they are.
        with_scores: Also score the tokens, by ``parts.pool``.
        rows_only: Nobody reads other tokens than ``rows`` (B, 1), the first ones. Then each token of the
            result is a view of its image's first one.

    Returns:
        Tokens like ``x``, and their scores (B, H·W) or None.
    """
    parts = _narrowed(parts, modes.dtype_for_layers(x), rows)
    x, y = pass_on_and_normalize(parts.norm1, x)
    heads, scores = _attend(parts, y, grid, rows, with_scores, rows_only)
    norm, proj = parts.norm2, _End(parts.proj, parts.drops[0], parts.layer_scales[0])
    stream = None if rows is not None else proj.with_residual(parts.drop_path, heads, x)
    if stream is not None:
        stream, y = pass_on_and_normalize(norm, stream)
    else:
        branch = call(proj.scale, call(proj.drop, apply_linear(proj.layer, heads)), parts.drop_path)
        if rows is None:
            stream, y = add_and_normalize_for(parts.fc1, norm, branch, x)
        elif rows_only or _dtypes_differ(x, branch) or _dtypes_differ(x, norm.weight):
            stream, y = add_and_normalize(norm, branch, _chosen(x, rows, rows_only))
        else:
            stream, y = add_layer_norm(gather_rows(x, rows), branch, norm.weight, norm.bias, eps=norm.eps)
    fc2 = _End(parts.fc2, parts.drops[2], parts.layer_scales[1])
    if rows is None and (out := _mlp_with_residual(parts, fc2, y, stream)) is not None:
        return out, scores
    hidden = _activate(parts, y, grid)
    if rows is None or rows_only:
        out = fc2.with_residual(parts.drop_path, hidden, stream, drops_sum=parts.drops_sum, always=True)
        if out is not None:
            return out.expand_as(x) if rows_only else out, scores
    branch = call(fc2.drop, apply_linear(fc2.layer, hidden))
    if not parts.drops_sum:
        branch = call(fc2.scale, branch, parts.drop_path)
    if rows is None:
        out = stream + branch
    else:
        out = (stream + branch).expand_as(x) if rows_only else scatter_rows(x, rows, stream, branch)
    return call(parts.drop_path, out) if parts.drops_sum else out, scores


def _narrowed(parts: BlockParts, dtype: torch.dtype | None, rows: Tensor | None) -> BlockParts:
    """Returns parts with the weights of their layers in autocast's dtype, for gradients.

    Autocast would start a kernel for each of them, and for each of their gradients. Layers of the same tokens
    become one (:func:`_projected`).
    """
    if dtype is None or not torch.is_grad_enabled():
        return parts
    groups = _layers_together(parts, rows)  # modules where they must be called
    stacks = [list(each) for group in groups if type(group[0]) is Linear for each in zip(*group, strict=True)]
    stacks += [[conv.weight] for conv in parts.convs if isinstance(conv, ConvBatchNorm)]
    reduction, _ = parts.reduction or (None, None)
    convs_of_maps = [conv for conv in (reduction, parts.mix) if conv is not None]
    stacks += [[each] for conv in convs_of_maps for each in (conv.weight, conv.bias)]
    stacks = [stack for stack in stacks if stack[0] is not None]
    tensors = [each for stack in stacks for each in stack]
    if not all(type(each) is nn.Parameter and each.dtype == torch.float32 for each in tensors) or not tensors:
        return parts
    made = iter(cast_together(tensors, dtype, [len(stack) for stack in stacks]))
    *linears, proj, fc1, fc2 = (
        Linear(next(made), None if group[0].bias is None else next(made))
        if type(group[0]) is Linear
        else group[0]
        for group in groups
    )
    convs = tuple(
        conv._replace(weight=next(made)) if isinstance(conv, ConvBatchNorm) else conv for conv in parts.convs
    )
    narrow = parts._replace(linears=tuple(linears), proj=proj, fc1=fc1, fc2=fc2, convs=convs)
    if parts.reduction is not None:
        conv, norm = parts.reduction
        narrow = narrow._replace(reduction=(_narrow_conv(conv, made), norm))
    return narrow if parts.mix is None else narrow._replace(mix=_narrow_conv(parts.mix, made))


def _narrow_conv(conv: nn.Conv2d, made: Iterator[Tensor]) -> Any:
    return Linear(next(made), None if conv.bias is None else next(made))


def _layers_together(parts: BlockParts, rows: Tensor | None) -> list[list[Any]]:
    """Returns the linear layers of a block; those of Q, K and V that can be one product in one list."""
    q, k, v, *others = parts.layers()
    groups = [[q], [k], [v]]
    has_fewer_keys = parts.reduction is not None or parts.pooling is not None
    same = [k, v] if has_fewer_keys else [q, k, v]
    are_plain = all(type(each) is Linear for each in same)
    if not parts.branches and rows is None and are_plain and len({each.bias is None for each in same}) == 1:
        groups = [[q], same] if has_fewer_keys else [same]
    return [*groups, *([each] for each in others)]


class _End(NamedTuple):
    """The end of a residual branch: a linear layer, dropout and a layer scale."""

    layer: Any
    drop: Any
    scale: Any

    def with_residual(
        self, drop_path: Any, x: Tensor, stream: Tensor, *, drops_sum: bool = False, always: bool = False
    ) -> Tensor | None:
        """Returns the stream plus the layer of x with stochastic depth, in one operator.

        It is None where modules must be called for it, and, unless ``always``, where no image is dropped:
        there the sum is part of the LayerNorm.
        """
        rate = _drop_rate(drop_path)
        if rate is None or (rate == 0 and not always) or not self.is_one_with("linear_add", x, stream):
            return None
        factors = _factors_of_images(drop_path, rate, x, stream, drops_sum=drops_sum)
        return linear_add(x, self.layer.weight, self.layer.bias, stream, scale=factors, scales_sum=drops_sum)

    def is_one_with(self, operator: str, x: Tensor, stream: Tensor) -> bool:
        """Returns whether an operator may compute the end of the branch of x with it."""
        layer = self.layer
        if self.scale is not None or not _is_idle(self.drop):
            return False
        if not (type(layer) is Linear or is_plain_linear(layer)):
            return False
        if not choose.may_be_ours(operator, x.device.type):
            return False
        return not _dtypes_differ(x, stream) and not _dtypes_differ(x, layer.weight)


def _mlp_with_residual(parts: BlockParts, fc2: _End, y: Any, stream: Tensor) -> Tensor | None:
    """Returns the stream plus the MLP of y in one operator with gradients; None where it must be several."""
    fc1 = parts.fc1
    if parts.mix is not None or not isinstance(y, Tensor) or not _is_idle(parts.drops[1]):
        return None
    if not modes.wants_gradient(y, stream):  # it saves what the backward computes again
        return None
    if not (type(fc1) is Linear or is_plain_linear(fc1)) or _dtypes_differ(y, fc1.weight):
        return None
    rate = _drop_rate(parts.drop_path)
    if rate is None or not fc2.is_one_with("mlp_add", y, stream):
        return None
    factors = _factors_of_images(parts.drop_path, rate, y, stream, drops_sum=parts.drops_sum)
    layers = fc1.weight, fc1.bias, fc2.layer.weight, fc2.layer.bias
    settings: dict[str, Any] = {"scale": factors, "scales_sum": parts.drops_sum}
    return mlp_add(y, *layers, stream, approximate=parts.gelu, **settings)


def _is_idle(drop: Any) -> bool:
    """Returns whether a dropout is none or drops nothing now, and nobody watches it."""
    if drop is None:
        return True
    if type(drop) not in (nn.Dropout, nn.Identity) or is_watched(drop):
        return False
    return type(drop) is nn.Identity or not drop.training or drop.p == 0


def _drop_rate(drop_path: Any) -> float | None:
    """Returns the rate of stochastic depth now; None if the module must be called."""
    if drop_path is None:
        return 0.0
    if is_watched(drop_path):
        return None
    if type(drop_path) is nn.Identity:
        return 0.0
    known = vars(drop_path)
    rate = known.get("drop_prob", known.get("rate"))
    if not is_stochastic_depth(drop_path) or not isinstance(rate, float) or rate >= 1:
        return None
    return rate if drop_path.training else 0.0


def _factors_of_images(
    drop_path: Any, rate: float, x: Tensor, stream: Tensor, *, drops_sum: bool
) -> Tensor | None:
    """Returns the factors (B,) of stochastic depth; None if no image is dropped.

    They are made of the random numbers that the module draws for the branch of x, or for its sum.
    """
    if rate == 0:
        return None
    branch = modes.autocast_dtype(x) or x.dtype
    dtype = torch.promote_types(branch, stream.dtype) if drops_sum else branch
    home = type(drop_path).__module__
    if home.startswith("transformers."):  # what it draws, without its other operators
        kept = torch.rand(len(x), dtype=dtype, device=x.device).add_(1 - rate) >= 1
    elif home == "cvt.model":
        kept = torch.empty(len(x), dtype=dtype, device=x.device).bernoulli_(1 - rate)
    else:
        kept = drop_path(x.new_ones(x.shape[0], *(1,) * (x.ndim - 1), dtype=dtype)).view(-1) != 0
    factor = 1 / (1 - rate) if vars(drop_path).get("scale_by_keep", True) else 1.0
    return kept.to(torch.float64 if dtype == torch.float64 else torch.float32).mul_(factor)


def _attend(
    parts: BlockParts,
    y: Tensor,
    grid: tuple[int, int],
    rows: Tensor | None,
    with_scores: bool,
    first_only: bool,
) -> tuple[Tensor, Tensor | None]:
    projected = _reduced_heads(parts, y, grid) if rows is None else None
    if projected is None:
        tokens = _tokens_of_heads(parts, y, grid)
        if rows is not None:
            tokens[0] = _chosen(tokens[0], rows, first_only).contiguous()  # for a product with its bias
        projected = _projected(parts.linears, tokens)
    q, k, v = (each.unflatten(2, (parts.num_heads, -1)) for each in projected)
    dropout_p = parts.dropout_p() if parts.drops_probabilities else 0.0
    position = None if parts.position_for is None else parts.position_for(grid, rows)
    heads_of_all = attention(q, k, v, scale=parts.scale, dropout_p=dropout_p, position=position).flatten(2)
    if not with_scores:
        return heads_of_all, None
    stride = parts.pairs()[2][0].stride[0]
    settings: dict[str, Any] = {"stride": stride, "scale": parts.scale, "pool": parts.pool, "rows": rows}
    return heads_of_all, score_tokens(q, k, grid, **settings)


def _chosen(tokens: Tensor, rows: Tensor, first_only: bool) -> Tensor:
    """Returns the tokens at ``rows``, which may be known to be the first ones."""
    return tokens[:, :1] if first_only else gather_rows(tokens, rows)


def _reduced_heads(parts: BlockParts, y: Tensor, grid: tuple[int, int]) -> list[Tensor] | None:
    """Returns Q, K and V where reduction, K and V may be one operator; else None."""
    q, *kept = parts.linears
    if parts.reduction is None or len(kept) != 2 or not all(type(each) is Linear for each in kept):
        return None
    tensors = [tensor for layer in kept for tensor in layer if tensor is not None]
    if modes.wants_gradient(*tensors) or any(tensor.dtype != y.dtype for tensor in tensors):
        return None
    if not _has_kernel_of_embeddings(y, *parts.reduction):
        return None
    conv, norm = parts.reduction
    vectors = conv.bias, norm.weight, norm.bias
    return [apply_linear(q, y), *reduction_linear(y, grid, conv.weight, *vectors, kept, eps=norm.eps)]


def _projected(linears: Sequence[Any], tokens: Sequence[Tensor]) -> list[Tensor]:
    """Returns Q, K and V; the last of fewer than three layers is several, one below another."""
    made = [apply_linear(layer, each) for layer, each in zip(linears, tokens, strict=False)]
    return made if len(made) == 3 else [*made[:-1], *made[-1].chunk(4 - len(made), dim=2)]


def _tokens_of_heads(parts: BlockParts, y: Tensor, grid: tuple[int, int]) -> list[Tensor]:
    if parts.branches:
        modes = set(map(trains, parts.norms))
        if len(modes) == 1:
            return list(conv_projection(y, grid, parts.convs, training=modes.pop()))
        return list(project(y, grid, parts.branches))
    kept = y
    if parts.reduction is not None and _has_kernel_of_embeddings(y, *parts.reduction):
        conv, norm = parts.reduction
        settings: dict[str, Any] = {"stride": conv.weight.shape[-1], "padding": 0, "eps": norm.eps}
        image = as_map(y, grid)
        kept = conv_embedding(image, conv.weight, conv.bias, norm.weight, norm.bias, **settings)
    elif parts.reduction is not None:
        conv, norm = parts.reduction
        squares = squares_of(y, grid, conv.weight.shape[-1])
        kept = normalize_for_layers(norm, linear(squares, matrix_of(conv.weight), conv.bias))
    elif parts.pooling is not None:
        pool, conv, norm, act = parts.pooling
        pooled = pool(as_map(y, grid)).permute(0, 2, 3, 1).flatten(1, 2)
        kept = linear(pooled, conv.weight.flatten(1), conv.bias)
        settings = {"approximate": gelu_variant(act)}
        if _dtypes_differ(kept, norm.weight):
            kept = gelu(norm(kept), **settings)
        else:
            kept = layer_norm_gelu(kept, norm.weight, norm.bias, eps=norm.eps, **settings)
    return [y, kept, kept]


def _activate(parts: BlockParts, y: Any, grid: tuple[int, int]) -> Tensor:
    mix, approximate = parts.mix, parts.gelu
    if mix is None:
        return call(parts.drops[1], apply_linear_and_gelu(parts.fc1, y, approximate=approximate))
    hidden = call(parts.relu, apply_linear(parts.fc1, y))
    hidden = depthwise_conv_gelu(hidden, grid, mix.weight, mix.bias, approximate=approximate)
    return drop(parts.drops[1], hidden)
