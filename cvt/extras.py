"""Import of optional packages, which the extras of ``pyproject.toml`` install."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

#: The names of packages on PyPI, where they differ from the names of their modules.
_ON_PYPI = {"sklearn": "scikit-learn"}


def require(module: str, extra: str) -> Any:
    """Imports a module such as ``"sklearn.datasets"`` of a package that an extra of this project installs.

    Where it is not installed, ModuleNotFoundError says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        package = _ON_PYPI.get(package, package)
        message = (
            f"{package} is not installed; pip install {package}, or in a checkout of cvt-kernels "
            f"pip install --no-build-isolation '.[{extra}]'"
        )
        raise ModuleNotFoundError(message, name=error.name) from error


def folder_of(module: str, extra: str) -> Path:
    """Returns the folder of an optional package, for the files in it; the package is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return Path(require(module, extra).__file__).parent
    return Path(spec.origin).parent
