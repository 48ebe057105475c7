"""The ``cvt`` command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cvt_kernels import __version__

from ..checkpoints import Checkpoint, CheckpointError, ModelCard, read_checkpoint
from ..config import ACTIVATIONS, PRESETS, CvTConfig
from ..datasets import DIGITS, Batches, RandomCrop, open_dataset
from ..factory import create_model
from ..files import filling, replacing
from ..images import UNCROPPED_SIZE, load_images, read_labels
from ..model import CvT
from ..training.recipe import DIGITS_OPTIONS, MODELS, PRECISIONS, TrainConfig
from . import bench, compile, doctor  # noqa: A004 (the name of the command)
from .common import add_device_argument, positive_int, resolve_device, run_command
from .evaluate import as_json as evaluation_json
from .evaluate import cost, evaluate, report
from .explain import as_json as explanation_json
from .explain import explain, figure_class, overlay, photograph, plot_heads
from .export import FORMATS, export


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``cvt``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cvt", description="Convolutional vision Transformers.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    classify = commands.add_parser("classify", help="print the most probable classes of photographs")
    _add_photos_argument(classify)
    _add_model_arguments(classify)
    _add_labels_argument(classify)
    classify.add_argument("--top", type=positive_int, default=5, help="classes per photograph (default: 5)")
    classify.add_argument("--batch-size", type=positive_int, default=32, help="default: 32")
    add_device_argument(classify)
    classify.set_defaults(run=_classify)

    evaluation = commands.add_parser(
        "evaluate",
        help="accuracy, loss and confusion on a data set; parameters, multiply-adds, speed, memory",
    )
    evaluation.add_argument(
        "--data", required=True, help="digits, or a folder with val/CLASS/IMAGE, the layout of ImageNet"
    )
    _add_model_arguments(evaluation)
    _add_labels_argument(evaluation)
    evaluation.add_argument("--batch-size", type=positive_int, default=32, help="default: 32")
    evaluation.add_argument(
        "--workers", type=int, default=0, help="processes that read images (default: none)"
    )
    evaluation.add_argument(
        "--corrupt", choices=("error", "skip"), default="error", help="for unusable images (default: error)"
    )
    evaluation.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32", help="default: fp32")
    evaluation.add_argument("--json", metavar="FILE", help="write the figures and the whole confusion matrix")
    add_device_argument(evaluation)
    evaluation.set_defaults(run=_evaluate)

    explanation = commands.add_parser(
        "explain",
        help="what the model looks at: attention over photographs, entropy and distance of its heads",
    )
    _add_photos_argument(explanation)
    _add_model_arguments(explanation)
    explanation.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="for explain.json, and for each photograph NAME.attention.png and NAME.rollout.png",
    )
    explanation.add_argument(
        "--plot",
        action="store_true",
        help="heads.png too (needs matplotlib: pip install 'cvt-kernels[explain]')",
    )
    add_device_argument(explanation)
    explanation.set_defaults(run=_explain)

    exporting = commands.add_parser(
        "export", help="write a model for torch.export or ONNX, and compare the two"
    )
    _add_model_arguments(exporting)
    exporting.add_argument("--format", required=True, choices=FORMATS)
    exporting.add_argument("--output", required=True, metavar="FILE")
    exporting.set_defaults(run=_export)

    _add_train(commands)
    for command in (doctor, bench, compile):
        command.add_parser(commands)

    arguments = parser.parse_args(argv)
    return run_command(f"cvt {arguments.command}", lambda: arguments.run(arguments))


def _add_photos_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("photos", nargs="+", metavar="PHOTO", help="JPEG, PNG or whatever Pillow reads")


def _add_labels_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--labels", metavar="FILE", help="class names: one per line, or a JSON list or {index: name}"
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`_load` reads."""
    parser.add_argument(
        "--checkpoint",
        required=True,
        help="official .pth, .safetensors, a Hugging Face directory, or one of cvt train",
    )
    parser.add_argument("--model", choices=tuple(PRESETS), help="default: what the checkpoint looks like")
    parser.add_argument(
        "--activation",
        choices=tuple(ACTIVATIONS),
        help="default: quick_gelu, with which the published weights were trained; Hugging Face runs gelu",
    )
    parser.add_argument(
        "--image-size",
        type=positive_int,
        help="pixels (default: as trained; 224, for cvt_w24 384); from 384 on uncropped",
    )


class _Loaded(NamedTuple):
    """A model in evaluation mode, how it wants its images, and what was remarked when it was loaded."""

    model: CvT
    checkpoint: Checkpoint
    image_size: int
    remarks: list[str]

    @property
    def crop_fraction(self) -> float | None:
        card = self.checkpoint.card
        return card.crop_fraction if card else None

    def read(self, photos: list[str]) -> Tensor:
        upscale = self.checkpoint.card is not None
        return load_images(photos, self.image_size, crop_fraction=self.crop_fraction, upscale=upscale)

    def labels(self, file: str | None) -> list[str] | None:
        return self.checkpoint.labels if file is None else read_labels(file, self.model.num_classes)


