"""The card of an operator; see ``cvt_kernels/cards.py``."""

from __future__ import annotations

from typing import Any

from ...cards import APPROXIMATE, COMMON, GELUS, LEADING, NORM, OUTPUTS, SHIFTED, Card, of_rows, shape_of


def _layer_norm_mlp(m: Any) -> Any:
    x, c, hidden = m.activation(*shape_of(m)), m.channels, m.outputs
    shift = m.parameter(c) if m.shifted else None
    args = (x, *m.norm(c)[:2], *m.linear(hidden, c), *m.linear(c, hidden))
    return args, {"eps": m.eps, "approximate": m.approximate, "shift": shift}


CARDS = {
    "layer_norm_mlp": Card(
        call=_layer_norm_mlp,
        choices=COMMON | LEADING | OUTPUTS | NORM | SHIFTED | APPROXIMATE,
        examples=of_rows("bare=True", "shifted=True", *GELUS, outputs=33),
        without_gradients=("triton",),
        normalizes=True,
    ),
}
