"""Entries, which describe upstream's classes, and parts, the modules of a block or stage under common names.

Entries recognize blocks by the names and the structure of classes, so that nothing upstream is imported.
Parts list the modules that the fused forward replaces (``bypassed``), and reasons against it
(``why_unsupported``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.conv_projection.modules import branch_of
from ..ops.linear_int8.modules import LinearInt8
from ..ops.token_selection import TokenKeep
from ..records import (
    AnyLinear,
    Branch,
    ConvBatchNorm,
    DepthwiseConv,
    GeluVariant,
    Linear,
    Norm,
    Pool,
    PositionBias,
    QuantizedLinear,
    Reduction,
    TransformerBlock,
    is_frozen_batch_norm,
    is_shadowed,
)
from .class_token import ClassifierEntry
from .watching import is_plain_linear, is_watched

#: The allowed classes of a module: exact classes, or names of classes, with or without their module.
Kinds = tuple[type | str, ...]

#: The upstream of the models of transformers.
HUGGING_FACE = "Hugging Face"
#: The packages with the classes of upstreams. Those of others, as Microsoft's, may be anywhere.
_PACKAGES = {HUGGING_FACE: "transformers", "timm": "timm"}

#: The allowed classes of a projection's BatchNorm, besides those that detectors freeze.
BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)
#: The allowed classes of a LayerNorm: PyTorch's or Microsoft's.
LAYER_NORMS: Kinds = (nn.LayerNorm, "LayerNorm")
#: Classes of GELU besides ``nn.GELU``, of Microsoft and of transformers, and what :func:`cvt_kernels.gelu`
#: calls them.
GELU_VARIANTS: dict[str, GeluVariant] = {
    "QuickGELU": "quick",
    "QuickGELUActivation": "quick",
    "GELUActivation": "none",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "NewGELUActivation": "tanh",
}
#: The allowed classes of an MLP's activation.
GELUS: Kinds = (nn.GELU, *GELU_VARIANTS)


class Unsupported(Exception):  # noqa: N818 (it says what a block is, and never leaves this package)
    """A block has no parts for a fused forward; the message is the reason."""


class BypassedParts(NamedTuple):
    """The modules that a fused forward replaces, if it calls most others.

    Attributes:
        modules: These modules, each with its allowed classes.
        reason: Why they are not supported, or None.
    """

    modules: Sequence[tuple[Any, Kinds]]
    reason: str | None = None

    def bypassed(self) -> Sequence[tuple[Any, Kinds]]:
        """Returns the replaced modules, each with its allowed classes."""
        return self.modules

    def why_unsupported(self) -> str | None:
        """Returns why modules of the right kinds are not supported all the same, or None."""
        return self.reason

    def prepared(self) -> BypassedParts:
        """Returns the parts for calls as long as nothing changes."""
        return self


def parts_of_norm(norm: Any) -> BypassedParts:
    """Returns the parts of a module whose fused forward replaces the LayerNorm only."""
    return BypassedParts([(norm, LAYER_NORMS)], why_norms_unsupported(norm))


def is_stochastic_depth(module: nn.Module) -> bool:
    """Returns whether a module drops the branches of images in training, and does nothing in evaluation."""
    return type(module).__name__.endswith(("DropPath", "StochasticDepth"))


class BlockParts(NamedTuple):
    """The modules of a block.

    Attributes:
        norm1, norm2: The LayerNorms before attention and before the MLP.
        linears: The linear layers of Q, of K and of V. The last of fewer than three makes several, one below
            another.
        num_heads, scale: Heads of attention, and the factor on the scores.
        head_dim: Channels of a head, where upstream's forward reads an attribute for them.
        proj: The linear layer after attention.
        fc1, fc2: The linear layers of the MLP.
        activation: The module of its GELU; None where the MLP computes it.
        gelu: That GELU, as :func:`cvt_kernels.gelu` names it; where a module computes it, of prepared parts
            only.
        branches: Convolution and BatchNorm of Q, of K and of V, or lists of such pairs that are summed.
        reduction: The convolution that makes the tokens of keys and values, and its LayerNorm.
        pooling: The same in linear attention: pooling, a 1×1 convolution, a LayerNorm and a GELU.
        mix: The depthwise convolution before the GELU.
        relu: What comes before this convolution.
        attention_drop: The dropout of attention probabilities, or the module that has its probability.
        drops_probabilities: True if the operator may drop them, False if only the upstream's forward may.
        drops: Dropout after ``proj``, after the GELU and after ``fc2``.
        drop_path: The stochastic depth of both branches.
        drops_sum: True if the second one drops the stream with its branch, as in Hugging Face's CvT.
        layer_scales: The modules of the factors (C,) on the two branches, with ``gamma`` or ``lambda1``.
        idle: Modules that must be identities.
        position_for: Returns the bias of the scores for a grid and the rows that are kept.
        token_keep: How many tokens stay after the block; 1 for all.
        pool: The query that scores them.
        convs, norms: The tensors and the BatchNorms of ``branches``, if they are prepared.
    """

    norm1: nn.LayerNorm
    linears: Sequence[Any]
    num_heads: int
    scale: float
    proj: Any
    norm2: nn.LayerNorm
    fc1: Any
    fc2: Any
    attention_drop: Any
    drops: tuple[Any, Any, Any]
    drop_path: Any
    head_dim: int | None = None
    activation: nn.Module | None = None
    gelu: GeluVariant = "none"
    branches: Sequence[Any] = ()
    reduction: tuple[nn.Conv2d, nn.LayerNorm] | None = None
    pooling: tuple[nn.Module, nn.Conv2d, nn.LayerNorm, nn.Module] | None = None
    mix: nn.Conv2d | None = None
    relu: nn.Module | None = None
    drops_probabilities: bool = False
    drops_sum: bool = False
    layer_scales: tuple[Any, Any] = (None, None)
    idle: tuple[Any, ...] = ()
    position_for: Callable[..., PositionBias | None] | None = None
    token_keep: TokenKeep = 1.0
    pool: Pool = "cls"
    convs: tuple[Branch, ...] = ()
    norms: tuple[Any, ...] = ()

    def prepared(self) -> BlockParts:
        """Returns the parts for calls as long as nothing changes, with tensors in the places of some modules.

        Linear layers that nobody watches are :class:`~cvt_kernels.records.Linear`, identities None.
        """
        *linears, proj, fc1, fc2 = map(_prepared_linear, self.layers())
        pairs = self.pairs()
        shadowed = any(is_shadowed(module) for pair in pairs for module in pair)
        return self._replace(
            linears=linears,
            proj=proj,
            fc1=fc1,
            fc2=fc2,
            drops=tuple(map(_unless_identity, self.drops)),
            drop_path=_unless_identity(self.drop_path),
            layer_scales=tuple(map(_unless_identity, self.layer_scales)),
            relu=_unless_identity(self.relu),
            gelu=self.approximate,
            convs=() if shadowed else tuple(map(branch_of, self.branches)),
            norms=() if shadowed else tuple(norm for _, norm in pairs),
        )

    @property
    def approximate(self) -> GeluVariant:
        """The GELU of the MLP, as :func:`cvt_kernels.gelu` names it."""
        return self.gelu if self.activation is None else gelu_variant(self.activation)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Returns convolution and BatchNorm of every branch, or of every summand of it."""
        return [
            pair for branch in self.branches for pair in (branch if isinstance(branch, list) else (branch,))
        ]

    def bypassed(self) -> list[tuple[Any, Kinds]]:
        """Returns the modules that the fused forward replaces, each with its allowed classes."""
        found: list[tuple[Any, Kinds]] = [(self.norm1, LAYER_NORMS), (self.norm2, LAYER_NORMS)]
        for conv, norm in self.pairs():
            found += [
                (conv, (nn.Conv2d,)),
                (norm, (type(norm),) if is_frozen_batch_norm(norm) else BATCH_NORMS),
            ]
        if self.reduction is not None:
            found += zip(self.reduction, ((nn.Conv2d,), (nn.LayerNorm,)), strict=True)
        if self.pooling is not None:
            kinds: Sequence[Kinds] = ((nn.Conv2d,), (nn.LayerNorm,), (nn.GELU,))
            found += zip(self.pooling[1:], kinds, strict=True)
        if self.mix is not None:
            found.append((self.mix, (nn.Conv2d,)))
        if self.activation is not None:
            found.append((self.activation, GELUS))
        found += [(module, (nn.Identity,)) for module in self.idle]
        if _dropout_of(self.attention_drop) is None:
            found.append((self.attention_drop, (nn.Dropout,)))
        return found

    def called(self) -> list[nn.Module]:
        """Returns the modules that the fused forward calls if they are watched."""
        pool = None if self.pooling is None else self.pooling[0]
        others = (*self.drops, self.drop_path, *self.layer_scales, self.relu, pool)
        return [*self.layers(), *(module for module in others if module is not None)]

    def modules(self) -> list[nn.Module]:
        """Returns the modules that a block as one operator replaces."""
        scales = [scale for scale in self.layer_scales if scale is not None]
        return [*(module for module, _ in self.bypassed()), *self.layers(), *scales]

    def why_unsupported(self) -> str | None:
        """Returns why modules of the right kinds are not supported all the same, or None."""
        # What is in the place of `proj` need not have it. Sizes of the weight are tensors in torch.jit.trace.
        norms, channels = [self.norm1, self.norm2], getattr(self.proj, "in_features", None)
        if None not in (channels, self.head_dim) and self.num_heads * cast(int, self.head_dim) != channels:
            return f"has {self.num_heads} heads of {self.head_dim} channels, expected {channels} together"
        if self.reduction is not None:
            conv, norm = self.reduction
            norms.append(norm)
            if conv.groups != 1 or conv.dilation != (1, 1) or conv.padding != (0, 0):
                return "the reduction is not a plain convolution without padding"
            if conv.kernel_size != conv.stride or conv.stride[0] != conv.stride[1]:
                return f"the reduction has stride {conv.stride}, expected its kernel size, {conv.kernel_size}"
        if self.pooling is not None:
            norms.append(self.pooling[2])
            if not is_square(self.pooling[1], 1):
                return "the convolution after pooling is not one of 1×1"
        if (mix := self.mix) is not None:
            if not mix.groups == mix.in_channels == mix.out_channels:
                return "the convolution is not depthwise"
            if not is_square(mix, 3, mix.groups):
                return f"the convolution {NO_SQUARE}"
        return (
            why_norms_unsupported(*norms)
            or _why_convolutions_unsupported(self.pairs())
            or _why_gelu_replaced(self.activation)
        )

    def dropout_p(self) -> float:
        """Returns the probability of dropping an attention probability now."""
        drop = self.attention_drop
        if drop is None or not drop.training:
            return 0.0
        return cast(float, drop.p if hasattr(drop, "p") else _dropout_of(drop))

    def why_dropout_active(self) -> str | None:
        """Returns a reason if attention dropout is active and needs upstream's forward, or None."""
        p = 0.0 if self.drops_probabilities else self.dropout_p()
        return f"dropout of attention probabilities is active (p = {p:g}, training)" if p > 0 else None

    def layers(self) -> list[nn.Linear | LinearInt8]:
        """Returns the linear layers: of Q, K and V, after attention, and the two of the MLP."""
        return [*self.linears, self.proj, self.fc1, self.fc2]

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the factors of the layer scales; None where there are none."""
        first, second = (
            getattr(scale, "gamma", getattr(scale, "lambda1", None)) for scale in self.layer_scales
        )
        return first, second

    def as_operator(self) -> TransformerBlock:
        """Returns the arguments of ``transformer_block``: live tensors, but layers with a scale folded in."""
        of_proj, of_fc2 = self.factors()
        linears = [_linear_of(linear) for linear in self.linears]
        q, k, v = linears[:-1] + _divided(linears[-1], 4 - len(linears))
        return TransformerBlock(
            norm1=norm_of(self.norm1),
            reduce=self._reduce(),
            linears=(q, k, v),
            num_heads=self.num_heads,
            scale=self.scale,
            proj=_scaled(self.proj, of_proj),
            norm2=norm_of(self.norm2),
            fc1=_linear_of(self.fc1),
            approximate=self.approximate,
            fc2=_scaled(self.fc2, of_fc2),
            mix=None if self.mix is None else DepthwiseConv(self.mix.weight, self.mix.bias),
        )

    def _reduce(self) -> tuple[ConvBatchNorm, ConvBatchNorm, ConvBatchNorm] | Reduction | None:
        if self.branches:
            q, k, v = (ConvBatchNorm.from_modules(*pair) for pair in self.pairs())
            return q, k, v
        if self.reduction is None:
            return None
        conv, norm = self.reduction
        return Reduction(conv.weight, conv.bias, norm_of(norm))


class StageParts(NamedTuple):
    """The modules of a stage: its embedding, with a BatchNorm in some, its blocks, and a LayerNorm in some.

    Attributes:
        conv, batch_norm, norm: The convolution, BatchNorm and LayerNorm of the embedding.
        class_token: (1, 1, C), if the stage has one.
        blocks: Its blocks.
        last_norm: The LayerNorm after them, if there is one.
        token_keep_bounds: The least and the greatest fraction of tokens that stay, where entropy decides.
    """

    conv: nn.Conv2d
    batch_norm: nn.BatchNorm2d | None
    norm: nn.LayerNorm
    class_token: Tensor | None
    blocks: Sequence[BlockParts]
    last_norm: nn.LayerNorm | None = None
    token_keep_bounds: tuple[float, float] = (0.0, 1.0)

    def modules(self) -> list[nn.Module]:
        """Returns the modules that a stage as one step replaces."""
        own = self.conv, self.batch_norm, self.norm, self.last_norm
        return [
            *(module for module in own if module is not None),
            *(module for block in self.blocks for module in block.modules()),
        ]


def _prepared_linear(module: Any) -> Any:
    """Returns the tensors of a linear layer, or the layer itself if it is watched."""
    is_plain = is_plain_linear(module) and not is_shadowed(module)
    return Linear(module.weight, module.bias) if is_plain else module


def _unless_identity(module: Any) -> Any:
    return None if type(module) is nn.Identity and not is_watched(module) else module


def norm_of(norm: nn.LayerNorm) -> Norm:
    """Returns the live tensors of a LayerNorm."""
    return Norm(norm.weight, norm.bias, norm.eps)


def wide(tensor: Tensor) -> Tensor:
    """Returns a tensor in float32, or a float64 tensor as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _dropout_of(module: Any) -> float | None:
    """Returns the probability in a module of attention that has no module for its dropout, or None."""
    names = ("attention_dropout", "dropout_prob", "dropout")
    found = (vars(module).get(name) for name in names if isinstance(module, nn.Module))
    return next((p for p in found if isinstance(p, float | int)), None)


