"""Configurations: the table of the paper, broadcasting, and what is refused."""

from typing import get_args, get_type_hints

import pytest

from cvt import PRESETS, CvTConfig, create_model
from cvt.config import ACTIVATIONS
from cvt_kernels.records import GeluVariant


def test_presets_are_those_of_the_paper():
    rows = {name: (c.embed_dims, c.depths, c.num_heads, c.drop_path_rate[-1]) for name, c in PRESETS.items()}
    assert rows == {
        "cvt_13": ((64, 192, 384), (1, 2, 10), (1, 3, 6), 0.1),
        "cvt_21": ((64, 192, 384), (1, 4, 16), (1, 3, 6), 0.1),
        "cvt_w24": ((192, 768, 1024), (2, 2, 20), (3, 12, 16), 0.3),
    }
    assert {c.activation for c in PRESETS.values()} == {"quick_gelu"}


def test_one_value_serves_every_stage_and_integers_pass_for_numbers():
    config = CvTConfig(kernel_size=5, depths=[2, 2, 2], mlp_ratio=2, layer_scale=1)
    assert (config.kernel_size, config.depths, config.mlp_ratio) == ((5, 5, 5), (2, 2, 2), (2.0, 2.0, 2.0))
    assert isinstance(config.layer_scale, float)
    assert hash(config) == hash(CvTConfig(kernel_size=5, depths=2, mlp_ratio=2, layer_scale=1))


def test_types_name_every_choice():
    hints = get_type_hints(CvTConfig)
    assert get_args(hints["activation"]) == tuple(ACTIVATIONS)
    assert set(get_args(GeluVariant)) == set(ACTIVATIONS.values())
    for name in ("scale", "pool", "embed_norm", "drop_path_schedule"):
        expected = ", ".join(get_args(hints[name]))
        with pytest.raises(ValueError, match=f"{name}: got 'other', expected one of {expected}"):
            CvTConfig(**{name: "other"})


def test_scales():
    assert [s.attention_scale for s in CvTConfig().stages] == [64**-0.5, 192**-0.5, 384**-0.5]
    assert [s.attention_scale for s in CvTConfig(scale="head_dim").stages] == [64**-0.5] * 3


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("stage", [(0.0,), (0.0, 0.2), (0.0, 0.15, 0.3)]),
        ("depth", [(0.0,), (0.06, 0.12), (0.18, 0.24, 0.3)]),
        ("constant", [(0.1,), (0.2, 0.2), (0.3, 0.3, 0.3)]),
    ],
)
def test_drop_path_schedules(schedule, rates):
    config = CvTConfig(depths=(1, 2, 3), drop_path_rate=(0.1, 0.2, 0.3), drop_path_schedule=schedule)
    for stage, expected in zip(config.stages, rates, strict=True):
        assert stage.drop_path_rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_heads": (1, 3, 5)}, r"num_heads: 5 heads do not divide embed_dims\[2\] = 384"),
        ({"patch_strides": (4, -2, 2)}, "patch_strides: got -2, expected at least 1"),
        ({"patch_paddings": (7, 0, 0)}, "patch_paddings: got 7 for a patch of 7, expected less"),
        ({"stride_q": 2}, "stride_q: got .* expected 1"),
        ({"kernel_size": 4}, "kernel_size: got .* expected odd"),
        ({"depths": (1, 2)}, "depths: got 2 values, expected 3, one per stage"),
        ({"mlp_ratio": 0.001}, "mlp_ratio: 0.001 leaves stage 0 no hidden channel"),
        ({"pool": "cls", "cls_token": False}, "pool: 'cls' needs a class token"),
        ({"position_bias": True, "position_bias_size": 1}, "position_bias_size: got 1, too few for stage 0"),
        ({"embed_dims": ()}, r"embed_dims: got \(\), expected one integer per stage"),
        ({"depth": (1, 2, 3)}, "depth: is not a field of CvTConfig; expected one of embed_dims, depths"),
    ],
    ids=str,
)
def test_bad_overrides(overrides, message):
    """Single values are in test_arguments.py, bounds in test_card.py."""
    with pytest.raises((TypeError, ValueError), match=message):
        create_model("cvt_13", **overrides)
