"""The blocks of the model in ``cvt``, which call the operators as they are: they need no fused forward."""

from __future__ import annotations

from torch import nn

from .entries import BlockEntry, always, by_name

#: The module that defines them. (Nothing here imports it.)
MODULE = "cvt.model"

UPSTREAM = "cvt"

ENTRIES = by_name(
    BlockEntry(upstream=UPSTREAM, name="ConvEmbed", operators=always("layer_norm")),
    BlockEntry(upstream=UPSTREAM, name="Block", operators=always("layer_norm", "add_layer_norm")),
    BlockEntry(upstream=UPSTREAM, name="Attention", operators=always("conv_projection", "attention")),
    BlockEntry(upstream=UPSTREAM, name="Mlp", operators=always("gelu")),
)


def recognize(module: nn.Module) -> BlockEntry | None:
    """Returns the entry of a module whose class is one of ``cvt`` or derives from it; None for others."""
    cls = own_class(type(module))
    return None if cls is None else ENTRIES.get(cls.__name__)


def own_class(cls: type) -> type | None:
    """Returns the class of ``cvt`` that ``cls`` is or derives from; None for other classes."""
    return next((base for base in cls.__mro__ if base.__module__ == MODULE), None)
