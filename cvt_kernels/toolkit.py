"""Finds the CUDA compiler, for the build of the extension and for the library.

``setup.py`` loads this file by its path, where neither torch nor the package can be imported. So it uses the
standard library only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find_nvcc() -> str | None:
    """Returns the path of nvcc, from ``CUDA_HOME``, the PATH or PyPI's packages, in this order, or None."""
    import sysconfig  # here, since it is slow to import and rarely needed

    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/nowhere"
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"), reverse=True)
    return (
        shutil.which("nvcc", path=str(Path(home) / "bin"))
        or shutil.which("nvcc")
        or next(map(str, packaged), None)
    )
