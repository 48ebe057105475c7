"""Several transformer blocks, one after the other, as one operator for inference.

What a block leaves behind for the next one besides the tokens stays within the operator. ``gluon`` has
CvT's blocks on sm_90, without a launch for LayerNorm. ``composed`` computes block by block.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ... import backends, choose, reference
from ...backends import Implementation, Record
from ...declaration import gluon_kernels, operator
from ...records import TransformerBlock
from ..transformer_block import checking, composed


def _blocks_of(call: Any) -> list[Record]:
    """Returns the records of ``transformer_block`` of a call's blocks."""
    bind = backends.operators["transformer_block"].bind
    return [bind(call.x, call.grid, block, inplace=call.inplace) for block in call.blocks]


def _check(call: Any) -> None:
    if not call.blocks:
        raise ValueError("blocks: got none, expected at least one block")
    for i, each in enumerate(_blocks_of(call)):
        error = None
        try:
            checking.check(each)
        except (TypeError, ValueError) as wrong:
            error = wrong
        if error is not None:
            raise type(error)(re.sub(r"^block\b", f"blocks[{i}]", str(error)))


def _cost_class(call: Record) -> str:
    kinds = map(backends.operators["transformer_block"].cost_class, _blocks_of(call))
    return "; ".join(f"{len([*alike])} blocks, {kind}" for kind, alike in itertools.groupby(kinds))


def _sample(factor: int, call: Record) -> Record:
    cut = backends.operators["transformer_block"].sample(factor, _blocks_of(call)[0])
    return call._replace(x=cut.x, grid=cut.grid)


def _composition(call: Any) -> Callable[..., Tensor] | None:
    return None if choose.may_be_ours("transformer_blocks", call.x.device.type) else _compose


def _compose(call: Record) -> Tensor:
    x = call.x
    for each in _blocks_of(call):
        x = composed.transformer_block(each._replace(x=x))
    return x


def why_not_in_gluon(x: Tensor, grid: tuple[int, int], block: TransformerBlock) -> str | None:
    """Returns why the kernels in Gluon, which this machine has, cannot compute a block, or None."""
    from . import gluon  # which imports Triton

    return gluon.why_not_served(x, grid, block)


@operator(
    backends={"gluon": gluon_kernels("gluon"), "composed": Implementation(_compose, ("cpu", "cuda"))},
    cost_class=_cost_class,
    sample=_sample,
    defaults=("composed", "reference"),
    sequences={"blocks": "a sequence of TransformerBlock"},
    check=_check,
    composition=_composition,
)
def transformer_blocks(
    x: Tensor, grid: tuple[int, int], blocks: Sequence[TransformerBlock], *, inplace: bool = False
) -> Tensor:
    """Computes transformer blocks one after the other, in evaluation.

    Args:
        x: Tokens ``(B, T, C)`` as in :func:`cvt_kernels.transformer_block`.
        grid: ``(H, W)`` of the spatial tokens.
        blocks: The parameters of each block, in their order. Kernels may cache packed copies of the weights
            until these change or die.
        inplace: Whether the result overwrites ``x``. Autograd does not track it.

    Returns:
        The shape and dtype of ``x``; ``x`` itself if ``inplace``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, an invalid setting, no block, ``inplace`` or quantized layers
            where a gradient is required, or ``inplace`` where ``x`` is not contiguous.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    for block in blocks:
        x = reference.transformer_block(x, grid, block, inplace=inplace)
    return x
