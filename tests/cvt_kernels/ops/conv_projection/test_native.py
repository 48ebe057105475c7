"""The CPU kernels of conv_projection against the reference."""

import shutil
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import backends, machine, reference
from tests.checks import (
    assert_accurate,
    compiler,
    not_built,
    recorded_operators,
    run_on_instruction_set,
    run_sanitized,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CVT = ((3, 1, 1, 1), (3, 2, 1, 1), (3, 2, 1, 1))  # of q, k, v: kernel, stride, padding, dilation

# Where a compiler was at hand and the extension is missing all the same, these tests fail.
pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@pytest.fixture(autouse=True)
def _native():
    with ck.use_backend("native"), torch.no_grad():
        yield


def make_branch(channels, geometry, dtype=torch.float64, norm=None):
    """Returns a branch of random parameters in ``dtype``, those of BatchNorm in ``norm``."""
    kernel, stride, padding, dilation = geometry
    weight = torch.randn(channels, 1, kernel, kernel, dtype=torch.float64)
    gamma, beta, mean = torch.randn(3, channels, dtype=torch.float64).unbind()
    variance = torch.rand(channels, dtype=torch.float64) + 0.5
    norms = [t.to(norm or dtype) for t in (gamma, beta, mean, variance)]
    return ck.ConvBatchNorm(
        weight.to(dtype), *norms, stride=stride, padding=padding, dilation=dilation, eps=1e-3
    )


def make_x(grid, channels, *, class_token=False, batch=2, dtype=torch.float64):
    return torch.randn(batch, grid[0] * grid[1] + class_token, channels, dtype=torch.float64).to(dtype)


def as_double(branch):
    return branch._replace(
        **{f: t.double() for f in branch._fields[:5] if (t := getattr(branch, f)) is not None}
    )


def run(function, x, grid, branches):
    return function(x, grid, branches, training=False)


def exactly(x, grid, branches):
    return run(reference.conv_projection, x.double(), grid, [as_double(branch) for branch in branches])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("grid", "channels", "class_token"),
    [((56, 56), 64, False), ((14, 14), 384, True), ((28, 20), 192, False), ((7, 9), 37, True)],
    ids=str,
)
def test_accuracy(dtype, grid, channels, class_token):
    norm = torch.promote_types(dtype, torch.float32)  # float32 beside half precision, as in most models
    branches = [make_branch(channels, geometry, dtype, norm) for geometry in CVT]
    x = make_x(grid, channels, class_token=class_token, dtype=dtype)
    ours, theirs = (run(f.conv_projection, x, grid, branches) for f in (ck, reference))
    for got, same_dtype, exact in zip(ours, theirs, exactly(x, grid, branches), strict=True):
        if dtype == torch.float64:  # in which the reference is not exact
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
        else:
            assert_accurate(got, same_dtype, exact)


@settings(max_examples=80, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 19)),
    channels=st.integers(1, 70),
    batch=st.integers(0, 3),
    class_token=st.booleans(),
    geometries=st.lists(
        st.one_of(
            st.sampled_from(CVT),
            st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(0, 4), st.integers(1, 3)),
        ),
        min_size=1,
        max_size=3,
    ),
    dtype=st.sampled_from((*DTYPES, torch.float64)),
    layout=st.sampled_from(("contiguous", "sliced", "transposed", "expanded", "offset", "channels")),
)
def test_any_shape_and_strides(grid, channels, batch, class_token, geometries, dtype, layout):
    branches = [make_branch(channels, geometry, dtype) for geometry in geometries]
    branches = [branch for branch in branches if min(branch.output_grid(grid)) > 0]
    branches.append(make_branch(channels, (3, 2, 1, 1), dtype)._replace(bn_weight=None, bn_bias=None))
    x = make_x(grid, channels, class_token=class_token, batch=batch, dtype=dtype)
    x = {
        "contiguous": lambda t: t,
        "sliced": lambda t: torch.cat([t, t], 1)[:, t.shape[1] :],
        "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "expanded": lambda t: t[:1].expand(t.shape),
        "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
        "channels": lambda t: t.mT.contiguous().mT,
    }[layout](x)
    ours = run(ck.conv_projection, x, grid, branches)
    for got, same in zip(ours, run(ck.conv_projection, x.contiguous(), grid, branches), strict=True):
        assert torch.equal(got, same)
        assert got.is_contiguous()
    # Not the accuracy rule: on a handful of values PyTorch's error may be 0 by luck.
    epsilon = 64 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps + torch.finfo(dtype).eps
    for got, exact in zip(ours, exactly(x, grid, branches), strict=True):
        assert got.shape == exact.shape
        scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=epsilon * scale)


