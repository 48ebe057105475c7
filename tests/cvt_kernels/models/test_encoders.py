"""ViT and its relatives of transformers: each layer is served as one operator on a CPU."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import cvt_kernels as ck
from cvt.factory import randomize
from cvt_kernels import choose
from cvt_kernels.quantization import unquantize
from tests import upstream
from tests.checks import assert_accurate
from tests.cvt_kernels.models.served import frozen, noted_queries
from tests.upstream import ENCODERS, TIMMS, images, logits, relative, timm_pvt_v2, timm_vit, vit

SIZES = upstream.ENCODER
VIT = SIZES | {"intermediate_size": 64}
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 16, "projection_size": 32,
}  # fmt: skip


def made(name, **config):
    """Returns a small model of transformers by the name of its class, with random weights."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**config)).eval()
    for part in (model.vision_model, model.text_model) if name == "CLIPModel" else (model,):
        randomize(part)
    return model


#: The models whose layers are served, and how many there are.
MODELS = {
    "ViTForImageClassification": (VIT, 2),
    "ViTModel": (VIT | {"hidden_act": "gelu_pytorch_tanh", "qkv_bias": False}, 2),
    "DeiTForImageClassificationWithTeacher": (VIT, 2),
    "ViTMSNModel": (VIT, 2),
    "ViTMAEModel": (VIT | {"mask_ratio": 0.0}, 2),
    "IJepaModel": (VIT, 2),
    "Dinov2Model": (SIZES, 2),
    "Dinov2Backbone": (SIZES | {"out_features": ["stage1", "stage2"]}, 2),
    "Dinov2WithRegistersModel": (SIZES | {"num_register_tokens": 3}, 2),
    "YolosForObjectDetection": (VIT | {"image_size": [32, 32], "num_detection_tokens": 3}, 2),
    "CLIPVisionModel": (VIT, 2),
    "SiglipVisionModel": (VIT | {"hidden_act": "gelu_pytorch_tanh"}, 2),
    "SiglipTextModel": (TEXT, 1),
    "DPTForDepthEstimation": (
        VIT
        | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [4] * 4}
        | {"fusion_hidden_size": 4, "is_hybrid": False},
        4,
    ),
}


def arguments_of(name):
    if name == "SiglipTextModel":
        return {"input_ids": torch.arange(2 * 16).view(2, 16)}
    noise = {"noise": torch.arange(32.0).view(2, 16)} if name == "ViTMAEModel" else {}
    return {"pixel_values": images(2, 32, 32), **noise}


def layers_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith(("Layer", "Block"))]


