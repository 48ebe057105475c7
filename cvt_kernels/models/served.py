"""Stages of a CvT, SegFormer or PVT v2, and layers of pyramids, as they run as one.

Every call asks whether anything has changed since the module was examined (:class:`Served`). After a change
it is examined and folded again (``stages``).

Under ``torch.compile`` on a CPU each is one operator of the graph, which works as without ``torch.compile``:
it detects changed weights. The graph identifies the stage by a number, an
attribute that Dynamo guards like any integer of a module.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import backends, modes
from ..changes import is_fake, is_plain
from ..declaration import key_of_serving
from ..messages import stacklevel_of_caller
from ..ops.graph_operators import graph_operator
from ..ops.weight_cache import is_noting, kept_on_gpu, note_read, stream_of
from ..records import TransformerBlock
from .blocks import BlockEntry, BlockParts, ServedEntry
from .class_token import is_stage_wanted
from .forward import output_grid
from .matching import why_not_freezable
from .stages import FoldedStage, bound, compute, fold, grid_of
from .watching import Examined, known_of

#: The attribute of the class of a stage or layer that runs as one in evaluation.
_SERVES = "_cvt_kernels_serves"
#: The most kinds of inputs whose steps are kept.
MOST = 32


class Served(Examined):
    """A stage or a layer as it is served, until its one question says that something has changed.

    Attributes:
        form: Its folded parameters; or why it cannot be served.
        stream: Where it was folded on a GPU.
        steps: Its operators bound to packed parameters, by what inputs they serve; None for inputs that no
            steps serve.
    """

    form: FoldedStage | TransformerBlock | str
    stream: torch.cuda.Stream | None = None

    def __init__(self, stage: nn.Module, modules: Sequence[nn.Module], tensors: Sequence[Tensor]):
        super().__init__(stage, modules, tensors, training=True)
        self._choices, self.steps = backends.dispatch_cache, dict[Any, Sequence[Callable[..., Any]] | None]()

    def run(self, x: Tensor, grid: tuple[int, int], class_token_only: bool) -> Tensor:
        """Computes the tokens, on a CPU by the steps for inputs like earlier ones."""
        assert not isinstance(self.form, str)
        choices = backends.dispatch_cache
        if self._choices is not choices:  # other backends may serve
            self._choices, self.steps = choices, {}
        # A CUDA graph must know the copies that it reads.
        state = None if x.is_cuda or is_noting() else key_of_serving(x)
        if state is None:
            return compute(self.form, x, grid, class_token_only)
        key, known = (state, grid, class_token_only), self.steps
        steps = known.get(key)
        if steps is not None:
            for step in steps:
                x = step(x)
            return x
        out = compute(self.form, x, grid, class_token_only)
        if key not in known:
            if len(known) >= MOST:
                known.clear()
            known[key] = bound(self.form, x, out, grid, class_token_only)
        return out

    def outdate(self) -> None:
        """Marks it as outdated, and frees packed parameters."""
        super().outdate()
        self.release()

    def release(self) -> None:
        """Frees packed parameters, so that the next call binds them again."""
        self.steps.clear()


def _served_or_why_not(stage: nn.Module, entry: ServedEntry) -> Served | str:
    """Returns a stage as it is served, folded again after a change; or why it cannot be."""
    known = known_of(stage, Served)
    if known is None:
        return _examined(stage, entry)
    return known.form if isinstance(known.form, str) else known


def _examined(stage: nn.Module, entry: ServedEntry) -> Served | str:
    """Folds a stage that can be served, and keeps it; or returns why it cannot be.

    The reason, which takes milliseconds to find, is kept too where a change of it would be noticed.
    """
    tensors = [*stage.parameters(), *stage.buffers()]
    if not all(map(is_plain, tensors)):
        return why_not_freezable(stage, entry) or "its parameters are not plain tensors"
    modules = list(itertools.islice(stage.modules(), 1, None))
    known = Served(stage, modules, tensors)  # first: what changes while it folds is noticed
    reason = why_not_freezable(stage, entry)
    if reason is None and any(module.training for module in modules):
        reason = "a module within it is in training mode"
    if reason is None:
        parts: Any = entry.parts(stage)
        is_layer = isinstance(parts, BlockParts)
        known.form = parts.as_operator() if is_layer else fold(parts, tensors[0].device.type)
        known.stream = stream_of(known.form)
    else:
        known.form = reason
    if not (is_fake(known.form) or torch_module._has_any_global_hook()):
        known.keep()
    return known.form if isinstance(known.form, str) else known


def why_not_served(stage: nn.Module, entry: ServedEntry) -> str | None:
    """Returns why a frozen stage or layer would not be served as one now, or None."""
    if stage.training:
        return "is in training mode"
    if torch_module._has_any_global_hook():
        return "is seen by a hook on all modules"
    found = _served_or_why_not(stage, entry)
    if isinstance(found, str):  # the present reason, even if no change was noticed
        found = _examined(stage, entry)
    return found if isinstance(found, str) else None


# The forward ----------------------------------------------------------------------------------------------


def run_served(
    stage: nn.Module,
    entry: ServedEntry,
    own: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a stage or layer as one in evaluation without gradients, or by its ``own`` forward."""
    frozen, result = is_frozen(stage), None
    if torch.compiler.is_compiling():
        if frozen:
            result = _try_to_trace(stage, entry, args, kwargs)
    elif not stage.training:
        call = entry.call_of(args, kwargs)
        if call is not None and (frozen or serves_on(call[0].device)):
            if not has_gradient(stage, call[0]):
                served = tokens_served(stage, entry, *call)
                result = None if served is None else entry.result(stage, *served)
            elif frozen:
                warnings.warn(
                    "cvt_kernels: a frozen model was called where gradients are recorded, so that its blocks "
                    "run one by one; call it within torch.inference_mode() or torch.no_grad()",
                    RuntimeWarning,
                    stacklevel=stacklevel_of_caller(),
                )
    return own(stage, *args, **kwargs) if result is None else result