def _linear_of(linear: nn.Linear | LinearInt8) -> AnyLinear:
    if isinstance(linear, LinearInt8):
        return linear.parameters_of_operator()
    return Linear(linear.weight, linear.bias)


def _divided(layer: AnyLinear, count: int) -> list[AnyLinear]:
    """Returns layers that each make an equal part of a layer's outputs, on views of its tensors."""
    if count == 1:
        return [layer]
    parts = ([None] * count if each is None else each.detach().chunk(count) for each in layer)
    return [type(layer)(*tensors) for tensors in zip(*parts, strict=True)]


def _scaled(linear: nn.Linear | LinearInt8, factors: Tensor | None) -> AnyLinear:
    """Returns a linear layer with the factors of its outputs folded into weight, or its scales, and bias."""
    if factors is None:
        return _linear_of(linear)
    bias = None if linear.bias is None else (wide(factors) * linear.bias).to(linear.bias.dtype)
    if isinstance(linear, LinearInt8):
        scales = (wide(factors) * linear.weight_scale).float()
        return QuantizedLinear(linear.weight, scales, bias)
    return Linear((wide(factors)[:, None] * linear.weight).to(linear.weight.dtype), bias)


def gelu_variant(activation: Any) -> GeluVariant:
    """Returns the variant of an activation for :func:`cvt_kernels.gelu`."""
    if type(activation) is nn.GELU:
        return cast(GeluVariant, activation.approximate)
    return GELU_VARIANTS.get(type(activation).__name__, "quick")


