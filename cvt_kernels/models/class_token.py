"""The last block of a classifier for its class token alone, where the head reads no other token.

Keys and values are still those of all tokens. While a classifier runs, its last stage and the last block know
that nobody reads the other tokens of their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import modes
from ..classes import cached, original_class
from .watching import Told, is_watched, patch_of

_Result = TypeVar("_Result")


#: The last stage and the last block of the classifier that runs.
_stage, _block = Told(), Told()


def with_class_token_only(stage: nn.Module, block: nn.Module, run: Callable[[], _Result]) -> _Result:
    """Calls ``run``, during which the last stage and its last block may compute the class token alone."""
    with _stage.within(stage), _block.within(block):
        return run()


def is_stage_wanted(stage: nn.Module) -> bool:
    """Returns whether a stage, whose modules nobody watches, may compute the class token alone."""
    return stage in _stage


def is_block_wanted(block: nn.Module) -> bool:
    """Returns whether a block may compute the class token alone.

    It may if nobody watches its modules, and no dropout within it draws random numbers for all tokens.
    """
    if torch.compiler.is_compiling() or block not in _block:
        return False
    return not any(module.training or is_watched(module) for module in block.modules())


def class_token_of(tokens: Tensor) -> Tensor:
    """Returns the index (B, 1) of each image's class token."""
    return torch.zeros(len(tokens), 1, dtype=torch.int64, device=tokens.device)


class ClassifierEntry(NamedTuple):
    """A class of classifiers.

    Attributes:
        upstream, name: The project whose class it is, and its name.
        arguments: Names of the first arguments of ``forward``, the images first.
        path: Paths of the modules between a classifier and its last stage.
        last_stage: Returns the last stage, or the last block of a model without stages.
        blocks: Returns the list of a stage's blocks; None without stages.
        reads_class_token: Returns whether the head reads the class token alone, without hidden states.
        forward: Computes such a call, or returns NotImplemented where upstream's forward has to; None for
            upstream's.
    """

    upstream: str
    name: str
    arguments: tuple[str, ...]
    path: tuple[str, ...]
    last_stage: Callable[[Any], nn.Module]
    blocks: Callable[[Any], nn.Module] | None
    reads_class_token: Callable[[Any, dict[str, Any]], bool]
    forward: Callable[..., Any] | None = None


def find_last(
    model: Any, entry: ClassifierEntry, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[nn.Module, nn.Module] | None:
    """Returns the last stage and block of a classifier whose other tokens nobody reads in a call, or None."""
    if model.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if torch_module._has_any_global_hook() or torch.jit.is_tracing() or modes.is_transformed():
        return None
    call = {**dict(zip(entry.arguments, args, strict=False)), **kwargs}
    images = call.pop(entry.arguments[0], None)
    if len(args) > len(entry.arguments) or not isinstance(images, Tensor):
        return None
    if not entry.reads_class_token(model, call):
        return None
    between = [model.get_submodule(path) for path in entry.path]
    stage = entry.last_stage(model)
    blocks = {"": stage} if entry.blocks is None else entry.blocks(stage)._modules
    block = next(reversed(blocks.values()), None)
    if block is None or any(map(is_watched, (*between, stage, block))):
        return None
    return (stage, block) if all(_has_own_forward(type(m), type(m).forward) for m in between) else None


def run(
    model: nn.Module,
    entry: ClassifierEntry,
    own: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a classifier, whose last block computes what the head reads, by its entry or ``own`` forward."""
    last = find_last(model, entry, args, kwargs)
    if last is None:
        return own(model, *args, **kwargs)
    upstream = original_class(type(model))
    ours = entry.forward if _has_own_forward(upstream, upstream.forward) else None

    def forward() -> Any:
        result = NotImplemented if ours is None else ours(model, *args, **kwargs)
        return own(model, *args, **kwargs) if result is NotImplemented else result

    return with_class_token_only(*last, forward)


@cached
def _has_own_forward(cls: Any, forward: Any) -> bool:
    """Returns whether the ``forward`` of a class is the one that it was written with."""
    return patch_of(original_class(cls)) is None
