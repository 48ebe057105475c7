"""The autotuning cache keys of a model's calls, with the arguments of one call for each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from cvt.config import DTYPES, PRESETS, TokenKeep
from cvt.factory import create_model
from cvt.model import Block, CvT
from cvt_kernels import LinearInt8, accelerate, backends, dispatch, restore
from cvt_kernels.acceleration.class_token import with_class_token_only
from cvt_kernels.ops import weight_cache
from cvt_kernels.ops.linear_int8.modules import replace
from cvt_kernels.quantization.layers import find_layers

from ..pyramids import build_pyramid

#: The backends to request, so that composed operators call their parts, whose cache keys are recorded too.
COMPOSED: tuple[backends.Backend, ...] = ("composed", "cuda", "cpu", "reference")


class Workload(NamedTuple):
    """The steps of a model whose calls are tuned: a forward, and optionally a training step.

    ``quantized`` adds the forward of the quantized model; ``token_keep`` is as of ``CvTConfig``.
    """

    model: str
    image_size: int
    batch_sizes: list[int]
    dtypes: list[str]
    train: bool
    quantized: bool = False
    token_keep: TokenKeep | tuple[TokenKeep, ...] = 1.0


@dataclass(frozen=True)
class TensorLike:
    """The description of a tensor, from which another process makes one with random values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLike:
        """Describes a tensor; it requires a gradient only where autograd records."""
        wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, wants_gradient)

    def make(self, device: torch.device, generator: torch.Generator) -> Tensor:
        """Makes the tensor; vectors are positive, since one may be a variance."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.dtype == torch.int8:
            return tensor.random_(-127, 128, generator=generator)
        if self.dtype == torch.int64 and len(self.shape) == 2:  # rows of tokens, which are unique
            return tensor.copy_(torch.arange(self.shape[1]))
        if not self.dtype.is_floating_point:
            return tensor.fill_(1)
        if len(self.shape) > 1:
            numbers = torch.randn(self.shape, generator=generator, device=device)
        else:
            numbers = 0.5 + torch.rand(self.shape, generator=generator, device=device)
        return tensor.copy_(numbers).requires_grad_(self.requires_grad)


class CacheKey(NamedTuple):
    """A cache key with the arguments of one of its calls; picklable, for other processes.

    Attributes:
        text: The cache key as in the cache's files.
        arguments: The arguments by name, with a :class:`TensorLike` for every tensor.
        autocast: The dtype of autocast around the call; None without it.
    """

    text: str
    operator: str
    arguments: dict[str, Any]
    autocast: torch.dtype | None

    def make_arguments(self, device: torch.device) -> dict[str, Any]:
        """Makes the arguments, with the same numbers every time."""
        generator = torch.Generator(device).manual_seed(0)
        return pytree.tree_map_only(TensorLike, lambda like: like.make(device, generator), self.arguments)


def collect(workload: Workload, device: torch.device) -> list[CacheKey]:
    """Runs the steps of a workload on fake tensors, and lists every cache key once.

    Inference comes before training, and dtypes are in the order of the workload. The parts of a composed
    operator come before it, since it is timed with the backends chosen for them.
    """
    collector = _Collector()
    cache_keys: dict[str, CacheKey] = {}
    modes = ["inference", *["quantized"] * workload.quantized, *["train"] * workload.train]
    for mode, name in itertools.product(modes, workload.dtypes):
        for known, batch_size in itertools.product(_without_entropy(workload), workload.batch_sizes):
            is_train, is_quantized = mode == "train", mode == "quantized"
            collector.run(known, device, DTYPES[name], batch_size, train=is_train, quantized=is_quantized)
        cache_keys |= {each.text: each for each in sorted(collector.cache_keys.values(), key=_rank)}
    return list(cache_keys.values())


def _rank(cache_key: CacheKey) -> tuple[bool, int]:
    """Returns a sort key by which operators come before those composed of them."""
    composed = "composed" in backends.implementations[cache_key.operator]
    return composed, list(backends.operators).index(cache_key.operator)


def _without_entropy(workload: Workload) -> list[Workload]:
    """Returns workloads with fixed fractions: in place of ``"entropy"`` its least and its greatest."""
    keep = workload.token_keep
    if "entropy" not in (keep if isinstance(keep, tuple) else (keep,)):
        return [workload]
    bounds = PRESETS[workload.model].token_keep_bounds
    if isinstance(keep, tuple):
        keeps = [tuple(bound if each == "entropy" else each for each in keep) for bound in bounds]
        return [workload._replace(token_keep=each) for each in keeps]
    return [workload._replace(token_keep=bound) for bound in bounds]


def _quantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces the linear layers of a meta model by int8 layers."""
    for layer in find_layers(model, embeddings=False):
        linear = cast(nn.Linear, layer.module)
        made = LinearInt8(linear.in_features, linear.out_features, linear.bias is not None).to(dtype)
        replace(model, linear, made.eval())


def _build(workload: Workload) -> Any:
    """Builds the model without numbers."""
    if workload.model in PRESETS:
        return create_model(workload.model, token_keep=workload.token_keep)
    with torch.device("cpu"):  # whose configuration computes with numbers
        return build_pyramid(workload.model, None, workload.image_size).to("meta")


