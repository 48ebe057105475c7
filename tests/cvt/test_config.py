"""Configurations: the table of the paper, broadcasting, and what is refused."""

import dataclasses
from typing import get_args, get_type_hints

import pytest

from cvt import PRESETS, CvTConfig, create_model
from cvt.config import ACTIVATIONS, resolve_config
from cvt_kernels.records import GeluVariant


def test_presets_are_those_of_the_paper():
    rows = {name: (c.embed_dims, c.depths, c.num_heads, c.drop_path_rate[-1]) for name, c in PRESETS.items()}
    assert rows == {
        "cvt_13": ((64, 192, 384), (1, 2, 10), (1, 3, 6), 0.1),
        "cvt_21": ((64, 192, 384), (1, 4, 16), (1, 3, 6), 0.1),
        "cvt_w24": ((192, 768, 1024), (2, 2, 20), (3, 12, 16), 0.3),
    }
    assert {c.activation for c in PRESETS.values()} == {"quick_gelu"}


def test_one_value_serves_every_stage_and_lists_become_tuples():
    config = CvTConfig(kernel_size=5, depths=[2, 2, 2], mlp_ratio=2, drop_path_rate=0.1)
    assert config.kernel_size == (5, 5, 5)
    assert config.depths == (2, 2, 2)
    assert config.mlp_ratio == (2.0, 2.0, 2.0)
    assert hash(config) == hash(CvTConfig(kernel_size=5, depths=2, mlp_ratio=2, drop_path_rate=0.1))


def test_types_name_every_choice():
    hints = get_type_hints(CvTConfig)
    assert get_args(hints["activation"]) == tuple(ACTIVATIONS)
    assert set(get_args(GeluVariant)) == set(ACTIVATIONS.values())
    for name in ("scale", "pool", "embed_norm", "drop_path_schedule"):
        expected = ", ".join(get_args(hints[name]))
        with pytest.raises(ValueError, match=f"{name}: got 'other', expected one of {expected}"):
            CvTConfig(**{name: "other"})


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["cvt_13"].num_classes = 10


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
    ("overrides", "error", "message"),
    [
        ({"num_heads": (1, 3, 5)}, ValueError, r"num_heads: 5 heads do not divide embed_dims\[2\] = 384"),
        ({"patch_strides": (4, -2, 2)}, ValueError, "patch_strides: got -2, expected at least 1"),
        ({"stride_kv": -1}, ValueError, "stride_kv: got -1"),
        ({"stride_q": 2}, ValueError, "stride_q: got .* expected 1"),
        ({"patch_paddings": -1}, ValueError, "patch_paddings: got -1, expected at least 0"),
        ({"kernel_size": 4}, ValueError, "kernel_size: got .* expected odd"),
        ({"depths": (1, 2)}, ValueError, "depths: got 2 values, expected 3, one per stage"),
        ({"depths": 0}, ValueError, "depths: got 0"),
        ({"depths": 1.5}, TypeError, "depths: got 1.5, expected int"),
        ({"depths": True}, TypeError, "depths: got True, expected int"),
        ({"qkv_bias": 1}, TypeError, "qkv_bias: got 1, expected bool"),
        ({"mlp_ratio": "4"}, TypeError, "mlp_ratio: got '4', expected float"),
        ({"mlp_ratio": 0.001}, ValueError, "mlp_ratio: 0.001 leaves stage 0 no hidden channel"),
        ({"mlp_ratio": float("inf")}, ValueError, "mlp_ratio: got inf, expected at least 0 and below"),
        ({"drop_rate": 1.0}, ValueError, "drop_rate: got 1.0, expected at least 0 and below 1"),
        ({"drop_path_rate": float("nan")}, ValueError, "drop_path_rate: got nan"),
        (
            {"activation": "relu"},
            ValueError,
            "activation: got 'relu', expected one of quick_gelu, gelu, gelu_tanh",
        ),
        ({"scale": 0.1}, ValueError, "scale: got 0.1"),
        ({"pool": "max"}, ValueError, "pool: got 'max'"),
        ({"pool": "cls", "cls_token": False}, ValueError, "pool: 'cls' needs a class token"),
        ({"embed_norm": None}, ValueError, "embed_norm: got None"),
        ({"drop_path_schedule": "x"}, ValueError, "drop_path_schedule: got 'x'"),
        ({"layer_scale": "small"}, TypeError, "layer_scale: got 'small'"),
        ({"layer_scale": 10**400}, ValueError, "layer_scale: got 1000"),
        ({"mlp_ratio": 1e308}, ValueError, "mlp_ratio: got 1e"),
        ({"depths": 10**400}, ValueError, "depths: got 1000"),
        ({"patch_paddings": (7, 0, 0)}, ValueError, "patch_paddings: got 7 for a patch of 7, expected less"),
        ({"num_classes": -1}, ValueError, "num_classes: got -1"),
        ({"in_chans": 0}, ValueError, "in_chans: got 0"),
        ({"embed_dims": 64}, TypeError, "embed_dims: got 64, expected one integer per stage"),
        ({"embed_dims": ()}, TypeError, "embed_dims: got ()"),
        (
            {"depth": (1, 2, 3)},
            TypeError,
            "depth: is not a field of CvTConfig; expected one of embed_dims, depths",
        ),
    ],
)
def test_bad_overrides(overrides, error, message):
    with pytest.raises(error, match=message):
        resolve_config("cvt_13", **overrides)
    with pytest.raises(error, match=message):
        create_model("cvt_13", **overrides)


def test_an_integer_passes_for_the_layer_scale():
    assert create_model("cvt_13", depths=1, layer_scale=1).config.layer_scale == 1.0


def test_unknown_model():
    with pytest.raises(ValueError, match="model: got 'cvt_99', expected one of cvt_13, cvt_21, cvt_w24"):
        create_model("cvt_99")
    with pytest.raises(TypeError, match="model: got int"):
        create_model(13)
