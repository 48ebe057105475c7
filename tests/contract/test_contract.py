"""The contract of every operator on every backend that serves it here: one row of the table per test."""

import contextlib
import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import jvp, vmap
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.launch import launching
from cvt_kernels.ops.cards import laid_out
from cvt_kernels.tuning import tuner
from tests.checks import WIDEST, needs_float64, recorded_operators
from tests.contract.examples import (
    EXAMPLES,
    ROUNDING,
    WITHOUT_GRADIENTS,
    Example,
    assert_right,
    device_of,
    example,
    gradient_of,
    has_gradients,
    is_ours,
    pairs,
    run,
    run_guarded,
    same_bits,
    served,
    standards,
    tensors_of,
)

DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("offset", "sliced", "steps", "transposed", "expanded")


def not_reference(operator, backend):
    return backend != "reference"


def differentiable(operator, backend):
    return has_gradients(operator, backend) and backend != "reference"


def infer(made: Example) -> list[Tensor]:
    """Returns the results of an example without autograd."""
    return tuner._forward(made.public, made.call._replace(gradient=False).map(tuner._copied))


def tried(function):
    """Returns what a function returns and None, or None and why it refuses."""
    try:
        return function(), None
    except (ck.BackendUnavailable, ValueError) as error:
        return None, str(error)


def combined(chosen, *others):
    """Parametrizes by pairs of operator and backend and other values, in one parameter."""
    cases = [
        pytest.param(*pair.values, *more, marks=pair.marks, id="-".join((pair.id, *more)))
        for pair in pairs(chosen).args[1]
        for more in others[0](pair.values[0])
    ]
    return pytest.mark.parametrize(("operator", "backend", *others[1:]), cases)


def names(operator):
    return [(name,) for name in EXAMPLES[operator] if name not in ("empty", "many", "tiny")]


def names_or_dtypes(operator):
    """Returns one example in every dtype, and the others in float32."""
    return [*(("usual", dtype) for dtype in DTYPES), *((*name, "float32") for name in names(operator)[1:])]


def changed(operator):
    """Returns the usual example in two dtypes, and that of every other kind of block."""
    others = [(name, "bfloat16") for name in ("SegFormer", "PVT") if name in EXAMPLES[operator]]
    return [*(("usual", dtype) for dtype in DTYPES[:2]), *others]


def test_every_operator_has_examples():
    assert set(EXAMPLES) == set(backends.operators)
    assert all({"usual", "odd", "empty", "many", "tiny"} <= set(examples) for examples in EXAMPLES.values())


# Values and gradients -------------------------------------------------------------------------------------


@combined(not_reference, names_or_dtypes, "name", "dtype")
def test_values(operator, backend, name, dtype):
    assert_right(made := served(operator, backend, name, dtype=dtype), ours := run_guarded(made))
    assert all(out.is_contiguous() for out in ours.outputs if is_ours(operator, backend))
    first, planned = infer(made), infer(made)
    assert same_bits(first, planned)


@combined(differentiable, names_or_dtypes, "name", "dtype")
def test_gradients(operator, backend, name, dtype):
    made = served(operator, backend, name, dtype=dtype, gradient="all")
    if made.call.gradient:
        assert_right(made, run_guarded(made))


@pairs(not_reference)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(operator, backend, layout):
    """Inputs and gradients that are not contiguous, or do not begin at a multiple of 16 bytes."""
    gradient = gradient_of(operator, backend)
    dtype = "bfloat16" if layout == "offset" else "float32"
    made = served(
        operator, backend, "usual", dtype=dtype, layout=layout, gradient=gradient, upstream="transposed"
    )
    assert_right(made, run_guarded(made))


@pairs(not_reference)
def test_rows_that_lie_apart(operator, backend):
    """Chunks of the channels, whose aligned rows every kernel reads in place, by their strides."""
    made = served(
        operator, backend, "usual", dtype="float32", layout="chunk", gradient=gradient_of(operator, backend)
    )
    assert_right(made, run_guarded(made))


@pairs(not_reference)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_autocast(operator, backend, dtype):
    """Results and gradients have the dtypes of the reference there, whatever dtype is given."""
    gradient = gradient_of(operator, backend)
    with torch.autocast(device_of(operator, backend), torch.bfloat16):
        made = served(operator, backend, "usual", dtype=dtype, gradient=gradient)
        assert_right(made, run(made), dtype=torch.bfloat16)
        first, planned = infer(made), infer(made)
    assert same_bits(first, planned)


