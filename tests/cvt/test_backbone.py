"""CvT as a backbone of transformers: its maps, its weights, and the detectors and segmenters that take it."""

import copy
import importlib
import sys

import pytest
import torch
from transformers import (
    AutoBackbone,
    AutoConfig,
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    RTDetrConfig,
    RTDetrForObjectDetection,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import cvt_kernels as ck
from cvt.backbone import CvtBackbone, CvtBackboneConfig, backbone_of
from cvt.factory import randomize
from cvt_kernels.records import is_frozen_batch_norm
from tests.checks import DOCS, python_blocks, run_blocks
from tests.cvt.models import huggingface_twin, quantized, small

ALL = ["stage1", "stage2", "stage3"]
SIZES = {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}


def images(count=2):
    return torch.randn(count, 3, 64, 96, generator=torch.Generator().manual_seed(0))


def assert_same(maps, expected):
    torch.testing.assert_close(list(maps), list(expected), rtol=0, atol=0)


# The backbone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        ({}, [2]),
        ({"out_features": ALL}, [0, 1, 2]),
        ({"out_features": ["stage2"]}, [1]),
        ({"out_indices": [0, -1]}, [0, 2]),
        ({"out_features": ["stage1", "stage3"], "out_indices": [0, 2]}, [0, 2]),
    ],
)
def test_maps_are_hidden_states_of_hugging_faces_model(tmp_path, settings, stages):
    twin = huggingface_twin()
    twin.save_pretrained(tmp_path / "classifier")
    backbone = CvtBackbone.from_pretrained(tmp_path / "classifier", **settings).eval()
    assert (backbone.stage_names, backbone.out_features) == (ALL, [ALL[i] for i in stages])
    assert backbone.channels == [SIZES["embed_dim"][i] for i in stages]
    with torch.no_grad():
        expected = twin(images(), output_hidden_states=True).hidden_states
        found = backbone(images(), output_hidden_states=True)
        without = backbone(images(), return_dict=False)
    assert_same(found.hidden_states, expected)
    for maps in (found.feature_maps, *without):
        assert_same(maps, [expected[i] for i in stages])
    backbone.save_pretrained(tmp_path / "backbone")
    again = CvtBackbone.from_pretrained(tmp_path / "backbone").eval()
    assert_same(again(images()).feature_maps, without[0])
    other = CvtBackbone.from_pretrained(tmp_path / "backbone", out_features=["stage1"])
    assert (other.out_indices, other.channels) == ([0], [8])
    assert type(AutoConfig.from_pretrained(tmp_path / "backbone")) is CvtBackboneConfig


def test_stages_after_the_last_map_are_not_computed():
    backbone = AutoBackbone.from_config(CvtBackboneConfig(**SIZES, out_features=["stage1", "stage2"]))
    backbone.encoder.stages[2].forward = None
    assert len(backbone(images()).feature_maps) == 2


@pytest.mark.parametrize("activation", ["gelu", "quick_gelu", "gelu_tanh"])
@pytest.mark.parametrize("changes", [{}, {"head": "segment"}, {"features_only": True}])
def test_maps_are_those_of_our_model(activation, changes, tmp_path):
    model = small(activation=activation, **changes).double().eval()
    backbone = backbone_of(model)
    assert not backbone.training
    backbones = [backbone, ck.accelerate(copy.deepcopy(backbone), freeze=True)]
    if not changes:
        model.save_pretrained(tmp_path)
        backbones.append(CvtBackbone.from_pretrained(tmp_path, out_features=ALL).double().eval())
    with torch.no_grad():
        for each in backbones:
            found = list(each(images().double()).feature_maps)
            torch.testing.assert_close(found, model.maps(images().double()), rtol=1e-9, atol=1e-9)
    assert backbone_of(model, out_features=["stage2"]).channels == [16]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CvtBackboneConfig(out_features=["stem"]), "must be a subset of stage_names"),
        (lambda: CvtBackboneConfig(out_features=["stage3", "stage1"]), "same order as stage_names"),
        (lambda: CvtBackboneConfig(out_indices=[3]), "must be valid indices"),
        (lambda: CvtBackboneConfig(out_features=["stage1"], out_indices=[1]), r"beside out_indices=\[1\]"),
        (lambda: CvtBackboneConfig(hidden_act="sine"), "hidden_act: got 'sine', expected an activation"),
        (lambda: backbone_of(small(), out_features=["stage0"]), "must be a subset of stage_names"),
        (lambda: backbone_of(small(layer_scale=0.1)), "model: Hugging Face's CvT has no layer_scale=0.1"),
        (lambda: backbone_of(quantized(small())), "no linear layers of 8-bit numbers"),
        (
            lambda: backbone_of(small(features_only=True, out_indices=[1])),
            "model: is without its last stages",
        ),
    ],
)
def test_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_without_transformers_the_error_says_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "cvt.backbone")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"^transformers is not installed; "):
        importlib.import_module("cvt.backbone")


