"""Bad values for every kind of argument, and the test that a function refuses them by name."""

import inspect
import math
import re
import time
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

#: From the name and the good value of an argument: bad ones, each with the word that a message must have.
Kind = Callable[[str, Any], Iterator[tuple[Any, str]]]


class Call(NamedTuple):
    """A good call.

    Attributes:
        arguments: Returns its arguments by name, all that the function has.
        kinds: What kind each of them is.
        function: What is called; None for the public name itself.
    """

    arguments: Callable[[], dict[str, Any]]
    kinds: dict[str, Kind]
    function: Callable[..., Any] | None = None


def _kind(values: Callable[[Any], list[Any]]) -> Kind:
    def bad(name: str, good: Any) -> Iterator[tuple[Any, str]]:
        for value in (None, *values(good)):
            yield value, name

    return bad


def of_values(*values: Any) -> Kind:
    """An argument for which None and some values are invalid."""
    return _kind(lambda good: list(values))


def number(*more: Any) -> Kind:
    """A finite number; ``more`` are those out of its range."""
    wrong = ("a", True, math.nan, math.inf, -math.inf, [1.0], 1j, torch.ones(2), torch.tensor(True), nn.GELU)
    return of_values(*wrong, *more)


def positive() -> Kind:
    """A positive, finite number."""
    return number(0, 0.0, -1.0, -1e-5)


def integer(*more: Any) -> Kind:
    """An integer, which is not negative nor beyond all memory."""
    wrong = ("a", True, 1.5, 1.0, math.nan, math.inf, [1], -1, 2**40, 2**25)
    return of_values(*wrong, *more)


def flag() -> Kind:
    """True or False."""
    return of_values("yes", 0, 1, 0.0, [], torch.tensor(True))


def choice() -> Kind:
    """One of some names."""
    return of_values("foo", "", 1, True, ["none"], torch.ones(2), np.array(["a", "b"]))


def dtype() -> Kind:
    """A dtype, of floating point or of 8 bits, but never one of these."""
    return of_values("float32", 1, [], torch.int64, torch.complex64, torch.bool, np.zeros(2))


def grid(*more: Any) -> Kind:
    """A pair (H, W)."""
    wrong = (4, "ab", (2,), (2, 2, 1), (2.0, 2.0), (True, 4), (-2, -2), (0, 4), (math.nan, 1), (2**40, 1))
    return of_values(*wrong, (None, 2), torch.ones(2), {2: 2}, *more)


def module() -> Kind:
    """A module with blocks of a CvT."""
    return of_values("a", 3, nn.Linear, torch.ones(2), nn.Linear(2, 2))


def strings() -> Kind:
    """Several names."""
    return of_values("a", 3, [1], [None])


def _other_tensors(good: Tensor, first: bool) -> list[Any]:
    """Returns what is no dense tensor of floating point on the device of the others."""
    wrong: list[Any] = ["a", 1, 1.5, True, [1.0], np.ones(tuple(good.shape), np.float32), nn.GELU]
    wrong += [good.to(torch.complex64), good.bool(), good.to(torch.int32), good.double().to_sparse()]
    wrong += [good.to(torch.float8_e5m2), good.to_sparse(), good[None].to_sparse()]
    if good.is_floating_point() and good.element_size() > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested and CSR tensors are prototypes
            wrong += [good.float().to_mkldnn()] if good.ndim else []
            wrong += [torch.quantize_per_tensor(good.float(), 0.1, 0, torch.qint8)]
            wrong += [torch.nested.nested_tensor([good, good])]
            wrong += [good.to_sparse_csr()] if good.ndim == 2 else []
    if not first and good.dtype == torch.float32:
        wrong.append(good.double())  # another dtype than the first's
    return wrong if first else [*wrong, good.to("meta")]


def tensor(*shapes: tuple[int, ...], first: bool = False) -> Kind:
    """A tensor; of the bad shapes that are named too. The others are compared with the ``first``."""
    return _kind(lambda good: _other_tensors(good, first) + [good.new_zeros(s) for s in shapes])