@pairs()
def test_no_images_or_rows(operator, backend):
    """Results and gradients are empty or zeros; kernels that are requested alone may refuse."""
    gradient = gradient_of(operator, backend)
    made = example(operator, backend, "empty", gradient=gradient)
    ours, refusal = tried(lambda: run(made))
    if ours is None:
        assert re.search("empty|no rows", refusal)
        return
    same, _ = next(standards(made))
    assert [(t.shape, t.dtype) for t in ours.outputs] == [(t.shape, t.dtype) for t in same.outputs]
    assert not any(gradient.any() for gradient in ours.gradients)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pairs(lambda operator, backend: is_ours(operator, backend) and operator not in ROUNDING)
@pytest.mark.parametrize("values", ["nan", "infinite"])
def test_numbers_that_are_not_finite_reach_what_they_reach_by_pytorch(operator, backend, values):
    made = served(operator, backend, "usual", values=values)
    for out, expected in zip(infer(made), infer(made._replace(backend="reference")), strict=True):
        is_finite = expected.isfinite()
        assert torch.equal(out.isfinite(), is_finite)
        torch.testing.assert_close(out[is_finite], expected[is_finite], rtol=1e-3, atol=1e-3)


@pairs(lambda operator, backend: backend == "cpu")
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_an_image_is_the_same_alone(operator, backend, dtype):
    made = served(operator, backend, "many", dtype=dtype)
    first = backends.operators[operator].sample(0, made.call.record)
    alone = infer(made._replace(call=made.call._replace(record=first)))
    assert all(torch.equal(one, out[: len(one)]) for one, out in zip(alone, infer(made), strict=True))


@pairs()
def test_arguments_stay_as_they_are(operator, backend):
    """Nothing is changed in place, and no result lies in the memory of an argument."""
    made = served(operator, backend, "usual", gradient=gradient_of(operator, backend))
    given = made.call.tensors()
    before, versions = [t.detach().clone() for t in given], [t._version for t in given]
    ours = run(made, call=made.call)
    assert same_bits(before, given)
    assert versions == [t._version for t in given]
    places = {t.untyped_storage().data_ptr() for t in given}
    assert places.isdisjoint(t.untyped_storage().data_ptr() for t in (*ours.outputs, *ours.gradients))
    assert all(out.is_contiguous() for out in ours.outputs if is_ours(operator, backend))


@combined(lambda operator, backend: backend not in ("reference", "triton"), changed, "name", "dtype")
def test_a_tensor_that_changes_counts(operator, backend, name, dtype):
    """Packed copies are made anew. In float32 those of vectors may be views, which need not be."""
    made = served(operator, backend, name, dtype=dtype)
    call = made.call.map(tuner._copied)
    for tensor in call.tensors():
        if tensor.dtype != torch.int64:  # an index
            before = tensor.clone()
            run(made, call=call)
            tensor.neg_() if tensor.dtype == torch.int8 else tensor.mul_(1.25)
            assert_right(made._replace(call=call), run(made, call=call))
            tensor.copy_(before)


@pairs(lambda operator, backend: "inplace=True" in EXAMPLES[operator])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_in_place(operator, backend, dtype):
    made = served(operator, backend, "inplace=True", dtype=dtype)
    expected = run(served(operator, backend, "inplace=True", dtype=dtype, inplace=False)).outputs
    call = made.call.map(tuner._copied)
    changed = getattr(call.record, "residual", call.record.x)
    version = changed._version
    with torch.no_grad():
        outputs = tensors_of(made.public(call.record))
    assert outputs[0] is changed
    assert changed._version > version
    assert same_bits(outputs, expected)
    wanted = made.call.map(lambda tensor: tensor.clone().requires_grad_(tensor.is_floating_point()))
    strided = made.call.map(lambda t: laid_out(t, "transposed") if t.shape == changed.shape else t)
    with pytest.raises(ValueError, match="is not contiguous"):
        made.public(strided.record)
    with pytest.raises(ValueError, match="inplace: got True where a gradient is wanted"):
        made.public(wanted.record)


@pairs(not_reference)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_the_same_bits_every_time(operator, backend, dtype):
    """Results depend neither on the number of threads nor on where tensors lie."""
    gradient = gradient_of(operator, backend)
    name = "usual" if backend == "triton" else "many"
    threads = torch.get_num_threads()
    for each in (name, *({"training"} & {*EXAMPLES[operator]})):
        made, results = served(operator, backend, each, gradient=gradient, dtype=dtype), []
        try:
            for count in (1, 1) if backend == "triton" else (1, 2, 3, 2):
                torch.set_num_threads(count)
                results.append([*run(made), infer(made)])
        finally:
            torch.set_num_threads(threads)
        if not is_ours(operator, backend):  # PyTorch's may depend on the number
            results = results[1::2]
        assert all(same_bits(results[0], other) for other in results[1:])


