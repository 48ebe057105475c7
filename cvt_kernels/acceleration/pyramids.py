"""The blocks of SegFormer, GLPN, PVT and PVT v2 of transformers, in models/ of these names.

Before and after transformers 5 classes of SegFormer differ. GLPN has copies of the older ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import dispatch, modes
from ..ops import weight_cache
from ..ops.linear import linear
from ..ops.segmentation_head import segmentation_head
from ..records import written_of
from . import depth
from .blocks import (
    GELU_VARIANTS,
    HUGGING_FACE,
    LAYER_NORMS,
    BlockEntry,
    BlockParts,
    BypassedParts,
    Kinds,
    RecordedEntry,
    StageEntry,
    StageParts,
    Unsupported,
    class_name,
    gelu_variant,
    named,
    parts_of_norm,
    recognize_by_name,
    why_norms_unsupported,
)
from .encoders import encode_glpn, encode_pvt, encode_pvt_v2
from .fused import as_map, drop, embed_tokens, normalize
from .watching import is_watched

#: The 1×1 convolutions whose work is done without calling them.
POINTWISE_LAYERS = "linear_fuse", "classifier"


def decode(head: Any, projections: Any, states: Sequence[Tensor]) -> Any:
    """Computes the logits (B, labels, H, W) of the maps (B, C, H, W) of all stages, the largest first."""
    if len(states) != len(projections) or any(state.ndim != 4 for state in states):
        return NotImplemented
    linears = [projection.proj for projection in projections]
    folds = _can_fold(head.batch_norm)
    if folds and _is_served(head, linears, states):
        return _serve(head, linears, states)
    parts, bias = _parts_of_fusion(head, linears, folds)
    size = states[0].shape[2:]
    total: Any = None
    # The largest is last, since its product can be added to the others in place.
    for state, layer, part in reversed(list(zip(states, linears, parts, strict=True))):
        tokens = _tokens_of(state)
        if modes.is_known(state.shape[2] == size[0]) and modes.is_known(state.shape[3] == size[1]):
            total = _through_both(tokens, layer.weight, part, bias, total)
        else:
            image = as_map(_through_both(tokens, layer.weight, part, bias), state.shape[2:])
            # Autocast would write float32. The fusion's result has 16 bits upstream too.
            with modes.without_autocast(image):
                image = F.interpolate(image, size=size, mode="bilinear", align_corners=False)
            total = _tokens_of(image) if total is None else _add(total, _tokens_of(image))
        bias = None  # of the first, since resizing keeps constants
    return _classify(head, as_map(total, size), folds)


def _is_served(head: Any, linears: list[Any], states: Sequence[Tensor]) -> bool:
    """Returns whether one operator serves the call: without gradients, and with nothing watched."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or modes.is_transformed():
        return False
    activation, dropout, layer, first = head.activation, head.dropout, head.classifier, states[0]
    plain = type(activation) is nn.ReLU and type(dropout) is nn.Dropout and not dropout.training
    if not plain or is_watched(activation) or is_watched(dropout):
        return False
    tensors = *states, *_tensors_of(head, linears), layer.weight, layer.bias
    if {tensor.dtype for tensor in tensors if tensor is not None} != {first.dtype}:
        return False
    ours = dispatch.may_be_ours("segmentation_head", first.device.type, gradient=False)
    return ours and weight_cache.why_unpackable(*tensors) is None


def _serve(head: Any, linears: list[Any], states: Sequence[Tensor]) -> Tensor:
    """Computes the logits by one operator, with layers that are multiplied once and kept."""
    fusion, *others = _tensors_of(head, linears)
    fold = functools.partial(_fold, head, linears)
    key = "decode head", head.batch_norm.eps
    others += written_of(head.batch_norm)
    (weight, *weights), bias = weight_cache.packed(fusion, key, fold, others)
    pairs, layer = tuple(zip(states[1:], weights, strict=True)), head.classifier
    logits = segmentation_head(states[0], weight, bias, pairs, layer.weight.flatten(1), layer.bias)
    return as_map(logits, states[0].shape[2:])