def test_a_mean_of_many_deviations():
    """Folded into the shift, it would cancel against the sum of products."""
    branch = make_branch(32, CVT[0], torch.float32)._replace(
        running_mean=torch.full((32,), 1e4), running_var=torch.full((32,), 1e-4)
    )
    weight = torch.zeros(32, 1, 3, 3)
    weight[:, :, 1, 1] = 1
    x = make_x((8, 8), 32, dtype=torch.float32) * 1e-2 + 1e4
    branches = [branch._replace(weight=weight)]
    ours, theirs = (run(f.conv_projection, x, (8, 8), branches)[0] for f in (ck, reference))
    assert_accurate(ours, theirs, exactly(x, (8, 8), branches)[0], factor=1)


def test_nan_and_inf_reach_their_neighbors_only():
    branches = [make_branch(20, geometry, torch.float32) for geometry in CVT]
    x = make_x((6, 7), 20, dtype=torch.float32)
    x[0, 9, 3], x[1, 20, 4] = torch.nan, torch.inf
    ours, theirs = (run(f.conv_projection, x, (6, 7), branches) for f in (ck, reference))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_image_is_the_same_in_any_batch(dtype):
    branches = [make_branch(65, geometry, dtype) for geometry in CVT]
    x = make_x((9, 11), 65, class_token=True, batch=3, dtype=dtype)
    alone = [run(ck.conv_projection, image[None], (9, 11), branches) for image in x]
    for whole, *parts in zip(run(ck.conv_projection, x, (9, 11), branches), *alone, strict=True):
        assert torch.equal(whole, torch.cat(parts))


# Training ---------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """The results of a call, for one pattern of output gradients."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    statistics: list[torch.Tensor]
    counts: list[torch.Tensor | None]


def live(branch, dtype=None):
    """Returns a copy of a branch whose parameters want gradients."""
    tensors = {f: t.clone() for f in branch._fields[:6] if (t := getattr(branch, f)) is not None}
    if dtype is not None:
        tensors = {f: t.to(dtype) if t.is_floating_point() else t for f, t in tensors.items()}
    parameters = {f: tensors[f].requires_grad_() for f in branch._fields[:3] if f in tensors}
    return branch._replace(**{**tensors, **parameters})


def train(function, x, grid, branches, *, training=True, dtype=None):
    x = x.to(dtype or x.dtype).detach().requires_grad_()
    branches = [live(branch, dtype) for branch in branches]
    with torch.enable_grad():
        outs = function(x, grid, branches, training=training)
        patterns = [(torch.arange(out.numel()) % 17 - 7.0).view_as(out).to(out.dtype) for out in outs]
        leaves = [x, *(t for branch in branches for t in branch[:3] if t is not None)]
        gradients = torch.autograd.grad(outs, leaves, patterns)
    statistics = [t for branch in branches for t in branch[3:5] if t is not None]
    counts = [branch.num_batches_tracked for branch in branches]
    return Results([out.detach() for out in outs], list(gradients), statistics, counts)


def assert_trains(x, grid, branches, **how):
    ours, theirs = (train(f.conv_projection, x, grid, branches, **how) for f in (ck, reference))
    if x.dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        return
    exact = train(reference.conv_projection, x, grid, branches, dtype=torch.float64, **how)
    assert_results(ours, theirs, exact)


def assert_results(ours, theirs, exact):
    assert ours.counts == theirs.counts
    for factor, results in zip((2, 3, 2), zip(ours[:3], theirs[:3], exact[:3], strict=True), strict=True):
        for got, same_dtype, expected in zip(*results, strict=True):
            assert got.dtype == same_dtype.dtype
            assert_accurate(got, same_dtype, expected, factor=factor, floor=4)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("grid", "channels", "class_token", "batch", "geometries"),
    [
        ((14, 13), 100, True, 3, CVT),
        ((28, 9), 37, False, 1, CVT),
        ((5, 6), 20, True, 2, ((5, 3, 4, 2), (2, 1, 0, 1), (1, 1, 3, 1), (4, 2, 6, 1), (3, 1, 2, 2))),
        ((1, 3), 5, False, 2, CVT[:1]),
    ],
    ids=str,
)
def test_training(dtype, training, grid, channels, class_token, batch, geometries):
    norm = torch.promote_types(dtype, torch.float32)
    branches = [make_branch(channels, geometry, dtype, norm) for geometry in geometries]
    branches[0] = branches[0]._replace(momentum=None, num_batches_tracked=torch.tensor(3))
    branches[-1] = branches[-1]._replace(bn_weight=None, running_mean=None, running_var=None)
    x = make_x(grid, channels, class_token=class_token, batch=batch, dtype=dtype)
    assert_trains(x, grid, branches, training=training)


