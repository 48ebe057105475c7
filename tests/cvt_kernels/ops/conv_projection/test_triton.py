"""The Triton kernels of conv_projection, on a GPU or else in Triton's interpreter on CPU tensors."""

import contextlib
import copy
import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

import cvt_kernels as ck
from cvt.commands.compile import launches
from cvt_kernels import machine
from cvt_kernels.ops.conv_projection.triton import backward, common, forward, walk
from tests.checks import assert_accurate
from tests.cvt_kernels.test_reference import clone_buffers, modules, random_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REGION_KERNELS = ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input")
CVT = {"stride": 1, "padding": 1}, {"stride": 2, "padding": 1}, {"stride": 2, "padding": 1}


@pytest.fixture(autouse=True)
def _poison():
    """Fills new tensors with NaN, which stays where a kernel does not write what it should."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _wide_walks(monkeypatch):
    """Gives a walk's program all columns, for which the interpreter takes hardly more time than for two.

    Programs of the real width are tested in test_walk.py.
    """
    if DEVICE == "cpu":
        monkeypatch.setattr(walk, "_pairs", lambda needed, most: triton.next_power_of_2(needed))
        walk._plan.cache_clear()
        yield
        walk._plan.cache_clear()
    else:
        yield


def make(batch, grid, channels, class_tokens, *, branches=CVT, kernel_sizes=(3, 3, 3), dtype=torch.float64):
    x = torch.randn(batch, class_tokens + grid[0] * grid[1], channels, dtype=torch.float64)
    convs = [random_conv(channels, k, **b) for k, b in zip(kernel_sizes, branches, strict=True)]
    return x.to(DEVICE, dtype), [move(conv, dtype) for conv in convs]


def move(conv, dtype):
    def convert(t):
        return t.to(DEVICE, dtype) if t.is_floating_point() else t.to(DEVICE)

    return conv._replace(**{name: convert(t) for name, t in conv._asdict().items() if torch.is_tensor(t)})


def run(backend, x, grid, convs, training, *, double=False, function=ck.conv_projection):
    """Returns outputs, all gradients for a fixed pattern of output gradients, and running statistics."""
    if double:
        x, convs = x.double(), [move(conv, torch.float64) for conv in convs]
    x = x.detach().requires_grad_()
    live = [
        conv._replace(**{name: getattr(conv, name).detach().requires_grad_() for name in conv._fields[:3]})
        for conv in map(clone_buffers, convs)
    ]
    with ck.use_backend(backend):
        outs = function(x, grid, live, training=training)
    inputs = [x, *(t for conv in live for t in conv[:3])]
    patterns = [
        torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out).to(out.dtype) for out in outs
    ]
    gradients = torch.autograd.grad(outs, inputs, patterns)
    statistics = [t for conv in live for t in (conv.running_mean, conv.running_var)]
    assert all(conv.num_batches_tracked == 3 + training for conv in live)
    return list(outs), list(gradients), statistics


def assert_backends_agree(x, grid, convs, training):
    theirs = run("reference", x, grid, convs, training)
    ours = run("triton", x, grid, convs, training)
    if x.dtype == torch.float64:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        return
    exact = run("reference", x, grid, convs, training, double=True)
    for factor, kind in zip((2, 3, 2), range(3), strict=True):
        for a, b, c in zip(ours[kind], theirs[kind], exact[kind], strict=True):
            assert_accurate(a.detach(), b.detach(), c.detach(), factor=factor, floor=4)


# Tiles of the real size take the interpreter minutes; what they change is tested at small sizes below.
@pytest.mark.parametrize("stage", launches.stages("cvt_13"), ids=str)
def test_every_stage_of_cvt_13(stage):
    grid, channels, class_tokens, _ = stage
    x, convs = make(1, grid, channels, class_tokens, dtype=torch.float32)
    with wide_tiles(channels) if DEVICE == "cpu" else contextlib.nullcontext():
        if class_tokens or DEVICE == "cuda":  # training at the larger ones would take the interpreter long
            assert_backends_agree(x, grid, convs, True)
        assert_outputs_agree(x, grid, convs)


@contextlib.contextmanager
def wide_tiles(channels):
    """Makes every kernel take all channels at once, in large tiles."""
    wide = {"pixels": 256, "channels": 2 * triton.next_power_of_2(channels), "rows": 1}
    with contextlib.ExitStack() as stack:
        for name in REGION_KERNELS:
            config = replace(common.configuration(name, 90), **wide)
            stack.enter_context(common.overridden(name, config))
            config = replace(common.configuration(f"walk_{name}", 90), channels=wide["channels"])
            stack.enter_context(common.overridden(f"walk_{name}", config))
        yield


def assert_outputs_agree(x, grid, convs):
    """Compares the outputs of evaluation; the class token is copied exactly."""
    with ck.use_backend("triton"):
        ours = ck.conv_projection(x, grid, convs, training=False)
    theirs = ck.reference.conv_projection(x, grid, convs, training=False)
    doubled = [move(conv, torch.float64) for conv in convs]
    exact = ck.reference.conv_projection(x.double(), grid, doubled, training=False)
    class_tokens = x.shape[1] - grid[0] * grid[1]
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert_accurate(a, b, c, floor=4)
        assert torch.equal(a[:, :class_tokens], x[:, :class_tokens])


@settings(max_examples=2, deadline=None)
@given(st.data())
def test_odd_sizes(data):
    def draw(low, high):
        return data.draw(st.integers(low, high))

    grid, channels = (draw(1, 6), draw(1, 6)), data.draw(st.sampled_from([1, 3, 17]))
    ks = [data.draw(st.sampled_from([1, 3, 5])) for _ in range(draw(1, 2))]
    branches = [{"stride": draw(1, 7), "padding": draw(k // 2, 3), "dilation": draw(1, 2)} for k in ks]
    x, convs = make(2, grid, channels, draw(0, 1), branches=branches, kernel_sizes=ks)
    if all(min(conv.output_grid(grid)) >= 1 for conv in convs):
        assert_backends_agree(x, grid, convs, data.draw(st.booleans()))


@pytest.mark.parametrize(
    ("grid", "channels", "branches", "kernel_sizes"),
    [
        ((18, 5), 40, CVT, (3, 3, 3)),  # several strips and blocks of channels
        ((6, 5), 3, ({"stride": 3, "padding": 1},), (3,)),  # taps that are not known ahead
        ((6, 5), 3, ({"padding": 1}, {"stride": 3, "padding": 1}), (3, 3)),  # beside known ones
        ((6, 5), 3, ({"stride": 4, "padding": 1}, {"stride": 2, "padding": 1}), (3, 3)),
        ((4, 3), 3, ({"stride": 2, "padding": 3},), (7,)),
    ],
    ids=str,
)
def test_training(grid, channels, branches, kernel_sizes):
    dtype = torch.float32 if channels > 3 else torch.float64
    x, convs = make(1, grid, channels, 1, branches=branches, kernel_sizes=kernel_sizes, dtype=dtype)
    assert_backends_agree(x, grid, convs, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_beside_float32_batch_norm(dtype):
    x, convs = make(2, (4, 3), 8, 1, dtype=torch.float32)
    pairs = [modules(conv, 8).to(DEVICE) for conv in convs]
    for conv2d, _ in pairs:
        conv2d.to(dtype)
    outs = assert_trains_as_modules(x.to(dtype), (4, 3), pairs)
    assert all(out.dtype == dtype for out in outs)


def assert_trains_as_modules(x, grid, theirs, autocast=contextlib.nullcontext):
    """Compares a training step with that of pairs of nn.Conv2d and nn.BatchNorm2d; returns our outputs."""
    ours, exact = copy.deepcopy(theirs), [copy.deepcopy(pair).double() for pair in theirs]

    def by_kernels(x, pairs):
        branches = [ck.ConvBatchNorm.from_modules(*pair) for pair in pairs]
        with autocast(), ck.use_backend("triton"):
            return list(ck.conv_projection(x, grid, branches, training=True))

    def by_modules(x, pairs):
        class_tokens, pixels = x.split([x.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)
        image = pixels.transpose(1, 2).unflatten(2, grid)
        with autocast() if x.dtype != torch.float64 else contextlib.nullcontext():
            outs = [pair(image).flatten(2).transpose(1, 2) for pair in pairs]
        return [torch.cat([class_tokens.to(out.dtype), out], dim=1) for out in outs]

    def step(function, x, pairs):
        x = x.detach().requires_grad_()
        outs = function(x, pairs)
        patterns = [
            torch.linspace(-1, 1, out.numel(), device=DEVICE).bfloat16().view(out.shape).to(out.dtype)
            for out in outs
        ]
        gradients = torch.autograd.grad(
            outs, [x, *(p for pair in pairs for p in pair.parameters())], patterns
        )
        statistics = [t for _, bn in pairs for t in (bn.running_mean, bn.running_var)]
        return [out.detach() for out in outs], gradients, statistics

    results = step(by_kernels, x, ours), step(by_modules, x, theirs), step(by_modules, x.double(), exact)
    for factor, kind in zip((2, 3, 2), zip(*results, strict=True), strict=True):
        for tensors in zip(*kind, strict=True):
            assert_accurate(*tensors, factor=factor, floor=4)
    return results[0][0]


def test_a_huge_mean_beside_a_small_deviation():
    """Σy² − (Σy)²/n would be left with nothing there, and β − mean · scale with little."""
    x = 1e3 + torch.randn(2, 36, 32, device=DEVICE)
    conv = move(random_conv(32, 1), torch.float32)
    conv = conv._replace(weight=torch.ones_like(conv.weight))
    ours, theirs = (run(backend, x, (6, 6), [conv], True) for backend in ("triton", "reference"))
    exact = run("reference", x, (6, 6), [conv], True, double=True)
    assert_accurate(ours[0][0].detach(), theirs[0][0].detach(), exact[0][0].detach())
    assert_accurate(ours[1][0], theirs[1][0], exact[1][0], factor=3)
    torch.testing.assert_close([t.double() for t in ours[2]], exact[2], rtol=1e-5, atol=0)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics(momentum):
    x, convs = make(3, (2, 3), 5, 0, branches=CVT[:2], kernel_sizes=(3, 3))
    convs = [conv._replace(momentum=momentum) for conv in convs]
    assert_backends_agree(x, (2, 3), convs, True)


def test_without_affine_or_statistics():
    x, convs = make(2, (4, 4), 5, 1)
    absent = dict.fromkeys(("bn_weight", "bn_bias", "running_mean", "running_var"))
    bare = [conv._replace(**absent) for conv in convs]
    with ck.use_backend("triton"):
        outs = ck.conv_projection(x, (4, 4), bare, training=False)
    expected = ck.reference.conv_projection(x, (4, 4), bare, training=False)
    torch.testing.assert_close(outs, expected)


def test_images_two_billion_elements_apart():
    """Offsets of images take 64 bits; the memory between the two is never touched."""
    small, convs = make(2, (3, 2), 8, 1, dtype=torch.float16, branches=CVT[1:2], kernel_sizes=(3,))
    # Storage, unlike a tensor, is not filled.
    memory = torch.empty(0, dtype=torch.float16, device=DEVICE)
    memory.untyped_storage().resize_(2 * (2**31 + 64))
    x = memory.as_strided(small.shape, (2**31, 8, 1)).copy_(small)
    far, near = (run("triton", images, (3, 2), convs, True) for images in (x, small))
    for a, b in zip(far, near, strict=True):
        assert all(torch.equal(m, n) for m, n in zip(a, b, strict=True))


@pytest.mark.gpu
def test_more_than_two_billion_elements():
    """The same image throughout, so the same output, of which the last lies beyond 32 bits."""
    x, convs = make(1, (32, 32), 1024, 0, dtype=torch.float16)
    with ck.use_backend("triton"):
        outs = ck.conv_projection(x.expand(2100, -1, -1), (32, 32), convs, training=False)
    assert outs[0].numel() > 2**31
    assert all(torch.equal(out[-1], out[0]) for out in outs)


@pytest.mark.gpu
def test_training_in_a_cuda_graph():
    x, convs = make(2, (6, 6), 64, 0, dtype=torch.float16)
    static, stream = x.clone(), torch.cuda.Stream()
    with ck.use_backend("triton"), torch.cuda.stream(stream):
        ck.conv_projection(static, (6, 6), [clone_buffers(c) for c in convs], training=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = ck.conv_projection(static, (6, 6), convs, training=True)
        static.copy_(2 * x)
        graph.replay()
        stream.synchronize()
        expected = ck.conv_projection(2 * x, (6, 6), convs, training=True)
    assert all(map(torch.equal, outs, expected))


# Launches -------------------------------------------------------------------------------------------------


def name_of(kernel):
    """Returns the name of a kernel in ``CONFIGS``."""
    return kernel.__name__.removeprefix("_conv_projection").strip("_").removesuffix("_kernel")


def count_pixels(launch):
    """Returns the pixels of an image that a launch's programs load, each on its own, and those stored."""
    arguments = launch.arguments
    height, width, strips, cols = (arguments[name] for name in ("height", "width", "strips", "col_blocks"))
    out_grids = zip(arguments["out_heights"], arguments["out_widths"], strict=True)
    loaded, stored = 0, [np.zeros(size, int) for size in out_grids]
    for strip in range(strips):
        for block in range(cols):
            touched = np.zeros((height, width), bool)
            for branch, out in zip(arguments["BRANCHES"], stored, strict=True):
                rows, columns = share(out.shape[0], strip, strips), share(out.shape[1], block, cols)
                taps = np.arange(branch.kernel_size) * branch.dilation - branch.padding
                y, x = ((n[:, None] * branch.stride + taps).ravel() for n in (rows, columns))
                touched[np.ix_(y[(y >= 0) & (y < height)], x[(x >= 0) & (x < width)])] = True
                out[np.ix_(rows, columns)] += 1
            loaded += touched.sum()
    assert all((out == 1).all() for out in stored)
    return loaded, sum(out.size for out in stored)


