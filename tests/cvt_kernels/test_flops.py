"""Counters of floating-point operations count what the model does, whatever serves it."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cvt_kernels as ck
from cvt import PRESETS, create_model
from cvt.tools.evaluation import cost
from cvt_kernels import backends
from cvt_kernels.ops.cards import all_cards
from tests.contract.examples import example
from tests.fuzz.judge import call_public
from tests.upstream import KERNELS_FIRST, huggingface, images, logits, microsoft, ours, with_all_tokens


def flops(function, *args, backward=False, **kwargs):
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        out = function(*args, **kwargs)
        if backward:
            logits(out).sum().backward()
    return counter.get_total_flops()


class OtherFlopCounterMode(TorchDispatchMode):
    """A counter as other packages have them, which asks for no hook on all modules."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        count = flop_registry.get(function.overloadpacket)
        self.total += 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
        return out


def other_flops(function, *args, **kwargs):
    with torch.no_grad(), OtherFlopCounterMode() as counter:
        function(*args, **kwargs)
    return counter.total


def test_cvt_13():
    with torch.device("meta"):
        model = create_model("cvt_13").eval()
        x = torch.empty(1, 3, 224, 224)
    assert flops(model, x) == 2 * 4_566_089_216 == 2 * cost(PRESETS["cvt_13"], 224).multiply_adds
    assert flops(ck.accelerate(model, freeze=True), x) == 2 * 4_566_089_216


@pytest.mark.parametrize("names", [("auto",), KERNELS_FIRST], ids=lambda names: names[0])
@pytest.mark.parametrize("make", [huggingface, microsoft])
def test_accelerated_models_cost_what_they_did(make, names):
    own, x = with_all_tokens(make()), images(2, 32, 48)
    live = ck.accelerate(copy.deepcopy(own))
    with ck.use_backend(*names):
        for mode in ("eval", "train"):
            for model in (own, live):
                getattr(model, mode)()
            for backward in (False, True):
                assert flops(live, x, backward=backward) == flops(own, x, backward=backward) > 0
            assert other_flops(live, x) == flops(own, x)
        frozen = ck.accelerate(copy.deepcopy(own).eval(), freeze=True)
        assert flops(frozen, x) == other_flops(frozen, x) == flops(own.eval(), x)


@pytest.mark.parametrize("names", [("auto",), KERNELS_FIRST], ids=lambda names: names[0])
@pytest.mark.parametrize("make", [ours, huggingface])
def test_quantized_models_cost_what_they_did(make, names):
    model, x = with_all_tokens(make().eval()), images(2, 32, 48)
    expected = flops(model, x)
    ck.quantize(model)
    with ck.use_backend(*names):
        assert flops(model, x) == other_flops(model, x) == expected
        assert flops(ck.accelerate(model), x) == expected


def test_modules_are_told_apart():
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        ours().eval()(images(2, 32, 32))
    counts = {name: sum(parts.values()) for name, parts in counter.get_flop_counts().items()}
    assert counts["CvT.stage0.blocks.0.mlp.fc1"] == 2 * (2 * 64 * 16 * 64)
    assert counts["CvT.stage0.blocks.0.attn.conv_proj_q.conv"] == 2 * (2 * 64 * 16 * 9)
    assert counts["CvT.stage0.blocks.0.attn"] > counts["CvT.stage0.blocks.0.attn.proj_q"]


CASES = [(operator, "usual") for operator, card in all_cards().items() if card.multiplies]
CASES += [
    ("conv_projection", "training"),
    ("transformer_block", "SegFormer"),
    ("linear_int8", "rounded=True"),
]
CASES += [(operator, "inplace=True") for operator in ("linear_add", "linear_add_layer_norm")]


@pytest.mark.parametrize("count", [flops, other_flops], ids=["PyTorch's", "another"])
@pytest.mark.parametrize(
    ("operator", "name", "backend"),
    [
        (*case, backend)
        for case in CASES
        for backend in ("auto", "cpu")
        if backend in ("auto", *backends.implementations[case[0]])
    ],
)
def test_each_operator_costs_what_its_reference_does(operator, name, backend, count):
    made = example(operator, "reference", name)
    expected = count(made.public, made.call.record)
    with torch.no_grad(), ck.use_backend(backend):
        call_public(operator, made.call.map(torch.clone).record)  # later calls of the kind are quicker
        assert count(call_public, operator, made.call.record) == expected > 0
