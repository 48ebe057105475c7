"""The entries of the table of blocks and stages: how they are recognized, and what their forward is.

Blocks are recognized by the names and the structure of their classes; nothing upstream is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .parts import BlockParts, BypassedParts, StageParts


class BlockEntry(NamedTuple):
    """A class of blocks, embeddings or heads.

    Attributes:
        upstream: Name of the project whose class it is.
        name: Name of the class.
        parts: Returns the modules of one; raises AttributeError for one that is not built as upstream's.
        arguments: Names of the arguments of ``forward``; empty for the classes of ``cvt``, which call the
            fused forward themselves.
        children: Names of the submodules. There are no parameters or buffers beside them.
        classes: Names of the classes within a block that hold the modules of its parts.
        layers: Paths of what ``quantize`` may replace: linear layers, or the convolution of an embedding.
        forward: The fused forward of an embedding or a head, which may return ``NotImplemented`` for
            arguments that it leaves to the own one; None for blocks.
        variant: Name of a submodule by which the class is told from another one of the same name; empty if
            there is none.
        is_layer: True if a block is served as one operator. (Those of a CvT are, within their stage.)
    """

    upstream: str
    name: str
    parts: Callable[[Any], Any]
    arguments: tuple[str, ...] = ()
    children: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    layers: tuple[str, ...] = ()
    forward: Callable[..., Any] | None = None
    variant: str = ""
    is_layer: bool = False

    @property
    def key(self) -> str:
        """The name of the entry in the table, and in pickles."""
        return f"{self.upstream} {self.name}" + (f" with {self.variant}" if self.variant else "")

    @property
    def serving_key(self) -> str:
        """The name among the entries of what is served as one, and in pickles."""
        return f"{self.key}, frozen"

    @property
    def noun(self) -> str:
        """The word for what it describes."""
        return "layer"

    @property
    def is_embedding(self) -> bool:
        """True for embeddings, whose layer is a convolution."""
        return "Embed" in self.name

    def call_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[Any, Any]] | None:
        """Returns the tokens and the grid of a block's call; None for another form, or for attention maps."""
        if len(args) == 3 and not kwargs:
            x, height, width = args
        else:
            if len(args) > len(self.arguments):
                return None
            given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
            x, height, width = (given.pop(name, None) for name in self.arguments[:3])
            # A layer of transformers 5 gets all that the model was called with; hidden states are recorded
            # elsewhere.
            given.pop("output_hidden_states", None)
            if any(value is not None and value is not False for value in given.values()):
                return None
        if not isinstance(x, Tensor) or height is None or width is None:
            return None
        return x, (height, width)

    def result(self, tokens: Tensor, grid: tuple[int, int]) -> Any:
        """Makes what a block's forward returns of its tokens (B, T, C)."""
        return (tokens,) if "output_attentions" in self.arguments else tokens

    def tokens(self, result: Any) -> Tensor:
        """Returns the tokens of what a block's forward has returned."""
        tokens: Tensor = result[0] if isinstance(result, tuple) else result
        return tokens


class StageEntry(NamedTuple):
    """A class of stages, each an embedding and its blocks, which are served as one.

    Attributes:
        block: Describes the class as if it were a block.
        classes: Names of the classes that its submodules may have besides those of ``torch.nn``, with or
            without their module.
        parts: Returns the modules of a stage, whose structure is as upstream has it.
        embedding: Returns the convolution and the class token, if there is one.
        result: Makes what the stage's forward returns of its tokens (B, T, C) and their grid.
        tokens: Makes the tokens of what the stage's forward has returned.
        why_unsupported: Says why a stage of upstream's structure cannot be served as one; None if it can.
    """

    block: BlockEntry
    classes: frozenset[str]
    parts: Callable[[Any], StageParts]
    embedding: Callable[[Any], tuple[nn.Conv2d, Tensor | None]]
    result: Callable[[Tensor, tuple[int, int]], Any]
    tokens: Callable[[Any], Tensor]
    why_unsupported: Callable[[Any], str | None] = lambda stage: None

    @property
    def serving_key(self) -> str:
        """The name among the entries of what is served as one, and in pickles."""
        return self.block.key

    @property
    def noun(self) -> str:
        """The word for what it describes."""
        return "stage"

    def call_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, None] | None:
        """Returns the image of a call, which has no grid; None for a call of another form."""
        given = (*args, *kwargs.values())
        return (given[0], None) if len(given) == 1 and isinstance(given[0], Tensor) else None


#: The entry of something that is served as one.
ServedEntry = StageEntry | BlockEntry
#: What the ``parts`` of a block entry return.
Parts = BlockParts | BypassedParts


def block_of(entry: ServedEntry) -> BlockEntry:
    """Returns the description of the class of a stage or a layer."""
    return entry.block if isinstance(entry, StageEntry) else entry


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


def named(*entries: BlockEntry) -> dict[str, tuple[BlockEntry, ...]]:
    """Returns the entries of an upstream by the names of their classes, of which some have variants."""
    names = dict.fromkeys(entry.name for entry in entries)
    return {name: tuple(entry for entry in entries if entry.name == name) for name in names}


def recognize_by_name(module: nn.Module, entries: dict[str, tuple[BlockEntry, ...]]) -> BlockEntry | None:
    """Returns the entry of a module by its classes' names and its submodules; None for others.

    A module that has the name only gets an entry too, with which it will not agree.
    """
    names = (cls.__name__ for cls in type(module).__mro__)
    variants = next((entries[name] for name in names if name in entries), ())
    alike = (entry for entry in variants if not entry.variant or entry.variant in module._modules)
    return next(alike, variants[0] if variants else None)