@torch.inference_mode(False)  # copies made in inference mode could not be used outside it
@torch.no_grad()
def _fold(head: Any, linears: list[Any]) -> tuple[list[Tensor], Tensor | None]:
    """Returns the weight for each map that all layers up to the sum make, and its bias."""
    parts, bias = _parts_of_fusion(head, linears, True)
    dtype = head.linear_fuse.weight.dtype
    products = (part @ layer.weight.to(part.dtype) for layer, part in zip(linears, parts, strict=True))
    return [product.to(dtype) for product in products], None if bias is None else bias.to(dtype)


def _tensors_of(head: Any, linears: list[Any]) -> list[Any]:
    """Returns the parameters that are multiplied, the fusion's first."""
    norm = head.batch_norm
    own = head.linear_fuse.weight, norm.running_mean, norm.running_var, norm.weight, norm.bias
    return [*own, *(tensor for layer in linears for tensor in (layer.weight, layer.bias))]


def _classify(head: Any, image: Tensor, folds: bool) -> Tensor:
    """Computes what follows the fusion: BatchNorm unless it is in there, activation, dropout, classifier."""
    if not folds:
        # For a batch of one upstream's map has its channels first, in which order PyTorch's sums over pixels
        # have smaller errors.
        image = head.batch_norm(image.contiguous() if modes.is_known(image.shape[0] == 1) else image)
    activation = head.activation
    # A map that BatchNorm has returned may be kept by its hooks.
    in_place = folds and type(activation) is nn.ReLU and not is_watched(activation)
    image = image.relu_() if in_place and not modes.wants_gradient(image) else activation(image)
    layer = head.classifier
    logits = linear(_tokens_of(drop(head.dropout, image)), layer.weight.flatten(1), layer.bias)
    return as_map(logits, image.shape[2:])


def _can_fold(norm: Any) -> bool:
    """Returns whether a BatchNorm is only a factor and a summand of every channel now."""
    if type(norm) is not nn.BatchNorm2d or norm.training or is_watched(norm):
        return False
    return norm.running_mean is not None and norm.running_var is not None


def _parts_of_fusion(head: Any, linears: list[Any], folds: bool) -> tuple[list[Tensor], Tensor | None]:
    """Returns the part (D, D) of the fusion for each stage, and the bias of the sum, in float32 at least.

    With ``folds`` the BatchNorm after it is in them.
    """
    weight, norm = head.linear_fuse.weight, head.batch_norm
    dtype = torch.promote_types(weight.dtype, torch.float32)
    with modes.without_autocast(weight):
        fusion, shift = weight.flatten(1).to(dtype), None
        if folds:
            scale = (norm.running_var.to(dtype) + norm.eps).rsqrt()
            scale = scale if norm.weight is None else scale * norm.weight.to(dtype)
            fusion, shift = fusion * scale[:, None], -scale * norm.running_mean.to(dtype)
            shift = shift if norm.bias is None else shift + norm.bias.to(dtype)
        # Upstream concatenates the last stage first.
        parts = list(fusion.chunk(len(linears), dim=1))[::-1]
        for layer, part in zip(linears, parts, strict=True):
            if layer.bias is not None:
                bias = part @ layer.bias.to(dtype)
                shift = bias if shift is None else shift + bias
    return parts, shift


