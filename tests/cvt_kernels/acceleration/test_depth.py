"""GLPN's decoder hands its last map to the head, which computes the depth by one operator."""

import copy

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import choose, launching
from cvt_kernels.acceleration import depth
from tests import upstream
from tests.checks import assert_accurate, not_built

pytestmark = pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")


@pytest.fixture
def maps(monkeypatch):
    """Returns the shapes of the maps that the operator gets, and lets kernels serve on a CPU."""
    shapes, operator = [], ck.depth_head

    def noting(x, *others):
        shapes.append(tuple(x.shape))
        return operator(x, *others)

    monkeypatch.setattr(depth, "depth_head", noting)
    with ck.use_backend("cpu", "reference"):
        yield shapes


def made(dtype=torch.float32, freeze=None, **config):
    """Returns a model with other statistics than those of its first day, accelerated, and upstream's."""
    torch.manual_seed(0)
    model = upstream.glpn(**config).eval().to(dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return ck.accelerate(copy.deepcopy(model), freeze=freeze), model


@pytest.mark.parametrize("freeze", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_depths_are_accurate(maps, dtype, freeze):
    ours, upstreams = made(dtype, freeze)
    images = torch.randn(2, 3, 64, 96, dtype=dtype)
    exact = copy.deepcopy(upstreams).double()(images.double()).predicted_depth
    assert_accurate(ours(images).predicted_depth, upstreams(images).predicted_depth, exact)
    assert maps == [(2, 8, 16, 24)]


@torch.no_grad()
def test_images_of_several_sizes(maps):
    ours, upstreams = made()
    for size in ((32, 32), (32, 160), (96, 32)):
        images = torch.randn(1, 3, *size)
        torch.testing.assert_close(ours(images).predicted_depth, upstreams(images).predicted_depth)
        assert maps.pop() == (1, 8, size[0] // 4, size[1] // 4)


@torch.no_grad()
def test_all_outputs_are_upstreams(maps):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)
    for arguments in (
        {"labels": torch.rand(1, 32, 64) + 1},
        {"return_dict": False, "output_hidden_states": True},
    ):
        got, expected = (model(images, **arguments) for model in (ours, upstreams))
        assert type(got) is type(expected)
        got, expected = (each if type(each) is tuple else each.to_tuple() for each in (got, expected))
        torch.testing.assert_close(got, expected)
    assert len(maps) == 2


PARTS = [
    *("decoder", "head", "head.head", "head.head.0", "head.head.1", "head.head.2"),
    *("decoder.stages.3", "decoder.stages.3.upsample", "decoder.final_upsample"),
]


@pytest.mark.parametrize("path", PARTS)
@torch.no_grad()
def test_a_hook_sees_what_it_sees_upstream(maps, path):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)
    ours(images)
    seen = []
    for model in (ours, upstreams):
        model.get_submodule(path).register_forward_hook(lambda module, args, out: seen.append((args, out)))
        model(images)
    torch.testing.assert_close(*seen)
    assert len(maps) == 1  # of the call before


@torch.no_grad()
def test_hooks_on_other_parts_see_their_modules_called(maps):
    ours, _ = made()
    seen = []
    for path in ("decoder.stages.2", "decoder.stages.3.fusion", "decoder.stages.3.convolution"):
        ours.get_submodule(path).register_forward_hook(lambda *_: seen.append(1))
    ours(torch.randn(1, 3, 32, 64))
    assert len(seen) == 3
    assert len(maps) == 1


@torch.no_grad()
def test_the_decoder_and_the_head_called_by_themselves_run_their_own_forward(maps):
    ours, upstreams = made()
    states = ours.glpn(torch.randn(1, 3, 32, 64), output_hidden_states=True).hidden_states
    got, expected = ours.decoder(states), upstreams.decoder(states)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(ours.head(got), upstreams.head(expected))
    assert not maps


def test_training_and_gradients_run_upstreams_forward(maps):
    ours, upstreams = made()
    images = torch.randn(2, 3, 32, 64)
    for training in (False, True):
        torch.manual_seed(1)
        losses = [
            model.train(training)(images).predicted_depth.square().mean() for model in (ours, upstreams)
        ]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*losses)
    gradients = [model.head.head[0].weight.grad for model in (ours, upstreams)]
    torch.testing.assert_close(*gradients)
    assert not maps


