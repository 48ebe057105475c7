"""``cvt explain``: attention maps over photos, and entropy and attention distance of every head."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from cvt.extras import require
from cvt.files import filling, making, write_json

from ..explanation import as_json, class_title, explain, photograph, pictures
from .common import MODEL, add, load_model, option, print_result
from .paths import OutputPath


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add(parser, "photos", *MODEL, "--token-keep", "--device")
    text = (
        "where to write explain.json and, for each photo, NAME.attention.png and NAME.rollout.png (with "
        "token pruning also NAME.tokens.png)"
    )
    option(parser, "--output", text, type=OutputPath, required=True, metavar="DIR")
    parser.set_defaults(run=_explain, written=_names_written)


def _names_written(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the names of the files in ``--output``."""
    kinds = ("attention", "rollout", "tokens")
    pictures = [f"{Path(photo).stem}.{kind}.png" for photo in arguments.photos for kind in kinds]
    return {"output": ["explain.json", *pictures]}


def _explain(arguments: argparse.Namespace) -> None:
    photos, output = arguments.photos, Path(arguments.output)
    names = [Path(photo).stem for photo in photos]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"photos: got two of the name {twice}, whose pictures would have one name")
    require("matplotlib.figure", "explain")  # where it is missing, this fails now
    loaded = load_model(arguments)
    model, config = loaded.classifier, loaded.model.config
    images = loaded.read(photos)
    progress = tqdm(images, unit="photo", leave=False, disable=None)
    explanations = [explain(model, image[None].to(loaded.device)) for image in progress]
    content = [
        {"photo": photo, **as_json(explanation, loaded.checkpoint.labels)}
        for photo, explanation in zip(photos, explanations, strict=True)
    ]
    with making(output), filling(output) as scratch:
        for name, image, explanation, entry in zip(names, images, explanations, content, strict=True):
            title = class_title(**entry["classes"][0])
            for kind, figure in pictures(explanation, photograph(image), config, title).items():
                figure.savefig(scratch / f"{name}.{kind}.png")
        write_json(scratch / "explain.json", {"checkpoint": arguments.checkpoint, "photos": content})
        written = sorted(str(output / file.name) for file in scratch.iterdir())
    print_result(arguments, written)
