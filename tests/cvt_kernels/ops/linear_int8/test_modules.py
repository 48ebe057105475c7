"""LinearInt8 and ConvInt8: their tensors, states, gradients and results."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cvt_kernels as ck
from cvt_kernels import reference
from cvt_kernels.ops.linear_int8.modules import ConvInt8, LinearInt8

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def make(bias=True, dtype=torch.int8):
    torch.manual_seed(0)
    layer = nn.Linear(12, 7, bias=bias)
    return layer, LinearInt8.from_float(layer, dtype=dtype)


def rows(dtype=torch.float32):
    return torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1)).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_the_operator(bias):
    layer, made = make(bias)
    x = rows()
    expected = ck.linear_int8(x, *made.parameters_of_operator())
    assert torch.equal(made(x), expected)
    assert (made(x) - layer(x)).abs().max() < 0.03 * layer(x).abs().max()
    weight, scale = reference.quantize_rows(layer.weight)
    assert torch.equal(made.dequantized_weight(), weight * scale)
    assert made.bias is layer.bias
    rounded = ck.quantize_rows(x)
    assert torch.equal(made(rounded), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_it_says_what_it_is(dtype):
    _, made = make(bias=False, dtype=dtype)
    name = "" if dtype == torch.int8 else ", dtype=float8_e4m3fn"
    assert str(made) == f"LinearInt8(in_features=12, out_features=7, bias=False{name})"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConvInt8(2**10, 2**24, (8, 8)), "out_channels: got 16777216 of 65536 inputs, expected"),
        (lambda: ConvInt8(2**40, 4, (1, 1)), "in_channels and kernel_size: make .* inputs, expected at most"),
        (lambda: ConvInt8(4, 4, (2**31, 2**31)), "in_channels and kernel_size: make .* inputs"),
    ],
)
def test_sizes_beyond_all_memory_are_refused(build, message):
    with pytest.raises(ValueError, match="^" + message):
        build()


def test_wrong_settings():
    with pytest.raises(TypeError, match=r"^dtype: got torch.float16, expected torch.int8 or"):
        LinearInt8(2, 2, dtype=torch.float16)
    layer = nn.Linear(2, 2)
    nn.init.constant_(layer.weight, torch.nan)
    with pytest.raises(ValueError, match=r"^weight: has NaN or infinities"):
        LinearInt8.from_float(layer)


# Moves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "move",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.type(torch.half)],
    ids=["half", "bfloat16", "double", "type"],
)
def test_weight_and_scales_keep_their_dtypes(move, dtype):
    _, made = make(dtype=dtype)
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    move(made)
    assert made.bias.dtype != torch.float32
    for name, buffer in made.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.float(), before[name].float())
    x = rows(made.bias.dtype)
    with torch.no_grad():
        assert made(x).dtype == x.dtype


def test_other_devices_and_empty_memory():
    _, made = make()
    made.to("meta")
    assert {t.device.type for t in made.state_dict().values()} == {"meta"}
    made.to_empty(device="cpu")
    assert {t.device.type for t in made.state_dict().values()} == {"cpu"}
    assert (made.weight.dtype, made.weight_scale.dtype) == (torch.int8, torch.float32)


def test_copies():
    layer, made = make()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert other.state_dict().keys() == made.state_dict().keys()
        with torch.no_grad():
            assert torch.equal(other(rows()), made(rows()))
        assert other.float_layer is not layer
        assert torch.equal(other.float_layer.weight, layer.weight)
    assert list(made.children()) == []


# States ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [True, False])
def test_a_state_is_loaded_by_a_layer_of_its_kind(assign):
    _, made = make()
    other = LinearInt8(12, 7)
    other.load_state_dict(made.state_dict(), assign=assign)
    assert other.float_layer is None
    with torch.no_grad():
        assert torch.equal(other(rows()), made(rows()))


STATES = {
    "float weight": (
        {"weight": torch.ones(7, 12), "qweight": None},
        "layer.weight: is in the state, expected layer.qweight of 8-bit numbers",
    ),
    "float qweight": ({"qweight": torch.ones(7, 12)}, "qweight: got dtype float32, expected int8"),
    "half scales": (
        {"weight_scale": torch.ones(7).half()},
        "weight_scale: got dtype float16, expected float32",
    ),
    "no scales": ({"weight_scale": None}, "weight_scale: is missing beside layer.qweight"),
    "shape": ({"qweight": torch.ones(6, 12, dtype=torch.int8)}, "size mismatch for layer.qweight"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", STATES)
def test_states_that_would_be_cast_or_mixed(case, strict):
    changes, message = STATES[case]
    model = nn.Sequential()
    model.layer = make()[1]
    state = model.state_dict() | {f"layer.{name}": value for name, value in changes.items()}
    state = {name: value for name, value in state.items() if value is not None}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=re.escape(message)):
        model.load_state_dict(state, strict=strict)
    assert torch.equal(model.layer.weight, before["layer.qweight"])


def test_a_state_may_lack_the_layer():
    missing = make()[1].load_state_dict({}, strict=False).missing_keys
    assert sorted(missing) == ["bias", "qweight", "weight_scale"]


# Gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_those_of_the_dequantized_layer(dtype, bias):
    _, made = make(bias)
    made.to(dtype)
    x = rows(dtype).requires_grad_()
    with ck.use_backend("reference"):
        out = made(x)
        with torch.no_grad():
            assert torch.equal(out, made(x))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = [x, *made.parameters()]
    gradients = torch.autograd.grad(out, wanted, dout)
    followed = F.linear(x, made.dequantized_weight().to(dtype), made.bias)
    for gradient, expected in zip(gradients, torch.autograd.grad(followed, wanted, dout), strict=True):
        assert torch.equal(gradient, expected)


def test_gradients_under_autocast_and_transforms():
    _, made = make()
    x = rows().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = made(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert made.bias.grad is not None
    gradient = torch.func.grad(lambda x: made(x).sum())(rows())
    torch.testing.assert_close(gradient, made.dequantized_weight().sum(0).expand_as(gradient))
    _, tangent = torch.func.jvp(made, (rows(),), (rows(),))
    torch.testing.assert_close(tangent, rows() @ made.dequantized_weight().T)


# Convolutions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(3, 2, 1, 1), ((3, 2), (1, 2), (0, 1), (2, 1))])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions(settings, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 5, *settings, bias=bias)
    made = ConvInt8.from_float(conv)
    image = torch.randn(2, 6, 9, 8)
    with torch.no_grad():
        expected, out = conv(image), made(image)
    assert out.shape == expected.shape
    assert (out - expected).abs().max() < 0.03 * expected.abs().max()
    shape = dict(zip(("kernel_size", "stride", "padding", "dilation"), map(_pair, settings), strict=True))
    empty = ConvInt8(6, 5, **shape, bias=bias)
    empty.load_state_dict(made.state_dict())
    with torch.no_grad():
        assert torch.equal(empty(image), out)
    assert str(empty) == str(made)
    leaf = image.clone().requires_grad_()
    weight = made.dequantized_weight().view_as(conv.weight)
    followed = F.conv2d(leaf, weight, conv.bias, *map(_pair, settings[1:]))
    gradients = [torch.autograd.grad(each.sin().sum(), leaf)[0] for each in (followed, made(leaf))]
    assert (gradients[0] - gradients[1]).abs().max() < 0.05 * gradients[0].abs().max()


def _pair(value):
    return value if isinstance(value, tuple) else (value, value)
