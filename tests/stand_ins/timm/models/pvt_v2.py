"""timm's PVT v2."""

import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath
from timm.layers.norm import LayerNorm
from torch import nn


class MlpWithDepthwiseConv(nn.Module):
    def __init__(self, in_features, hidden_features, drop=0.0, extra_relu=False):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.relu = nn.ReLU() if extra_relu else nn.Identity()
        self.dwconv = nn.Conv2d(hidden_features, hidden_features, 3, padding=1, groups=hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x, feat_size):
        image = self.fc1(x).transpose(1, 2).unflatten(2, feat_size)
        x = self.dwconv(self.relu(image)).flatten(2).transpose(1, 2)
        return self.drop(self.fc2(self.drop(self.act(x))))


class Attention(nn.Module):
    def __init__(
        self, dim, num_heads, sr_ratio=1, linear_attn=False, qkv_bias=True, attn_drop=0.0, proj_drop=0.0
    ):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.pool = nn.AdaptiveAvgPool2d(7) if linear_attn else None
        size = 1 if linear_attn else sr_ratio
        reduces = linear_attn or size > 1
        self.sr = nn.Conv2d(dim, dim, size, size) if reduces else None
        self.norm = nn.LayerNorm(dim) if reduces else None
        self.act = nn.GELU() if linear_attn else None

    def forward(self, x, feat_size):
        q = self.q(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        if self.sr is not None:
            image = x.transpose(1, 2).unflatten(2, feat_size)
            image = image if self.pool is None else self.pool(image)
            x = self.norm(self.sr(image).flatten(2).transpose(1, 2))
            x = x if self.act is None else self.act(x)
        k, v = self.kv(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            p = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        else:
            x = self.attn_drop((self.scale * q @ k.mT).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(
        self, dim, num_heads, mlp_ratio, sr_ratio, linear_attn, proj_drop, attn_drop, drop_path, norm_layer
    ):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, sr_ratio, linear_attn, attn_drop=attn_drop, proj_drop=proj_drop)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = MlpWithDepthwiseConv(dim, int(dim * mlp_ratio), drop=proj_drop, extra_relu=linear_attn)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x, feat_size):
        x = x + self.drop_path1(self.attn(self.norm1(x), feat_size))
        return x + self.drop_path2(self.mlp(self.norm2(x), feat_size))


class OverlapPatchEmbed(nn.Module):
    def __init__(self, patch_size, stride, in_chans, embed_dim):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride, patch_size // 2)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x):
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class PyramidVisionTransformerStage(nn.Module):
    def __init__(self, dim, dim_out, depth, downsample, norm_layer, **of_blocks):
        super().__init__()
        self.downsample = OverlapPatchEmbed(3, 2, dim, dim_out) if downsample else None
        self.blocks = nn.ModuleList(Block(dim_out, norm_layer=norm_layer, **of_blocks) for _ in range(depth))
        self.norm = norm_layer(dim_out)

    def forward(self, x):
        x = x if self.downsample is None else self.downsample(x)
        feat_size = tuple(x.shape[1:3])
        x = x.flatten(1, 2)
        for block in self.blocks:
            x = block(x, feat_size)
        return self.norm(x).unflatten(1, feat_size).permute(0, 3, 1, 2).contiguous()


class PyramidVisionTransformerV2(nn.Module):
    def __init__(
        self, num_classes=1000, depths=(3, 4, 6, 3), embed_dims=(64, 128, 256, 512), num_heads=(1, 2, 4, 8),
        sr_ratios=(8, 4, 2, 1), mlp_ratios=(8.0, 8.0, 4.0, 4.0), linear=False, proj_drop_rate=0.0,
        attn_drop_rate=0.0, drop_path_rate=0.0, norm_layer=LayerNorm,
    ):  # fmt: skip
        super().__init__()
        self.patch_embed = OverlapPatchEmbed(7, 4, 3, embed_dims[0])
        rates = torch.linspace(0, drop_path_rate, len(depths), device="cpu").tolist()
        self.stages = nn.Sequential(
            *(
                PyramidVisionTransformerStage(
                    embed_dims[max(i - 1, 0)], embed_dims[i], depths[i], downsample=i > 0,
                    norm_layer=norm_layer, num_heads=num_heads[i], mlp_ratio=mlp_ratios[i],
                    sr_ratio=sr_ratios[i], linear_attn=linear, proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate, drop_path=rates[i],
                )
                for i in range(len(depths))
            )
        )  # fmt: skip
        self.head = nn.Linear(embed_dims[-1], num_classes)

    def forward(self, x):
        return self.head(self.stages(self.patch_embed(x)).mean(dim=(-1, -2)))
