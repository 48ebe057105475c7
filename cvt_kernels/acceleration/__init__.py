"""Fused forwards for the CvT that people already have: ``accelerate``, ``coverage`` and ``restore``.

A supported block changes its class, to a subclass that overrides ``forward`` and nothing else that computes:
parameters, buffers, submodules, hooks and ``state_dict`` stay as they are, and so does the name of the class.
The fused forward calls the public operators, which choose their backend.

Blocks are recognised by the names and the structure of their classes; nothing upstream is imported.
``_TABLE``, after the fused forwards, has one entry per class. Every call asks again whether the block is what
its entry expects: a submodule that the fused forward passes over may have been replaced or got a hook, or
dropout may be active. Then the block's own forward runs, and ``coverage`` says why.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import backends, checks
from ..ops.attention import attention
from ..ops.conv_projection import conv_projection
from ..ops.layer_norm_gelu import add_layer_norm, bias_gelu, gelu, layer_norm
from ..ops.linear import linear
from ..reference import ConvBatchNorm

_Model = TypeVar("_Model", bound=nn.Module)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Fused operations on submodules ---------------------------------------------------------------------------


def _context(block: Any, x: Tensor, grid: tuple[int, int], branches: Any, linears: Any) -> Tensor:
    """What the output projection of an attention reads, (B, T, C).

    Args:
        block: Has ``num_heads`` and ``scale``.
        x: Normalised tokens (B, T, C).
        grid: (H, W) of the spatial ones.
        branches: Convolution and BatchNorm of Q, K and V.
        linears: Linear layers of Q, K and V.
    """
    q, k, v = (
        _product(module, projected).unflatten(2, (block.num_heads, -1))
        for module, projected in zip(linears, _project(x, grid, branches), strict=True)
    )
    return attention(q, k, v, scale=block.scale).flatten(2)


def _project(x: Tensor, grid: tuple[int, int], branches: Any) -> tuple[Tensor, ...]:
    convs = [ConvBatchNorm.from_modules(conv, bn) for conv, bn in branches]
    modes = [bn.training for _, bn in branches]
    if len(set(modes)) == 1:
        return conv_projection(x, grid, convs, training=modes[0])
    # Somebody froze only some of the three.
    return tuple(
        conv_projection(x, grid, [conv], training=mode)[0] for conv, mode in zip(convs, modes, strict=True)
    )


def _normalise(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    if type(norm) is not nn.LayerNorm:  # Microsoft's, which computes in float32 whatever comes
        return layer_norm(x.float(), norm.weight, norm.bias, eps=norm.eps).type(x.dtype)
    if _mixed(x, norm.weight):
        return norm(x)  # PyTorch knows which mixtures it takes
    return layer_norm(x, norm.weight, norm.bias, eps=norm.eps)


def _add_and_normalise(norm: nn.LayerNorm, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The residual sum, and its LayerNorm."""
    casts = type(norm) is not nn.LayerNorm and not branch.dtype == stream.dtype == torch.float32
    if casts or _mixed(branch, stream) or _mixed(branch, norm.weight):
        stream = branch + stream
        return stream, _normalise(norm, stream)
    return add_layer_norm(branch, stream, norm.weight, norm.bias, eps=norm.eps)


def _mixed(x: Tensor, other: Tensor | None) -> bool:
    """Whether the dtypes differ and autocast does not see to it."""
    return other is not None and other.dtype != x.dtype and not checks.autocast_enabled(x)


def _product(module: Any, x: Tensor) -> Tensor:
    """module(x), which may be any module; one that is a linear layer and no more by the fastest primitive."""
    return linear(x, module.weight, module.bias) if _is_plain(module) else module(x)


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and _observer(module) is None


def _linear_gelu(module: Any, activation: Any, x: Tensor) -> Tensor:
    approximate = activation.approximate if type(activation) is nn.GELU else "quick"
    if _gelu_operator(module, x.device.type) == "gelu":
        return gelu(_product(module, x), approximate=approximate)
    product = linear(x, module.weight)
    # Autocast makes the product half precision and leaves the bias to us.
    return bias_gelu(product, module.bias.to(product.dtype), approximate=approximate)


def _gelu_operator(module: Any, device_type: str) -> str:
    plain = _is_plain(module) and module.bias is not None
    # A matrix product adds its bias for free; only a kernel that does the activation too gains by taking it.
    compiled = backends.backend_for("bias_gelu", device_type) not in (None, "reference")
    return "bias_gelu" if plain and compiled else "gelu"