def serves_on(device: torch.device) -> bool:
    """Returns whether modules that are not frozen are served as one on a device, if gradients are off.

    On a GPU no call can see in time that the weights were written where PyTorch does not count it.
    """
    return device.type == "cpu"


def is_serving(module: nn.Module) -> bool:
    """Returns whether a module is a stage or layer that runs as one in evaluation."""
    return hasattr(type(module), _SERVES)


def refuse_to_train(stage: nn.Module) -> None:
    """Raises RuntimeError for a stage in training mode."""
    if stage.training:
        raise RuntimeError(
            f"{type(stage).__name__} is frozen for serving and cannot train: call "
            "cvt_kernels.restore(model) first, or model.eval() to serve"
        )


def tokens_served(
    stage: nn.Module, entry: ServedEntry, x: Any, grid: Any = None
) -> tuple[Tensor, tuple[int, int]] | None:
    """Returns the tokens of a stage or layer and their grid; None where its own forward has to run."""
    if torch_module._has_any_global_hook() or modes.autocast_enabled(x) or modes.is_transformed():
        return None
    with kept_on_gpu() if x.is_cuda else contextlib.nullcontext():
        found = _served_or_why_not(stage, entry)
        if isinstance(found, str):
            return None
        assert not isinstance(found.form, str)
        grid = grid_of(found.form, x, grid)
        if grid is None:
            return None  # its own forward raises the error
        note_read(found.form, found.stream)
        return found.run(x, grid, is_stage_wanted(stage)), grid


def has_gradient(stage: nn.Module, x: Any) -> bool:
    """Returns whether autograd has to record a call of a stage or a layer."""
    if modes.forward_mode_enabled():
        return True
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or any(parameter.requires_grad for parameter in stage.parameters())


def members(entry: ServedEntry, *, frozen: bool) -> dict[str, Any]:
    """Returns the members of the class of a stage or layer that is served as one, besides its forward."""

    def served(stage: nn.Module) -> Any:
        """Returns what a captured graph has read, which is another object after a change.

        None is where blocks run one by one, whose graph reads weights where they lie.
        """
        are_blocks = stage.training or torch.is_grad_enabled()
        if not frozen and (are_blocks or not serves_on(next(stage.parameters()).device)):
            return None
        return _served_or_why_not(stage, entry)

    marks = {ENTRY: entry, NUMBER: None} if frozen else {_SERVES: True}
    return {"_cvt_kernels_served": served, **marks}


# Under torch.compile ----------------------------------------------------------------------------------------

