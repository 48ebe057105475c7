"""Planned launches: what plans take from a call, what they make, and which functions have none."""

import collections
import gc
import sys
import threading
import types
import weakref

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, launching
from tests.checks import precision_of
from tests.contract.examples import served, tensors_of

pytest.importorskip("triton")
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from cvt_kernels.ops.launch_plans import planned, planned_part

TRITON = [name for name, known in backends.implementations.items() if "triton" in known]
Call = collections.namedtuple("Call", ["x", "parts", "scale"])
Pair = collections.namedtuple("Pair", ["first", "second"])


class Kernel:
    """A kernel as Triton compiles it, and what becomes of it; both note how they are launched."""

    arg_names = ("x_ptr", "y_ptrs", "absent_ptr", "out_ptr", "rows", "BLOCK")

    def __init__(self):
        self.bound, self.direct = [], []

    def __getitem__(self, grid):
        def bind(*arguments, **options):
            self.bound.append((grid, arguments, options))
            return types.SimpleNamespace(run=self.run, function="function", packed_metadata="metadata")

        return bind

    def run(self, x, y, z, stream, function, metadata, launch_metadata, before, after, *arguments):
        assert (x, y, z) == self.bound[-1][0]
        assert (stream, function, metadata) == (None, "function", "metadata")  # None on the CPU
        assert launch_metadata is before is after is None
        self.direct.append(arguments)


@pytest.fixture
def kernel():
    return Kernel()


def launch(kernel, x, parts, out, grid=(3, 2)):
    launching.launch(
        kernel, grid, on=getattr(x, "base", x), options={"num_warps": 4},
        BLOCK=16, rows=7, x_ptr=x, y_ptrs=parts, absent_ptr=None, out_ptr=out,
    )  # fmt: skip


def make_call():
    x, *parts = torch.zeros(3, 16).unbind()
    return Call(x, tuple(parts), 0.5)


def test_a_plan_binds_once_and_passes_pointers_then(kernel):
    @planned
    def function(call):
        out = torch.empty_like(call.x, dtype=torch.float16)
        launch(kernel, call.x, call.parts, out)
        return out

    run = function.prepare(make_call())
    assert (kernel.bound, kernel.direct) == ([], [])
    call = make_call()
    out = run(*call)
    assert (out.shape, out.dtype) == (call.x.shape, torch.float16)
    options = {"enable_fp_fusion": True, "num_warps": 4}
    options |= {"launch_pdl": True} if launching.overlaps(call.x.device) else {}
    assert kernel.bound == [((3, 2, 1), (call.x, call.parts, None, out, 7, 16), options)]
    call = make_call()._replace(parts=(call.x, call.x))  # tensors may be one and the same
    out = run(*call)
    pointers = [t.data_ptr() for t in (call.x, *call.parts, out)]
    assert kernel.direct == [(pointers[0], (pointers[1], pointers[2]), None, pointers[3], 7, 16)]


@pytest.mark.parametrize("elements", [1, 2])
def test_tensors_of_another_alignment_are_left_to_the_function(kernel, elements):
    served = []

    @planned
    def function(call):
        served.append(call)
        out = torch.empty_like(call.x)
        launch(kernel, call.x, call.parts, out)
        return out

    run = function.prepare(make_call())
    served.clear()
    call = make_call()
    unaligned = torch.zeros(16 + elements)[elements:]
    for other in (call._replace(x=unaligned), call._replace(parts=(call.x, unaligned))):
        run(*other)
        assert served.pop() is not other
        assert kernel.bound.pop()[0] == (3, 2)  # as the function launches it
    run(*call)
    assert (served, len(kernel.bound)) == ([], 1)


def test_every_call_asks_for_the_current_stream(kernel, monkeypatch):
    streams = iter("abc")
    monkeypatch.setattr(launching, "stream_of", lambda on: next(streams))
    monkeypatch.setattr(kernel, "run", lambda x, y, z, stream, *others: kernel.direct.append(stream))

    @planned
    def function(call):
        launch(kernel, call.x, call.parts, call.x)
        return call.x

    run = function.prepare(make_call())
    for _ in range(3):
        run(*make_call())
    assert kernel.direct == ["b", "c"]  # the first call compiles


def test_the_stream_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    on = types.SimpleNamespace(is_cuda=True, get_device=lambda: 3)
    assert launching.stream_of(on) == 103


def test_hooks_on_launches_see_those_of_the_function(kernel, monkeypatch):
    served = []

    @planned
    def function(call):
        served.append(call)
        out = torch.empty_like(call.x)
        launch(kernel, call.x, call.parts, out)
        return out

    run, hook = function.prepare(make_call()), knobs.runtime.launch_enter_hook
    served.clear()
    hook.add(print)
    try:
        run(*make_call())
        assert len(served) == len(kernel.bound) == 1
    finally:
        hook.remove(print)
    run(*make_call())
    assert len(served) == 1
    hook.add(print)
    try:
        monkeypatch.delitem(sys.modules, "triton.knobs")  # as without Triton, where nobody has a hook
        run(*make_call())
    finally:
        hook.remove(print)
    assert len(served) == 1


