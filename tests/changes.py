"""Changes that somebody makes to a model between two calls: by hand, by PyTorch, by other libraries.

Each is a function of a model and a :class:`Source` of random places, which is called for an accelerated model
and for a plain one with equal sources. Its outputs are compared at each ``yield`` of a generator (which may
yield another model in the place of the old one), or after the call of a function that is none.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import pickle
import random
import re
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels.ops.linear_int8.modules import LinearInt8
from tests.timm_models import importable


class Source(random.Random):
    """Random numbers that say where a change is made, and what else it needs.

    Args:
        seed: Equal for the plain and the accelerated model.
        images: An argument of the model.
        serve: Accelerates a model as it was; returns it. Leaves the plain one alone.
    """

    def __init__(self, seed: int, images: Tensor, serve: Callable[[nn.Module], nn.Module] | None = None):
        super().__init__(seed)
        self.images, self.serve = images, serve or (lambda model: model)
        self.is_plain = serve is None


class Change(NamedTuple):
    """A change, and where it can be seen.

    Attributes:
        run: The function, see above.
        kind: What is changed: ``weights``, ``members``, ``settings``, ``hooks``, ``modes`` or ``calls``.
        shows: Which results differ after the first step: ``always``, ``never``, or those of ``training``,
            ``gradients`` (these too).
        only: The names of the families that have what is changed; None for all.
        not_in: Parts of names of the ways of serving where it makes no sense.
        is_global: Whether it changes all models at once; the function takes a list of them.
        tolerance: The largest difference over the largest value.
        is_long: Whether it is a sequence of hundreds of changes.
    """

    run: Callable[..., Any]
    kind: str
    shows: str = "always"
    only: tuple[str, ...] | None = None
    not_in: tuple[str, ...] = ()
    is_global: bool = False
    tolerance: float = 1e-4
    is_long: bool = False


#: All changes, by name.
CHANGES: dict[str, Change] = {}


def change(kind: str, name: str | None = None, **facts: Any) -> Callable[[Any], Any]:
    """Returns a decorator that adds a function to the table."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        key = name or run.__name__.replace("_", " ")
        assert key not in CHANGES
        CHANGES[key] = Change(run, kind, **facts)
        return run

    return add


def steps(name: str, model: nn.Module, source: Source) -> Iterator[nn.Module]:
    """Makes a change, and yields the model wherever its outputs are to be compared."""
    made = CHANGES[name].run(model, source)
    if not inspect.isgenerator(made):
        yield made or model
        return
    with contextlib.closing(made):
        for each in made:
            model = each or model
            yield model


# Places ---------------------------------------------------------------------------------------------------

_CVT = ("huggingface", "microsoft", "ours")
_LAYERED = ("segformer", "pvt", "pvt_v2", "glpn")
_ENCODERS = ("vit", "dinov2", "clip")
_TIMMS = ("timm_vit", "timm_pvt_v2")

