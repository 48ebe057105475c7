"""Notices changes of what something was made from: tensors, and all that a module's results depend on.

:class:`State` asks one question (``state``), in C++ by the compiled extension (``csrc/snapshots``) or without
it in Python. Most changes of tensors show in the version counter, or in another address, shape, layout or
dtype. Writes that do not bump the counter, as those through ``.data``, show in a sample of the numbers of
each tensor on a CPU (``csrc/snapshots/objects.h``). Reported to :func:`note_written` are optimizer steps,
which may change few numbers and, if fused, bump no counter, and what the user reports by :func:`refresh`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from . import checks, machine

# The question -------------------------------------------------------------------------------------------

#: The attribute of a module with what this package knows of it.
KNOWN = "_cvt_kernels_known"


def state_in_python(
    members: list[dict[str, Any]],
    modules: list[Any],
    spaces: list[dict[str, Any]],
    own: str,
    hooks: list[dict[int, Any]],
    ignored: set[int],
    items: tuple[list[Any], list[str], list[Any]],
    attributes: tuple[list[Any], list[str], list[Any]],
    tensors: list[Tensor | None],
) -> tuple[Any, Any, Any, Any]:
    """Returns the state of modules and tensors, to be compared by ``==`` with another one of this function.

    Args:
        members: Dicts whose values matter by their identity.
        modules: Objects whose classes matter.
        spaces: Dicts of attributes, whose number matters, and whether a forward is among them.
        own: The name of the attribute that does not count.
        hooks: Dicts of hooks, whose numbers matter.
        ignored: The numbers of hooks that do not.
        items: Dicts, names, and the values that the items of these names should be or equal.
        attributes: Objects, names and values of attributes likewise.
        tensors: Tensors, or None.

    Returns:
        What there is of modules; address, dtype, sizes and strides of the tensors; their versions (-1 for an
        inference tensor, which has none); and a part of the bytes of those on a CPU.
    """
    found = (
        [*map(len, members)],
        [*map(id, itertools.chain.from_iterable(map(dict.values, members)))],
        [*map(type, modules)],
        [(len(space) - (own in space), "forward" in space) for space in spaces],
        [[number for number in each if number not in ignored] for each in hooks],
        [*map(dict.get, items[0], items[1])] == items[2],
        [*map(getattr, attributes[0], attributes[1], itertools.repeat(None))] == attributes[2],
    )
    present = [t for t in tensors if t is not None]
    layouts = [None if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
    versions = [-1 if t.is_inference() else t._version for t in present]
    on_cpu = (t for t in present if t.device.type == "cpu")
    return found, layouts, versions, [_sample_of(t, place) for place, t in enumerate(on_cpu)]


#: The bytes of a line, and the lines that are read of a tensor, as in ``csrc/snapshots/objects.h``.
_LINE, _LINES = 64, 8
_GOLDEN = (math.sqrt(5) - 1) / 2


def _sample_of(tensor: Tensor, place: int) -> list[bytes]:
    """Returns a part of the bytes between a tensor's first number and its last, which may have gaps.

    It is the first line, the last one, and one in each of equal parts between them; ``place`` differs from
    tensor to tensor.
    """
    if not tensor.numel() or not tensor.data_ptr():
        return []
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    size = tensor.element_size() * (1 + sum((n - 1) * step for n, step in steps))
    if size <= _LINES * _LINE:
        return [ctypes.string_at(tensor.data_ptr(), size)]
    parts, last = _LINES - 2, size - _LINE
    fractions = (math.modf((place + 1) * (part + 1) * _GOLDEN)[0] for part in range(parts))
    offsets = (int((part + at) * last / parts) for part, at in enumerate(fractions))
    return [ctypes.string_at(tensor.data_ptr() + offset, _LINE) for offset in (0, *offsets, last)]


@functools.cache
def question() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Returns :func:`state_in_python`, or the extension's if it is there and knows this torch."""
    try:
        if not machine.has_extension():
            return state_in_python
        extension = machine.load_extension()
    except machine.ExtensionError:  # which every other use of the extension reports
        return state_in_python
    with _disable_current_modes(), _no_trace():  # or the first question within one would be of a fake tensor
        tensor = torch.empty(0, device="cpu")
        is_known = torch.ops.cvt_kernels.holds_pointer(tensor._cdata, tensor)
    return extension.state if is_known else state_in_python


@contextlib.contextmanager
def _no_trace() -> Iterator[None]:
    """Lets ``torch.jit.trace`` record nothing within a block.

    Without a trace its state stays as it is: PyTorch lets no custom operator of a compiled graph set it.
    """
    functions: Any = torch._C
    tracing = functions._get_tracing_state()
    if tracing is None:
        yield
        return
    functions._set_tracing_state(None)
    try:
        yield
    finally:
        functions._set_tracing_state(tracing)


# What is asked of a module --------------------------------------------------------------------------------

