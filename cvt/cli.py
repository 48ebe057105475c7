"""The ``cvt`` command."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cvt_kernels import __version__
from cvt_kernels.cli import add_device_argument, positive_int, resolve_device, run_command

from .checkpoints import Checkpoint, CheckpointError, ModelCard, read_checkpoint
from .config import ACTIVATIONS, PRESETS, CvTConfig
from .data import DIGITS, UNCROPPED_SIZE, RandomCrop, load_images, open_dataset, read_labels
from .model import CvT, create_model
from .recipe import DIGITS_OPTIONS, MODELS, TrainConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``cvt``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cvt", description="Convolutional vision Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    classify = commands.add_parser("classify", help="print the most probable classes of photographs")
    classify.add_argument("photos", nargs="+", metavar="PHOTO", help="JPEG, PNG or whatever Pillow reads")
    classify.add_argument(
        "--checkpoint",
        required=True,
        help="official .pth, .safetensors, a Hugging Face directory, or one of cvt train",
    )
    classify.add_argument(
        "--labels", metavar="FILE", help="class names: one per line, or a JSON list or {index: name}"
    )
    classify.add_argument("--model", choices=tuple(PRESETS), help="default: what the checkpoint looks like")
    classify.add_argument(
        "--activation",
        choices=tuple(ACTIVATIONS),
        help="default: quick_gelu, with which the published weights were trained; Hugging Face runs gelu",
    )
    classify.add_argument(
        "--image-size",
        type=positive_int,
        help="pixels (default: as trained; 224, for cvt_w24 384); from 384 on uncropped",
    )
    classify.add_argument("--top", type=positive_int, default=5, help="classes per photograph (default: 5)")
    classify.add_argument("--batch-size", type=positive_int, default=32, help="default: 32")
    add_device_argument(classify)
    classify.set_defaults(run=_classify)

    _add_train(commands)

    arguments = parser.parse_args(argv)
    return run_command(f"cvt {arguments.command}", lambda: arguments.run(arguments))


def _classify(arguments: argparse.Namespace) -> None:
    """Prints only when every photograph has been classified."""
    device = resolve_device(arguments.device)
    checkpoint = read_checkpoint(arguments.checkpoint)
    card = checkpoint.card
    name = _architecture(arguments.model, checkpoint)
    overrides = {} if arguments.activation is None else {"activation": arguments.activation}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = create_model(name, checkpoint=checkpoint, **overrides).to(device).eval()
    classes = model.config.num_classes
    labels = checkpoint.labels if arguments.labels is None else read_labels(arguments.labels, classes)
    image_size = arguments.image_size or _image_size(name, card)
    crop_fraction = card.crop_fraction if card else None

    photos, batch_size = arguments.photos, arguments.batch_size
    batches = []
    with tqdm(total=len(photos), unit="photo", leave=False, disable=None) as progress:
        for start in range(0, len(photos), batch_size):
            batch = photos[start : start + batch_size]
            images = load_images(batch, image_size, crop_fraction=crop_fraction, upscale=card is not None)
            with torch.inference_mode():
                batches.append(model(images.to(device)).softmax(dim=-1).cpu())
            progress.update(len(images))

    probabilities = torch.cat(batches)
    if not probabilities.isfinite().all():
        raise CheckpointError(f"{arguments.checkpoint}: these weights give probabilities that are not finite")
    for warning in caught:
        print(f"cvt classify: {warning.message}", file=sys.stderr)
    print("\n".join(_table(photos, probabilities, min(arguments.top, classes), labels)))


def _architecture(model: str | None, checkpoint: Checkpoint) -> str | CvTConfig:
    """The model that was asked for, else what the checkpoint says, else what it looks like."""
    name = model or (checkpoint.card.config if checkpoint.card else checkpoint.preset)
    if name is None:
        raise CheckpointError(f"{checkpoint.path}: is not a CvT of {', '.join(PRESETS)}")
    return name


def _image_size(model: str | CvTConfig, card: ModelCard | None) -> int:
    if card is not None:
        return card.image_size
    return UNCROPPED_SIZE if model == "cvt_w24" else 224


def _table(photos: list[str], probabilities: Tensor, count: int, labels: list[str] | None) -> Iterator[str]:
    top = probabilities.topk(count)
    for photo, values, indices in zip(photos, top.values.tolist(), top.indices.tolist(), strict=True):
        yield photo
        for probability, index in zip(values, indices, strict=True):
            yield f"  {probability:7.2%}  {labels[index] if labels else f'class {index}'}"


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser("train", help="train a CvT, with torchrun on several devices")
    train.add_argument(
        "--data", required=True, help="digits, or a folder with train/CLASS/IMAGE and val/CLASS/IMAGE"
    )
    train.add_argument("--output", required=True, metavar="DIR", help="for checkpoints and logs")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    train.add_argument("--model", choices=tuple(MODELS), help="default: cvt_13; for digits cvt_nano")
    train.add_argument("--checkpoint", help="fine-tune these weights, with a new head for other classes")
    train.add_argument("--teacher", metavar="CHECKPOINT", help="for --distillation")
    train.add_argument("--image-size", type=positive_int, help="pixels (default: 224; for digits 16)")
    train.add_argument("--drop-path-rate", type=float, help="stochastic depth (default: the model's)")
    train.add_argument("--layer-scale", type=float, help="initial value (default: no layer scale)")
    train.add_argument("--workers", type=int, default=0, help="processes that decode images (default: 0)")
    train.add_argument(
        "--corrupt", choices=("error", "skip"), default="error", help="files that are no images"
    )
    add_device_argument(train)
    kinds = {"int": int, "float": float, "str": str}
    for field in dataclasses.fields(TrainConfig):
        option = f"--{field.name.replace('_', '-')}"
        text = f"{field.metadata['help']} (default: {field.default})"
        if field.type == "bool":
            train.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            train.add_argument(option, type=kinds[str(field.type)], help=text)
    train.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> None:
    from .train import Trainer, distributed  # half a second of torch.distributed's

    with distributed(resolve_device(arguments.device)) as device:
        digits = arguments.data == DIGITS
        given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(TrainConfig)}
        given = {name: value for name, value in given.items() if value is not None}
        config = TrainConfig(**{**(DIGITS_OPTIONS if digits else {}), **given})
        image_size = arguments.image_size or (16 if digits else 224)
        crop = RandomCrop(config.min_scale, flip=config.flip)
        train_set = open_dataset(arguments.data, "train", image_size, random_crop=crop)
        val_set = open_dataset(arguments.data, "val", image_size)
        torch.manual_seed(config.seed)
        trainer = Trainer(
            _model_to_train(arguments, len(train_set.classes)),
            train_set,
            val_set,
            config,
            output=arguments.output,
            device=device,
            teacher=_trained_model(arguments.teacher) if arguments.teacher else None,
            resume=arguments.resume,
            workers=arguments.workers,
            corrupt=arguments.corrupt,
        )
        history = trainer.fit()
        if trainer.rank == 0:
            best = max(history, key=lambda row: row["top1"])
            print(f"{arguments.output}: top-1 {best['top1']:.2%} in epoch {best['epoch']} of {len(history)}")


def _model_to_train(arguments: argparse.Namespace, classes: int) -> CvT:
    overrides = {name: getattr(arguments, name) for name in ("drop_path_rate", "layer_scale")}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    overrides["num_classes"] = classes
    if arguments.checkpoint is None:
        name = arguments.model or ("cvt_nano" if arguments.data == DIGITS else "cvt_13")
        return create_model(MODELS[name], **overrides)
    return _trained_model(arguments.checkpoint, arguments.model, **overrides)


def _trained_model(path: str, model: str | None = None, **overrides: Any) -> CvT:
    checkpoint = read_checkpoint(path)
    name = _architecture(model, checkpoint)
    if isinstance(name, str) and name not in PRESETS:
        name = MODELS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = create_model(name, checkpoint=checkpoint, **overrides)
    for warning in caught:
        print(f"cvt train: {warning.message}", file=sys.stderr)
    return built
