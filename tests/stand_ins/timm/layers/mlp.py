"""timm's MLPs: of two linear layers, and of which the first makes gates too."""

from torch import nn


class Mlp(nn.Module):
    def __init__(self, in_features, hidden_features, act_layer=nn.GELU, norm_layer=None, bias=True, drop=0.0):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features, bias=bias)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden_features)
        self.fc2 = nn.Linear(hidden_features, in_features, bias=bias)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x):
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        return self.drop2(self.fc2(x))


class GluMlp(Mlp):
    def __init__(self, in_features, hidden_features, **others):
        super().__init__(in_features, hidden_features, **others)
        self.fc2 = nn.Linear(hidden_features // 2, in_features)

    def forward(self, x):
        gates, x = self.fc1(x).chunk(2, dim=-1)
        x = self.norm(self.drop1(self.act(gates) * x))
        return self.drop2(self.fc2(x))