def _embed(projection: nn.Module, norm: nn.LayerNorm, image: Tensor) -> Tensor:
    image = projection(image)
    tokens = _normalise(norm, image.flatten(2).transpose(1, 2))
    return tokens.transpose(1, 2).unflatten(2, image.shape[2:])


# Hugging Face, transformers/models/cvt/modeling_cvt.py ----------------------------------------------------

_HF_WORDS = ("query", "key", "value")


def _hf_embeddings(self: Any, pixel_values: Tensor) -> Tensor:
    return _embed(self.projection, self.normalization, pixel_values)


def _hf_branches(self: Any) -> list[tuple[nn.Module, nn.Module]]:
    wrappers = [getattr(self, f"convolution_projection_{word}") for word in _HF_WORDS]
    convolutions = [wrapper.convolution_projection for wrapper in wrappers]
    return [(c.convolution, c.normalization) for c in convolutions]


def _hf_self_attention(self: Any, hidden_state: Tensor, height: int, width: int) -> Tensor:
    linears = [getattr(self, f"projection_{word}") for word in _HF_WORDS]
    return _context(self, hidden_state, (height, width), _hf_branches(self), linears)


def _hf_intermediate(self: Any, hidden_state: Tensor) -> Tensor:
    return _linear_gelu(self.dense, self.activation, hidden_state)


def _hf_self_output(self: Any, hidden_state: Tensor, input_tensor: Tensor) -> Tensor:
    return self.dropout(_product(self.dense, hidden_state))


def _hf_output(self: Any, hidden_state: Tensor, input_tensor: Tensor) -> Tensor:
    return self.dropout(_product(self.dense, hidden_state)) + input_tensor


def _hf_layer(self: Any, hidden_state: Tensor, height: int, width: int) -> Tensor:
    branch = self.attention(_normalise(self.layernorm_before, hidden_state), height, width)
    stream, y = _add_and_normalise(self.layernorm_after, self.drop_path(branch), hidden_state)
    return self.drop_path(self.output(self.intermediate(y), stream))  # output adds the stream itself


# Microsoft, lib/models/cls_cvt.py -------------------------------------------------------------------------


def _ms_embed(self: Any, x: Tensor) -> Tensor:
    return _embed(self.proj, self.norm, x)


def _ms_branches(self: Any) -> list[tuple[nn.Module, nn.Module]]:
    sequences = [self.conv_proj_q, self.conv_proj_k, self.conv_proj_v]
    return [(sequence.conv, sequence.bn) for sequence in sequences]


def _ms_attention(self: Any, x: Tensor, h: int, w: int) -> Tensor:
    linears = [self.proj_q, self.proj_k, self.proj_v]
    return self.proj_drop(_product(self.proj, _context(self, x, (h, w), _ms_branches(self), linears)))


def _ms_mlp(self: Any, x: Tensor) -> Tensor:
    return self.drop(_product(self.fc2, self.drop(_linear_gelu(self.fc1, self.act, x))))


def _ms_block(self: Any, x: Tensor, h: int, w: int) -> Tensor:
    branch = self.drop_path(self.attn(_normalise(self.norm1, x), h, w))
    stream, y = _add_and_normalise(self.norm2, branch, x)
    return stream + self.drop_path(self.mlp(y))


# What a fused forward takes for granted, and why a block cannot give it -----------------------------------


def _odd_convolutions(branches: Any) -> str | None:
    for conv, bn in branches:
        if conv.bias is not None:
            return "a convolution has a bias"
        if not conv.groups == conv.in_channels == conv.out_channels:
            return "a convolution is not depthwise"
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            return f"a convolution pads by {conv.padding_mode!r}, {conv.padding!r}; expected numbers of zeros"
        if any(v[0] != v[1] for v in (conv.kernel_size, conv.stride, conv.padding, conv.dilation)):
            return "a convolution is not the same in both directions"
        if bn.training and not bn.track_running_stats and bn.running_mean is not None:
            return "a BatchNorm has running statistics that it no longer tracks"
    return None


def _odd_norms(*norms: Any) -> str | None:
    for norm in norms:
        plain = type(norm) is nn.LayerNorm or type(norm).__bases__ == (nn.LayerNorm,)
        if not plain or len(norm.normalized_shape) != 1:
            return f"{type(norm).__qualname__} is not a LayerNorm over the last dimension"
    return None


