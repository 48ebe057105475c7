"""The blocks of CvT: Hugging Face's (models/cvt/modeling_cvt.py), Microsoft's (cls_cvt.py) and ours (cvt).

The classes of ``cvt`` call :func:`cvt_kernels.models.forward.forward_block` themselves.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..blocks import (
    GELU_VARIANTS,
    HUGGING_FACE,
    BlockEntry,
    BlockParts,
    Family,
    StageEntry,
    StageParts,
    Unsupported,
    map_and_class_token,
    parts_of_norm,
    tokens_of_map,
)
from ..class_token import ClassifierEntry
from ..forward import apply_layer_norm, embed


def _embedding(upstream: str, name: str, forward: Callable[..., Tensor], *members: str) -> BlockEntry:
    """Returns the entry of a class of embeddings; ``members`` are a convolution and a LayerNorm."""
    return BlockEntry(
        upstream=upstream,
        name=name,
        arguments=tuple(inspect.signature(forward).parameters)[1:],
        children=frozenset(members),
        layers=members[:1],
        forward=forward,
        parts=lambda self: parts_of_norm(getattr(self, members[1])),
    )


# Hugging Face's -------------------------------------------------------------------------------------------

_WORDS = "query", "key", "value"


def _hf_block(self: Any) -> BlockParts:
    attention, activation = self.attention.attention, self.intermediate.activation
    wrappers = [getattr(attention, f"convolution_projection_{word}") for word in _WORDS]
    convs = [wrapper.convolution_projection for wrapper in wrappers]
    return BlockParts(
        norm1=self.layernorm_before,
        branches=[(conv.convolution, conv.normalization) for conv in convs],
        linears=[getattr(attention, f"projection_{word}") for word in _WORDS],
        num_heads=attention.num_heads,
        scale=attention.scale,
        attention_drop=attention.dropout,
        proj=self.attention.output.dense,
        norm2=self.layernorm_after,
        fc1=self.intermediate.dense,
        activation=activation,
        fc2=self.output.dense,
        drops=(self.attention.output.dropout, None, self.output.dropout),
        drop_path=self.drop_path,
        drops_sum=True,
    )


_HF_CLASSES = frozenset(
    (
        *("CvtAttention", "CvtSelfAttention", "CvtSelfOutput", "CvtIntermediate", "CvtOutput", "CvtDropPath"),
        *(f"CvtSelfAttention{kind}Projection" for kind in ("", "Conv", "Linear")),
    )
)

_HF_ENTRIES = {
    "CvtConvEmbeddings": _embedding(
        *(HUGGING_FACE, "CvtConvEmbeddings"),
        lambda self, pixel_values: embed(self.projection, self.normalization, pixel_values),
        *("projection", "normalization"),
    ),
    "CvtLayer": BlockEntry(
        upstream=HUGGING_FACE,
        name="CvtLayer",
        arguments=("hidden_state", "height", "width"),
        children=frozenset(
            ("attention", "intermediate", "output", "drop_path", "layernorm_before", "layernorm_after")
        ),
        classes=_HF_CLASSES,
        layers=(
            *(f"attention.attention.projection_{word}" for word in _WORDS),
            *("attention.output.dense", "intermediate.dense", "output.dense"),
        ),
        parts=_hf_block,
    ),
}


def _hf_stage(self: Any) -> StageParts:
    conv, class_token = _hf_stem(self)
    norm = self.embedding.convolution_embeddings.normalization
    return StageParts(conv, None, norm, class_token, [_hf_block(layer) for layer in self.layers])


def _hf_stem(self: Any) -> tuple[nn.Conv2d, Tensor | None]:
    return self.embedding.convolution_embeddings.projection, getattr(self, "cls_token", None)


_HF_STAGE = StageEntry(
    upstream=HUGGING_FACE,
    name="CvtStage",
    parts=_hf_stage,
    arguments=("hidden_state",),
    children=frozenset(("cls_token", "embedding", "layers")),
    classes=_HF_CLASSES | {"CvtEmbeddings", *_HF_ENTRIES, *GELU_VARIANTS},
    embedding=_hf_stem,
    result=map_and_class_token,
    tokens=tokens_of_map,
)

# Microsoft's ----------------------------------------------------------------------------------------------

MICROSOFT = "Microsoft"

_PROJECTIONS = "conv_proj_q", "conv_proj_k", "conv_proj_v"
#: The paths of the layers of a block of Microsoft's or ours.
_LAYERS = "attn.proj_q", "attn.proj_k", "attn.proj_v", "attn.proj", "mlp.fc1", "mlp.fc2"


def _common_parts(self: Any) -> dict[str, Any]:
    """Returns the parts that have the same names in blocks of Microsoft's and ours."""
    attn, mlp = self.attn, self.mlp
    return {
        "norm1": self.norm1,
        "linears": [attn.proj_q, attn.proj_k, attn.proj_v],
        "num_heads": attn.num_heads,
        "scale": attn.scale,
        "attention_drop": attn.attn_drop,
        "proj": attn.proj,
        "norm2": self.norm2,
        "fc1": mlp.fc1,
        "fc2": mlp.fc2,
        "drops": (attn.proj_drop, mlp.drop, mlp.drop),
        "drop_path": self.drop_path,
    }