#: The settings that the results of a block depend on; for convolutions see below.
_SETTINGS = (
    *("eps", "num_heads", "num_attention_heads", "attention_head_size", "head_dim", "scale", "scaling"),
    *("is_causal", "fused_attn"),
    *("approximate", "act", "momentum", "process_group", "track_running_stats"),
    *("token_keep", "token_keep_bounds", "pool", "stride_kv", "linear_attention"),
    *("reshape", "image_size", "num_channels", "scale_factor", "mode", "align_corners"),
    *("sequence_reduction_ratio", "sequences_reduction_ratio", "spatial_reduction_ratio", "sr_ratio"),
)
_CONVOLUTION = ("stride", "padding", "dilation", "groups", "padding_mode")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_NOTHING: tuple[Any, ...] = ([], [], [], KNOWN, [], set(), ([], [], []), ([], [], []))


# Hooks of transformers ------------------------------------------------------------------------------------


def is_recorder(hook: Any) -> bool:
    """Returns whether a hook is one by which transformers records outputs; it stays once one was recorded."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def records_attentions(hook: Any) -> bool:
    """Returns whether a hook records attention maps, of which it finds none where a block runs fused."""
    if not is_recorder(hook):
        return False
    held = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" in held and held["key"].cell_contents == "attentions"


records_attentions._dynamo_marked_constant = True  # type: ignore[attr-defined]

#: Which hooks do not matter → the numbers of those that were seen.
_seen: dict[Callable[[Any], bool], set[int]] = {is_recorder: set(), records_attentions: set()}


def _asked_of(
    owner: nn.Module,
    modules: Sequence[nn.Module],
    ignores: Callable[[Any], bool],
    *,
    training: bool,
    attributes: bool,
) -> tuple[Any, ...]:
    """Returns the arguments of the question for a module and those within it.

    They refer to the inner modules, but neither to the owner nor to its dict, which they must not keep alive.
    """
    every = (owner, *modules)
    spaces = [vars(module) for module in modules]
    members = [each for m in every for each in (m._modules, m._parameters, m._buffers)]
    items = [(space, name) for space in spaces for name in _SETTINGS if name in space]
    items += [(vars(m), name) for m in modules if isinstance(m, nn.Conv2d) for name in _CONVOLUTION]
    items += [(space, "training") for space in spaces if training]
    classes = {cls for module in every for cls in type(module).__mro__ if hasattr(cls, "forward")}
    found: list[tuple[Any, str]] = [(cls, "forward") for cls in classes]
    # By a proxy, since its dict refers to what is known of it.
    found += [(weakref.proxy(owner), name) for name in _SETTINGS if name in vars(owner)]
    configs = {id(config): config for each in every if (config := vars(each).get("config")) is not None}
    found += [(config, "_attn_implementation") for config in configs.values()]
    return (
        members,
        list(modules),
        spaces if attributes else [],
        KNOWN,
        [space[kind] for space in spaces for kind in HOOKS],
        _seen[ignores],
        _with_values(items, dict.get),
        _with_values(found, lambda each, name: getattr(each, name, None)),
    )


def _with_values(
    places: Sequence[tuple[Any, str]], look_up: Callable[[Any, str], Any]
) -> tuple[list[Any], list[str], list[Any]]:
    objects, names = [each for each, _ in places], [name for _, name in places]
    return objects, names, [look_up(each, name) for each, name in places]


class State:
    """The state of what something was made from, to notice later changes.

    It keeps the members of its owner, and otherwise neither tensors nor their memory alive: it refers only to
    storages, since a weak reference to a tensor would make ``torch.utils.swap_tensors`` fail.

    Args:
        tensors: The tensors.
        owner: The module whose results matter, if there is one.
        modules: The modules within it that matter, and their settings.
        training: Whether modules within it in training mode matter.
        attributes: Whether attributes that are set on modules within it matter.
        ignores: Which hooks do not matter.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None] = (),
        owner: nn.Module | None = None,
        modules: Sequence[nn.Module] = (),
        *,
        training: bool = False,
        attributes: bool = True,
        ignores: Callable[[Any], bool] = records_attentions,
    ):
        self.is_outdated, self._ignores = False, ignores
        self.asked = _NOTHING
        if owner is not None:
            self.asked = _asked_of(owner, modules, ignores, training=training, attributes=attributes)
        self._has_new_ignored_hooks()
        # Another object in the place of a member must not get its identity.
        self._members = [each for members in self.asked[0] for each in members.values()]
        self.found = self.ask(tensors)
        for storage in {id(s): s for s in (t.untyped_storage() for t in tensors if t is not None)}.values():
            _dependents_of(storage).add(self)

    def ask(self, tensors: Sequence[Tensor | None]) -> tuple[Any, Any, Any, Any]:
        """Returns the state now: of modules, and layouts, versions and a sample of the tensors.

        Tensors without memory, such as fake ones, are none here: what is made of them is not kept.
        """
        if not all(map(_has_memory, {*map(_kind, tensors)})):
            tensors = [t if _has_memory(_kind(t)) else None for t in tensors]
        return question()(*self.asked, tensors if type(tensors) is list else [*tensors])

    def _has_new_ignored_hooks(self) -> bool:
        """Returns whether there are hooks that do not matter and had not been seen before."""
        ignored = _seen[self._ignores]
        hooks = itertools.chain.from_iterable(each.items() for each in self.asked[4] if each)
        new = {number for number, hook in hooks if number not in ignored and self._ignores(hook)}
        ignored |= new
        return bool(new)

    def now(self, tensors: Sequence[Tensor | None]) -> tuple[Any, Any, Any, Any]:
        """Returns the state now, to be compared with the one that was found."""
        found = self.ask(tensors)
        return self.ask(tensors) if found[0] != self.found[0] and self._has_new_ignored_hooks() else found

    def holds(self, tensors: Sequence[Tensor | None] = ()) -> bool:
        """Returns whether these are the same tensors, unchanged, and the modules compute as they did.

        Where only the sample has changed, everything made from any of them is outdated, since such a write
        reaches many tensors at a time, and the sample may miss it in some.
        """
        if self.is_outdated:
            return False
        found = self.now(tensors)
        if found == self.found:
            return True
        if found[:3] == self.found[:3]:
            note_written(t for t in tensors if t is not None)
        return False

    def outdate(self) -> None:
        """Marks the state as outdated: a tensor was written, or its memory is gone."""
        self.is_outdated = True

    def release(self) -> None:
        """Frees what can be rebuilt."""