# Reasons --------------------------------------------------------------------------------------------------


def _why_convolutions_unsupported(pairs: Iterable[tuple[Any, Any]]) -> str | None:
    """Returns why pairs of convolution and BatchNorm do not fit a CvT, or None."""
    for conv, bn in pairs:
        # As an attribute it takes far longer to find. One that is no parameter may be any tensor.
        if conv._parameters.get("bias", conv) is not None:
            return "a convolution has a bias"
        if not conv.groups == conv.in_channels == conv.out_channels:
            return "a convolution is not depthwise"
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            return f"a convolution pads by {conv.padding_mode!r}, {conv.padding!r}; expected numbers of zeros"
        kernel, stride, padding, dilation = conv.kernel_size, conv.stride, conv.padding, conv.dilation
        if (kernel[0], stride[0], padding[0], dilation[0]) != (kernel[1], stride[1], padding[1], dilation[1]):
            return "a convolution is not the same in both directions"
        if bn.running_mean is not None and not (is_frozen_batch_norm(bn) or bn.track_running_stats):
            return "a BatchNorm has running statistics that it no longer tracks"
        if not 0 <= (momentum := getattr(bn, "momentum", None) or 0.0) <= 1:
            return f"a BatchNorm has momentum {momentum:g}, expected a number in [0, 1] or None"
    return None


