"""Every fact of every key, changed once between two calls.

The facts are those that a key has: one without a change here fails, as does a change that the key misses.
"""

import contextlib
import inspect
import types
import typing

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import cvt_kernels as ck
from cvt_kernels import backends, choose, declaration, graphs, machine
from cvt_kernels.launch import launching
from cvt_kernels.ops import weight_cache
from tests.checks import recorded_operators
from tests.contract.examples import EXAMPLES, example
from tests.fuzz.judge import call_public

CPU = torch.device("cpu")


def leaves(key, place=()):
    """Returns place → fact of a key, which is made of tuples and lists."""
    if type(key) not in (tuple, list):
        return {place: key}
    return {k: v for i, each in enumerate(key) for k, v in leaves(each, (*place, i)).items()}


def assert_every_fact_changes(before, others):
    """Fails unless each of other keys differs from the first, and each fact of it differs in one of them.

    Args:
        before: A key.
        others: Name of a change → the key after it.
    """
    missed = [name for name, key in others.items() if key == before]
    assert not missed
    facts = leaves(before)
    untried = {
        place
        for place, fact in facts.items()
        if all(place in leaves(key) and leaves(key)[place] == fact for key in others.values())
    }
    assert not untried, f"facts that no change here changes: {[facts[place] for place in untried]}"


# What differs in one fact ---------------------------------------------------------------------------------


def other_tensors(x):
    """Yields tensors that differ from another one in a single fact, each with its name."""
    like = {"dtype": x.dtype, "device": x.device}

    def laid_out(shape, strides, **other):
        return torch.empty_strided(shape, strides, **like | other).requires_grad_(x.requires_grad)

    if x.ndim:
        yield "shape", laid_out((x.shape[0] + 1, *x.shape[1:]), x.stride())
        yield "strides", laid_out(x.shape, [2 * stride + 1 for stride in x.stride()])
    yield "device", laid_out(x.shape, x.stride(), device="meta")
    yield "class", nn.Parameter(x.detach(), requires_grad=x.requires_grad)
    if x.is_floating_point():
        dtype = torch.float32 if x.dtype == torch.float64 else torch.float64
        yield "dtype", laid_out(x.shape, x.stride(), dtype=dtype)
        yield "gradient", x.detach().requires_grad_(not x.requires_grad)
    else:
        yield "dtype", laid_out(x.shape, x.stride(), dtype=torch.int16)
    if x.dtype == torch.float32 and x.ndim:
        yield "layout", x.detach().to_mkldnn()


class Word(str):
    """A string of another class."""


def others(value, hint):
    """Yields values of an argument that differ from one in a single fact, each with the name of the change.

    Args:
        value: The value.
        hint: Its annotation.
    """
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None:
        kind = next(kind for kind in kinds if kind is not types.NoneType)
        yield "given", _some(kind)
        return
    if types.NoneType in kinds:
        yield "None", None
    if isinstance(value, Tensor):
        yield from other_tensors(value)
    elif hasattr(value, "_fields"):
        hints = typing.get_type_hints(type(value))
        for field in value._fields:
            for name, other in others(getattr(value, field), hints[field]):
                yield f"{field} {name}".strip(), value._replace(**{field: other})
    elif isinstance(value, tuple | list):
        yield "class", list(value) if type(value) is tuple else tuple(value)
        if value:
            yield "length", type(value)([*value, value[-1]])
        for i, each in enumerate(value):
            for name, other in others(each, Tensor if each is None else type(each)):
                yield f"{i} {name}", type(value)([*value[:i], other, *value[i + 1 :]])
    elif isinstance(value, torch.dtype):
        yield "value", torch.float64
    else:
        changed, like = {
            bool: lambda: (not value, int(value)),
            int: lambda: (value + 1, float(value)),
            float: lambda: (value + 0.5, np.float64(value)),
            str: lambda: (f"{value} ", Word(value)),
        }[type(value)]()
        assert like == value
        yield "value", changed
        yield "class", like


def _some(kind):
    """Returns a value of a type."""
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[0]
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        given = (None if field in kind._field_defaults else _some(hints[field]) for field in kind._fields)
        return kind(*given)
    values = {Tensor: torch.ones(3), float: 0.5, torch.dtype: torch.float64, dist.ProcessGroup: object()}
    return values.get(kind, (2, 2))


def changes_of(operator, record):
    """Yields records of calls that differ in one fact, each with the name of the change."""
    hints = typing.get_type_hints(backends.operators[operator].public)
    for field in record._fields:
        for name, other in others(getattr(record, field), hints[field]):
            yield f"{field} {name}", record._replace(**{field: other})


def records(operator):
    """Yields the examples of an operator, each with its name."""
    for name in EXAMPLES[operator]:
        if name not in ("odd", "empty", "many", "tiny"):
            yield name, example(operator, "reference", name).call.record


every_operator = pytest.mark.parametrize("operator", EXAMPLES)


# Plans ----------------------------------------------------------------------------------------------------


class Asked(Exception):  # noqa: N818 (no error: it tells what was asked)
    """The key of a call, in the place of its plan."""