def test_fields_may_have_any_name(kernel):
    @planned
    def function(call):
        out = torch.empty_like(call.stream)
        launch(kernel, call.stream, call.plan, out)
        return out

    named = collections.namedtuple("Named", ["stream", "plan", "torch"])
    run = function.prepare(named(*make_call()))
    first, call = named(*make_call()), named(*make_call())
    run(*first)
    assert kernel.bound[0][1][:2] == (first.stream, first.plan)
    out = run(*call)
    pointers = [t.data_ptr() for t in (call.stream, *call.plan, out)]
    assert kernel.direct == [(pointers[0], (pointers[1], pointers[2]), None, pointers[3], 7, 16)]


def test_results_in_the_place_of_an_argument_are_counted_as_changes(kernel):
    @planned
    def function(call):
        launch(kernel, call.x, call.parts, call.x)
        return call.x

    run, call = function.prepare(make_call()), make_call()
    version = call.x._version
    assert run(*call) is call.x
    assert call.x._version == version + 1
    with torch.inference_mode():
        call = make_call()
        assert run(*call) is call.x


def test_views_casts_several_launches_and_several_results(kernel):
    @planned
    def function(call):
        x, part = call.x.view(4, 4), call.parts[0].to(torch.bfloat16)
        between, out = torch.empty(4, 4), torch.empty(4, 4, dtype=torch.bfloat16)
        launch(kernel, x, (part,), between)
        launch(kernel, between, (part,), out.view(16), grid=(1,))
        return Pair(out.view(2, 8), call.parts[1])

    run, call = function.prepare(make_call()), make_call()
    call.parts[0].fill_(3.0)
    out = run(*call)
    assert type(out) is Pair
    assert (out.first.shape, out.first.dtype) == ((2, 8), torch.bfloat16)
    assert out.second is call.parts[1]
    (_, first, _), (_, second, _) = kernel.bound
    assert torch.equal(first[1][0], torch.full((16,), 3.0, dtype=torch.bfloat16))
    assert first[3] is second[0]
    assert second[1][0] is first[1][0]
    assert second[3].data_ptr() == out.first.data_ptr()


def test_descriptors_are_made_anew(kernel):
    @planned
    def function(call):
        matrix, out = call.x.view(2, 8), torch.empty(2, 8)
        described = [TensorDescriptor.from_tensor(each, [2, 4]) for each in (matrix, out)]
        launch(kernel, described[0], call.parts, described[1])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "current_device_of", lambda on: launching._NOTHING)
        run = function.prepare(make_call())
        for _ in range(2):
            call = make_call()
            out = run(*call)
            arguments = kernel.direct[-1] if kernel.direct else kernel.bound[-1][1]
            assert arguments[0].base.data_ptr() == call.x.data_ptr()
            assert arguments[3].base.data_ptr() == out.data_ptr()
            assert (arguments[0].shape, arguments[0].block_shape) == (torch.Size([2, 8]), [2, 4])
    reference = weakref.ref(call.x)
    del call, out, arguments
    kernel.bound.clear()
    kernel.direct.clear()
    gc.collect()
    assert reference() is None  # plans keep no tensor


@pytest.mark.parametrize(
    "work",
    [
        lambda call: call.x + 1,
        lambda call: torch.zeros_like(call.x),
        lambda call: call.x.clone(),
        lambda call: torch.empty(32)[2:18],  # not where Triton compiles for addresses of 16 bytes
        lambda call: call.x.view(torch.int32),
    ],
)
def test_functions_that_do_more_than_launch_are_not_planned(kernel, work):
    @planned
    def function(call):
        x = work(call)
        out = torch.empty_like(x)
        launch(kernel, x, call.parts, out)
        return out

    assert function.prepare(make_call()) is None