def why_norms_unsupported(*norms: Any) -> str | None:
    """Returns which of the modules is no LayerNorm over the last dimension of positive eps, or None."""
    for norm in norms:
        plain = type(norm) is nn.LayerNorm or type(norm).__bases__ == (nn.LayerNorm,)
        if not plain or len(norm.normalized_shape) != 1:
            return f"{class_name(type(norm))} is not a LayerNorm over the last dimension"
        if not norm.eps > 0:
            return f"{type(norm).__qualname__} has eps = {norm.eps:g}, expected more than 0"
    return None


#: The end of a reason for a convolution that is no :func:`is_square` of 3×3.
NO_SQUARE = "is not one of 3×3 with stride 1, padded by one zero on each side"


def is_square(conv: Any, size: int, groups: int = 1) -> bool:
    """Returns whether a convolution is one of size×size with stride 1, padded by zeros to keep the grid."""
    geometry = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
    return geometry == ((size, size), (1, 1), (size // 2, size // 2), (1, 1), groups, "zeros")


def _why_gelu_replaced(activation: Any) -> str | None:
    """Returns a reason if an activation's function has been replaced, or None."""
    act = None if activation is None else vars(activation).get("act")
    if act is None:
        return None
    function, settings = (act.func, act.keywords) if isinstance(act, functools.partial) else (act, {})
    if function is F.gelu:
        own = settings.get("approximate", "none") == gelu_variant(activation)
    else:  # a method, which computes the same in several steps
        own = getattr(act, "__func__", act) in vars(type(activation)).values()
    return None if own else f"the function of {type(activation).__qualname__} has been replaced"


def class_name(kind: type) -> str:
    """Returns the name of a class, with its module if PyTorch has another class of that name."""
    name = kind.__qualname__
    return name if getattr(nn, name, kind) is kind else f"{kind.__module__}.{name}"


def why_another_class(module: Any, expected: str | None = None) -> str:
    """Returns a reason for a module of another class than expected, with a hint for peft's modules."""
    kind = type(module)
    reason = f"is a {class_name(kind)}" + ("" if expected is None else f", expected {expected}")
    if kind.__module__.partition(".")[0] == "peft":
        reason += "; merge_and_unload() of the model with adapters puts plain layers back"
    return reason


def is_named(kind: type, names: Collection[Any]) -> bool:
    """Returns whether the name of a class, with or without its module, is among some names."""
    return kind.__name__ in names or f"{kind.__module__}.{kind.__name__}" in names


def is_at_home(kind: type, upstream: str) -> bool:
    """Returns whether a class is in the package of an upstream, if its classes are in one."""
    home = kind.__module__.partition(".")[0]
    return _PACKAGES.get(upstream, home) == home


# The entries of the table -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Entry:
    """A class of upstream's.

    Attributes:
        upstream, name: The project whose class it is, and its name.
        parts: Returns the modules of one; raises AttributeError for one that is not built as upstream's.
        arguments: Names of the arguments of ``forward``; empty for the classes of ``cvt``, which call the
            fused forward themselves.
        children: Names of the submodules. There are no parameters or buffers beside them.
        classes: Names of the classes within that hold the modules of its parts; of a stage, all outside of
            ``torch.nn``.
        variant: Name of a submodule that distinguishes the class from another one of the same name.
        may_take: Names of arguments that ``forward`` has in some versions only.
        is_only_served: True if it runs as one operator on a CPU, and elsewhere by its own forward.
        why_unserved: Why no operator computes blocks of the class; empty if some does.
    """

    upstream: str
    name: str
    parts: Callable[[Any], Any]
    arguments: tuple[str, ...] = ()
    children: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    variant: str = ""
    may_take: tuple[str, ...] = ()
    is_only_served: bool = False
    why_unserved: str = ""

    @property
    def key(self) -> str:
        """The name of the entry in the table, and in pickles."""
        return f"{self.upstream} {self.name}" + (f" with {self.variant}" if self.variant else "")

    def first_of(self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Returns the first arguments of a call; None if others say more than to leave something out."""
        if len(args) > len(self.arguments):
            return None
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        first = [given.pop(name, None) for name in self.arguments[:count]]
        # A layer of transformers 5 gets all that the model was called with; hidden states are recorded
        # elsewhere.
        given.pop("output_hidden_states", None)
        return None if any(value is not None and value is not False for value in given.values()) else first


@dataclass(eq=False)
class BlockEntry(Entry):
    """A class of blocks, embeddings or heads.

    Attributes:
        layers: Paths of the layers that ``quantize`` may replace: linear, or an embedding's convolution.
        forward: The fused forward of an embedding or a head; ``NotImplemented`` leaves a call to its own.
        is_layer: True if a block is served as one operator. (Those of a CvT are, within their stage.)
        grid_arguments: How many arguments after the tokens are their grid: 2, 1 that is a pair, or none.
    """

    layers: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    is_layer: bool = False
    grid_arguments: int = 2
    noun = "layer"

    @property
    def serving_key(self) -> str:
        """The name among the entries of what is served as one, and in pickles."""
        return f"{self.key}, frozen"

    @property
    def is_embedding(self) -> bool:
        """True for embeddings, whose layer is a convolution."""
        return "Embed" in self.name

    def call_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[Any, Any]] | None:
        """Returns the tokens and the grid of a block's call, or None for another form or attention maps.

        Where the forward takes no grid, the tokens are a column.
        """
        count = 1 + self.grid_arguments
        given = args if len(args) == count and not kwargs else self.first_of(count, args, kwargs)
        if given is None or not isinstance(x := given[0], Tensor):
            return None
        grid = given[1] if count == 2 else (x.shape[1], 1) if count == 1 and x.ndim == 3 else given[1:]
        if grid is None or type(grid) is int or len(grid) != 2 or grid[0] is None or grid[1] is None:
            return None
        return x, (grid[0], grid[1])

    def others(self, grid: tuple[int, int]) -> tuple[Any, ...]:
        """Returns what the block's forward takes after the tokens in a call that is served."""
        forms = (None,) * ("attention_mask" in self.arguments), (grid,), grid
        return forms[self.grid_arguments]

    def result(self, block: nn.Module, tokens: Tensor, grid: tuple[int, int]) -> Any:
        """Returns the result of a block's forward for its tokens (B, T, C)."""
        return (tokens,) if "output_attentions" in self.arguments else tokens

    def tokens(self, result: Any) -> Tensor:
        """Returns the tokens in a result of a block's forward."""
        tokens: Tensor = result[0] if isinstance(result, tuple) else result
        return tokens


@dataclass(eq=False, kw_only=True)
class StageEntry(Entry):
    """A class of stages, each an embedding and its blocks, which run as one; its parts are ``StageParts``.

    Attributes:
        embedding: Returns the convolution and the class token, if there is one.
        result: Takes a stage, tokens (B, T, C) and their grid; returns the result of the stage's forward.
        tokens: Takes a result of the stage's forward; returns its tokens.
        others: Takes the grid; returns what the forward takes after the image in a call that is served.
        why_unsupported: Returns why a stage of upstream's structure cannot run as one, or None.
    """

    embedding: Callable[[Any], tuple[nn.Conv2d, Tensor | None]]
    result: Callable[[Any, Tensor, tuple[int, int]], Any]
    tokens: Callable[[Any], Tensor]
    others: Callable[[Any], tuple[Any, ...]] = lambda grid: ()
    why_unsupported: Callable[[Any], str | None] = lambda stage: None
    noun = "stage"

    @property
    def serving_key(self) -> str:
        """The name among the entries of what is served as one, and in pickles."""
        return self.key

    def call_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, None] | None:
        """Returns the image of a call, which has no grid; None for a call of another form."""
        given = self.first_of(1, args, kwargs)
        return None if given is None or not isinstance(given[0], Tensor) else (given[0], None)


class Family(NamedTuple):
    """The entries of a family of models, which a file in ``families`` has.

    Attributes:
        models: The models that have its blocks, each with the projects whose they are, for messages.
        entries: Of its blocks, embeddings and heads.
        stages: Of its stages that run as one.
        classifiers: Of classifiers that read the class token alone.
        recognize: Returns the entry of a module, given the module that it is in, and None for modules of
            others; None if the name of a class says enough.
        recognize_stage: The same for stages.
    """

    models: tuple[str, ...]
    entries: tuple[BlockEntry, ...]
    stages: tuple[StageEntry, ...] = ()
    classifiers: tuple[ClassifierEntry, ...] = ()
    recognize: Callable[[nn.Module, nn.Module | None], BlockEntry | None] | None = None
    recognize_stage: Callable[[nn.Module], StageEntry | None] | None = None


#: The entry of something that is served as one.
ServedEntry = StageEntry | BlockEntry
#: What the ``parts`` of a block entry return.
Parts = BlockParts | BypassedParts


def map_and_class_token(stage: Any, tokens: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Returns the map (B, C, H, W) and the class token (B, 1, C), if there is one, of a stage's tokens."""
    class_tokens = tokens.shape[1] - grid[0] * grid[1]
    class_token, spatial = tokens.split([class_tokens, tokens.shape[1] - class_tokens], dim=1)
    return spatial.transpose(1, 2).unflatten(2, grid), class_token if class_tokens else None


def tokens_of_map(result: tuple[Tensor, Tensor | None]) -> Tensor:
    """Returns the tokens (B, T, C) of a result of :func:`map_and_class_token`."""
    spatial, class_token = result
    tokens = spatial.flatten(2).transpose(1, 2)
    return tokens if class_token is None else torch.cat((class_token, tokens), dim=1)


def unserved_entry(upstream: str, name: str, reason: str) -> BlockEntry:
    """Returns the entry of a class of blocks that no operator computes, with the reason."""
    return BlockEntry(
        upstream, name, lambda self: BypassedParts([]), is_only_served=True, why_unserved=reason
    )