def test_training_on_a_mean_of_many_deviations():
    """Without padding, so that the mean of every output is large; sums of squares would lose all digits."""
    branches = [make_branch(20, (3, stride, 0, 1), torch.float32) for stride in (1, 2)]
    branches = [branch._replace(weight=branch.weight.abs()) for branch in branches]
    assert_trains(make_x((16, 16), 20, dtype=torch.float32) + 1e3, (16, 16), branches)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["bn_bias"], ["x", "bn_weight"]], ids=" ".join)
def test_gradients_where_only_some_are_wanted(wanted):
    """The others are frozen; gradients of the outputs lie in another order, and one is absent."""
    x, branches = make_x((4, 5), 6), [make_branch(6, geometry) for geometry in CVT]
    found = []
    for function in (ck.conv_projection, reference.conv_projection):
        leaf = x.clone().requires_grad_("x" in wanted)
        own = [live(branch) for branch in branches]
        for tensor in (t for b in own for f, t in zip(b._fields[:3], b[:3], strict=True) if f not in wanted):
            tensor.requires_grad_(False)
        with torch.enable_grad():
            q, _, v = function(leaf, (4, 5), own, training=True)
            (q.mT * torch.linspace(0, 1, q.numel()).view_as(q.mT)).sum().backward(retain_graph=True)
            v.backward(v.detach()[:1, :1].expand_as(v))
        found.append([t.grad for t in (leaf, *(t for b in own for t in b[:3]))])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_training_under_autocast():
    x = make_x((6, 6), 16, dtype=torch.float32)
    branches = [make_branch(16, geometry, torch.float32) for geometry in CVT]
    doubles = x.double(), (6, 6), [as_double(branch) for branch in branches]
    exact = train(reference.conv_projection, *doubles)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (train(f.conv_projection, x, (6, 6), branches) for f in (ck, reference))
        kept = train(ck.conv_projection, *doubles)
    assert_results(ours, theirs, exact)
    torch.testing.assert_close(kept, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_gives_the_same_bits_whatever_the_number_of_threads(dtype):
    branches = [make_branch(65, geometry, dtype) for geometry in CVT]
    x = make_x((9, 11), 65, class_token=True, batch=7, dtype=dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(train(ck.conv_projection, x, (9, 11), branches))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0)


def test_compiled_training():
    torch.compiler.reset()
    branches = [make_branch(24, geometry, torch.float32) for geometry in CVT]
    x = make_x((5, 6), 24, class_token=True, dtype=torch.float32)
    compiled = torch.compile(ck.conv_projection, fullgraph=True, backend="aot_eager")
    for batch in (x, torch.cat([x, x])):
        eager, traced = (train(f, batch, (5, 6), branches) for f in (ck.conv_projection, compiled))
        torch.testing.assert_close(eager, traced, rtol=0, atol=0)


def test_the_extension_trains():
    """The tests above would pass with a silent reference too."""
    x, branches = make_x((4, 4), 8), [make_branch(8, geometry) for geometry in CVT]
    with recorded_operators() as called:
        train(ck.conv_projection, x, (4, 4), branches)
    assert "aten.convolution.default" not in called
    names = [f"cvt_kernels.conv_projection_{name}.default" for name in ("moments", "inference", "gradients")]
    assert [name for name in called if name.startswith("cvt_kernels.")] == names


def test_operators_of_training_check_what_they_would_read():
    x, branch = make_x((4, 5), 6, dtype=torch.float32), make_branch(6, CVT[0], torch.float32)
    ops = torch.ops.cvt_kernels
    norms = [branch.bn_weight, *branch[3:5]]

    def call(dout=x, x=x, norms=norms, eps=(1e-5,), constant=(0,)):
        return ops.conv_projection_gradients(
            [dout], x, 4, 5, [branch.weight], norms, [1, 1, 1], list(eps), list(constant)
        )

    assert call()[0].shape == x.shape
    for changes, message in (
        ({"dout": x[:, 1:]}, "douts: got .*, expected the shape of the output"),
        ({"dout": x.double()}, "in the dtype of x"),
        ({"x": x[:0], "dout": x[:0]}, "x: got .*, expected at least one image"),
        ({"norms": [None, branch.running_mean, None]}, "a mean and a variance"),
        ({"norms": [norms[0].double(), *norms[1:]]}, "scale: got float64 .*, expected an accumulator"),
        ({"norms": [norms[0][:5], *norms[1:]]}, r"scale: got float32 \(5\), expected \(channels,\)"),
        ({"constant": ()}, "constant: got 0 of them, expected 1"),
        ({"eps": ()}, "eps: got 0 of them, expected 1"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**changes)
    with pytest.raises(RuntimeError, match="geometry: got 2 of them, expected 3"):
        ops.conv_projection_moments(x, 4, 5, [branch.weight], [1, 1])
    with pytest.raises(RuntimeError, match=r"x: got .*, expected at least one image"):
        ops.conv_projection_moments(x[:0], 4, 5, [branch.weight], [1, 1, 1])


# The backend ------------------------------------------------------------------------------------------------


def test_refusals():
    from cvt_kernels.ops.conv_projection import native

    x, branch = make_x((20, 20), 4), make_branch(4, CVT[0])
    bind = backends.operators["conv_projection"].bind
    for convs, message in (
        (make_branch(4, (17, 1, 0, 1)), "has kernels of up to 16×16, not 17×17"),
        (branch._replace(running_mean=None, running_var=None), "the batch is empty"),
    ):
        assert native.why_unsupported(bind(x[:0], (20, 20), [convs], training=False)) == message
    with torch.enable_grad():
        wanted = bind(x[:0].requires_grad_(), (20, 20), [branch], training=False)
        assert native.why_unsupported(wanted) == "the batch is empty"
    shared = [branch._replace(process_group=object())]
    processes = "does not take the statistics of a batch over processes"
    assert native.why_unsupported(bind(x, (20, 20), shared, training=True)) == processes
    assert native.why_unsupported(bind(x, (20, 20), shared, training=False)) is None


def test_operators_check_what_they_would_read():
    x, branch = make_x((4, 5), 6, dtype=torch.float32), make_branch(6, CVT[0], torch.float32)
    op = machine.load_extension() and torch.ops.cvt_kernels.conv_projection_inference

    def call(x=x, grid=(4, 5), weight=branch.weight, norms=branch[1:5], geometry=(1, 1, 1)):
        return op(x, *grid, [weight], list(norms), list(geometry), [1e-5])

    assert call()[0].shape == x.shape
    mean = branch.running_mean
    for changes, message in (
        ({"x": x[0]}, r"x: got float32 \(20, 6\), expected \(batch, tokens, channels\)"),
        ({"grid": (4, 6)}, "x: got .*, expected 4 · 6 tokens"),
        ({"weight": branch.weight[:5]}, r"weights: got .*, expected \(channels, 1, k, k\)"),
        ({"weight": branch.weight.double()}, "in the dtype of x"),
        ({"weight": torch.randn(6, 1, 17, 17)}, "a kernel of 1 to 16"),
        ({"norms": [None, None, mean[:5], mean]}, r"mean: got .*, expected \(channels,\)"),
        ({"norms": [None, None, mean, None]}, "a mean and a variance"),
        ({"norms": [None, mean.double(), mean, mean]}, "one dtype"),
        ({"norms": [mean, mean]}, "norms: got 2 of them, expected 4"),
        ({"geometry": (0, 1, 1)}, "geometry: got a stride of 0, expected 1 to 1048576"),
        ({"geometry": (1, 0, 3)}, "a grid that gives an output"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**changes)


INSTRUCTION_SETS = """
import torch, cvt_kernels as ck
x, convs, bn = torch.randn(2, 7 * 21 + 1, 37), [], [*torch.randn(3, 37).unbind(), torch.ones(37)]
for k, stride in ((3, 1), (3, 2), (5, 3)):
    convs.append(ck.ConvBatchNorm(torch.randn(37, 1, k, k), *bn, stride=stride, padding=1))
with ck.use_backend("native"), torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        own = [c._replace(**{f: getattr(c, f).to(dtype) for f in c._fields[:5]}) for c in convs]
        exact = [c._replace(**{f: getattr(c, f).double() for f in c._fields[:5]}) for c in own]
        got = ck.conv_projection(x.to(dtype), (7, 21), own, training=False)
        expected = ck.reference.conv_projection(x.to(dtype).double(), (7, 21), exact, training=False)
        for a, b in zip(got, expected):
            eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
            torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=128 * eps)
        pair = []
        for project, convs_of, kind in (
            (ck.conv_projection, own, dtype), (ck.reference.conv_projection, exact, torch.float64)
        ):
            leaf = x.to(dtype).to(kind).requires_grad_()
            with torch.enable_grad():
                outs = project(leaf, (7, 21), convs_of, training=True)
                patterns = [(torch.arange(out.numel()) % 17 - 7).view_as(out) for out in outs]
                total = sum((out.double() * pattern).sum() for out, pattern in zip(outs, patterns))
            pair.append(torch.autograd.grad(total, leaf)[0].double())
        assert (pair[0] - pair[1]).norm() < max(4 * torch.finfo(dtype).eps, 16 * eps) * pair[1].norm()
"""


@pytest.mark.parametrize("name", ["plain", "avx2", "avx512"])
def test_other_instruction_sets(name):
    run_on_instruction_set(name, INSTRUCTION_SETS)


@pytest.mark.sanitized
@pytest.mark.skipif(shutil.which(compiler()[0]) is None, reason="there is no C++ compiler")
def test_loops_stay_within_their_buffers(tmp_path):
    run_sanitized("conv_projection", tmp_path)
