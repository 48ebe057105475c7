"""The processes of contenders: every one runs in one of its own, whose threads disturb no other.

A process waits for requests, one at a time over all processes: see :class:`Runner`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import multiprocessing
import os
import pickle
import re
import signal
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cvt.config import DTYPES
from cvt.extras import require
from cvt_kernels import backends, graphs, machine
from cvt_kernels.tuning import ceilings, clock

from ..pyramids import quiet_transformers
from .contenders import CONTENDERS, made, mode_of, training_step
from .peers import RUNTIMES, logits_of

#: Seconds within which a process has to answer; torch.compile takes minutes.
PATIENCE = 900.0
#: Seconds of steps in a turn, or one step if that takes longer.
_TURN = 0.25
#: Steps that warm up on a GPU, where the third may be the first replay, and the fewest of a turn there.
_WARM, _FEWEST = 3, 5


class Job(NamedTuple):
    """The settings of every process, which finds models and images in a ``folder``.

    The dtype is that of weights and images, in training of autocast; ``"tf32"`` is float32 with rounded
    products. Ours request the backends ``requested``; if ``quick``, a turn is one step.
    """

    folder: str
    device: torch.device
    dtype: str
    train: bool
    threads: int
    requested: tuple[backends.Backend, ...]
    quick: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the results and their errors."""
        return DTYPES.get(self.dtype, torch.float32)

    def cast(self, thing: Any) -> Any:
        """Returns a model or images on the device and in the dtype; autocast has float32's."""
        return thing.to(self.device, torch.float32 if self.train else self.torch_dtype)

    def configure(self) -> None:
        """Lets this process compute as everybody does who compares speeds."""
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        torch.backends.cudnn.benchmark = True

    def step(self, run: Any, images: Tensor) -> Tensor:
        """Runs a forward, in training a forward and a backward; returns the logits."""
        with torch.set_grad_enabled(self.train):
            if self.train:
                return training_step(run, images, self.torch_dtype)
            return logits_of(run(images))

    def save(self, **things: Any) -> None:
        """Writes tensors and models for the processes, of transformers as class, configuration and state."""
        for name, thing in things.items():
            torch.save(thing, Path(self.folder, name))

    def load(self, name: str) -> Any:
        """Reads what :meth:`save` wrote."""
        return torch.load(Path(self.folder, name), map_location=self.device, weights_only=False)


class Turn(NamedTuple):
    """The medians of a turn's steps, and of the seconds that threads ``waited`` for a CPU meanwhile.

    On a GPU ``seconds`` are by events around steps that follow one another, and ``waits`` by the clock, with
    an idle GPU before and after: what a client waits.
    """

    seconds: float
    waits: float | None
    waited: float


