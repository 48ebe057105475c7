"""The operators that linear layers and convolutions are part of: what they accept and refuse, on a CPU.

There they are other operators one after the other; a GPU's kernels have tests of their own.
"""

import functools

import pytest
import torch
from torch.autograd import gradcheck

import cvt_kernels as ck
from cvt_kernels import reference

GRID = (4, 3)


def tensors_of(*shapes, dtype=torch.float64):
    return tuple(
        None if shape is None else torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes
    )


def branch(channels, *, stride=1, dtype=torch.float64):
    weight, scale, shift, mean = tensors_of((channels, 1, 3, 3), *[(channels,)] * 3, dtype=dtype)
    return ck.ConvBatchNorm(weight, scale, shift, mean, mean.square() + 0.5, stride=stride, padding=1)


def conv_linear_by(function, convs):
    """Returns conv_linear as a function of tensors alone."""

    def call(x, *linears):
        return function.conv_linear(x, GRID, convs, list(zip(linears[::2], linears[1::2], strict=True)))

    return call


def calls_of(function, dtype=torch.float64):
    """Returns a call of each operator: a function of tensors, and tensors. Every optional one is there."""
    make = functools.partial(tensors_of, dtype=dtype)
    x, fc1, residual = make((2, 3, 4), (5, 4), (2, 3, 5))
    vector, weight, bias = make((5,), (5,), (5,))
    convs = [branch(4, dtype=dtype), branch(4, stride=2, dtype=dtype)]
    return {
        "linear_gelu": (functools.partial(function.linear_gelu, approximate="tanh"), (x, fc1, vector)),
        "linear_add": (function.linear_add, (x, fc1, vector, residual)),
        "linear_add_layer_norm": (function.linear_add_layer_norm, (x, fc1, vector, residual, weight, bias)),
        "linear_add_layer_norm, shifted": (
            lambda *t: function.linear_add_layer_norm(*t[:-1], eps=1e-3, shift=t[-1]),
            (x, fc1, vector, residual, weight, bias, *make((5,))),
        ),
        "layer_norm_mlp": (
            lambda *t: function.layer_norm_mlp(*t[:-1], approximate="quick", shift=t[-1]),
            (x, *make((4,), (4,)), fc1, vector, *make((4, 5), (4,), (4,))),
        ),
        "conv_linear": (conv_linear_by(function, convs), make((2, 13, 4), (5, 4), (5,), (3, 4), (3,))),
        "conv_embedding": (
            lambda *t: function.conv_embedding(*t[:-1], stride=2, padding=1, class_token=t[-1]),
            make((2, 3, 7, 6), (5, 3, 3, 3), (5,), (5,), (5,), (5,)),
        ),
    }


every_call = pytest.mark.parametrize("name", calls_of(ck))


def assert_same(ours, theirs, **close):
    ours, theirs = (t if isinstance(t, tuple) else (t,) for t in (ours, theirs))
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, **close)


@every_call
def test_the_values_of_the_reference(name):
    (ours, tensors), (theirs, _) = (calls_of(f)[name] for f in (ck, reference))
    if name != "conv_linear":  # whose two calls have branches of their own
        assert_same(ours(*tensors), theirs(*tensors))
    before = [t.clone() for t in tensors]
    outs = ours(*tensors)
    assert all(map(torch.equal, before, tensors))
    assert all(t.is_contiguous() for t in (outs if isinstance(outs, tuple) else (outs,)))


def test_conv_linear_has_the_values_of_the_reference():
    convs = [branch(4), branch(4, stride=2)]
    tensors = tensors_of((2, 12, 4), (5, 4), (5,), (3, 4), None)
    assert_same(*(conv_linear_by(f, convs)(*tensors) for f in (ck, reference)))


@every_call
def test_gradients(name):
    function, tensors = calls_of(ck)[name]
    assert gradcheck(function, [t.requires_grad_() for t in tensors])