@pairs(is_ours)
def test_the_kernels_do_the_work(operator, backend):
    """The other tests would pass with a silent reference too."""
    gradient = gradient_of(operator, backend)
    made = served(operator, backend, "usual", gradient=gradient)
    started, found = [], []

    def take(launch):
        started.append(launch.kernel.__name__)
        launch.start()

    call = made.call.map(tuner._copied)
    for work in (lambda: tuner._forward(made.public, call), lambda: run(made)):
        started.clear()
        with recorded_operators() as called, launching.intercepted_launches(take):
            work()
        ours = [name for name in called if name.startswith("cvt_kernels.")]
        found.append(len(ours) + len(started))
        # The extension's operators are C++, which PyTorch dispatches to its kernels for the tensors' device.
        found_ours = started if backend == "triton" else ours
        # A linear layer has kernels for its backward only.
        assert found_ours or (len(found) == 1 and (operator, backend) == ("linear", "triton"))
    forward, both = found
    assert (both > forward) == made.call.gradient


# Derivatives ----------------------------------------------------------------------------------------------


@needs_float64
@pairs(has_gradients)
def test_gradcheck(operator, backend):
    made = served(operator, backend, "tiny", dtype="float64", gradient="all")
    assert gradcheck(made.of_leaves, made.leaves(), fast_mode=True)


@pairs(differentiable)
def test_gradients_that_are_wanted_alone(operator, backend):
    """A gradient of one argument, or from one output, is as if all were wanted."""
    made = served(operator, backend, "tiny", gradient="all", dtype=str(WIDEST).removeprefix("torch."))
    leaves = made.leaves()
    outputs = tensors_of(made.public(made.call.record))
    douts = made.douts(outputs)

    def gradients(outputs, leaves, douts):
        return torch.autograd.grad(
            outputs, leaves, douts, retain_graph=True, allow_unused=True, materialize_grads=True
        )

    for i, expected in enumerate(gradients(outputs, leaves, douts)):
        given = [leaf.detach().requires_grad_(i == j) for j, leaf in enumerate(leaves)]
        alone = tensors_of(made.of_leaves(*given))
        reached = [pair for pair in zip(alone, douts, strict=True) if pair[0].requires_grad]
        (gradient,) = gradients([out for out, _ in reached], [given[i]], [dout for _, dout in reached])
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    parts = [gradients([out], leaves, [dout]) for out, dout in zip(outputs, douts, strict=True)]
    for i, expected in enumerate(gradients(outputs, leaves, douts)):
        torch.testing.assert_close(sum(part[i] for part in parts), expected, rtol=1e-5, atol=1e-5)


@pairs(lambda operator, backend: (operator, backend) in WITHOUT_GRADIENTS)
def test_gradients_are_refused(operator, backend):
    """Any argument may want one; without autograd the call is served all the same."""
    made = example(operator, backend, "usual", gradient="all")
    for i, tensor in enumerate(made.call.tensors()):
        if tensor.requires_grad:
            call = made.call.map(lambda t: t.detach())
            call.tensors()[i].requires_grad_()
            assert "gradient" in made._replace(call=call).why_refused()
    with torch.no_grad():
        assert not any(out.requires_grad for out in tensors_of(made.public(call.record)))


@pairs(lambda operator, backend: has_gradients(operator, backend) and backend != "reference")
def test_second_derivatives_are_those_of_the_reference(operator, backend):
    """A gradient penalty, with results whose own gradients are constants."""

    def penalty(backend):
        made = served(operator, backend, "tiny", gradient="all")
        outputs = tensors_of(made.public(made.call.record))
        gradients = torch.autograd.grad(
            sum(out.flatten() @ torch.linspace(1, 2, out.numel(), dtype=out.dtype) for out in outputs),
            made.leaves(), create_graph=True, allow_unused=True,
        )  # fmt: skip
        squares = [each.square().sum() for each in gradients if each is not None and each.requires_grad]
        if not squares:
            return gradients, []
        return gradients, torch.autograd.grad(sum(squares), made.leaves(), allow_unused=True)

    for actual, expected in zip(penalty(backend), penalty("reference"), strict=True):
        largest = max((each.abs().max() for each in expected if each is not None), default=0)
        for a, b in itertools.zip_longest(actual, expected):
            difference = (0 if a is None else a) - (0 if b is None else b)
            assert torch.as_tensor(difference).abs().max() <= 1e-4 * largest


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch.func itself
@pairs(not_reference)
@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_transforms_are_right_or_refused(operator, backend, transform):
    made = served(operator, backend, "usual")
    x = made.call.record[0]

    def function(backend, x):
        one = made._replace(backend=backend)
        return one.public(made.call.record._replace(**{made.call.record._fields[0]: x}))

    def transformed(backend):
        if transform == "vmap":
            return vmap(lambda x: function(backend, x))(torch.stack([x, x + 1]))
        return jvp(lambda x: function(backend, x), (x,), (torch.ones_like(x),))[1]

    if is_ours(operator, backend) and operator not in ROUNDING:
        match = r"\(torch.func\) are not supported|forward-mode differentiation is not supported"
        with pytest.raises(ck.BackendUnavailable, match=match):
            transformed(backend)
        return
    ours, refusal = tried(lambda: transformed(backend))
    if ours is None:
        assert re.search("not supported|vmap|forward mode|wants a gradient", refusal)
    else:
        torch.testing.assert_close(ours, transformed("reference"), rtol=1e-3, atol=1e-3)