_kind: Callable[[Any], Any] = type
_PLAIN = {Tensor, nn.Parameter, NoneType}


def is_plain(tensor: Tensor | None) -> bool:
    """Returns whether a tensor is none that computes in its own way, such as a quantized or a sharded one.

    Fake tensors, which stand for plain ones, count too.
    """
    return type(tensor) in _PLAIN or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")


def is_fake(made: Any) -> bool:
    """Returns whether something was made of fake tensors, in whose mode a real model may run."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(type(leaf).__name__ in ("FakeTensor", "FunctionalTensor") for leaf in pytree.tree_leaves(made))


@functools.cache
def _has_memory(kind: Any) -> bool:
    """Returns whether tensors of a class, or None, have the memory that they say, unlike fake tensors."""
    return kind is NoneType or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


# Writes that are reported ---------------------------------------------------------------------------------

#: The states that depend on a storage, by its identity: its Python object lives as long as the memory.
_dependents: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.WeakSet[State]]] = {}


def _dependents_of(storage: torch.UntypedStorage) -> weakref.WeakSet[State]:
    _notice_optimizers()
    known = _dependents.get(id(storage))
    if known is None:
        place = id(storage)
        reference = weakref.ref(storage, lambda dead: _outdate(_dependents.pop(place)[1]))
        known = _dependents[place] = reference, weakref.WeakSet()
    return known[1]


def states() -> Iterator[State]:
    """Yields every state that depends on a tensor; one that depends on several comes for each."""
    for _, dependents in list(_dependents.values()):
        yield from list(dependents)


def note_written(tensors: Iterable[Tensor]) -> None:
    """Outdates everything made from the memory of some tensors."""
    for tensor in tensors:
        known = _dependents.get(id(tensor.untyped_storage()))
        if known is not None:
            _outdate(known[1])


def _outdate(dependents: Iterable[State]) -> None:
    for state in list(dependents):
        state.outdate()


@functools.cache
def _notice_optimizers() -> None:
    """Registers a hook on optimizer steps, once, at the first state."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizer hook: outdates everything made from the optimizer's parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(_is_sharded, parameters)):
        _outdate(states())
    else:
        note_written(parameters)


# Like torch.compiler.disable, without importing Dynamo: a compiled step ends with it.
_after_step._torchdynamo_disable = True  # type: ignore[attr-defined]


def _is_sharded(parameter: Tensor) -> bool:
    """Returns whether modules compute with a gathered copy of a parameter; FSDP writes it without a count."""
    return type(parameter) not in (Tensor, nn.Parameter) or hasattr(parameter, "_fsdp_flattened")


def refresh(model: nn.Module) -> None:
    """Makes kernels reread the weights of a model in its next call.

    Kernels keep packed and folded copies of weights. Changes through PyTorch are noticed: assignments,
    ``load_state_dict``, operations in place, steps of any optimizer. Other writes, such as those through
    ``tensor.data`` or NumPy, show in a sample of the numbers on a CPU. Call this after one that changed few
    numbers, and on a GPU after any of a model that is frozen.

    Args:
        model: Any module, accelerated or not. Copies of other tensors that share its memory are rebuilt too.

    Raises:
        TypeError: ``model`` is not a module.
    """
    checks.check_kind("model", model, nn.Module)
    note_written(t for t in itertools.chain(model.parameters(), model.buffers()) if not _is_sharded(t))
