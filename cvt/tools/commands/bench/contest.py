"""Contenders of one model, each in a process of its own, in turns: :class:`Contest`.

Parity with float64 comes first, then speed in turns, with a large matrix product among them, then one step of
each for its memory. ``cvt bench`` and the suites in ``benchmarks`` are made of it.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cvt_kernels import backends
from cvt_kernels.tuning import accuracy, ceilings, clock

from . import peers, workers
from .contenders import CONTENDERS, has_classes
from .models import Subject
from .workers import Job

#: Seconds before a turn, in which the threads of the last contender stop waiting for work.
_PAUSE = 0.03
# Units in the last place that the accuracy rule allows besides a multiple of the plain model's own error,
# which can be small by chance where a model has few classes.
_UNITS = 8


class Contest:
    """The processes of the contenders, and the requests to them, of which one is answered at a time.

    A peer that fails, or whose process ends, has the reason in ``why_not`` and is asked no more. So has one
    of ours that torch.compile fails for, that is not replayed or, of another model than a public CvT, cannot
    be frozen. Any other error of ours or of the plain model is in ``failed``: one that is less accurate
    than it may be never gets a turn.

    Batches repeat the ``images`` (N, 3, H, W). With ``train`` a step is one of training, with fused AdamW,
    instead of a forward; with ``strict`` what would be in ``failed`` is raised instead; ``quick`` is a smoke
    test: turns of one step, and a small product. ``why_not``, ``failed`` and ``first`` (``seconds`` to the
    first result, and ``load``) are by contender.
    """

    def __init__(
        self,
        subject: Subject,
        keys: Sequence[str],
        images: Tensor,
        *,
        device: torch.device | str,
        dtype: str,
        train: bool = False,
        strict: bool = False,
        quick: bool = False,
    ):
        requested = backends.requested_backends()
        self._job = Job("", torch.device(device), dtype, train, torch.get_num_threads(), requested, quick)
        self.subject, self._images = subject, self._job.cast(images)
        self.keys, self.first = list(keys), dict[str, dict[str, Any]]()
        self.failed, self._strict = dict[str, Exception](), strict
        self.why_not: dict[str, str] = {}
        for key in keys:
            try:
                reason = why_not(key, subject, self._job)
            except ModuleNotFoundError as error:  # a runtime that is not installed
                if strict:
                    raise
                reason = str(error)
            self.why_not |= {} if reason is None else {key: reason}
        self._workers: dict[str, workers.Worker] = {}
        self._progress = tqdm(leave=False, disable=None)

    def __enter__(self) -> Contest:
        self._folder = tempfile.TemporaryDirectory()
        self._job = job = self._job._replace(folder=self._folder.name)
        hf, ours = self.subject.hf, self.subject.ours
        if hf is not None:  # as class, configuration and state: a pickle would lack the hooks for its outputs
            cast = job.cast(copy.deepcopy(hf))
            job.save(hf=(type(cast), cast.config, cast.state_dict()))
        if ours is not None:
            job.save(cvt=job.cast(copy.deepcopy(ours).train(job.train)))
        job.save(images=self._images)
        # Of the rounded weights, since their rounding is nobody's error.
        self._plain = job.cast(copy.deepcopy(self.subject.plain).train(job.train))
        self._exact = copy.deepcopy(self._plain).double()
        self._precision = torch.get_float32_matmul_precision()
        job.configure()
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._precision)
        self._progress.close()
        for worker in self._workers.values():
            worker.end()
        self._folder.cleanup()

    def measured(self, batch_size: int, rounds: int) -> dict[str, Any]:
        """Returns the matrix product and the rows of a batch size, all contenders having taken turns.

        The first batch size is that of the first results. A row has the ``contender``; ``error`` against
        float64 and ``error_allowed``, None where errors are not judged, in training also of ``gradient_``;
        ``seconds`` of every round and, on a GPU, ``waits``; ``peak_bytes``, ``resident_bytes`` and
        ``is_disturbed``.
        """
        if not self.first:
            self._begin(batch_size)
        parities = dict(self._parities(batch_size))
        times = {key: clock.Times() for key in parities}
        waits: dict[str, list[float]] = {key: [] for key in parities}
        n = 64 if self._job.quick else None
        product, seconds = ceilings.Product(self._job.device, self._job.torch_dtype, n), []
        for i in range(rounds if times else 0):
            for key in list(times) if i % 2 == 0 else list(reversed(times)):
                time.sleep(_PAUSE)
                turn = self._ask(key, "turn", batch_size)
                if turn is None:
                    del times[key]
                    continue
                times[key].add(turn.seconds, turn.waited)
                waits[key] += [] if turn.waits is None else [turn.waits]
            time.sleep(_PAUSE)
            ways = clock.times_in_turns(product.ways, 1, self._job.device)
            seconds.append(min(min(each.seconds) for each in ways))
        rows = []
        for key, of_rounds in times.items():
            facts = self._ask(key, "facts", batch_size)
            if facts is not None:
                turns = {"seconds": of_rounds.seconds, "waits": waits[key] or None}
                disturbed = {"is_disturbed": of_rounds.is_disturbed}
                rows.append({"contender": key, **parities[key], **turns, **disturbed, **facts})
        operations = batch_size * self.subject.operations * (3 if self._job.train else 1)
        return {
            "batch_size": batch_size,
            "operations": operations,  # a backward has two products for each of the forward's
            "product": {"n": product.n, "operations": product.operations, "seconds": seconds},
            "rows": rows,
        }

    def _ask(self, key: str, request: str, batch_size: int) -> Any:
        """Returns the answer of a contender, or None if it is out."""
        if key not in self._workers:
            return None
        self._progress.set_description(f"batch {batch_size}, {request} of {key}")
        self._progress.update()
        try:
            return self._workers[key].ask(request, batch_size)
        except Exception as failure:
            contender = CONTENDERS[key]
            reason = (str(failure).splitlines() or ["no reason given"])[0]
            is_public_cvt = self.subject.hf is not None and self.subject.ours is not None
            if contender.freeze and not is_public_cvt and isinstance(failure, ValueError):
                self.why_not[key] = reason
            elif (contender.is_ours or key == "hf") and contender.compile is None:
                self._fail(key, failure)
            else:
                self.why_not[key] = f"fails: {type(failure).__name__}: {reason}"
            self._workers.pop(key).end()
            return None

    def _fail(self, key: str, error: Exception) -> None:
        if self._strict:
            raise error
        self.failed[key] = error

    def _begin(self, batch_size: int) -> None:
        """Starts the processes, and notes the seconds to the first results."""
        for key in self.keys:
            if key not in self.why_not:
                self._workers[key] = workers.Worker(key, self._job)
                begun = self._ask(key, "first", batch_size)
                if begun is not None:
                    self.first[key] = {"batch_size": batch_size, **begun}

    def _parities(self, batch_size: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the contenders that may be timed, with their parity.

        The logits of all images are compared with float64's; in training, of one batch, and its gradients.
        """
        job = self._job
        batches, count = workers.compared(self._images, batch_size, train=job.train)
        parts = batches if job.train else self._images.split(batch_size)  # no image depends on another
        with backends.requesting("reference"):
            in_float64 = job._replace(dtype="float32")  # without autocast
            logits = torch.cat([in_float64.step(self._exact, part.double()) for part in parts])
            exact = logits.cpu(), workers.gradient_norms(self._exact)
            plain = torch.cat([job.step(self._plain, batch).clone() for batch in batches])[:count]
        theirs = _parity(plain.cpu(), workers.gradient_norms(self._plain), *exact)
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
        rules = {
            "error": (accuracy.VALUE_FACTOR, theirs["largest"]),
            "gradient_error": (accuracy.GRADIENT_FACTOR, 1.0),  # relative already
        }
        allowed = {
            name: accuracy.allowed_error(theirs[name], largest, job.torch_dtype, factor=factor, units=_UNITS)
            for name, (factor, largest) in rules.items()
            if theirs[name] is not None
        }
        for key in list(self._workers):
            answer = self._ask(key, "parity", batch_size)
            if answer is None:
                continue
            logits, norms, why_not_graphed = answer
            parity = _parity(torch.from_numpy(logits), torch.from_numpy(norms), *exact)
            is_judged = CONTENDERS[key].is_judged and self.subject.is_judged
            wrong = [name for name in allowed if not parity[name] <= allowed[name] < torch.inf]
            if why_not_graphed is not None:
                self.why_not[key] = f"is not replayed as a CUDA graph: {why_not_graphed}"
                self._workers.pop(key).end()
            elif wrong and is_judged:
                name = wrong[0]
                message = (
                    f"{key}: {name.replace('_', ' ')} {parity[name]:.1e} against float64, expected at most "
                    f"{allowed[name]:.1e} by the plain model's in the same dtype; nothing was timed"
                )
                self._fail(key, ValueError(message))
                self._workers.pop(key).end()
            else:
                limits = {f"{name}_allowed": allowed.get(name) if is_judged else None for name in rules}
                yield key, parity | limits


