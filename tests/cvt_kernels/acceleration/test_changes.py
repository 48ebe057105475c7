"""Whatever somebody changes in a block, a stage or a head between two calls acts as in the plain module.

Every hook of every kind, every attribute, every tensor and every module within is changed once, and put back.
"""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import cvt_kernels as ck
from cvt_kernels.acceleration import freezable, matching
from tests.cvt_kernels.acceleration.served import inputs
from tests.upstream import glpn, huggingface, microsoft_plain, ours, pvt, pvt_v2, pvt_v2_linear, segformer

BLOCKS = [huggingface, microsoft_plain, segformer, pvt, pvt_v2, pvt_v2_linear, glpn]
SERVED = [huggingface, microsoft_plain, ours, segformer, pvt, pvt_v2, glpn]
every_kind = pytest.mark.parametrize(
    ("make", "freeze"),
    [*((make, False) for make in BLOCKS), *((make, True) for make in SERVED)],
    ids=lambda value: {False: "blocks", True: "served"}.get(value, getattr(value, "__name__", None)),
)


class Part(NamedTuple):
    """A block, a stage or a head, the same of the accelerated model, and the arguments of a call."""

    own: nn.Module
    fused: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def at(self, path: str) -> tuple[nn.Module, nn.Module]:
        """Returns the modules of a path within it."""
        return self.own.get_submodule(path), self.fused.get_submodule(path)

    def paths(self) -> list[str]:
        """Returns the paths of its modules, without its own."""
        return [path for path, _ in self.own.named_modules() if path]


_made: dict[Any, list[Part]] = {}


def parts_of(make, freeze):
    """Returns the first part of each class, which tests leave as it was."""
    if (make, freeze) not in _made:
        own = make().eval()
        model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
        found = freezable.find_stages(own) if freeze else matching.find_blocks(own)
        first = {type(module): path for path, module, _ in reversed(found)}
        calls: dict[str, Any] = {}
        for path in first.values():
            note = lambda module, args, kwargs, path=path: calls.setdefault(path, (args, kwargs))  # noqa: E731
            own.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            own(inputs(make))
        for path in first.values():
            own.get_submodule(path)._forward_pre_hooks.clear()
            own.get_submodule(path)._forward_pre_hooks_with_kwargs.clear()
        _made[make, freeze] = [
            Part(own.get_submodule(path), model.get_submodule(path), *call) for path, call in calls.items()
        ]
    return _made[make, freeze]


def infer(module, part):
    """Returns the tensors of a call without gradients."""
    with torch.no_grad():
        return [t for t in pytree.tree_leaves(module(*part.args, **part.kwargs)) if isinstance(t, Tensor)]


def train(module, part):
    """Returns the tensors of a call in training, its gradients, and the buffers after it."""
    torch.manual_seed(0)
    wanted = lambda t: t.clone().requires_grad_()  # noqa: E731
    args, kwargs = pytree.tree_map_only(Tensor, wanted, (part.args, part.kwargs))
    module.zero_grad()
    outputs = [t for t in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor)]
    sum(out.sin().sum() for out in outputs).backward()
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    gradients = [t.grad for t in (*given, *module.parameters())]
    buffers = [buffer.clone() for buffer in module.buffers()]
    return [*(out.detach() for out in outputs), *gradients, *buffers]


def train_anew(module, part):
    """Returns what :func:`train` does, in training mode, and leaves the buffers as they were."""
    before = [buffer.clone() for buffer in module.buffers()]
    modes = [each.training for each in module.modules()]
    for each in module.modules():
        each.training = not each.training
    try:
        return train(module, part)
    finally:
        for each, mode in zip(module.modules(), modes, strict=True):
            each.training = mode
        for buffer, kept in zip(module.buffers(), before, strict=True):
            buffer.copy_(kept)


def differs(ours, theirs):
    """Returns whether results differ by more than roundings."""
    if len(ours) != len(theirs):
        return True
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            if a is not b:
                return True
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            return True
        else:
            most = 1e-4 * b.abs().max().clamp(min=1)
            if (a - b).abs().max() > most:
                return True
    return False


