"""The measurements of ``cvt bench``: Hugging Face's model and ours, of the same weights, on real photographs.

Each contender has a process of its own. Parity with float64 comes first, then speed in turns, with a large
matrix product among them, then one step of each contender under the profiler, for its memory and for where
its time goes. What :func:`run` returns is a file of ``results.py``.
"""

from __future__ import annotations

import copy
import datetime
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cvt.config import DTYPES
from cvt.images import load_images, sample_photos
from cvt_kernels import __version__, autotune, backends, machine
from cvt_kernels.autotune import clock

from . import workers
from .compare import check_comparable
from .contenders import (
    CHOICES,
    COMPILED,
    FROZEN,
    HUGGINGFACE,
    INT8,
    OURS,
    PEERS,
    Contender,
    chosen,
    freezing,
    has_classes,
)
from .models import Subject, build_subject
from .peers import RUNTIMES, why_not
from .results import SCHEMA, VERSION, Results
from .summary import parity_errors
from .workers import Job, Packed

#: Seconds before a turn, in which the threads of the last contender stop waiting for work.
_PAUSE = 0.03
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
        ModuleNotFoundError: The ``bench`` extra is not installed, or ``peers`` where it is needed.
        OSError, ImageError, CheckpointError: A file is missing or unusable.
        ValueError: An unknown name, an image size that the model does not take, results ``against`` that
            cannot be compared, or a contender that is less accurate than it may be.
    """
    device = torch.device(device)
    for peer in peers:
        if peer not in CHOICES:
            raise ValueError(f"peers: got {peer!r}, expected {', '.join(CHOICES)}")
    refused = {key: why_not(key, device=device, dtype=dtype, train=train) for key in RUNTIMES if key in peers}
    subject = build_subject(model, checkpoint, image_size)
    if against is not None:
        check_comparable(against, subject.name, subject.image_size, batch_sizes)
    photos = list(sample_photos() if images is None else images)
    # A model of pixels may take larger images than the photographs are.
    inputs = load_images(photos, subject.image_size, upscale=subject.ours is None).to(device, DTYPES[dtype])
    keys = chosen(peers, device, train=train)
    if subject.ours is None:
        keys = [key for key in keys if key in HUGGINGFACE or key in peers]
    freeze = device.type == "cpu" and not train
    about = _about(keys, subject, refused, freeze=freeze)
    hf = copy.deepcopy(subject.hf).to(DTYPES[dtype]).train(train)
    ours = copy.deepcopy(subject.ours)
    if ours is not None:
        ours = ours.to(DTYPES[dtype]).train(train)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, device, dtype, freeze, torch.get_num_threads(), backends.requested_backends())
        job.save(hf=Packed.of(hf), ours=ours, photos=inputs)
        # Of the rounded weights, since their rounding is nobody's error.
        exact = Contender("float64", hf.to(device).double(), ("reference",), has_parts=False)
        with _Contest(about, job, exact, inputs, rounds, has_ours=ours is not None) as contest:
            contest.begin(batch_sizes)
            # A backward has two products for each of the forward's.
            operations = subject.operations * (3 if train else 1)
            batches = [
                {"batch_size": size, "operations": size * operations, **contest.measured(size)}
                for size in batch_sizes
            ]
    if save_weights is not None:
        subject.save(save_weights)
    entries = autotune.cache_for(device)
    entries.read_again()
    return {
        **_session([package for key in refused for package in RUNTIMES[key].packages]),
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
            "advice": entries.advice(),
        },
        "contenders": about,
        "batches": batches,
    }


def _about(
    keys: Sequence[str], subject: Subject, refused: dict[str, str | None], *, freeze: bool
) -> dict[str, dict[str, Any]]:
    """Describes the contenders; ``refused`` says why some are not measured."""
    about: dict[str, dict[str, Any]] = {}
    for key in keys:
        note = refused.get(key)
        if subject.ours is None and key not in HUGGINGFACE:
            note = "cvt has no such model"
        words = freezing()[1] if freeze and key in COMPILED else ""
        about[key] = {"about": {**PEERS, **OURS}[key] + words, "ours": key in OURS, "note": note}
    about["hf"]["about"] = f"Hugging Face's {type(subject.hf).__name__}"
    return about


def _session(packages: Sequence[str]) -> dict[str, Any]:
    """Returns the part of the results about their format, the time, the machine and the packages."""
    facts = machine.facts()
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**facts._asdict(), "gpus": list(facts.gpus)},
        "versions": {"cvt-kernels": __version__, **{n: metadata.version(n) for n in (*_PACKAGES, *packages)}},
    }


def _served_backends(batches: list[dict[str, Any]]) -> dict[str, str]:
    """Returns operator → the backends that served our contenders, most calls first."""
    calls: dict[str, Counter[str]] = {}
    for row in (row for batch in batches for row in batch["rows"] if row["contender"] in OURS):
        for operator, by_backend in row["backends"].items():
            calls.setdefault(operator, Counter()).update(by_backend)
    return {operator: " or ".join(name for name, _ in each.most_common()) for operator, each in calls.items()}


# Measurements ---------------------------------------------------------------------------------------------


class _Contest:
    """The processes of the contenders, and the requests to them, of which one is answered at a time.

    A peer that fails, or whose process ends, has the reason in its ``note`` and is asked no more; an error of
    Hugging Face's own model or of ours is raised.
    """

    def __init__(
        self,
        about: dict[str, dict[str, Any]],
        job: Job,
        exact: Contender,
        photos: Tensor,
        rounds: int,
        *,
        has_ours: bool,
    ):
        self._about, self._job, self._exact, self._photos = about, job, exact, photos
        self._rounds, self._has_ours, self._is_training = rounds, has_ours, exact.model.training
        self._product = clock.Product(job.device, DTYPES[job.dtype])
        self._workers: dict[str, workers.Worker] = {}
        self._progress = tqdm(leave=False, disable=None)

    def __enter__(self) -> _Contest:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        for worker in self._workers.values():
            worker.end()

    def _ask(self, key: str, request: str, batch_size: int) -> Any:
        """Returns the answer of a contender, or None if it is out."""
        if key not in self._workers:
            return None
        self._progress.set_description(f"batch {batch_size}, {request.replace('_', ' ')} of {key}")
        self._progress.update()
        try:
            return self._workers[key].ask(request, batch_size)
        except Exception as failure:
            cannot_freeze = key in FROZEN and not self._has_ours and isinstance(failure, ValueError)
            if (key == "hf" or key in OURS) and key not in COMPILED and not cannot_freeze:
                raise
            reason = (str(failure).splitlines() or ["no reason given"])[0]
            self._leave(key, reason if cannot_freeze else f"fails: {type(failure).__name__}: {reason}")
            return None

    def _leave(self, key: str, note: str) -> None:
        self._about[key]["note"] = note
        self._workers.pop(key).end()

    def begin(self, batch_sizes: Sequence[int]) -> None:
        """Starts the processes, and notes the seconds to the first result in the first batch size."""
        steps = 2 + len(batch_sizes) * (2 + self._rounds + self._is_training)
        self._progress.reset(len(self._about) * steps)
        for key, facts in self._about.items():
            facts["first"] = self._first(key, batch_sizes[0]) if facts["note"] is None else None

    def _first(self, key: str, batch_size: int) -> dict[str, Any] | None:
        """Starts the process of a contender; returns the seconds to its first result.

        On a CPU, accelerated models have two processes before: without entries of autotuning, and with those
        of the first.
        """
        fresh = self._job.device.type == "cpu" and key.startswith("accelerate") and key not in COMPILED
        begun: list[Any] = []
        with tempfile.TemporaryDirectory() as cache:
            for place in [*([cache, cache] if fresh else []), None]:
                if begun:
                    self._workers.pop(key).end()
                self._workers[key] = workers.Worker(key, self._job, place)
                begun.append(self._ask(key, "first", batch_size))
                if begun[-1] is None:
                    return None
        untuned = begun[0]["seconds"] if fresh else None
        return {"batch_size": batch_size, **begun[fresh], "untuned_seconds": untuned}

    def measured(self, batch_size: int) -> dict[str, Any]:
        """Returns the matrix product and the rows of a batch size, all contenders having taken turns."""
        parities = self._parities(batch_size)
        seconds: dict[str, list[float]] = {key: [] for key in parities}
        product: list[float] = []
        for i in range(self._rounds + self._is_training):
            for key in list(seconds) if i % 2 == 0 else list(reversed(seconds)):
                time.sleep(_PAUSE)
                taken = self._ask(key, "turn", batch_size)
                if taken is None:
                    del seconds[key]
                elif i >= self._is_training:  # a training step of this size has not run before
                    seconds[key].append(taken)
            if i >= self._is_training:
                time.sleep(_PAUSE)
                ways = clock.seconds_in_turns(self._product.ways, 1, self._job.device)
                product.append(min(each for (each,) in ways))
        rows = []
        for key, times in seconds.items():
            facts = self._ask(key, "memory_and_time", batch_size)
            if facts is not None:
                rows.append({"contender": key, "parity": parities[key], "seconds": times, **facts})
        return {
            "product": {"n": self._product.n, "operations": self._product.operations, "seconds": product},
            "rows": rows,
        }

    def _parities(self, batch_size: int) -> dict[str, dict[str, Any]]:
        """Compares the logits with float64's; in training, of one batch, and its gradients.

        It raises ValueError where an error of ours is larger than Hugging Face's in the same dtype allows.
        """
        exact = self._exact
        parts = self._photos.split(batch_size)  # not filled, since no image depends on another
        if exact.model.training:
            parts, _ = workers.compared(self._photos, batch_size, train=True)
        truth = torch.cat([exact.step(part.double()) for part in parts]).cpu()
        true_norms = workers.gradient_norms(exact.model)
        parities: dict[str, dict[str, Any]] = {}
        for key in list(self._workers):
            answer = self._ask(key, "parity", batch_size)
            if answer is None:
                continue
            logits, norms, why_not_graphed = answer
            if why_not_graphed is not None:
                self._leave(key, f"is not replayed as a CUDA graph: {why_not_graphed}")
                continue
            parity = _parity(torch.from_numpy(logits), truth, torch.from_numpy(norms), true_norms)
            parities[key] = parity
            errors = parity_errors(parity, parities["hf"], DTYPES[self._job.dtype])
            for name, error in errors.items() if key not in (*RUNTIMES, *INT8) else ():
                if not error.passed:
                    raise ValueError(
                        f"{key}: {name.replace('_', ' ')} {error.ours:.1e} against float64, expected at most "
                        f"{error.allowed:.1e} by Hugging Face's in the same dtype; nothing was timed"
                    )
        return parities


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
