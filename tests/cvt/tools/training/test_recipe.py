"""The recipe of training against its formulas."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from cvt import create_model
from cvt.tools.training.recipe import MODELS, TrainConfig, distillation_loss, learning_rate, parameter_groups

TINY = dataclasses.replace(MODELS["cvt_nano"], embed_dims=(8, 16), num_classes=3)


@pytest.mark.parametrize("warmup", [0.0, 0.5, 3.0])
def test_learning_rate_is_that_of_pytorchs_schedulers(warmup):
    config = TrainConfig(epochs=5, warmup_epochs=warmup, lr=0.3, min_lr=0.01)
    steps = round(warmup * 10)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.3)
    schedule = CosineAnnealingLR(optimizer, 50 - steps, eta_min=0.01)
    if steps:
        linear = LinearLR(optimizer, 1 / steps, total_iters=steps - 1)
        schedule = SequentialLR(optimizer, [linear, schedule], [steps])
    for step in range(50):
        assert learning_rate(config, step, 10) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        schedule.step()


def test_weight_decay_and_layer_decay_of_every_parameter():
    model = create_model(TINY, depths=(2, 3), layer_scale=0.1, embed_norm="batch_layer_norm")
    of = {
        id(p): (group["weight_decay"], group["lr_scale"])
        for group in parameter_groups(model, 0.05, 0.5)
        for p in group["params"]
    }
    named = dict(model.named_parameters())
    assert len(of) == len(named)
    # From the head: 0 norm and head, 1 to 3 the second stage's blocks, 4 and 5 the first's, 6 its embedding.
    depths = {"head": 0, "norm": 0, "stage1.patch_embed": 3, "stage1.cls_token": 3, "stage0.patch_embed": 6}
    depths |= {f"stage1.blocks.{j}": 3 - j for j in range(3)}
    depths |= {f"stage0.blocks.{j}": 5 - j for j in range(2)}
    for name, parameter in named.items():
        depth = next(depth for prefix, depth in depths.items() if f"{name}.".startswith(f"{prefix}."))
        kind = name.split(".")[-1]
        norm = any(part in name for part in (".bn.", ".norm", "norm."))
        spared = kind in ("bias", "gamma", "cls_token") or norm
        assert of[id(parameter)] == (0.0 if spared else 0.05, 0.5**depth), name


def test_distillation_against_its_formula():
    logits, teacher = torch.randn(2, 5, 7, dtype=torch.float64).mul(3).unbind()
    p, q = (torch.exp(x / 4) / torch.exp(x / 4).sum(1, keepdim=True) for x in (logits, teacher))
    expected = 16 * (q * (q / p).log()).sum(1).mean()
    soft = distillation_loss(logits.float(), teacher.float(), "soft", 4.0)
    torch.testing.assert_close(soft.double(), expected, rtol=1e-5, atol=0)
    hard = -torch.stack([torch.log_softmax(x, 0)[t.argmax()] for x, t in zip(logits, teacher, strict=True)])
    torch.testing.assert_close(distillation_loss(logits, teacher, "hard"), hard.mean())
    with pytest.raises(ValueError, match=r"teacher: gives \(5, 6\), expected \(5, 7\)"):
        distillation_loss(logits, teacher[:, 1:], "soft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 10**30}, r"epochs: got 10{30}, expected at least 1 and below 1e\+06"),
        ({"batch_size": 2**40}, r"batch_size: got 1099511627776, expected at least 1 and below"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, expected at least 0 and below"),
        ({"lr": "fast"}, "lr: got 'fast', expected float"),
        ({"distillation": "warm"}, "distillation: got 'warm', expected one of none, soft, hard"),
        ({"warmup_epochs": 300.0}, "warmup_epochs: got 300, expected less than epochs, 300"),
        ({"freeze_bn": 1}, "freeze_bn: got 1, expected bool"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TrainConfig(**options)