def _through_both(
    tokens: Tensor, weight: Tensor, part: Tensor, bias: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """Adds a projection and a part of the fusion to ``total``: as one layer, or as two if that is less.

    One layer is right for sizes that are symbolic.
    """
    dtype = weight.dtype
    if not modes.is_known(tokens.shape[0] * tokens.shape[1] <= weight.shape[1]):
        with modes.without_autocast(tokens):
            part = part @ weight.to(part.dtype)
    else:
        tokens = linear(tokens, weight)
    part, bias = part.to(dtype), None if bias is None else bias.to(dtype)
    if bias is None and total is not None and _can_multiply_into(total, tokens, part):
        return total.flatten(0, 1).addmm_(tokens.flatten(0, 1), part.t()).view_as(total)
    tokens = linear(tokens, part, bias)
    return tokens if total is None else _add(total, tokens)


def _can_multiply_into(total: Tensor, tokens: Tensor, part: Tensor) -> bool:
    same = total.dtype == tokens.dtype == part.dtype and not modes.autocast_enabled(total)
    return same and total.is_contiguous() and modes.may_change(total, tokens, part)


def _add(total: Tensor, tokens: Tensor) -> Tensor:
    # Of the first nobody else has a reference.
    return total.add_(tokens) if modes.may_change(total, tokens) else total + tokens


def _tokens_of(image: Tensor) -> Tensor:
    return image.permute(0, 2, 3, 1).flatten(1, 2)


# Reasons --------------------------------------------------------------------------------------------------


def why_head_unsupported(head: Any, projections: Any) -> str | None:
    """Returns why a decode head is not the sum that is computed here, or None."""
    for name in POINTWISE_LAYERS:
        conv = head._modules[name]
        geometry = conv.kernel_size, conv.stride, conv.padding, conv.groups
        if geometry != ((1, 1), (1, 1), (0, 0), 1):
            return f"{name} is not a 1×1 convolution"
    if head.linear_fuse.bias is not None:
        return "linear_fuse has a bias"
    if type(projections) is not nn.ModuleList:
        return f"the projections are a {class_name(type(projections))}, expected a ModuleList"
    return None


# Blocks ---------------------------------------------------------------------------------------------------


def _segformer_block(self: Any) -> BlockParts:
    """Returns the parts of a ``SegformerLayer`` of transformers 5.

    Raises:
        Unsupported: Attention is another implementation's.
    """
    attention, mlp = self.attention, self.mlp
    kind = attention.config._attn_implementation
    if kind not in ("sdpa", "cvt_kernels"):
        raise Unsupported(f"attention is that of transformers' {kind!r}, expected 'sdpa'")
    if attention.is_causal:
        raise Unsupported("attention is causal")
    reduction = attention.sequence_reduction if attention.sequence_reduction_ratio > 1 else None
    return BlockParts(
        norm1=self.layernorm_before,
        linears=(attention.q_proj, attention.k_proj, attention.v_proj),
        reduction=None if reduction is None else (reduction.sequence_reduction, reduction.layer_norm),
        num_heads=attention.num_attention_heads,
        scale=attention.scaling,
        attention_drop=attention,
        proj=attention.o_proj,
        norm2=self.layernorm_after,
        fc1=mlp.fc1,
        mix=mlp.dwconv.dwconv,
        activation=mlp.activation_fn,
        approximate=gelu_variant(mlp.activation_fn),
        fc2=mlp.fc2,
        drops=(self.hidden_dropout, mlp.dropout, mlp.dropout),
        drop_path=self.drop_path,
    )


def _block_of_4(self: Any) -> BlockParts:
    """Returns the parts of a layer of SegFormer in transformers 4, or of GLPN."""
    attention, mlp = self.attention.self, self.mlp
    return BlockParts(
        **_common(self, attention, attention.dropout),
        reduction=(attention.sr, attention.layer_norm) if attention.sr_ratio > 1 else None,
        proj=self.attention.output.dense,
        mix=mlp.dwconv.dwconv,
        drops=(self.attention.output.dropout, mlp.dropout, mlp.dropout),
    )


def _pvt_block(self: Any) -> BlockParts:
    attention, mlp = self.attention.self, self.mlp
    reduces = attention.sequences_reduction_ratio > 1
    return BlockParts(
        **_common(self, attention, attention.dropout),
        reduction=(attention.sequence_reduction, attention.layer_norm) if reduces else None,
        proj=self.attention.output.dense,
        drops=(self.attention.output.dropout, mlp.dropout, mlp.dropout),
    )


def _pvt_v2_block(self: Any) -> BlockParts:
    attention, mlp = self.attention, self.mlp
    pooling = reduction = None
    if attention.linear_attention:
        pooling = attention.pool, attention.spatial_reduction, attention.layer_norm, attention.act
    elif attention.spatial_reduction_ratio > 1:
        reduction = attention.spatial_reduction, attention.layer_norm
    return BlockParts(
        **_common(self, attention, attention.attn_drop),
        reduction=reduction,
        pooling=pooling,
        proj=attention.proj,
        relu=mlp.relu,
        mix=mlp.dwconv.dwconv,
        drops=(attention.proj_drop, mlp.dropout, mlp.dropout),
    )


def _common(self: Any, attention: Any, attention_drop: nn.Module) -> dict[str, Any]:
    """Returns the parts that have the same names in all but SegFormer's blocks of transformers 5."""
    mlp = self.mlp
    return {
        "norm1": self.layer_norm_1,
        "linears": (attention.query, attention.key, attention.value),
        "num_heads": attention.num_attention_heads,
        "scale": attention.attention_head_size**-0.5,
        "attention_drop": attention_drop,
        "norm2": self.layer_norm_2,
        "fc1": mlp.dense1,
        "activation": mlp.intermediate_act_fn,
        "approximate": gelu_variant(mlp.intermediate_act_fn),
        "fc2": mlp.dense2,
        "drop_path": self.drop_path,
    }


#: The ends of the names of classes within a block.
_ENDS = (
    *("Attention", "EfficientSelfAttention", "SelfAttention", "SelfOutput", "SequenceReduction"),
    *("ConvFeedForwardNetwork", "FFN", "MixFFN", "MixMLP", "DWConv", "DepthWiseConv", "DropPath"),
)
#: The paths of the linear layers in all blocks but SegFormer's of transformers 5 and PVT v2's.
_LAYERS = (
    *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    *("mlp.dense1", "mlp.dense2"),
)
_LAYERS_OF_5 = (*(f"attention.{letter}_proj" for letter in "qkvo"), "mlp.fc1", "mlp.fc2")
_LAYERS_OF_V2 = (
    *(f"attention.{word}" for word in ("query", "key", "value", "proj")),
    *("mlp.dense1", "mlp.dense2"),
)


def _block_entry(
    name: str,
    parts: Callable[[Any], BlockParts],
    *,
    norms: tuple[str, str] = ("layer_norm_1", "layer_norm_2"),
    last_argument: str = "output_attentions",
    children: tuple[str, ...] = (),
    layers: tuple[str, ...] = _LAYERS,
) -> BlockEntry:
    """Returns the entry of a class of blocks, by its name, its parts and what not all have in common."""
    beginning = name.removesuffix("Layer").removesuffix("Block")
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("hidden_states", "height", "width", last_argument),
        children=frozenset(("attention", "drop_path", "mlp", *norms, *children)),
        classes=frozenset(("GlpnDropPath", *GELU_VARIANTS, *(f"{beginning}{end}" for end in _ENDS))),
        layers=layers,
        parts=parts,
        variant=norms[0],
        is_layer=True,
    )