def _load(arguments: argparse.Namespace, device: torch.device | str) -> _Loaded:
    checkpoint = read_checkpoint(arguments.checkpoint)
    name = _architecture(arguments.model, checkpoint)
    overrides = {} if arguments.activation is None else {"activation": arguments.activation}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = create_model(name, checkpoint=checkpoint, **overrides).to(device).eval()
    image_size = arguments.image_size or _image_size(name, checkpoint.card)
    return _Loaded(model, checkpoint, image_size, [str(warning.message) for warning in caught])


def _print(arguments: argparse.Namespace, lines: Iterable[str], remarks: Iterable[str]) -> None:
    """When all is done: the result, and on stderr what was remarked on the way."""
    for remark in remarks:
        print(f"cvt {arguments.command}: {remark}", file=sys.stderr)
    print("\n".join(lines))


def _classify(arguments: argparse.Namespace) -> None:
    """Prints only when every photograph has been classified."""
    device = resolve_device(arguments.device)
    loaded = _load(arguments, device)
    labels, classes = loaded.labels(arguments.labels), loaded.model.num_classes
    photos, batch_size = arguments.photos, arguments.batch_size
    batches = []
    with tqdm(total=len(photos), unit="photo", leave=False, disable=None) as progress:
        for start in range(0, len(photos), batch_size):
            images = loaded.read(photos[start : start + batch_size])
            with torch.inference_mode():
                batches.append(loaded.model(images.to(device)).softmax(dim=-1).cpu())
            progress.update(len(images))

    probabilities = torch.cat(batches)
    if not probabilities.isfinite().all():
        raise CheckpointError(f"{arguments.checkpoint}: these weights give probabilities that are not finite")
    _print(arguments, _table(photos, probabilities, min(arguments.top, classes), labels), loaded.remarks)


def _evaluate(arguments: argparse.Namespace) -> None:
    device = resolve_device(arguments.device)
    loaded = _load(arguments, device)
    model, size, data = loaded.model, loaded.image_size, arguments.data
    dataset = open_dataset(data, "val", size, crop_fraction=loaded.crop_fraction)
    if len(dataset.classes) != model.num_classes:
        raise ValueError(f"--data {data}: has {len(dataset.classes)} classes, the model {model.num_classes}")
    if loaded.checkpoint.card is not None and loaded.checkpoint.labels != dataset.classes:
        raise ValueError(f"--data {data}: its classes have other names than those of {arguments.checkpoint}")
    labels = loaded.labels(arguments.labels) or dataset.classes
    batches = Batches(dataset, arguments.batch_size, workers=arguments.workers, corrupt=arguments.corrupt)
    precision = PRECISIONS[arguments.precision]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(replacing(arguments.json)) if arguments.json else None
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        progress = tqdm(batches, unit="batch", leave=False, disable=None)
        figures = evaluate(model, progress, autocast=None if precision == torch.float32 else precision)
        costs = cost(model.config, size)
        if file is not None:
            setting = {
                "checkpoint": arguments.checkpoint,
                "data": data,
                "image_size": size,
                "batch_size": arguments.batch_size,
                "precision": arguments.precision,
                "device": str(device),
            }
            _write_json(file, setting | evaluation_json(figures, costs, labels))
    heading = f"{arguments.checkpoint} on {data}, {size}×{size} pixels, {arguments.precision} on {device}"
    remarks = [*loaded.remarks, *(str(warning.message) for warning in caught)]
    _print(arguments, [heading, "", report(figures, costs, labels)], remarks)


def _explain(arguments: argparse.Namespace) -> None:
    photos, output = arguments.photos, Path(arguments.output)
    names = [Path(photo).stem for photo in photos]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"photos: got two of the name {twice}, whose pictures would have one name")
    if arguments.plot:
        figure_class()
    device = resolve_device(arguments.device)
    loaded = _load(arguments, device)
    model, config = loaded.model, loaded.model.config
    images = loaded.read(photos)
    progress = tqdm(images, unit="photo", leave=False, disable=None)
    found = [explain(model, image[None].to(device)) for image in progress]
    output.mkdir(parents=True, exist_ok=True)
    with filling(output) as scratch:
        for name, image, seen in zip(names, images, found, strict=True):
            photo, heat = photograph(image), seen.attention[0].mean(0)
            overlay(photo, heat, config, config.stride_kv[-1]).save(scratch / f"{name}.attention.png")
            overlay(photo, seen.rollout[0], config).save(scratch / f"{name}.rollout.png")
        if arguments.plot:
            plot_heads(found, scratch / "heads.png")
        content = [
            {"photo": photo, **explanation_json(seen, loaded.checkpoint.labels)}
            for photo, seen in zip(photos, found, strict=True)
        ]
        _write_json(scratch / "explain.json", {"checkpoint": arguments.checkpoint, "photos": content})
        written = sorted(str(output / file.name) for file in scratch.iterdir())
    _print(arguments, written, loaded.remarks)


def _export(arguments: argparse.Namespace) -> None:
    loaded = _load(arguments, "cpu")
    size, config = loaded.image_size, loaded.model.config
    difference = export(loaded.model, arguments.output, arguments.format, image_size=size)
    line = (
        f"{arguments.output}: images (batch, {config.in_chans}, {size}, {size}) to logits "
        f"(batch, {config.num_classes}), within {difference:.1e} of the model"
    )
    _print(arguments, [line], loaded.remarks)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


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
    from ..training.trainer import Trainer, distributed  # half a second of torch.distributed's

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
