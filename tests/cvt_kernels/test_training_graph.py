"""Tests of graphs of calls with gradients, on a tape in the place of CUDA as in ``test_graphs``."""

import copy
import gc
import random

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import cvt_kernels as ck
from cvt_kernels import graphs
from tests.cvt_kernels.test_graphs import Toy, plain
from tests.tape import taped
from tests.upstream import KERNELS_FIRST, PYRAMIDS, huggingface, logits, microsoft, ours, pvt


@pytest.fixture
def cuda():
    with taped() as counting, ck.use_backend("reference"):
        yield counting


def replays(cuda):
    return [tape.replays for tape in cuda.tapes]


def state_of(model):
    """Returns copies of the state and the gradients of a model."""
    gradients = {f"{name}.grad": each.grad for name, each in model.named_parameters()}
    tensors = model.state_dict() | gradients
    return {name: None if each is None else each.clone() for name, each in tensors.items()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for name, each in expected.items():
        assert (got[name] is None) == (each is None), name
        assert each is None or torch.equal(got[name], each), name


class Steps:
    """Training steps of a model and of its copy without graphs, with the same numbers."""

    def __init__(self, model, make=lambda: torch.randn(2, 4), result=lambda out: out):
        self.model, self.expected = model, plain(model)
        self.make, self.result = make, result
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, self.expected)]

    def step(self, times=1, accumulate=1):
        for _ in range(times):
            batches = [self.make() for _ in range(accumulate)]
            losses = []
            state = torch.get_rng_state()
            for model, optimizer in zip((self.model, self.expected), self.optimizers, strict=True):
                torch.set_rng_state(state)
                optimizer.zero_grad()
                for x in batches:
                    loss = self.result(model(x)).square().mean()
                    loss.backward()
                losses.append(loss.detach())
            assert torch.equal(*losses)
            assert_equal(state_of(self.model), state_of(self.expected))
            for optimizer in self.optimizers:
                optimizer.step()


class WithDropout(Toy):
    def __init__(self):
        super().__init__()
        self.last = nn.Dropout(0.5)


@pytest.mark.parametrize("kind", [Toy, WithDropout])
def test_steps_are_those_without_graphs(cuda, kind):
    Steps(ck.graphed(kind().train())).step(times=5)
    assert replays(cuda) == [4, 4]  # the first step is not captured


@pytest.mark.parametrize("make", [ours, huggingface, microsoft, *PYRAMIDS])
def test_models_are_trained(cuda, make):
    pixels, settings = (70 if make is pvt else 32), {"drop_path": 0.3} if make in PYRAMIDS else {}
    model = ck.accelerate(make(**settings).train())
    Steps(ck.graphed(model), lambda: torch.randn(2, 3, pixels, pixels), logits).step(times=3)
    assert replays(cuda) == [2, 2]


def test_gradients_accumulate(cuda):
    Steps(ck.graphed(Toy().train())).step(times=3, accumulate=3)
    assert replays(cuda) == [8, 8]


def test_gradients_stay_what_they_are(cuda):
    model = ck.graphed(Toy().train())
    kept = []
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        kept.append((model.first.weight.grad, model.first.weight.grad.clone()))
    for gradient, value in kept:
        assert torch.equal(gradient, value)


def test_modules_and_parameters_that_are_frozen(cuda):
    model = ck.graphed(Toy().train())
    steps = Steps(model)
    steps.step(times=2)
    for each in (model, steps.expected):
        each.norm.eval()
        each.first.requires_grad_(False)
        each.zero_grad()
    steps.step(times=3)
    assert replays(cuda) == [1, 1, 2, 2]


def test_an_argument_with_a_gradient(cuda):
    model = ck.graphed(Toy().eval())
    for _ in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        model(x, extra=torch.ones(2, 3)).square().sum().backward()
        expected = x.detach().clone().requires_grad_()
        plain(model)(expected, extra=torch.ones(2, 3)).square().sum().backward()
        assert torch.equal(x.grad, expected.grad)
    assert replays(cuda) == [2, 2]


