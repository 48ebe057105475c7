"""timm's attention of all tokens to all."""

import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(
        self, dim, num_heads, qkv_bias=False, qk_norm=False, scale_norm=False, proj_bias=True, gated=False,
        attn_drop=0.0, proj_drop=0.0, norm_layer=None,
    ):  # fmt: skip
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = num_heads, dim // num_heads, dim
        self.scale, self.fused_attn = self.head_dim**-0.5, True
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(dim) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, dim, bias=qkv_bias) if gated else None
        self.proj = nn.Linear(dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, attn_mask=None, is_causal=False):
        gates = 1 if self.gate is None else self.gate(x).sigmoid()
        heads = self.qkv(x).unflatten(2, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k, v = self.q_norm(heads[0]), self.k_norm(heads[1]), heads[2]
        if self.fused_attn:
            p = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask, p, is_causal)
        else:
            assert attn_mask is None
            assert not is_causal
            x = self.attn_drop((self.scale * q @ k.mT).softmax(dim=-1)) @ v
        x = self.norm(x.transpose(1, 2).flatten(2)) * gates
        return self.proj_drop(self.proj(x))
