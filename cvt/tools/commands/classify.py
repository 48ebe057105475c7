"""``cvt classify``: the most probable classes of photographs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from cvt.huggingface import CheckpointError
from cvt_kernels.messages import printable_word

from .common import CHECKPOINT, MODEL, add, load_model, option, positive_int, print_result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add(parser, "photos")
    published = "microsoft/cvt-13, or Microsoft's for --model"
    add(parser, "--checkpoint", required=False, help=f"{CHECKPOINT} (default: {published})")
    add(parser, *MODEL[1:], "--token-keep", "--labels", "--batch-size", "--device")
    option(parser, "--top", "classes to print per photo", type=positive_int, default=5)
    parser.set_defaults(run=_classify)


def _classify(arguments: argparse.Namespace) -> None:
    """Prints only when every photograph has been classified."""
    loaded = load_model(arguments)
    model, photos = loaded.classifier, arguments.photos
    labels = loaded.labels(arguments.labels)
    batches = []
    with tqdm(total=len(photos), unit="photo", leave=False, disable=None) as progress:
        for start in range(0, len(photos), arguments.batch_size):
            images = loaded.read(photos[start : start + arguments.batch_size])
            with torch.inference_mode():
                batches.append(model(images.to(loaded.device)).softmax(dim=-1).cpu())
            progress.update(len(images))

    probabilities = torch.cat(batches)
    if not probabilities.isfinite().all():
        raise CheckpointError(
            f"{loaded.checkpoint.path}: these weights give probabilities that are not finite"
        )
    print_result(arguments, _table(photos, probabilities, min(arguments.top, model.num_classes), labels))


def _table(photos: list[str], probabilities: Tensor, count: int, labels: list[str] | None) -> Iterator[str]:
    top = probabilities.topk(count)
    for photo, values, indices in zip(photos, top.values.tolist(), top.indices.tolist(), strict=True):
        yield printable_word(photo)
        for probability, index in zip(values, indices, strict=True):
            yield f"  {probability:7.2%}  {printable_word(labels[index]) if labels else f'class {index}'}"
