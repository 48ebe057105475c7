"""SegFormer's own: its decode head, attention by name, and maps or tokens of the last stage."""

import copy
import functools

import pytest
import torch
from torch import nn

import cvt_kernels as ck
from tests.checks import assert_accurate, record_calls
from tests.upstream import assert_same_step, images, logits, pair, relative, segformer, with_right_gradients

THREE_STAGES = {
    "num_encoder_blocks": 3,
    "depths": [1, 1, 1],
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [1, 2, 2],
    "patch_sizes": [7, 3, 3],
    "strides": [4, 2, 2],
    "mlp_ratios": [2, 2, 2],
    "sr_ratios": [4, 2, 1],
}


def heads(**config):
    """Returns a decode head, its accelerated copy, and maps for both."""
    own = segformer(**THREE_STAGES | config).decode_head
    generator = torch.Generator().manual_seed(2)
    sizes = ((16, 17, 13), (24, 9, 7), (32, 5, 4))
    maps = [torch.randn(2, *size, generator=generator) for size in sizes]
    return own, ck.accelerate(copy.deepcopy(own), freeze=False), maps


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_gradients_and_statistics_of_the_head(batch, mode):
    own, fused, maps = heads()
    maps = [each[:batch].double() for each in maps]
    for model in (own, fused):
        getattr(with_right_gradients(model.double()), mode)()
    leaves = [[each.clone().requires_grad_() for each in maps] for _ in (own, fused)]
    assert_same_step(Head(own, leaves[0]), Head(fused, leaves[1]), None, 1e-11)
    for ours, theirs in zip(*leaves, strict=True):
        assert relative(theirs.grad, ours.grad) < 1e-11


class Head(nn.Module):
    """A head as a model of one argument, which it does not read."""

    def __init__(self, head, maps):
        super().__init__()
        self.head, self.maps = head, maps

    def forward(self, x):
        return self.head(self.maps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_operator_serves_the_head(dtype):
    own, fused, maps = heads()
    calls = record_calls("segmentation_head")
    maps = [each.to(dtype) for each in maps]
    with torch.no_grad():
        exact = copy.deepcopy(own).double()([each.double() for each in maps])
        out, expected = fused.to(dtype)(maps), own.to(dtype)(maps)
    assert_accurate(out, expected, exact)
    assert out.stride() == expected.stride()
    assert len(calls) == 1


def watch_dropout(head):
    head.dropout.register_forward_hook(lambda m, args, out: 1.5 * out)


OTHER_CALLS = {
    "training": lambda head: head.train(),
    "float64": lambda head: head.double(),
    "another activation": lambda head: setattr(head, "activation", nn.GELU()),
    "a watched dropout": watch_dropout,
    "no statistics": lambda head: setattr(head, "batch_norm", nn.BatchNorm2d(24, track_running_stats=False)),
    "gradients": None,
    "autocast": None,
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_of_the_head_are_composed(name):
    own, fused, maps = heads()
    calls = record_calls("segmentation_head")
    for head in (own, fused):
        torch.manual_seed(1)
        (OTHER_CALLS[name] or (lambda head: None))(head)
        torch.nn.init.ones_(head.batch_norm.weight)
    dtype = own.classifier.weight.dtype
    maps = [each.to(dtype) for each in maps]
    outs = []
    for head in (own, fused):
        torch.manual_seed(1)
        with torch.set_grad_enabled(name == "gradients"), torch.autocast("cpu", enabled=name == "autocast"):
            outs.append(head(maps))
    assert relative(outs[1], outs[0]) < (3e-2 if name == "autocast" else 1e-4)
    assert not calls


def test_a_head_with_a_quantized_layer_runs_its_own_forward():
    own, fused, maps = heads()
    calls = record_calls("segmentation_head")
    layers = getattr(fused, projections_of(fused))
    layers[1].proj = ck.LinearInt8.from_float(layers[1].proj)
    with torch.no_grad():
        assert relative(fused(maps), own(maps)) < 0.1
    assert not calls


def projections_of(head):
    """Returns the name of the list of projections, which transformers 5 calls ``linear_projections``."""
    return "linear_projections" if hasattr(head, "linear_projections") else "linear_c"


@pytest.mark.filterwarnings("ignore:Reshape_last_stage is set to False:FutureWarning")
@pytest.mark.parametrize("reshape_last_stage", [True, False])
def test_classification_by_maps_or_tokens(reshape_last_stage):
    import transformers

    kind = transformers.SegformerForImageClassification
    own, fused = pair(segformer, model_class=kind, reshape_last_stage=reshape_last_stage)
    x = images(2, 70, 54)
    with torch.no_grad():
        expected, actual = (model(x, output_hidden_states=True) for model in (own, fused))
    assert relative(logits(actual), logits(expected)) < 1e-5
    assert actual.hidden_states[-1].shape == expected.hidden_states[-1].shape
    assert relative(actual.hidden_states[-1], expected.hidden_states[-1]) < 1e-5
    assert expected.hidden_states[-1].ndim == (4 if reshape_last_stage else 3)


def test_a_forward_that_transformers_wraps(monkeypatch):
    """From 5.23 on, transformers wraps the forwards of layers, to checkpoint their gradients."""
    layer = next(type(module) for module in segformer().modules() if hasattr(module, "drop_path"))
    functions = {"__name__": "transformers.modeling_layers", "functools": functools}
    exec(
        "def wrapped(forward):\n"
        "    @functools.wraps(forward)\n"
        "    def with_checkpointing(self, *args, **kwargs):\n"
        "        return forward(self, *args, **kwargs)\n"
        "    return with_checkpointing",
        functions,
    )
    monkeypatch.setattr(layer, "forward", functions["wrapped"](layer.forward))
    own, fused = pair(segformer)
    x = images(1, 64, 64)
    with torch.no_grad():
        assert relative(logits(fused(x)), logits(own(x))) < 1e-5
        ck.accelerate(own, freeze=True)
        assert relative(logits(own(x)), logits(fused(x))) < 1e-5
    functions["__name__"] = "somewhere.else"
    rows = ck.coverage(ck.accelerate(segformer(), freeze=False))
    assert {row.fused for row in rows if row.class_name == layer.__name__} == {False}
