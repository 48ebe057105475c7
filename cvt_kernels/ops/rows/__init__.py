"""Gather and scatter of tokens by an index per image.

They are for blocks that compute only some of the tokens. ``rows`` has their indices, unique within an image.
-1 pads images with fewer rows than others of the batch: it gathers zeros and scatters nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import checks
from ...backends import Record
from ...declaration import extension_kernels, operator
from ..autograd import check_inplace
from ..cost_classes import sampled, size_class

_TOKENS, _INDEX, _ROWS = "(batch, tokens, channels)", "(batch, rows)", "(batch, rows, channels)"


def _cost_class(call: Record) -> str:
    x, given = call.x, call._asdict()
    batch, tokens, channels = x.shape
    words = f"{size_class(call.rows.numel() * channels)} of {size_class(batch * tokens * channels)} elements"
    words += f", {channels} channels"
    if "values" in given and call.branch is None:
        words += ", without a branch"
    others = given.get("values"), given.get("branch")
    words += ", mixed dtypes" if any(t is not None and t.dtype != x.dtype for t in others) else ""
    words += ", in place" if given.get("inplace") else ""
    return words + ("" if x.stride(2) == 1 else ", strided")


def _sample(factor: int, call: Record) -> Record:
    _check_unique(call.rows, call.x.shape[1])
    return sampled(2**18, "x", "rows", "values", "branch", written="x")(factor, call)


def _check_unique(rows: Tensor, tokens: int) -> None:
    """Raises for rows that backends may treat differently, so that tuning never uses them."""
    rows = rows.cpu()
    checks.check_row_values("rows", rows, tokens)
    ordered = rows.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ValueError("rows: name a token twice, expected each token of an image once")


def _check(call: Any) -> None:
    x, rows, given = call.x, call.rows, call._asdict()
    _check_index(x, rows)
    if "values" in given:
        shape = *rows.shape, x.shape[2]
        checks.check_tensor_like("values", call.values, shape, _ROWS, x)
        if call.branch is not None:
            checks.check_tensor_like("branch", call.branch, shape, _ROWS, x)
        checks.check_flag("inplace", call.inplace)
    _check_numbers(call)


def _check_numbers(call: Any) -> None:
    """Checks the facts that are not in the key of a call: the values of rows, and shared memory."""
    checks.check_row_values("rows", call.rows, call.x.shape[1])
    if getattr(call, "inplace", False):
        _check_inplace(call.x, call.values, call.branch)


_OF_ROWS: dict[str, Any] = {
    "backends": {"cpu": extension_kernels("cpu", None)},
    "cost_class": _cost_class,
    "sample": _sample,
    "check": _check,
    "check_numbers": ("rows", _check_numbers),
}


@operator(**_OF_ROWS)
def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the tokens of x at ``rows``; zeros where a row is -1.

    Args:
        x: ``(B, T, C)``; float16, bfloat16, float32 or float64.
        rows: ``(B, K)`` int64, the tokens of each image, unique within it, or -1 as padding. Values are not
            checked on a GPU, since that would synchronize; PyTorch's indexing fails for those out of range.

    Returns:
        ``(B, K, C)``.

    Raises:
        TypeError: An argument of the wrong type or dtype.
        ValueError: A wrong shape or device.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    index = rows.clamp_min(0)[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index).masked_fill((rows < 0)[..., None], 0.0)


@operator(**_OF_ROWS)
def scatter_rows(
    x: Tensor, rows: Tensor, values: Tensor, branch: Tensor | None = None, *, inplace: bool = False
) -> Tensor:
    """Returns x with values + branch at the tokens ``rows``.

    Args:
        x: As in :func:`gather_rows`.
        rows: See there; where it is -1, nothing is written.
        values: ``(B, K, C)``, of the dtype of ``x``.
        branch: Added to ``values``, of their shape and dtype; None for nothing.
        inplace: Whether the result overwrites ``x``. Autograd does not track it.

    Returns:
        ``(B, T, C)``; ``x`` itself if ``inplace``.

    Raises:
        TypeError: An argument of the wrong type or dtype (under autocast dtypes may differ).
        ValueError: A wrong shape or device, or ``inplace`` where a gradient is required or ``x`` is not
            contiguous.
        BackendUnavailable: The requested backend cannot serve the call.
    """
    values = values if branch is None else values + branch
    tokens = x.shape[1]
    # One more place takes the padding; indices beyond it are out of range.
    index = torch.where(rows < 0, tokens, rows + (rows >= tokens))[..., None].expand_as(values)
    out = F.pad(x, (0, 0, 0, 1)).scatter(1, index, values.to(x.dtype))[:, :tokens]
    return x.copy_(out) if inplace else out


def _check_index(x: Tensor, rows: Tensor) -> None:
    checks.check_dimensions("x", x, 3, _TOKENS)
    if x.shape[1] == 0 or x.shape[2] == 0:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected tokens and channels")
    checks.check_dtype("rows", rows, _INDEX, torch.int64)
    checks.check_rank("rows", rows, 2, _INDEX)
    if rows.shape[0] != x.shape[0]:
        raise ValueError(f"rows: are of {rows.shape[0]} images, expected {x.shape[0]} as x")
    checks.check_device("rows", rows, "x", x)


def _check_inplace(x: Tensor, values: Tensor, branch: Tensor | None) -> None:
    check_inplace("x", x, x, values, branch)
    if torch.compiler.is_compiling():
        return
    for name, tensor in (("values", values), ("branch", branch)):
        if tensor is not None and torch._C._overlaps(x, tensor):
            raise ValueError(f"{name}: shares memory with x, expected its own with inplace=True")