class Asking(dict):
    """Plans that tell the key for which they are asked."""

    def get(self, key):
        raise Asked(key)


@pytest.fixture
def key_of(monkeypatch):
    """Returns a function that returns the key of a call, or None where it has none."""

    def unkept(*_):
        raise Asked(None)

    monkeypatch.setattr(backends, "dispatch_cache", Asking())
    monkeypatch.setattr(declaration.Declaration, "_serve", unkept)

    def key_of(operator, record):
        with pytest.raises((Asked, TypeError)) as asked:  # TypeError: it is checked before there is a key
            call_public(operator, record)
        return asked.value.args[0] if asked.type is Asked else None

    return key_of


def is_read(operator, record, change):
    """Returns whether a call may depend on what was changed."""
    if operator == "linear_int8" and change == "dtype None":
        return False  # as the dtype of x
    only_training = any(word in change for word in ("num_batches_tracked", "process_group"))
    return not only_training or getattr(record, "training", False)


@every_operator
def test_a_plan_is_for_calls_that_differ_in_no_fact(operator, key_of):
    for name, record in records(operator):
        key = key_of(operator, record)
        assert key is not None
        for change, other in changes_of(operator, record):
            if is_read(operator, record, change):
                assert key_of(operator, other) != key, f"{name}: {change}"


def test_branches_that_share_statistics_have_another_plan(key_of):
    record = example("conv_projection", "reference", "training").call.record
    first, second = record.convs
    shared = record._replace(convs=(first, second._replace(running_mean=first.running_mean)))
    assert key_of("conv_projection", shared) != key_of("conv_projection", record)


@contextlib.contextmanager
def attribute(place, name, value):
    """Sets an attribute for a while; monkeypatch would delete what is served by ``__getattr__``."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def autocast(device_type, dtype):
    """Turns autocast on, of a GPU too where there is none."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


