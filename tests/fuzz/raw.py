"""Calls of the extension's raw operators with arguments that the public functions never hand them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cvt_kernels import backends, machine
from cvt_kernels.tuning import tuner

from .worker import Answer, limited_memory

if TYPE_CHECKING:
    from .cases import Case

_MEMORY = 2**31  # bytes that a call may take beside what the process has
_FEW = 2**24  # bytes of results for which there is memory in any case
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES = (
    *_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
)  # fmt: skip
_MOST = 2**63 - 1
_INTEGERS = (
    0, 1, 2, 3, 5, 7, 9, 16, 17, 64, 65, 129, 257, 1000, 2**16 + 1, 2**20, 2**20 + 1, 2**31 - 1, 2**31, 2**32,
    2**33, 2**40, 2**40 + 1, 2**59, 2**60, 2**61, 2**62, _MOST, -1, -2, -16, -(2**31), -(2**32), -(2**62),
    -_MOST - 1,
)  # fmt: skip
_REALS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-300, 1e38, 1e300, math.inf, -math.inf, math.nan)
_WORDS = ("", "none", "tanh", "quick", "identity", "relu", "cls", "avg", "é", "none\0", "x" * 5000)
_SIZES = (0, 1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 33, 64)
_HUGE = (2**20 + 1, 2**31, 2**32, 2**40, 2**52, 2**60, 2**61, 2**62)


# Right calls ----------------------------------------------------------------------------------------------

#: The operators of the extension, as csrc/module.cpp lists them.
OPERATORS = tuple(
    re.findall(r'"(\w+)\(Tensor', Path(__file__).parents[2].joinpath("csrc/module.cpp").read_text("utf-8"))
)
_CASES = 60  # of each public operator, whose calls of the extension are the right ones


class _Recorder(TorchDispatchMode):
    """Notes the arguments of every call of the extension."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[list[Any]]] = {name: [] for name in OPERATORS}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if function.namespace == "cvt_kernels" and name in self.calls:
            self.calls[name].append(pytree.tree_map_only(Tensor, Tensor.detach, list(args)))
        return function(*args, **(kwargs or {}))


@functools.cache
def _right_calls() -> dict[str, list[list[Any]]]:
    """Returns what the public operators pass to each of the extension's operators in cases of their own."""
    from cvt_kernels.ops.cards import make

    from .cases import parsed
    from .judge import call_public

    recorder = _Recorder()
    for operator in backends.operators:
        for seed in range(_CASES):
            call = make(*parsed(f"{operator}:{seed}")).call.map(tuner._copied)
            refused = contextlib.suppress(ValueError, TypeError, RuntimeError)
            with backends.use_backend("cpu", "reference"), refused, recorder:
                outputs = pytree.tree_leaves(call_public(operator, call.record))
                wanted = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
                torch.autograd.backward(wanted, [torch.ones_like(out) for out in wanted])
    return recorder.calls


# Mutations ------------------------------------------------------------------------------------------------


def _integers(source: random.Random, value: int) -> int:
    return source.choice((*_INTEGERS, value - 1, value + 1, 2 * value, -value))


def _shaped(source: random.Random, tensor: Tensor) -> Tensor:
    """Returns a tensor of another shape, perhaps larger than any memory: its numbers are then the same."""
    shape, kind = list(tensor.shape), source.randrange(6)
    if kind == 0:
        shape.insert(source.randrange(len(shape) + 1), source.choice(_SIZES))
    elif shape:
        place = source.randrange(len(shape))
        if kind == 1:
            del shape[place]
        elif kind == 2:
            shape[place] = source.choice((*_SIZES, shape[place] + 1, 2 * shape[place]))
        elif kind == 3:
            source.shuffle(shape)
        elif kind == 4:
            shape[place] = source.choice(_HUGE)
        else:
            shape[place], shape[source.randrange(len(shape))] = source.choice(_HUGE), 0
    numbers = math.prod(shape)
    if 0 < numbers <= 2**20:
        flat = tensor.reshape(-1) if tensor.numel() else tensor.new_ones(1)
        return flat[torch.arange(numbers) % flat.numel()].reshape(shape)
    return tensor.new_ones(1).as_strided(shape, [0] * len(shape))


def _laid_out(source: random.Random, tensor: Tensor) -> Tensor:
    kind = source.randrange(4)
    if kind == 0 and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 1 and tensor.ndim:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if kind == 2 and tensor.numel():
        return tensor.reshape(-1)[:1].as_strided(tensor.shape, [0] * tensor.ndim)
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].reshape(tensor.shape)


