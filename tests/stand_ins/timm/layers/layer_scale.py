"""timm's factors on the channels of a branch."""

import torch
from torch import nn


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=1e-5, inplace=False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(torch.full((dim,), init_values))

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma
