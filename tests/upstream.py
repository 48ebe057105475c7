"""Small models of every upstream, and comparisons of them with their accelerated copies."""

import copy

import numpy as np
import torch
from torch import nn

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize
from tests import microsoft_cvt
from tests.conftest import DATA
from tests.timm_models import timm_models

RANDOM = {"drop": 0.2, "drop_path": 0.4}

#: Backends for ``use_backend`` that let kernels of this project serve whatever they can.
KERNELS_FIRST = ("cpu", "sdpa", "reference")

#: A model of ours for what takes long per operator, as exporting does.
ONE_STAGE = CvTConfig(
    embed_dims=(8,), depths=1, num_heads=2, patch_sizes=7, patch_strides=4, patch_paddings=2, mlp_ratio=2.0,
    qkv_bias=True, kernel_size=3, stride_q=1, stride_kv=2, cls_token=True, drop_rate=0.0, attn_drop_rate=0.0,
    drop_path_rate=0.0, num_classes=5,
)  # fmt: skip
_SMALL = {"embed_dims": (16, 32, 48), "num_heads": (1, 2, 3), "depths": (1, 1, 2), "num_classes": 10}


def huggingface(*, drop=0.0, drop_path=0.0, attention_drop=0.0, size="small", model_class=None, **config):
    """Returns Hugging Face's model. Its drop path takes a rate per block, so stage i needs i + 1 blocks."""
    import transformers

    if size == "small":
        small = {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3], "num_labels": 10}
        config = small | config
    config |= {"drop_rate": 3 * [drop], "attention_drop_rate": 3 * [attention_drop]}
    config |= {"drop_path_rate": 3 * [drop_path]}
    model_class = model_class or transformers.CvtForImageClassification
    model = model_class(transformers.CvtConfig(**config))
    randomize(model)
    return model


def microsoft(*, drop=0.0, drop_path=0.0, attention_drop=0.0, size="small", **config):
    if size == "small":
        config = _SMALL | config
    config |= {"drop_rate": drop, "attn_drop_rate": attention_drop, "drop_path_rate": 3 * (drop_path,)}
    model = microsoft_cvt.ConvolutionalVisionTransformer(**config)
    randomize(model)
    return model


def microsoft_plain(**config):
    """Returns Microsoft's model with PyTorch's LayerNorm and exact GELU, which runs in float64."""
    return microsoft(norm_layer=nn.LayerNorm, act_layer=nn.GELU, **config)


def microsoft_numbers():
    """Returns what the original code gave for a tiny model: its weights, inputs, outputs and gradients."""
    with np.load(DATA / "microsoft_tiny.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def ours(*, drop=0.0, drop_path=0.0):
    model = create_model(CvTConfig(**_SMALL), drop_rate=drop, drop_path_rate=drop_path)
    randomize(model)
    return model


def _pyramid(
    kind, config_kind, *, drop=0.0, drop_path=0.0, attention_drop=0.0, model_class=None,
    **config,
):  # fmt: skip
    """Returns a small model of transformers with two stages of one and two layers."""
    import transformers

    config = {
        "num_encoder_blocks": 2, "depths": [1, 2], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2],
        "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "sr_ratios": [2, 1], "num_labels": 5,
        "image_size": 70, "hidden_dropout_prob": drop, "classifier_dropout_prob": drop,
        "attention_probs_dropout_prob": attention_drop, "drop_path_rate": drop_path,
    } | config  # fmt: skip
    model = (model_class or getattr(transformers, kind))(getattr(transformers, config_kind)(**config))
    randomize(model)
    return model.eval()


def segformer(**config):
    """Returns a SegFormer with its decode head."""
    return _pyramid("SegformerForSemanticSegmentation", "SegformerConfig", decoder_hidden_size=24, **config)


def one_block(make):
    """Returns a CvT of one block, with a class token, for what takes long per operator."""
    if make is huggingface:
        return make(embed_dim=[16], num_heads=[2], depth=[1], cls_token=[True])
    if make is microsoft:
        return make(embed_dims=(16,), num_heads=(2,), depths=(1,))
    model = create_model(ONE_STAGE)
    randomize(model)
    return model