def tensors_of(out):
    return [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def in_double(arguments):
    return {name: t.double() if t.is_floating_point() else t for name, t in arguments.items()}


@torch.no_grad()
@pytest.mark.parametrize("freeze", [None, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_relative_is_served(name, freeze):
    config, layers = MODELS[name]
    own, arguments = made(name, **config), arguments_of(name)
    classes = [type(module) for module in own.modules()]
    exact = tensors_of(copy.deepcopy(own).double()(**in_double(arguments)))
    expected = tensors_of(own(**arguments))
    model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    for _ in range(2):
        out = tensors_of(model(**arguments))
        for mine, theirs, true in zip(out, expected, exact, strict=True):
            assert_accurate(mine, theirs, true.double(), floor=4)
    has_images = "pixel_values" in arguments
    rows = ck.coverage(model, arguments if has_images else None)
    operators = ["transformer_block"] if has_images else []
    assert [(row.fused, [*row.backends]) for row in rows] == layers * [(True, operators)]
    assert [type(module) for module in ck.restore(model).modules()] == classes


@pytest.mark.parametrize("make", [*ENCODERS, *TIMMS])
def test_reasons_for_upstreams_own_forward(make):
    model = make()
    assert {row.reason for row in ck.coverage(model)} == {"accelerate() has not been called"}
    live = ck.accelerate(make(), freeze=False)
    assert [type(layer) for layer in layers_of(live)] == [type(layer) for layer in layers_of(model)]
    ck.accelerate(model)
    assert {row.reason for row in ck.coverage(model.train())} == {"is in training mode"}
    assert all(row.fused for row in ck.coverage(model.eval()))
    if make in TIMMS:
        return
    model.set_attn_implementation("eager")
    assert {row.reason for row in ck.coverage(model)} == {
        "attention is that of transformers' 'eager', expected 'sdpa'"
    }
    model.set_attn_implementation("sdpa")
    assert all(row.fused for row in ck.coverage(model))


def on_a_gpu(model):
    """Moves the parameters of a model to a GPU, without their numbers."""
    with FakeTensorMode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, device="cuda"))
    return model


@pytest.mark.parametrize("make", [vit, *TIMMS])
def test_on_a_gpu_they_stay_as_they_are(make, monkeypatch):
    monkeypatch.setattr(choose, "warn_of_unknown_gpu", None)  # no kernel of a GPU is for them
    reason = "is served on a CPU only, not on a GPU"
    models = ck.accelerate(make()), ck.accelerate(make(), freeze=True), ck.accelerate(on_a_gpu(make()))
    for model in models:
        rows = [row for row in ck.coverage(on_a_gpu(model)) if not row.class_name.endswith("Stage")]
        assert [(row.fused, row.reason) for row in rows] == len(layers_of(model)) * [(False, reason)]
    with pytest.raises(ValueError, match=reason):
        ck.accelerate(on_a_gpu(make()), freeze=True)


@pytest.mark.parametrize("make", [*ENCODERS, *TIMMS])
def test_training_is_upstreams_own(make):
    own, x = make(attention_drop=0.2).train(), images(2, 32, 32)
    model = ck.accelerate(copy.deepcopy(own))
    results = []
    for each in (own, model):
        torch.manual_seed(0)
        out = logits(each(x))
        out.sin().sum().backward()
        results.append([out, *(p.grad for p in each.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *results))


@torch.no_grad()
@pytest.mark.parametrize("make", ENCODERS)
def test_calls_that_are_left_to_upstream(make):
    """Those with a mask, for attention maps, under autocast, and with gradients."""
    own, x = make(), images(2, 32, 32)
    model = ck.accelerate(copy.deepcopy(own))
    block, same = (
        next(m for m in each.modules() if type(m).__name__.endswith("Layer")) for each in (model, own)
    )
    tokens, mask = torch.randn(2, 5, 32), torch.zeros(2, 1, 5, 5)
    mask[..., 3:] = -torch.inf
    assert relative(block(tokens, None), same(tokens, None)) < 1e-6
    assert torch.equal(block(tokens, mask), same(tokens, mask))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model(x)), logits(own(x)))
    with torch.enable_grad():
        assert logits(model(x)).requires_grad
    for each in (own, model):
        each.set_attn_implementation("eager")
    maps, expected = (each(x, output_attentions=True).attentions for each in (model, own))
    assert len(maps) == 2
    assert all(map(torch.equal, maps, expected))


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "layers"), [*((make, 6) for make in ENCODERS), (timm_vit, 4), (timm_pvt_v2, 5)]
)
def test_quantized_layers_are_served(make, layers):
    own, x = make(), images(2, 32, 32)
    expected = logits(own(x))
    model = ck.accelerate(copy.deepcopy(own))
    report = ck.quantize(model, x, min_sqnr=0)
    assert [row.weight for row in report] == layers * len(layers_of(model)) * ["int8"]
    rows = ck.coverage(model, x)
    assert all(row.fused for row in rows)
    assert {backend for row in rows for backend in row.backends.values()} == {"cpu"}
    out = logits(model(x))
    with ck.use_backend("reference"):
        assert relative(out, logits(model(x))) < 0.02
    assert 1e-4 < relative(out, expected) < 0.1
    assert torch.equal(logits(unquantize(model, [row.path for row in report])(x)), logits(frozen(own)(x)))


CLASSIFIERS = ["ViTForImageClassification", "DeiTForImageClassification", "ViTMSNForImageClassification"]


@torch.no_grad()
@pytest.mark.parametrize("freeze", [None, True])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_last_layer_of_a_classifier_computes_the_class_token(name, freeze):
    own, x = made(name, **VIT), images(2, 32, 32)
    model = ck.accelerate(copy.deepcopy(own), freeze=freeze)
    exact = copy.deepcopy(own).double()(x.double()).logits
    with noted_queries() as queries:
        assert_accurate(model(x).logits, own(x).logits, exact, floor=4)
        assert_accurate(model(x, labels=torch.tensor([0, 1])).logits, own(x).logits, exact, floor=4)
    assert queries[1::2] == [1, 1]
    assert len(queries) == 4
    assert 1 not in queries[::2]