def why_not(key: str, subject: Subject, job: Job) -> str | None:
    """Returns why a contender cannot run, or None."""
    contender = CONTENDERS[key]
    if contender.model == "hf" and subject.hf is None:
        return "transformers has no such model"
    if contender.model == "cvt" and subject.ours is None:
        return "cvt has no such model"
    if contender.runtime is not None:
        return peers.why_not(contender.runtime, device=job.device, dtype=job.dtype, train=job.train)
    return contender.why_not(job.device, train=job.train)


def share_of_product(batch: dict[str, Any], row: dict[str, Any]) -> float:
    """Returns what part of a large product's rate a contender reaches: the median of the rounds."""
    product, operations = batch["product"], batch["operations"]
    pairs = zip(row["seconds"], product["seconds"], strict=True)
    return statistics.median(operations / s / (product["operations"] / p) for s, p in pairs)


def _parity(logits: Tensor, norms: Tensor, truth: Tensor, true_norms: Tensor) -> dict[str, Any]:
    """Compares logits and gradients' norms; counts the classes in the top 5 of both, none for a depth."""
    top5 = of = 0
    if has_classes(truth):
        k = min(5, truth.shape[1])
        top, true_top = (each.movedim(1, -1).topk(k).indices for each in (logits.double(), truth))
        top5, of = int((top[..., None] == true_top[..., None, :]).sum()), true_top.numel()
    gradient_error = ((norms - true_norms).abs().max() / true_norms.max()).item() if len(norms) else None
    return {
        "error": (logits.double() - truth).abs().max().item(),
        "largest": truth.abs().max().item(),
        "top5": top5,
        "of": of,
        "gradient_error": gradient_error,
    }
