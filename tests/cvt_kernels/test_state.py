"""Tests of the question whether something has changed: by the extension, and the same in Python."""

import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cvt_kernels import changes, machine

NONE = [], [], []


@pytest.fixture(params=["extension", "python"])
def ask(request):
    """Returns a function that asks one of the two with some arguments, and nothing in the place of others."""
    question = changes.state_in_python
    if request.param == "extension":
        question = changes.question()
        assert question == machine.load_extension().state  # or both would be the same

    def ask(
        *, members=(), modules=(), spaces=(), hooks=(), ignored=(), items=NONE, attributes=NONE, tensors=()
    ):
        lists = [*members], [*modules], [*spaces], changes.KNOWN, [*hooks], {*ignored}
        return question(*lists, items, attributes, [*tensors])

    return ask


def facts_of(ask, tensors):
    """Returns layouts and versions, and the samples."""
    _, layouts, versions, sample = ask(tensors=tensors)
    return (layouts, versions), sample


def test_the_first_question_may_be_of_fake_tensors():
    changes.question.cache_clear()
    with FakeTensorMode():
        assert changes.question() == machine.load_extension().state


class Odd(torch.Tensor):
    """A subclass of a tensor."""


class Unlike:
    """A value that equals nothing."""

    def __eq__(self, other):
        raise RuntimeError("is compared")

    __hash__ = None