def _ms_block(self: Any) -> BlockParts:
    branches = [_ms_branch(self.attn, name) for name in _PROJECTIONS]
    return BlockParts(**_common_parts(self), branches=branches, activation=self.mlp.act)


def _ms_branch(attention: Any, name: str) -> tuple[Any, Any]:
    """Returns convolution and BatchNorm of a branch."""
    steps = getattr(attention, name)
    if type(steps) is not nn.Sequential or len(steps) != 3 or type(steps[2]).__name__ != "Rearrange":
        raise Unsupported(f"{name} is not a Sequential of convolution, BatchNorm and Rearrange")
    pattern = getattr(steps[2], "pattern", "b c h w -> b (h w) c")
    if pattern != "b c h w -> b (h w) c":
        raise Unsupported(f"{name} rearranges by {pattern!r}")
    return steps.get_submodule("conv"), steps.get_submodule("bn")


_MS_ENTRIES = {
    "ConvEmbed": _embedding(
        MICROSOFT, "ConvEmbed", lambda self, x: embed(self.proj, self.norm, x, name="x"), "proj", "norm"
    ),
    "Block": BlockEntry(
        upstream=MICROSOFT,
        name="Block",
        arguments=("x", "h", "w"),
        children=frozenset(("norm1", "attn", "drop_path", "norm2", "mlp")),
        classes=frozenset(("Attention", "Mlp", "DropPath", "Rearrange")),
        layers=_LAYERS,
        parts=_ms_block,
    ),
}


def _stage(self: Any) -> StageParts:
    """Returns the parts of a stage of Microsoft's or ours."""
    conv, class_token = _stem(self)
    batch_norm = getattr(self.patch_embed, "bn", None)
    block = _own_block if own_class(type(self)) is not None else _ms_block
    return StageParts(
        conv=conv,
        batch_norm=batch_norm if isinstance(batch_norm, nn.BatchNorm2d) else None,
        norm=self.patch_embed.norm,
        class_token=class_token,
        blocks=[block(each) for each in self.blocks],
        token_keep_bounds=getattr(self, "token_keep_bounds", (0.0, 1.0)),
    )


def _stem(self: Any) -> tuple[nn.Conv2d, Tensor | None]:
    return self.patch_embed.proj, self.cls_token


#: The submodules of a stage of Microsoft's or ours.
_CHILDREN = frozenset(("cls_token", "patch_embed", "pos_drop", "blocks"))

_MS_STAGE = StageEntry(
    upstream=MICROSOFT,
    name="VisionTransformer",
    parts=_stage,
    arguments=("x",),
    children=_CHILDREN,
    classes=_MS_ENTRIES["Block"].classes | {"ConvEmbed", "Block", "LayerNorm", "QuickGELU"},
    embedding=_stem,
    result=map_and_class_token,
    tokens=tokens_of_map,
)