def _with_values(source: random.Random, tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    if changed.is_floating_point() and changed.numel():
        changed.view(-1)[source.randrange(changed.numel())] = source.choice(_REALS)
    elif changed.numel():
        limits = torch.iinfo(changed.dtype)
        value = min(max(source.choice(_INTEGERS), limits.min), limits.max)
        changed.view(-1)[source.randrange(changed.numel())] = value
    return changed


def _mutated_leaf(kind: str, source: random.Random, value: Any, leaves: list[Any]) -> Any:
    if kind == "number" or not isinstance(value, Tensor):
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return _integers(source, value)
        if isinstance(value, float):
            return source.choice(_REALS)
        if isinstance(value, str):
            return source.choice(_WORDS)
        if isinstance(value, torch.dtype):
            return source.choice(_DTYPES)
        return value
    if kind == "shape":
        return _shaped(source, value)
    if value.numel() > 2**20:  # of one number, which copies would need memory for
        return value
    if kind == "dtype":
        return value.to(source.choice(_DTYPES))
    if kind == "layout":
        return _laid_out(source, value)
    if kind == "values":
        return _with_values(source, value) if value.is_contiguous() and not value.is_complex() else value
    if kind == "device":
        return value.to("meta")
    assert kind == "alias"
    others = [
        t
        for t in leaves
        if isinstance(t, Tensor) and value.numel() <= t.numel() <= 2**20 and t.dtype == value.dtype
    ]
    return source.choice(others).reshape(-1)[: value.numel()].reshape(value.shape)


def _mutate(kind: str, source: random.Random, arguments: list[Any]) -> list[Any]:
    leaves, spec = pytree.tree_flatten(arguments)
    is_tensor = kind not in ("number", "grid", "list", "absent")
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) == is_tensor and leaf is not None
    ]
    if kind == "grid":  # two numbers whose product wraps around
        places = [i for i in range(len(leaves) - 1) if type(leaves[i]) is type(leaves[i + 1]) is int]
    if kind == "list":
        places = [i for i, value in enumerate(arguments) if isinstance(value, list)]
    if kind == "absent":
        places = [*range(len(arguments))]
    if not places:
        return arguments
    place = source.choice(places)
    if kind == "list":
        value = arguments[place]
        changed = source.choice((value[:-1], value[1:], [], value + value, value[::-1]))
        return [*arguments[:place], changed, *arguments[place + 1 :]]
    if kind == "absent":
        return [*arguments[:place], None, *arguments[place + 1 :]]
    if kind == "grid":
        product = source.choice((0, leaves[place] * leaves[place + 1], 1))
        pairs = [(2**32, 2**32), (2**61, 8), (8, 2**61), (2**62, 4)]
        odd = source.choice((3, 2**31 + 1, 2**40 + 1, _MOST))
        inverse = product * pow(odd, -1, 2**64) % 2**64
        pairs += [(odd, inverse - 2**64 if inverse > _MOST else inverse)] * 3
        leaves[place], leaves[place + 1] = source.choice(pairs)
        if source.random() < 0.5:  # tokens that such a product seems to be the number of
            wrapped = leaves[place] * leaves[place + 1] % 2**64
            leaves = [_of_tokens(leaf, wrapped) for leaf in leaves]
    else:
        leaves[place] = _mutated_leaf(kind, source, leaves[place], leaves)
    return pytree.tree_unflatten(leaves, spec)


def _of_tokens(value: Any, tokens: int) -> Any:
    return value[:, :tokens] if isinstance(value, Tensor) and value.ndim == 3 else value


_MUTATIONS = (
    "none", "number", "shape", "grid", "list", "absent", "dtype", "layout", "values", "alias", "device",
)  # fmt: skip
#: The settings of a case: an operator, and up to three mutations of the arguments of a right call.
CHOICES: dict[str, tuple[Any, ...]] = {
    "operator": OPERATORS,
    "first": _MUTATIONS,
    "second": _MUTATIONS,
    "third": _MUTATIONS,
}


def arguments_of(case: Case) -> list[Any]:
    """Returns the arguments of a case."""
    source = random.Random(case.seed)
    arguments = source.choice(_right_calls()[case.settings["operator"]])
    for name in ("first", "second", "third"):
        if case.settings[name] != "none":
            # What is too large for memory is left as it is, and so is what PyTorch does not make.
            with contextlib.suppress(RuntimeError, TypeError, NotImplementedError, ZeroDivisionError):
                arguments = _mutate(case.settings[name], source, arguments)
    return arguments


# The judge ------------------------------------------------------------------------------------------------


