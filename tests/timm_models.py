"""The classes of timm's ViT and PVT v2: those of the timm that is installed, else stand-ins.

The stand-ins in ``stand_ins/timm`` have timm's names, structure and arithmetic, and no code of it. That they
compute the same is tested with ``tests/data/timm_tiny.npz``.
"""

import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path

_STAND_INS = Path(__file__).parent / "stand_ins"
#: The modules of torchvision that timm imports with its models, without which there is no other need of it.
_OF_TORCHVISION = (
    *("torchvision", "torchvision.datasets", "torchvision.models", "torchvision.models.feature_extraction"),
    *("torchvision.ops", "torchvision.ops.misc", "torchvision.transforms", "torchvision.utils"),
    "torchvision.transforms.functional",
)


def is_installed():
    return importlib.util.find_spec("timm") is not None


@functools.cache
def timm_models(name):
    """Returns ``timm.models.vision_transformer`` or ``timm.models.pvt_v2``.

    Afterwards timm can be imported as before, or cannot: only the modules of layers and models stay, as which
    pickles find the classes.
    """
    before, path = dict(sys.modules), [*sys.path]
    if not is_installed():
        sys.path.insert(0, str(_STAND_INS))
    elif importlib.util.find_spec("torchvision") is None:
        _stub_torchvision()
    try:
        return importlib.import_module(f"timm.models.{name}")
    finally:
        sys.path[:] = path
        for module in sys.modules.keys() - before.keys():
            is_kept = module.startswith(("timm.layers.", "timm.models."))
            if module.partition(".")[0] in ("timm", "torchvision") and not is_kept:
                del sys.modules[module]


_WAYS = "NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"


class _Stub(types.ModuleType):
    """A module that has a class of every name, as an enumeration of ways to interpolate."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {way: way for way in _WAYS})


def _stub_torchvision():
    for name in _OF_TORCHVISION:
        module = sys.modules[name] = _Stub(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
