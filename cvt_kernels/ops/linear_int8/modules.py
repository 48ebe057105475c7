"""The layers with 8-bit weights that ``cvt_kernels.quantize`` puts into a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import checks, modes, reference
from ...records import GeluVariant, QuantizedLinear, QuantizedRows
from . import MOST_INPUTS, check_format, linear_int8

_MOST_OUTPUTS = 2**24  # each with a scale and a bias, even without inputs
_MOST_WEIGHTS = 2**31  # 2 GiB, so that a wrong size does not ask for more memory than there is


class QuantizedLayer(nn.Module):
    """Base of layers with 8-bit weights: their tensors, and the float layer that was quantized.

    Gradients pass as if nothing had been rounded (straight-through estimator); the weight has none. Its name
    in the state is ``qweight``, so that no float layer loads it as a ``weight``.

    Attributes:
        qweight: Buffer ``(outputs, inputs)``.
        weight: The same tensor.
        weight_scale: Buffer ``(outputs,)``, float32 whatever the dtype of the module.
        bias: Parameter ``(outputs,)``, or None.
    """

    qweight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, outputs: int, inputs: int, bias: bool, dtype: torch.dtype):
        check_format(dtype)
        checks.check_flag("bias", bias)
        super().__init__()
        self.register_buffer("qweight", torch.zeros(outputs, inputs, dtype=dtype))
        self.register_buffer("weight_scale", torch.zeros(outputs))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs)) if bias else None)
        self._float: nn.Module | None = None

    @property
    def weight(self) -> Tensor:
        """Alias of ``qweight``."""
        return self.qweight

    @property
    def float_layer(self) -> nn.Module | None:
        """The float layer that was quantized; None if there was none, or another weight was loaded."""
        return self._float

    def _take(self, layer: Any) -> None:
        """Quantizes a layer and keeps it for ``restore``, hidden from ``state_dict`` and ``.to()``."""
        weight = layer.weight.detach().flatten(1)
        if not weight.isfinite().all():
            raise ValueError("weight: has NaN or infinities, expected finite numbers")
        values, scales = reference.quantize_rows(weight.float(), dtype=self.weight.dtype)
        self.qweight, self.weight_scale, self.bias = values, scales.flatten(), layer.bias
        self.train(layer.training)
        vars(self)["_float"] = layer

    def product(self, x: Tensor | QuantizedRows, *, approximate: GeluVariant | None = None) -> Tensor:
        """Computes the layer for rows (..., inputs) and an optional GELU, without gradients.

        For rows that are already quantized, the result has autocast's dtype, or else the bias's.
        """
        layer = self.weight, self.weight_scale, self.bias
        if not isinstance(x, QuantizedRows):
            return linear_int8(x, *layer, approximate=approximate)
        dtype = modes.autocast_dtype(x.values) or (None if self.bias is None else self.bias.dtype)
        return linear_int8(x, *layer, approximate=approximate, dtype=dtype)

    def _call(self, x: Tensor | QuantizedRows) -> Tensor:
        if isinstance(x, QuantizedRows) or not modes.wants_gradient(x, self.bias):
            return self.product(x)
        return self._product_with_gradient(x)

    def _product_with_gradient(self, x: Tensor) -> Tensor:
        followed = F.linear(x, self.dequantized_weight().to(x.dtype), self.bias)
        bias = None if self.bias is None else self.bias.detach()
        settings: dict[str, Any] = {"dtype": followed.dtype}
        rounded = reference.linear_int8(x.detach(), self.weight, self.weight_scale, bias, **settings)
        return rounded + (followed - followed.detach())

    def dequantized_weight(self) -> Tensor:
        """Returns the dequantized weight, (outputs, inputs) in float32."""
        return self.weight.float() * self.weight_scale[:, None]

    def parameters_of_operator(self) -> QuantizedLinear:
        """Returns the operators' arguments, without copies."""
        return QuantizedLinear(self.weight, self.weight_scale, self.bias)

    def _settings(self) -> str:
        """Returns bias and dtype, as ``print(module)`` has them."""
        name = "" if self.weight.dtype == torch.int8 else f", dtype={checks.dtype_name(self.weight.dtype)}"
        return f"bias={self.bias is not None}{name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Weight and scales keep their dtypes where the module becomes half precision.
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        reason = self._why_not_loadable(state_dict, prefix)
        if reason is not None:  # a copy would cast silently
            messages[-1].append(reason)
            return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)
        if f"{prefix}qweight" in state_dict:
            self._float = None  # the float layer no longer matches

    def _why_not_loadable(self, state_dict: dict[str, Any], prefix: str) -> str | None:
        """Returns why a weight in a state does not fit this layer, or None."""
        if f"{prefix}weight" in state_dict:
            return f"{prefix}weight: is in the state, expected {prefix}qweight of 8-bit numbers"
        if f"{prefix}qweight" not in state_dict:
            return None
        for name, buffer in self._buffers.items():
            given = state_dict.get(f"{prefix}{name}")
            if buffer is None and given is not None:
                return f"{prefix}{name}: is in the state, expected none in a layer with one scale per row"
            if buffer is None:
                continue
            if given is None:
                return f"{prefix}{name}: is missing beside {prefix}qweight"
            if given.dtype != buffer.dtype:
                got, expected = checks.dtype_name(given.dtype), checks.dtype_name(buffer.dtype)
                return f"{prefix}{name}: got dtype {got}, expected {expected}"
        return None


