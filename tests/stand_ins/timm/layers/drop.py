"""timm's stochastic depth."""

from torch import nn


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        kept = x.new_empty((len(x), *(1,) * (x.ndim - 1))).bernoulli_(keep)
        return x * kept.div_(keep)
