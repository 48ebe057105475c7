"""Every public argument of cvt is checked by name; a new one without an entry here fails a test."""

import math

import pytest
import torch
from torch import nn

import cvt
from cvt import CvTConfig, create_model, factory
from tests.arguments import (
    Call,
    also_named,
    choice,
    flag,
    names_of,
    number,
    of_values,
    optional,
    problems,
    strings,
    tensor,
)
from tests.upstream import ONE_STAGE

SIDE = 16
CONFIG = of_values("a", 3, {}, CvTConfig, nn.Linear(2, 2))
MODEL = of_values("a", 3, nn.Linear, CvTConfig())
BATCHES = of_values(3, "a", [], [1], [()], [(1, 2)], [(None, None)], [torch.ones(1, 3, SIDE, SIDE)])
PATH = of_values(3, True, {}, ["a"], torch.ones(2))


def model(**overrides):
    return create_model(ONE_STAGE, **overrides).eval()


def images(count=1):
    return torch.randn(count, 3, SIDE, SIDE)


def fields():
    return {field: getattr(ONE_STAGE, field) for field in ONE_STAGE.__dataclass_fields__}


NOTHING = optional(of_values())
WRONG = ("a", None, nn.Linear, 1j, [None], torch.ones(2))
FIELDS = {
    int: of_values(*WRONG, True, -1, 1.5, math.nan, 2**70),
    float: of_values(*WRONG, True, -0.1, math.nan, math.inf, -math.inf),
    bool: of_values(*WRONG, 0, 1, 1.0),
    str: choice(),
}


def kind_of(field):
    """Returns the kind of a field of the configuration: of its default value, or of those per stage."""
    default = getattr(CvTConfig(), field)
    return FIELDS[type(default[0] if isinstance(default, tuple) else default)]


CONFIGURATION = {field: kind_of(field) for field in fields() if field not in ("layer_scale", "head_dim")}
CONFIGURATION |= {
    "layer_scale": optional(of_values("a", nn.Linear, True, math.nan, math.inf)),
    "head_dim": optional(FIELDS[int]),
}
CONFIGURATION |= {"token_keep_bounds": of_values("ab", 3, (1,), (0.9, 0.1), (True, 1), ("a", "b"))}