@pytest.mark.parametrize(
    "work",
    [
        lambda call: torch.empty(32)[16:],
        lambda call: torch.empty(4, 4).t(),
        lambda call: call.x.view(4, 4)[2:],
        lambda call: call.x.view(4, 4)[:2].to(torch.float64),
        lambda call: call.x.view(4, 4).t().to(torch.float64),
    ],
)
def test_views_anywhere_in_a_tensor_are_planned(kernel, work):
    @planned
    def function(call):
        out = torch.empty_like(call.x)
        launch(kernel, work(call), call.parts, out)
        return out

    run = function.prepare(make_call())
    for _ in range(2):
        call = make_call()._replace(x=torch.arange(16.0))
        run(*call)
    (_, (given, *_), _), expected = kernel.bound[0], work(call)
    assert (given.dtype, given.shape, given.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert "empty" in work.__code__.co_names or torch.equal(given, expected)
    assert kernel.direct[0][0] % 16 == 0


@torch.inference_mode()
def test_a_copy_is_no_view(kernel):
    """Operators that may return a view come as they are in inference mode."""

    @planned
    def function(call):
        x = call.x.contiguous()
        out = torch.empty_like(x)
        launch(kernel, x, call.parts, out)
        return out

    assert function.prepare(make_call()) is not None
    assert function.prepare(make_call()._replace(x=torch.zeros(32)[::2])) is None


def test_functions_without_a_launch_and_calls_with_other_tensors_are_not_planned(kernel):
    @planned
    def function(call):
        out = torch.empty_like(call.x)
        if call.scale:
            launch(kernel, call.x, call.parts, out)
        return out

    call = make_call()
    assert function.prepare(call._replace(scale=0.0)) is None
    assert function.prepare(call._replace(x=call.x[:0])) is None
    assert function.prepare(call._replace(x=call.x.as_subclass(type("Other", (torch.Tensor,), {})))) is None
    assert function.prepare(call) is not None


def test_launches_of_other_threads_go_on_while_one_plans(kernel):
    def start():
        x = torch.zeros(16)
        launch(kernel, x, (x,), x)

    @planned
    def function(call):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        out = torch.empty_like(call.x)
        launch(kernel, call.x, call.parts, out)
        return out

    assert function.prepare(make_call()) is not None
    assert len(kernel.bound) == 1


@pytest.mark.parametrize("operator", TRITON)
@torch.no_grad()
def test_every_operator_of_triton_kernels_is_planned(operator, starts):
    """The plan gives the bits that the backend's function gives, for other numbers too."""
    function = backends.registered(operator, "triton").load().function
    # PyTorch computes the embedding's convolution in float32, and products of the head's other maps, which no
    # plan has.
    settings = {"conv_embedding": {"dtype": "bfloat16"}, "segmentation_head": {"others": 0}}
    made = served(operator, "triton", "usual", channels=16, **settings.get(operator, {}))
    for factor in (1, 2, 3):
        call = made.call.map(lambda t, factor=factor: factor * t if t.is_floating_point() else t)
        with ck.use_backend("triton"):
            expected = function(call.record)
        pairs = zip(tensors_of(made.public(call.record)), tensors_of(expected), strict=True)
        for ours, same in pairs:
            assert (ours.dtype, ours.stride()) == (same.dtype, same.stride())
            assert torch.equal(ours, same)
    assert starts == [True, True]


# Parts of operators ---------------------------------------------------------------------------------------


def test_a_part_is_planned_for_each_key(kernel):
    """Its results may be views of what it allocates, None, and lists of these."""

    @planned_part
    def part(x, parts, scale, dtype):
        out = torch.empty(2, 3, dtype=dtype)
        launch(kernel, x, parts, out)
        first, second = out.unbind()
        return [first.view(3, 1), second], None, torch.empty_like(x)

    calls = [make_call() for _ in range(3)]
    results = [part(call.x, call.parts, 0.5, torch.float32) for call in calls]
    assert (len(kernel.bound), len(kernel.direct)) == (2, 1)  # as it is, compiled, and by pointers
    assert kernel.direct[0][0] == calls[2].x.data_ptr()
    for views, nothing, other in results:
        assert (views[0].shape, views[1].shape, nothing, other.shape) == ((3, 1), (3,), None, (16,))
        assert views[1].data_ptr() == views[0].data_ptr() + 12
        assert views[0].data_ptr() != results[0][0][0].data_ptr() or views is results[0][0]
    part(calls[0].x, calls[0].parts, 0.5, torch.float16)  # another setting
    part(torch.zeros(32)[::2], calls[0].parts, 0.5, torch.float32)  # another layout
    with precision_of(torch.backends.cuda.matmul, "tf32"):
        part(calls[0].x, calls[0].parts, 0.5, torch.float32)
    assert (len(kernel.bound), len(kernel.direct)) == (5, 1)


def test_a_part_that_computes_has_no_plan(kernel):
    @planned_part
    def part(x):
        launch(kernel, x, (x, x), x)
        return x + 1

    for _ in range(3):
        assert torch.equal(part(torch.ones(16)), torch.full((16,), 2.0))
    assert (len(kernel.bound), len(kernel.direct)) == (3, 0)


def test_launches_of_a_part_are_recorded(kernel):
    @planned_part
    def part(x):
        launch(kernel, x, (x, x), x)

    part(torch.zeros(16))
    with launching.recorded_launches(launching.Chip(90, 2)) as launches:
        part(torch.zeros(16))
    assert len(launches) == 1
    backends.forget()  # as after another launch configuration
    part(torch.zeros(16))
    assert (len(kernel.bound), len(kernel.direct)) == (2, 0)