def _is_ms_stage(module: nn.Module) -> bool:
    """Returns whether a module, whose class has the right name, is a stage of a CvT."""
    blocks = module._modules.get("blocks")
    return blocks is not None and any(map(_is_ms_block, blocks.children()))


def _is_ms_block(module: nn.Module | None) -> bool:
    attn = module._modules.get("attn") if module is not None else None
    if attn is None or own_class(type(attn)) is not None:
        return False
    # A projection without a convolution is None.
    attributes = (*_PROJECTIONS, "num_heads", "scale")
    linears = {"proj", "proj_q", "proj_k", "proj_v"}
    return linears <= set(attn._modules) and all(hasattr(attn, name) for name in attributes)


# Ours -----------------------------------------------------------------------------------------------------

#: The module that defines ours. (Nothing here imports it.)
MODULE = "cvt.model"


def _own_block(self: Any) -> BlockParts:
    attn = self.attn
    return BlockParts(
        **_common_parts(self),
        branches=[getattr(attn, name).summands() for name in _PROJECTIONS],
        drops_probabilities=True,
        gelu=self.mlp.approximate,
        layer_scales=(self.ls1, self.ls2),
        position_for=None if attn.position_bias is None else attn.position_for,
        token_keep=getattr(self, "token_keep", 1.0),
        pool=getattr(attn, "pool", "cls"),
    )


def _why_own_stage_unsupported(stage: Any) -> str | None:
    on_cpu = all(parameter.device.type == "cpu" for parameter in stage.parameters())
    for block in stage.blocks:
        if getattr(block, "token_keep", 1) != 1 and not on_cpu:
            return "drops tokens, which frozen stages do on a CPU only"
        attention = getattr(block, "attn", None)
        if getattr(attention, "position_bias", None) is not None:
            return "attention has a bias by position"
        if hasattr(getattr(attention, "conv_proj_q", None), "dilated_conv"):
            return "convolutions are summed"
    return None


_OWN_CLASSES = frozenset(f"{MODULE}.{name}" for name in ("Attention", "ConvProjection", "Mlp"))

_OWN_ENTRIES = {
    "ConvEmbed": BlockEntry(
        "cvt", "ConvEmbed", parts=lambda self: parts_of_norm(self.norm), layers=("proj",)
    ),
    "Block": BlockEntry("cvt", "Block", parts=_own_block, classes=_OWN_CLASSES, layers=_LAYERS),
}
#: The entry of the blocks of ``cvt``.
OWN_BLOCK = _OWN_ENTRIES["Block"]

_OWN_STAGE = StageEntry(
    upstream="cvt",
    name="Stage",
    parts=_stage,
    arguments=("image",),
    children=_CHILDREN,
    classes=_OWN_CLASSES | {f"{MODULE}.{name}" for name in (*_OWN_ENTRIES, "DropPath", "LayerScale")},
    embedding=_stem,
    result=lambda stage, tokens, grid: (tokens, grid),
    tokens=lambda result: result[0],
    why_unsupported=_why_own_stage_unsupported,
)


def own_class(cls: type) -> type | None:
    """Returns the class of ``cvt`` that ``cls`` is or derives from; None for other classes."""
    return next((base for base in cls.__mro__ if base.__module__ == MODULE), None)


# Classifiers ----------------------------------------------------------------------------------------------


def _hf_reads_class_token(model: Any, call: dict[str, Any]) -> bool:
    given, config = call.get("output_hidden_states"), model.config
    return not (config.output_hidden_states if given is None else given) and bool(config.cls_token[-1])