def _odd_rearranges(block: Any) -> str | None:
    for sequence in (block.conv_proj_q, block.conv_proj_k, block.conv_proj_v):
        if len(sequence) != 3:
            return f"a projection has {len(sequence)} steps; expected convolution, BatchNorm and Rearrange"
        pattern = getattr(sequence[2], "pattern", "b c h w -> b (h w) c")
        if pattern != "b c h w -> b (h w) c":
            return f"a projection rearranges by {pattern!r}"
    return None


def _active_dropout(dropout: Any) -> str | None:
    active = dropout.training and dropout.p > 0
    return f"dropout of attention probabilities is active (p = {dropout.p:g}, training)" if active else None


# The table ------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A submodule whose work a fused forward does without calling it.

    Attributes:
        path: Names from the block to it; a number is a position among the children.
        kinds: What it may be: exact types, or names of classes.
    """

    path: tuple[str, ...]
    kinds: tuple[type | str, ...]


class _Entry(NamedTuple):
    """A class of blocks.

    Attributes:
        upstream: Whose it is.
        name: Name of the class.
        operators: The public operators that the fused forward of a block calls on a type of device.
        arguments: Names of the arguments of ``forward``.
        children: Names of the submodules. There are no parameters or buffers beside them.
        forward: The fused one; None for a class that calls the operators already.
        parts: The submodules that the fused forward does not call.
        odd: Why the parts, each being of the right kind, are not supported; else None.
        hindrance: Why the block cannot be fused at the moment; else None.
    """

    upstream: str
    name: str
    operators: Callable[[Any, str], tuple[str, ...]]
    arguments: tuple[str, ...] = ()
    children: frozenset[str] = frozenset()
    forward: Callable[..., Tensor] | None = None
    parts: tuple[_Part, ...] = ()
    odd: Callable[[Any], str | None] = lambda block: None
    hindrance: Callable[[Any], str | None] = lambda block: None

    @property
    def key(self) -> str:
        """Names the entry, also in pickles."""
        return f"{self.upstream} {self.name}"


def _always(*operators: str) -> Callable[[Any, str], tuple[str, ...]]:
    return lambda block, device_type: operators


def _parts(kinds: dict[str, Any]) -> tuple[_Part, ...]:
    return tuple(
        _Part(tuple(path.split(".")), kind if isinstance(kind, tuple) else (kind,))
        for path, kind in kinds.items()
    )


_BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
_MS_LAYER_NORMS = (nn.LayerNorm, "LayerNorm")

_HF_ATTENTION_PARTS: dict[str, Any] = {"dropout": nn.Dropout}
for _word in _HF_WORDS:
    _path = f"convolution_projection_{_word}"
    _HF_ATTENTION_PARTS |= {
        _path: "CvtSelfAttentionProjection",
        f"{_path}.linear_projection": "CvtSelfAttentionLinearProjection",
        f"{_path}.convolution_projection": "CvtSelfAttentionConvProjection",
        f"{_path}.convolution_projection.convolution": nn.Conv2d,
        f"{_path}.convolution_projection.normalization": _BATCH_NORMS,
    }

_MS_ATTENTION_PARTS: dict[str, Any] = {"attn_drop": nn.Dropout}
for _letter in "qkv":
    _path = f"conv_proj_{_letter}"
    _MS_ATTENTION_PARTS |= {
        _path: nn.Sequential,
        f"{_path}.conv": nn.Conv2d,
        f"{_path}.bn": _BATCH_NORMS,
        f"{_path}.2": "Rearrange",
    }

_HF, _MS, _OURS = "Hugging Face", "Microsoft", "cvt"
_TABLE = {
    entry.key: entry
    for entry in (
        _Entry(
            _HF,
            "CvtConvEmbeddings",
            _always("layer_norm"),
            ("pixel_values",),
            frozenset(("projection", "normalization")),
            _hf_embeddings,
            _parts({"normalization": nn.LayerNorm}),
            odd=lambda block: _odd_norms(block.normalization),
        ),
        _Entry(
            _HF,
            "CvtLayer",
            _always("layer_norm", "add_layer_norm"),
            ("hidden_state", "height", "width"),
            frozenset(
                ("attention", "intermediate", "output", "drop_path", "layernorm_before", "layernorm_after")
            ),
            _hf_layer,
            _parts({"layernorm_before": nn.LayerNorm, "layernorm_after": nn.LayerNorm}),
            odd=lambda block: _odd_norms(block.layernorm_before, block.layernorm_after),
        ),
        _Entry(
            _HF,
            "CvtSelfAttention",
            _always("conv_projection", "attention"),
            ("hidden_state", "height", "width"),
            frozenset(
                f"{prefix}projection_{word}" for prefix in ("", "convolution_") for word in _HF_WORDS
            ).union(("dropout",)),
            _hf_self_attention,
            _parts(_HF_ATTENTION_PARTS),
            odd=lambda block: _odd_convolutions(_hf_branches(block)),
            hindrance=lambda block: _active_dropout(block.dropout),
        ),
        _Entry(
            _HF,
            "CvtIntermediate",
            lambda block, device_type: (_gelu_operator(block.dense, device_type),),
            ("hidden_state",),
            frozenset(("dense", "activation")),
            _hf_intermediate,
            _parts({"activation": nn.GELU}),
        ),
        _Entry(
            _HF,
            "CvtSelfOutput",
            _always(),
            ("hidden_state", "input_tensor"),
            frozenset(("dense", "dropout")),
            _hf_self_output,
        ),
        _Entry(
            _HF,
            "CvtOutput",
            _always(),
            ("hidden_state", "input_tensor"),
            frozenset(("dense", "dropout")),
            _hf_output,
        ),
        _Entry(
            _MS,
            "ConvEmbed",
            _always("layer_norm"),
            ("x",),
            frozenset(("proj", "norm")),
            _ms_embed,
            _parts({"norm": _MS_LAYER_NORMS}),
            odd=lambda block: _odd_norms(block.norm),
        ),
        _Entry(
            _MS,
            "Block",
            _always("layer_norm", "add_layer_norm"),
            ("x", "h", "w"),
            frozenset(("norm1", "attn", "drop_path", "norm2", "mlp")),
            _ms_block,
            _parts({"norm1": _MS_LAYER_NORMS, "norm2": _MS_LAYER_NORMS}),
            odd=lambda block: _odd_norms(block.norm1, block.norm2),
        ),
        _Entry(
            _MS,
            "Attention",
            _always("conv_projection", "attention"),
            ("x", "h", "w"),
            frozenset(f"{prefix}proj_{letter}" for prefix in ("", "conv_") for letter in "qkv").union(
                ("attn_drop", "proj", "proj_drop")
            ),
            _ms_attention,
            _parts(_MS_ATTENTION_PARTS),
            odd=lambda block: _odd_rearranges(block) or _odd_convolutions(_ms_branches(block)),
            hindrance=lambda block: _active_dropout(block.attn_drop),
        ),
        _Entry(
            _MS,
            "Mlp",
            lambda block, device_type: (_gelu_operator(block.fc1, device_type),),
            ("x",),
            frozenset(("fc1", "act", "fc2", "drop")),
            _ms_mlp,
            _parts({"act": (nn.GELU, "QuickGELU")}),
        ),
        _Entry(_OURS, "ConvEmbed", _always("layer_norm")),
        _Entry(_OURS, "Block", _always("layer_norm", "add_layer_norm")),
        _Entry(_OURS, "Attention", _always("conv_projection", "attention")),
        _Entry(_OURS, "Mlp", _always("gelu")),
    )
}

# Recognition ----------------------------------------------------------------------------------------------


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module, _Entry]]:
    """Path, block and table entry of everything in the model that may be fused, in the model's order.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: There is no such block.
    """
    _check_module(model)
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    found = []
    for path, module in model.named_modules():
        entry = _recognise(module, parents.get(id(module)))
        if entry is not None:
            found.append((path, module, entry))
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no block of a CvT; looked for the classes {_looked_for()}"
        )
    return found


def _looked_for() -> str:
    names = {owner: [e.name for e in _TABLE.values() if e.upstream == owner] for owner in (_HF, _MS, _OURS)}
    return "; ".join(f"{', '.join(found)} ({owner})" for owner, found in names.items())


def _recognise(module: nn.Module, parent: nn.Module | None) -> _Entry | None:
    """The entry of the table for a module, by the names of its classes and what it consists of.

    Microsoft's names are those of half of all transformers: there an ``Attention`` must have convolutional
    projections, a ``Block`` such an attention, and the other two must be in their places beside it.
    """
    ours = _our_class(type(module))
    if ours is not None:
        return _TABLE.get(f"{_OURS} {ours.__name__}")
    names = [cls.__name__ for cls in type(module).__mro__]
    entry = next((_TABLE[f"{_HF} {name}"] for name in names if f"{_HF} {name}" in _TABLE), None)
    if entry is not None:
        return entry
    if "Attention" in names and _is_ms_attention(module):
        return _TABLE[f"{_MS} Attention"]
    if "Block" in names and _is_ms_block(module):
        return _TABLE[f"{_MS} Block"]
    if "Mlp" in names and _is_ms_block(parent):
        return _TABLE[f"{_MS} Mlp"]
    blocks = parent._modules.get("blocks") if parent is not None else None
    if "ConvEmbed" in names and blocks is not None and any(map(_is_ms_block, blocks.children())):
        return _TABLE[f"{_MS} ConvEmbed"]
    return None


def _our_class(cls: type) -> type | None:
    return next((base for base in cls.__mro__ if base.__module__ == "cvt.model"), None)


def _is_ms_attention(module: nn.Module) -> bool:
    linears = {"proj", "proj_q", "proj_k", "proj_v"}
    # A projection without a convolution is None.
    attributes = ("conv_proj_q", "conv_proj_k", "conv_proj_v", "num_heads", "scale")
    return (
        linears <= set(module._modules)
        and all(hasattr(module, name) for name in attributes)
        and _our_class(type(module)) is None
    )


def _is_ms_block(module: nn.Module | None) -> bool:
    attn = module._modules.get("attn") if module is not None else None
    return attn is not None and _is_ms_attention(attn)


def _mismatch(block: nn.Module, entry: _Entry) -> str | None:
    """Why a block is not of the class whose work the fused forward knows; None if it is."""
    owner = next(cls for cls in _original_class(type(block)).__mro__ if "forward" in vars(cls))
    if owner.__name__ != entry.name:
        return f"{owner.__qualname__} has a forward of its own, not that of {entry.upstream}'s {entry.name}"
    if entry.forward is None:
        return None if owner.__module__ == "cvt.model" else f"{owner.__qualname__} has a forward of its own"
    replaced = _replaced_method(block, owner)
    if replaced is not None:
        return f"{replaced} is not that of {entry.upstream}'s {entry.name}"
    arguments = tuple(inspect.signature(owner.forward).parameters)[1:]
    if arguments != entry.arguments:
        return f"forward takes {', '.join(arguments)}; expected {', '.join(entry.arguments)}"
    members = {**block._modules, **block._parameters, **block._buffers}
    unknown = sorted(set(members) - entry.children)
    if unknown:
        return f"has {', '.join(unknown)}, which {entry.upstream}'s {entry.name} has not"
    return _refusal(block, entry, lasting=True)


def _replaced_method(block: nn.Module, owner: type) -> str | None:
    """A method of ``owner`` that somebody patched, or that the block or a class of it overrides, or None."""
    patch = _patch(owner)
    if patch is not None:
        return f"forward, patched by {patch},"
    public = (name for name, value in vars(owner).items() if inspect.isfunction(value) and name[0] != "_")
    mro = _original_class(type(block)).__mro__
    overriding = [vars(block), *(vars(cls) for cls in mro[: mro.index(owner)])]
    # A forward set on the object is seen by coverage, since it may come and go.
    found = (name for name in public if name != "forward" and any(name in members for members in overriding))
    return next(found, None)


def _patch(cls: type) -> str | None:
    """The function that somebody put in the place of the forward of a class, or None."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    # functools.wraps gives a patch the names of what it wraps, but not its globals.
    home = getattr(forward, "__globals__", {}).get("__name__")
    if home == owner.__module__ and inspect.unwrap(forward).__qualname__ == f"{owner.__qualname__}.forward":
        return None
    return f"{home}.{forward.__qualname__}"


