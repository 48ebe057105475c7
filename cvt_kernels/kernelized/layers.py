"""Layers as the ``kernels`` package wants them: modules without state, whose forwards it binds to a model's.

It checks that such a forward takes the same arguments as the one that it replaces. So the layer of each name,
``layers.CvtLayer`` and so on, is made from the class of the transformers that is installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from ..classes import cached
from ..models import accelerated_forward
from ..models.blocks import HUGGING_FACE
from ..models.families import SERVED, TABLE

#: The beginnings of names of classes, and the models of transformers that they belong to.
_FAMILIES = {"Cvt": "cvt", "Segformer": "segformer", "GLPN": "glpn", "PvtV2": "pvt_v2", "Pvt": "pvt"}

_ENTRIES = (*TABLE.values(), *SERVED.values())
_NAMES = sorted({each.name for each in _ENTRIES if each.upstream == HUGGING_FACE and not each.is_only_served})


def upstream_classes() -> list[Any]:
    """Returns the classes of the installed transformers that have a layer here."""
    classes = map(_upstream_class, _NAMES)
    return [cls for cls in classes if cls is not None and accelerated_forward(cls) is not None]


def _upstream_class(name: str) -> Any:
    family = next(family for beginning, family in _FAMILIES.items() if name.startswith(beginning))
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(modeling, name, None)


@cached
def _layer_for(upstream: Any) -> Any:
    members = {"forward": accelerated_forward(upstream), "can_torch_compile": True}
    return type(upstream.__name__, (nn.Module,), {"__module__": __name__, **members})


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _layer_for(_upstream_class(name))