CALLS = {
    "CvT": Call(lambda: {"config": ONE_STAGE}, {"config": CONFIG}),
    "CvTConfig": Call(fields, CONFIGURATION),
    "CvTFeatures": Call(
        lambda: {"config": ONE_STAGE, "out_indices": (0,)},
        {"config": CONFIG, "out_indices": optional(of_values("a", 0, (1.5,), (True,), (), (7,), (-2,)))},
    ),
    "CvTSegmenter": Call(lambda: {"config": model(head="segment").config}, {"config": CONFIG}),
    "create_model": Call(
        lambda: (
            {"model": ONE_STAGE, "pretrained": False, "checkpoint": None, "features_only": False}
            | {"out_indices": None, "overrides": {}}
        ),
        {
            "model": of_values("a", "", 3, {}, nn.Linear(2, 2)),
            "pretrained": flag(),
            "checkpoint": optional(of_values(3, True, {}, ["a"], torch.ones(2))),
            "features_only": flag(),
            "out_indices": optional(of_values("a", 0, (0,), ())),
            "overrides": NOTHING,
        },
        lambda overrides, **given: create_model(**given, **overrides),
    ),
    "load_checkpoint": Call(
        lambda: {"model": create_model(checkpoint="digits"), "checkpoint": "digits"},
        {"model": MODEL, "checkpoint": also_named(PATH, "path")},
    ),
    "read_checkpoint": Call(
        lambda: {"path": "digits", "download": {}},
        {"path": PATH, "download": NOTHING},
        lambda path, download: cvt.read_checkpoint(path, **download),
    ),
    "prune_weights": Call(
        lambda: {"model": model(), "mlp": 0.5, "heads": 0.5, "batches": None, "saliency": None},
        {
            "model": MODEL,
            "mlp": number(-0.1, 1.0, 2),
            "heads": number(-0.1, 1.0, 2),
            "batches": optional(BATCHES),
            "saliency": optional(choice()),
        },
    ),
    "randomize": Call(
        lambda: {"model": nn.Linear(2, 2), "seed": 0},
        {"model": of_values("a", 3, nn.Linear), "seed": of_values("a", 1.5, True, [1])},
        factory.randomize,
    ),
    "forward": Call(
        lambda: {"self": model(), "images": images()},
        {"images": tensor((3, SIDE, SIDE), (1, 2, SIDE, SIDE), (1, 3, 0, 0))},
        cvt.CvT.forward,
    ),
    "reset_classifier": Call(
        lambda: {"self": model(), "num_classes": 3, "pool": None},
        {"num_classes": of_values("a", 1.5, True, -1, [1], 2**40), "pool": optional(choice())},
        cvt.CvT.reset_classifier,
    ),
    "set_token_keep": Call(
        lambda: {"self": model(), "token_keep": 1.0, "bounds": None},
        {
            "token_keep": of_values("a", True, 0.0, 1.5, -1, [1, 2], float("nan")),
            "bounds": also_named(optional(CONFIGURATION["token_keep_bounds"]), "token_keep_bounds"),
        },
        cvt.CvT.set_token_keep,
    ),
    "save_huggingface": Call(
        lambda: {
            "model": model(),
            "directory": "/dev/null/x",
            "labels": None,
            "image_size": None,
            "crop_fraction": None,
        },
        {
            "model": MODEL,
            "directory": PATH,
            "labels": optional(strings()),
            "image_size": optional(of_values("a", True, 1.5, 0, -1, 2**40, [1])),
            "crop_fraction": optional(number(0.0, -0.1, 1.5)),
        },
    ),
    "segment_in_tiles": Call(
        lambda: {
            "model": model(head="segment"),
            "images": images(),
            "tile": 64,
            "overlap": 32,
            "context": 8,
            "logits": False,
        },
        {
            "model": of_values("a", 3, nn.Linear, model().train(), CvTConfig()),
            "images": tensor((3, SIDE, SIDE), (1, 2, SIDE, SIDE), (1, 3, 0, 0)),
            "tile": of_values("a", True, 1.5, 0, -32, 63, 80, [1]),
            "overlap": of_values("a", True, 1.5, -32, 16, 64, 96, [1]),
            "context": of_values("a", True, 1.5, -1, 17, [1]),
            "logits": flag(),
        },
    ),
    "from_pretrained": Call(
        lambda: {
            "pretrained_model_name_or_path": "digits",
            "revision": None,
            "token": None,
            "cache_dir": None,
            "force_download": False,
            "local_files_only": True,
            "overrides": {},
        },
        {
            "pretrained_model_name_or_path": PATH,
            "revision": optional(of_values(3, True, ["a"])),
            "token": optional(of_values(3, ["a"], 1.5)),
            "cache_dir": optional(of_values(3, True, ["a"])),
            "force_download": flag(),
            "local_files_only": flag(),
            "overrides": NOTHING,
        },
        lambda overrides, **given: cvt.CvT.from_pretrained(**given, **overrides),
    ),
}
OTHERS = ["CheckpointError", "PRESETS", "__version__"]


def test_every_public_name_and_argument_has_an_entry():
    assert {*cvt.__all__} <= {*CALLS, *OTHERS}
    for name in {*cvt.__all__} & {*CALLS}:
        assert sorted(CALLS[name].kinds) == sorted(names_of(getattr(cvt, name))), name


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_arguments_are_refused_by_name(name):
    call = CALLS[name]
    function = call.function or getattr(cvt, name)
    if name != "save_huggingface":  # which would write a directory
        function(**call.arguments())  # a bad argument is to be all that is wrong
    found = problems(name, call, function)
    assert not found, "\n".join(found)
