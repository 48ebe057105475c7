"""Tests of what snapshots of models ask: by the extension, and the same in Python."""

import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cvt_kernels import machine, structure


@pytest.fixture(params=["extension", "python"])
def look(request):
    """Returns the functions of the extension, and those in Python."""
    if request.param == "python":
        return structure.InPython
    assert structure.looks() is machine.load_extension()  # or both would be the same
    return structure.looks()


def test_the_first_look_may_be_among_fake_tensors():
    structure.looks.cache_clear()
    with FakeTensorMode():
        assert structure.looks() is machine.load_extension()


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
def test_identities(look, name):
    one, two = object(), object()
    dicts = [{"a": one, "b": two}, {"a": one, "b": two}, {}]
    before = look.identities(dicts)
    dicts[0] |= {"a": one}
    assert look.identities(dicts) == before
    CHANGES[name](dicts)
    assert look.identities(dicts) != before


def test_classes_and_sizes(look):
    module, dicts = nn.Linear(2, 2), [{}, {"a": 1}]
    assert look.classes([module]) == look.classes([nn.Linear(3, 3)]) != look.classes([nn.Identity()])
    before = look.sizes(dicts)
    dicts[1]["a"] = 2
    assert look.sizes(dicts) == before
    dicts[0]["a"] = 2
    assert look.sizes(dicts) != before
    assert look.any_full(dicts)
    assert not look.any_full([{}, {}])
    assert not look.any_full([])


def test_items_of_a_name(look):
    dicts = [{"training": False}, {"training": True}, {"other": 1}]
    assert look.having(dicts, "training") == b"\1\1\0"
    assert look.any_item(dicts, "training")
    assert not look.any_item(dicts[::2], "training")


def test_same_items(look):
    nan, odd = float("nan"), Unlike()
    dicts, names = [{"a": 1}, {"a": nan}, {}, {"a": odd}, {"a": (2, 3)}], ["a", "a", "a", "a", "a"]
    assert look.same_items(dicts, names, [1, nan, None, odd, (2, 3)])
    assert look.same_items(dicts, names, [1.0, nan, None, odd, (2, 3)])
    for i, other in enumerate([2, 0.0, 5, None, (2, 4)]):
        if i != 3:
            values = [1, nan, None, odd, (2, 3)]
            values[i] = other
            assert not look.same_items(dicts, names, values)
    with pytest.raises(RuntimeError, match="is compared"):
        look.same_items(dicts, names, [1, nan, None, object(), (2, 3)])


def test_versions(look):
    tensors = [
        torch.zeros(2),
        nn.Parameter(torch.zeros(2)),
        None,
        torch.zeros(2).as_subclass(Odd),
        torch.zeros(1),
    ]
    before = look.contents(tensors)[0]
    assert look.contents(tensors)[0] == before
    for tensor in filter(lambda tensor: tensor is not None, tensors):
        tensor.detach().add_(1)
        assert look.contents(tensors)[0] != before
        before = look.contents(tensors)[0]
    tensors[2] = torch.zeros(1)
    assert look.contents(tensors)[0] != before


def test_inference_tensors(look):
    with torch.inference_mode():
        tensors = [torch.zeros(1), torch.zeros(1, 2)]
    before = look.contents([torch.zeros(1), *tensors]), look.contents(tensors)
    assert look.contents(tensors) == before[1]
    with torch.inference_mode():
        tensors[1].add_(1)
    assert look.contents(tensors)[0] == before[1][0]
    assert look.contents(tensors)[1] != before[1][1]


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
def test_written_numbers(look, name, dtype):
    """All numbers, the first, and the last; the same bits are no change, those of NaN neither."""
    numbers = torch.randn(8200).mul(40).clamp(-99, 99)
    if dtype.is_floating_point and dtype.itemsize > 1:
        numbers[::3] = float("nan")
    numbers = numbers.abs() if dtype in (torch.bool, torch.uint8) else numbers
    tensor = LAYOUTS[name](numbers.to(dtype))
    tensors = [torch.zeros(3), tensor, None, torch.zeros(700)]
    before = look.contents(tensors)
    assert look.contents(tensors) == before
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    first = tensor.storage_offset()
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    for written in (memory, memory[first * dtype.itemsize], memory[last * dtype.itemsize]):
        written.bitwise_xor_(1)
        facts, sample = look.contents(tensors)
        assert facts == before[0]
        assert sample != before[1]
        written.bitwise_xor_(1)
        assert look.contents(tensors) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_turned_signs(look, dtype):
    """Each number has the same bit has changed."""
    tensor = torch.randn(5000, dtype=dtype)
    before = look.contents([tensor])
    tensor.data.neg_()
    assert look.contents([tensor]) != before


