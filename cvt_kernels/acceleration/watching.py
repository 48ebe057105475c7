"""Watches modules that are replaced instead of called: hooks, patches, and all that results depend on."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..ops.linear_int8.modules import LinearInt8
from ..ops.weight_cache import Snapshot, is_plain
from ..structure import Structure, looks

# One module -----------------------------------------------------------------------------------------------


def is_watched(module: nn.Module) -> bool:
    """Returns whether :func:`why_must_be_called` has a reason; faster than finding it."""
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


def why_tensors_not_plain(module: nn.Module) -> str | None:
    """Returns which own parameter or buffer of a module only its own forward can compute with, or None."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if not is_plain(tensor):
            return f"has a {type(tensor).__name__} as {name}, expected a plain tensor"
    return None


def why_must_be_called(module: nn.Module) -> str | None:
    """Returns why a module must be called, such as hooks or patches, or None."""
    if module._forward_hooks or module._forward_pre_hooks:
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


def is_only_recorded(module: nn.Module) -> bool:
    """Returns whether a module's only hooks are output recorders that get nothing from it."""
    others = module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if any(others) or has_another_forward(module) or _is_patched(type(module)):
        return False
    return not torch_module._has_any_global_hook() and not _is_noticed(module._forward_hooks)


def _is_noticed(hooks: Mapping[int, Any]) -> bool:
    """Returns whether there is a hook other than those by which transformers records attention maps.

    These stay in a model once outputs have been recorded, and find no maps where a block runs fused.
    """
    return not all(map(_records_attentions, hooks.values()))


def _records_attentions(hook: Any) -> bool:
    if getattr(hook, "__module__", None) != "transformers.utils.output_capturing":
        return False
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" in held and held["key"].cell_contents == "attentions"


_records_attentions._dynamo_marked_constant = True  # type: ignore[attr-defined]


def patch_of(cls: type) -> str | None:
    """Returns the name of the function that patches the forward of a class, or None."""
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


# Many modules ---------------------------------------------------------------------------------------------

#: The settings that the results of a block depend on; for convolutions see below.
_SETTINGS = (
    *("eps", "num_heads", "num_attention_heads", "attention_head_size", "head_dim", "scale", "scaling"),
    *("is_causal",),
    *("approximate", "act", "momentum", "process_group", "track_running_stats"),
    *("token_keep", "token_keep_bounds", "pool", "stride_kv", "linear_attention"),
    *("reshape", "image_size", "num_channels", "scale_factor", "mode", "align_corners"),
    *("sequence_reduction_ratio", "sequences_reduction_ratio", "spatial_reduction_ratio", "sr_ratio"),
)
_CONVOLUTION = ("stride", "padding", "dilation", "groups", "padding_mode")
#: The name of a configuration's setting, and its default, for ``map``.
_IMPLEMENTATION: Any = itertools.repeat("_attn_implementation"), itertools.repeat(None)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Watch(Structure):
    """The state of a module when it was examined: its members, and all else that its results depend on.

    Changes of the values of the tensors ``folded`` are detected too, because copies of them are used.
    """

    def __init__(self, owner: nn.Module, modules: Sequence[nn.Module], folded: Sequence[Tensor] = ()):
        super().__init__(owner, modules)
        self._hooks = [space[kind] for space in self.spaces for kind in _HOOKS]
        self._folded = folded
        self._snapshot = Snapshot(folded)
        spaces = [vars(owner), *self.spaces]
        settings = [(space, name) for space in spaces for name in _SETTINGS if name in space]
        settings += [(vars(m), name) for m in modules if isinstance(m, nn.Conv2d) for name in _CONVOLUTION]
        self._settings_of, self._settings = [space for space, _ in settings], [name for _, name in settings]
        self._configs = [space["config"] for space in spaces if "config" in space]
        self._values = [space.get(name) for space, name in settings]
        self._is_shadowed = any(map(_hides_members, (owner, *modules)))
        self._hooked = self._hook_numbers()
        self._before = self._attributes()

    def _attributes(self) -> tuple[Any, ...]:
        return (
            looks().sizes(self.spaces),  # an attribute may shadow a parameter
            looks().having(self.spaces, "forward"),
            [*map(getattr, self._configs, *_IMPLEMENTATION)],
        )

    def _hook_numbers(self) -> list[list[int]]:
        """Returns the numbers of all hooks; PyTorch gives no number twice."""
        return [list(hooks) for hooks in self._hooks if hooks and _is_noticed(hooks)]

    def is_changed(self) -> bool:
        """Returns whether the module must be examined again."""
        return self.are_settings_changed() or super().is_changed() or not self._snapshot.holds(self._folded)

    def is_plain(self) -> bool:
        """Returns whether no hook gets something from a module, and no attribute is in a member's place."""
        return not (self._hooked or self._is_shadowed)

    def are_settings_changed(self) -> bool:
        """Returns whether hooks or attributes have changed, other than modules and tensors."""
        if (self._hooked or looks().any_full(self._hooks)) and self._hook_numbers() != self._hooked:
            return True
        if not looks().same_items(self._settings_of, self._settings, self._values):
            return True
        return self._attributes() != self._before


def _hides_members(module: nn.Module) -> bool:
    """Returns whether attributes of a module are in the place of its parameters, buffers or modules."""
    members = *module._parameters, *module._buffers, *module._modules
    return not vars(module).keys().isdisjoint(members)


class Examined:
    """The result of examining a module, valid until ``watch`` detects a change.

    It is an attribute of the module: a dictionary with weak keys would keep a module alive if its parts or
    hooks refer to it. A copy or a pickle of the module has None instead.
    """

    attribute: ClassVar[str]

    def __init__(self, module: nn.Module, watch: Watch):
        self.owner, self.watch = weakref.ref(module), watch

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_Examined = TypeVar("_Examined", bound=Examined)


def known_of(module: nn.Module, kind: type[_Examined]) -> _Examined | None:
    """Returns the result of examining a module, or None if there is none or the module has changed."""
    known: _Examined | None = vars(module).get(kind.attribute)
    if known is None or known.owner() is not module or known.watch.is_changed():
        return None
    return known


def forget(module: nn.Module) -> None:
    """Removes all results of examining a module."""
    for kind in Examined.__subclasses__():
        vars(module).pop(kind.attribute, None)