def _check_outputs(name: str, outputs: int, inputs: int) -> None:
    checks.check_int(name, outputs, 0, _MOST_OUTPUTS)
    if int(outputs) * int(inputs) > _MOST_WEIGHTS:
        raise ValueError(
            f"{name}: got {outputs} of {inputs} inputs, expected {_MOST_WEIGHTS} weights at most"
        )


class LinearInt8(QuantizedLayer):
    """A linear layer with an 8-bit weight, whose input is quantized in every call.

    See :class:`QuantizedLayer` for its tensors.

    Args:
        in_features: Inputs.
        out_features: Outputs.
        bias: Whether there is a bias.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, dtype: torch.dtype = torch.int8
    ):
        checks.check_int("in_features", in_features, 0, MOST_INPUTS)
        _check_outputs("out_features", out_features, in_features)
        super().__init__(out_features, in_features, bias, dtype)
        self.in_features, self.out_features = int(in_features), int(out_features)

    @classmethod
    @torch.no_grad()
    def from_float(cls, linear: nn.Linear, *, dtype: torch.dtype = torch.int8) -> LinearInt8:
        """Quantizes a linear layer, with a scale per row of its weight; the bias is shared.

        Args:
            linear: The layer, unchanged and kept for :func:`cvt_kernels.restore`.
            dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

        Raises:
            TypeError: No linear layer, or another dtype.
            ValueError: The weight has NaN or infinities.
        """
        checks.check_kind("linear", linear, nn.Linear)
        made = cls(0, 0, bias=False, dtype=dtype)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made._take(linear)
        return made

    def forward(self, x: Tensor | QuantizedRows) -> Tensor:
        """Computes the layer for x (..., in_features), in floating point or already quantized."""
        return self._call(x)

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(module)``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self._settings()}"


class ConvInt8(QuantizedLayer):
    """A convolution with an 8-bit weight: each patch of the map is a row of a linear layer.

    See :class:`QuantizedLayer` for its tensors; the inputs are channels, then rows and columns of the
    kernel, as in a convolution's weight.

    Args:
        in_channels: Channels of the map.
        out_channels: Channels of the result.
        kernel_size: Rows and columns of the kernel.
        stride: As in ``nn.Conv2d``.
        padding: As in ``nn.Conv2d``, in numbers.
        dilation: As in ``nn.Conv2d``.
        bias: Whether there is a bias.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (1, 1),
        padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1),
        bias: bool = True,
        *,
        dtype: torch.dtype = torch.int8,
    ):
        checks.check_int("in_channels", in_channels, 0)
        pairs = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        for name, pair in pairs.items():
            checks.check_pair(name, pair, least=0 if name == "padding" else 1)
        inputs = int(in_channels) * int(kernel_size[0]) * int(kernel_size[1])
        if inputs > MOST_INPUTS:
            raise ValueError(
                f"in_channels and kernel_size: make {inputs} inputs, expected at most {MOST_INPUTS}"
            )
        _check_outputs("out_channels", out_channels, inputs)
        super().__init__(out_channels, inputs, bias, dtype)
        self.in_channels, self.out_channels = int(in_channels), int(out_channels)
        self.kernel_size, self.stride, self.padding, self.dilation = (
            (int(pair[0]), int(pair[1])) for pair in pairs.values()
        )

    @classmethod
    @torch.no_grad()
    def from_float(cls, conv: nn.Conv2d, *, dtype: torch.dtype = torch.int8) -> ConvInt8:
        """Quantizes a dense, zero-padded convolution, see :meth:`LinearInt8.from_float`.

        Raises:
            TypeError: No convolution, or another dtype.
            ValueError: Another kind of convolution, or as :meth:`LinearInt8.from_float`.
        """
        checks.check_kind("conv", conv, nn.Conv2d)
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise ValueError(f"conv: got {conv}, expected a dense one padded by a number of zeros")
        settings: dict[str, Any] = {
            name: getattr(conv, name) for name in ("kernel_size", "stride", "padding", "dilation")
        }
        made = cls(0, 0, **settings, bias=False, dtype=dtype)
        made.in_channels, made.out_channels = conv.in_channels, conv.out_channels
        made._take(conv)
        return made

    def forward(self, image: Tensor) -> Tensor:
        """Computes the layer for maps (B, in_channels, H, W)."""
        patches = F.unfold(image, self.kernel_size, self.dilation, self.padding, self.stride)
        tokens = self._call(patches.transpose(1, 2))
        grid = [self._output_size(image.shape[2 + axis], axis) for axis in (0, 1)]
        return tokens.transpose(1, 2).unflatten(2, grid)

    def _output_size(self, size: int, axis: int) -> int:
        reach = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def extra_repr(self) -> str:
        """Returns the sizes, for ``print(module)``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, {self._settings()}"
        )


# In the places of others ----------------------------------------------------------------------------------


def replace(model: nn.Module, before: nn.Module, after: nn.Module) -> None:
    """Replaces a module by another one, everywhere in a model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is before:
                setattr(parent, name, after)


