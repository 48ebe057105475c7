"""The attention of models of transformers, by ``attn_implementation="cvt_kernels"``."""

import copy
import sys
import types

import pytest
import torch
import transformers
from torch import nn

import cvt_kernels as ck
from cvt.factory import randomize
from cvt_kernels.tuning import accuracy
from tests.checks import assert_accurate, python_blocks, record_calls, run_blocks, section_of

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
VISION = SMALL | {"image_size": 32, "patch_size": 8}
TEXT = SMALL | {"vocab_size": 40, "max_position_embeddings": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
STAGES |= {"num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2], "num_heads": [2]}
WINDOWS |= {"window_size": 4}

#: Models, their configurations, and whether something is added to the scores.
MODELS = {
    "ViTModel": (VISION, False),
    "DeiTModel": (VISION, False),
    "Dinov2Model": (VISION, False),
    "Dinov2WithRegistersModel": (VISION, False),
    "BeitModel": (VISION | {"use_relative_position_bias": True}, True),
    "SwinModel": (WINDOWS, True),
    "SegformerModel": (STAGES, False),
    "CLIPVisionModel": (VISION, False),
    "SiglipVisionModel": (VISION, False),
    "SiglipTextModel": (TEXT, True),
    "DPTModel": (VISION | {"backbone_out_indices": [0, 0, 0, 0]}, False),
    "YolosModel": (VISION | {"image_size": [32, 32], "use_mid_position_embeddings": False}, False),
    "VideoMAEModel": (VISION | {"num_frames": 2}, False),
    "ViTMAEModel": (VISION | {"mask_ratio": 0.0}, False),
}


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """Registers the attention, for the test only."""
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    ck.register_attention()


def make(name, implementation="sdpa", **config):
    model_class = getattr(transformers, name)
    config = model_class.config_class(**MODELS[name][0] | config)
    model = model_class._from_config(config, attn_implementation=implementation).eval()
    randomize(model)
    return model


def inputs_of(model):
    if "Text" in type(model).__name__:
        padding = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
        return {"input_ids": torch.randint(1, 40, (2, 6)), "attention_mask": padding}
    frames = (2,) if "Video" in type(model).__name__ else ()
    return {"pixel_values": torch.randn(2, *frames, 3, 32, 32)}


def in_double(inputs):
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def compute(model, inputs):
    torch.manual_seed(2)  # ViTMAE shuffles
    return model(**inputs).last_hidden_state


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_accurate_as_with_sdpa(name):
    own = make(name)
    ours = copy.deepcopy(own)
    ours.set_attn_implementation("cvt_kernels")
    inputs = inputs_of(own)
    calls = record_calls("attention")
    with torch.no_grad(), ck.use_backend("cpu"):
        actual = compute(ours, inputs)
    assert calls
    assert all((settings["bias"] is not None) == MODELS[name][1] for _, settings in calls)
    with torch.no_grad():
        expected = compute(own, inputs)
        assert_accurate(actual, expected, compute(own.double(), in_double(inputs)))


@pytest.mark.parametrize("name", ["ViTModel", "SwinModel", "SiglipTextModel"])
def test_gradients_in_training(name):
    own = make(name, hidden_dropout_prob=0.0, drop_path_rate=0.0).train()
    ours, exact = copy.deepcopy(own), copy.deepcopy(own).double()
    ours.set_attn_implementation("cvt_kernels")
    inputs = inputs_of(own)
    for model, given in ((own, inputs), (ours, inputs), (exact, in_double(inputs))):
        compute(model, given).square().sum().backward()
    triples = zip(ours.named_parameters(), own.parameters(), exact.parameters(), strict=True)
    compared = 0
    for (path, parameter), other, right in triples:
        assert (parameter.grad is None) == (right.grad is None), path
        if right.grad is not None and "k_proj.bias" not in path:  # whose gradient is 0 but for rounding
            assert_accurate(parameter.grad, other.grad, right.grad, factor=accuracy.GRADIENT_FACTOR)
            compared += 1
    assert compared > 10


def test_attention_reads_views_as_they_lie():
    calls = record_calls("attention")
    laid = [torch.randn(2, n, 3, 8) for n in (9, 4, 4)]
    with ck.use_backend("cpu"):
        out, probabilities = attend(*(x.transpose(1, 2) for x in laid), scaling=0.3)
    ((given, settings),) = calls
    for x, tokens in zip(given, laid, strict=True):
        assert (x.data_ptr(), x.stride()) == (tokens.data_ptr(), tokens.stride())
    assert settings == {"scale": 0.3, "bias": None, "dropout_p": 0.0, "position": None}
    assert probabilities is None
    torch.testing.assert_close(out, ck.reference.attention(*laid, scale=0.3))


def attend(*tensors, module=None, mask=None, **others):
    """Calls what is registered, as an encoder does."""
    module = module or types.SimpleNamespace(is_causal=False)
    return transformers.AttentionInterface()["cvt_kernels"](module, *tensors, mask, **others)


def qkv(queries=5, keys=5, heads=2, key_heads=2):
    return [torch.randn(2, h, n, 8) for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys))]


