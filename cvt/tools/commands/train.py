"""``cvt train``: training and fine-tuning of a CvT, on several devices under ``torchrun``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, get_args

import torch

from cvt.checkpoints import read_checkpoint
from cvt.config import PRESETS, Head
from cvt.factory import create_model
from cvt.huggingface import BEST
from cvt.model import CvT
from cvt.segmentation import CvTSegmenter

from ..training.recipe import DIGITS_OPTIONS, MODELS, SEGMENT_OPTIONS, TrainConfig
from .common import (
    add,
    build_model,
    integer,
    naming_options,
    open_split,
    print_remarks,
    print_result,
    printed_warnings,
    resolve_device,
)
from .paths import add_json_argument, input_path, output_path, reporting

_MODEL_OPTIONS = ("drop_path_rate", "layer_scale", "token_keep")  # fields of CvTConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command, with an option for every field of :class:`TrainConfig`."""
    own = _differing("--task segment", SEGMENT_OPTIONS), _differing("--data digits", DIGITS_OPTIONS)
    parser.epilog = " ".join(own)
    parser.add_argument(
        "--data",
        type=input_path,
        required=True,
        help="digits, or a folder with train/CLASS/IMAGE and val/CLASS/IMAGE; for --task segment "
        "train/images/NAME.jpg, train/labels/NAME.png and the same in val/",
    )
    parser.add_argument(
        "--task",
        choices=get_args(Head),
        default="classify",
        help="predict a class per image (classify, the default) or per pixel (segment, whose defaults are "
        "listed below)",
    )
    parser.add_argument(
        "--output", type=output_path, required=True, metavar="DIR", help="where to write checkpoints and logs"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --output")
    parser.add_argument(
        "--model", choices=tuple(MODELS), help="architecture (default: cvt_13; for digits cvt_nano)"
    )
    weights = "weights to fine-tune; the head is replaced if the classes differ"
    add(parser, "--checkpoint", required=False, help=weights)
    text = "activation of the MLPs (default: the checkpoint's, or else quick_gelu)"
    add(parser, "--activation", help=text)
    add(parser, "--image-size", help="side of the input images in pixels (default: 224; for digits 16)")
    parser.add_argument(
        "--teacher", type=input_path, metavar="CHECKPOINT", help="teacher model for --distillation"
    )
    parser.add_argument(
        "--drop-path-rate", type=float, help="rate of stochastic depth (default: the model's)"
    )
    parser.add_argument(
        "--layer-scale", type=float, help="initial value of layer scale (default: no layer scale)"
    )
    add(parser, "--token-keep", "--workers", "--corrupt", "--device")
    parser.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU, replay forwards and backwards as CUDA graphs, which hold their memory",
    )
    for field in dataclasses.fields(TrainConfig):
        option = f"--{field.name.replace('_', '-')}"
        text = f"{field.metadata['help']} (default: {field.default})"
        if field.type == "bool":
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(option, type=_kind(field), help=text)
    add_json_argument(parser, "the options and the metrics of every epoch")
    parser.set_defaults(run=_train, written=_names_written)


def _names_written(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the names of the files in ``--output``, but for TensorBoard's, which are always new."""
    return {"output": [BEST, "last.pth", "log.csv", "curves.png"]}


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
    # lazy: torch.distributed and Pillow would slow down --help
    from ..datasets import DIGITS, RandomCrop
    from ..training.trainer import Trainer, distributed, epoch_line

    fields = [field.name for field in dataclasses.fields(TrainConfig)]
    with (
        printed_warnings(arguments),
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
        trainer = Trainer(
            _model_to_train(arguments, len(train_set.classes), "cvt_nano" if is_digits else "cvt_13"),
            train_set,
            val_set,
            config,
            output=arguments.output,
            device=device,
            teacher=_teacher(arguments) if arguments.teacher else None,
            resume=arguments.resume,
            workers=arguments.workers,
            corrupt=arguments.corrupt,
            graph=arguments.graph,
        )
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
    overrides: dict[str, Any] = {name: getattr(arguments, name, None) for name in _MODEL_OPTIONS}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    overrides |= {"num_classes": classes, "head": arguments.task}
    activation = arguments.activation
    if arguments.checkpoint is None:
        overrides |= {} if activation is None else {"activation": activation}
        return create_model(MODELS[arguments.model or default], **overrides)
    name = arguments.model
    model = name if name is None or name in PRESETS else MODELS[name]
    checkpoint = read_checkpoint(arguments.checkpoint)
    if checkpoint.quantized:
        raise ValueError(f"--checkpoint: {checkpoint.path} is quantized, expected weights in floating point")
    built, remarks = build_model(checkpoint, model, activation=activation, **overrides)
    _print_once(arguments, "--checkpoint", remarks)
    return built


def _teacher(arguments: argparse.Namespace) -> CvT | CvTSegmenter:
    """Builds the model of ``--teacher`` with its weights."""
    built, remarks = build_model(read_checkpoint(arguments.teacher), None, activation=None, option="")
    _print_once(arguments, "--teacher", remarks)
    return built


def _print_once(arguments: argparse.Namespace, option: str, remarks: list[str]) -> None:
    """Prints warnings in the first of all processes."""
    from ..training.trainer import rank_and_world_size

    if rank_and_world_size()[0] == 0:
        print_remarks(arguments, [f"{option}: {remark}" for remark in remarks])