@torch.no_grad()
@pytest.mark.parametrize(
    "see",
    [
        "hidden states",
        "configuration",
        "encoder",
        "hook on the encoder",
        "hook on the norm",
        "hook on a layer",
    ],
)
def test_all_tokens_are_computed_where_somebody_sees_them(see):
    own, x, seen = vit(), images(2, 32, 32), []
    model = ck.accelerate(copy.deepcopy(own))
    for each in (own, model):
        hooked = {
            "hook on the encoder": each.vit, "hook on the norm": each.vit.layernorm,
            "hook on a layer": layers_of(each)[-1],
        }.get(see)  # fmt: skip
        if hooked is not None:
            hooked.register_forward_hook(lambda module, args, out, seen=seen: seen.extend(tensors_of(out)))
        each.config.output_hidden_states = see == "configuration"
        settings = {"output_hidden_states": True} if see == "hidden states" else {}
        with noted_queries() as queries:
            out = each.vit(x) if see == "encoder" else each(x, **settings)
        seen += tensors_of(out)
    half = len(seen) // 2
    assert half > 1 or see == "encoder"
    assert all(relative(a, b) < 1e-5 for a, b in zip(seen[half:], seen[:half], strict=True))
    assert queries == [17, 17]


# Scripts that people have ----------------------------------------------------------------------------------


def run_as_it_is_and_accelerated(model, script):
    """Returns the results of a script for a model, then for the same one accelerated."""
    before = script(model)
    ck.accelerate(model)
    return before, script(model)


def test_features_by_dinov2_and_a_data_loader(tmp_path):
    made("Dinov2Model", **SIZES).save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path)
    loader = DataLoader([*images(5, 32, 48)], batch_size=2)

    def extract(model):
        features = []
        with torch.inference_mode():
            for batch in loader:
                features.append(model(pixel_values=batch).pooler_output)
        return torch.cat(features)

    before, after = run_as_it_is_and_accelerated(model, extract)
    assert relative(after, before) < 1e-5
    rows = ck.coverage(model, images(1, 32, 48))
    assert [row.backends for row in rows] == 2 * [{"transformer_block": "cpu"}]


def test_zero_shot_classification_by_clip(tmp_path):
    made("CLIPModel", vision_config=VIT, text_config=TEXT | {"eos_token_id": 63}).save_pretrained(tmp_path)
    model = transformers.CLIPModel.from_pretrained(tmp_path)
    words = torch.tensor([[1, 7, 9, 63, 0], [1, 8, 5, 4, 63], [1, 2, 63, 0, 0]])
    arguments = {
        "pixel_values": images(2, 32, 32), "input_ids": words, "attention_mask": (words > 0).long(),
    }  # fmt: skip

    @torch.no_grad()
    def classify(model):
        return model(**arguments).logits_per_image.softmax(dim=-1)

    before, after = run_as_it_is_and_accelerated(model, classify)
    assert relative(after, before) < 1e-5
    rows = {row.path: (row.fused, row.backends, row.reason) for row in ck.coverage(model, arguments)}
    assert rows == {
        "text_model.encoder.layers.0": (False, {}, "attention is causal"),
        "vision_model.encoder.layers.0": (True, {"transformer_block": "cpu"}, None),
        "vision_model.encoder.layers.1": (True, {"transformer_block": "cpu"}, None),
    }


def test_depth_by_depth_anything(tmp_path):
    backbone = transformers.Dinov2Config(
        **SIZES, out_features=["stage1", "stage2"], apply_layernorm=True, reshape_hidden_states=False
    )
    made(
        "DepthAnythingForDepthEstimation", backbone_config=backbone, patch_size=8, reassemble_hidden_size=32,
        reassemble_factors=[2, 1], neck_hidden_sizes=[4, 8], fusion_hidden_size=4, head_hidden_size=4,
    ).save_pretrained(tmp_path)  # fmt: skip
    model = transformers.AutoModelForDepthEstimation.from_pretrained(tmp_path)

    @torch.no_grad()
    def depth_of(model):
        return model(images(1, 40, 48)).predicted_depth

    before, after = run_as_it_is_and_accelerated(model, depth_of)
    assert relative(after, before) < 1e-4
    rows = ck.coverage(model, images(1, 40, 48))
    assert [row.backends for row in rows] == 2 * [{"transformer_block": "cpu"}]
