"""An attention implementation for models of transformers: ``attn_implementation="cvt_kernels"``.

transformers calls it with q, k and v (B, h, N, D), views of the linear layers' outputs. Transposed back, they
have the layout of those outputs, so nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import attention

_NAME = "cvt_kernels"
_TRANSFORMERS = "transformers>=4.53"  # the first with an interface for masks

#: Arguments of some models of transformers that change the result → why they are refused.
_REFUSED = {
    "cache": "reads no paged cache",
    "head_mask": "has no mask of heads",
    "output_attentions": "makes no attention maps",
    "s_aux": "has no attention sinks",
    "sliding_window": "has no sliding windows",
    "softcap": "does not cap scores",
}


def register_attention() -> None:
    """Registers ``attn_implementation="cvt_kernels"`` with transformers, in this process.

    A model created or loaded with it, or switched to it by
    ``model.set_attn_implementation("cvt_kernels")``, computes its attention by :func:`attention`, if it takes
    its attention from ``transformers.AttentionInterface``. Masks and biases are added to the scores.

    The forward of such a model raises ValueError for causal attention, fewer heads of keys than of queries,
    sliding windows, capped scores, attention sinks, paged caches, head masks and ``output_attentions``.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        if error.name != "transformers":
            raise  # something that transformers needs
        missing = isinstance(error, ModuleNotFoundError)
        raise type(error)(
            f"transformers is {'not installed' if missing else 'too old'}; pip install '{_TRANSFORMERS}', "
            "or in a checkout of cvt-kernels pip install --no-build-isolation '.[hf]'",
            name=error.name,
        ) from error
    AttentionInterface.register(_NAME, _attend)
    # An implementation without a function for masks gets none, and padding would take part.
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a transformers module; returns None in the place of the probabilities."""
    if is_causal is None:
        # A module that does not say is causal unless there is a mask, as for transformers itself.
        is_causal = getattr(module, "is_causal", attention_mask is None)
    if is_causal and query.shape[2] > 1:
        raise _refusal(module, "is_causal: got True", "False", "has no causal mask")
    for name, reason in _REFUSED.items():
        given = others.get(name)
        if given is not None and given is not False:
            got = given if isinstance(given, int | float) else f"a {type(given).__name__}"
            raise _refusal(module, f"{name}: got {got}", "False" if given is True else "None", reason)
    if key.shape[1] != query.shape[1]:
        reason = "has as many heads of keys as of queries"
        raise _refusal(module, f"key: got {key.shape[1]} heads", f"{query.shape[1]} as of query", reason)
    bias = _bias_of(attention_mask, position_bias, query, key)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return attention(q, k, v, scale=scaling, bias=bias, dropout_p=dropout), None


def _refusal(module: nn.Module, got: str, expected: str, reason: str) -> ValueError:
    return ValueError(
        f"{got} from {type(module).__name__}, expected {expected}, since "
        f'attn_implementation="{_NAME}" {reason}; model.set_attn_implementation("eager") serves such calls'
    )


def _bias_of(mask: Tensor | None, bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Returns the sum of mask (True or 0 takes part) and bias by position, which is added to the scores."""
    if mask is None:
        return bias
    keys = key.shape[2]
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[3] != keys:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(f"attention_mask: got {got}, expected a tensor (batch, heads, queries, {keys} keys)")
    if mask.dtype == torch.bool:
        return torch.where(mask, query.new_zeros(()) if bias is None else bias, -torch.inf)
    return mask if bias is None else mask + bias
