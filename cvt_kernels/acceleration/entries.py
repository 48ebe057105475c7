"""The entries of the table of blocks, and the reasons for not supporting a block that upstreams share.

An entry holds how its blocks are recognized, their fused forward, and what this forward takes for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parts import StageParts

#: What the BatchNorm of a projection may be.
BATCH_NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm)


class BypassedPart(NamedTuple):
    """A submodule whose work a fused forward does without calling it.

    Attributes:
        path: Names from the block to it; a number is a position among the children.
        kinds: What it may be: exact types, or names of classes, with or without their module. ``NoneType`` is
            among them if there need not be one.
    """

    path: tuple[str, ...]
    kinds: tuple[type | str, ...]


class BlockEntry(NamedTuple):
    """A class of blocks.

    Attributes:
        upstream: Name of the project whose class it is.
        name: Name of the class.
        arguments: Names of the arguments of ``forward``.
        children: Names of the submodules. There are no parameters or buffers beside them.
        layers: Those that ``quantize`` may replace: linear layers, or the convolution of an embedding.
        forward: The fused forward, which returns ``NotImplemented`` for arguments that it leaves to the own
            one; None for a class that calls the operators already.
        parts: The submodules that the fused forward, or a class that calls the operators, does not call.
        why_unsupported: Says why parts of the right kinds are not supported all the same; None if they are.
        why_not_now: Says why the block cannot be fused at the moment; None if it can.
        variant: Name of a submodule by which the class is told from another one of the same name; empty if
            there is none.
    """

    upstream: str
    name: str
    arguments: tuple[str, ...] = ()
    children: frozenset[str] = frozenset()
    layers: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    parts: tuple[BypassedPart, ...] = ()
    why_unsupported: Callable[[Any], str | None] = lambda block: None
    why_not_now: Callable[[Any], str | None] = lambda block: None
    variant: str = ""

    @property
    def key(self) -> str:
        """The name of the entry in the table, and in pickles."""
        return f"{self.upstream} {self.name}" + (f" with {self.variant}" if self.variant else "")

    @property
    def is_embedding(self) -> bool:
        """True for embeddings, whose layer is a convolution."""
        return "Embed" in self.name


class StageEntry(NamedTuple):
    """A class of stages, each an embedding and its blocks, which ``accelerate(freeze=True)`` serves as one.

    Attributes:
        block: Describes the class as if it were a block; its forward and parts do not matter.
        classes: Names of the classes that its submodules may have besides those of ``torch.nn``, with or
            without their module.
        parts: Returns the modules of a stage, whose structure is as upstream has it.
        embedding: Returns the convolution of its embedding and its class token, those of ``parts``.
        result: Makes what the stage's forward returns of its tokens (B, T, C) and their grid.
        tokens: Returns the tokens of what the stage's forward has returned.
    """

    block: BlockEntry
    classes: frozenset[str]
    parts: Callable[[Any], StageParts]
    embedding: Callable[[Any], tuple[nn.Conv2d, Tensor | None]]
    result: Callable[[Tensor, tuple[int, int]], Any]
    tokens: Callable[[Any], Tensor]

    @property
    def key(self) -> str:
        """The name of the entry in the table, and in pickles."""
        return self.block.key

    @property
    def noun(self) -> str:
        """The word for what it describes."""
        return "stage"

    def call_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, None] | None:
        """Returns the image of a call, which has no grid; None for a call of another form."""
        given = (*args, *kwargs.values())
        return (given[0], None) if len(given) == 1 and isinstance(given[0], Tensor) else None


def map_and_class_token(tokens: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """Returns the map (B, C, H, W) and the class token (B, 1, C), if there is one, of tokens."""
    class_tokens = tokens.shape[1] - grid[0] * grid[1]
    class_token, spatial = tokens.split([class_tokens, tokens.shape[1] - class_tokens], dim=1)
    return spatial.transpose(1, 2).unflatten(2, grid), class_token if class_tokens else None


def tokens_of_map(result: tuple[Tensor, Tensor | None]) -> Tensor:
    """Returns the tokens of which :func:`map_and_class_token` has made a result."""
    spatial, class_token = result
    tokens = spatial.flatten(2).transpose(1, 2)
    return tokens if class_token is None else torch.cat((class_token, tokens), dim=1)


def by_name(*entries: BlockEntry) -> dict[str, BlockEntry]:
    """Returns the entries of an upstream by the names of their classes."""
    return {entry.name: entry for entry in entries}


def variants_by_name(*entries: BlockEntry) -> dict[str, tuple[BlockEntry, ...]]:
    """Returns the entries of an upstream by the names of their classes, of which some have variants."""
    names = dict.fromkeys(entry.name for entry in entries)
    return {name: tuple(entry for entry in entries if entry.name == name) for name in names}


def recognize_variant(module: nn.Module, variants: dict[str, tuple[BlockEntry, ...]]) -> BlockEntry | None:
    """Returns the entry of a module by its classes' names and its submodules; None for others.

    A module that has the name only gets an entry too, with which it will not agree.
    """
    names = (cls.__name__ for cls in type(module).__mro__)
    entries = next((variants[name] for name in names if name in variants), ())
    alike = (entry for entry in entries if entry.variant in module._modules)
    return next(alike, entries[0] if entries else None)


def bypassed(parts: dict[str, type | str | tuple[type | str, ...]]) -> tuple[BypassedPart, ...]:
    """Returns the ``parts`` of an entry from what each may be, by its path with dots."""
    return tuple(
        BypassedPart(tuple(path.split(".")), kinds if isinstance(kinds, tuple) else (kinds,))
        for path, kinds in parts.items()
    )


# Reasons --------------------------------------------------------------------------------------------------


def why_convolutions_unsupported(branches: Iterable[tuple[Any, Any]]) -> str | None:
    """Says why the pairs of convolution and BatchNorm are not those of a CvT; None if they are."""
    for conv, bn in branches:
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
        if bn.training and not bn.track_running_stats and bn.running_mean is not None:
            return "a BatchNorm has running statistics that it no longer tracks"
    return None


def class_name(kind: type) -> str:
    """Returns the name of a class, with its module if PyTorch has another class of that name."""
    name = kind.__qualname__
    return name if getattr(nn, name, kind) is kind else f"{kind.__module__}.{name}"


def why_another_class(module: Any, expected: str | None = None) -> str:
    """Says that a module is not of the class that is expected, and how it becomes one if it is peft's."""
    kind = type(module)
    reason = f"is a {class_name(kind)}" + ("" if expected is None else f", expected {expected}")
    if kind.__module__.partition(".")[0] == "peft":
        reason += "; merge_and_unload() of the model with adapters puts plain layers back"
    return reason


def why_norms_unsupported(*norms: Any) -> str | None:
    """Says which of the modules is no LayerNorm over the last dimension of positive eps; None if all are."""
    for norm in norms:
        plain = type(norm) is nn.LayerNorm or type(norm).__bases__ == (nn.LayerNorm,)
        if not plain or len(norm.normalized_shape) != 1:
            return f"{class_name(type(norm))} is not a LayerNorm over the last dimension"
        if not norm.eps > 0:
            return f"{type(norm).__qualname__} has eps = {norm.eps:g}, expected more than 0"
    return None


def why_dropout_active(dropout: Any) -> str | None:
    """Says that the dropout of attention probabilities is active, if it is."""
    active = dropout.training and dropout.p > 0
    return f"dropout of attention probabilities is active (p = {dropout.p:g}, training)" if active else None