def _refusal(block: nn.Module, entry: _Entry, *, lasting: bool = False) -> str | None:
    """Why the fused forward would not do justice to the submodules that it does not call; None if it does.

    Args:
        block: The block.
        entry: Its entry.
        lasting: Leave out what may pass: hooks, and modes of training.
    """
    for part in entry.parts:
        module = _submodule(block, part.path)
        kind = type(module)
        if kind not in part.kinds and kind.__name__ not in part.kinds:
            expected = " or ".join(k if isinstance(k, str) else k.__name__ for k in part.kinds)
            found = "missing" if module is None else f"a {kind.__qualname__}"
            return f"{'.'.join(part.path)} is {found}, expected {expected}"
        if lasting and (patch := _patch(kind)) is not None:
            return f"the forward of {'.'.join(part.path)} is patched by {patch}"
        if not lasting and (observer := _observer(module)) is not None:
            return f"{'.'.join(part.path)} {observer}"
    return entry.odd(block) or (None if lasting else entry.hindrance(block))


def _submodule(block: nn.Module, path: tuple[str, ...]) -> Any:
    module: Any = block
    for name in path:
        children = module._modules
        if name in children:
            module = children[name]
        elif name.isdigit() and int(name) < len(children):
            module = list(children.values())[int(name)]
        else:
            return None
    return module