def judge(case: Case) -> Answer:
    """Calls an operator: it has to refuse its arguments by a sentence, or to return what its fake says.

    Its arguments end where a page begins that nobody may touch, and may not be written to unless its schema
    says so; its results lie in guarded memory where this can be told apart. It has little memory.
    """
    if machine.why_extension_unavailable("cpu") is not None:
        return Answer([], 0)
    name = case.settings["operator"]
    overload = getattr(torch.ops.cvt_kernels, name).default
    written = [argument.is_write for argument in overload._schema.arguments]
    arguments = arguments_of(case)
    expected = _expected(overload, arguments)
    large = _bytes_of(arguments) + (_MEMORY if expected is None else _bytes_of(expected)) > _FEW
    is_plain = _is_plain(arguments)
    guards = tuner.guarded_memory if is_plain and not large else contextlib.nullcontext
    arguments = _before_guard_pages(arguments, written)
    try:
        with limited_memory(_MEMORY), guards() as memory:
            results = overload(*arguments)
    except Exception as error:
        if not is_plain:  # of the fake, which takes what its operator does
            return Answer([], 0)
        if not isinstance(error, RuntimeError | ValueError | TypeError):
            return Answer([f"raises {tuner.describe_error(error)}"])
        return Answer(_flaws_of_refusal(name, str(error), large), 0)
    if memory is not None and memory.is_overwritten():
        return Answer(["writes outside of its tensors"])
    made = [t for t in pytree.tree_leaves(results) if t is not None]
    if expected is not None and list(map(_form, made)) != list(map(_form, expected)):
        return Answer([f"returns {list(map(_form, made))}, expected {list(map(_form, expected))}"])
    return Answer([])


def _flaws_of_refusal(name: str, text: str, large: bool) -> list[str]:
    first = (text.splitlines() or [""])[0]
    if "API call failed" in first or first.startswith("std::"):
        return [f"does not say why it fails: {first[:200]}"]
    is_ours = first.startswith(f"{name}: ")
    memory = is_ours and ("out of memory" in first or "memory for a copy" in first)
    if memory and not large:
        return [f"has no memory for a small result: {first[:200]}"]
    if is_ours and not memory and (": got " not in first or ", expected " not in first):
        return [f"does not say what came and what was expected: {first[:200]}"]
    return []


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _bytes_of(values: Any) -> int:
    tensors = (t for t in pytree.tree_leaves(values) if isinstance(t, Tensor))
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)


def _is_plain(arguments: list[Any]) -> bool:
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
    return bool(tensors) and all(t.is_cpu for t in tensors)


def _expected(overload: Any, arguments: list[Any]) -> list[Tensor] | None:
    """Returns what the operator's fake says; None without one, or where it takes other arguments only."""
    if overload._schema.name == "cvt_kernels::pyramid_block_packed" and isinstance(arguments[0], Tensor):
        return [arguments[0].to("meta")]
    try:
        results = overload(*pytree.tree_map_only(Tensor, lambda t: t.to("meta"), arguments))
    except Exception:  # a fake may fail in any way where the operator refuses the arguments
        return None
    return [t for t in pytree.tree_leaves(results) if t is not None]


def _before_guard_pages(arguments: list[Any], written: list[bool]) -> list[Any]:
    """Returns copies that share memory as the arguments do, each before a page that nobody may touch.

    Those that are not written to are in memory that cannot be.
    """
    writable = {
        _place(t) for t in pytree.tree_leaves([a for a, w in zip(arguments, written, strict=False) if w])
    }
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_meta or not storage.nbytes():
            return tensor
        place = _place(tensor)
        if place not in made:
            made[place] = _guarded(storage, place in writable)
        guarded = torch.empty(0, dtype=tensor.dtype)
        guarded.set_(made[place].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return guarded

    return pytree.tree_map_only(Tensor, copy, arguments)


def _place(value: Any) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


_PROTECTIONS = {False: mmap.PROT_READ, True: mmap.PROT_READ | mmap.PROT_WRITE}


def _guarded(storage: torch.UntypedStorage, writable: bool) -> Tensor:
    size = storage.nbytes()
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    copy = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=room - size)
    copy.untyped_storage().copy_(storage)
    start = copy.data_ptr() - (room - size)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for address, length, protection in (
        (start, room, _PROTECTIONS[writable]),
        (start + room, mmap.PAGESIZE, 0),
    ):
        if protect(ctypes.c_void_p(address), ctypes.c_size_t(length), protection):
            raise OSError(ctypes.get_errno(), "mprotect")
    return copy