class Logits(nn.Module):
    """A model that returns logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, x):
        return logits(self.model(x))


def last_stage(model):
    """Returns the last stage of a CvT."""
    if hasattr(model, "cvt"):
        return model.cvt.encoder.stages[-1]
    return [child for name, child in model.named_children() if name.startswith("stage")][-1]


def with_all_tokens(model):
    """Watches the last stage of a CvT, so that its last block computes all tokens; returns the model."""
    last_stage(model).register_forward_hook(lambda *_: None)
    return model


def pvt(**config):
    """Returns a PVT, which computes images of one size only."""
    sizes = {"patch_sizes": [4, 2], "sequence_reduction_ratios": [2, 1], "qkv_bias": True}
    return _pyramid("PvtForImageClassification", "PvtConfig", **sizes | config)


def pvt_v2(**config):
    """Returns a PVT v2."""
    return _pyramid("PvtV2ForImageClassification", "PvtV2Config", **config)


def pvt_v2_linear(**config):
    """Returns a PVT v2 with linear attention."""
    return pvt_v2(linear_attention=True, **config)


def glpn(**config):
    """Returns a GLPN."""
    sizes = {"num_encoder_blocks": 4, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 24]}
    sizes |= {"num_attention_heads": [1, 2, 2, 3], "patch_sizes": [7, 3, 3, 3], "strides": [4, 2, 2, 2]}
    sizes |= {"mlp_ratios": [2] * 4, "sr_ratios": [4, 2, 1, 1], "decoder_hidden_size": 8}
    return _pyramid("GLPNForDepthEstimation", "GLPNConfig", **sizes | config)


#: The sizes of small image encoders, which compute images of 32 × 32.
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def _encoder(model_class, config, num_labels=5):
    config.num_labels = num_labels
    model = model_class(config)
    randomize(model)
    return model.eval()


def vit(*, drop=0.0, attention_drop=0.0, model_class=None, num_labels=5, **config):
    """Returns a ViT, which computes images of one size only."""
    import transformers

    drops = {"hidden_dropout_prob": drop, "attention_probs_dropout_prob": attention_drop}
    config = transformers.ViTConfig(**ENCODER | {"intermediate_size": 64} | drops | config)
    return _encoder(model_class or transformers.ViTForImageClassification, config, num_labels)


def dinov2(*, drop_path=0.0, attention_drop=0.0, model_class=None, **config):
    """Returns a DINOv2, whose layers have scales."""
    import transformers

    drops = {"drop_path_rate": drop_path, "attention_probs_dropout_prob": attention_drop}
    config = transformers.Dinov2Config(**ENCODER | {"mlp_ratio": 2} | drops | config)
    return _encoder(model_class or transformers.Dinov2ForImageClassification, config)


def clip(*, attention_drop=0.0, **config):
    """Returns CLIP's image tower, which computes images of one size only."""
    import transformers

    sizes = ENCODER | {"intermediate_size": 64, "projection_dim": 8, "attention_dropout": attention_drop}
    return _encoder(
        transformers.CLIPVisionModelWithProjection, transformers.CLIPVisionConfig(**sizes | config)
    )


def timm_vit(*, drop=0.0, drop_path=0.0, attention_drop=0.0, **config):
    """Returns a ViT of timm's with layer scales and registers, which computes images of one size only."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    drops = {"proj_drop_rate": drop, "drop_path_rate": drop_path, "attn_drop_rate": attention_drop}
    others = {"init_values": 0.1, "reg_tokens": 2, "num_classes": 5}
    model = timm_models("vision_transformer").VisionTransformer(**sizes | drops | others | config)
    randomize(model)
    return model.eval()


def timm_pvt_v2(*, drop=0.0, drop_path=0.0, attention_drop=0.0, **config):
    """Returns a PVT v2 of timm's, whose first stage has no embedding."""
    sizes = {"depths": (1, 2), "embed_dims": (16, 32), "num_heads": (1, 2), "sr_ratios": (2, 1)}
    drops = {"proj_drop_rate": drop, "drop_path_rate": drop_path, "attn_drop_rate": attention_drop}
    others = {"mlp_ratios": (2, 2), "num_classes": 5}
    model = timm_models("pvt_v2").PyramidVisionTransformerV2(**sizes | drops | others | config)
    randomize(model)
    return model.eval()


#: The makers of models of timm, which are served, and not fused otherwise.
TIMMS = [timm_vit, timm_pvt_v2]
#: The makers of image encoders whose blocks are served, and not fused otherwise.
ENCODERS = [vit, dinov2, clip]
#: The makers of models with a pyramid of tokens: few keys for many queries.
PYRAMIDS = [segformer, pvt, pvt_v2, pvt_v2_linear, glpn]

#: The makers of models that are somebody else's.
UPSTREAMS = [huggingface, microsoft]


def logits(outputs):
    """Returns the logits, GLPN's depth or CLIP's embeddings."""
    names = "logits", "predicted_depth", "image_embeds"
    return next((getattr(outputs, name) for name in names if hasattr(outputs, name)), outputs)


def pair(make, mode="eval", **config):
    """Returns an upstream model and its accelerated copy, whose calls are left to the blocks."""
    own = make(**config)
    getattr(own, mode)()
    fused = ck.accelerate(copy.deepcopy(own), freeze=False)
    assert all(row.fused for row in ck.coverage(fused))
    return own, fused


def images(batch=2, height=64, width=64, dtype=torch.float32):
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def with_right_gradients(model):
    """Lets the gradients of the outputs of a model's BatchNorms have the usual strides; returns the model.

    For a batch of one, upstream's views give them strides from which the CPU's batch_norm computes wrong
    gradients (seen in torch 2.13).
    """

    def hook(module, args, out):
        out.register_hook(lambda grad: grad.clone(memory_format=torch.contiguous_format))

    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(hook)
    return model


def step(model, x, seed=3):
    """Runs a forward and a backward; returns the logits."""
    torch.manual_seed(seed)
    model.zero_grad()
    out = logits(model(x))
    out.sin().sum().backward()
    return out.detach()


def assert_same_step(own, fused, x, tolerance):
    """Compares outputs, every gradient and every buffer, relative to the largest value of its kind."""
    assert relative(step(fused, x), step(own, x)) < tolerance
    largest = max(p.grad.abs().max() for p in own.parameters())
    for (name, a), b in zip(own.named_parameters(), fused.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() < tolerance * largest, name
    for (name, a), b in zip(own.named_buffers(), fused.buffers(), strict=True):
        assert torch.equal(a, b) if name.endswith("tracked") else relative(b, a) < tolerance, name


def relative(actual, expected):
    """Returns the largest difference over the largest expected value; dtypes and shapes must be equal."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def in_float64(model):
    """Turns a model into float64, in which Microsoft's LayerNorm, casting to float32, cannot run."""
    for module in model.modules():
        if type(module) is microsoft_cvt.LayerNorm:
            module.__class__ = nn.LayerNorm
    return model.double()
