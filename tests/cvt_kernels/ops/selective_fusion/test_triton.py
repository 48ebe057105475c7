"""The Triton kernels of selective fusion, on a GPU or else in Triton's interpreter on CPU tensors."""

import pytest
import torch
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import backends, launch, launching, modes, reference
from cvt_kernels.launch.records import Product
from tests.checks import assert_accurate
from tests.cvt_kernels.ops.agreement import assert_agrees, made_of

DTYPES = "float16", "bfloat16", "float32"
USUAL = {"batch": 2, "height": 3, "width": 4, "inputs": 9, "channels": 20, "outputs": 7}
KERNELS = ["_fusion_starts_kernel", "_fusion_conv_kernel", "_fusion_conv_kernel", "_fusion_sum_kernel"]


def run(*call):
    with torch.no_grad(), ck.use_backend("triton"):
        return ck.selective_fusion(*call)


def launches_of(call, multiprocessors=132):
    with launching.recorded_launches(launching.Chip(90, multiprocessors)) as launches:
        run(*call)
    return launches


def of_kernel(launches, name):
    return [each.arguments for each in launches if each.kernel.__name__ == f"_{name}_kernel"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"channels_last": True},
        {"bare": True},
        {"batch": 1, "height": 1, "width": 1},
        {"height": 1, "width": 17},
        {"height": 9, "width": 1},
        {"inputs": 1, "channels": 1, "outputs": 1},
        {"inputs": 65, "channels": 70, "outputs": 33},
        {"batch": 1, "inputs": 64, "channels": 64, "outputs": 32},
        {"eps": 1.0},
    ],
    ids=str,
)
def test_values(settings, dtype):
    call = made_of("selective_fusion", "triton", **USUAL | settings, dtype=dtype).call.record
    assert [each.kernel.__name__ for each in launches_of(call)] == KERNELS
    assert_agrees("selective_fusion", "triton", **USUAL | settings, dtype=dtype)


def normalized(outputs, inputs, dtype):
    weight = torch.randn(outputs, inputs, 3, 3) / (9 * inputs) ** 0.5
    vectors = [torch.randn(outputs) for _ in range(4)] + [torch.rand(outputs) + 0.5]
    return ck.NormalizedConv(*(each.to(dtype) for each in (weight, *vectors)))


def tensors(dtype=torch.float32, images=2, size=(4, 6), channels=6, hidden=5, last=4):
    """Returns the arguments."""
    x = torch.randn(images, channels, *size, dtype=dtype)
    other = torch.randn(images, channels, size[0] // 2, size[1] // 2, dtype=dtype)
    convs = normalized(hidden, 2 * channels, dtype), normalized(last, hidden, dtype)
    weight = torch.randn(2, last, 3, 3, dtype=dtype) / (9 * last) ** 0.5
    return x, other, *convs, weight, torch.randn(2, dtype=dtype)


def doubled(arguments):
    """Returns the arguments in float64."""
    return [
        ck.NormalizedConv(*(tensor.double() for tensor in each[:6]), each.eps)
        if isinstance(each, ck.NormalizedConv)
        else each.double()
        for each in arguments
    ]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_many_channels_are_accurate(dtype):
    """64 and 32 channels are those of GLPN."""
    arguments = tensors(dtype, size=(6, 10), channels=64, hidden=64, last=32)
    exact = reference.selective_fusion(*doubled(arguments))
    assert_accurate(run(*arguments), reference.selective_fusion(*arguments), exact)


@torch.no_grad()
def test_products_in_tf32_round_their_factors_to_nearest(monkeypatch):
    """PyTorch lets cuDNN round convolutions to TF32 by default."""
    monkeypatch.setattr(modes, "convolves_in_tf32", lambda x: True)
    arguments = tensors(channels=64, hidden=64, last=32)
    convs = of_kernel(launches_of(arguments), "fusion_conv")
    assert [each["SPEC"].precision for each in convs] == ["tf32", "tf32"]
    exact, out = reference.selective_fusion(*doubled(arguments)), run(*arguments)
    error = (out.double() - exact).abs().max()
    assert 1e-6 < error < 2e-3

    def rounded(tensor):  # to 10 bits behind the first, halves away from zero
        bits = tensor.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

    x, other, first, second, *last = arguments
    up = F.interpolate(other, scale_factor=2, mode="bilinear")
    hidden = torch.cat((x, up), 1)
    for conv in (first, second):
        product = F.conv2d(rounded(hidden), rounded(conv.weight), conv.bias, padding=1)
        hidden = F.batch_norm(product, *conv[4:6], *conv[2:4], eps=conv.eps).relu()
    gates = F.conv2d(hidden, *last, padding=1).sigmoid()
    expected = (x * gates[:, :1] + up * gates[:, 1:]).flatten(2).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=float(error) / 10)