@torch.no_grad()
def test_changes_of_weights_settings_and_modules_are_noticed(maps):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)

    def change(model, step):
        if step == 0:
            model.head.head[0].weight.mul_(2)
        elif step == 1:
            model.head.head[2].bias.add_(1)
        elif step == 2:
            model.head.config.max_depth = 3
        elif step == 3:
            model.decoder.stages[3].fusion.convolutional_layer1[1].running_mean.add_(1)
        elif step == 4:
            model.head.head[1] = torch.nn.GELU()
        else:
            model.head.head[1] = torch.nn.ReLU()
            model.decoder.final_upsample.mode, model.decoder.final_upsample.align_corners = "nearest", None

    for step in range(6):
        before = ours(images).predicted_depth
        for model in (ours, upstreams):
            change(model, step)
        after = ours(images).predicted_depth
        torch.testing.assert_close(after, upstreams(images).predicted_depth)
        assert not torch.equal(before, after)
    assert len(maps) == 9  # neither GELU nor other upsampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_for_triton_a_copy_of_the_weight_lies_as_its_product_reads_it(monkeypatch, dtype):
    head, weights, operator = made(dtype, freeze=False)[0].head, [], ck.depth_head
    small, large = torch.randn(1, 8, 1, 2, dtype=dtype), torch.randn(1, 8, 2, 3, dtype=dtype)
    own = type(ck.restore(copy.deepcopy(head))).forward

    def noting(x, weight, *others):
        weights.append(weight)
        return operator(x, weight, *others)

    def upstreams(head, image):
        for _ in range(2):
            image = F.interpolate(image, scale_factor=2, mode="bilinear")
        return own(head, [image])

    monkeypatch.setattr(depth, "depth_head", noting)
    monkeypatch.setattr(depth._handing, "modules", (head,))
    with ck.use_backend("triton"):
        for factor in (1, 2):
            head.head[0].weight.mul_(factor)
            exact = upstreams(copy.deepcopy(head).double(), large.double())
            for _ in range(2):
                assert_accurate(head([small, large]), upstreams(head, large), exact)
            assert torch.equal(weights[-1], head.head[0].weight)
        assert weights[0].data_ptr() == weights[1].data_ptr()
        assert weights[2].data_ptr() == weights[3].data_ptr()
        assert all(each.permute(2, 3, 0, 1).is_contiguous() for each in weights)
        head.head[0].weight.mul_(2)
        with torch.inference_mode():
            head([small, large])
        assert not weights[-1].is_inference()


@torch.no_grad()
def test_a_head_that_reads_another_map_runs_its_own_forward(maps):
    ours, upstreams = made(head_in_index=1)
    images = torch.randn(1, 3, 32, 64)
    torch.testing.assert_close(ours(images).predicted_depth, upstreams(images).predicted_depth)
    assert not maps


@torch.no_grad()
def test_autocast_runs_upstreams_forward(maps):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            ours(images).predicted_depth, upstreams(images).predicted_depth, atol=0.1, rtol=0.1
        )
    assert not maps


@torch.no_grad()
def test_coverage_lists_it_and_restore_undoes_it(maps):
    ours, _ = made()
    rows = {row.path: row for row in ck.coverage(ours)}
    assert all(rows[path].fused for path in ("", "decoder", "head"))
    assert type(ck.restore(ours).decoder) is type(upstream.glpn().decoder)
    ours(torch.randn(1, 3, 32, 64))
    assert not maps


