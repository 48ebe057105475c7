"""Fused operations on the submodules of a block, which the forwards of all upstreams share.

Each does the work of some submodules without calling them, by the public operators, which choose their
backend.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from .. import checks
from ..ops.layer_norm_gelu import add_layer_norm, gelu, layer_norm, layer_norm_gelu
from ..ops.linear import linear, linear_gelu
from ..ops.linear_int8 import layer_norm_quantize
from ..ops.linear_int8.modules import LinearInt8
from ..records import GeluVariant, QuantizedRows


def normalize(norm: nn.LayerNorm, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes LayerNorm over the last dimension in the dtypes of ``norm``, a plain or Microsoft's one.

    The result is rounded to ``dtype``, if one is given.
    """
    if type(norm) is not nn.LayerNorm:  # Microsoft's, which computes in float32 whatever comes
        out = layer_norm(x.float(), norm.weight, norm.bias, eps=norm.eps, dtype=dtype)
        return out if dtype is not None else out.type(x.dtype)
    weight = norm.weight
    if _dtypes_differ(x, weight):
        return norm(x)  # PyTorch knows which mixtures it takes
    return layer_norm(x, weight, norm.bias, eps=norm.eps, dtype=dtype)


def apply_layer_norm(module: Any, x: Tensor) -> Tensor:
    """Computes ``module(x)``: by the operator if it is a LayerNorm over channels that nobody watches."""
    plain = type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.eps > 0
    return normalize(module, x) if plain and not is_watched(module) else module(x)


def normalize_and_gelu(norm: nn.LayerNorm, x: Tensor, *, approximate: GeluVariant) -> Tensor:
    """Computes a plain LayerNorm and the GELU of it."""
    if _dtypes_differ(x, norm.weight):
        return gelu(norm(x), approximate=approximate)
    return layer_norm_gelu(x, norm.weight, norm.bias, eps=norm.eps, approximate=approximate)