#: The attribute with the number of a frozen stage or layer, and the one of its class with the entry.
NUMBER, ENTRY = "_cvt_kernels_number", "_cvt_kernels_entry"
_graph_numbers = itertools.count()
_stages: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def is_frozen(module: nn.Module) -> bool:
    """Returns whether a module is a frozen stage or layer."""
    return hasattr(type(module), ENTRY)


def give_number(stage: nn.Module) -> None:
    """Gives a frozen stage or layer a number of its own."""
    number = next(_graph_numbers)
    vars(stage)[NUMBER] = number
    _stages[number] = stage


def take_number(module: nn.Module) -> None:
    """Takes its number from a module that has one."""
    _stages.pop(vars(module).pop(NUMBER, None), None)


def without_number(state: Any) -> Any:
    """Returns the state of a module for a copy or a pickle, which must not have the number of the module."""
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name != NUMBER}


def _numbered(number: int) -> tuple[nn.Module, ServedEntry]:
    stage = _stages.get(number)
    if stage is None:
        raise RuntimeError("the frozen module for which this code was compiled is no longer frozen")
    return stage, getattr(type(stage), ENTRY)


# The operators --------------------------------------------------------------------------------------------


@graph_operator(
    "frozen_stage",
    lambda image, number, tokens, channels: image.new_empty(image.shape[0], tokens, channels),
    schema="(Tensor image, int number, SymInt tokens, int channels) -> Tensor",
)
@torch.no_grad()
def _frozen_stage(image: Tensor, number: int, tokens: int, channels: int) -> Tensor:
    return _run(number, image, None)


@graph_operator(
    "frozen_layer",
    lambda x, number, height, width: x.new_empty(x.shape),
    schema="(Tensor x, int number, SymInt height, SymInt width) -> Tensor",
)
@torch.no_grad()
def _frozen_layer(x: Tensor, number: int, height: int, width: int) -> Tensor:
    return _run(number, x, (height, width))


def _run(number: int, x: Tensor, grid: tuple[int, int] | None) -> Tensor:
    stage, entry = _numbered(number)
    refuse_to_train(stage)
    served = tokens_served(stage, entry, x, grid)
    if served is not None:
        return served[0].contiguous()
    own_forward = type(stage)._cvt_kernels_original.forward  # type: ignore[attr-defined]
    return entry.tokens(own_forward(stage, x, *entry.others(cast(Any, grid)))).contiguous()


# The forward that is traced -------------------------------------------------------------------------------


def _try_to_trace(stage: nn.Module, entry: ServedEntry, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Traces a frozen stage or layer as one operator; None where its own modules must be traced.

    In training mode it is one operator too, which raises when called.
    """
    number = getattr(stage, NUMBER)
    call: Any = entry.call_of(args, kwargs)
    # An exported program may run anywhere, and so holds the model's own modules.
    if call is None or modes.is_exporting() or number is None or call[0].device.type != "cpu":
        return None
    if torch_module._has_any_global_hook() or modes.autocast_enabled(call[0]) or modes.is_transformed():
        return None
    if _why_not_freezable(number) is not None or (not stage.training and has_gradient(stage, call[0])):
        return None
    x, grid = call
    if isinstance(entry, BlockEntry):
        parts = entry.parts(stage)
        like = parts.fc1.weight if parts.norm1.weight is None else parts.norm1.weight
        if x.ndim != 3 or x.shape[2] != parts.fc1.weight.shape[1] or x.dtype != like.dtype:
            return None
        return entry.result(stage, _frozen_layer(x, number, *grid), grid)
    conv, class_token = entry.embedding(stage)
    if x.ndim != 4 or x.shape[1] != conv.in_channels or x.dtype != conv.weight.dtype:
        return None  # its own forward says what is wrong
    grid = output_grid(x, conv)
    if modes.is_known(grid[0] < 1) or modes.is_known(grid[1] < 1):
        return None
    count = grid[0] * grid[1] + (0 if class_token is None else class_token.shape[1])
    return entry.result(stage, _frozen_stage(x, number, count, conv.out_channels), grid)


def _why_not_freezable(number: int) -> str | None:
    """Returns why the module of a number cannot run as one, or None; if it cannot, its modules are traced."""
    return why_not_freezable(*_numbered(number))


# What changes afterwards is noticed by the operator; see the end of backends.py.
_why_not_freezable._dynamo_marked_constant = True  # type: ignore[attr-defined]
