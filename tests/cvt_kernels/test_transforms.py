"""Transforms of ``torch.func`` over models, and what the contract of each operator does not have of them."""

import copy

import pytest
import torch
from torch.func import functional_call, grad, jacrev, jvp, vmap

import cvt_kernels as ck
from cvt import create_model
from cvt_kernels.ops.transformer_block import transformer_block
from tests import upstream
from tests.checks import needs_extension
from tests.contract.examples import example

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # of torch.func itself
    pytest.mark.filterwarnings("ignore:.*_scaled_dot_product_flash:UserWarning"),  # of Hugging Face's own
    pytest.mark.filterwarnings("ignore:cvt_kernels. a frozen model was called where gradients"),
]


@pytest.mark.parametrize(
    ("backend", "varied"), [("composed", "weight of a block with rows"), ("float32", "weight")]
)
@torch.no_grad()
def test_vectorized_over_other_tensors_than_the_input(backend, varied):
    """Results that are not vectorized have no room for summands that are."""
    x = torch.rand(8, 8)
    tokens, grid, block, rows = example("transformer_block", "reference", "rows").call.record[:4]

    def f(varying):
        if varied == "weight of a block with rows":
            changed = block._replace(norm1=block.norm1._replace(weight=varying[0, 0] * block.norm1.weight))
            return transformer_block(tokens, grid, changed, rows=rows)
        return ck.linear(x.bfloat16(), varying.bfloat16())

    several = torch.rand(2, 8, 8)
    with ck.use_backend("reference"):
        expected = torch.stack([f(each) for each in several])
    with ck.use_backend(backend, "reference"):
        torch.testing.assert_close(vmap(f)(several), expected, rtol=1e-3, atol=1e-3)


@needs_extension
def test_kernels_that_are_requested_alone_refuse_gradients():
    """So do they refuse the other transforms, as the contract of each operator has it."""
    with (
        ck.use_backend("cpu"),
        pytest.raises(ck.BackendUnavailable, match=r"'cpu'.*\(torch.func\) are not supported"),
    ):
        grad(lambda x: ck.gelu(x).sum())(torch.rand(2, 3, 8))


def of_model(model, x, *, forward_mode):
    """Returns what the transforms make of a model, as functions of images and of weights."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def f(weights, x):
        return upstream.logits(functional_call(model, weights, (x,)))

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
    for names in (("cpu", "reference"), ("auto",)):
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