class Changes:
    """Tries changes of a part, and collects those that its accelerated copy misses.

    Args:
        part: The part.
        run: Calls one of its two modules.
    """

    def __init__(self, part: Part, run: Callable[[nn.Module, Part], list[Tensor | None]]):
        self.part, self.run = part, run
        self.missed: list[str] = []
        self.tried = self.effective = 0
        self.before = run(part.own, part)
        assert not differs(run(part.fused, part), self.before)

    def check(self) -> None:
        """Fails if the copy misses a change, or if none shows at all."""
        assert self.missed == []
        assert self.effective

    def attempt(self, name: str, path: str, change: Callable[[nn.Module], Any]) -> None:
        """Compares calls of both modules while something is changed at a path within both."""
        own, fused = self.part.at(path)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(change(own))
                expected = self.run(self.part.own, self.part)
            except Exception:
                return
            stack.enter_context(change(fused))
            self.tried += 1
            self.effective += differs(expected, self.before)
            if differs(self.run(self.part.fused, self.part), expected):
                self.missed.append(f"{type(self.part.own).__name__} {path}: {name}")


# Changes --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attribute(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def others(value):
    """Yields values that an attribute may have in the place of another one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value + 0.5
    elif isinstance(value, tuple) and value and all(type(each) is int for each in value):
        yield (value[0] + 1, *value[1:])
        yield tuple(each + 1 for each in value)
    elif isinstance(value, str) and value in _WORDS:
        yield _WORDS[value]
    elif callable(value) and not isinstance(value, nn.Module | type):
        yield lambda *args, **kwargs: 1.5 * value(*args, **kwargs)


_WORDS = {"zeros": "circular", "none": "tanh", "tanh": "none", "sdpa": "eager", "cls": "avg"}
#: What says of a layer how large its weight is. PyTorch's forwards look at the weight.
_SIZES = {"in_channels", "out_channels", "kernel_size", "in_features", "out_features", "num_features"}
_SIZES |= {"num_attention_heads"}  # SegFormer reads the channels of a head


@contextlib.contextmanager
def written(module, name):
    tensor = getattr(module, name)
    before = tensor.detach().clone()
    with torch.no_grad():
        tensor.mul_(2).add_(1)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


@contextlib.contextmanager
def in_other_memory(module, name):
    tensor = getattr(module, name)
    before, tensor.data = tensor.data, 2 * tensor.data + 1
    try:
        yield
    finally:
        tensor.data = before


@contextlib.contextmanager
def with_eager_attention(module):
    before = module.config._attn_implementation
    module.config._attn_implementation = "eager"
    try:
        yield
    finally:
        module.config._attn_implementation = before


def replaced(module, name):
    other = 2 * getattr(module, name).detach() + 1
    return attribute(module, name, nn.Parameter(other) if name in module._parameters else other)


def absent(module, name):
    return attribute(module, name, None)


class Shifting(nn.Module):
    def forward(self, x):
        return 2 * x + 1


@contextlib.contextmanager
def parametrized(module, name):
    parametrize.register_parametrization(module, name, Shifting(), unsafe=True)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


@contextlib.contextmanager
def shadowed(module, name):
    vars(module)[name] = 2 * getattr(module, name).detach() + 1
    try:
        yield
    finally:
        del vars(module)[name]


#: The last two make a module another one, which what is served as one notices as it does other modules.
OF_TENSORS = [written, in_other_memory, replaced, shadowed, absent, parametrized]


class Scaling(nn.Module):
    """A module around another one."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return pytree.tree_map_only(Tensor, lambda t: 1.5 * t, self.module(*args, **kwargs))


def wrapped(parent, name):
    return attribute(parent, name, Scaling(getattr(parent, name)))


@contextlib.contextmanager
def of_another_class(parent, name):
    module = getattr(parent, name)
    kind = type(module)

    def forward(self, *args, **kwargs):
        return pytree.tree_map_only(Tensor, lambda t: 1.5 * t, kind.forward(self, *args, **kwargs))

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
    try:
        yield
    finally:
        module.__class__ = kind


@contextlib.contextmanager
def with_own_forward(parent, name):
    module = getattr(parent, name)
    forward = module.forward
    module.forward = lambda *args, **kwargs: pytree.tree_map_only(
        Tensor, lambda t: 1.5 * t, forward(*args, **kwargs)
    )
    try:
        yield
    finally:
        del module.forward


OF_MODULES = [wrapped, of_another_class, with_own_forward]


# Hooks ----------------------------------------------------------------------------------------------------

#: The methods of a module that register a hook, and the functions that register one for all modules.
KINDS = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith("_hook")]
GLOBAL_KINDS = [name for name in dir(torch_module) if name.startswith("register_module_") and "_hook" in name]