# torch.compile --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def traced(made, monkeypatch):
    """Lets the block run as where torch.compile traces; skips what the backend refuses there."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        if (reason := made.why_refused()) is not None:
            pytest.skip(reason)
        yield


def compiled_names(operator):
    return [(name,) for name in ("usual", "training", "rows") if name in EXAMPLES[operator]]


@pytest.mark.spread  # the next test asks every kernel what compiling needs
@combined(lambda operator, backend: True, compiled_names, "name")
def test_compiled(operator, backend, name, monkeypatch):
    torch.compiler.reset()
    gradient = gradient_of(operator, backend)
    made = served(operator, backend, name, gradient=gradient)
    with traced(made, monkeypatch):
        pass
    compiled = torch.compile(made.public, fullgraph=True, backend="aot_eager", dynamic=False)
    eager = run(made)
    call = made.call.map(tuner._copied)
    outputs = tuner._forward(compiled, call)
    results = tuner._results(call, outputs, made.douts(outputs))
    if is_ours(operator, backend):
        assert same_bits(eager, results)
    eager, results = (pytree.tree_map_only(Tensor, _widened, list(each)) for each in (eager, results))
    torch.testing.assert_close(eager, results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "operator", [name for name in EXAMPLES if backends.operators[name].fused_by_compiler]
)
def test_compiled_without_a_request(operator):
    """PyTorch's operators may serve where the compiler fuses them, and compute the same."""
    torch.compiler.reset()
    made = served(operator, "reference", "usual")._replace(backend="auto")
    compiled = torch.compile(made.public, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        results, expected = (tensors_of(function(made.call.record)) for function in (compiled, made.public))
    for result, other in zip(map(_widened, results), map(_widened, expected), strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-4 if result.is_floating_point() else 1)


def _widened(tensor):
    """Returns a tensor in a dtype that ``assert_close`` takes, which float8 is not."""
    return tensor.double() if tensor.is_floating_point() else tensor


class _Seen(TorchDispatchMode):
    """Notes the calls of operators of this project, once per operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if getattr(function, "namespace", "") == "cvt_kernels":
            copies = [a.clone() if isinstance(a, Tensor) else a for a in args]
            self.calls.setdefault(function, (tuple(copies), dict(kwargs or {})))
        return function(*args, **(kwargs or {}))


def registered():
    """Returns every kernel's usual example, and of each operator's first kernel the others for make test."""
    cases, first = [], {}
    for pair in pairs(is_ours).args[1]:
        operator, backend = pair.values
        for (name,) in names(operator):
            if "float8" not in name:
                is_alike = name != "usual" and first.setdefault(operator, backend) != backend
                marks = [*pair.marks, *[pytest.mark.rest] * is_alike]
                cases.append(pytest.param(operator, backend, name, marks=marks, id=f"{pair.id}-{name}"))
    return cases


@pytest.mark.parametrize(("operator", "backend", "name"), registered())
def test_operators_are_registered_right(operator, backend, name, monkeypatch):
    """PyTorch's opcheck of those that torch.compile sees."""
    function, seen = backends.registered(operator, backend).load().function, _Seen()
    for gradient in {"none", gradient_of(operator, backend)}:
        made = served(operator, backend, name, gradient=gradient)
        with traced(made, monkeypatch), ck.use_backend(backend), seen:
            outputs = tuner._forward(function, made.call)
            tuner._results(made.call, outputs, made.douts(outputs))
    assert seen.calls, "torch.compile would trace into the kernels"
    for registered, (args, kwargs) in seen.calls.items():
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(registered, args, kwargs, test_utils=tests)


# Threads --------------------------------------------------------------------------------------------------


@pairs(lambda operator, backend: backend != "triton" or torch.cuda.is_available())
def test_two_threads_at_once(operator, backend):
    """Both get what one alone does. Triton's interpreter is for one thread."""
    made = served(operator, backend, "usual")
    expected = run(made)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: run(made), range(8)))
    assert all(same_bits(expected, result) for result in results)
