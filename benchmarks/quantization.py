"""Measures quantized models: speed against float32 and bfloat16, accuracy, size.

``python -m benchmarks.quantization FILE`` writes JSON. Every model is frozen for serving. On a CPU it also
holds the kernels to older instruction sets, one process for each, in which both sides run this package's own
kernels, since PyTorch's would take the newer instructions. Accuracy is measured on held-out scanned
digits; a CvT-13 is trained for it here, within minutes.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cvt_kernels as ck
from cvt import create_model
from cvt.datasets import Batches, open_dataset
from cvt.evaluation import evaluate
from cvt.factory import randomize
from cvt.images import load_images, sample_photos
from cvt.quantized import compact
from cvt_kernels.autotune import clock

from . import suites

SCHEMA, VERSION = "benchmarks quantization", 1
#: The instruction sets that a CPU is held to, besides its newest, each with its flag in /proc/cpuinfo.
OLDER = {"avx512": "avx512f", "avx2_vnni": "avx_vnni", "avx2": "avx2"}
SCHEMES = ("dynamic", "static")
EPOCHS = 20  # of the CvT-13 that learns digits
CALIBRATION = 64  # images


def main() -> None:
    """Measures, and writes the file."""
    parser = suites.script_parser("quantization", __doc__)
    parser.add_argument("--speed", action="store_true", help="measure speed only")
    options = parser.parse_args()
    if options.speed:
        report: dict[str, Any] = {"speed": speeds(options.tiny)}
    else:
        report = {
            "schema": SCHEMA,
            "version": VERSION,
            "device": suites.device_name(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "speed": [*speeds(options.tiny), *([] if suites.CUDA else speeds_of_older(options.tiny))],
            "accuracy": accuracies(options.tiny),
        }
    suites.write_report(options.path, report)


# Speed ----------------------------------------------------------------------------------------------------


def speeds(tiny: bool) -> list[dict[str, Any]]:
    """Returns a row for each batch size and model, timed in turns."""
    instruction_set = os.environ.get("CVT_KERNELS_CPU")
    size, batches, rounds = (64, (2,), 2) if tiny else (224, (256,) if suites.CUDA else (1, 8, 32), 10)
    if instruction_set is not None:
        batches = batches[:2]
    models = contenders(bfloat16=instruction_set is None)
    rows = []
    for batch in batches:
        images = suites.randn(batch, 3, size, size, dtype=torch.float32, seed=0)
        calls = {name: suites.serving(model, images.to(dtype)) for name, (model, dtype) in models.items()}
        timed = clock.seconds_in_turns(list(calls.values()), rounds, suites.DEVICE)
        for name, seconds in zip(calls, timed, strict=True):
            rows.append({"set": instruction_set, "batch": batch, "model": name, "seconds": seconds})
    return rows


def contenders(*, bfloat16: bool) -> dict[str, tuple[nn.Module, torch.dtype]]:
    """Returns frozen models with the same random weights, each with the dtype of its images."""
    plain = create_model("cvt_13").eval()
    randomize(plain)
    photos = photographs(224)
    half = torch.bfloat16 if suites.CUDA else torch.float32
    made = {"float32": (copy.deepcopy(plain), torch.float32)}
    if bfloat16:
        made["bfloat16"] = (copy.deepcopy(plain).bfloat16(), torch.bfloat16)
    for scheme in SCHEMES:
        model = copy.deepcopy(plain)
        ck.quantize(model, photos if scheme == "static" else None, scheme=scheme)
        made[f"int8 {scheme}"] = (model.to(half), half)
    return {
        name: (ck.accelerate(model.to(suites.DEVICE), freeze=True), dtype)
        for name, (model, dtype) in made.items()
    }


def speeds_of_older(tiny: bool) -> list[dict[str, Any]]:
    """Returns the rows of processes that are held to older instruction sets."""
    known = Path("/proc/cpuinfo")
    flags = known.read_text(encoding="utf-8").split() if known.exists() else []
    rows = []
    for name in [name for name, flag in OLDER.items() if flag in flags]:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "speed.json")
            command = [sys.executable, "-m", "benchmarks.quantization", str(path), "--speed"]
            environment = {"CVT_KERNELS_CPU": name, "CVT_KERNELS_BACKEND": "cpu"}
            subprocess.run(
                [*command, *(["--tiny"] if tiny else [])], env=os.environ | environment, check=True
            )
            rows += json.loads(path.read_text(encoding="utf-8"))["speed"]
    return rows


# Accuracy and size ----------------------------------------------------------------------------------------


def accuracies(tiny: bool) -> list[dict[str, Any]]:
    """Returns a row for each model and scheme."""
    rows = of_digits("cvt_nano", "digits", 16, tiny)
    if tiny:
        return rows
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = train_cvt_13(Path(scratch))
        return [*rows, *of_digits("cvt_13", str(checkpoint), 32, tiny), *of_random_weights()]


def train_cvt_13(folder: Path) -> Path:
    """Trains a CvT-13 on scanned digits of 32×32 pixels; returns its weights."""
    command = [sys.executable, "-m", "cvt", "train", "--data", "digits", "--model", "cvt_13"]
    command += ["--image-size", "32", "--batch-size", "64", "--epochs", str(EPOCHS), "--output", str(folder)]
    subprocess.run(command, check=True)
    return folder / "best.pth"


def of_digits(name: str, checkpoint: str, size: int, tiny: bool) -> list[dict[str, Any]]:
    """Returns the rows of a model of digits, on those that are held out."""
    calibration, _ = next(iter(Batches(open_dataset("digits", "train", size), CALIBRATION)))
    held_out = open_dataset("digits", "val", size)
    images = torch.cat([images for images, _ in Batches(held_out, 360)])
    plain = create_model(checkpoint=checkpoint).eval()
    rows = []
    for scheme in SCHEMES[:1] if tiny else SCHEMES:
        model = create_model(checkpoint=checkpoint).eval()
        ck.quantize(model, calibration, scheme=scheme)
        before, after = (evaluate(m, Batches(held_out, 120)) for m in (plain, model))
        rows.append(
            {
                **described(f"{name}, trained on digits", scheme, plain, model, images),
                "images": before.images,
                "top1": [before.top1, after.top1],
                "top5": [before.top5, after.top5],
            }
        )
    return rows


def of_random_weights() -> list[dict[str, Any]]:
    """Returns the rows of CvT-13 with random weights, on photographs."""
    plain = create_model("cvt_13").eval()
    randomize(plain)
    photos = photographs(224)
    rows = []
    for scheme in SCHEMES:
        model = copy.deepcopy(plain)
        ck.quantize(model, photos, scheme=scheme)
        row = described("cvt_13, random weights", scheme, plain, model, photos)
        tensors = plain.state_dict(), compact(model.state_dict())
        rows.append({**row, "bytes": [sum(t.nbytes for t in part.values()) for part in tensors]})
    return rows


@torch.inference_mode()
def described(name: str, scheme: str, plain: nn.Module, model: nn.Module, images: Tensor) -> dict[str, Any]:
    """Returns the columns of every model: its name, and how far its logits are from float32's."""
    exact = torch.cat([plain(part) for part in images.split(32)])
    logits = torch.cat([model(part) for part in images.split(32)])
    noise = (logits - exact).square().sum().item()
    decibels = 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf
    return {"model": name, "scheme": scheme, "sqnr": decibels}


def photographs(size: int) -> Tensor:
    """Returns photographs as a model takes them."""
    return load_images(list(map(str, sample_photos())), size)


if __name__ == "__main__":
    main()
