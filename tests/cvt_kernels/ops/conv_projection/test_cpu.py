"""The CPU kernels of conv_projection against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt_kernels import backends, machine, reference
from cvt_kernels.tuning import tuner
from tests.checks import assert_accurate, needs_extension, recorded_operators
from tests.contract.examples import assert_right, run
from tests.cvt_kernels.ops.agreement import assert_agrees, assert_agrees_on, made_of

DTYPES = "float32", "bfloat16", "float16", "float64"
STRIDES = 1, 2, 2  # of q, k, v

pytestmark = needs_extension


@pytest.fixture(autouse=True)
def _cpu():
    with ck.use_backend("cpu"):
        yield


def make_branch(channels, kernel=3, stride=1, dtype=torch.float32):
    """Returns a branch of random parameters."""
    weight, gamma, beta, mean = (torch.randn(channels, *n) for n in ((1, kernel, kernel), (), (), ()))
    tensors = [t.to(dtype) for t in (weight, gamma, beta, mean, torch.rand(channels) + 0.5)]
    return ck.ConvBatchNorm(*tensors, stride=stride, padding=kernel // 2, eps=1e-3)


def make(grid, channels, *, class_token=False, batch=2, dtype=torch.float32):
    """Returns tokens and the branches of q, k and v."""
    x = torch.randn(batch, grid[0] * grid[1] + class_token, channels).to(dtype)
    return x, [make_branch(channels, stride=stride, dtype=dtype) for stride in STRIDES]


def infer(function, x, grid, branches):
    with torch.no_grad():
        return function(x, grid, branches, training=False)


def sizes(grid, channels, **settings):
    return {"height": grid[0], "width": grid[1], "channels": channels, "mixed": True, **settings}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        sizes((56, 56), 64, class_token=False),
        sizes((14, 14), 384),
        sizes((28, 20), 192, class_token=False, branches=3),
        sizes((7, 9), 37, stride=2, branches=1),
    ],
    ids=str,
)
def test_accuracy(shape, dtype):
    assert_agrees("conv_projection", "cpu", **shape, dtype=dtype, batch=1, gradient="none")


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 9),
    width=st.integers(2, 19),
    channels=st.integers(1, 70),
    batch=st.integers(1, 3),
    class_token=st.booleans(),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 5),
    padding=st.integers(0, 4),
    dilation=st.integers(1, 3),
    branches=st.integers(1, 3),
    summands=st.integers(1, 2),
    bare=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(("contiguous", "sliced", "transposed", "permuted", "offset", "steps")),
)
def test_any_shape_and_strides(**settings):
    assert_agrees("conv_projection", "cpu", **settings)


def test_a_mean_of_many_deviations():
    """Folded into the shift, it would cancel against the sum of products."""
    x, (branch, *_) = make((8, 8), 32)
    weight = torch.zeros(32, 1, 3, 3)
    weight[:, :, 1, 1] = 1
    mean, variance = torch.full((2, 32), 1e4).unbind()
    branches = [branch._replace(weight=weight, running_mean=mean, running_var=variance * 1e-8)]
    x = x * 1e-2 + 1e4
    ours, theirs = (infer(f.conv_projection, x, (8, 8), branches)[0] for f in (ck, reference))
    doubles = [branches[0]._replace(**{f: getattr(branches[0], f).double() for f in branch._fields[:5]})]
    exact = infer(reference.conv_projection, x.double(), (8, 8), doubles)[0]
    assert_accurate(ours, theirs, exact, factor=1)


def test_nan_and_inf_reach_their_neighbors_only():
    x, branches = make((6, 7), 20)
    x[0, 9, 3], x[1, 20, 4] = torch.nan, torch.inf
    ours, theirs = (infer(f.conv_projection, x, (6, 7), branches) for f in (ck, reference))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_image_is_the_same_in_any_batch(dtype):
    x, branches = make((9, 11), 65, class_token=True, batch=3, dtype=getattr(torch, dtype))
    alone = [infer(ck.conv_projection, image[None], (9, 11), branches) for image in x]
    for whole, *parts in zip(infer(ck.conv_projection, x, (9, 11), branches), *alone, strict=True):
        assert torch.equal(whole, torch.cat(parts))


# Training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    "shape",
    [
        sizes((14, 13), 100, batch=3, statistics="averaged"),
        sizes((28, 9), 37, class_token=False, batch=1, statistics="none"),
        sizes((5, 6), 20, kernel=5, stride=3, padding=4, dilation=2, branches=3),
        sizes((5, 6), 20, kernel=2, padding=0, branches=1, bare=True),
        sizes((1, 3), 5, class_token=False, branches=1),
    ],
    ids=str,
)
def test_training(dtype, training, shape):
    assert_agrees("conv_projection", "cpu", **shape, dtype=dtype, training=training)


def test_training_on_a_mean_of_many_deviations():
    """Without padding, so that the mean of every output is large; sums of squares would lose all digits."""
    shape = sizes((16, 16), 20, padding=0, values="shifted")
    assert_agrees("conv_projection", "cpu", **shape, training=True)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_training_gives_the_same_bits_whatever_the_number_of_threads(dtype):
    made = made_of("conv_projection", "cpu", **sizes((9, 11), 65, batch=7), dtype=dtype, training=True)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(made))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [["x"], ["weight"], ["bn_bias"], ["x", "bn_weight"]], ids=" ".join)
def test_gradients_where_only_some_are_wanted(wanted):
    """The others are frozen; gradients of the outputs lie in another order, and one is absent."""
    x, branches = make((4, 5), 6, dtype=torch.float64)
    found = []
    for function in (ck.conv_projection, reference.conv_projection):
        leaf = x.clone().requires_grad_("x" in wanted)
        own = [
            branch._replace(
                **{f: getattr(branch, f).clone().requires_grad_(f in wanted) for f in branch._fields[:3]}
            )
            for branch in branches
        ]
        q, _, v = function(leaf, (4, 5), own, training=True)
        (q.mT * torch.linspace(0, 1, q.numel()).view_as(q.mT)).sum().backward(retain_graph=True)
        v.backward(v.detach()[:1, :1].expand_as(v))
        found.append([t.grad for t in (leaf, *(t for b in own for t in b[:3]))])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_training_under_autocast(dtype):
    """Float64 stays as it is there."""
    with torch.autocast("cpu", torch.bfloat16):
        made = made_of("conv_projection", "cpu", dtype=dtype, training=True)
        assert_right(made, run(made), dtype=torch.bfloat16)


def test_compiled_training():
    torch.compiler.reset()
    compiled = torch.compile(ck.conv_projection, fullgraph=True, backend="aot_eager")
    for batch in (1, 2):
        call = made_of("conv_projection", "cpu", batch=batch, training=True).call
        results = []
        for function in (ck.conv_projection, compiled):
            copied = call.map(tuner._copied)
            outs = function(*copied.record[:3], training=True)
            results.append(tuner._results(copied, list(outs), [out.detach().sin() for out in outs]))
        torch.testing.assert_close(*map(list, results), rtol=0, atol=0)


def test_the_extension_trains():
    """The tests above would pass with a silent reference too."""
    made = made_of("conv_projection", "cpu", training=True)
    with recorded_operators() as called:
        run(made)
    names = [f"cvt_kernels.conv_projection_{name}.default" for name in ("moments", "inference", "gradients")]
    assert [name for name in called if name.startswith("cvt_kernels.")] == names


def test_operators_of_training_check_what_they_would_read():
    x, (branch, *_) = make((4, 5), 6)
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
    from cvt_kernels.ops.conv_projection import cpu

    def why(x, branch, training=False):
        call = backends.operators["conv_projection"].bind(x, (4, 5), [branch], training=training)
        return cpu.why_unsupported(call)

    x, (branch, *_) = make((4, 5), 4)
    assert why(x, make_branch(4, kernel=17)) == "has kernels of up to 16×16, not 17×17"
    assert why(x[:0], branch._replace(running_mean=None, running_var=None)) == "the batch is empty"
    assert why(x[:0], branch) is None
    assert why(x[:0].requires_grad_(), branch) == "the batch is empty"
    shared = branch._replace(process_group=object())
    assert why(x, shared, training=True) == "does not take the statistics of a batch over processes"
    assert why(x, shared) is None


def test_operators_check_what_they_would_read():
    x, (branch, *_) = make((4, 5), 6)
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


@pytest.mark.parametrize("name", ["plain", "avx2", "avx512"])
def test_other_instruction_sets(name):
    shape = sizes((7, 21), 37)
    assert_agrees_on(
        name, "conv_projection", shape | {"training": True}, shape | {"kernel": 5, "stride": 3, "padding": 1}
    )