def test_dropout_draws_what_eager_draws():
    eager = make("ViTModel", "eager", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("cvt_kernels")
    inputs = inputs_of(eager)
    torch.testing.assert_close(compute(ours, inputs), compute(eager, inputs))
    assert not torch.equal(compute(ours, inputs), compute(ours.eval(), inputs))


def test_compiled_as_one_graph():
    model = make("SiglipTextModel", "cvt_kernels")  # with a mask
    inputs = inputs_of(model)
    with torch.no_grad():
        expected = compute(model, inputs)
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs).last_hidden_state
    torch.testing.assert_close(compiled, expected)


def test_masks_and_biases_are_added_to_the_scores():
    bias, floats = torch.randn(1, 2, 5, 5), torch.randn(2, 1, 1, 5)
    allowed = torch.rand(2, 1, 5, 5) > 0.4
    allowed[..., 0], allowed[0, :, 3] = True, False  # one row excludes every key
    excluding = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    tensors = qkv()
    for mask, position_bias, added in [
        (allowed, None, excluding),
        (floats, None, floats),
        (None, bias, bias),
        (allowed, bias, excluding + bias),
        (floats, bias, floats + bias),
    ]:
        out, _ = attend(*tensors, mask=mask, position_bias=position_bias)
        tokens = (x.transpose(1, 2) for x in tensors)
        torch.testing.assert_close(out, ck.reference.attention(*tokens, bias=added))


CAUSAL = types.SimpleNamespace(is_causal=True)


@pytest.mark.parametrize(
    ("tensors", "arguments", "message"),
    [
        ({}, {"is_causal": True}, "is_causal: got True from SimpleNamespace, expected False"),
        ({}, {"module": CAUSAL, "mask": torch.zeros(1, 1, 5, 5)}, "is_causal: got True"),
        ({}, {"module": nn.Identity()}, "is_causal: got True from Identity"),
        ({"heads": 4}, {}, "key: got 2 heads from SimpleNamespace, expected 4 as of query"),
        ({}, {"sliding_window": 4}, "sliding_window: got 4 from"),
        ({}, {"softcap": 50.0}, "softcap: got 50.0 from .*, expected None, since .* does not cap scores"),
        ({}, {"s_aux": torch.zeros(2)}, "s_aux: got a Tensor"),
        ({}, {"cache": object()}, "cache: got a object"),
        ({}, {"head_mask": torch.ones(2)}, "head_mask: got a Tensor"),
        ({}, {"output_attentions": True}, "output_attentions: got True .* makes no attention maps; .*eager"),
        ({}, {"mask": torch.ones(1, 2, 1, 1)}, r"attention_mask: got shape \(1, 2, 1, 1\)"),
        ({}, {"mask": torch.ones(2, 5)}, r"attention_mask: got shape \(2, 5\), expected .* 5 keys\)"),
        ({}, {"mask": "causal"}, "attention_mask: got a str"),
    ],
)
def test_what_is_not_supported_raises(tensors, arguments, message):
    with pytest.raises(ValueError, match=message):
        attend(*qkv(**tensors), **arguments)


def test_arguments_that_ask_for_nothing_are_accepted():
    """One query is not restricted by causality."""
    tensors = qkv(queries=1)
    out, _ = attend(
        *tensors, is_causal=True, sliding_window=None, output_attentions=False, softcap=None, use_cache=True
    )
    assert torch.equal(out, attend(*tensors)[0])


def test_a_model_says_which_part_is_not_supported():
    texts = {**TEXT, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=texts, vision_config=VISION, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": torch.tensor([[1, 5, 2]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        expected = model(**inputs).logits_per_image
        model.set_attn_implementation("cvt_kernels")
        with pytest.raises(ValueError, match="is_causal: got True from CLIPAttention"):
            model(**inputs)
        model.set_attn_implementation({"vision_config": "cvt_kernels", "text_config": "sdpa"})
        torch.testing.assert_close(model(**inputs).logits_per_image, expected)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        (None, ModuleNotFoundError, r"transformers is not installed; pip install .*4\.53.*\[hf\]"),
        (types.ModuleType("transformers"), ImportError, "transformers is too old"),
    ],
)
def test_transformers_is_missing_or_too_old(monkeypatch, module, error, message):
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(error, match=message):
        ck.register_attention()


def test_the_page_runs_as_it_stands():
    section = section_of("accelerate.md", "## Attention in models of transformers")
    names = run_blocks(python_blocks(section))
    assert names["model"].config._attn_implementation == "cvt_kernels"
    assert names["clip"].vision_model.config._attn_implementation == "cvt_kernels"
    assert names["clip"].text_model.config._attn_implementation == "sdpa"