@torch.no_grad()
def test_a_pickled_model_hands_over_too(maps):
    ours, _ = made()
    images = torch.randn(1, 3, 32, 64)
    assert torch.equal(copy.deepcopy(ours)(images).predicted_depth, ours(images).predicted_depth)
    assert len(maps) == 2


# The fusions ----------------------------------------------------------------------------------------------

BY_KERNELS = ["_fusion_starts_kernel", "_fusion_conv_kernel", "_fusion_conv_kernel", "_fusion_sum_kernel"]


@pytest.fixture
def fusions(monkeypatch):
    """Returns the shapes of the maps that the fusions get, which Triton's kernels compute.

    They run on a GPU, or in Triton's interpreter; of other operators the backends of a CPU serve.
    """
    shapes, operator, may_be_ours = [], ck.selective_fusion, choose.may_be_ours

    def noting(x, *others):
        shapes.append(tuple(x.shape))
        with ck.use_backend("triton"):
            return operator(x, *others)

    def may_serve(name, *others, **settings):
        return name == "selective_fusion" or may_be_ours(name, *others, **settings)

    monkeypatch.setattr(depth, "selective_fusion", noting)
    monkeypatch.setattr(choose, "may_be_ours", may_serve)
    with ck.use_backend("cpu", "reference"):
        yield shapes


SHAPES = [(2, 8, 2, 4), (2, 8, 4, 8), (2, 8, 8, 16)]