def put_back(model: nn.Module, layers: Sequence[Any]) -> None:
    """Replaces quantized layers, which have a :attr:`QuantizedLayer.float_layer`, by these float layers.

    The float layers get the model's device and dtype, and the quantized layers' training mode.
    """
    paths = {layer: path for path, layer in model.named_modules()}
    for layer in dict.fromkeys(layers):
        like = _like(model, paths[layer])
        dtype = None if like is None else like.dtype
        kept = layer.float_layer.to(device=layer.weight.device, dtype=dtype).train(layer.training)
        replace(model, layer, kept)
    for module in model.modules():
        if _SAVE in vars(module) and not _has_quantized(module):
            del vars(module)[_SAVE]


_SAVE = "save_pretrained"


def refuse_to_save(model: nn.Module) -> None:
    """Makes ``save_pretrained`` of transformers and huggingface_hub raise for modules with quantized layers.

    Their ``from_pretrained`` would build the float model and initialize the missing weights anew, with a
    warning at most.
    """
    for module in model.modules():
        owner = next((cls for cls in type(module).__mro__ if _SAVE in vars(cls)), type(None))
        upstream = owner.__module__.partition(".")[0]
        if upstream in ("transformers", "huggingface_hub") and _has_quantized(module):
            vars(module)[_SAVE] = functools.partial(_save_if_float, module)


def _save_if_float(model: Any, *args: Any, **kwargs: Any) -> Any:
    if _has_quantized(model):
        raise ValueError(
            f"save_pretrained: this {type(model).__name__} has layers of 8-bit numbers, which its "
            "from_pretrained would not read; torch.save(model, FILE) keeps them, cvt_kernels.restore(model) "
            "undoes quantize"
        )
    return type(model).save_pretrained(model, *args, **kwargs)


def _has_quantized(module: nn.Module) -> bool:
    return any(isinstance(each, QuantizedLayer) for each in module.modules())


def _like(model: nn.Module, path: str) -> Tensor | None:
    """Returns a floating-point parameter of the layer at a path, or of its closest parent that has one."""
    while True:
        for parameter in model.get_submodule(path).parameters():
            if parameter.is_floating_point():
                return parameter
        if not path:
            return None
        path = path.rpartition(".")[0]
