"""Import of optional packages, those that the extras of ``pyproject.toml`` install."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: Its name, such as ``"sklearn.datasets"``.
        extra: The extra of this project that installs it.

    Returns:
        The module.

    Raises:
        ModuleNotFoundError: It is not installed; the message says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        message = f"{package} is not installed; pip install 'cvt-kernels[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from error
