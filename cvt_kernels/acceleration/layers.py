"""A layer of SegFormer, PVT, PVT v2 or GLPN for serving: one call of ``transformer_block``.

Nothing is folded: the operator gets the live tensors, and notices itself where its packed copies of them are
outdated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import backends
from ..ops.programs import Programs
from ..ops.transformer_block import transformer_block
from ..records import Reduction, TransformerBlock
from . import pvt, segformer
from .entries import BlockEntry, StageEntry, why_another_class
from .fused import GELU_VARIANTS, is_plain_linear
from .matching import TABLE
from .parts import BlockParts


class LayerEntry(NamedTuple):
    """A class of layers of a pyramid, each of which ``accelerate(freeze=True)`` serves as one operator.

    Attributes:
        block: The entry of the same class among the blocks.
        classes: Names of the classes that its submodules may have besides those of ``torch.nn``.
        parts: Returns the modules of a layer, whose structure is as upstream has it; None for linear
            attention, for which ``block`` has a reason.
    """

    block: BlockEntry
    classes: frozenset[str]
    parts: Callable[[Any], BlockParts | None]

    @property
    def key(self) -> str:
        """The name of the entry in the table, and in pickles, where the block has one too."""
        return f"{self.block.key}, frozen"

    @property
    def noun(self) -> str:
        """The word for what it describes."""
        return "layer"

    def result(self, tokens: Tensor, grid: tuple[int, int]) -> Any:
        """Makes what the layer's forward returns of its tokens (B, T, C)."""
        return (tokens,) if "output_attentions" in self.block.arguments else tokens

    def tokens(self, result: Any) -> Tensor:
        """Returns the tokens of what the layer's forward has returned."""
        tokens: Tensor = result[0] if isinstance(result, tuple) else result
        return tokens

    def call_of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, tuple[Any, Any]] | None:
        """Returns the tokens and the grid of a call; None for one of another form, or for attention maps."""
        if len(args) > len(self.block.arguments):
            return None
        given = {**dict(zip(self.block.arguments, args, strict=False)), **kwargs}
        x, *grid = (given.pop(name, None) for name in ("hidden_states", "height", "width"))
        # A layer of transformers 5 gets all that the model was called with; hidden states are recorded
        # elsewhere.
        given.pop("output_hidden_states", None)
        asked = any(value is not None and value is not False for value in given.values())
        if asked or not isinstance(x, Tensor) or any(size is None for size in grid):
            return None
        return x, (grid[0], grid[1])


#: The entry of something that ``accelerate(freeze=True)`` serves as one.
FrozenEntry = StageEntry | LayerEntry

#: The beginning of the names of the classes within layers, and the functions that return the parts of layers,
#: by the names of the classes of layers.
_CLASSES: dict[str, tuple[str, Callable[[Any], BlockParts | None]]] = {
    "SegformerLayer": ("Segformer", segformer.parts),
    "PvtLayer": ("Pvt", pvt.parts),
    "PvtV2BlockLayer": ("PvtV2", pvt.parts_of_v2),
    "GLPNLayer": ("GLPN", segformer.parts),
}

#: The ends of these names.
_ENDS = (
    "Attention",
    "ConvFeedForwardNetwork",
    "DWConv",
    "DepthWiseConv",
    "DropPath",
    "EfficientSelfAttention",
    "FFN",
    "MixFFN",
    "MixMLP",
    "SelfAttention",
    "SelfOutput",
    "SequenceReduction",
)


def _layer_entry(block: BlockEntry) -> LayerEntry:
    beginning, parts = _CLASSES[block.name]
    classes = {f"{beginning}{end}" for end in _ENDS} | {"GlpnDropPath"} | GELU_VARIANTS.keys()
    return LayerEntry(block._replace(why_unsupported=_why_linear), frozenset(classes), parts)


def _why_linear(layer: Any) -> str | None:
    if getattr(layer._modules.get("attention"), "linear_attention", False):
        return "its attention is linear, which no operator computes together with the rest of the layer"
    return None


#: Every entry by its key.
LAYERS = {
    entry.key: entry
    for entry in map(_layer_entry, (each for each in TABLE.values() if each.name in _CLASSES))
}


#: Names for the linear layers.
_LINEARS = ("Q", "K", "V", "the projection", "the first layer of the MLP", "the second layer of the MLP")


def entry_of(block: BlockEntry) -> LayerEntry | None:
    """Returns the entry of the layers that are blocks of an entry; None for other blocks."""
    return LAYERS.get(f"{block.key}, frozen")


def why_parts_unsupported(parts: BlockParts) -> str | None:
    """Says why the parts of a layer are not those of a block; None if they are."""
    for name, layer in zip(_LINEARS, parts.layers(), strict=True):
        if not is_plain_linear(layer):
            return f"the linear layer of {name} {why_another_class(layer, 'a plain nn.Linear')}"
    return None


def serve(
    block: TransformerBlock, x: Tensor, grid: tuple[Any, Any], programs: Programs
) -> tuple[Tensor, tuple[int, int]] | None:
    """Computes a layer; None for tokens that are not such, so that its own forward says what is wrong.

    The result is a tensor of its own, since others may hold ``x``.
    """
    if not _are_tokens(block, x, grid):
        return None
    out = programs.run(x, grid)
    if out is None:
        out = transformer_block(x, grid, block)
        programs.add(x, block.tensors, lambda: _bound(block, x, grid), grid)
    return out, grid


def _bound(
    block: TransformerBlock, x: Tensor, grid: tuple[int, int]
) -> list[Callable[[Tensor], Tensor]] | None:
    operator: Any = backends.operators["transformer_block"]
    step = operator.bound(operator.bind(x, grid, block))
    return None if step is None else [step]


def _are_tokens(block: TransformerBlock, x: Tensor, grid: tuple[Any, Any]) -> bool:
    weight = block.linears[0].weight
    if (x.dtype, x.device, x.ndim) != (weight.dtype, weight.device, 3) or x.shape[2] != weight.shape[1]:
        return False
    if not all(isinstance(size, int) for size in grid):
        return False
    if block.mix is None and block.reduce is None:
        return True  # of a PVT, which may have a class token
    ratio = block.reduce.weight.shape[3] if isinstance(block.reduce, Reduction) else 1
    return x.shape[1] == grid[0] * grid[1] and min(grid) >= ratio
