"""A stand-in for Microsoft's CvT (``lib/models/cls_cvt.py``): its names, structure and behavior, for tests.

No code of it is included; that this computes the same is tested with ``tests/data/microsoft_tiny.npz``. Its
oddities are kept: LayerNorm in float32 whatever comes, a misspelt ``rearrage``, and a single image that loses
its batch dimension.
"""

from collections import OrderedDict

import torch
from torch import nn


class LayerNorm(nn.LayerNorm):
    """A LayerNorm computed in float32; the result has the dtype of the input."""

    def forward(self, x):
        return super().forward(x.type(torch.float32)).type(x.dtype)


class QuickGELU(nn.Module):
    """The activation that the published weights were trained with."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class DropPath(nn.Module):
    """Stochastic depth per sample, as in timm."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class Rearrange(nn.Module):
    """The layer of einops, for the one pattern in use."""

    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern

    def forward(self, image):
        return image.flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    """A linear layer, an activation, and a linear layer back."""

    def __init__(self, in_features, hidden_features, act_layer=nn.GELU, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class Attention(nn.Module):
    """Convolutional projections (or average pooling, or none) and multi-head attention."""

    def __init__(
        self, dim, num_heads, qkv_bias=True, attn_drop=0.0, proj_drop=0.0, method="dw_bn", kernel_size=3,
        stride_kv=2, stride_q=1, padding_kv=1, padding_q=1, with_cls_token=True,
    ):  # fmt: skip
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.scale = dim**-0.5
        self.with_cls_token = with_cls_token
        for_query = "linear" if method == "avg" else method
        self.conv_proj_q = self._build_projection(dim, kernel_size, padding_q, stride_q, for_query)
        self.conv_proj_k = self._build_projection(dim, kernel_size, padding_kv, stride_kv, method)
        self.conv_proj_v = self._build_projection(dim, kernel_size, padding_kv, stride_kv, method)
        self.proj_q = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj_k = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj_v = nn.Linear(dim, dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    @staticmethod
    def _build_projection(dim, kernel_size, padding, stride, method):
        if method == "linear":
            return None
        if method == "avg":
            layers = [("avg", nn.AvgPool2d(kernel_size, stride, padding, ceil_mode=True))]
        else:
            conv = nn.Conv2d(dim, dim, kernel_size, stride, padding, bias=False, groups=dim)
            layers = [("conv", conv), ("bn", nn.BatchNorm2d(dim))]
        return nn.Sequential(OrderedDict([*layers, ("rearrage", Rearrange("b c h w -> b (h w) c"))]))

    def forward_conv(self, x, h, w):
        if self.with_cls_token:
            cls_token, x = torch.split(x, [1, h * w], 1)
        image = x.transpose(1, 2).unflatten(2, (h, w))
        projections = (self.conv_proj_q, self.conv_proj_k, self.conv_proj_v)
        outputs = [x if projection is None else projection(image) for projection in projections]
        if self.with_cls_token:
            outputs = [torch.cat((cls_token, output), dim=1) for output in outputs]
        return outputs

    def forward(self, x, h, w):
        q, k, v = self.forward_conv(x, h, w)
        q, k, v = (
            linear(t).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for linear, t in ((self.proj_q, q), (self.proj_k, k), (self.proj_v, v))
        )
        score = torch.einsum("bhlk,bhtk->bhlt", [q, k]) * self.scale
        probabilities = self.attn_drop(score.softmax(dim=-1))
        x = torch.einsum("bhlt,bhtv->bhlv", [probabilities, v])
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """An attention and an MLP, each after a LayerNorm and with a residual."""

    def __init__(
        self, dim, num_heads, mlp_ratio, drop, drop_path, act_layer, norm_layer, with_cls_token, **attention
    ):
        super().__init__()
        self.with_cls_token = with_cls_token
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, proj_drop=drop, with_cls_token=with_cls_token, **attention)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=drop)

    def forward(self, x, h, w):
        x = x + self.drop_path(self.attn(self.norm1(x), h, w))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ConvEmbed(nn.Module):
    """The convolutional token embedding, from a map to a map."""

    def __init__(self, patch_size, in_chans, embed_dim, stride, padding, norm_layer=None):
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride, padding)
        self.norm = norm_layer(embed_dim) if norm_layer else None

    def forward(self, x):
        x = self.proj(x)
        tokens = x.flatten(2).transpose(1, 2)
        if self.norm:
            tokens = self.norm(tokens)
        return tokens.transpose(1, 2).unflatten(2, x.shape[2:])


class VisionTransformer(nn.Module):
    """One stage, from a map to a map and the class token."""

    def __init__(
        self, patch_size, patch_stride, patch_padding, in_chans, embed_dim, depth, drop_rate, drop_path_rate,
        norm_layer, with_cls_token, **block,
    ):  # fmt: skip
        super().__init__()
        self.patch_embed = ConvEmbed(patch_size, in_chans, embed_dim, patch_stride, patch_padding, norm_layer)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if with_cls_token else None
        self.pos_drop = nn.Dropout(drop_rate)
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        common = {"drop": drop_rate, "norm_layer": norm_layer, "with_cls_token": with_cls_token, **block}
        self.blocks = nn.ModuleList(Block(embed_dim, drop_path=rate, **common) for rate in rates)

    def forward(self, x):
        x = self.patch_embed(x)
        h, w = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x)
        for block in self.blocks:
            x = block(x, h, w)
        cls_token = None
        if self.cls_token is not None:
            cls_token, x = torch.split(x, [1, h * w], 1)
        return x.transpose(1, 2).unflatten(2, (h, w)), cls_token


class ConvolutionalVisionTransformer(nn.Module):
    """The stages ``stage0``, ``stage1``, … and a head on the class token; the defaults are CvT-13."""

    def __init__(
        self, num_classes=1000, embed_dims=(64, 192, 384), num_heads=(1, 3, 6), depths=(1, 2, 10),
        drop_rate=0.0, attn_drop_rate=0.0, drop_path_rate=(0.0, 0.0, 0.1), act_layer=QuickGELU,
        norm_layer=LayerNorm, method="dw_bn",
    ):  # fmt: skip
        super().__init__()
        self.num_stages = len(embed_dims)
        for i, dim in enumerate(embed_dims):
            stage = VisionTransformer(
                patch_size=(7, 3, 3)[i], patch_stride=(4, 2, 2)[i], patch_padding=(2, 1, 1)[i],
                in_chans=embed_dims[i - 1] if i else 3, embed_dim=dim, depth=depths[i],
                num_heads=num_heads[i], mlp_ratio=4.0, drop_rate=drop_rate, attn_drop=attn_drop_rate,
                drop_path_rate=drop_path_rate[i], act_layer=act_layer, norm_layer=norm_layer,
                with_cls_token=i == self.num_stages - 1, method=method,
            )  # fmt: skip
            setattr(self, f"stage{i}", stage)
        self.norm = norm_layer(embed_dims[-1])
        self.head = nn.Linear(embed_dims[-1], num_classes)

    def forward_features(self, x):
        for i in range(self.num_stages):
            x, cls_token = getattr(self, f"stage{i}")(x)
        return torch.squeeze(self.norm(cls_token))

    def forward(self, x):
        return self.head(self.forward_features(x))