#: What plans depend on besides the call: name → context of a change.
STATES = {
    "backends": lambda: ck.use_backend("cpu", "reference"),
    "gradients": torch.no_grad,
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "products": lambda: attribute(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "convolutions": lambda: attribute(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "autocast": lambda: autocast("cpu", torch.bfloat16),
    "autocast of a GPU": lambda: autocast("cuda", torch.bfloat16),
}


def after_each(contexts, key):
    """Returns name → what a function returns within each of some contexts."""
    found = {}
    for name, context in contexts.items():
        with context():
            found[name] = key()
    return found


def state(x):
    """Returns what a plan depends on besides the call."""
    return declaration._state(torch.is_grad_enabled(), x)


def test_a_plan_is_for_one_state_of_the_process(monkeypatch):
    monkeypatch.setattr(machine, "INTERPRETING", True)  # so that products of float32 count on a CPU too
    x = torch.randn(2, 3)
    keys = after_each(STATES, lambda: state(x))
    assert_every_fact_changes(state(x), keys)
    assert len({*keys.values()}) == len(keys)
    keys = {"none": state(x)}
    with autocast("cpu", torch.float16):
        before = state(x)
        keys |= after_each(STATES, lambda: state(x))
    with autocast("cuda", torch.float16):
        keys["another device"] = state(x)
    assert_every_fact_changes(before, keys)


@pytest.mark.parametrize(
    "within",
    [
        lambda: launching.recorded_launches(launching.Chip(90, 132)),
        torch.autograd.forward_ad.dual_level,
        recorded_operators,
    ],
    ids=["launches", "forward mode", "dispatch mode"],
)
def test_no_plan_where_calls_are_not_what_they_seem(within):
    x = torch.randn(2, 3)
    with within():
        assert state(x) is None
        assert declaration.key_of_serving(x) is None
    seen = []
    torch.func.vmap(lambda y: seen.append(state(y)) or y)(x)
    assert seen == [None]


def test_every_fact_of_a_tensor():
    x = torch.randn(2, 3)
    before = declaration.facts_of(x, True)
    keys = {name: declaration.facts_of(other, True) for name, other in other_tensors(x)}
    assert_every_fact_changes(before, keys)
    assert declaration.facts_of(x.requires_grad_(), False) == before  # where gradients are off


# Entries --------------------------------------------------------------------------------------------------

#: What costs the same whatever its value, and sizes, which are told by their class.
_SHARED = ("eps", "momentum", "scale", "grid", "size", "position", "max_depth")


def is_told(change, first):
    """Returns whether an entry is for one value only of what was changed."""
    *path, what = change.split()
    if what == "dtype":
        return path == [first]
    return what in ("value", "gradient") and not any(word.startswith(_SHARED) for word in path)


@every_operator
def test_an_entry_is_for_calls_of_one_kind(operator):
    for name, record in records(operator):
        key = choose.cache_key(operator, **record._asdict())
        for change, other in changes_of(operator, record):
            if is_told(change, record._fields[0]):
                assert choose.cache_key(operator, **other._asdict()) != key, f"{name}: {change}"


def entry_key(**changes):
    """Returns the cache key of a call of GELU, with other facts."""
    given = {"operator": "gelu", "dtype": torch.float32, "device": CPU, "gradient": False}
    given["cost_class"] = "exact"
    assert given.keys() == inspect.signature(choose._cache_key).parameters.keys()
    return choose._cache_key(**given | changes)


def test_every_fact_of_an_entry():
    others = {"operator": "linear", "dtype": torch.bfloat16, "gradient": True, "cost_class": "tanh"}
    keys = {entry_key(), *(entry_key(**{name: value}) for name, value in others.items())}
    assert len(keys) == 1 + len(others)
    for name, other in (("cpu", "cuda"), ("cuda", "cpu")):  # each device has entries of its own
        device = torch.device(name)
        keys = {entry_key(device=device)}
        for dtype in (torch.bfloat16, torch.float16):
            with autocast(name, dtype):
                keys.add(entry_key(device=device))
        assert len(keys) == 3
        with autocast(other, torch.bfloat16):
            assert entry_key(device=device) in keys
        with STATES["products"]():
            assert (entry_key(device=device) in keys) == (name == "cpu")
            half = entry_key(device=device, dtype=torch.float16)
        assert half == entry_key(device=device, dtype=torch.float16)


# Packed weights and bound steps ----------------------------------------------------------------------------


def written(x):
    x.mul_(2)


def in_another_place(x):
    version = x._version
    x.data = x.detach().clone()
    assert x._version == version


def transposed(x):
    x.data = x.detach().t()


def reshaped(x):
    x.data = x.detach().as_strided((2, 3), x.stride())


def cast(x):
    x.data = x.detach().view(torch.int32)


#: Changes of a tensor (3, 3) after which copies are made again.
WRITES = {f.__name__: f for f in (written, in_another_place, transposed, reshaped, cast)}


@pytest.mark.parametrize("which", ["weight", "other"])
@pytest.mark.parametrize("change", WRITES)
def test_copies_are_made_again(change, which):
    weight, other = torch.randn(3, 3), torch.randn(3, 3)

    def packed(key="a", others=(other, None)):
        return weight_cache.packed(weight, key, object, others)

    assert packed() is packed()
    assert packed("b") is not packed()
    assert packed(others=(other, other)) is not packed()
    first = packed()
    WRITES[change]({"weight": weight, "other": other}[which])
    assert packed() is not first
    assert packed() is packed()


# Graphs ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def switched(switch, value):
    """Calls a function with a value for a while, and then with the opposite."""
    switch(value)
    try:
        yield
    finally:
        switch(not value)


def use_float64(wide):
    torch.set_default_dtype(torch.float64 if wide else torch.float32)


def settings_of_graphs():
    """Returns name → context of a change of what graphs depend on besides the model and the call."""
    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    contexts = {
        "convolutions": lambda: attribute(cudnn.conv, "fp32_precision", "ieee"),
        "sums of float16": lambda: attribute(matmul, "allow_fp16_reduced_precision_reduction", False),
        "sums of bfloat16": lambda: attribute(matmul, "allow_bf16_reduced_precision_reduction", False),
        "cuDNN": lambda: attribute(cudnn, "enabled", False),
        "cuDNN's choice": lambda: attribute(cudnn, "benchmark", not cudnn.benchmark),
        "cuDNN's order": lambda: attribute(cudnn, "deterministic", True),
        "dtype": lambda: switched(use_float64, True),
        "deterministic": lambda: switched(torch._C._set_deterministic_algorithms, True),
    }
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        enable = getattr(cuda, f"enable_{name}_sdp")
        contexts[f"attention by {name}"] = lambda enable=enable: switched(enable, False)
    return contexts | {name: STATES[name] for name in ("backends", "products", "autocast")}


def test_every_setting_of_a_graph():
    model = nn.Identity()
    model.config = types.SimpleNamespace(**dict.fromkeys(graphs._CONFIG, False))
    contexts = settings_of_graphs()
    contexts |= {name: lambda name=name: attribute(model.config, name, True) for name in graphs._CONFIG}
    keys = after_each(contexts, lambda: graphs._settings(model, CPU))
    assert_every_fact_changes(graphs._settings(model, CPU), keys)
    with autocast("cpu", torch.float16):
        assert graphs._settings(model, CPU) != keys["autocast"]


def test_every_fact_of_a_call_of_a_graph():
    x = torch.randn(2, 3)

    def kind(*args, **kwargs):
        return graphs._Call(args, kwargs).kind()

    keys = {
        name: kind(other, 1.0, name="a")
        for name, other in other_tensors(x)
        if name not in ("class", "gradient", "layout")  # which the graph does not read, or refuses
    }
    keys |= {
        "value": kind(x, 2.0, name="a"),
        "class": kind(x, 1, name="a"),
        "flag": kind(x, True, name="a"),
        "string": kind(x, 1.0, name="b"),
        "class of a string": kind(x, 1.0, name=Word("a")),
        "keyword": kind(x, 1.0, other="a"),
        "form": kind([x], 1.0, name="a"),
        "None": kind(x, 1.0, name=None),
    }
    assert_every_fact_changes(kind(x, 1.0, name="a"), keys)
    assert kind(x, 0.0) != kind(x, -0.0)  # which are equal
    assert kind(x, float("nan")) == kind(x, float("nan"))