def test_no_model_of_ours():
    with pytest.raises(TypeError, match="model: got CvtForImageClassification, expected Stages"):
        backbone_of(huggingface_twin())


# Inside other models --------------------------------------------------------------------------------------

HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
WIDTHS = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
BOXES = {
    "labels": [
        {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])} for _ in range(2)
    ]
}


def detr():
    config = DetrConfig(
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False,
        backbone_config=CvtBackboneConfig(**SIZES), num_queries=5, dropout=0.0,
        encoder_layers=1, decoder_layers=1, **HEADS, **WIDTHS,
    )  # fmt: skip
    return DetrForObjectDetection(config), BOXES


def rt_detr():
    config = RTDetrConfig(
        backbone_config=CvtBackboneConfig(**SIZES, out_features=ALL), encoder_in_channels=[8, 16, 24],
        feat_strides=[4, 8, 16], encoder_hidden_dim=16, decoder_in_channels=[16, 16, 16], num_queries=5,
        decoder_layers=1, num_denoising=0, **HEADS, **WIDTHS,
    )  # fmt: skip
    return RTDetrForObjectDetection(config), BOXES


def mask2former():
    config = Mask2FormerConfig(
        backbone_config=CvtBackboneConfig(**SIZES, out_features=ALL), feature_size=32, mask_feature_size=32,
        hidden_dim=32, encoder_feedforward_dim=16, dim_feedforward=16, encoder_layers=1, decoder_layers=2,
        num_attention_heads=2, num_queries=5, feature_strides=[4, 8, 16], train_num_points=20,
    )  # fmt: skip
    masks = {"mask_labels": [torch.ones(1, 64, 96)] * 2, "class_labels": [torch.tensor([1])] * 2}
    return Mask2FormerForUniversalSegmentation(config), masks


def upernet():
    config = UperNetConfig(
        backbone_config=CvtBackboneConfig(**SIZES, out_features=ALL), hidden_size=16, pool_scales=[1, 2],
        use_auxiliary_head=False,
    )  # fmt: skip
    return UperNetForSemanticSegmentation(config), {"labels": torch.ones(2, 64, 96, dtype=torch.long)}


@pytest.mark.parametrize("build", [detr, rt_detr, mask2former, upernet])
def test_inside_other_models(build, tmp_path):
    model, labels = build()
    randomize(model)
    model.eval()
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)  # for the random points of Mask2Former's loss
    expected = model(pixel_values=images(), **labels)
    expected.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("encoder.stages.0" in name for name in gradients)

    frozen = ck.accelerate(type(model).from_pretrained(tmp_path).eval(), freeze=True)
    with torch.inference_mode():
        found = frozen(pixel_values=images())
    stages = [row for row in ck.coverage(frozen) if row.class_name == "CvtStage"]
    assert len(stages) == 3
    assert all(row.fused for row in ck.coverage(frozen))
    key = "class_queries_logits" if build is mask2former else "logits"
    torch.testing.assert_close(found[key], expected[key].detach(), rtol=1e-4, atol=1e-4)

    torch.manual_seed(0)
    ck.accelerate(model).zero_grad()
    model(pixel_values=images(), **labels).loss.backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-4)


def test_frozen_batch_norms_in_training():
    """They normalize by the running statistics in training mode too, as in DETR, which puts them there."""
    model, labels = detr()
    randomize(model)
    own = copy.deepcopy(model.train())
    assert sum(is_frozen_batch_norm(module) for module in model.modules()) == 3 * 6
    assert all(row.fused for row in ck.coverage(ck.accelerate(model)) if row.class_name == "CvtLayer")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for each in (own, model):
        torch.manual_seed(0)  # for the drop path
        each(pixel_values=images(), **labels).loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_the_page_of_detection(capsys):
    page = (DOCS / "detection.md").read_text(encoding="utf-8")
    for setting, less in (("STEPS, WIDTH = 1000, 64", "STEPS, WIDTH = 3, 16"), ("scenes(200,", "scenes(6,")):
        assert page.count(setting) == 1
        page = page.replace(setting, less)
    names = run_blocks(python_blocks(page))
    out = capsys.readouterr().out
    assert "7 of 7 blocks fused" in out
    assert "mAP 0.0%," in out
    assert "Few steps show nothing" in page
    assert len(names["found"]) == 6 * 10
    perfect = []
    for i, truth in enumerate(names["labels"]):
        classes = truth["class_labels"]
        perfect += names["to_coco"](i, truth["boxes"], classes, torch.ones(len(classes)))
    assert names["mean_average_precision"](perfect, names["labels"]) == pytest.approx([1, 1])
    moved = [{**each, "bbox": [0, 0, 1, 1]} for each in perfect]
    assert names["mean_average_precision"](moved, names["labels"]) == pytest.approx([0, 0])
