"""Every public argument of cvt is checked by name; a new one without an entry here fails a test."""

import math
from types import FunctionType

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


WRONG = ("a", None, nn.Linear, 1j, [None], torch.ones(2), {"a": 1}, 10**5000)
FIELDS = {
    int: (*WRONG, True, -1, 1.5, math.nan, 2**70),
    float: (*WRONG, True, -0.1, math.nan, math.inf, -math.inf),
    bool: (*WRONG, 0, 1, 1.0),
}


def kind_of(field):
    """Returns the kind of a field of the configuration: of its default value, or of those per stage."""
    default = getattr(CvTConfig(), field)
    if isinstance(default, str):
        return choice()
    if isinstance(default, tuple):
        wrong = FIELDS[type(default[0])]
        return of_values(*wrong, *((each,) for each in wrong))
    return of_values(*FIELDS[type(default)])


CONFIGURATION = {field: kind_of(field) for field in fields() if field not in ("layer_scale", "head_dim")}
CONFIGURATION |= {
    "layer_scale": optional(of_values("a", nn.Linear, True, math.nan, math.inf)),
    "head_dim": optional(of_values(*FIELDS[int])),
}
CONFIGURATION |= {"token_keep_bounds": of_values("ab", 3, (1,), (0.9, 0.1), (True, 1), ("a", "b"))}


def call(function=None, **arguments):
    """Returns a call of arguments, each a good value, or a function that makes it, and its kind."""

    def values():
        made = {name: good for name, (good, _) in arguments.items()}
        return {name: good() if isinstance(good, FunctionType) else good for name, good in made.items()}

    return Call(values, {name: kind for name, (_, kind) in arguments.items()}, function)


OF_IMAGES = images, tensor((3, SIDE, SIDE), (1, 2, SIDE, SIDE), (1, 3, 0, 0))
NOTHING = optional(of_values())
OVERRIDES = {}, NOTHING

CALLS = {
    "CvT": call(config=(ONE_STAGE, CONFIG)),
    "CvTConfig": Call(fields, CONFIGURATION),
    "CvTFeatures": call(
        config=(ONE_STAGE, CONFIG),
        out_indices=((0,), optional(of_values("a", 0, (1.5,), (True,), (), (7,), (-2,)))),
    ),
    "CvTSegmenter": call(config=(model(head="segment").config, CONFIG)),
    "create_model": call(
        lambda overrides, **given: create_model(**given, **overrides),
        model=(ONE_STAGE, of_values("a", "", 3, {}, nn.Linear(2, 2))),
        pretrained=(False, flag()),
        checkpoint=(None, optional(of_values(3, True, {}, ["a"], torch.ones(2)))),
        features_only=(False, flag()),
        out_indices=(None, optional(of_values("a", 0, (0,), ()))),
        overrides=OVERRIDES,
    ),
    "load_checkpoint": call(
        model=(lambda: create_model(checkpoint="digits"), MODEL),
        checkpoint=("digits", also_named(PATH, "path")),
    ),
    "read_checkpoint": call(
        lambda path, download: cvt.read_checkpoint(path, **download),
        path=("digits", PATH),
        download=OVERRIDES,
    ),
    "prune_weights": call(
        model=(model, MODEL),
        mlp=(0.5, number(-0.1, 1.0, 2)),
        heads=(0.5, number(-0.1, 1.0, 2)),
        batches=(None, optional(BATCHES)),
        saliency=(None, optional(choice())),
    ),
    "randomize": call(
        factory.randomize,
        model=(lambda: nn.Linear(2, 2), of_values("a", 3, nn.Linear)),
        seed=(0, of_values("a", 1.5, True, [1])),
    ),
    "forward": call(cvt.CvT.forward, self=(model, NOTHING), images=OF_IMAGES),
    "reset_classifier": call(
        cvt.CvT.reset_classifier,
        self=(model, NOTHING),
        num_classes=(3, of_values("a", 1.5, True, -1, [1], 2**40)),
        pool=(None, optional(choice())),
    ),
    "set_token_keep": call(
        cvt.CvT.set_token_keep,
        self=(model, NOTHING),
        token_keep=(1.0, of_values("a", True, 0.0, 1.5, -1, [1, 2], float("nan"))),
        bounds=(None, also_named(optional(CONFIGURATION["token_keep_bounds"]), "token_keep_bounds")),
    ),
    "save_huggingface": call(
        model=(model, MODEL),
        directory=("/dev/null/x", PATH),
        labels=(None, optional(strings())),
        image_size=(None, optional(of_values("a", True, 1.5, 0, -1, 2**40, [1]))),
        crop_fraction=(None, optional(number(0.0, -0.1, 1.5))),
    ),
    "segment_in_tiles": call(
        model=(lambda: model(head="segment"), of_values("a", 3, nn.Linear, model().train(), CvTConfig())),
        images=OF_IMAGES,
        tile=(64, of_values("a", True, 1.5, 0, -32, 63, 80, [1])),
        overlap=(32, of_values("a", True, 1.5, -32, 16, 64, 96, [1])),
        context=(8, of_values("a", True, 1.5, -1, 17, [1])),
        logits=(False, flag()),
    ),
    "from_pretrained": call(
        lambda overrides, **given: cvt.CvT.from_pretrained(**given, **overrides),
        pretrained_model_name_or_path=("digits", PATH),
        revision=(None, optional(of_values(3, True, ["a"]))),
        token=(None, optional(of_values(3, ["a"], 1.5))),
        cache_dir=(None, optional(of_values(3, True, ["a"]))),
        force_download=(False, flag()),
        local_files_only=(True, flag()),
        overrides=OVERRIDES,
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