_BLOCKS = {"CvtLayer", "Block", "SegformerLayer", "PvtLayer", "PvtV2BlockLayer", "GLPNLayer"}
_BLOCKS |= {"ViTLayer", "Dinov2Layer", "CLIPEncoderLayer"}
_STAGES = {"CvtStage", "VisionTransformer", "Stage", "SegformerStage", "PvtV2EncoderLayer"}
_STAGES |= {"PyramidVisionTransformerStage"}
_STAGES |= {"PvtEncoder", "GLPNEncoder", "ViTModel", "Dinov2Encoder", "CLIPEncoder"}  # have no stages
_LINEAR = (nn.Linear, LinearInt8)
_CALLED = (*_LINEAR, nn.LayerNorm, nn.Conv2d, nn.BatchNorm2d)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the transformer blocks of a model."""
    return [module for module in model.modules() if type(module).__name__ in _BLOCKS]


def stages_of(model: nn.Module) -> list[nn.Module]:
    """Returns the stages of a model, or its encoder."""
    return [module for module in model.modules() if type(module).__name__ in _STAGES]


def inner(model: nn.Module, *kinds: type) -> list[Any]:
    """Returns the modules of some classes within the blocks."""
    found = {id(m): m for block in blocks_of(model) for m in block.modules() if m is not block}
    return [module for module in found.values() if isinstance(module, kinds or _CALLED)]


_MUTE = r"key|_k\b|k_proj|convolution_projection_query|conv_proj_q"


def telling(model: nn.Module, *kinds: type) -> list[Any]:
    """Returns those of :func:`inner` of which every change shows.

    Adding to all keys, as a bias, does not, nor does a convolution of the queries where the class token asks.
    """
    keys = {id(m) for path, m in model.named_modules() if re.search(_MUTE, path)}
    return [module for module in inner(model, *kinds) if id(module) not in keys]


def outer(model: nn.Module, *kinds: type) -> list[Any]:
    """Returns those that are not."""
    within = {id(module) for module in inner(model, nn.Module)}
    return [m for m in model.modules() if isinstance(m, kinds or _CALLED) and id(m) not in within]


def holders(model: nn.Module) -> list[nn.Module]:
    """Returns the modules within blocks that call others, such as attention."""
    containers = nn.Sequential | nn.ModuleList | nn.ModuleDict
    return [
        module
        for module in telling(model, nn.Module)
        if module._modules and not isinstance(module, containers) and "forward" in dir(type(module))
    ]


#: The levels of a model where somebody may hook in.
LEVELS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "a part": telling,
    "a part around the blocks": outer,
    "a holder": holders,
    "a block": blocks_of,
    "a stage": stages_of,
    "the model": lambda model: [model],
}


def floats(model: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers that are not integers."""
    return [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def changed(tensor: Tensor, source: random.Random) -> Tensor:
    """Returns a tensor whose numbers are multiplied by ones between 0.6 and 1.6, with 0.2 added to them."""
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    return tensor.detach() * (0.6 + torch.rand(tensor.shape, generator=generator)).to(tensor.dtype) + 0.2


def scaled(value: Any) -> Any:
    """Returns results whose tensors are multiplied by other factors in each place, which no norm undoes."""

    def scale(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim == 0:
            return value
        if value.ndim == 4:  # a map, whose channels may be last, too
            value = value * torch.linspace(0.5, 1.5, value.shape[1], dtype=value.dtype)[:, None, None]
        return value * torch.linspace(0.5, 1.5, value.shape[-1], dtype=value.dtype) + 0.1

    return pytree.tree_map(scale, value)


@contextlib.contextmanager
def attribute(place: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute for a while."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


# Weights: written ------------------------------------------------------------------------------------------


#: Writes to a tensor. PyTorch counts the first one, and inference mode's.
_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda tensor: tensor.detach().mul_(1.1),
    "data.copy_": lambda tensor: tensor.data.copy_(1.1 * tensor.detach()),
    "data.lerp_": lambda tensor: tensor.data.lerp_(1.5 * tensor.detach(), 0.2),  # as ema_pytorch
    "data.clamp_": lambda tensor: tensor.data.clamp_(max=tensor.detach().flatten().double().quantile(0.9)),
    "NumPy": lambda tensor: np.multiply(tensor.detach(), 1.1, out=tensor.detach().numpy()),
    "DLPack": lambda tensor: torch.from_dlpack(tensor.detach()).mul_(1.1),
    "DLPack of NumPy": lambda tensor: np.multiply(tensor.detach(), 1.1, out=np.from_dlpack(tensor.detach())),
    "a storage": lambda tensor: tensor.untyped_storage().copy_(
        (1.1 * tensor.detach()).contiguous().untyped_storage()
    ),
    "another tensor on the storage": lambda tensor: (
        torch.empty(0).set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride()).mul_(1.1)
    ),
    "inference mode": torch.inference_mode()(lambda tensor: tensor.mul_(1.1)),
    "other memory": lambda tensor: setattr(tensor, "data", 1.1 * tensor.data),
}


def _write_all(model: nn.Module, source: Source, write: Callable[[Tensor], Any]) -> None:
    for tensor in floats(model):
        write(tensor)


for _name, _write in _WRITES.items():
    change("weights", _name)(functools.partial(_write_all, write=_write))


@change("weights")
def another_process(model: nn.Module, source: Source) -> Iterator[None]:
    """Writes to shared memory."""
    for tensor in floats(model):
        tensor.data = tensor.data.share_memory_()
    yield
    child = os.fork()
    if not child:
        try:
            for tensor in floats(model):
                tensor.data.mul_(1.1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    yield


def _tensor_of(part: nn.Module, source: Source) -> Tensor:
    tensors = [t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
    return source.choice([t for t in tensors if t.is_floating_point()])


def _write_one(model: nn.Module, source: Source, write: Callable[[Tensor, Tensor], Any]) -> None:
    tensor = _tensor_of(source.choice(telling(model)), source)
    write(tensor, changed(tensor, source))


for _name, _write_other in {
    "one tensor in place": lambda tensor, other: tensor.detach().copy_(other),
    "one tensor through data": lambda tensor, other: tensor.data.copy_(other),
    "other memory of one tensor": lambda tensor, other: setattr(tensor, "data", other),
}.items():
    change("weights", _name)(functools.partial(_write_one, write=_write_other))


@change("weights")
def a_negated_weight(model: nn.Module, source: Source) -> None:
    """8-bit integers count too."""
    source.choice(telling(model, *_LINEAR)).weight.detach().neg_()


@change("weights")
@torch.no_grad()
def one_tensor_around_the_blocks(model: nn.Module, source: Source) -> Iterator[None]:
    for part in outer(model):
        tensor = part.weight
        tensor.copy_(changed(tensor, source))
        yield


@change("weights", not_in=("quantized",))
def the_same_memory_transposed(model: nn.Module, source: Source) -> None:
    """A change that PyTorch does not count."""
    square = [m.weight for m in inner(model, nn.Linear) if len({*m.weight.shape}) == 1]
    for weight in square:
        weight.data = weight.data.t()


@change("members", not_in=("quantized",))
def hidden_channels_taken_away(model: nn.Module, source: Source) -> None:
    """Half of those of an MLP, in the same memory."""
    block = source.choice(blocks_of(model))
    first, second = [m for m in block.modules() if type(m) is nn.Linear][-2:]
    half = first.out_features // 2
    convs = [m for m in block.modules() if isinstance(m, nn.Conv2d) and m.groups == 2 * half]
    for parameter in (p for part in (first, *convs) for p in part.parameters()):
        parameter.data = parameter.data[:half]
    second.weight.data = second.weight.data[:, :half]
    for conv in convs:
        conv.groups = conv.in_channels = conv.out_channels = half


@change("weights", only=("huggingface", "microsoft", "ours", "segformer"))
def statistics_of_batch_norm(model: nn.Module, source: Source) -> None:
    """Calibrated without a step of an optimizer."""
    for norm in [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]:
        mode = norm.training
        with torch.no_grad():
            norm.train()(1.5 * source_normal(source, 4, norm.num_features, 3, 3) + 1)
        norm.train(mode)


def source_normal(source: random.Random, *shape: int) -> Tensor:
    """Returns normal random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(source.randrange(2**31)))


@change("weights")
def load_state_dict(model: nn.Module, source: Source) -> None:
    model.load_state_dict(_other_state(model, source))


@change("weights", "load_state_dict(assign=True)")
def _load_assign(model: nn.Module, source: Source) -> None:
    model.load_state_dict(_other_state(model, source), assign=True)


def _other_state(model: nn.Module, source: Source) -> dict[str, Any]:
    return {k: 1.1 * t if t.is_floating_point() else t.clone() for k, t in model.state_dict().items()}


# One number, which a sample of the numbers of a tensor may miss: what else tells of a write is needed.


def _number(model: nn.Module, source: Source) -> Tensor:
    """Returns a number of one of the largest weights, as a tensor on its memory."""
    weights = [layer.weight for layer in telling(model, nn.Linear)]
    largest = max(weight.numel() for weight in weights)
    weight = source.choice([weight for weight in weights if weight.numel() == largest])
    row, column = (source.randrange(n // 3, 2 * n // 3) for n in weight.shape)
    return weight.detach()[row, column]


@change("weights", "a number, and refresh", not_in=("quantized",))
def _refresh(model: nn.Module, source: Source) -> None:
    _number(model, source).data.add_(20)
    ck.refresh(model)


@change("weights", not_in=("quantized",))
def a_number_in_place(model: nn.Module, source: Source) -> None:
    _number(model, source).add_(20)


@change("weights", not_in=("quantized",))
def a_number_in_other_memory(model: nn.Module, source: Source) -> Iterator[None]:
    weights = [layer.weight for layer in telling(model, nn.Linear)]
    before = [weight.data for weight in weights]  # whose memory stays: that it is freed tells, too
    for weight in weights:
        weight.data = weight.data.clone()
    _number(model, source).data.add_(20)
    yield
    del before
    yield


@change("weights", not_in=("quantized",))
def a_number_by_a_fused_step(model: nn.Module, source: Source) -> None:
    number = _number(model, source)
    weight = next(p for p in model.parameters() if _lies_in(number, p))
    before, weight.grad = weight.grad, torch.zeros_like(weight)
    torch.as_strided(weight.grad, (), (), number.storage_offset() - weight.storage_offset()).fill_(-20)
    required, weight.requires_grad = weight.requires_grad, True
    torch.optim.SGD([weight], lr=1.0, fused=True).step()
    weight.grad, weight.requires_grad = before, required


def _lies_in(number: Tensor, parameter: Tensor) -> bool:
    return number.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


# Weights: optimizers ---------------------------------------------------------------------------------------


def optimizers() -> list[tuple[Any, dict[str, bool]]]:
    """Returns every optimizer of PyTorch as it takes it by itself, by tensor, together and fused."""
    base = torch.optim.Optimizer
    kinds = {k for k in vars(torch.optim).values() if inspect.isclass(k) and issubclass(k, base)} - {base}
    modes = []
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        taken = inspect.signature(kind).parameters
        modes += [(kind, {}), *((kind, {name: True}) for name in ("foreach", "fused") if name in taken)]
    return modes


def step(model: nn.Module, source: Source, kind: Any, wrap: Any = None, **mode: Any) -> None:
    """Takes a step of an optimizer with gradients that are given."""
    parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
    if kind is torch.optim.Muon:
        parameters = [p for p in parameters if p.ndim == 2]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = source_normal(source, *parameter.shape).to(parameter)
        if kind is torch.optim.SparseAdam:
            parameter.grad = parameter.grad.to_sparse()
    optimizer = kind(parameters, lr=1.0 if kind is torch.optim.LBFGS else 0.02, **mode)
    optimizer = optimizer if wrap is None else wrap(optimizer)
    optimizer.step(*([lambda: torch.tensor(1.0)] if kind is torch.optim.LBFGS else []))
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


class _Wrapped:
    """An optimizer within another object, as libraries wrap it."""

    def __init__(self, optimizer: Any):
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


_STEPS = {
    "": {},
    ", by tensor": {"foreach": False},
    ", together": {"foreach": True},
    ", fused": {"fused": True},
}
for _name, _mode in _STEPS.items():
    for _kind in (torch.optim.SGD, torch.optim.AdamW):
        change("weights", f"a step of {_kind.__name__}{_name}")(functools.partial(step, kind=_kind, **_mode))
change("weights", "a step of an optimizer that is wrapped")(
    functools.partial(step, kind=torch.optim.SGD, wrap=_Wrapped, fused=True)
)


@change("weights", is_long=True)
def every_optimizer(model: nn.Module, source: Source) -> Iterator[None]:
    for kind, mode in optimizers():
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            step(model, source, kind, **mode)
            yield
        with torch.no_grad():
            for parameter, kept in zip(model.parameters(), start, strict=True):
                parameter.copy_(kept)


@change("weights", is_long=True, not_in=("quantized",))
def a_compiled_step(model: nn.Module, source: Source) -> Iterator[None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.grad = source_normal(source, *parameter.shape)
    optimizer = torch.optim.AdamW(parameters, lr=0.02, fused=True)
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        compiled()
        yield
        for parameter in parameters:
            parameter.grad = source_normal(source, *parameter.shape)


# Dtypes ----------------------------------------------------------------------------------------------------


def _cast(model: nn.Module, source: Source, dtype: torch.dtype) -> Iterator[None]:
    _add_to_all(model)
    model.to(dtype)
    yield
    model.float()
    yield


for _dtype, _tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.05)):
    change("members", f"to {_dtype}", tolerance=_tolerance)(functools.partial(_cast, dtype=_dtype))


@torch.no_grad()
def _add_to_all(model: nn.Module) -> None:
    for tensor in floats(model):
        tensor.add_(0.1)


@change("members", not_in=("graphed",))  # a tape has views of the weights; a graph has not
def to_by_swapping(model: nn.Module, source: Source) -> None:
    _add_to_all(model)
    with _swapping():
        model.to(torch.bfloat16).float()


@contextlib.contextmanager
def _swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@change("members", not_in=("graphed",))
def swap_tensors(model: nn.Module, source: Source) -> None:
    for parameter in model.parameters():
        other = nn.Parameter(changed(parameter, source), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)


@change("members")
def channels_last(model: nn.Module, source: Source) -> None:
    _add_to_all(model)
    model.to(memory_format=torch.channels_last)


# Members ---------------------------------------------------------------------------------------------------


@change("members", not_in=("quantized",))
def another_parameter(model: nn.Module, source: Source) -> None:
    part = source.choice(telling(model))
    part.weight = nn.Parameter(changed(part.weight, source), part.weight.requires_grad)


def _batch_norms(model: nn.Module) -> list[Any]:
    """Returns the BatchNorms of a CvT's blocks, or that of SegFormer's head."""
    return telling(model, nn.BatchNorm2d) or outer(model, nn.BatchNorm2d)


@change("members", only=(*_CVT, "segformer"))
def another_buffer(model: nn.Module, source: Source) -> None:
    norm = source.choice(_batch_norms(model))
    norm.running_mean = norm.running_mean + 3.0


@change("members", "no bias")
def _no_bias(model: nn.Module, source: Source) -> Iterator[None]:
    _add_to_all(model)
    yield
    layer = source.choice([m for m in telling(model, *_LINEAR) if m.bias is not None])
    layer.bias = None
    yield


@change("members")
def a_tied_parameter(model: nn.Module, source: Source) -> None:
    first, second = source.sample(_alike(model, nn.LayerNorm), 2)
    first.weight = nn.Parameter(changed(first.weight, source))
    second.weight = first.weight


def _alike(model: nn.Module, kind: type) -> list[Any]:
    """Returns parts of a class whose weights have the same shape."""
    parts = inner(model, kind)
    return [part for part in parts if part.weight.shape == parts[-1].weight.shape]


def _parent_of(model: nn.Module, part: nn.Module) -> tuple[nn.Module, str]:
    return next(
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is part
    )


def _replace(model: nn.Module, part: nn.Module, other: nn.Module) -> None:
    parent, name = _parent_of(model, part)
    setattr(parent, name, other) if not name.isdigit() else parent._modules.update({name: other})


@change("members")
def another_module_of_the_class(model: nn.Module, source: Source) -> None:
    part = source.choice(telling(model))
    other = copy.deepcopy(part)
    with torch.no_grad():
        tensor = other.weight if other.weight.is_floating_point() else other.weight_scale
        tensor.copy_(changed(tensor, source))
    _replace(model, part, other)


class Scaling(nn.Module):
    """A module around another one."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled(self.module(*args, **kwargs))


@change("members")
def a_module_around_a_part(model: nn.Module, source: Source) -> Iterator[None]:
    part = source.choice(telling(model, nn.Linear, LinearInt8, nn.LayerNorm))
    around = Scaling(part)
    _replace(model, part, around)
    yield
    _replace(model, around, part)
    yield


class Rest(nn.Module):
    """A module that does nothing, of a class that nobody knows."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@change("members")
def a_norm_taken_out(model: nn.Module, source: Source) -> Iterator[None]:
    norm = source.choice(telling(model, nn.LayerNorm))
    rest = Rest().train(norm.training)
    _replace(model, norm, rest)
    yield
    _replace(model, rest, norm)
    yield


@change("members", only=(*_CVT, *_LAYERED, "vit"))
def work_in_the_place_of_dropout(model: nn.Module, source: Source) -> None:
    part = source.choice(telling(model, nn.Dropout))
    _replace(model, part, nn.Softsign().train(part.training))


def _rows_of_blocks(model: nn.Module) -> list[Any]:
    """Returns the containers of blocks."""
    blocks = {id(block) for block in blocks_of(model)}
    rows = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return [row for row in rows if len(row) and all(id(child) in blocks for child in row)]


@change("members")
def one_more_block(model: nn.Module, source: Source) -> None:
    row = source.choice(_rows_of_blocks(model))
    row.append(copy.deepcopy(row[0]))


@change("members", only=(*_CVT, "segformer", "pvt", "pvt_v2", *_ENCODERS, *_TIMMS))
def one_block_less(model: nn.Module, source: Source) -> None:
    row = source.choice([row for row in _rows_of_blocks(model) if len(row) > 1])
    del row[-1]


@change("members")
def a_module_of_nothing_added(model: nn.Module, source: Source) -> Iterator[None]:
    holder = source.choice(holders(model))
    holder.extra = nn.Identity().train(holder.training)
    yield
    _add_to_all(model)
    yield


def _of_another_class(part: nn.Module) -> None:
    kind = type(part)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scaled(kind.forward(self, *args, **kwargs))

    part.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})


def _swapped_class(part: nn.Module) -> Iterator[None]:
    kind = type(part)
    _of_another_class(part)
    yield
    part.__class__ = kind
    yield


for _level in ("a part", "a holder"):
    change("members", f"another class of {_level}")(
        lambda model, source, level=_level: _swapped_class(source.choice(LEVELS[level](model)))
    )


def _scaled_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return scaled(type(self).forward(self, *args, **kwargs))


def _on_object(part: nn.Module) -> Iterator[None]:
    part.forward = types.MethodType(_scaled_forward, part)  # type: ignore[method-assign]
    yield
    del part.forward
    yield


for _level in ("a part", "a part around the blocks", "a holder", "a block", "a stage"):
    change("members", f"a forward set on {_level}")(
        lambda model, source, level=_level: _on_object(source.choice(LEVELS[level](model)))
    )


def _patched(classes: Callable[[nn.Module], list[Any]]) -> Callable[..., Iterator[None]]:
    def run(models: list[nn.Module], source: Source) -> Iterator[None]:
        kind: Any = type(source.choice(classes(models[0])))
        owner = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = owner.forward
        with attribute(owner, "forward", lambda *args, **kwargs: scaled(forward(*args, **kwargs))):
            yield
        yield

    return run


for _level, _classes in LEVELS.items():
    change("members", f"the forward patched of the class of {_level}", is_global=True)(_patched(_classes))


# Adapters --------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A layer with an adapter of low rank, which merges it as peft does: through ``.data``."""

    def __init__(self, layer: Any, source: Source):
        super().__init__()
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        for each in (self.down, self.up):
            each.weight.data = source_normal(source, *each.weight.shape) / 4
        self.is_merged = False
        self.train(layer.training)

    def merge(self, sign: int = 1) -> None:
        self.base_layer.weight.data += sign * (self.up.weight.detach() @ self.down.weight.detach())
        self.is_merged = sign == 1

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        return out if self.is_merged else out + self.up(self.down(x))


def _adapters(model: nn.Module, source: Source) -> list[Adapter]:
    layers = inner(model, nn.Linear)[::2]
    adapters = [Adapter(layer, source) for layer in layers]
    for layer, adapter in zip(layers, adapters, strict=True):
        _replace(model, layer, adapter)
    return adapters


def _unload(model: nn.Module, adapters: list[Adapter]) -> None:
    for adapter in adapters:
        _replace(model, adapter, adapter.base_layer)


@change("members", not_in=("quantized",))
def adapters_merged_after_a_call(model: nn.Module, source: Source) -> Iterator[None]:
    adapters = _adapters(model, source)
    yield
    for adapter in adapters:
        adapter.merge()
    _unload(model, adapters)
    yield


@change("members", not_in=("quantized", "graphed"))  # whose replays do not see an attribute of a module
def adapters_merged_later(model: nn.Module, source: Source) -> Iterator[None]:
    adapters = _adapters(model, source)
    yield
    for adapter in adapters:
        adapter.merge()
    yield
    _unload(model, adapters)
    yield


@change("members", not_in=("quantized", "frozen"))  # layers with adapters cannot be frozen
def adapters_before_it_is_accelerated(model: nn.Module, source: Source) -> Iterator[None]:
    if not source.is_plain:
        ck.restore(model)
    adapters = _adapters(model, source)
    source.serve(model)
    yield
    for adapter in adapters:
        adapter.merge()
    _unload(model, adapters)
    yield


# Attributes, parametrizations, subclasses -----------------------------------------------------------------


def _shadowed(part: nn.Module, name: str, *values: Any) -> Iterator[None]:
    """Puts attributes in the place of a member, each in that of the one before, and takes the last away."""
    for value in values:
        vars(part)[name] = value
        yield
    del vars(part)[name]
    yield


@change("members", not_in=("graphed",))
def a_shadowed_parameter(model: nn.Module, source: Source) -> Iterator[None]:
    layer = source.choice([m for m in telling(model, nn.LayerNorm, *_LINEAR) if m.bias is not None])
    return _shadowed(layer, "bias", *(factor * layer.bias.detach() + 0.3 for factor in (0.5, 2.0)))


@change("members", not_in=("graphed", "quantized"))  # 8-bit numbers may round to either side of a tie
def a_shadowed_module(model: nn.Module, source: Source) -> Iterator[None]:
    block = source.choice(blocks_of(model))
    name = source.choice([name for name, m in block._modules.items() if isinstance(m, nn.LayerNorm)])
    norms: list[Any] = [copy.deepcopy(block._modules[name]) for _ in range(2)]
    for factor, norm in zip((0.5, 2.0), norms, strict=True):
        norm.bias.data.add_(factor)
    return _shadowed(block, name, *norms)


@change("members", only=_CVT, not_in=("graphed",))
def a_shadowed_buffer(model: nn.Module, source: Source) -> Iterator[None]:
    norm = source.choice(telling(model, nn.BatchNorm2d))
    return _shadowed(norm, "running_mean", norm.running_mean + 3.0)


class Shifting(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x + 0.1


@change("members", "a parametrization", not_in=("quantized",))
def _parametrization(model: nn.Module, source: Source) -> Iterator[None]:
    layer = source.choice(telling(model, nn.Linear))
    parametrize.register_parametrization(layer, "weight", Shifting())
    yield
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(0.5)
    yield
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    yield


@change("members", "weight norm by a hook", not_in=("quantized",))
def _old_weight_norm(model: nn.Module, source: Source) -> Iterator[None]:
    layer = source.choice(telling(model, nn.Linear))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer)
    with torch.no_grad():
        layer.weight_g.mul_(1.5)
    yield
    nn.utils.remove_weight_norm(layer)
    yield


class Doubling(nn.Parameter):
    """A parameter with which linear layers compute twice as much."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = function(*args, **(kwargs or {}))
        return 2 * out if function is nn.functional.linear else out


@change("members", not_in=("quantized",))
def a_subclass_of_a_tensor(model: nn.Module, source: Source) -> Iterator[None]:
    layer = source.choice(telling(model, nn.Linear))
    before = layer.weight
    layer.weight = Doubling(before.detach().clone(), before.requires_grad)
    yield
    layer.weight = before
    yield


@change("members", not_in=("gradients", "training", "quantized", "live"))
def weights_made_in_inference_mode(model: nn.Module, source: Source) -> Iterator[None]:
    """They have no version."""
    with torch.inference_mode():
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(1.1 * p)
    yield
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    yield
    for parameter in model.parameters():
        parameter.data.mul_(0.9)
    yield


# Settings --------------------------------------------------------------------------------------------------


def setting(name: str, *kinds: type, place: Any = telling, values: Any = None, **facts: Any) -> None:
    """Adds a change of a setting, for each step to another value, of the parts that ``place`` chooses."""

    def run(model: nn.Module, source: Source) -> Iterator[None]:
        parts = [p for p in place(model, *(kinds or (nn.Module,))) if name in vars(p)]
        parts = [source.choice(parts)] if place in (telling, outer) else parts
        for value in values or others(getattr(parts[0], name)):
            with contextlib.ExitStack() as stack:
                for part in parts:
                    stack.enter_context(attribute(part, name, value))
                yield
            yield

    where = f" of {kinds[0].__name__}" if kinds else ""
    where += " around the blocks" if place is outer else ""
    change("settings", f"{name}{where}", **facts)(run)


def others(value: Any) -> Iterator[Any]:
    """Yields values that a setting may have in the place of another one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield 2 * value
    elif isinstance(value, float):
        yield 2 * value + 0.5
    elif isinstance(value, tuple) and value and all(type(each) is int for each in value):
        yield (value[0] + 1, *value[1:])
        yield tuple(each + 1 for each in value)
    elif isinstance(value, str) and value in _WORDS:
        yield _WORDS[value]
    elif callable(value) and not isinstance(value, nn.Module | type):
        yield torch.relu


_WORDS = {"zeros": "circular", "none": "tanh", "tanh": "none", "quick": "none", "sdpa": "eager", "cls": "avg"}


def _all(model: nn.Module, *kinds: type) -> list[Any]:
    return inner(model, *kinds)


def _reducing(model: nn.Module, *kinds: type) -> list[Any]:
    """Returns the convolutions that make fewer keys and values, of the first block that has some."""
    found = ([c for c in inner(block, *kinds) if max(c.stride) > 1] for block in blocks_of(model))
    return next(filter(None, found))


def _padded(model: nn.Module, *kinds: type) -> list[Any]:
    return [conv for conv in inner(model, *kinds) if max(conv.padding) > 0]


def _of_last_stage(model: nn.Module, *kinds: type) -> list[Any]:
    return [*stages_of(model)[-1].modules()]


setting("eps", nn.LayerNorm)
setting("eps", nn.LayerNorm, place=outer, not_in=("graphed",))
setting("eps", nn.BatchNorm2d, values=[5.0], only=_CVT)
setting("eps", nn.BatchNorm2d, place=outer, only=("segformer",), not_in=("graphed",))
setting("num_heads", only=_CVT)
setting("scale", only=(*_CVT, "clip"))
setting("scaling", only=("segformer", "vit", "dinov2"))
setting("padding", nn.Conv2d, place=_reducing, only=(*_CVT, *_LAYERED, "timm_pvt_v2"))
setting("padding_mode", nn.Conv2d, place=_padded, only=(*_CVT, "segformer", "pvt_v2", "glpn", "timm_pvt_v2"))
setting("dilation", nn.Conv2d, place=_reducing, only=(*_CVT, *_LAYERED, "timm_pvt_v2"))
setting("stride", nn.Conv2d, place=_reducing, only=(*_CVT, *_LAYERED, "timm_pvt_v2"))
setting("approximate", nn.GELU, place=_all, only=("huggingface", "microsoft", *_TIMMS), tolerance=1e-5)
setting("approximate", place=_all, only=("ours",), tolerance=1e-5)
setting("act", only=(*_LAYERED, "vit", "dinov2"))
setting("momentum", nn.BatchNorm2d, values=[0.7, 1.9], only=_CVT, shows="training")
setting("track_running_stats", nn.BatchNorm2d, only=_CVT, shows="training")
setting("p", nn.Dropout, only=(*_CVT, *_LAYERED, "vit", *_TIMMS), shows="training")
setting("sequence_reduction_ratio", place=_all, values=[1], only=("segformer",))
setting("sr_ratio", place=_all, values=[1], only=("glpn",))
setting("sequences_reduction_ratio", place=_all, values=[1], only=("pvt",))
setting("spatial_reduction_ratio", place=_all, values=[1], only=("pvt_v2",))
setting("token_keep", place=_of_last_stage, values=[0.3, 1.0], only=("pruned",))
setting("pool", place=_of_last_stage, only=("pruned",))


@change("settings", only=("pruned",))
def token_keep_of_entropy(model: nn.Module, source: Source) -> Iterator[None]:
    stage = stages_of(model)[-1]
    stage.blocks[0].token_keep = "entropy"
    yield
    stage.token_keep_bounds = (0.8, 0.9)
    yield


@change("settings", only=_TIMMS, not_in=("graphed",))
def scale_without_sdpa(model: nn.Module, source: Source) -> Iterator[None]:
    """PyTorch's attention does not read the scale; timm's own does."""
    attention: Any = source.choice(blocks_of(model)).attn
    for name, value in (("scale", 3.0), ("fused_attn", False), ("scale", 0.1)):
        setattr(attention, name, value)
        yield


@change("settings", only=("glpn",), not_in=("graphed",))
def parts_of_a_depth_head(model: Any, source: Source) -> Iterator[None]:
    model.head.config.max_depth = 3
    yield
    model.decoder.stages[-1].fusion.convolutional_layer1[1].running_mean.add_(1)
    yield
    vars(model.decoder.final_upsample).update(mode="nearest", align_corners=None)
    yield
    model.head.head[1] = nn.GELU().train(model.training)
    yield


@change("settings", "attention chosen in the configuration", only=("segformer", *_ENCODERS))
def _attention(model: nn.Module, source: Source) -> Iterator[None]:
    """Makes the model return probabilities."""
    with attribute(model.config, "_attn_implementation", "eager"):
        yield
        with attribute(model.config, "output_attentions", True):
            yield
        _add_to_all(model)
        yield
    yield


@change("settings", only=("huggingface", *_LAYERED, *_ENCODERS))
def outputs_chosen_in_the_configuration(model: nn.Module, source: Source) -> Iterator[None]:
    with attribute(model.config, "output_hidden_states", True):
        yield
    yield


# Hooks -----------------------------------------------------------------------------------------------------

#: How hooks are registered, and those that change results.
_HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda module, args, out: scaled(out)),
    "forward hook with keywords": lambda m: m.register_forward_hook(
        lambda module, args, kwargs, out: scaled(out), with_kwargs=True
    ),
    "pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: scaled(args)),
    "pre-hook with keywords": lambda m: m.register_forward_pre_hook(
        lambda module, args, kwargs: scaled((args, kwargs)), with_kwargs=True
    ),
}
_BACKWARD_HOOKS: dict[str, Callable[[Any], Any]] = {
    "full backward hook": lambda m: m.register_full_backward_hook(
        lambda module, grad_input, grad_output: scaled(grad_input)
    ),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(
        lambda module, grad_output: scaled(grad_output)
    ),
}


def _hooked(register: Callable[[Any], Any], level: str) -> Callable[..., Iterator[None]]:
    def run(model: nn.Module, source: Source) -> Iterator[None]:
        places = LEVELS[level](model)
        if level == "a stage" and register in _BACKWARD_HOOKS.values():
            places = places[1:]  # the first one gets images, which need no gradient
        handle = register(source.choice(places))
        yield
        handle.remove()
        yield

    return run


#: Where backward hooks get a gradient, which they do not of tokens that are passed by name, nor of images.
_WITH_GRADIENTS = {
    "a holder": (*_CVT, *_LAYERED, "vit", "dinov2", "timm_pvt_v2"),
    "a stage": (*_CVT, "segformer", "timm_pvt_v2"),
}
for _name, _register in (_HOOKS | _BACKWARD_HOOKS).items():
    for _level in LEVELS:
        if _level in ("a part", "a block") or _name in (
            "forward hook",
            "pre-hook with keywords",
            "full backward hook",
        ):
            _shows = "gradients" if _name in _BACKWARD_HOOKS else "always"
            if _name in _BACKWARD_HOOKS and _level == "the model":
                _shows = "never"  # of a model whose result is no tensor
            _only = _WITH_GRADIENTS.get(_level) if _name in _BACKWARD_HOOKS else None
            change("hooks", f"a {_name} on {_level}", shows=_shows, only=_only)(_hooked(_register, _level))


@change("hooks", shows="gradients")
def a_hook_on_a_parameter(model: nn.Module, source: Source) -> Iterator[None]:
    parameter = source.choice([m for m in telling(model) if m.weight.requires_grad]).weight
    handle = parameter.register_hook(scaled)
    yield
    handle.remove()
    yield


def _on_linear(module: nn.Module, *values: Any) -> Any:
    """A hook on all modules, which changes outputs, inputs, or gradients of linear layers."""
    return scaled(values[-1]) if isinstance(module, _LINEAR) else None


def _on_linear_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return scaled(grad_input) if isinstance(module, _LINEAR) else None


_GLOBAL = {
    "forward hook": torch_module.register_module_forward_hook,
    "pre-hook": torch_module.register_module_forward_pre_hook,
    "full backward hook": torch_module.register_module_full_backward_hook,
    "backward pre-hook": torch_module.register_module_full_backward_pre_hook,
}


def _hooked_everywhere(register: Callable[[Any], Any]) -> Callable[..., Iterator[None]]:
    def run(models: list[nn.Module], source: Source) -> Iterator[None]:
        is_full = register is torch_module.register_module_full_backward_hook
        handle = register(_on_linear_backward if is_full else _on_linear)
        try:
            yield
        finally:
            handle.remove()
        yield

    return run


for _name, _register in _GLOBAL.items():
    _shows = "gradients" if "backward" in _name else "always"
    change("hooks", f"a {_name} on all modules", shows=_shows, is_global=True)(_hooked_everywhere(_register))


def _change_all(module: nn.Module) -> None:
    for tensor in floats(module):
        tensor.data.copy_(changed(tensor, random.Random(1)))


@change("hooks")
def hooks_on_the_state(model: nn.Module, source: Source) -> None:
    """Lets a part learn that a state is loaded."""
    part = source.choice(telling(model))
    part.register_load_state_dict_post_hook(lambda module, keys: _change_all(module))
    part.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    model.load_state_dict(model.state_dict())


@change("hooks", only=("huggingface", *_LAYERED, *_ENCODERS), shows="never")
def a_recording_of_hidden_states(model: nn.Module, source: Source) -> Iterator[None]:
    """After which transformers leaves hooks in the model."""
    with torch.no_grad():
        model(source.images, output_hidden_states=True)
    yield
    _add_to_all(model)
    yield


# Modes -----------------------------------------------------------------------------------------------------


@change("modes", only=(*_CVT, "segformer"))
def one_batch_norm_in_training(model: nn.Module, source: Source) -> Iterator[None]:
    norm = source.choice(_batch_norms(model))
    norm.train(not norm.training)
    yield
    norm.train(not norm.training)
    yield


@change("modes", not_in=("training",), only=(*_CVT, *_LAYERED, "vit"))
def one_dropout_in_training(model: nn.Module, source: Source) -> Iterator[None]:
    dropout = source.choice(telling(model, nn.Dropout))
    dropout.p = 0.5
    dropout.train()
    yield
    dropout.eval()
    yield


@change("modes", shows="never")
def flags_turned(model: nn.Module, source: Source) -> Iterator[None]:
    """There and back; whole models do not train while they are frozen."""
    model.train(not model.training)
    yield
    model.train(not model.training)
    yield


@change("modes", shows="gradients")
def requires_grad(model: nn.Module, source: Source) -> Iterator[None]:
    part = source.choice(telling(model))
    part.requires_grad_(False)
    yield
    model.requires_grad_(False)
    _add_to_all(model)
    source.choice(telling(model, nn.LayerNorm)).requires_grad_(True)
    yield


# Calls -----------------------------------------------------------------------------------------------------


def deed(name: str, **facts: Any) -> Callable[[Any], Any]:
    """Adds something that changes nothing, between two changes of weights."""

    def add(do: Callable[[nn.Module, Source], Any]) -> Any:
        def run(model: nn.Module, source: Source) -> Iterator[nn.Module]:
            model = do(model, source) or model
            yield model
            for tensor in floats(model):
                tensor.data.mul_(1.1)
            yield model
            _add_to_all(model)
            yield model

        change("calls", name, shows="never", **facts)(run)
        return do

    return add


@deed("nothing")
def _nothing(model: nn.Module, source: Source) -> None:
    pass


@deed("refresh")
def _refreshed(model: nn.Module, source: Source) -> None:
    ck.refresh(model)


@deed("release_memory")
def _released(model: nn.Module, source: Source) -> None:
    ck.release_memory()


@deed("restore", not_in=("quantized",))
def _restored(model: nn.Module, source: Source) -> None:
    if not source.is_plain:
        ck.restore(model)


@deed("restore and accelerate", not_in=("quantized",))
def _again(model: nn.Module, source: Source) -> nn.Module:
    if not source.is_plain:
        ck.restore(model)
    return source.serve(model)


@deed("accelerate in another way", not_in=("training",))
def _otherwise(model: nn.Module, source: Source) -> None:
    for freeze in (None, True, False):
        if not source.is_plain:
            # Changes before it may have left nothing that can be frozen.
            with contextlib.suppress(ValueError) if freeze else contextlib.nullcontext():
                ck.accelerate(model, freeze=freeze)
        # Changes before it may have left a model that raises: the plain one too.
        with torch.no_grad():
            model(source.images.to(next(model.parameters()).dtype))


@deed("deepcopy")
def _copied(model: nn.Module, source: Source) -> nn.Module:
    return copy.deepcopy(model)


#: SegFormer's own forward hooks its modules by functions that cannot be pickled.
_PICKLED = (*_CVT, "pvt", "pvt_v2", "glpn", *_ENCODERS, *_TIMMS)


@deed("pickle", only=_PICKLED)
@importable()
def _pickled(model: nn.Module, source: Source) -> nn.Module:
    unpickled: nn.Module = pickle.loads(pickle.dumps(model))
    return unpickled


@deed("another call, of gradients", not_in=("frozen",))
def _with_gradients(model: nn.Module, source: Source) -> None:
    mode = model.training
    with torch.enable_grad():
        out = model.eval()(source.images)
        next(t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)).sum().backward()
    model.train(mode)
    model.zero_grad()


