"""The ``cvt`` command."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from cvt_kernels import __version__
from cvt_kernels.cli import add_device_argument, positive_int, resolve_device, run_command

from .checkpoints import CheckpointError, Recipe, read_checkpoint
from .config import ACTIVATIONS, PRESETS, CvTConfig
from .data import UNCROPPED_SIZE, load_images, read_labels
from .model import create_model


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

    arguments = parser.parse_args(argv)
    return run_command(f"cvt {arguments.command}", lambda: arguments.run(arguments))


def _classify(arguments: argparse.Namespace) -> None:
    """Prints only when every photograph has been classified."""
    device = resolve_device(arguments.device)
    checkpoint = read_checkpoint(arguments.checkpoint)
    recipe = checkpoint.recipe
    name = arguments.model or (recipe.config if recipe else checkpoint.preset)
    if name is None:
        raise CheckpointError(f"{arguments.checkpoint}: is not a CvT of {', '.join(PRESETS)}")
    overrides = {} if arguments.activation is None else {"activation": arguments.activation}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = create_model(name, checkpoint=checkpoint, **overrides).to(device).eval()
    classes = model.config.num_classes
    labels = checkpoint.labels if arguments.labels is None else read_labels(arguments.labels, classes)
    image_size = arguments.image_size or _image_size(name, recipe)
    crop_fraction = recipe.crop_fraction if recipe else None

    photos, batch_size = arguments.photos, arguments.batch_size
    batches = []
    with tqdm(total=len(photos), unit="photo", leave=False, disable=None) as progress:
        for start in range(0, len(photos), batch_size):
            batch = photos[start : start + batch_size]
            images = load_images(batch, image_size, crop_fraction=crop_fraction, upscale=recipe is not None)
            with torch.inference_mode():
                batches.append(model(images.to(device)).softmax(dim=-1).cpu())
            progress.update(len(images))

    probabilities = torch.cat(batches)
    if not probabilities.isfinite().all():
        raise CheckpointError(f"{arguments.checkpoint}: these weights give probabilities that are not finite")
    for warning in caught:
        print(f"cvt classify: {warning.message}", file=sys.stderr)
    print("\n".join(_table(photos, probabilities, min(arguments.top, classes), labels)))


def _image_size(model: str | CvTConfig, recipe: Recipe | None) -> int:
    if recipe is not None:
        return recipe.image_size
    return UNCROPPED_SIZE if model == "cvt_w24" else 224


def _table(photos: list[str], probabilities: Tensor, count: int, labels: list[str] | None) -> Iterator[str]:
    top = probabilities.topk(count)
    for photo, values, indices in zip(photos, top.values.tolist(), top.indices.tolist(), strict=True):
        yield photo
        for probability, index in zip(values, indices, strict=True):
            yield f"  {probability:7.2%}  {labels[index] if labels else f'class {index}'}"
