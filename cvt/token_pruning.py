"""Token pruning guided by attention: scores of tokens, budgets, and the choice of those that stay.

The score of a token is how much the query of the head attends to it: the class token's, or with
``pool="avg"`` the mean of all queries, summed over the heads. Keys lie on a coarser grid than tokens, and
what a key receives is shared among the tokens that it stands for (:func:`spread_keys`). A token that has
dropped out keeps the values that it has: it still takes part in the depthwise convolutions of keys and
values, but has no query and no MLP any more.

The choice itself is in :mod:`cvt_kernels.ops.token_selection`, which frozen stages share.
"""

from __future__ import annotations

from cvt_kernels.ops.token_selection import interpolation, score_tokens, select_tokens, spread_keys

__all__ = ["interpolation", "score_tokens", "select_tokens", "spread_keys"]
