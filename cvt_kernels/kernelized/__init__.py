"""A local kernel for the ``kernels`` package: ``use_kernels=True`` of transformers takes our forwards.

The package loads this folder under a name of its own, from ``metadata.json``, and looks for ``layers`` in it.
"""

from cvt_kernels.kernelized import layers
from cvt_kernels.kernelized.registration import register_layers

__all__ = ["layers", "register_layers"]
