"""Modules that moved to ``cvt.tools``, importable by their former names with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVED = {"datasets", "evaluation", "explanation", "label_maps", "training", "weight_pruning"}


class _FormerNames(MetaPathFinder, Loader):
    """Finds ``cvt.datasets`` and gives ``cvt.tools.datasets``, the same module object."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.partition(".")
        return ModuleSpec(name, self) if package == "cvt" and module.partition(".")[0] in _MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.replace("cvt.", "cvt.tools.", 1)
        warnings.warn(f"{spec.name} is now {name}", FutureWarning, stacklevel=2)
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # the import system has just put the former name's there
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Makes the former names importable."""
    # First: the search of folders would find the files of a moved package and import them once more.
    sys.meta_path.insert(0, _FormerNames())
