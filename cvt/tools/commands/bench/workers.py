"""The processes of ``cvt bench``: every contender runs in one of its own, whose threads disturb no other.

A process waits for requests, one at a time over all processes: see :class:`Runner`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import re
import signal
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cvt.extras import require
from cvt_kernels import backends
from cvt_kernels.autotune import clock, unlimited
from cvt_kernels.backends import Backend

from ..pyramids import quiet_transformers
from . import breakdown
from .contenders import COMPILED, HUGGINGFACE, Contender, build_contender, freezing
from .peers import RUNTIMES, Runtime

#: Seconds within which a process has to answer; torch.compile takes minutes.
PATIENCE = 900.0
#: Seconds of steps in a turn, or one step if that takes longer.
_TURN = 0.25


class Job(NamedTuple):
    """The settings of every process.

    Attributes:
        folder: Where :meth:`save` has put the models and the photographs.
        freezing: Whether torch.compile folds the weights in.
        requested: The backends that ours request.
    """

    folder: str
    device: torch.device
    dtype: str
    freezing: bool
    threads: int
    requested: tuple[Backend, ...]

    def save(self, **things: Any) -> None:
        """Writes models and tensors for the processes."""
        for name, thing in things.items():
            torch.save(thing, Path(self.folder, name))

    def load(self, name: str) -> Any:
        """Reads what :meth:`save` wrote."""
        return torch.load(Path(self.folder, name), map_location=self.device, weights_only=False)


class Packed(NamedTuple):
    """A model of transformers for another process, where a pickle would lack the hooks for its outputs."""

    model_class: type[Any]
    config: Any
    state: dict[str, Tensor]
    dtype: torch.dtype
    is_training: bool

    @classmethod
    def of(cls, model: Any) -> Packed:
        """Packs a model."""
        return cls(type(model), model.config, model.state_dict(), model.dtype, model.training)

    def unpacked(self, device: torch.device) -> nn.Module:
        """Makes the model again."""
        model = self.model_class(self.config).to(device, self.dtype)
        model.load_state_dict(self.state)
        return model.train(self.is_training)


class Runner:
    """A contender in its process; each method answers a request."""

    def __init__(self, key: str, job: Job):
        self._key, self._job = key, job
        for package in RUNTIMES[key].packages if key in RUNTIMES else ():
            require(package, "peers")  # its code is not the model's memory
        self._idle = _peak_resident(lambda: None)

    def answer(self, request: str, *arguments: Any) -> Any:
        """Calls the method of a request."""
        is_frozen = self._job.freezing and self._key in COMPILED
        with freezing()[0] if is_frozen else contextlib.nullcontext():
            return getattr(self, request)(*arguments)

    def first(self, batch_size: int) -> dict[str, float | None]:
        """Makes the contender and runs its first step; returns the seconds of ``load`` and of both."""
        self._photos = self._job.load("photos")
        model = None if self._key in RUNTIMES else self._load()
        batch = filled(self._photos, batch_size)[0]
        start = clock.now(self._job.device)
        self._contender = self._made(model)
        self._contender.step(batch)
        seconds = clock.now(self._job.device) - start
        if self._key not in COMPILED:
            with unlimited():  # what the first step had no time to tune, before anything is timed
                self._contender.step(batch)
        load = getattr(self._contender.model, "load_seconds", None)
        return {"load": load, "seconds": seconds - (load or 0.0)}

    def _load(self) -> nn.Module:
        if self._key in HUGGINGFACE:
            quiet_transformers()
        model = self._job.load("hf" if self._key in HUGGINGFACE else "ours")
        return model.unpacked(self._job.device) if isinstance(model, Packed) else model

    def _made(self, model: nn.Module | None) -> Contender:
        if self._key not in RUNTIMES:
            return build_contender(self._key, model, model)
        runtime = RUNTIMES[self._key](lambda: self._load().float(), self._job.dtype)
        return Contender(self._key, runtime, ("reference",), has_parts=False)

    def parity(self, batch_size: int) -> tuple[Any, Any, str | None]:
        """Returns arrays of the logits and of the gradients' norms, and why no graph was replayed."""
        model = self._contender.model
        batches, count = compared(self._photos, batch_size, train=model.training)
        with unlimited():  # batches of another size are tuned before they are timed
            # Copies, because a CUDA graph of torch.compile writes its next logits to the same place.
            logits = torch.cat([self._contender.step(batch).clone() for batch in batches])[:count]
        why_not = self._contender.why_not_graphed(batches[0])
        return logits.float().cpu().numpy(), gradient_norms(model).numpy(), why_not

    def turn(self, batch_size: int) -> float:
        """Runs some steps and returns the median of their seconds, without the first if there are more."""
        batch = filled(self._photos, batch_size)[0]
        times: list[float] = []
        while sum(times) < _TURN:
            start = clock.now(self._job.device)
            self._contender.step(batch)
            times.append(clock.now(self._job.device) - start)
        return statistics.median(times[1:] or times)

    def memory_and_time(self, batch_size: int) -> dict[str, Any]:
        """Returns fields of a row of the results: see ``breakdown.memory_and_time``."""
        batch = filled(self._photos, batch_size)[0]
        resident = _peak_resident(lambda: self._contender.step(batch))
        facts: dict[str, Any] = {"resident_bytes": None}
        if resident is not None and self._idle is not None:
            facts["resident_bytes"] = max(0, resident - self._idle)
        if isinstance(self._contender.model, Runtime):
            return facts | {"peak_bytes": None, "workspace_bytes": 0, "backends": {}, "breakdown": []}
        return facts | breakdown.memory_and_time(self._contender, batch)


