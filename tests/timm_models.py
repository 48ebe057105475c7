"""The classes of timm's ViT and PVT v2: those of the timm that is installed, else stand-ins.

The stand-ins in ``stand_ins/timm`` have timm's names, structure and arithmetic, and no code of it. That they
compute the same is tested with ``tests/data/timm_tiny.npz``.
"""

import contextlib
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


#: timm's packages, which no import finds but within :func:`importable`.
_packages = {}


@functools.cache
def timm_models(name):
    """Returns ``timm.models.vision_transformer`` or another module of timm's, or a stand-in.

    Afterwards timm can be imported, or cannot, as before; its modules of layers and models stay.
    """
    before, path = dict(sys.modules), [*sys.path]
    if not is_installed():
        sys.path.insert(0, str(_STAND_INS))
    elif importlib.util.find_spec("torchvision") is None:
        _stub_torchvision()
    try:
        with importable():
            return importlib.import_module(f"timm.models.{name}")
    finally:
        sys.path[:] = path
        for module in [each for each in sys.modules.keys() - before.keys() if each.startswith("torchvision")]:
            del sys.modules[module]


@contextlib.contextmanager
def importable():
    """Lets timm's packages be imported within a block, as pickles of its models do."""
    before = dict(sys.modules)
    sys.modules.update(_packages | before)
    try:
        yield
    finally:
        for name in [each for each in sys.modules.keys() - before.keys() if each.partition(".")[0] == "timm"]:
            if not name.startswith(("timm.layers.", "timm.models.")):
                _packages[name] = sys.modules.pop(name)


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