def _call_within(model: nn.Module, source: Source, context: Callable[[], Any]) -> None:
    with context(), torch.no_grad():
        model(source.images)


for _name, _context in {
    "under autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "in inference mode": torch.inference_mode,
    "by another backend": lambda: ck.use_backend("reference"),
}.items():
    deed(f"another call, {_name}", not_in=("training",))(functools.partial(_call_within, context=_context))


@deed(
    "another call, of another size",
    not_in=("training",),
    only=(*_CVT, "segformer", "pvt_v2", "glpn", "timm_pvt_v2"),
)
def _size(model: nn.Module, source: Source) -> None:
    with torch.no_grad():
        model(torch.cat([source.images, source.images], 2)[:1])


@change("calls", is_global=True)
def a_request_for_a_backend(models: list[nn.Module], source: Source) -> Iterator[None]:
    for context in (
        ck.use_backend("reference"),
        ck.use_backend("composed", "reference"),
        contextlib.nullcontext(),
    ):
        with context:
            yield
            for model in models:
                _add_to_all(model)
            yield


@change("calls", shows="never", is_global=True)
def another_number_of_threads(models: list[nn.Module], source: Source) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# All of them, one by one -----------------------------------------------------------------------------------

#: What says of a layer how large its weight is. PyTorch's forwards look at the weight.
_SIZES = {"in_channels", "out_channels", "kernel_size", "in_features", "out_features", "num_features"}
_SIZES |= {"num_attention_heads"}  # SegFormer reads the channels of a head


@change("settings", is_long=True, shows="never", not_in=("graphed",))
def every_attribute(model: nn.Module, source: Source) -> Iterator[None]:
    for part in inner(model, nn.Module):
        for name in [name for name in vars(part) if name[0] != "_" and name not in (*_SIZES, "training")]:
            for value in others(getattr(part, name)):
                with attribute(part, name, value):
                    yield
    yield


@change("members", is_long=True, shows="never")
def every_module(model: nn.Module, source: Source) -> Iterator[None]:
    for part in inner(model, nn.Module):
        parent, name = _parent_of(model, part)
        with attribute(parent, name, Scaling(part)) if not name.isdigit() else contextlib.nullcontext():
            yield
        kind = type(part)
        _of_another_class(part)
        yield
        part.__class__ = kind
        yield from _on_object(part)
