"""The maps that a pyramid returns, with upstream's strides.

Between stages, maps are views of tokens. Upstream copies each, so that channels are first in memory. Here
only those are copied that the caller of a model gets, who may flatten them by ``view`` or write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .watching import Told

#: The attribute of the classes of models whose maps get upstream's strides.
MARK = "_cvt_kernels_copies_maps"
#: The models that return such maps, and whether the first result of each, as a tuple, is one.
_MODELS = {
    "SegformerModel": True,
    "SegformerForImageClassification": False,
    "SegformerForSemanticSegmentation": False,
    "PvtV2Model": True,
    "PvtV2ForImageClassification": False,
    "PvtV2Backbone": False,
    "GLPNModel": True,
    "GLPNForDepthEstimation": False,
}
#: The ends of the keys of such models: whether they are within another one.
_ENDS = {False: "maps", True: "maps, within a model"}
#: The same, and whether a model is within another one, by the keys of their classes.
ENTRIES = {
    f"{name}, {end}": (is_first, is_within)
    for name, is_first in _MODELS.items()
    for is_within, end in _ENDS.items()
}
_RESULTS = "last_hidden_state", "hidden_states", "feature_maps"


#: The submodules of the model that runs, whose maps the model's caller may not see.
_inner = Told()


def find_models(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns the models whose maps get upstream's strides, with the keys of their classes."""
    found: list[tuple[nn.Module, str]] = []
    within: set[nn.Module] = set()
    for module in model.modules():
        name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _MODELS), None)
        if name is not None and not hasattr(type(module), MARK):
            found.append((module, f"{name}, {_ENDS[module in within]}"))
            within.update(module.children())
    return found


def run(
    model: Any,
    entry: tuple[bool, bool],
    own: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs the ``own`` forward of a model, and copies the maps among its results if its caller gets them."""
    is_first_a_map, is_within = entry
    if torch.compiler.is_compiling():  # which traces no state of a thread
        out = own(model, *args, **kwargs)
        return out if is_within else _with_own_maps(out, is_first_a_map)
    if model in _inner:
        return own(model, *args, **kwargs)
    with _inner.within(*model._modules.values()):
        out = own(model, *args, **kwargs)
    return _with_own_maps(out, is_first_a_map)


def _with_own_maps(out: Any, is_first_a_map: bool) -> Any:
    """Returns the results of a model with contiguous maps; the same map in two results stays the same."""
    made: dict[int, Tensor] = {}
    if isinstance(out, tuple):
        keeps_first = isinstance(out[0], Tensor) and not is_first_a_map
        first = out[0] if keeps_first else _contiguous(out[0], made)
        return (first, *(_contiguous(each, made) for each in out[1:]))
    for name in _RESULTS:
        if getattr(out, name, None) is not None:
            out[name] = _contiguous(out[name], made)
    return out


def _contiguous(value: Any, made: dict[int, Tensor]) -> Any:
    """Returns a result with contiguous maps; ``made`` has those that were made before, by what they were."""
    if isinstance(value, tuple | list):
        return type(value)([_contiguous(each, made) for each in value])
    if not isinstance(value, Tensor) or value.ndim != 4:
        return value
    return made.setdefault(id(value), value.contiguous())
