"""Times launch configurations of the Triton kernels at CvT-13's shapes, on a GPU, and writes the fastest.

``python -m benchmarks.sweep FILE linear_gelu:3 --batch-size 1 8 32 256``. A job is an operator and a stage
of the model. Every combination of the values in :data:`SPACES` takes the place of what ships; processes
beside this one compile it into Triton's cache. A configuration has to give what the shipped one gives.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cvt.tools.commands.compile import launches
from cvt.tools.commands.compile.gpus import LIMITS
from cvt.tools.commands.compile.triton_kernels import specialize
from cvt_kernels import launch, launching, machine
from cvt_kernels.cards import matrix
from cvt_kernels.launch.records import Attention, ConvLinear, Mlp, Product, Sliding
from cvt_kernels.launching import Launch

from . import lab
from .floors import kernel_name

FASTEST = 8  # configurations that are written of each size
STAGES = launches.stages("cvt_13")


class Space(NamedTuple):
    """The configurations of a kernel that are worth trying.

    Attributes:
        kernel: Its name in ``cvt_kernels/launch``.
        record: The class of the configuration.
        values: Field of the configuration → values.
        launched: The kernel that is timed, if it has another name.
        training: Whether the kernel is one of training.
    """

    kernel: str
    record: type
    values: dict[str, tuple[int, ...]]
    launched: str = ""
    training: bool = False

    def configurations(self) -> list[Any]:
        """Returns every combination of the values."""
        return [
            self.record(**dict(zip(self.values, values, strict=True)))
            for values in itertools.product(*self.values.values())
        ]

    @contextlib.contextmanager
    def replaced(self, config: Any) -> Iterator[None]:
        """Replaces what ships by a configuration; None leaves it."""
        with contextlib.nullcontext() if config is None else launch.overridden(self.kernel, config):
            yield


_TILES = {"block_m": (16, 64, 128), "width": (64, 128), "block_k": (64, 128), "num_warps": (4, 8)}
_SLIDING = {"pairs": (1, 2, 4, 8), "channels": (64,), "registers": (128, 168), "resident_warps": (8, 12, 16)}
_OF_TILES = {"block_q": (64, 128), "block_kv": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)}


def _sliding(kernel: str, **settings: Any) -> Space:
    name, training = f"conv_projection_sliding_{kernel}", kernel != "fwd"
    return Space(name, Sliding, _SLIDING | settings, training=training)


def _attention(kernel: str) -> Space:
    return Space(f"attention_{kernel}", Attention, _OF_TILES, training=kernel.startswith("bwd"))


#: By the name of a job; its first word is the operator of ``cvt compile`` that launches the kernel.
SPACES = {
    "linear_gelu": Space(
        "linear_gelu", Product, _TILES | {"num_stages": (2, 3, 4), "programs": (0, 1, 2)}
    ),
    "linear_add": Space(
        "linear_add", Product,
        _TILES | {"width": (32, 64, 128), "block_k": (64, 256), "num_stages": (3, 4), "parts": (1, 3)},
    ),
    "linear_add_layer_norm": Space(
        "linear_add_layer_norm", Product,
        _TILES | {"num_stages": (2, 3), "parts": (3,)},
    ),
    "conv_linear": Space(
        "conv_linear", ConvLinear,
        {"tokens": (32, 64, 128), "branches": (1, 2), "outputs": (64, 128), "chunk": (32, 64),
         "num_warps": (4, 8), "registers": (128, 255)},
        "conv_linear_fwd",
    ),
    "layer_norm_mlp": Space(
        "layer_norm_mlp", Mlp,
        {"resident": (True,), "block_rows": (64, 128), "block_hidden": (64, 128, 256),
         "num_warps": (4, 8), "programs": (1, 2, 3)},
        "layer_norm_mlp_fwd_resident",
    ),
    "conv_projection fwd": _sliding("fwd"),
    "conv_projection bwd_conv": _sliding("bwd_conv", registers=(168, 255), resident_warps=(4, 8)),
    "conv_projection bwd_input": _sliding("bwd_input"),
    **{f"attention {name}": _attention(name) for name in ("fwd", "fwd_loop", "bwd", "bwd_dq", "bwd_dkdv")},
}  # fmt: skip


def launched(name: str, stage: int, batch: int, config: Any, device: str = "meta") -> list[Launch]:
    """Returns the launches of a job's kernel with a configuration; they start on tensors of ``device``."""
    space = SPACES[name]
    chip = launching.Chip(90, LIMITS[90].multiprocessors)
    if device == "cuda":
        chip = launching.chip(torch.device("cuda", torch.cuda.current_device()))
        torch.manual_seed(0)
    with space.replaced(config):
        made = launches.TRITON_OPERATORS[name.split()[0]](
            STAGES[stage - 1], torch.bfloat16, chip, batch=batch, training=space.training, device=device
        )
    wanted = space.launched or space.kernel
    return [each for each in made if kernel_name(each.kernel.__name__) == wanted]