def _hf_classify(
    model: Any,
    pixel_values: Tensor,
    labels: Any = None,
    output_hidden_states: Any = None,
    return_dict: Any = None,
    **others: Any,
) -> Any:
    """Runs a ``CvtForImageClassification`` without hidden states; upstream takes the mean of one token."""
    if labels is not None or others or model.config is not model.cvt.config:
        return NotImplemented
    outputs = model.cvt(pixel_values, output_hidden_states=output_hidden_states, return_dict=return_dict)
    logits = model.classifier(apply_layer_norm(model.layernorm, outputs[1])[:, 0])
    if isinstance(outputs, tuple):
        return (logits, *outputs[2:])
    # Imported where the model is.
    record = sys.modules["transformers.modeling_outputs"].ImageClassifierOutputWithNoAttention
    return record(logits=logits, hidden_states=outputs.hidden_states)


_HF_CLASSIFIER = ClassifierEntry(
    upstream=HUGGING_FACE,
    name="CvtForImageClassification",
    arguments=("pixel_values", "labels", "output_hidden_states", "return_dict"),
    path=("cvt", "cvt.encoder"),
    last_stage=lambda self: self.cvt.encoder.stages[-1],
    blocks=lambda stage: stage.layers,
    reads_class_token=_hf_reads_class_token,
    forward=_hf_classify,
)


def _ms_reads_class_token(model: Any, call: dict[str, Any]) -> bool:
    if "forward_features" in vars(model) or not getattr(model, "cls_token", True):
        return False
    return _MS_CLASSIFIER.last_stage(model).cls_token is not None


_MS_CLASSIFIER = ClassifierEntry(
    upstream=MICROSOFT,
    name="ConvolutionalVisionTransformer",
    arguments=("x",),
    path=(),
    last_stage=lambda self: self.get_submodule(f"stage{self.num_stages - 1}"),
    blocks=lambda stage: stage.blocks,
    reads_class_token=_ms_reads_class_token,
)

#: The entry of the classifier of ``cvt``, which calls :func:`class_token.find_last` itself.
OWN_CLASSIFIER = ClassifierEntry(
    upstream="cvt",
    name="CvT",
    arguments=("images",),
    path=(),
    last_stage=lambda self: self._built_stages()[-1],
    blocks=lambda stage: stage.blocks,
    reads_class_token=lambda self, call: self.config.pool == "cls",
)

# Recognition ----------------------------------------------------------------------------------------------


def _recognize(module: nn.Module, parent: nn.Module | None) -> BlockEntry | None:
    """Returns the entry of a module by the names of its classes and what it consists of; None for others.

    Half of all transformers have a ``Block``: Microsoft's has an attention with convolutions, and its
    ``ConvEmbed`` is in a stage of such.
    """
    own = own_class(type(module))
    if own is not None:
        return _OWN_ENTRIES.get(own.__name__)
    names = [cls.__name__ for cls in type(module).__mro__]
    if "Block" in names and _is_ms_block(module):
        return _MS_ENTRIES["Block"]
    if "ConvEmbed" in names and parent is not None and _is_ms_stage(parent):
        return _MS_ENTRIES["ConvEmbed"]
    return next((_HF_ENTRIES[name] for name in names if name in _HF_ENTRIES), None)


def _recognize_stage(module: nn.Module) -> StageEntry | None:
    names = {cls.__name__ for cls in type(module).__mro__}
    if own_class(type(module)) is not None:
        return _OWN_STAGE if _OWN_STAGE.name in names else None
    if _HF_STAGE.name in names:
        return _HF_STAGE
    # Other transformers have a class of this name too.
    return _MS_STAGE if _MS_STAGE.name in names and _is_ms_stage(module) else None


FAMILY = Family(
    models=("CvT (of transformers, Microsoft or cvt)",),
    entries=(*_HF_ENTRIES.values(), *_MS_ENTRIES.values(), *_OWN_ENTRIES.values()),
    stages=(_HF_STAGE, _MS_STAGE, _OWN_STAGE),
    classifiers=(_HF_CLASSIFIER, _MS_CLASSIFIER),
    recognize=_recognize,
    recognize_stage=_recognize_stage,
)
