"""Reports which blocks of a model run fused, by which backends, and why others do not."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import nn

from .. import backends
from ..tables import aligned
from .entries import BlockEntry
from .matching import find_blocks, is_fused, why_mismatched, why_not_now


class BlockCoverage(NamedTuple):
    """A row of :func:`coverage`: one block.

    Attributes:
        path: Its name in ``model.named_modules()``.
        class_name: Name of its class.
        fused: True if a call would run the fused forward now.
        backends: Operator → the backends that serve it on the block's device, with gradients if the block is
            in training mode and has parameters that require one. Under ``auto`` they are those of this
            machine's verdicts on all shapes and dtypes, the most frequent first, such as
            ``"native or reference"``; ``"not proven yet"`` if the first call will decide. ``"none"`` if no
            requested backend can serve.
        reason: Says why it is not fused; None if it is.
    """

    path: str
    class_name: str
    fused: bool
    backends: dict[str, str]
    reason: str | None


class Coverage(list[BlockCoverage]):
    """The rows of :func:`coverage`; as a string, an aligned table."""

    def __str__(self) -> str:
        rows = [("block", "class", "fused", "operators and their backends, or why not")]
        for row in self:
            served = ", ".join(f"{operator} {backend}" for operator, backend in row.backends.items())
            rows.append(
                (row.path, row.class_name, "yes" if row.fused else "no", row.reason or served or "linear")
            )
        fused = sum(row.fused for row in self)
        return "\n".join([*aligned(rows), "", f"{fused} of {len(self)} blocks fused"])


def coverage(model: nn.Module) -> Coverage:
    """Lists the blocks that :func:`accelerate` knows as they are now: fused by which backends, or why not.

    Args:
        model: Any module, accelerated or not; wrappers are looked into.

    Returns:
        A list of :class:`BlockCoverage`; print it.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: It has no block that could be supported.
    """
    return Coverage(_cover(path, block, entry) for path, block, entry in find_blocks(model))


def _cover(path: str, block: nn.Module, entry: BlockEntry) -> BlockCoverage:
    reason = why_mismatched(block, entry)
    if reason is None and entry.forward is not None:
        reason = why_not_now(block, entry) if is_fused(block) else "accelerate() has not been called"
    if reason is None and "forward" in vars(block):
        reason = "its forward has been replaced in this object"
    served: dict[str, str] = {}
    if reason is None:
        # A quantized or flattened block may have no parameter of its own.
        tensors = itertools.chain(block.parameters(), block.buffers())
        device_type = next((t.device.type for t in tensors), "cpu")
        gradient = block.training and any(parameter.requires_grad for parameter in block.parameters())
        for operator in entry.operators(block, device_type):
            served[operator] = _backends(operator, device_type, gradient)
    return BlockCoverage(path, type(block).__name__, reason is None, served, reason)


def _backends(operator: str, device_type: str, gradient: bool) -> str:
    names = backends.chosen_backends(operator, device_type, gradient=gradient)
    if names:
        return " or ".join(names)
    if backends.requested_backends() != ("auto",):
        return "none"
    return backends.backend_without_verdict(operator, device_type, gradient=gradient) or "not proven yet"