class Several(nn.Module):
    """A model with a parameter that it does not use, and a result without a gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.used(x)
        return {"y": y, "largest": y.argmax(1), "other": y * 2, "name": "y"}


def test_results_without_gradients(cuda):
    model = ck.graphed(Several().train())
    for i in range(4):
        x = torch.randn(2, 4)
        model.zero_grad()
        out, expected = model(x), plain(model)(x)
        assert not out["largest"].requires_grad
        assert torch.equal(out["largest"], expected["largest"])
        name = ("y", "other")[i % 2]
        assert out["name"] == "y"
        out[name].sum().backward()
        assert torch.equal(model.used.bias.grad, torch.full((4,), 2.0 * (1 + i % 2)))
        assert model.unused.weight.grad is None
    assert replays(cuda) == [3, 3]


def test_a_forward_before_the_backward_of_the_last_one_runs_without_a_graph(cuda):
    model, x, y = ck.graphed(Toy().train()), torch.randn(2, 4), torch.randn(2, 4)
    for _ in range(2):
        model(x).sum().backward()
    expected = plain(model)
    expected.zero_grad()
    model.zero_grad()
    first = model(x)
    assert graphs.why_not_graphed(model, y) == "the backward of the forward before has not been computed"
    second = model(y)
    (first.square().sum() + second.square().sum()).backward()
    (expected(x).square().sum() + expected(y).square().sum()).backward()
    assert_equal(state_of(model), state_of(expected))
    assert replays(cuda) == [2, 2]
    del first, second
    model(x)  # its backward is never asked for
    gc.collect()
    assert graphs.why_not_graphed(model, x) is None


def test_a_second_backward_raises(cuda):
    model, x = ck.graphed(Toy().train()), torch.randn(2, 4)
    model(x).sum().backward()
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward of one forward"):
        loss.backward()
    gradient = torch.autograd.grad(model(x).square().sum(), model.first.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cvt_kernels\.restore"):
        gradient[0].sum().backward()


def test_inference_between_forward_and_backward(cuda):
    model, x = ck.graphed(Toy().train()), torch.randn(2, 4)
    steps = Steps(model)
    steps.step(times=2)
    loss = model(x).square().sum()
    with torch.no_grad():
        for _ in range(2):
            model.eval()(x)
    expected = steps.expected
    for each in (model, expected):
        each.train().zero_grad()
    expected(x).square().sum().backward()
    loss.backward()
    assert torch.equal(model.first.weight.grad, expected.first.weight.grad)


def test_another_shape_is_captured_when_it_comes_again(cuda):
    model = ck.graphed(Toy().train())
    for size in (2, 2, 3, 2, 3, 3):
        model(torch.randn(size, 4)).sum().backward()
    assert replays(cuda) == [2, 2, 2, 2]
    assert len(cuda.released) == 0


def test_replaced_weights_are_seen(cuda):
    model = ck.graphed(Toy().train())
    steps = Steps(model)
    steps.step(times=2)
    for each, optimizer in zip((model, steps.expected), steps.optimizers, strict=True):
        each.first.weight = nn.Parameter(torch.eye(4))
        optimizer.param_groups[0]["params"][0] = each.first.weight
    steps.step(times=2)  # one that drops the graphs, and a first one
    assert len(cuda.tapes) == 2
    steps.step(times=2)
    assert len(cuda.tapes) == 4


def hooked(model):
    model.second.register_full_backward_hook(lambda *_: None)


def hooked_parameter(model):
    model.first.weight.register_hook(lambda gradient: 2 * gradient)


def checkpointing(model):
    model.gradient_checkpointing = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "a module or a parameter of the model has backward hooks"),
        (hooked_parameter, "a module or a parameter of the model has backward hooks"),
        (checkpointing, "the model computes activations again in the backward"),
        (lambda model: setattr(model, "last", nn.SyncBatchNorm(3)), "a SyncBatchNorm communicates"),
        (
            lambda model: model.first.register_forward_hook(lambda *_: None),
            "a module of the model has forward",
        ),
    ],
)
def test_a_call_that_is_left_alone(cuda, change, reason):
    model, x = ck.graphed(Toy().train()), torch.randn(2, 4)
    change(model)
    assert graphs.why_not_graphed(model, x).startswith(reason)
    if "Sync" not in reason:
        for _ in range(3):
            model(x).sum().backward()
    assert not cuda.tapes


def test_modes_around_a_call(cuda):
    model, x = ck.graphed(Toy().train()), torch.randn(2, 4)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
        assert graphs.why_not_graphed(model, x) == "autograd's anomaly detection is on"
    with torch.autograd.graph.save_on_cpu():
        assert graphs.why_not_graphed(model, x) == "hooks on saved tensors are active"
    with torch.no_grad():
        assert graphs.why_not_graphed(model, x).startswith("the model is in training mode, and no gradient")
    assert graphs.why_not_graphed(model, x).startswith("a call with gradients is captured when it comes for")


class Lucky(Toy):
    """A model that skips a layer by chance, as Python's or the CPU's random numbers have it."""

    def forward(self, x):
        return super().forward(x) * (2 if random.random() < 0.5 else 1)


class Remembers(Toy):
    """A model that computes with a parameter that it has put aside."""

    def __init__(self):
        super().__init__()
        self.aside = [self.second.weight]

    def forward(self, x):
        return nn.functional.linear(self.norm(self.first(x)), self.aside[0])


def test_a_parameter_that_is_not_taken_from_its_module_is_refused(cuda):
    model, x = ck.graphed(Remembers().train()), torch.randn(2, 4)
    model(x).sum().backward()
    with pytest.warns(RuntimeWarning, match="a parameter that it does not take from its module"):
        model(x).sum().backward()
    assert model.second.weight.grad is not None
    assert dict(model.named_parameters())["second.weight"] is model.aside[0]


def test_tied_parameters(cuda):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x).relu())

    model = ck.graphed(Tied().train())
    Steps(model).step(times=4)
    assert model.first.weight is model.second.weight
    assert replays(cuda) == [3, 3]


def test_random_numbers_of_the_host_are_refused(cuda):
    model, x = ck.graphed(Lucky().train()), torch.randn(2, 4)
    model(x).sum().backward()
    state = random.getstate()
    model(x).sum().backward()
    random.setstate(state)
    random.random()  # the call without a graph, once
    assert random.getstate() != state
    assert graphs.why_not_graphed(model, x) == "the forward takes random numbers of the host"


def test_copies_begin_without_graphs(cuda):
    model = ck.graphed(Toy().train())
    Steps(model).step(times=2)
    other = copy.deepcopy(model)
    Steps(other).step(times=3)
    assert replays(cuda) == [1, 1, 2, 2]


def test_a_model_that_computes_again_inside_is_not_captured(cuda):
    """A checkpoint within the forward is not seen beforehand, but works or is refused."""

    class Again(Toy):
        def forward(self, x):
            return checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    Steps(ck.graphed(Again().train())).step(times=3)


# On a GPU -------------------------------------------------------------------------------------------------


def gpu_steps(model, *, autocast, count=6):
    """Trains a model on the GPU; returns the losses and the final state."""
    generator = torch.Generator("cuda").manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.cuda.manual_seed(0)
    losses = []
    for i in range(count):
        x = torch.randn(4, 3, 64, 64, generator=generator, device="cuda")
        optimizer.zero_grad()
        for part in x.split(4 if i % 3 else 2):  # gradients accumulate
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                out = logits(model(part))
            out.float().square().mean().backward()
            losses.append(out.float().square().mean().item())
        optimizer.step()
    return losses, state_of(model)


@pytest.mark.gpu
@pytest.mark.usefixtures("_without_tf32")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("make", [huggingface, microsoft, ours])
def test_gpu_steps_are_those_without_graphs(make, autocast):
    with ck.use_backend("triton", *KERNELS_FIRST):
        model = ck.accelerate(make().cuda().train())
        graphed = ck.graphed(copy.deepcopy(model))
        expected_losses, expected = gpu_steps(model, autocast=autocast)
        losses, state = gpu_steps(graphed, autocast=autocast)
        assert len(graphs._graphs_of(graphed)._graphs) == 2
    # PyTorch's own products and convolutions of float32 may sum in another order within a capture.
    torch.testing.assert_close(losses, expected_losses, rtol=1e-3, atol=1e-3)
    assert state.keys() == expected.keys()


@pytest.mark.gpu
def test_gpu_memory_is_given_back():
    model, x = ck.graphed(ours().cuda().train()), torch.randn(8, 3, 64, 64, device="cuda")
    for _ in range(3):
        model.zero_grad()
        logits(model(x)).sum().backward()
    model.zero_grad()
    ck.restore(model)
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers(), x))
    assert before <= weights + 2**21