class _Collector:
    """A recorder of the operator calls of models, by cache key."""

    def __init__(self) -> None:
        self.cache_keys: dict[str, CacheKey] = {}
        self._autocast: torch.dtype | None = None
        self._is_cvt = True
        self._first_layers: dict[Tensor, nn.Linear] = {}  # by the weight of the LayerNorm before

    def run(
        self,
        workload: Workload,
        device: torch.device,
        dtype: torch.dtype,
        batch_size: int,
        *,
        train: bool,
        quantized: bool = False,
    ) -> None:
        """Runs a step; training in 16 bits is under autocast and has its weights in float32."""
        self._autocast = dtype if train and dtype != torch.float32 else None
        weights = torch.float32 if train else dtype
        shape = batch_size, 3, workload.image_size, workload.image_size
        self._is_cvt = workload.model in PRESETS
        with torch.device("meta"):
            model = _build(workload).to(weights).train(train)
            if quantized:
                _quantize(model, weights)
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            weight_cache.packing_fakes(),
            backends.replaced(self._recording),
            backends.requesting(*COMPOSED),
            torch.set_grad_enabled(train),
            self._autocasting(device),
        ):
            model.to_empty(device=device)
            images = torch.empty(shape, dtype=weights, device=device)
            if self._is_cvt:
                self._run_cvt(model, images, train=train, quantized=quantized)
            else:
                self._run_pyramid(model, images, train=train)

    def _run_cvt(self, model: CvT, images: Tensor, *, train: bool, quantized: bool) -> None:
        if not train:  # as it is served, whole stages at a time
            accelerate(model, freeze=True)(images)
            restore(model)
        if not quantized:
            self._watch(model, images.device)
        model(images)
        if not train:  # as it is served without hooks
            last = model._built_stages()[-1]
            with_class_token_only(last, last.blocks[-1], lambda: model(images), even_if_watched=True)

    def _run_pyramid(self, model: nn.Module, images: Tensor, *, train: bool) -> None:
        linear: Any = backends.operators["linear"]
        composition = linear.composition
        if images.device.type == "cpu":  # or fake tensors would bypass the registry
            linear.composition = None
        try:
            for freeze in (False,) if train else (False, None, True):
                with contextlib.suppress(ValueError):  # not every model can be frozen
                    accelerate(model, freeze=freeze)
                model(images)
                restore(model)
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise ValueError(
                f"image_size: got {images.shape[-1]}, which {type(model).__name__} does not take: {reason}"
            ) from error
        finally:
            linear.composition = composition

    def _watch(self, model: nn.Module, device: torch.device) -> None:
        """Records also calls that only occur on other devices or in Hugging Face's and Microsoft's models."""
        # In Hugging Face's and Microsoft's models the images are not channels-last, so that the tokens of
        # stage 0 are strided, and for a single image those of every stage.
        for name, module in model.named_modules():
            if name.endswith("patch_embed.norm"):
                module.register_forward_pre_hook(self._record_layer_norms)
        for name, module in model.named_modules() if device.type == "cpu" else ():
            # A block does not call the first layer of its MLP, and would if that had hooks.
            if isinstance(module, Block):
                self._first_layers[module.norm2.weight] = module.mlp.fc1
            elif isinstance(module, nn.Linear) and name != "head" and not name.endswith("mlp.fc1"):
                module.register_forward_pre_hook(self._record_linear)

    def _autocasting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self._autocast)

    def _recording(
        self, operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        """Returns an implementation that records its calls and computes as the reference does.

        A composed operator calls others, whose cache keys are recorded too.
        """
        plain: Any = backends.operators[operator]
        function = implementation.function if backend == "composed" else plain.reference

        def serve(call: backends.Record) -> Any:
            arguments = call._asdict()
            self._record(operator, **arguments)
            for approximate in ("none", "quick") if self._is_cvt else ():  # of Hugging Face, and of Microsoft
                if arguments.get("approximate") is not None:
                    self._record(operator, **arguments | {"approximate": approximate})
                elif operator == "transformer_block":
                    block = call.block._replace(approximate=approximate)
                    self._record(operator, **arguments | {"block": block})
                elif operator == "transformer_blocks":
                    blocks = tuple(block._replace(approximate=approximate) for block in call.blocks)
                    self._record(operator, **arguments | {"blocks": blocks})
            result = function(call)
            if operator in ("add_layer_norm", "gather_add_layer_norm") and call.weight in self._first_layers:
                self._record_linear(self._first_layers[call.weight], (result[1],))
            return result

        return dataclasses.replace(implementation, function=serve, why_unsupported=None)

    def _record_layer_norms(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Records the calls of a LayerNorm, for the given layout of tokens and for the channels-first one."""
        norm = cast(nn.LayerNorm, module)
        for x in (args[0], args[0].transpose(1, 2).contiguous().transpose(1, 2)):
            self._record("layer_norm", x, norm.weight, norm.bias, eps=norm.eps)

    def _record_linear(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Records the call of a linear layer, which on fake tensors bypasses the registry."""
        x, weight, bias = args[0], module.weight, module.bias
        if x.dtype == weight.dtype:
            self._record("linear", x, weight, bias)

    def _record(self, operator: str, *args: Any, **kwargs: Any) -> None:
        text = dispatch.cache_key(operator, *args, **kwargs)
        if text not in self.cache_keys:
            arguments = backends.operators[operator].bind(*args, **kwargs)._asdict()
            like = pytree.tree_map_only(Tensor, TensorLike.of, arguments)
            self.cache_keys[text] = CacheKey(text, operator, like, self._autocast)
