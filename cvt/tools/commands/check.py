"""``cvt evaluate --check``: whether a download is whole, the published model, and right when accelerated."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cvt_kernels as ck
from cvt.checkpoints import local_place
from cvt.extras import require
from cvt.images import open_image

from .common import print_result
from .paths import reporting

#: The photograph of transformers' tests, of COCO's validation set: two cats on a couch, 640×480.
PHOTO = "http://images.cocodataset.org/val2017/000000039769.jpg"
#: The first values of some checkpoints for it, in the order of memory, that these tests expect. The test of
#: PVT v2 repeats the values of PVT, so none is expected of it here.
FIRST_VALUES: dict[str, tuple[float, ...]] = {
    "microsoft/cvt-13": (0.9285, 0.9015, -0.3150),
    "nvidia/segformer-b0-finetuned-ade-512-512": (-4.6310, -5.5232, -6.2356),
    "Zetatech/pvt-tiny-224": (-1.4192, -1.9158, -0.9702),
    "vinvino02/glpn-kitti": (3.4291, 2.7865, 2.5151),
}
#: How far a value may be from the expected one: decoders and resizing differ in the last bit of a pixel.
#: Other weights give unrelated values.
TOLERANCE = 0.02
_DAMAGE = {
    "missing": "are missing",
    "unused": "have no place in the model",
    "not_finite": "have NaN or infinities",
}


def check(arguments: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something is wrong, else 0."""
    name = arguments.checkpoint
    with reporting(arguments.json) as report_json:
        place = _place(name)
        transformers = require("transformers", "hf")
        architecture = next(iter(transformers.AutoConfig.from_pretrained(place).architectures or ()), "none")
        if not hasattr(transformers, architecture):
            raise ValueError(
                f"checkpoint: its architecture is {architecture}, expected a class of transformers"
            )
        made, loading = getattr(transformers, architecture).from_pretrained(place, output_loading_info=True)
        model = made.float().eval()
        content: dict[str, Any] = {
            "checkpoint": name,
            "model": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "missing": sorted(loading["missing_keys"]),
            "unused": sorted(loading["unexpected_keys"]),
            "not_finite": [key for key, each in model.state_dict().items() if not each.isfinite().all()],
        }
        content["failures"] = [
            f"{len(keys)} tensors {text}: {', '.join(keys[:3])}{' …' * (len(keys) > 3)}"
            for kind, text in _DAMAGE.items()
            if (keys := content[kind])
        ]
        lines = [f"{name}: {content['model']}, {content['parameters'] / 1e6:.1f} M parameters"]
        if not content["failures"]:
            lines += _run(model, place, arguments.photo, content)
        report_json(content)
    print_result(arguments, [*lines, *(f"wrong: {failure}" for failure in content["failures"])])
    return int(bool(content["failures"]))


def _run(model: Any, place: str, photo: str | None, content: dict[str, Any]) -> list[str]:
    """Computes the first values and verifies the accelerated model; adds both to the content."""
    if photo:  # as the checkpoint asks for
        processor = require("transformers", "hf").AutoImageProcessor.from_pretrained(place)
        with open_image(photo) as file:
            image = processor(images=file.convert("RGB"), return_tensors="pt")["pixel_values"]
    else:
        size = getattr(model.config, "image_size", None) or 224
        height, width = size if isinstance(size, list | tuple) else (size, size)
        image = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        output = model(image)
    result = output.logits if "logits" in output else output[0]  # such as a depth
    got = result.flatten()[:3].tolist()
    known = FIRST_VALUES.get(place, ())
    content["first_values"], content["expected"] = got, list(known) if photo else []
    if photo and any(not abs(a - b) <= TOLERANCE for a, b in zip(got, known, strict=False)):
        content["failures"].append(f"expected the first values {_numbers(known)} within {TOLERANCE}")
    ck.accelerate(model)
    verification = ck.verify(model, image, rounds=1)
    content["failures"] += verification.failures
    values = f"first values {_numbers(got)} for {photo or 'random numbers of seed 0'}"
    if known:
        values += f"; transformers' tests have {_numbers(known)} for {PHOTO}"
    return [values, "", str(verification), ""]


def _place(name: str) -> str:
    """Returns the directory or the name on the Hub that transformers takes."""
    place = local_place(name)
    if not isinstance(place, Path):
        return place.name
    if not (place / "config.json").is_file():
        expected = "owner/name on the Hub or a directory with config.json, with --check"
        raise ValueError(f"checkpoint: got {name}, expected {expected}")
    return str(place)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