class Runner:
    """A contender in its process; each method answers a request."""

    def __init__(self, key: str, job: Job):
        self._contender, self._job = CONTENDERS[key], job
        self._runtime = None if self._contender.runtime is None else RUNTIMES[self._contender.runtime]
        for package in () if self._runtime is None else self._runtime.packages:
            require(package, "peers")  # its code is not the model's memory
        if self._contender.model == "hf":
            quiet_transformers()
            require("transformers.modeling_utils", "bench")  # likewise
        self._compiled: dict[str | None, Any] = {}
        self._idle = _peak_resident(lambda: None)

    def answer(self, request: str, *arguments: Any) -> Any:
        """Calls the method of a request."""
        requested = self._job.requested if self._contender.is_ours else ("reference",)
        is_on_cpu = self._job.device.type == "cpu"
        with backends.requesting(*requested), contextlib.ExitStack() as stack:
            if self._contender.compile is not None and is_on_cpu and not self._job.train:
                from torch._inductor import config  # takes a second

                stack.enter_context(config.patch(freezing=True))  # the weights are folded in
            return getattr(self, request)(*arguments)

    def first(self, batch_size: int) -> dict[str, float | None]:
        """Makes the contender and runs its first step; returns the seconds of ``load`` and of both."""
        job = self._job
        self._images = job.load("images")
        model = None if self._runtime is not None else self._load()
        batch = filled(self._images, batch_size)[0]
        start = clock.now(job.device)
        self._model: Any = (
            made(self._contender, model)
            if self._runtime is None
            else self._runtime(lambda: self._load().float(), job.dtype)
        )
        if job.train:  # a rate of 0 costs what others do, and leaves the weights that are compared
            self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0, fused=True)
        self._step(batch)
        seconds = clock.now(job.device) - start
        load = getattr(self._model, "load_seconds", None)
        return {"load": load, "seconds": seconds - (load or 0.0)}

    def _load(self) -> nn.Module:
        model = self._job.load(self._contender.model)
        if isinstance(model, tuple):
            model_class, config, state = model
            model = self._job.cast(model_class(config)).train(self._job.train)
            model.load_state_dict(state)
        return model

    def _running(self, batch_size: int) -> Any:
        """Returns what runs a batch size: code of its own under torch.compile, as its users would have it."""
        if self._contender.compile is None:
            return self._model
        mode = mode_of(self._contender, batch_size, self._job.device, train=self._job.train)
        if mode not in self._compiled:
            self._compiled[mode] = torch.compile(self._model, mode=mode, dynamic=False)
        return self._compiled[mode]

    def _step(self, batch: Tensor) -> Tensor:
        """Runs a whole step, in training with the optimizer's."""
        logits = self._job.step(self._running(len(batch)), batch)
        if self._job.train:
            self._optimizer.step()
        return logits

    def parity(self, batch_size: int) -> tuple[Any, Any, str | None]:
        """Returns arrays of the logits and of the gradients' norms, and why no graph was replayed."""
        batches, count = compared(self._images, batch_size, train=self._job.train)
        # Copies, because a CUDA graph of torch.compile writes its next logits to the same place.
        steps = [self._job.step(self._running(len(batch)), batch).clone() for batch in batches]
        logits, norms = torch.cat(steps)[:count].float().cpu(), gradient_norms(self._model)
        for _ in range(_WARM if self._job.device.type == "cuda" else int(self._job.train)):
            self._step(filled(self._images, batch_size)[0])
        why_not = None
        if self._contender.graphed and not self._job.train:
            with torch.no_grad():
                why_not = graphs.why_not_graphed(self._model, batches[0])
        return logits.numpy(), norms.numpy(), why_not

    def turn(self, batch_size: int) -> Turn:
        """Runs some steps; the first does not count if there are more."""
        device, batch = self._job.device, filled(self._images, batch_size)[0]
        times = clock.Times()
        while sum(times.seconds) < (1e-9 if self._job.quick else _TURN):
            with times.run(device):
                self._step(batch)
        times = times.without_first() if len(times.seconds) > 1 else times
        waited = statistics.median(times.waited)
        if device.type != "cuda":
            return Turn(times.median, None, waited)
        count = max(_FEWEST, len(times.seconds))
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in pairs:
            begin.record()
            self._step(batch)
            end.record()
        clock.synchronize(device)
        torch.cuda.empty_cache()  # for the others
        seconds = statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        return Turn(seconds, times.median, waited)

    def facts(self, batch_size: int) -> dict[str, Any]:
        """Returns the memory: fields of a row of :class:`contest.Contest`."""
        device, batch = self._job.device, filled(self._images, batch_size)[0]
        resident = _peak_resident(lambda: self._step(batch))
        held = None if resident is None or self._idle is None else max(0, resident - self._idle)
        if device.type == "cuda":
            held = torch.cuda.memory_reserved(device)
        if self._runtime is not None:
            return {"peak_bytes": None, "resident_bytes": held}
        self._model.zero_grad(set_to_none=True)
        launched = self._running(batch_size)
        if self._contender.graphed:  # a replay allocates nothing: its graph holds the memory all the time
            launched = graphs.ungraphed(copy.deepcopy(self._model))
        of_extension("release_workspace")  # what another step needed
        peak = ceilings.peak_bytes(lambda: self._job.step(launched, batch), device)
        peak += of_extension("workspace_bytes") or 0  # kept between calls, unseen by PyTorch's allocator
        return {"peak_bytes": peak or None, "resident_bytes": held}


def of_extension(name: str) -> Any:
    """Calls a function of the compiled extension; returns None if the extension lacks it."""
    with contextlib.suppress(machine.ExtensionError):
        if machine.why_extension_unavailable("cpu") is None:
            return getattr(machine.load_extension(), name, lambda: None)()
    return None


class Worker:
    """A process that runs a contender."""

    def __init__(self, key: str, job: Job):
        context = multiprocessing.get_context("forkserver")
        theirs_too = [name for name in ("transformers.modeling_utils",) if name in sys.modules]
        # Optimizers and profiles import torch._dynamo, which takes two seconds.
        context.set_forkserver_preload([__name__, "torch._dynamo", *theirs_too])
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler warns of memory from before it
        self._key = key
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, key, job, {**os.environ}), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: str, *arguments: Any) -> Any:
        """Sends a request and returns the answer."""
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
    job.configure()
    with contextlib.suppress(EOFError, ConnectionError):
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


def filled(images: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Returns full batches of all images, the last one filled with the first images again."""
    count = -(-len(images) // batch_size) * batch_size
    return images.repeat(-(-count // len(images)), 1, 1, 1)[:count].split(batch_size)


def compared(images: Tensor, batch_size: int, *, train: bool) -> tuple[tuple[Tensor, ...], int]:
    """Returns the batches whose logits are compared, and the number of images: all, in training one batch.

    There are at least 2: of one image, Hugging Face's gradients are wrong on a CPU (see docs/accelerate.md).
    """
    if not train:
        return filled(images, batch_size), len(images)
    batch = filled(images, min(max(batch_size, 2), 8))[0]
    return (batch,), len(batch)


def gradient_norms(model: nn.Module) -> Tensor:
    """Returns the norm of every gradient, sorted, because the models name and order theirs differently."""
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).sort().values.cpu() if norms else torch.empty(0)
