"""verify() passes right models, finds wrong operators where they are, and changes nothing."""

import copy
import importlib
import itertools
import re
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cvt_kernels as ck
from cvt_kernels import backends
from cvt_kernels.tuning import clock
from tests import upstream
from tests.checks import Terminal, implementation
from tests.cvt_kernels.models.test_accelerate import inputs
from tests.upstream import images

verify_module = importlib.import_module("cvt_kernels.models.verify")  # of the name of a function


def spoil(operator, change):
    """Lets an operator compute something else."""
    function = getattr(ck.reference, operator)
    backends.register(operator, "cpu", implementation(operator, lambda *a, **kw: change(function(*a, **kw))))


@pytest.mark.parametrize("make", [*upstream.UPSTREAMS, upstream.ours, *upstream.PYRAMIDS])
def test_good_models_pass(make):
    x = inputs(make) if make in upstream.PYRAMIDS else images()
    report = ck.verify(make(**upstream.RANDOM), x, rounds=1)
    assert report.passed, str(report)
    assert report.failures == []
    assert report.random < 1e-5
    assert all(layer.fused for layer in report.layers)
    rows = ck.coverage(make() if make is upstream.ours else ck.accelerate(make().eval()))
    assert [layer.path for layer in report.layers] == [row.path for row in rows] + [""]
    for layer in report.layers if make not in upstream.PYRAMIDS else []:
        has_statistics = layer.class_name not in ("ConvEmbed", "CvtConvEmbeddings")
        assert (layer.statistics is not None) == has_statistics
        errors = [layer.evaluation, layer.training, layer.gradients, *([layer.statistics] * has_statistics)]
        assert all(0 <= error.eager < 1e-5 and error.accelerated < 1e-5 for error in errors)
    assert report.evaluation.eager > 0
    assert report.training.accelerated > 0


def test_half_precision():
    model = upstream.microsoft_plain().bfloat16()
    report = ck.verify(model, images(dtype=torch.bfloat16), rounds=1)
    assert report.passed, str(report)
    assert 1e-4 < report.layers[-1].evaluation.eager < 0.1
    with torch.autocast("cpu", torch.bfloat16):
        report = ck.verify(upstream.microsoft(), images(), rounds=1)
    assert report.passed, str(report)
    assert report.layers[-1].evaluation.eager > 1e-4


@pytest.mark.parametrize("make", [*upstream.ENCODERS, *upstream.TIMMS])
def test_encoders_pass(make):
    report = ck.verify(make(), images(2, 32, 32), rounds=1)
    assert report.passed, str(report)
    assert all(layer.fused for layer in report.layers)
    assert len(report.layers) > 2
    assert 0 < report.layers[-1].evaluation.accelerated < 1e-5
    assert report.layers[-1].training.accelerated == report.layers[-1].training.eager  # by the same forwards


@pytest.mark.parametrize("make", [upstream.microsoft, *upstream.PYRAMIDS])
def test_evaluation_alone(make, monkeypatch):
    """No training step, and float64 of two images."""
    ran, run = [], verify_module._Run._forward

    def noted(self, model):
        sizes = {each.dtype: len(each) for each in verify_module.tensors_in(self.inputs)}
        ran.append((model.training, *sizes.items()))
        return run(self, model)

    monkeypatch.setattr(verify_module._Run, "_forward", noted)
    x = inputs(make) if make in upstream.PYRAMIDS else images()
    model = make(**upstream.RANDOM).requires_grad_(False)  # nothing to train
    report = ck.verify(model, x.repeat(2, 1, 1, 1), rounds=1, evaluation_only=True)
    assert report.passed, str(report)
    assert report.training is report.random is None
    assert {(layer.training, layer.gradients, layer.statistics) for layer in report.layers} == {(None,) * 3}
    assert all(layer.evaluation.accelerated < 1e-5 for layer in report.layers)
    assert {(False, (torch.float64, 2)), (False, (torch.float32, 2 * len(x)))} == set(ran)
    lines = str(report).splitlines()
    assert next(line for line in lines if line.startswith("block")).split() == [
        "block",
        "class",
        "evaluation",
    ]
    assert not any(line.startswith("training step") for line in lines)