@contextlib.contextmanager
def hooked(register, calls):
    """Counts the calls of a hook, of a module or of all."""
    handle = register(lambda *_: calls.append(1))
    try:
        yield
    finally:
        handle.remove()
        getattr(register, "__self__", torch_module)._is_full_backward_hook = None
        torch_module._global_is_full_backward_hook = None


def used(module, part):
    """Calls a module in training, and takes and loads its state; returns what the call gave."""
    results = train(module, part)
    module.load_state_dict(module.state_dict())
    return results


def fired(part, path, kind, run):
    """Returns how often a hook on a module within a part fires in it and in its accelerated copy."""
    counts = []
    for module in (part.own, part.fused):
        calls: list[int] = []
        with hooked(getattr(module.get_submodule(path), kind), calls):
            run(module, part)
        counts.append(len(calls))
    return counts


def first_of_each_class(part):
    """Returns class → path of the first module of a class within a part."""
    return {type(part.own.get_submodule(path)): path for path in reversed(part.paths())}


#: What PyTorch says of hooks on the backward of some modules.
ignoring_advice = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing:UserWarning", "ignore:Using (a )?non-full backward:FutureWarning"
)


@ignoring_advice
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_every_kind(kind):
    """On a module of each class in turn, whose work a fused forward may do."""
    for make in (huggingface, segformer):
        for part in parts_of(make, False):
            for path in first_of_each_class(part).values():
                own, fused = fired(part, path, kind, used)
                assert fused == own, f"{type(part.own).__name__} {path}"


@every_kind
def test_a_hook_on_every_module(make, freeze):
    for part in parts_of(make, freeze):
        for path in part.paths():
            own, fused = fired(part, path, "register_forward_hook", infer)
            assert fused == own, f"{type(part.own).__name__} {path}"


@ignoring_advice
@pytest.mark.parametrize("kind", GLOBAL_KINDS)
def test_hooks_of_every_kind_on_all_modules(kind):
    for make in (huggingface, segformer):
        for part in parts_of(make, False):
            own, fused = [], []
            for module, calls in ((part.own, own), (part.fused, fused)):
                with hooked(getattr(torch_module, kind), calls):
                    used(module, part)
            assert len(fused) == len(own)


# Attributes, tensors and modules --------------------------------------------------------------------------


@every_kind
def test_every_attribute(make, freeze):
    for part in parts_of(make, freeze):
        changes = Changes(part, infer)
        for path in part.paths():
            own, fused = part.at(path)
            for name, value in list(vars(own).items()):
                is_free = (
                    name[0] == "_"
                    or name in _SIZES
                    or (name == "training" and served_module.is_frozen(fused))
                )
                for other in others(value) if not is_free else ():
                    change = functools.partial(attribute, name=name, value=other)
                    changes.attempt(f"{name} = {other}", path, change)
            if hasattr(own, "config"):
                changes.attempt("config", path, with_eager_attention)
        changes.check()


@every_kind
def test_every_tensor(make, freeze):
    for part in parts_of(make, freeze):
        changes = Changes(part, infer)
        for path in part.paths():
            module = part.own.get_submodule(path)
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                for change in OF_TENSORS[: 4 if freeze else 6] if tensor is not None else ():
                    changes.attempt(f"{name} {change.__name__}", path, functools.partial(change, name=name))
        changes.check()


@every_kind
def test_every_module(make, freeze):
    for part in parts_of(make, freeze):
        changes = Changes(part, infer)
        for path in part.paths():
            parent, _, name = path.rpartition(".")
            for change in OF_MODULES:
                changes.attempt(f"{name} {change.__name__}", parent, functools.partial(change, name=name))
        changes.check()


@pytest.mark.parametrize("make", [huggingface, microsoft_plain])
def test_every_attribute_and_buffer_of_a_batch_norm_in_training(make):
    part = parts_of(make, False)[-1]
    changes = Changes(part, train_anew)
    for path in [path for path in part.paths() if isinstance(part.own.get_submodule(path), nn.BatchNorm2d)]:
        module = part.own.get_submodule(path)
        for name in ("momentum", "eps", "track_running_stats", "training"):
            for other in (*others(getattr(module, name)), *([None] if name == "momentum" else [])):
                change = functools.partial(attribute, name=name, value=other)
                changes.attempt(f"{name} = {other}", path, change)
        for name in module._buffers:
            for change in (written, in_other_memory, replaced):
                changes.attempt(f"{name} {change.__name__}", path, functools.partial(change, name=name))
    changes.check()
    assert changes.tried > 20
