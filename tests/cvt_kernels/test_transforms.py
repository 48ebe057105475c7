"""Transforms of ``torch.func`` over the operators and over models, which PyTorch's own operators serve."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import cvt_kernels as ck
from cvt import create_model
from tests import upstream
from tests.checks import not_built
from tests.cvt_kernels.test_tracing import BLOCK, CALLS, CHANNELS, GRID, LINEAR, ROWS, TOKENS, tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # of torch.func itself
    pytest.mark.filterwarnings("ignore:.*_scaled_dot_product_flash:UserWarning"),  # of Hugging Face's own
    pytest.mark.filterwarnings("ignore:cvt_kernels. a frozen model was called where gradients"),
]

#: Not in place, for which nothing may want a gradient.
CALLS = CALLS | {"linear_add": lambda x: ck.linear_add(x, *LINEAR, x)}
#: Those whose results are rounded, and have no gradients.
INTEGERS = ("quantize_rows", "layer_norm_quantize", "gelu_quantize", "linear_int8")


def parts_of(out):
    """Returns the results of an operator."""
    return out if isinstance(out, tuple) else (out,)


def as_tensor(out):
    """Returns all results as one tensor."""
    return torch.cat([part.flatten().float() for part in parts_of(out)])


def of_operator(f, x):
    """Returns what the transforms make of a function of tokens."""
    return {
        "vmap": vmap(f)(torch.stack([x, x + 1])),
        "grad": grad(lambda x: f(x).sin().sum())(x),
        "vjp": vjp(f, x)[1](f(x))[0],
        "jvp": jvp(f, (x,), (x,))[1],
        "jacrev": jacrev(lambda x: f(x)[:3])(x),
        "vmap of grad": vmap(grad(lambda x: f(x).sin().sum()))(torch.stack([x, x + 1])),
        "forward over reverse": jvp(grad(lambda x: f(x).sin().sum()), (x,), (x,))[1],
    }


@pytest.mark.parametrize("operator", [name for name in CALLS if name not in INTEGERS])
def test_operators(operator):
    x = tensor(1, TOKENS, CHANNELS)

    def f(x):
        return as_tensor(CALLS[operator](x))

    with ck.use_backend("reference"):
        expected = of_operator(f, x)
    with ck.use_backend("native", "reference"):
        torch.testing.assert_close(of_operator(f, x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("operator", INTEGERS)
def test_rounding_operators_are_vectorized(operator):
    x = tensor(2, 1, TOKENS, CHANNELS)

    def f(x):
        return as_tensor(CALLS[operator](x))

    def numbers(x):
        return as_tensor(tuple(part for part in parts_of(CALLS[operator](x)) if part.is_floating_point()))

    with ck.use_backend("native", "reference"):
        torch.testing.assert_close(vmap(f)(x), torch.stack([f(each) for each in x]), rtol=1e-4, atol=1.0)
        torch.testing.assert_close(vmap(numbers)(x), torch.stack([numbers(each) for each in x]))


@pytest.mark.parametrize(
    ("backend", "varied"),
    [
        ("composed", "weight of a block with rows"),
        ("float32", "weight"),
        ("int_mm", "bias"),
        ("int_mm", "residual"),
        ("dequantized", "residual"),
    ],
)
@torch.no_grad()
def test_vectorized_over_other_tensors_than_the_input(backend, varied):
    """Results that are not vectorized have no room for summands that are."""
    x, (weight, scales) = tensor(CHANNELS, CHANNELS), ck.quantize_rows(LINEAR.weight)
    tokens, half = tensor(1, TOKENS, CHANNELS), x.bfloat16()

    def f(values):
        if varied == "weight of a block with rows":
            block = BLOCK._replace(proj=LINEAR._replace(weight=values))
            return ck.transformer_block(tokens, GRID, block, rows=ROWS)
        if varied == "weight":
            return ck.linear(half, values.bfloat16())
        return ck.linear_int8(x, weight, scales[:, 0], **{varied: values[0] if varied == "bias" else values})

    several = tensor(2, CHANNELS, CHANNELS)
    with ck.use_backend("reference"):
        expected = torch.stack([f(values) for values in several])
    with ck.use_backend(backend, "reference"):
        torch.testing.assert_close(vmap(f)(several), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not_built(), reason="there is no C++ compiler, hence no extension")
def test_kernels_that_are_requested_alone_refuse():
    x = torch.rand(2, 3, 8)
    with ck.use_backend("native"):
        for transformed in (vmap(ck.gelu), grad(lambda x: ck.gelu(x).sum())):
            with pytest.raises(ck.BackendUnavailable, match=r"'native'.*\(torch.func\) are not supported"):
                transformed(x)
        with pytest.raises(ck.BackendUnavailable, match="forward-mode differentiation is not supported"):
            jvp(ck.gelu, (x,), (x,))


def test_compiled_transforms():
    x, row = torch.rand(2, 3, 8), torch.rand(8)
    transformed = vmap(grad(lambda x: ck.layer_norm(x, row, row).sin().sum()))
    with ck.use_backend("reference"):
        expected = transformed(x)
    with ck.use_backend("native", "reference"):
        compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


def logits(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def of_model(model, x, *, forward_mode):
    """Returns what the transforms make of a model, as functions of images and of weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def f(weights, x):
        return logits(functional_call(model, weights, (x,)))

    def loss(weights, x):
        return f(weights, x[None]).sin().sum()

    several = {name: torch.stack([weight, 1.01 * weight]) for name, weight in weights.items()}
    found = {
        "over inputs": vmap(lambda x: f(weights, x))(x[:, None]),
        "over weights": vmap(f, (0, None))(several, x),
        "per sample": vmap(grad(loss), (None, 0))(weights, x),
        "of inputs": jacrev(lambda x: loss(weights, x))(x[0]),
    }
    if forward_mode:
        found["forward"] = jvp(lambda x: f(weights, x), (x,), (x,))[1]
    return found


def build(name):
    if name == "ours":
        return create_model(upstream.ONE_STAGE)
    return getattr(upstream, name)()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("huggingface", "eval"),
        ("huggingface", "frozen"),
        ("ours", "eval"),
        ("ours", "frozen"),
        ("segformer", "eval"),
        ("pvt_v2", "train"),  # which has no BatchNorm
    ],
)
def test_models(name, mode):
    plain, x = build(name).train(mode == "train"), torch.rand(2, 3, 64, 64)
    fast = copy.deepcopy(plain)
    if mode == "frozen" or name != "ours":
        ck.accelerate(fast, freeze=mode == "frozen")
    forward_mode = name != "segformer"  # the attention of Hugging Face's own has none
    with ck.use_backend("reference"):
        expected = of_model(plain, x, forward_mode=forward_mode)
    for names in (("native", "reference"), ("auto",)):
        with ck.use_backend(*names):
            actual = of_model(fast, x, forward_mode=forward_mode)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_batch_norm_in_training():
    """It changes its buffers, which PyTorch forbids within transforms."""
    plain, x = upstream.huggingface(), torch.rand(2, 3, 32, 32)
    for model in (plain, ck.accelerate(copy.deepcopy(plain))):
        with pytest.raises(RuntimeError, match="in-place"):
            grad(lambda x, model=model: model(x).logits.sum())(x)
        with pytest.raises(RuntimeError, match="running_mean"):
            vmap(lambda x, model=model: model(x[None]).logits)(x)
