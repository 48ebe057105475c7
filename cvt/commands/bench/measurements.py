"""The measurements of ``cvt bench``: Hugging Face's model and ours, of the same weights, on real photographs.

Parity with float64 comes first, then speed in turns, with a large matrix product among them, then one step of
each contender under the profiler, for its memory and for where its time goes. What :func:`run` returns is a
file of ``results.py``.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cvt_kernels import __version__, autotune, machine
from cvt_kernels.autotune import clock

from ...config import DTYPES
from ...images import load_images, sample_photos
from . import breakdown
from .compare import check_comparable
from .contenders import (
    CHOICES,
    COMPILED,
    FROZEN,
    HUGGINGFACE,
    OURS,
    PEERS,
    Contender,
    build_contender,
    chosen,
    freezing,
    has_classes,
)
from .models import Subject, build_subject
from .results import SCHEMA, VERSION, Results
from .summary import parity_errors

_PACKAGES = ("torch", "transformers", "numpy")


def run(
    *,
    checkpoint: str | None = None,
    model: str | None = None,
    images: Sequence[str | os.PathLike[str]] | None = None,
    image_size: int | None = None,
    batch_sizes: Sequence[int] = (8,),
    rounds: int = 10,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    train: bool = False,
    peers: Sequence[str] = ("hf",),
    save_weights: str | os.PathLike[str] | None = None,
    against: Results | None = None,
) -> dict[str, Any]:
    """Measures our models beside others with the same weights: parity, speed, memory, and where time goes.

    The arguments are the options of ``cvt bench``; ``against`` has earlier results, which are
    checked to be of the same model before anything runs.

    Returns:
        Facts and samples, ready for JSON; ``docs/report.md`` has the format.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
        OSError, ImageError, CheckpointError: A file is missing or unusable.
        ValueError: An unknown name, an image size that the model does not take, results ``against`` that
            cannot be compared, or a contender that is less accurate than it may be.
    """
    device = torch.device(device)
    for peer in peers:
        if peer not in CHOICES:
            raise ValueError(f"peers: got {peer!r}, expected {', '.join(CHOICES)}")
    subject = build_subject(model, checkpoint, image_size)
    if against is not None:
        check_comparable(against, subject.name, subject.image_size, batch_sizes)
    photos = list(sample_photos() if images is None else images)
    # A model of pixels may take larger images than the photographs are.
    inputs = load_images(photos, subject.image_size, upscale=subject.ours is None).to(device, DTYPES[dtype])
    hf = copy.deepcopy(subject.hf).to(device, DTYPES[dtype]).train(train)
    # Of the rounded weights, since their rounding is nobody's error.
    exact = Contender("float64", copy.deepcopy(hf).double(), ("reference",), has_parts=False)
    keys = chosen(peers, device, train=train)
    if subject.ours is None:
        keys = [key for key in keys if key in HUGGINGFACE or key in peers]
    about, compiling = _about(keys, subject, freeze=device.type == "cpu" and not train)
    ours = copy.deepcopy(subject.ours)
    if ours is not None:
        ours = ours.to(device, DTYPES[dtype]).train(train)
    contenders = _built(keys, hf, ours, about)
    product = clock.Product(device, DTYPES[dtype])
    # A backward has two products for each of the forward's.
    operations = subject.operations * (3 if train else 1)
    batches = []
    steps = len(batch_sizes) * (len(keys) * (rounds + 3) + len(product.ways) * (rounds + 1))
    with compiling, tqdm(total=steps, leave=False, disable=None) as progress:
        for batch_size in batch_sizes:
            measured = _measure(contenders, exact, inputs, batch_size, rounds, product, about, progress)
            work = []
            if subject.ours is not None:
                size = DTYPES[dtype].itemsize
                work = breakdown.work(subject.ours.config, subject.image_size, batch_size, size)
            counts = {"batch_size": batch_size, "operations": batch_size * operations, "work": work}
            batches.append({**counts, **measured})
    if save_weights is not None:
        subject.save(save_weights)
    return {
        **_session(),
        "config": {
            "model": subject.name,
            "weights": subject.weights,
            "output": subject.output,
            "photos": [Path(photo).name for photo in photos],
            "image_size": subject.image_size,
            "dtype": dtype,
            "device": str(device),
            "threads": torch.get_num_threads(),
            "train": train,
            "rounds": rounds,
            "depths": subject.depths,
            "backends": _served_backends(batches),
            "advice": autotune.cache_for(device).advice(),
        },
        "ceilings": {
            "bytes_per_second": clock.copy_bandwidth(device),
            "flops_per_second": max(
                batch["product"]["operations"] / min(batch["product"]["seconds"]) for batch in batches
            ),
        },
        "contenders": about,
        "batches": batches,
    }


def _about(keys: Sequence[str], subject: Subject, *, freeze: bool) -> tuple[dict[str, dict[str, Any]], Any]:
    """Describes the contenders; returns that, and the context in which all of them run."""
    about: dict[str, dict[str, Any]] = {
        key: {"about": {**PEERS, **OURS}[key], "ours": key in OURS, "note": None} for key in keys
    }
    about["hf"]["about"] = f"Hugging Face's {type(subject.hf).__name__}"
    compiled = [about[key] for key in keys if key in COMPILED]
    if not (compiled and freeze):
        return about, contextlib.nullcontext()
    compiling, words = freezing()
    for peer_about in compiled:
        peer_about["about"] += words
    return about, compiling


def _built(
    keys: Sequence[str], hf: nn.Module, ours: nn.Module | None, about: dict[str, dict[str, Any]]
) -> list[Contender]:
    """Makes the contenders; ``about`` notes why one is not made of a model that ``cvt`` does not have."""
    contenders = []
    for key in keys:
        if ours is None and key not in HUGGINGFACE:
            about[key]["note"] = "cvt has no such model"
            continue
        try:
            contenders.append(build_contender(key, hf, ours))
        except ValueError as obstacle:
            if key not in FROZEN or ours is not None:
                raise
            about[key]["note"] = str(obstacle)
    return contenders


def _session() -> dict[str, Any]:
    """Returns the part of the results about their format, the time, the machine and the packages."""
    facts = machine.facts()
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**facts._asdict(), "gpus": list(facts.gpus)},
        "versions": {"cvt-kernels": __version__, **{n: metadata.version(n) for n in _PACKAGES}},
    }


def _served_backends(batches: list[dict[str, Any]]) -> dict[str, str]:
    """Returns operator → the backends that served our contenders, most calls first."""
    calls: dict[str, Counter[str]] = {}
    for row in (row for batch in batches for row in batch["rows"] if row["contender"] in OURS):
        for operator, by_backend in row["backends"].items():
            calls.setdefault(operator, Counter()).update(by_backend)
    return {operator: " or ".join(name for name, _ in each.most_common()) for operator, each in calls.items()}


# Measurements ---------------------------------------------------------------------------------------------


def _measure(
    contenders: list[Contender],
    exact: Contender,
    photos: Tensor,
    batch_size: int,
    rounds: int,
    product: clock.Product,
    about: dict[str, Any],
    progress: Any,
) -> dict[str, Any]:
    """Returns the matrix product and the rows of a batch size; ``about`` notes why a contender fails."""
    batches = _fill(photos, batch_size)
    rows: dict[str, dict[str, Any]] = {}
    for contender, parity in _parities(contenders, exact, photos, batches, about, progress):
        rows[contender.key] = {"contender": contender.key, "parity": parity}
    contenders = [contender for contender in contenders if contender.key in rows]
    seconds = clock.seconds_in_turns(
        [*(functools.partial(contender.step, batches[0]) for contender in contenders), *product.ways],
        rounds,
        photos.device,
        before_run=lambda i: _tick(progress, f"batch {batch_size}, {f'round {i}' if i else 'warm-up'}"),
    )
    of_steps, of_products = seconds[: len(contenders)], seconds[len(contenders) :]
    for contender, times in zip(contenders, of_steps, strict=True):
        _tick(progress, f"batch {batch_size}, profile of {contender.key}")
        rows[contender.key] |= {"seconds": times, **breakdown.memory_and_time(contender, batches[0])}
    fastest = [min(ways) for ways in zip(*of_products, strict=True)]
    return {
        "product": {"n": product.n, "operations": product.operations, "seconds": fastest},
        "rows": list(rows.values()),
    }


def _fill(photos: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Returns full batches of all photos, the last one filled with the first photos again."""
    count = -(-len(photos) // batch_size) * batch_size
    return photos.repeat(-(-count // len(photos)), 1, 1, 1)[:count].split(batch_size)


def _parities(
    contenders: list[Contender],
    exact: Contender,
    photos: Tensor,
    batches: tuple[Tensor, ...],
    about: dict[str, Any],
    progress: Any,
) -> Iterator[tuple[Contender, dict[str, Any]]]:
    """Compares the logits of all photos with float64's; in training, logits and gradients of one batch.

    It raises ValueError where an error is larger than Hugging Face's in the same dtype allows.
    """
    if exact.model.training:
        # At least 2: of one image, Hugging Face's gradients are wrong on a CPU (see docs/accelerate.md).
        photos = _fill(photos, min(max(len(batches[0]), 2), 8))[0]
        batches = (photos,)
    truth = torch.cat([exact.step(part.double()) for part in photos.split(len(batches[0]))])
    true_norms = _gradient_norms(exact.model)
    hugging_faces: dict[str, Any] = {}
    for contender in contenders:
        _tick(progress, f"batch {len(batches[0])}, parity of {contender.key}")
        if about[contender.key]["note"] is not None:
            continue
        try:
            # Copies, because a CUDA graph of torch.compile writes its next logits to the same place.
            logits = torch.cat([contender.step(batch).clone() for batch in batches])[: len(photos)]
        except Exception as failure:
            if contender.key not in COMPILED:
                raise
            reason = (str(failure).splitlines() or ["no reason given"])[0]
            about[contender.key]["note"] = f"fails: {type(failure).__name__}: {reason}"
            continue
        if (not_graphed := contender.why_not_graphed(batches[0])) is not None:
            about[contender.key]["note"] = f"is not replayed as a CUDA graph: {not_graphed}"
            continue
        parity = _parity(logits, truth, _gradient_norms(contender.model), true_norms)
        hugging_faces = hugging_faces or parity  # the first is Hugging Face's
        for name, error in parity_errors(parity, hugging_faces, photos.dtype).items():
            if not error.passed:
                raise ValueError(
                    f"{contender.key}: {name.replace('_', ' ')} {error.ours:.1e} against float64, expected "
                    f"at most {error.allowed:.1e} by Hugging Face's in the same dtype; nothing was timed"
                )
        yield contender, parity


def _parity(logits: Tensor, truth: Tensor, norms: Tensor, true_norms: Tensor) -> dict[str, Any]:
    top5, of = _agreement(logits, truth)
    gradient_error = None
    if len(true_norms):
        gradient_error = ((norms - true_norms).abs().max() / true_norms.max()).item()
    return {
        "error": (logits.double() - truth).abs().max().item(),
        "largest": truth.abs().max().item(),
        "top5": top5,
        "of": of,
        "gradient_error": gradient_error,
    }


def _agreement(logits: Tensor, truth: Tensor) -> tuple[int, int]:
    """Counts the classes that are among the top 5 of images or pixels in both; of how many, 0 for a depth."""
    if not has_classes(truth):
        return 0, 0
    k = min(5, truth.shape[1])
    top, true_top = (each.movedim(1, -1).topk(k).indices for each in (logits.double(), truth))
    return int((top[..., None] == true_top[..., None, :]).sum()), true_top.numel()


def _gradient_norms(model: nn.Module) -> Tensor:
    """Returns the norm of every gradient, sorted, because the models name and order theirs differently."""
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).sort().values if norms else torch.empty(0)


def _tick(progress: Any, what: str) -> None:
    progress.set_description(what)
    progress.update()