@pytest.mark.parametrize("freeze", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_fused_maps_are_accurate(fusions, maps, dtype, freeze):
    ours, upstreams = made(dtype, freeze)
    images = torch.randn(2, 3, 32, 64, dtype=dtype)
    exact = copy.deepcopy(upstreams).double()(images.double()).predicted_depth
    for _ in range(3):  # the second call may be recorded
        assert_accurate(ours(images).predicted_depth, upstreams(images).predicted_depth, exact)
    assert fusions[:3] == SHAPES
    assert maps[0] == SHAPES[-1]


@torch.no_grad()
def test_the_kernels_of_a_fused_decoder(fusions):
    ours, _ = made()
    widths = [getattr(stage.convolution, "in_channels", 8) for stage in reversed(ours.decoder.stages)]
    states = [torch.randn(1, width, n, n) for width, n in zip(widths, (16, 8, 4, 2), strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(depth._handing, "modules", (ours.decoder, ours.head))
        with launching.recorded_launches(launching.Chip(90, 132)) as launches:
            ours.decoder(states)
    names = [each.kernel.__name__ for each in launches if "fusion" in each.kernel.__name__]
    assert names == 3 * BY_KERNELS


@pytest.mark.parametrize(
    "path",
    [
        *("decoder.stages.0", "decoder.stages.1.convolution", "decoder.stages.1.upsample"),
        *("decoder.stages.2.fusion", "decoder.stages.2.fusion.convolutional_layer1"),
        *("decoder.stages.3.fusion.convolutional_layer2.1", "decoder.stages.3.fusion.sigmoid"),
    ],
)
@torch.no_grad()
def test_a_hook_within_the_decoder_sees_what_it_sees_upstream(fusions, path):
    ours, upstreams = made()
    images = torch.randn(1, 3, 32, 64)
    ours(images)
    assert len(fusions) == 3
    seen = []
    for model in (ours, upstreams):
        handle = model.get_submodule(path).register_forward_hook(lambda module, args, out: seen.append(out))
        depths = model(images).predicted_depth
        handle.remove()
        if model is ours:
            got = depths
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(got, depths)
    assert len(fusions) == 3
    ours(images)
    assert len(fusions) == 6


def set_gelu(decoder):
    decoder.stages[2].fusion.convolutional_layer1[2] = torch.nn.GELU()


def set_dilation(decoder):
    conv = decoder.stages[3].fusion.convolutional_layer2[0]
    conv.dilation, conv.padding = (2, 2), (2, 2)


def set_upsampling(decoder):
    decoder.stages[1].upsample = torch.nn.Upsample(scale_factor=2, mode="nearest")


def use_statistics_of_the_batch(decoder):
    decoder.stages[1].fusion.convolutional_layer1[1].train()


def set_forward(decoder):
    fusion = decoder.stages[2].fusion
    fusion.forward = lambda local, residual: local + residual


@pytest.mark.parametrize(
    "change", [set_gelu, set_dilation, set_upsampling, use_statistics_of_the_batch, set_forward]
)
@torch.no_grad()
def test_another_decoder_runs_its_own_stages(fusions, change):
    ours, upstreams = made()
    images = torch.randn(2, 3, 32, 64)
    ours(images)
    fusions.clear()
    for model in (ours, upstreams):
        change(model.decoder)
    torch.testing.assert_close(ours(images).predicted_depth, upstreams(images).predicted_depth)
    assert not fusions


@torch.no_grad()
def test_another_dtype_is_noticed(fusions):
    ours, upstreams = made()
    images = torch.randn(2, 3, 32, 64)
    ours(images)
    for dtype in (torch.bfloat16, torch.float32):
        exact = copy.deepcopy(upstreams.to(dtype)).double()(images.to(dtype).double()).predicted_depth
        got, expected = (model.to(dtype)(images.to(dtype)).predicted_depth for model in (ours, upstreams))
        assert_accurate(got, expected, exact)
    assert fusions == 3 * [(2, *shape[1:]) for shape in SHAPES]


@torch.no_grad()
def test_a_fusion_of_two_dtypes_runs_upstreams_forward(fusions):
    ours, _ = made()
    ours.decoder.stages[3].fusion.convolutional_layer3.half()
    with pytest.raises(RuntimeError, match="should be the same"):
        ours(torch.randn(1, 3, 32, 64))
    assert not fusions


@torch.no_grad()
def test_changes_of_a_fusion_are_noticed(fusions):
    ours, upstreams = made()
    images = torch.randn(2, 3, 32, 64)

    def change(stage, step):
        fusion = stage.fusion
        conv, norm, _ = fusion.convolutional_layer1
        if step == 0:
            conv.weight.mul_(2)
        elif step == 1:
            norm.running_var.mul_(3)
        elif step == 2:
            norm.eps = 0.5
        elif step == 3:
            fusion.convolutional_layer3.bias = torch.nn.Parameter(torch.ones(2))
        elif step == 4:
            norm.weight.data = norm.weight.data * 2
        elif step == 5:
            stage.convolution.weight.data = stage.convolution.weight.data * 2
        else:
            norm.load_state_dict({name: each + 1 for name, each in norm.state_dict().items()}, assign=True)

    for step in range(7):
        before = ours(images).predicted_depth
        for model in (ours, upstreams):
            change(model.decoder.stages[2], step)
        after = ours(images).predicted_depth
        torch.testing.assert_close(after, upstreams(images).predicted_depth)
        assert not torch.equal(before, after)


@torch.no_grad()
def test_kernels_of_a_gpu_compute_the_depth_too(maps):
    """On a GPU, or in Triton's interpreter; here for the map alone."""
    ours, upstreams = made()
    state = torch.randn(1, 8, 2, 3)
    upsampled = upstreams.decoder.final_upsample(upstreams.decoder.stages[-1].upsample(state))
    modules = ours.decoder, ours.head
    with pytest.MonkeyPatch.context() as patch, ck.use_backend("triton"):
        patch.setattr(depth._handing, "modules", modules)
        with launching.recorded_launches(launching.Chip(90, 132)) as launches:
            ours.head([state, state])
        got = ours.head([state, state])
    assert [each.kernel.__name__ for each in launches] == ["_depth_head_kernel", "_depth_sums_kernel"]
    torch.testing.assert_close(got, upstreams.head([upsampled]), rtol=1e-4, atol=1e-4)
    assert maps == 2 * [(1, 8, 2, 3)]