def compile_ahead(name: str, stage: int, batch: int, config: Any, arch: int) -> None:
    """Compiles a configuration into Triton's cache; it raises whatever Triton does."""
    for each in launched(name, stage, batch, config):
        specialize(each, arch).compile()


def microseconds(run: Callable[[], Any]) -> float:
    """Returns the time of a call within a CUDA graph of some of them, the median of several replays."""
    stream = torch.cuda.Stream()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        run()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        count = int(max(3, min(30, 600 / max(1e3 * begin.elapsed_time(end), 1))))
        graph, times = torch.cuda.CUDAGraph(), []
        with machine.captured(graph, torch.cuda.graph_pool_handle(), stream):
            for _ in range(count):
                run()
        for _ in range(8):
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / count)
    return statistics.median(times[1:])


def timed(name: str, stage: int, batch: int, config: Any, expected: list[Tensor]) -> float:
    """Returns the microseconds of a configuration.

    Args:
        name: The job's kernel.
        stage: The stage.
        batch: Images.
        config: The configuration; None for what ships, whose tensors are added to ``expected``.
        expected: All tensors of the shipped launches after they have run.

    Raises:
        ValueError: It is not launched, or its results are others.
    """
    found = launched(name, stage, batch, config, "cuda")
    for each in found:
        each.start()
    values = [matrix(value) for each in found for value in each.arguments.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if config is None:
        expected += [tensor.clone() for tensor in tensors]
    if not found or len(tensors) != len(expected):
        raise ValueError("is launched otherwise")
    for ours, theirs in zip(tensors, expected, strict=True) if config is not None else ():
        if ours.shape != theirs.shape:  # sums by program
            continue
        if not (ours - theirs).abs().max() <= 0.02 * theirs.abs().max():  # nor NaN
            raise ValueError("computes something else")
    return microseconds(lambda: [each.start() for each in found])


def swept(
    name: str, stage: int, batch: int, ahead: dict[Any, Future[None]], deadline: float
) -> dict[str, Any]:
    """Returns the row of a size: the shipped configuration's time and the fastest others'."""
    expected: list[Tensor] = []
    shipped = timed(name, stage, batch, None, expected)
    times: list[tuple[float, Any]] = []
    failed: dict[str, int] = {}
    for config, compiled in ahead.items():
        if time.monotonic() > deadline:
            break
        try:
            compiled.result(timeout=max(deadline - time.monotonic(), 0))
            times.append((timed(name, stage, batch, config, expected), config))
        except Exception as error:  # what Triton raises is a fact about the configuration
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            failed[reason] = failed.get(reason, 0) + 1
    times.sort(key=lambda each: each[0])
    fastest = [dataclasses.asdict(config) | {"us": round(us, 2)} for us, config in times[:FASTEST]]
    row = {"job": f"{name}:{stage}", "batch": batch, "shipped_us": round(shipped, 2)}
    return row | {"tried": len(times), "fastest": fastest, "failed": failed}


def main(argv: list[str] | None = None) -> int:
    """Sweeps job by job; the file holds what is done so far."""
    parser = argparse.ArgumentParser(prog="benchmarks.sweep", description=__doc__)
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("jobs", nargs="+", metavar="KERNEL:STAGE", help=", ".join(SPACES))
    parser.add_argument("--batch-size", nargs="+", type=int, default=[256, 1, 32, 8], metavar="N")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything (default: 500)")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    report = lab.Report(options.path, {"dtype": "bfloat16"})
    jobs = [(name, int(stage)) for name, _, stage in (job.rpartition(":") for job in options.jobs)]
    arch = 10 * torch.cuda.get_device_capability()[0]
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    ahead = {
        job: {
            config: pool.submit(compile_ahead, *job, max(options.batch_size), config, arch)
            for config in SPACES[job[0]].configurations()
        }
        for job in jobs
    }
    for job in jobs:
        wait(ahead[job].values(), timeout=max(deadline - time.monotonic(), 0))
        for batch in options.batch_size:
            row = swept(*job, batch, ahead[job], deadline)
            report.add(row)
            best = row["fastest"][0]["us"] if row["fastest"] else None
            print(f"{row['job']}, batch {batch}: {row['shipped_us']} µs as shipped, best {best}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
