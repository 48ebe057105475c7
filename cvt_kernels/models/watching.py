"""Modules that are not called: who watches them, what they know of a call, what is known till they change."""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..changes import KNOWN, State, is_plain, records_attentions
from ..ops.linear_int8.modules import LinearInt8

# One module -----------------------------------------------------------------------------------------------


def is_watched(module: nn.Module) -> bool:
    """Returns whether a module must be called, or has any hook; faster than :func:`why_must_be_called`."""
    if module._forward_hooks or module._forward_pre_hooks:
        return True
    if "forward" in module.__dict__ and has_another_forward(module):
        return True
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    cls: Any = type(module)  # what follows is _is_patched, which would be one call more for every layer
    return torch_module._has_any_global_hook() or (cls in _FORWARDS and cls.forward is not _FORWARDS[cls])


#: The attribute of forwards of ours that the ``kernels`` package sets on modules.
LENT = "_cvt_kernels_lent"


def has_another_forward(module: nn.Module) -> bool:
    """Returns whether somebody set another forward on a module than its class has.

    Where the ``kernels`` package has none for a layer, it sets the forward of the layer's class.
    """
    own = module.__dict__.get("forward")
    if own is None or hasattr(own, LENT):
        return False
    return getattr(own, "__func__", None) is not type(module).forward or own.__self__ is not module


def is_plain_linear(module: Any) -> bool:
    """Returns whether a module is an unwatched ``nn.Linear``, of no other class, with a plain tensor."""
    return type(module) is nn.Linear and is_plain(module.weight) and not is_watched(module)


def why_tensors_not_plain(module: nn.Module, *, may_be_sharded: bool = False) -> str | None:
    """Returns which own parameter or buffer of a module only its own forward can compute with, or None.

    Sharded ones may be plain in a call, since FSDP gathers them before it.
    """
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if not (is_plain(tensor) or (may_be_sharded and type(tensor).__name__ == "DTensor")):
            return f"has a {type(tensor).__name__} as {name}, expected a plain tensor"
    return None


def why_must_be_called(module: nn.Module) -> str | None:
    """Returns why a module must be called, such as hooks or patches, or None.

    Hooks by which transformers records attention maps are none: they stay in a model once outputs have been
    recorded, and find no maps where a block runs fused.
    """
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    if not all(map(records_attentions, hooks)):
        return "has forward hooks"
    if module._backward_hooks or module._backward_pre_hooks:
        return "has backward hooks"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    if has_another_forward(module):
        return "has a forward of its own"
    if _is_patched(type(module)):
        return f"has a forward that is patched by {patch_of(type(module))}"
    return None


def patch_of(cls: type) -> str | None:
    """Returns the name of the function that patches the forward of a class, or None."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    # functools.wraps gives a patch the names of what it wraps, but not its globals.
    own = inspect.unwrap(forward)
    homes = [getattr(each, "__globals__", {}).get("__name__") for each in (forward, own)]
    is_own = homes[1] == owner.__module__ and own.__qualname__ == f"{owner.__qualname__}.forward"
    if is_own and homes[0] in (owner.__module__, *_WRAPPING):
        return None
    return f"{homes[0]}.{forward.__qualname__}"


#: The modules of transformers that wrap forwards: of layers, from 5.23 on, to checkpoint their gradients; of
#: models, to choose the form of their results.
_WRAPPING = (
    "transformers.modeling_layers",
    "transformers.utils.generic",
    "transformers.utils.output_capturing",
)


#: The classes whose work may be done without calling their modules.
BYPASSED = (
    *(nn.BatchNorm2d, nn.Conv2d, nn.Dropout, nn.GELU, nn.LayerNorm, nn.Linear, nn.SyncBatchNorm),
    LinearInt8,
)
#: PyTorch's own forwards of them; None for one that was patched before.
_FORWARDS = {cls: cls.forward if patch_of(cls) is None else None for cls in BYPASSED}


def _is_patched(cls: Any) -> bool:
    """Returns whether the forward of a bypassed class is patched; faster than :func:`patch_of`."""
    return cls in _FORWARDS and cls.forward is not _FORWARDS[cls]


# What modules know of a call ------------------------------------------------------------------------------


class Told(threading.local):
    """Modules of the model that runs in this thread that have been told something of its call."""

    modules: tuple[Any, ...] = ()

    def __contains__(self, module: Any) -> bool:
        return any(each is module for each in self.modules)

    @contextlib.contextmanager
    def within(self, *modules: Any) -> Iterator[None]:
        """Tells modules, and no others, within a block."""
        before, self.modules = self.modules, modules
        try:
            yield
        finally:
            self.modules = before


# A module that was examined -------------------------------------------------------------------------------


class Examined(State):
    """The result of examining a module, valid until something changes that it depends on.

    It is kept in an attribute of the module: a dictionary with weak keys would keep a module alive if its
    parts or hooks refer to it. A copy or a pickle of the module has None instead.

    Args:
        owner: The module.
        modules: The modules within it that matter.
        tensors: The tensors whose values matter.
        training: Whether modules within it in training mode matter.
    """

    def __init__(
        self,
        owner: nn.Module,
        modules: Sequence[nn.Module],
        tensors: Sequence[Tensor] = (),
        *,
        training: bool = False,
    ):
        super().__init__(tensors, owner, modules, training=training)
        self._owner, self._tensors, self._count = weakref.ref(owner), tensors, _count_of_attributes(owner)

    def is_current(self, module: nn.Module) -> bool:
        """Returns whether it is the result of examining this module as it is now."""
        if self._owner() is not module or _count_of_attributes(module) != self._count:
            return False
        return self.holds(self._tensors)

    def keep(self) -> None:
        """Keeps it until the module is examined again."""
        owner = self._owner()
        if owner is not None:  # in a new dict: a shallow copy of the module has the same one
            vars(owner)[KNOWN] = {**vars(owner).get(KNOWN, {}), type(self): self}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _count_of_attributes(module: nn.Module) -> int:
    """Returns how many attributes a module has itself; another one may be in the place of a member."""
    return len(vars(module)) - (KNOWN in vars(module))


_Examined = TypeVar("_Examined", bound=Examined)


def known_of(module: nn.Module, kind: type[_Examined]) -> _Examined | None:
    """Returns the result of examining a module, or None if there is none or something has changed."""
    known: _Examined | None = vars(module).get(KNOWN, {}).get(kind)
    return known if known is not None and known.is_current(module) else None


def forget(module: nn.Module) -> None:
    """Removes all results of examining a module."""
    vars(module).pop(KNOWN, None)
