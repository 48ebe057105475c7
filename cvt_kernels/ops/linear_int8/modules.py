"""The linear layer with 8-bit weights that ``cvt_kernels.quantize`` puts in the place of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import checks, reference
from ...reference import QuantizedLinear
from . import linear_int8


class LinearInt8(nn.Module):
    """A linear layer whose weight is of 8-bit numbers, and whose input is rounded to such in every call.

    Gradients pass as if nothing had been rounded (the straight-through estimator); the weight has none.

    Args:
        in_features: Inputs.
        out_features: Outputs.
        bias: Whether there is a bias.
        static: Whether all inputs have one scale, which calibration finds, instead of one for each row.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

    Attributes:
        weight: Buffer ``(out_features, in_features)``.
        weight_scale: Buffer ``(out_features,)``, float32 whatever the dtype of the module.
        bias: Parameter ``(out_features,)``, or None.
        input_scale: Buffer ``()``, float32; None unless ``static``.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None
    input_scale: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        static: bool = False,
        dtype: torch.dtype = torch.int8,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=dtype))
        self.register_buffer("weight_scale", torch.zeros(out_features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)
        self.register_buffer("input_scale", torch.ones(()) if static else None)

    @classmethod
    def from_float(
        cls, linear: nn.Linear, *, input_scale: float | None = None, dtype: torch.dtype = torch.int8
    ) -> LinearInt8:
        """Quantizes a linear layer, each row of its weight by its largest number; the bias is shared.

        Args:
            linear: Stays as it is.
            input_scale: The scale of all inputs; None for one per row.
            dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        """
        with torch.no_grad():
            made = cls(0, 0, bias=False, static=input_scale is not None, dtype=dtype)
            made.in_features, made.out_features = linear.in_features, linear.out_features
            values, scales = reference.quantize_rows(linear.weight.detach().float(), dtype=dtype)
            made.weight, made.weight_scale, made.bias = values, scales.flatten(), linear.bias
            if input_scale is not None:
                made.input_scale = torch.tensor(input_scale, device=linear.weight.device)
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer for x (..., in_features)."""
        if checks.wants_gradient(x, self.bias):
            return self._forward_with_gradient(x)
        return linear_int8(x, self.weight, self.weight_scale, self.bias, input_scale=self.input_scale)

    def _forward_with_gradient(self, x: Tensor) -> Tensor:
        values, scales = reference.quantize_rows(x.detach(), scale=self.input_scale, dtype=self.weight.dtype)
        rounded = x + ((values.to(scales.dtype) * scales).to(x.dtype) - x).detach()
        return F.linear(rounded, self.dequantized_weight().to(x.dtype), self.bias)

    def dequantized_weight(self) -> Tensor:
        """Returns what the weight stands for, in float32."""
        return self.weight.float() * self.weight_scale[:, None]

    def parameters_of_operator(self) -> QuantizedLinear:
        """Returns the tensors as the operators take them; nothing is copied."""
        return QuantizedLinear(self.weight, self.weight_scale, self.bias, self.input_scale)

    def extra_repr(self) -> str:
        """Returns sizes and scheme, for ``print(module)``."""
        scheme = "dynamic" if self.input_scale is None else "static"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={scheme}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Scales stay in float32 where the module becomes half precision.
        scales = {"weight_scale": self.weight_scale, "input_scale": self.input_scale}
        super()._apply(fn, recurse)
        for name, scale in scales.items():
            moved = self._buffers[name]
            if scale is not None and moved is not None and moved.dtype != torch.float32:
                self._buffers[name] = scale.to(moved.device)
        return self