class Worker:
    """A process that runs a contender."""

    def __init__(self, key: str, job: Job, cache: str | None = None):
        """Starts the process; ``cache`` is a folder for autotuning's entries instead of the user's."""
        own = {} if cache is None else {"XDG_CACHE_HOME": cache, "CVT_KERNELS_TUNED": ""}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "transformers.modeling_utils"])
        self._key = key
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, key, job, {**os.environ, **own}), daemon=True
        )
        self._process.start()
        theirs.close()

    def ask(self, request: str, *arguments: Any) -> Any:
        """Sends a request and returns the answer.

        Raises:
            ChildProcessError, TimeoutError: The process has ended, or does not answer.
            Exception: What the request raised.
        """
        try:
            self._connection.send((request, arguments))
            if not self._connection.poll(PATIENCE):
                raise TimeoutError(f"{self._key}: no answer within {PATIENCE:.0f} seconds")
            answer, error, trace = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ChildProcessError(f"{self._key}: its process ended with {how}") from None
        if error is not None:
            raise error from RuntimeError(f"in the process of {self._key}:\n{trace}")
        return answer

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, key: str, job: Job, environment: dict[str, str]) -> None:
    """Answers the requests that come through a pipe until it is closed."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.dup2(2, 1)  # what a library prints is no result
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    warnings.filterwarnings("ignore", "kernels are missing", RuntimeWarning)  # the command says so
    torch.set_num_threads(job.threads)
    with backends.requesting(*job.requested), contextlib.suppress(EOFError, ConnectionError):
        runner = Runner(key, job)
        while True:
            request, arguments = connection.recv()
            try:
                reply: Any = runner.answer(request, *arguments), None, None
            except Exception as error:
                reply = None, _portable(error), traceback.format_exc()
            connection.send(reply)


def _portable(error: Exception) -> Exception:
    """Returns an error that another process can read."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _peak_resident(function: Callable[[], Any]) -> int | None:
    """Returns the most memory that this process has while a function runs; None where no system says so."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # not every system's C library has it
        ctypes.CDLL(None).malloc_trim(0)  # gives back what loading and converting have freed
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        function()
        return 1024 * int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0])
    except (OSError, IndexError):
        return None


def filled(photos: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Returns full batches of all photos, the last one filled with the first photos again."""
    count = -(-len(photos) // batch_size) * batch_size
    return photos.repeat(-(-count // len(photos)), 1, 1, 1)[:count].split(batch_size)


def compared(photos: Tensor, batch_size: int, *, train: bool) -> tuple[tuple[Tensor, ...], int]:
    """Returns the batches whose logits are compared, and the number of images: all, in training one batch.

    There are at least 2: of one image, Hugging Face's gradients are wrong on a CPU (see docs/accelerate.md).
    """
    if not train:
        return filled(photos, batch_size), len(photos)
    batch = filled(photos, min(max(batch_size, 2), 8))[0]
    return (batch,), len(batch)


def gradient_norms(model: nn.Module) -> Tensor:
    """Returns the norm of every gradient, sorted, because the models name and order theirs differently."""
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).sort().values.cpu() if norms else torch.empty(0)