def share(size, part, parts):
    length = -(-size // parts)
    return np.arange(min(part * length, size), min((part + 1) * length, size))


@pytest.mark.parametrize("chip", [machine.Chip(80, 108), machine.Chip(90, 132)], ids=str)
@pytest.mark.parametrize(("model", "size"), [("cvt_13", 224), ("cvt_13", 384), ("cvt_w24", 384)])
def test_bytes_per_launch_of_the_general_kernels(monkeypatch, model, size, chip):
    """Evaluation reads x and writes the outputs once, 2.5 units; training reads x once more, 3.5 units."""
    for module in (backward, forward):
        monkeypatch.setattr(module, "is_walk", lambda geometry: False)
    for stage in launches.stages(model, size):
        (height, width), channels, *_ = stage
        made = launches.conv_projection_launches(stage, torch.bfloat16, chip)
        planned = {name_of(launch.kernel): launch for launch in made}
        loaded, stored = count_pixels(planned["fwd"])
        assert stored == 1.5 * height * width
        assert loaded + stored <= 1.15 * 2.5 * height * width
        merged = planned["stats"].arguments["partial_ptr"].nbytes * 2 / (2 * 256 * channels)  # in pixels
        assert loaded + stored + count_pixels(planned["stats"])[0] + merged <= 1.15 * 3.5 * height * width


def test_small_batches_get_smaller_regions():
    """Every multiprocessor gets two programs while a strip still has two rows."""
    x, chip = torch.empty(1, 56 * 56, 64, device="meta", dtype=torch.bfloat16), machine.Chip(90, 132)
    geometry = common.Geometry((56, 56), (3,), (1,), (1,), (1,), (1e-5,))
    with machine.recorded_launches(chip):
        plans = [common.LaunchPlan.of("fwd", x.expand(n, -1, -1), geometry) for n in (1, 8, 256)]
    assert [plan.programs for plan in plans[:2]] == [28 // 2 * 2, 8 * 14 * 2]
    assert plans[2].strips == 4


def test_launch_configurations_of_other_gpus():
    assert common.configuration("fwd", 75) == common.CONFIGS[80]["fwd"]
    assert common.configuration("fwd", 89) == common.CONFIGS[86]["fwd"]
    assert common.configuration("fwd", 103) == common.CONFIGS[100]["fwd"]


def test_a_configuration_can_be_overridden_for_a_while():
    shipped = {name: common.configuration(name, 90) for name in common.CONFIGS[90]}
    first, second = (replace(shipped["stats"], num_warps=warps) for warps in (2, 8))
    with common.overridden("stats", first):
        with common.overridden("stats", second):
            assert common.configuration("stats", 80) == second
        assert {name: common.configuration(name, 90) for name in shipped} == shipped | {"stats": first}
    assert common.configuration("stats", 90) == shipped["stats"]
    with pytest.raises(ValueError, match="expected one of walk_fwd"), common.overridden("forward", first):
        pass


def test_branches_that_one_launch_cannot_serve():
    x, convs = make(2, (3, 3), 2, 0)
    shared = [convs[0], convs[1]._replace(running_mean=convs[0].running_mean)]
    groups = [convs[0], convs[1]._replace(process_group=torch.distributed.ProcessGroup(0, 2))]
    bare = [convs[0], convs[1]._replace(running_mean=None, running_var=None)]
    strided = [convs[0], convs[1]._replace(running_mean=convs[1].running_mean.repeat_interleave(2)[::2])]
    for branches, training, reason in (
        (shared, True, "two branches share their running statistics"),
        (groups, True, "the branches synchronize over different process groups"),
        (strided, True, "running statistics are not contiguous"),
        (bare, False, "some branches have running statistics and some have none"),
    ):
        with ck.use_backend("triton"), pytest.raises(ck.BackendUnavailable, match=reason):
            ck.conv_projection(x, (3, 3), branches, training=training)


def test_compiled_training():
    torch.compiler.reset()
    x, convs = make(2, (2, 3), 4, 1)
    compiled = torch.compile(ck.conv_projection, fullgraph=True, backend="aot_eager")
    results = [run("triton", x, (2, 3), convs, True, function=f) for f in (ck.conv_projection, compiled)]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_autocast_computes_in_its_dtype():
    """Compares on numbers that bfloat16 holds, so that float64 is exact."""
    x, convs = make(2, (6, 6), 8, 0, dtype=torch.float32)
    pairs = [modules(conv._replace(weight=conv.weight.bfloat16().float()), 8).to(DEVICE) for conv in convs]
    autocast = functools.partial(torch.autocast, DEVICE, torch.bfloat16)
    outs = assert_trains_as_modules(x.bfloat16().float(), (6, 6), pairs, autocast)
    assert all(out.dtype == torch.bfloat16 for out in outs)