@every_call
def test_compiled(name):
    torch.compiler.reset()
    function, tensors = calls_of(ck, torch.float32)[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
    assert_same(compiled(*tensors), function(*tensors))


@every_call
def test_autocast_gives_the_dtypes_of_the_reference(name):
    torch.manual_seed(0)
    ours, tensors = calls_of(ck, torch.float32)[name]
    torch.manual_seed(0)  # the same branches
    theirs, _ = calls_of(reference, torch.float32)[name]
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(ours(*tensors), theirs(*tensors), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("bias", [False, True])
def test_in_place_of_the_residual(bias):
    x, weight, vector, residual, shift = tensors_of(
        (2, 3, 4), (5, 4), (5,) if bias else None, (2, 3, 5), (5,)
    )
    expected = reference.linear_add_layer_norm(x, weight, vector, residual, shift=shift)
    first, second = residual.clone(), residual.clone()
    assert ck.linear_add(x, weight, vector, first, inplace=True) is first
    h, y = ck.linear_add_layer_norm(x, weight, vector, second, shift=shift, inplace=True)
    assert h is second
    assert_same((first, h, y), (expected[0], *expected))


X, W, B, R = tensors_of((2, 3, 4), (5, 4), (5,), (2, 3, 5), dtype=torch.float32)
NORM, FC2 = tensors_of((4,), (4, 5), dtype=torch.float32)
CONVS, TOKENS = [branch(4, dtype=torch.float32)], torch.randn(2, 12, 4)
IMAGE, KERNEL = torch.randn(2, 3, 6, 6), torch.randn(5, 3, 3, 3)


def embedding(image=IMAGE, weight=KERNEL, bias=B, *norm, stride=1, padding=1, **more):
    return ck.conv_embedding(image, weight, bias, *norm, stride=stride, padding=padding, **more)


def mlp(x=X, norm_weight=NORM, fc1=W, fc1_bias=B, fc2=FC2, fc2_bias=None, **more):
    return ck.layer_norm_mlp(x, norm_weight, None, fc1, fc1_bias, fc2, fc2_bias, **more)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ck.linear_gelu(3.0, W), TypeError, "x: got float, expected a tensor"),
        (lambda: ck.linear_gelu(torch.tensor(1.0), W), ValueError, "x: got a scalar"),
        (lambda: ck.linear_gelu(X, W[:, :3]), ValueError, r"weight: got shape \(5, 3\), expected \(5, 4\)"),
        (lambda: ck.linear_gelu(X, W[0]), ValueError, r"weight: got shape \(4,\), expected 2 dimensions"),
        (lambda: ck.linear_gelu(X, W.half()), TypeError, "weight: has dtype float16, expected float32 as x"),
        (lambda: ck.linear_gelu(X, W, B[:3]), ValueError, r"bias: got shape \(3,\), expected \(5,\)"),
        (lambda: ck.linear_gelu(X, W, B.to("meta")), ValueError, "bias: is on meta, expected cpu as x"),
        (lambda: ck.linear_gelu(X, W, approximate="fast"), ValueError, "approximate: got 'fast'"),
        (lambda: ck.linear_add(X, W, B, R[:1]), ValueError, r"residual: got shape \(1, 3, 5\)"),
        (lambda: ck.linear_add(X, W, B, R.double()), TypeError, "residual: has dtype float64"),
        (lambda: ck.linear_add(X, W, B, None), TypeError, "residual: got NoneType"),
        (lambda: ck.linear_add(X, W, B, R.mT.contiguous().mT, inplace=True), ValueError, "is not contiguous"),
        (lambda: ck.linear_add(X, W.clone().requires_grad_(), B, R, inplace=True), ValueError,
         "inplace: got True where a gradient is wanted"),
        (lambda: ck.linear_add_layer_norm(X, W, B, R, NORM), ValueError, r"weight: got shape \(4,\)"),
        (lambda: ck.linear_add_layer_norm(X, W, B, R, eps=0), ValueError, "eps: got 0"),
        (lambda: ck.linear_add_layer_norm(X, W, B, R, shift=NORM), ValueError, r"shift: got shape \(4,\)"),
        (lambda: ck.linear_add_layer_norm(X, W, B, R, shift=B.half()), TypeError, "shift: has dtype float16"),
        (lambda: mlp(X[..., :0]), ValueError, r"x: got shape \(2, 3, 0\)"),
        (lambda: mlp(norm_weight=B), ValueError, r"weight: got shape \(5,\), expected \(4,\)"),
        (lambda: mlp(fc1=FC2), ValueError, r"fc1_weight: got shape \(4, 5\), expected \(4, 4\)"),
        (lambda: mlp(fc1_bias=NORM), ValueError, r"fc1_bias: got shape \(4,\), expected \(5,\)"),
        (lambda: mlp(fc2=W), ValueError, r"fc2_weight: got shape \(5, 4\), expected \(4, 5\)"),
        (lambda: mlp(fc2_bias=B), ValueError, r"fc2_bias: got shape \(5,\), expected \(4,\)"),
        (lambda: mlp(fc2=FC2.double()), TypeError, "fc2_weight: has dtype float64"),
        (lambda: mlp(approximate=None), ValueError, "approximate: got None"),
        (lambda: mlp(shift=B), ValueError, r"shift: got shape \(5,\)"),
        (lambda: ck.conv_linear(TOKENS, GRID, CONVS, []), ValueError, "linears: got 0, expected 1 as convs"),
        (lambda: ck.conv_linear(TOKENS, (5, 3), CONVS, [(W, B)]), ValueError, "grid"),
        (lambda: ck.conv_linear(TOKENS, GRID, CONVS, [(FC2, B)]), ValueError, r"linears\[0\]: got shape"),
        (lambda: ck.conv_linear(TOKENS, GRID, CONVS, [(W, NORM)]), ValueError, r"bias of linears\[0\]: got"),
        (lambda: ck.conv_linear(TOKENS, GRID, CONVS, [(W.half(), None)]), TypeError, r"linears\[0\]: has d"),
        (lambda: embedding(IMAGE[0]), ValueError, r"image: got shape \(3, 6, 6\), expected 4 dimensions"),
        (lambda: embedding(weight=KERNEL[:, :2]), ValueError, "image: got 3 channels, expected 2 as weight"),
        (lambda: embedding(weight=KERNEL[..., :2, :]), ValueError, r"weight: got shape \(5, 3, 2, 3\)"),
        (lambda: embedding(weight=KERNEL.double()), TypeError, "weight: has dtype float64"),
        (lambda: embedding(bias=NORM), ValueError, r"bias: got shape \(4,\), expected \(5,\)"),
        (lambda: embedding(IMAGE.half(), KERNEL.half(), B), TypeError, "bias: has dtype float32"),
        (lambda: embedding(IMAGE, KERNEL, B, NORM), ValueError, r"norm_weight: got shape \(4,\)"),
        (lambda: embedding(IMAGE, KERNEL, B, B, B.double()), TypeError, "norm_bias: has dtype float64"),
        (lambda: embedding(class_token=B[None]), ValueError, r"class_token: got shape \(1, 5\)"),
        (lambda: embedding(stride=0), ValueError, "stride: got 0, expected an integer of at least 1"),
        (lambda: embedding(padding=-1), ValueError, "padding: got -1, expected an integer of at least 0"),
        (lambda: embedding(eps=0.0), ValueError, "eps: got 0.0"),
        (lambda: embedding(IMAGE[..., :1], padding=0), ValueError, "6×1 pixels are too few for a kernel"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_parameters_of_float32_beside_an_image_of_half_precision():
    image, weight, bias = IMAGE.bfloat16(), KERNEL.bfloat16(), B.bfloat16()
    tokens = embedding(image, weight, bias, B, B, class_token=B)
    assert tokens.dtype == torch.bfloat16
    assert tokens.shape == (2, 37, 5)
    torch.testing.assert_close(tokens[:, 0], B.bfloat16().expand(2, 5))