def _observer(module: nn.Module) -> str | None:
    """Who would notice that a module is not called, or None."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    if "forward" in vars(module):
        return "has a forward of its own"
    return None


# The swap -------------------------------------------------------------------------------------------------


def _cached(function: _Function) -> _Function:
    return functools.cache(function)  # type: ignore[return-value]  # mypy takes classes for unhashable


@_cached
def _fused_class(original: Any, key: str) -> Any:
    """The subclass of ``original`` with the forward of an entry."""
    entry = _TABLE[key]

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if _refusal(self, entry) is None:
            return entry.forward(self, *args, **kwargs)  # type: ignore[misc]
        return original.forward(self, *args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> tuple[Any, ...]:  # noqa: N807
        # Pickle finds classes by name, and under this name it would find the original.
        return _new, (original, key), object.__reduce_ex__(self, 2)[2]

    members = {"forward": forward, "__reduce_ex__": __reduce_ex__, "_cvt_kernels_original": original}
    for name in ("__module__", "__qualname__", "__doc__"):
        members[name] = getattr(original, name)
    return type(original.__name__, (original,), members)


def _new(original: type[nn.Module], key: str) -> nn.Module:
    """An accelerated block without state, for pickle and ``copy``."""
    fused = _fused_class(original, key)
    return fused.__new__(fused)


@_cached
def _original_class(cls: Any) -> Any:
    """``cls`` without fused forwards, its own or those of its bases (``fully_shard`` derives from ours)."""
    if "_cvt_kernels_original" in vars(cls):
        return vars(cls)["_cvt_kernels_original"]
    bases = tuple(map(_original_class, cls.__bases__))
    if bases == cls.__bases__:
        return cls
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, members)


def _is_fused(block: nn.Module) -> bool:
    return _original_class(type(block)) is not type(block)


def accelerate(model: _Model) -> _Model:
    """Gives the supported blocks of a CvT fused forwards, in place.

    Supported are Hugging Face's ``CvtModel`` and ``CvtForImageClassification``, Microsoft's ``cls_cvt``
    models and every model that contains their blocks. (``cvt``'s own blocks are fused as they are.) The model
    computes what it computed before, in evaluation and in training, with the same random numbers, gradients
    and BatchNorm statistics, up to rounding. Parameters, ``state_dict``, hooks and class names stay; wrappers
    such as ``DistributedDataParallel`` and ``torch.compile`` may be put around it before or after.

    A block that is not as its class is upstream keeps its class, and one that a fused forward would not do
    justice to (hooks on an inner module, active attention dropout) its own computation, call by call:
    :func:`coverage` tells which and why. :func:`restore` undoes everything. Derivatives of the second order
    need the reference backend.

    Args:
        model: Any module; wrappers are looked into.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no supported block; it is left as it was.
    """
    blocks = find_blocks(model)
    supported = [(block, entry) for _, block, entry in blocks if _mismatch(block, entry) is None]
    if not supported:
        path, block, entry = blocks[0]
        raise ValueError(
            f"model: none of the {len(blocks)} blocks of {type(model).__name__} is supported; "
            f"the first, {path or 'itself'}: {_mismatch(block, entry)}"
        )
    for block, entry in supported:
        if entry.forward is not None and not _is_fused(block):
            block.__class__ = _fused_class(type(block), entry.key)
    return model


def restore(model: _Model) -> _Model:
    """Gives the blocks of an accelerated model their own classes back, in place.

    Args:
        model: Any module; what was not accelerated stays as it is.

    Returns:
        The same object.

    Raises:
        TypeError: ``model`` is not a module.
    """
    _check_module(model)
    for module in model.modules():
        if _is_fused(module):
            module.__class__ = _original_class(type(module))
    return model


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
