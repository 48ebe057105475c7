"""timm's ViT, of which DeiT and DINOv2 are configurations: layer scales, register tokens."""

import functools

import torch
from timm.layers.attention import Attention
from timm.layers.drop import DropPath
from timm.layers.layer_scale import LayerScale
from timm.layers.mlp import GluMlp, Mlp
from timm.layers.norm import LayerNorm
from torch import nn

SwiGLUPacked = functools.partial(GluMlp, act_layer=nn.SiLU)


class Block(nn.Module):
    def __init__(
        self, dim, num_heads, mlp_ratio=4.0, qkv_bias=False, qk_norm=False, scale_attn_norm=False,
        scale_mlp_norm=False, proj_drop=0.0, attn_drop=0.0, init_values=None, drop_path=0.0,
        act_layer=nn.GELU, norm_layer=LayerNorm, mlp_layer=Mlp, attn_layer=Attention,
    ):  # fmt: skip
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = attn_layer(
            dim, num_heads=num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm, scale_norm=scale_attn_norm,
            attn_drop=attn_drop, proj_drop=proj_drop, norm_layer=norm_layer,
        )  # fmt: skip
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = mlp_layer(
            in_features=dim, hidden_features=int(dim * mlp_ratio), act_layer=act_layer,
            norm_layer=norm_layer if scale_mlp_norm else None, drop=proj_drop,
        )  # fmt: skip
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x, attn_mask=None, is_causal=False):
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ResPostBlock(Block):
    def forward(self, x, attn_mask=None, is_causal=False):
        x = x + self.drop_path1(self.norm1(self.attn(x, attn_mask=attn_mask, is_causal=is_causal)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class PatchEmbed(nn.Module):
    def __init__(self, patch_size, embed_dim):
        super().__init__()
        self.proj = nn.Conv2d(3, embed_dim, patch_size, patch_size)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    def __init__(
        self, img_size=224, patch_size=16, num_classes=1000, global_pool="token", embed_dim=768, depth=12,
        num_heads=12, qkv_bias=True, reg_tokens=0, proj_drop_rate=0.0, attn_drop_rate=0.0,
        drop_path_rate=0.0, norm_layer=None, block_fn=Block, **of_blocks,
    ):  # fmt: skip
        super().__init__()
        assert global_pool == "token"
        norm_layer = norm_layer or LayerNorm
        self.patch_embed = PatchEmbed(patch_size, embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.reg_token = nn.Parameter(torch.zeros(1, reg_tokens, embed_dim)) if reg_tokens else None
        positions = 1 + reg_tokens + (img_size // patch_size) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, embed_dim))
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        common = {"qkv_bias": qkv_bias, "norm_layer": norm_layer, **of_blocks}
        common |= {"proj_drop": proj_drop_rate, "attn_drop": attn_drop_rate}
        self.blocks = nn.Sequential(
            *(block_fn(dim=embed_dim, num_heads=num_heads, drop_path=rate, **common) for rate in rates)
        )
        self.norm = norm_layer(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward_features(self, x, attn_mask=None, is_causal=False):
        x = self.patch_embed(x)
        first = [each.expand(len(x), -1, -1) for each in (self.cls_token, self.reg_token) if each is not None]
        x = torch.cat((*first, x), dim=1) + self.pos_embed
        if attn_mask is None and not is_causal:
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block(x, attn_mask=attn_mask, is_causal=is_causal)
        return self.norm(x)

    def forward_head(self, x):
        return self.head(x[:, 0])

    def forward(self, x, attn_mask=None, is_causal=False):
        return self.forward_head(self.forward_features(x, attn_mask=attn_mask, is_causal=is_causal))