def test_tensors_without_numbers(look):
    tensors = [torch.zeros(0), torch.zeros(3, 0, 2), torch.zeros(2, 3, device="meta"), torch.tensor(1.0)]
    before = look.contents(tensors)
    assert look.contents(tensors) == before
    tensors[-1].data.add_(1)
    assert look.contents(tensors)[1] != before[1]
    assert look.contents([]) == look.contents([])


@pytest.mark.parametrize(("share", "most_missed"), [(0.01, 0.33), (0.1, 0.01), (1.0, 0.0)])
def test_how_often_the_sample_misses_a_change(look, share, most_missed):
    """Numbers at random: 0.99¹²⁸ = 28 % are expected for one in a hundred."""
    tensors = [torch.randn(10_000 + 400 * i) for i in range(400)]
    before = samples_of(look, tensors)
    for tensor in tensors:
        places = torch.randperm(tensor.numel())[: int(share * tensor.numel())]
        tensor.data[places] += 1
    missed = [after == each for after, each in zip(samples_of(look, tensors), before, strict=True)]
    assert len(missed) == 400
    assert sum(missed) <= 400 * most_missed


def samples_of(look, tensors):
    """Returns the sample of each tensor."""
    sample = look.contents(tensors)[1]
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
def test_layouts(look, name):
    tensors = [torch.zeros(3), torch.zeros(4, 4), torch.zeros(0, 2), torch.tensor(1.0)]
    kept = [tensor.detach() for tensor in tensors]
    before = look.layouts(tensors)
    tensors[1].add_(1)
    assert look.layouts(tensors) == before == look.layouts(kept)
    MOVES[name](tensors[1])
    assert look.layouts(tensors) != before


def test_arguments_of_the_extension():
    extension = machine.load_extension()
    for function in (extension.identities, extension.sizes, extension.any_full):
        with pytest.raises(TypeError, match="expected a list of dicts"):
            function([{}, 1])
    with pytest.raises(TypeError, match="expected a list of dicts"):
        extension.having([()], "a")
    with pytest.raises(ValueError, match="expected lists of one length"):
        extension.same_items([{}], ["a"], [])
    for function in (extension.contents, extension.layouts):
        with pytest.raises(AttributeError):
            function([torch.zeros(1), 1])


def test_without_an_extension_or_with_an_unknown_torch(monkeypatch):
    monkeypatch.setattr(machine, "has_extension", lambda: False)
    assert structure.looks.__wrapped__() is structure.InPython
    monkeypatch.undo()
    assert torch.ops.cvt_kernels.holds_pointer(0, torch.zeros(1)) is False
    monkeypatch.setattr(torch.Tensor, "_cdata", 0, raising=False)
    assert structure.looks.__wrapped__() is structure.InPython


def test_asking_keeps_no_reference():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    watched, weight = structure.Structure(module, list(module)), module[0].weight
    count = sys.getrefcount(weight), sys.getrefcount(module[0])
    for _ in range(100):
        assert not watched.is_changed()
        structure.looks().layouts([weight])
        structure.looks().contents([weight])
    assert (sys.getrefcount(weight), sys.getrefcount(module[0])) == count
    module[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert watched.is_changed()