def test_each_run_is_logged(caplog):
    with caplog.at_level("INFO", "cvt_kernels"):
        ck.verify(upstream.ours(), images(1), rounds=1, progress=False, evaluation_only=True)
    messages = [each.getMessage() for each in caplog.records if each.getMessage().startswith("verify")]
    assert [each.split(", ")[0] for each in messages] == [f"verify: run {i} of 7" for i in range(1, 8)]
    assert all(re.fullmatch(r".*, after \d{1,3} seconds", each) for each in messages)


def test_the_report_names_the_parameter_and_what_to_do():
    """Its gradient 0 is off; how large it is beside the model's largest one is said too."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.cat([2 * gradient[..., :1], gradient[..., 1:]], dim=-1)

    spoil("attention", Off.apply)
    report = ck.verify(upstream.microsoft(), images(), rounds=1)
    failure = next(each for each in report.failures if each.startswith("stage0.blocks.0, gradients"))
    found = re.search(r" in (attn\S+), whose gradient is (\S+) of the model's largest$", failure)
    model = upstream.microsoft()
    assert found[1] in dict(model.stage0.blocks[0].named_parameters())
    assert 0 < float(found[2]) <= 1
    assert "what to do: until it is mended" in str(report)


WRONG = {
    "attention": (lambda out: 1.001 * out, "stage0.blocks.0, evaluation"),
    "conv_projection": (lambda outs: tuple(out + 1e-3 for out in outs), "stage0.blocks.0, evaluation"),
    "add_layer_norm": (lambda outs: (outs[0], outs[1].detach()), "stage0.blocks.0, gradients"),
    "gelu": (lambda out: torch.full_like(out, torch.nan), "stage0.blocks.0, evaluation: nan"),
}


@pytest.mark.parametrize("operator", WRONG)
def test_a_wrong_operator_is_found_where_it_is(operator):
    change, place = WRONG[operator]
    spoil(operator, change)
    report = ck.verify(upstream.microsoft(**upstream.RANDOM), images(), rounds=1)
    assert not report.passed
    assert any(failure.startswith(place) for failure in report.failures), report.failures
    assert report.runs == 1  # such errors are no chance
    # Evaluation is right up to the block in which the operator is.
    assert report.layers[0].evaluation.passed
    assert "less accurate than allowed:" in str(report)


@pytest.mark.parametrize("runs", [1, 9])
def test_an_error_that_is_too_large_by_chance_is_told_from_a_fault(runs):
    """A single value of each attention is off by 10 units in the last place, in one run or in all of them."""
    model, calls = upstream.microsoft(**upstream.RANDOM), itertools.count()
    blocks = sum(row.class_name == "Block" for row in ck.coverage(model))

    def add_units(out):
        off = torch.zeros_like(out)
        off[0, 0, 0] = 10 * torch.finfo(out.dtype).eps * out.detach().abs().max()
        return out + off if next(calls) < runs * 2 * blocks else out  # in evaluation and in training

    spoil("attention", add_units)
    report = ck.verify(model, images(), rounds=1)
    assert report.runs == 9, str(report)
    assert report.passed == (runs == 1), str(report)
    assert "mean of 9 runs" in str(report)
    # Each run begins with the statistics that the model has.
    assert all(layer.statistics is None or layer.statistics.eager < 1e-5 for layer in report.layers)


def test_wrong_random_numbers_are_found():
    spoil("layer_norm", lambda out: out + 0 * torch.rand(()))
    model = upstream.microsoft(**upstream.RANDOM)
    report = ck.verify(model, images(), rounds=1)
    assert report.random > 1e-2
    assert [failure.split(":")[0] for failure in report.failures] == ["model, with random numbers"]


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_nothing_is_changed(mode, accelerated):
    model = getattr(upstream.huggingface(**upstream.RANDOM), mode)()
    if accelerated:
        ck.accelerate(model)
    inner = model.cvt.encoder.stages[0].layers[0].attention.attention.convolution_projection_key
    inner.eval()
    model(images()).logits.sum().backward()
    x = images()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    modes, classes = [m.training for m in model.modules()], [type(m) for m in model.modules()]
    random = torch.get_rng_state()
    with torch.inference_mode():
        ck.verify(model, x, rounds=1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert [m.training for m in model.modules()] == modes
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(x, images())
    assert backends.requested_backends() == upstream.KERNELS_FIRST


def test_inputs_by_name_and_wrappers():
    model = upstream.huggingface()
    inputs = {"pixel_values": images(), "labels": torch.tensor([1, 2])}
    report = ck.verify(torch.compile(model, backend="eager"), inputs, rounds=1)
    assert report.passed, str(report)
    assert report.heading == "CvtForImageClassification, float32 on cpu, inputs 2×3×64×64"
    assert ck.verify(nn.DataParallel(copy.deepcopy(model)), (images(),), rounds=1).passed


class Checkpointed(nn.Linear):
    """A layer that is computed again in its backward; notes the backends that are asked for then."""

    def forward(self, x):
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x):
        self.noted.append(backends.requested_backends())
        return super().forward(x)


def test_checkpointing_asks_for_the_same_backends_again():
    model = Checkpointed(4, 4)
    model.noted = []
    verify_module._Run(model, torch.ones(1, 4), ("reference",), ()).train()
    assert model.noted == [("reference",)] * 2
    assert backends.requested_backends() == upstream.KERNELS_FIRST


def test_the_report_is_a_table(monkeypatch):
    monkeypatch.setattr(clock.Times, "is_disturbed", False)
    report = ck.verify(ck.accelerate(upstream.microsoft()), images(), rounds=1)
    lines = str(report).splitlines()
    assert lines[0] == "ConvolutionalVisionTransformer, float32 on cpu, inputs 2×3×64×64"
    header = lines.index(next(line for line in lines if line.startswith("block")))
    assert lines[header].split() == ["block", "class", "evaluation", "training", "gradients", "statistics"]
    table = lines[header : lines.index("", header)]
    assert len(table) == 1 + 10 + 1  # three stages, seven embeddings and blocks
    for start in (lines[header].index(word) for word in ("class", "evaluation", "training", "gradients")):
        assert all(line[start - 2 : start] == "  " and line[start] != " " for line in table)
    assert table[-1].startswith("(model)")
    assert "times as fast" in lines[-3]
    assert lines[-1] == "as accurate as it was"


def test_a_bar_is_drawn_on_a_terminal(monkeypatch):
    drawn = []
    for options in ({"progress": False}, {}):
        monkeypatch.setattr(sys, "stderr", Terminal())
        ck.verify(upstream.ours(), images(1), rounds=1, **options)
        drawn.append(sys.stderr.getvalue())
    assert drawn[0] == ""
    assert "verify:   0%|" in drawn[1]
    assert re.search(r"/11 \[\d\d:\d\d<\d\d:\d\d", drawn[1])  # the time left
    assert "0/11 [" in drawn[1]  # three recorded runs; two models timed twice, with a run that warms up
    assert not drawn[1].split("\r")[-1].strip()


@pytest.mark.parametrize("disturbed", [False, True])
def test_speeds_beside_other_programs_are_said_to_be_rough(disturbed, monkeypatch):
    waited = itertools.count()
    monkeypatch.setattr(clock, "waited_seconds", lambda: float(next(waited)) if disturbed else 0.0)
    report = ck.verify(upstream.ours(), images(1), rounds=1)
    assert (report.evaluation.is_disturbed, report.training.is_disturbed) == (disturbed, disturbed)
    assert (clock.DISTURBED in str(report).splitlines()) == disturbed


def test_no_parameter_to_train():
    with pytest.raises(ValueError, match="model: has no parameter that requires a gradient"):
        ck.verify(upstream.microsoft().requires_grad_(False), images())