def wrong_shapes(good: Tensor) -> list[tuple[int, ...]]:
    """Returns the usual wrong shapes: another last size, or of an index first size, and other dimensions."""
    shape = tuple(good.shape)
    other = 2 if 3 in shape else 3
    if not shape:
        return [(other,)]
    changed = (*shape[:-1], other) if good.is_floating_point() else (other, *shape[1:])
    return [changed, shape[1:], (*shape, 2)]


def of_type(hint: Any, good: Any, shapes: Any = None, *, first: bool = False) -> Kind:
    """An argument by its annotation and a good value, with these wrong ``shapes`` or the usual ones."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [each for each in typing.get_args(hint) if each is not type(None)] if is_union else [hint]
    if kinds == [Tensor]:
        kind = tensor(*(wrong_shapes(good) if shapes is None else shapes), first=first)
    elif typing.get_origin(kinds[0]) is typing.Literal:
        kind = choice()
    else:
        kind = {float: number, int: integer, bool: flag, torch.dtype: dtype}[kinds[0]]()
    return optional(kind) if is_union else kind


def parts(kinds: dict[str, Kind]) -> Kind:
    """A NamedTuple whose fields are of these kinds."""

    def bad(name: str, good: Any) -> Iterator[tuple[Any, str]]:
        for value in ("a", 3, (1, 2), torch.ones(2), type(good)):
            yield value, name
        for field, kind in kinds.items():
            for value, word in kind(field, getattr(good, field)):
                yield good._replace(**{field: value}), word

    return bad


def also_named(kind: Kind, *names: str) -> Kind:
    """An argument as of ``kind``, for whose bad values messages may name others that do not fit."""

    def bad(name: str, good: Any) -> Iterator[tuple[Any, str]]:
        return ((value, "|".join((word, *names))) for value, word in kind(name, good))

    return bad


def optional(kind: Kind) -> Kind:
    """An argument as of ``kind``, or None."""

    def bad(name: str, good: Any) -> Iterator[tuple[Any, str]]:
        return (each for each in kind(name, good) if each[0] is not None)

    return bad


def each(kind: Kind, *more: Any) -> Kind:
    """A sequence whose members are of a kind; the last is tried."""

    def bad(name: str, good: Any) -> Iterator[tuple[Any, str]]:
        for value in (None, 3, "a", nn.GELU, *more):
            yield value, name
        for value, word in kind(name, good[-1]):
            yield type(good)([*good[:-1], value]), word

    return bad


def problems(name: str, call: Call, function: Callable[..., Any]) -> list[str]:
    """Returns what a function does wrong with bad arguments: lines for people, none if all is well."""
    arguments = call.arguments()
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    versions = [leaf._version for leaf in tensors]
    found = []
    for argument, kind in call.kinds.items():
        for value, word in kind(argument, arguments[argument]):
            start = time.process_time()
            outcome = _outcome(function, arguments | {argument: value}, word)
            if time.process_time() - start > 1:
                outcome = "takes more than a second"
            if versions != [leaf._version for leaf in tensors]:
                outcome, versions = "changes what it was given", [leaf._version for leaf in tensors]
            if outcome is not None:
                found.append(f"{name}, {argument} ({word}) = {_shown(value, word)}: {outcome}")
    return found


def _shown(value: Any, word: str) -> str:
    value = value[-1] if isinstance(value, list | tuple) and value else value
    value = getattr(value, word, value)
    try:
        return f"{value!r}"[:100].replace("\n", " ")
    except Exception:  # there are tensors that cannot be shown
        return type(value).__name__


def _outcome(function: Callable[..., Any], arguments: dict[str, Any], word: str) -> str | None:
    """Says how a function does not refuse arguments as it should; None if it does."""
    try:
        function(**arguments)
    except (TypeError, ValueError) as error:
        named = re.search(rf"(?<![a-z_])(?:{word})(?![a-z_])", str(error).split(", expected")[0])
        return None if named else f"does not name it: {error}"
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:120]}"
    return "is accepted"


def names_of(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments of a function or a class."""
    return [name for name in inspect.signature(function).parameters if name not in _PASSED_ON]


_PASSED_ON = ("self", "args", "kwargs")