#: Changes of dicts that have the items a: one, b: two.
CHANGES = {
    "another value": lambda dicts: dicts[0].update(a=object()),
    "no value": lambda dicts: dicts[0].pop("b"),
    "one more": lambda dicts: dicts[1].update(c=None),
    "the order": lambda dicts: dicts[0].update(a=dicts[0].pop("a")),
    "moved to the next": lambda dicts: dicts[1].update(z=dicts[0].pop("b")),
    "moved from an empty one": lambda dicts: dicts[2].update(z=dicts[1].pop("b")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_members(ask, name):
    one, two = object(), object()
    dicts = [{"a": one, "b": two}, {"a": one, "b": two}, {}]
    before = ask(members=dicts)
    dicts[0] |= {"a": one}
    assert ask(members=dicts) == before
    CHANGES[name](dicts)
    assert ask(members=dicts)[0] != before[0]


def test_classes_of_modules(ask):
    linear, other, identity = (
        ask(modules=[each]) for each in (nn.Linear(2, 2), nn.Linear(3, 3), nn.Identity())
    )
    assert linear == other
    assert linear[0] != identity[0]


def test_attributes_of_modules(ask):
    spaces = [{}, {"a": 1}]
    before = ask(spaces=spaces)
    spaces[1]["a"] = 2
    spaces[0][changes.KNOWN] = {}
    assert ask(spaces=spaces) == before
    spaces[0]["a"] = 2
    more = ask(spaces=spaces)
    assert more[0] != before[0]
    spaces[0]["forward"] = spaces[0].pop("a")
    assert ask(spaces=spaces)[0] not in (more[0], before[0])


def test_hooks(ask):
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    hooks = [module._forward_hooks for module in modules]
    seen = [ask(hooks=hooks)[0]]
    for module in (*modules, modules[0]):
        module.register_forward_hook(print)
        seen.append(ask(hooks=hooks)[0])
    assert all(seen[i] not in seen[:i] for i in range(1, 4))
    assert ask(hooks=hooks)[0] == seen[-1]
    assert ask(hooks=hooks, ignored=[*hooks[0]][1:])[0] == seen[2]
    modules[0]._forward_hooks.popitem()
    assert ask(hooks=hooks)[0] == seen[2]
    modules[0].register_forward_hook(print)  # in the place of the one before
    assert ask(hooks=hooks)[0] not in seen


def test_settings(ask):
    nan, odd = float("nan"), Unlike()
    dicts, names = [{"a": 1}, {"a": nan}, {}, {"a": odd}, {"a": (2, 3)}], ["a"] * 5
    values = [1, nan, None, odd, (2, 3)]
    objects = [type("Any", (), each)() for each in dicts]

    def asked(values):
        return [ask(items=(dicts, names, values)), ask(attributes=(objects, names, values))]

    same = asked(values)
    assert asked([1.0, nan, None, odd, (2, 3)]) == same
    for i, other in enumerate([2, 0.0, 5, None, (2, 4)]):
        if i != 3:
            assert all(
                a[0] != b[0] for a, b in zip(asked([*values[:i], other, *values[i + 1 :]]), same, strict=True)
            )
    for kind in ("items", "attributes"):
        with pytest.raises(RuntimeError, match="is compared"):
            ask(**{kind: (dicts if kind == "items" else objects, names, [1, nan, None, object(), (2, 3)])})


def test_versions(ask):
    tensors = [
        torch.zeros(2),
        nn.Parameter(torch.zeros(2)),
        None,
        torch.zeros(2).as_subclass(Odd),
        torch.zeros(1),
    ]
    before = facts_of(ask, tensors)[0]
    assert facts_of(ask, tensors)[0] == before
    for tensor in filter(lambda tensor: tensor is not None, tensors):
        tensor.detach().add_(1)
        assert facts_of(ask, tensors)[0] != before
        before = facts_of(ask, tensors)[0]
    tensors[2] = torch.zeros(1)
    assert facts_of(ask, tensors)[0] != before


def test_inference_tensors(ask):
    with torch.inference_mode():
        tensors = [torch.zeros(1), torch.zeros(1, 2)]
    before = facts_of(ask, [torch.zeros(1), *tensors]), facts_of(ask, tensors)
    assert facts_of(ask, tensors) == before[1]
    with torch.inference_mode():
        tensors[1].add_(1)
    assert facts_of(ask, tensors)[0] == before[1][0]
    assert facts_of(ask, tensors)[1] != before[1][1]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16),
    *(torch.float32, torch.int32, torch.float64, torch.complex64, torch.complex128),
]
#: Tensors in every layout, of at least two numbers.
LAYOUTS = {
    "small": lambda t: t[:2],
    "of 511 bytes or less": lambda t: t[: 511 // t.element_size()],
    "of 512 bytes or more": lambda t: t[: -(-513 // t.element_size())],
    "large": lambda t: t,
    "misaligned": lambda t: t[1:],
    "transposed": lambda t: t.view(100, 82).t(),
    "channels last": lambda t: t.view(4, 41, 10, 5).to(memory_format=torch.channels_last),
    "with gaps": lambda t: t.view(100, 82)[:, 3:60:2],
    "expanded": lambda t: t[:, None].expand(-1, 3),
    "of many dimensions": lambda t: t.view(2, 41, 2, 5, 2, 5)[:, 1:, :, :, 1:],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_written_numbers(ask, name, dtype):
    """All numbers, the first, and the last; the same bits are no change, those of NaN neither."""
    numbers = torch.randn(8200).mul(40).clamp(-99, 99)
    if dtype.is_floating_point and dtype.itemsize > 1:
        numbers[::3] = float("nan")
    numbers = numbers.abs() if dtype in (torch.bool, torch.uint8) else numbers
    tensor = LAYOUTS[name](numbers.to(dtype))
    tensors = [torch.zeros(3), tensor, None, torch.zeros(700)]
    before = facts_of(ask, tensors)
    assert facts_of(ask, tensors) == before
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    first = tensor.storage_offset()
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    for written in (memory, memory[first * dtype.itemsize], memory[last * dtype.itemsize]):
        written.bitwise_xor_(1)
        facts, sample = facts_of(ask, tensors)
        assert facts == before[0]
        assert sample != before[1]
        written.bitwise_xor_(1)
        assert facts_of(ask, tensors) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_turned_signs(ask, dtype):
    """Each number has the same bit has changed."""
    tensor = torch.randn(5000, dtype=dtype)
    before = facts_of(ask, [tensor])
    tensor.data.neg_()
    assert facts_of(ask, [tensor]) != before


def test_tensors_without_numbers(ask):
    tensors = [torch.zeros(0), torch.zeros(3, 0, 2), torch.zeros(2, 3, device="meta"), torch.tensor(1.0)]
    before = facts_of(ask, tensors)
    assert facts_of(ask, tensors) == before
    tensors[-1].data.add_(1)
    assert facts_of(ask, tensors)[1] != before[1]
    assert facts_of(ask, []) == facts_of(ask, [])


@pytest.mark.parametrize(("share", "most_missed"), [(0.01, 0.33), (0.1, 0.01), (1.0, 0.0)])
def test_how_often_the_sample_misses_a_change(ask, share, most_missed):
    """Numbers at random: 0.99¹²⁸ = 28 % are expected for one in a hundred."""
    tensors = [torch.randn(10_000 + 400 * i) for i in range(400)]
    before = samples_of(ask, tensors)
    for tensor in tensors:
        places = torch.randperm(tensor.numel())[: int(share * tensor.numel())]
        tensor.data[places] += 1
    missed = [after == each for after, each in zip(samples_of(ask, tensors), before, strict=True)]
    assert len(missed) == 400
    assert sum(missed) <= 400 * most_missed


def samples_of(ask, tensors):
    """Returns the sample of each tensor."""
    sample = facts_of(ask, tensors)[1]
    return [sample[i : i + 8] for i in range(0, len(sample), 8)] if isinstance(sample, bytes) else sample


#: Changes of where and how a square tensor lies.
MOVES = {
    "data": lambda t: setattr(t, "data", torch.zeros(4, 4)),
    "data of the same memory": lambda t: setattr(t, "data", t.data.t()),
    "shape": lambda t: setattr(t, "data", t.data.view(2, 8)),
    "dtype": lambda t: setattr(t, "data", t.data.view(torch.int32)),
    "fewer numbers": lambda t: t.resize_(2, 4),
    "another storage": lambda t: t.set_(torch.zeros(4, 4)),
    "an offset": lambda t: t.set_(t.untyped_storage(), 4, (3, 4), (4, 1)),
    "swapped": lambda t: torch.utils.swap_tensors(t, torch.zeros(4, 4)),
}


@pytest.mark.parametrize("name", MOVES)
def test_layouts(ask, name):
    tensors = [torch.zeros(3), torch.zeros(4, 4), torch.zeros(0, 2), torch.tensor(1.0)]
    kept = [tensor.detach() for tensor in tensors]
    before = ask(tensors=tensors)[1]
    tensors[1].add_(1)
    assert ask(tensors=tensors)[1] == before == ask(tensors=kept)[1]
    MOVES[name](tensors[1])
    assert ask(tensors=tensors)[1] != before


def test_arguments_of_the_extension():
    state = machine.load_extension().state
    for i in (0, 2, 4):
        lists = [[], [], [], "", [], set()]
        lists[i] = [{}, 1]
        with pytest.raises(TypeError, match="expected a list of dicts"):
            state(*lists, NONE, NONE, [])
    with pytest.raises(TypeError, match="expected a list of dicts"):
        state([], [], [], "", [], set(), ([()], ["a"], [1]), NONE, [])
    with pytest.raises(ValueError, match="expected lists of one length"):
        state([], [], [], "", [], set(), ([{}], ["a"], []), NONE, [])
    with pytest.raises(AttributeError):
        state([], [], [], "", [], set(), NONE, NONE, [torch.zeros(1), 1])


def test_without_an_extension_or_with_an_unknown_torch(monkeypatch):
    monkeypatch.setattr(machine, "has_extension", lambda: False)
    assert changes.question.__wrapped__() is changes.state_in_python
    monkeypatch.undo()
    assert torch.ops.cvt_kernels.holds_pointer(0, torch.zeros(1)) is False
    monkeypatch.setattr(torch.Tensor, "_cdata", 0, raising=False)
    assert changes.question.__wrapped__() is changes.state_in_python


def test_asking_keeps_no_reference():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    weight, bias = module[0].weight, module[0].bias
    state = changes.State([weight, bias], module, list(module))
    count = sys.getrefcount(weight), sys.getrefcount(module[0])
    for _ in range(100):
        assert state.holds([weight, bias])
    assert (sys.getrefcount(weight), sys.getrefcount(module[0])) == count
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert not state.holds([weight, bias])