def test_an_image_has_the_same_bits_alone_and_among_others():
    x, other, *others = tensors(images=3)
    together = run(x, other, *others)
    for i in range(3):
        assert torch.equal(run(x[i : i + 1], other[i : i + 1], *others)[0], together[i])


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy in the interpreter
@torch.no_grad()
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_number_that_is_not_finite_reaches_no_pixel_that_it_does_not_reach_by_pytorch(number, which):
    arguments = tensors(images=1, size=(12, 14))
    height, width = arguments[which].shape[2:]
    for place in ((0, 0), (height - 1, width - 1), (height // 2, width // 2)):
        changed = list(arguments)
        changed[which] = arguments[which].clone()
        changed[which][0, 2, place[0], place[1]] = number
        expected, out = reference.selective_fusion(*changed), run(*changed)
        is_finite = expected.isfinite()
        torch.testing.assert_close(out[is_finite], expected[is_finite], rtol=1e-4, atol=1e-4)
        assert not out.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_gates_of_large_numbers():
    x, other, first, second, weight, _ = tensors()
    for bias in (torch.tensor([300.0, -300.0]), torch.tensor([-300.0, 300.0])):
        call = x, other, first, second, weight * 0, bias
        torch.testing.assert_close(run(*call), reference.selective_fusion(*call))


def test_no_concatenation_is_allocated_and_a_map_with_channels_last_is_not_copied():
    x, other, *others = tensors(channels=64, hidden=64, last=32)
    last = [each.contiguous(memory_format=torch.channels_last) for each in (x, other)]
    launches = launches_of((*last, *others))
    first, second = of_kernel(launches, "fusion_conv")
    (start,), (end,) = (of_kernel(launches, f"fusion_{name}") for name in ("starts", "sum"))
    assert first["x_ptr"].data_ptr() == end["x_ptr"].data_ptr() == last[0].data_ptr()
    assert start["other_ptr"].data_ptr() == last[1].data_ptr()
    assert first["other_ptr"] is start["up_ptr"] is end["up_ptr"]
    assert second["x_ptr"] is first["out_ptr"]
    assert second["other_ptr"] is None
    assert first["out_ptr"].shape == (2, 4, 6, 64)


def test_changed_weights_and_statistics_are_read():
    """Nothing is folded or kept."""
    arguments = tensors()
    first, last = arguments[2], arguments[4]
    for change in (first.weight, first.bias, first.bn_weight, first.running_mean, first.running_var, last):
        before = run(*arguments)
        change.mul_(2)
        after = run(*arguments)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, reference.selective_fusion(*arguments), rtol=1e-4, atol=1e-4)


def test_few_pixels_have_small_tiles():
    tiles = {}
    for multiprocessors in (1, 132):
        launches = launches_of(tensors(torch.float16, channels=64, hidden=64), multiprocessors)
        tiles[multiprocessors] = of_kernel(launches, "fusion_conv")[0]["SPEC"].block_m
    assert tiles == {1: 128, 132: 16}


@pytest.mark.parametrize("block_k", [16, 64])
def test_replaced_configurations(block_k):
    config = Product(block_m=32, width=16, block_k=block_k, num_warps=1, num_stages=1)
    with launch.overridden("fusion_conv", config):
        assert_agrees("selective_fusion", "triton", **USUAL | {"inputs": 33}, dtype="float16")


def test_what_is_refused():
    bind = backends.operators["selective_fusion"].bind
    why = backends.implementations["selective_fusion"]["triton"].load().why_unsupported
    x, other, *others = tensors()
    assert why(bind(x, other, *others)) is None
    assert why(bind(x[:0], other[:0], *others)) == "the batch is empty"
    assert why(bind(*doubled((x, other, *others)))) == "serves float32, bfloat16 and float16"
    wide, half = (torch.empty(1, 6, 2**n, 2**14, device="meta") for n in (15, 14))
    assert "2³¹" in why(bind(wide, half, *others))
    others[0].weight.requires_grad_()
    assert why(bind(x, other, *others)) == "gradients are not computed"
