"""``cvt train``: training and fine-tuning of a CvT, on several devices under ``torchrun``."""

from __future__ import annotations

import argparse
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, get_args

import torch

from cvt.checkpoints import read_checkpoint
from cvt.config import PRESETS, Head
from cvt.factory import create_model
from cvt.huggingface import BEST
from cvt.model import CvT
from cvt.segmentation import CvTSegmenter

from ..datasets import DIGITS, RandomCrop
from ..training.recipe import DIGITS_OPTIONS, MODELS, SEGMENT_OPTIONS, TrainConfig
from ..training.trainer import LAST, Trainer, distributed, epoch_line, rank_and_world_size
from .common import add, integer, naming_options, open_split, option, print_result, resolve_device
from .paths import InputPath, OutputPath, add_json_argument, reporting

_MODEL_OPTIONS = ("drop_path_rate", "layer_scale", "token_keep")  # fields of CvTConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command, with an option for every field of :class:`TrainConfig`."""
    own = _differing("--task segment", SEGMENT_OPTIONS), _differing("--data digits", DIGITS_OPTIONS)
    parser.epilog = " ".join(own)
    data = (
        "digits, or a folder with train/CLASS/IMAGE and val/CLASS/IMAGE; for --task segment "
        "train/images/NAME.jpg, train/labels/NAME.png and the same in val/"
    )
    option(parser, "--data", data, type=InputPath, required=True)
    text = "predict a class per image, or per pixel (segment, whose defaults are listed below)"
    option(parser, "--task", text, choices=get_args(Head), default="classify")
    text = "where to write checkpoints and logs"
    option(parser, "--output", text, type=OutputPath, required=True, metavar="DIR")
    option(parser, "--resume", "resume from the last checkpoint in --output", action="store_true")
    text = "architecture (default: cvt_13; for digits cvt_nano)"
    option(parser, "--model", text, choices=tuple(MODELS))
    weights = "weights to fine-tune; the head is replaced if the classes differ"
    add(parser, "--checkpoint", required=False, help=weights)
    text = "activation of the MLPs (default: the checkpoint's, or else quick_gelu)"
    add(parser, "--activation", help=text)
    add(parser, "--image-size", help="side of the input images in pixels (default: 224; for digits 16)")
    option(parser, "--teacher", "teacher model for --distillation", type=InputPath, metavar="CHECKPOINT")
    option(parser, "--drop-path-rate", "rate of stochastic depth (default: the model's)", type=float)
    option(parser, "--layer-scale", "initial value of layer scale (default: no layer scale)", type=float)
    add(parser, "--token-keep", "--workers", "--corrupt", "--device")
    yes_or_no = argparse.BooleanOptionalAction
    text = "on a GPU, replay forwards and backwards as CUDA graphs, which hold their memory"
    option(parser, "--graph", text, action=yes_or_no, default=True)
    for field in dataclasses.fields(TrainConfig):
        kind = {"action": yes_or_no} if field.type == "bool" else {"type": _kind(field)}
        text = f"{field.metadata['help']} (default: {field.default})"
        option(parser, f"--{field.name.replace('_', '-')}", text, **kind)
    add_json_argument(parser, "the options and the metrics of every epoch")
    parser.set_defaults(run=_train, written=_names_written)


def _names_written(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the names of the files in ``--output``, but for TensorBoard's, which are always new."""
    return {"output": [BEST, LAST, "log.csv"]}


def _kind(field: dataclasses.Field[Any]) -> Callable[[str], Any]:
    """Returns the function that parses the option of a field of :class:`TrainConfig`, which checks it."""
    if field.type == "int":
        least, below = field.metadata["range"]
        return integer(least, below - 1)
    return float if field.type == "float" else str


def _differing(option: str, values: dict[str, Any]) -> str:
    """Returns a sentence that lists the defaults that an option changes."""
    defaults = dataclasses.asdict(TrainConfig())
    different = [
        f"--{name.replace('_', '-')} {value:g}" for name, value in values.items() if value != defaults[name]
    ]
    return f"Defaults with {option}: {', '.join(different)}."


def _train(arguments: argparse.Namespace) -> None:
    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    with (
        distributed(resolve_device(arguments.device)) as device,
        naming_options(*fields, *_MODEL_OPTIONS),
    ):
        is_digits = arguments.data == DIGITS
        given = {name: getattr(arguments, name) for name in fields}
        given = {name: value for name, value in given.items() if value is not None}
        options = SEGMENT_OPTIONS if arguments.task == "segment" else DIGITS_OPTIONS if is_digits else {}
        config = TrainConfig(**_recipe(options, given))
        pixels = arguments.image_size or (16 if is_digits else 224)
        crop = RandomCrop(config.min_scale, flip=config.flip)
        opened = {"image_size": pixels, "head": arguments.task, "corrupt": arguments.corrupt}
        train_set = open_split(arguments.data, "train", random_crop=crop, **opened)
        val_set = open_split(arguments.data, "val", **opened)
        torch.manual_seed(config.seed)
        with warnings.catch_warnings():
            if rank_and_world_size()[0]:
                warnings.simplefilter("ignore")  # the first of all processes says it
            default = "cvt_nano" if is_digits else "cvt_13"
            model = _model_to_train(arguments, len(train_set.classes), default)
            teacher = create_model(checkpoint=arguments.teacher) if arguments.teacher else None
        names = ("output", "resume", "workers", "corrupt", "graph")
        settings: dict[str, Any] = {name: getattr(arguments, name) for name in names}
        trainer = Trainer(model, train_set, val_set, config, device=device, teacher=teacher, **settings)
        with reporting(arguments.json if trainer.rank == 0 else None) as report_json:
            history = trainer.fit(
                report=lambda row: print_result(arguments, [epoch_line(row, config.epochs)]), progress=True
            )
            report_json({"output": arguments.output, **dataclasses.asdict(config), "epochs_done": history})
        if trainer.rank == 0:
            score, title = trainer.task.score, trainer.task.title
            best = max(history, key=lambda row: row[score])
            line = f"{title} {best[score]:.2%} in epoch {best['epoch']} of {len(history)}"
            print_result(arguments, [f"{arguments.output}: {line}"])


def _recipe(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a training; as few epochs as the default warm-up has are half warm-up."""
    options = {**dataclasses.asdict(TrainConfig(**defaults)), **given}
    if "warmup_epochs" not in given and options["warmup_epochs"] >= options["epochs"]:
        options["warmup_epochs"] = options["epochs"] / 2
    return options


def _model_to_train(arguments: argparse.Namespace, classes: int, default: str) -> CvT | CvTSegmenter:
    """Builds the model of ``--model`` or ``default``, or the one of ``--checkpoint`` with its weights."""
    given = {name: getattr(arguments, name, None) for name in (*_MODEL_OPTIONS, "activation")}
    overrides: Any = {name: value for name, value in given.items() if value is not None}
    overrides |= {"num_classes": classes, "head": arguments.task}
    name: Any = arguments.model
    if arguments.checkpoint is None:
        return create_model(MODELS[name or default], **overrides)
    checkpoint = read_checkpoint(arguments.checkpoint)
    if checkpoint.quantized:
        raise ValueError(f"--checkpoint: {checkpoint.path} is quantized, expected weights in floating point")
    if name is None or name in PRESETS:
        return create_model(name, checkpoint=checkpoint, **overrides)
    known = {} if checkpoint.activation is None else {"activation": checkpoint.activation}
    return create_model(MODELS[name], checkpoint=checkpoint, **known | overrides)