# Embeddings -----------------------------------------------------------------------------------------------


def _embeddings_entry(name: str) -> BlockEntry:
    """Returns the entry of a class of overlapping patch embeddings."""
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("pixel_values",),
        children=frozenset(("proj", "layer_norm")),
        layers=("proj",),
        forward=lambda self, pixel_values: embed_tokens(self.proj, self.layer_norm, pixel_values),
        parts=lambda self: parts_of_norm(self.layer_norm),
    )


def _pvt_embeddings(self: Any, pixel_values: Tensor) -> Any:
    if pixel_values.ndim == 4 and pixel_values.shape[1] != self.num_channels:
        return NotImplemented  # upstream has an error for it
    tokens, height, width = embed_tokens(self.projection, self.layer_norm, pixel_values)
    positions = self.position_embeddings
    if self.cls_token is not None:
        tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), dim=1)
    if positions.shape[1] != tokens.shape[1]:
        raise _no_positions(self, pixel_values, (height, width))
    # Upstream interpolates them from this grid to this grid, which changes nothing.
    return self.dropout(tokens + positions), height, width


def _no_positions(embeddings: Any, pixel_values: Tensor, grid: tuple[int, int]) -> ValueError:
    """Returns the error for images of another size than a PVT has positions for."""
    size = embeddings.image_size
    of_model = tuple(pixels // patch for pixels, patch in zip(size, embeddings.patch_size, strict=True))
    got, patches, expected, positions = (
        "×".join(map(str, pair)) for pair in (pixel_values.shape[2:], grid, size, of_model)
    )
    return ValueError(
        f"pixel_values: got {got} pixels, a grid of {patches} patches, expected {expected} pixels, a grid of "
        f"{positions}: this PVT has position embeddings for images of its config's image_size alone"
    )


# Stages of SegFormer and PVT v2, and SegFormer's head -----------------------------------------------------


def _stage(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    tokens, height, width = self.patch_embeddings(hidden_states)
    for block in self.blocks:
        tokens = block(tokens, height, width, **kwargs)
    tokens = normalize(self.layer_norm, tokens)
    # Upstream copies the map so that channels are first in memory, which nothing after it needs.
    return as_map(tokens, (height, width)) if self.reshape else tokens


def _stage_of_pvt_v2(self: Any, hidden_states: Tensor, output_attentions: Any) -> Any:
    tokens, height, width = self.patch_embedding(hidden_states)
    maps: tuple[Any, ...] = ()
    for block in self.blocks:
        tokens, *others = block(tokens, height, width, output_attentions)
        maps += tuple(others)
    tokens = normalize(self.layer_norm, tokens)
    return ((tokens, maps) if output_attentions else (tokens,)), height, width


def _head_entry(projections: str, *arguments: str) -> BlockEntry:
    """Returns the entry of the decode head whose linear layers are called ``projections``."""
    others = ("linear_fuse", "batch_norm", "activation", "dropout", "classifier")

    def parts(head: Any) -> BypassedParts:
        layers: Any = head._modules[projections]
        bypassed: list[tuple[Any, Kinds]] = [(layers, (nn.ModuleList,))]
        bypassed += [(getattr(head, name), (nn.Conv2d,)) for name in POINTWISE_LAYERS]
        for layer in layers:
            bypassed += [(layer, ("SegformerMLP",)), (layer.proj, (nn.Linear,))]
        return BypassedParts(bypassed, why_head_unsupported(head, layers))

    return BlockEntry(
        upstream=HUGGING_FACE,
        name="SegformerDecodeHead",
        arguments=("encoder_hidden_states", *arguments),
        children=frozenset((projections, *others)),
        forward=lambda self, states, **_: decode(self, self._modules[projections], states),
        parts=parts,
        variant=projections,
    )


# Encoders -------------------------------------------------------------------------------------------------


def _encoder_entry(
    name: str, forward: Callable[..., Any], parts: Callable[[Any], BypassedParts], *children: str
) -> BlockEntry:
    """Returns the entry of a class of encoders, by its forward, the LayerNorms in it and its submodules."""
    return BlockEntry(
        upstream=HUGGING_FACE,
        name=name,
        arguments=("pixel_values", "output_attentions", "output_hidden_states", "return_dict"),
        children=frozenset(children),
        forward=forward,
        parts=parts,
    )


def _norms_of_glpn(self: Any) -> BypassedParts:
    norms = self.layer_norm
    return BypassedParts([(norm, LAYER_NORMS) for norm in norms], why_norms_unsupported(*norms))


# Recognition ----------------------------------------------------------------------------------------------

_NAMED = named(
    _block_entry(
        "SegformerLayer",
        _segformer_block,
        norms=("layernorm_before", "layernorm_after"),
        last_argument="kwargs",
        children=("hidden_dropout",),
        layers=_LAYERS_OF_5,
    ),
    BlockEntry(
        upstream=HUGGING_FACE,
        name="SegformerStage",
        arguments=("hidden_states", "kwargs"),
        children=frozenset(("patch_embeddings", "blocks", "layer_norm")),
        forward=_stage,
        parts=lambda self: parts_of_norm(self.layer_norm),
    ),
    _head_entry("linear_projections", "kwargs"),
    _head_entry("linear_c"),
    _embeddings_entry("SegformerOverlapPatchEmbeddings"),
    _block_entry("SegformerLayer", _block_of_4),
    _embeddings_entry("GLPNOverlapPatchEmbeddings"),
    _block_entry("GLPNLayer", _block_of_4),
    *depth.ENTRIES,
    BlockEntry(
        upstream=HUGGING_FACE,
        name="PvtPatchEmbeddings",
        arguments=("pixel_values",),
        children=frozenset(("position_embeddings", "cls_token", "projection", "layer_norm", "dropout")),
        layers=("projection",),
        forward=_pvt_embeddings,
        parts=lambda self: parts_of_norm(self.layer_norm),
    ),
    _block_entry("PvtLayer", _pvt_block),
    _embeddings_entry("PvtV2OverlapPatchEmbeddings"),
    _block_entry("PvtV2BlockLayer", _pvt_v2_block, layers=_LAYERS_OF_V2),
    BlockEntry(
        upstream=HUGGING_FACE,
        name="PvtV2EncoderLayer",
        arguments=("hidden_states", "output_attentions"),
        children=frozenset(("patch_embedding", "blocks", "layer_norm")),
        forward=_stage_of_pvt_v2,
        parts=lambda self: parts_of_norm(self.layer_norm),
    ),
    _encoder_entry("GLPNEncoder", encode_glpn, _norms_of_glpn, "patch_embeddings", "block", "layer_norm"),
    _encoder_entry(
        "PvtEncoder",
        encode_pvt,
        lambda self: parts_of_norm(self.layer_norm),
        *("patch_embeddings", "block", "layer_norm"),
    ),
    _encoder_entry("PvtV2Encoder", encode_pvt_v2, lambda self: BypassedParts([]), "layers"),
)
#: Every entry.
ENTRIES = tuple(entry for variants in _NAMED.values() for entry in variants)


def _stage_entry(
    name: str,
    block: str,
    parts: Callable[[Any], BlockParts],
    result: Callable[[Any, Tensor, tuple[int, int]], Any],
    *,
    embedding: str,
    last_argument: str,
    tokens: Callable[[Any], Tensor],
    others: tuple[Any, ...] = (),
) -> StageEntry:
    """Returns the entry of a class of stages, by the class and the parts of its layers, and what differs."""

    def parts_of_stage(self: Any) -> StageParts:
        conv, _ = stem(self)
        norm = self._modules[embedding].layer_norm
        return StageParts(conv, None, norm, None, [parts(each) for each in self.blocks], self.layer_norm)

    def stem(self: Any) -> tuple[nn.Conv2d, None]:
        return self._modules[embedding].proj, None

    children = frozenset((embedding, "blocks", "layer_norm"))
    entry = next(each for each in _NAMED[block] if parts is each.parts)
    embeddings = f"{block.removesuffix('Layer').removesuffix('Block')}OverlapPatchEmbeddings"
    return StageEntry(
        block=BlockEntry(
            HUGGING_FACE, name, parts_of_stage, ("hidden_states", last_argument), children, variant="blocks"
        ),
        classes=entry.classes | {block, embeddings},
        parts=parts_of_stage,
        embedding=stem,
        result=result,
        tokens=tokens,
        others=others,
        is_on_gpu=False,
    )


#: Every entry of a stage.
STAGES = (
    _stage_entry(
        "SegformerStage",
        "SegformerLayer",
        _segformer_block,
        lambda stage, tokens, grid: as_map(tokens, grid) if stage.reshape else tokens,
        embedding="patch_embeddings",
        last_argument="kwargs",
        tokens=lambda result: result if result.ndim == 3 else _tokens_of(result),
    ),
    _stage_entry(
        "PvtV2EncoderLayer",
        "PvtV2BlockLayer",
        _pvt_v2_block,
        lambda stage, tokens, grid: ((tokens,), *grid),
        embedding="patch_embedding",
        last_argument="output_attentions",
        tokens=lambda result: result[0][0],
        others=(False,),
    ),
)
_STAGES = {entry.block.name: entry for entry in STAGES}


#: Every entry of what is recorded as a whole.
RECORDED = (
    *map(
        RecordedEntry,
        (e for e in ENTRIES if e.name in ("SegformerStage", "GLPNEncoder", "PvtEncoder", "PvtV2Encoder")),
    ),
    RecordedEntry(
        next(entry for entry in ENTRIES if entry.name == "GLPNDecoder"),
        classes=frozenset(("GLPNDecoderStage", "GLPNSelectiveFeatureFusion")),
        settings=depth.is_handing,
    ),
)


def recognize_stage(module: nn.Module) -> StageEntry | None:
    """Returns the entry of a stage by the name of its class or of a base of it; None for others."""
    return next((_STAGES[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _STAGES), None)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module by the name of its class or of a base of it; None for others."""
    return recognize_by_name(module, _NAMED)