def normalize_for_layers(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Computes LayerNorm for the layers after it, on a GPU in the dtype that autocast has for them."""
    return normalize(norm, x, checks.dtype_for_layers(x))


def add_and_normalize(norm: nn.LayerNorm, branch: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of a branch and the residual stream, and the LayerNorm of this sum for layers."""
    casts = type(norm) is not nn.LayerNorm and not branch.dtype == stream.dtype == torch.float32
    weight = norm.weight
    if casts or _dtypes_differ(branch, stream) or _dtypes_differ(branch, weight):
        stream = branch + stream
        return stream, normalize_for_layers(norm, stream)
    dtype = checks.dtype_for_layers(stream)
    return add_layer_norm(branch, stream, weight, norm.bias, eps=norm.eps, dtype=dtype)


def add_and_normalize_for(
    caller: nn.Module, name: str, norm: nn.LayerNorm, branch: Tensor, stream: Tensor
) -> tuple[Tensor, Any]:
    """Does as :func:`add_and_normalize`, but a quantized layer that reads the LayerNorm gets 8-bit numbers.

    Args:
        caller: The module that is called with the LayerNorm.
        name: The linear layer in it that reads the LayerNorm.
        norm: The LayerNorm.
        branch: The branch.
        stream: The residual stream.
    """
    if not takes_rows(caller, name) or torch.jit.is_tracing():
        return add_and_normalize(norm, branch, stream)
    layer: Any = caller._modules[name]
    differ = _dtypes_differ(branch, stream) or _dtypes_differ(stream, norm.weight)
    if differ or checks.wants_gradient(branch, stream, norm.weight, norm.bias, layer.bias):
        return add_and_normalize(norm, branch, stream)
    stream = branch + stream
    settings: dict[str, Any] = {"scale": layer.input_scale, "dtype": layer.weight.dtype}
    return stream, layer_norm_quantize(stream, norm.weight, norm.bias, eps=norm.eps, **settings)


def takes_rows(caller: nn.Module, name: str) -> bool:
    """Says whether a layer reads 8-bit numbers, and nobody would notice that its caller is handed them.

    The forward of the caller is known to hand them to the layer only: it is of a class that ``accelerate``
    has swapped, or one of ``cvt``.
    """
    layer: Any = caller._modules.get(name)
    if not is_plain_int8(layer) or layer.bias is None or is_watched(caller):
        return False
    kind = type(caller)
    return "_cvt_kernels_original" in vars(kind) or (kind.__module__, kind.__name__) == ("cvt.model", "Mlp")


def _dtypes_differ(x: Tensor, other: Tensor | None) -> bool:
    """Says whether the dtypes differ and autocast does not see to it."""
    return other is not None and other.dtype != x.dtype and not checks.autocast_enabled(x)


def apply_linear(module: Any, x: Tensor) -> Tensor:
    """Computes ``module(x)``: by the fastest primitive if it is a linear layer that nobody watches."""
    return linear(x, module.weight, module.bias) if is_plain_linear(module) else module(x)


def is_plain_linear(module: Any) -> bool:
    """Says whether a module is an ``nn.Linear``, of no other class, that nobody watches."""
    return type(module) is nn.Linear and not is_watched(module)


def is_plain_int8(module: Any) -> bool:
    """Says whether a module is a ``LinearInt8``, of no other class, that nobody watches."""
    return type(module) is LinearInt8 and not is_watched(module)


def apply_linear_and_gelu(module: Any, x: Tensor | QuantizedRows, *, approximate: GeluVariant) -> Tensor:
    """Computes a linear layer and its GELU, as :func:`cvt_kernels.gelu` names it.

    ``x`` is quantized already only where the layer is, after :func:`add_and_normalize_for`.
    """
    if is_plain_int8(module) and not checks.wants_gradient(x, module.bias):
        return module.product(x, approximate=approximate)
    if isinstance(x, QuantizedRows):
        return gelu(module(x), approximate=approximate)
    if is_plain_linear(module) and not _dtypes_differ(x, module.weight):
        return linear_gelu(x, module.weight, module.bias, approximate=approximate)
    return gelu(module(x), approximate=approximate)


#: Classes of GELU besides ``nn.GELU``, of Microsoft and of transformers, and what :func:`cvt_kernels.gelu`
#: calls them.
GELU_VARIANTS: dict[str, GeluVariant] = {
    "QuickGELU": "quick",
    "QuickGELUActivation": "quick",
    "GELUActivation": "none",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "NewGELUActivation": "tanh",
}


def gelu_variant(activation: Any) -> GeluVariant:
    """Returns what :func:`cvt_kernels.gelu` calls an activation, which is ``nn.GELU`` or a named one."""
    if type(activation) is nn.GELU:
        return cast(GeluVariant, activation.approximate)
    return GELU_VARIANTS.get(type(activation).__name__, "quick")


def why_gelu_replaced(activation: Any) -> str | None:
    """Says that an activation has another function than its class gives it; None if it has not."""
    act = vars(activation).get("act")
    if act is None:
        return None
    function, settings = (act.func, act.keywords) if isinstance(act, functools.partial) else (act, {})
    if function is F.gelu:
        own = settings.get("approximate", "none") == gelu_variant(activation)
    else:  # a method, which computes the same in several steps
        own = getattr(act, "__func__", act) in vars(type(activation)).values()
    return None if own else f"the function of {type(activation).__qualname__} has been replaced"


def check_images(name: str, images: Tensor, projection: nn.Module) -> None:
    """Raises ValueError unless what an embedding gets is images or maps (B, C, H, W)."""
    if images.ndim != 4:
        channels = getattr(projection, "in_channels", "channels")
        raise ValueError(
            f"{name}: got shape {tuple(images.shape)}, expected (batch, {channels}, height, width)"
        )


def embed(projection: nn.Module, norm: nn.LayerNorm, image: Tensor) -> Tensor:
    """Computes a token embedding: images (B, C, H, W) to the normalized map (B, C', H', W')."""
    image = projection(image)
    tokens = normalize(norm, image.flatten(2).transpose(1, 2))
    return tokens.transpose(1, 2).unflatten(2, image.shape[2:])


def is_watched(module: nn.Module) -> bool:
    """Says whether :func:`why_must_be_called` has a reason, sooner than it finds one."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return True
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return torch_module._has_any_global_hook() or _is_patched(type(module))


def why_must_be_called(module: nn.Module) -> str | None:
    """Says who would notice if the work of a module were done without calling it; None if nobody would."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    if "forward" in vars(module):
        return "has a forward of its own"
    if _is_patched(type(module)):
        return f"has a forward that is patched by {patch_of(type(module))}"
    return None


def patch_of(cls: type) -> str | None:
    """Returns the name of the function that somebody put in the place of the forward of a class, or None."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    # functools.wraps gives a patch the names of what it wraps, but not its globals.
    own = inspect.unwrap(forward)
    homes = [getattr(each, "__globals__", {}).get("__name__") for each in (forward, own)]
    is_own = homes[1] == owner.__module__ and own.__qualname__ == f"{owner.__qualname__}.forward"
    if is_own and homes[0] in (owner.__module__, _WRAPPING):
        return None
    return f"{homes[0]}.{forward.__qualname__}"


#: The module of transformers that wraps the forwards of layers, from 5.23 on, to checkpoint their gradients.
_WRAPPING = "transformers.modeling_layers"


_BYPASSED = (
    nn.BatchNorm2d,
    nn.Conv2d,
    nn.Dropout,
    nn.GELU,
    nn.LayerNorm,
    nn.Linear,
    nn.SyncBatchNorm,
    LinearInt8,
)
#: PyTorch's own forwards of the classes whose work is done without calling them; None for one patched before.
_FORWARDS = {cls: cls.forward if patch_of(cls) is None else None for cls in _BYPASSED}


def _is_patched(cls: Any) -> bool:
    """Says, sooner than :func:`patch_of`, whether the forward of a bypassed class has been patched."""
    return cls in _FORWARDS and cls.forward is not _FORWARDS[cls]
