"""Every kernel of a warm step on a GPU, in order, with its microseconds and, beside it, its floor.

``python -m benchmarks.kernels FILE --contender accelerate-frozen --batch-size 1``; with ``--train`` of a
training step. The floor is what memory or tensor cores need at the rates that a large copy and a large
product reach in the same process; of PyTorch's operators it counts every tensor that comes in or goes out.
What torch.compile makes has none. ``--counters`` runs such a step under ncu and leaves the counters of the
ten longest kernels that FILE names in FILE.csv.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from cvt.config import DTYPES
from cvt.files import replacing
from cvt.tools.commands.bench.contenders import CONTENDERS, made, mode_of
from cvt.tools.commands.bench.models import build_subject
from cvt.tools.commands.bench.workers import Job
from cvt.tools.commands.compile.launches import kernel_name
from cvt_kernels.tuning.ceilings import copy_bandwidth, product_rate

from .floors import Ceilings, ForwardLaunch, Recorder
from .models import DEVICE
from .report import KERNELS

#: Steps that are profiled; a kernel's time is their median.
STEPS = 3
#: Kernels whose counters are read, and the most launches of them.
LONGEST, LAUNCHES = 10, 60
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "SchedulerStats", "WarpStateStats")


class Kernel(NamedTuple):
    """A kernel of a step and its microseconds."""

    name: str
    us: float


class Group(NamedTuple):
    """Kernels that follow one another, and the launches that were noted where they were started.

    There is one of each, unless an operator of PyTorch starts another number of kernels.
    """

    kernels: Sequence[Kernel]
    launches: Sequence[ForwardLaunch]

    def row(self, ceilings: Ceilings) -> dict[str, Any]:
        """Returns the row of the group."""
        row: dict[str, Any] = {
            "kernels": [kernel.name for kernel in self.kernels],
            "us": round(sum(kernel.us for kernel in self.kernels), 2),
        }
        if self.launches:
            row |= {
                "operators": [str(each) for each in self.launches],
                "bytes": sum(each.bytes for each in self.launches),
                "flops": sum(each.flops for each in self.launches),
                "floor_us": round(sum(each.floor(ceilings) for each in self.launches), 2),
            }
        return row


def grouped(kernels: Sequence[Kernel], launches: Sequence[ForwardLaunch]) -> list[Group]:
    """Sets kernels beside launches: Triton's by their names, those between them by their order."""
    known = {launch.kernel for launch in launches}
    # Each stands for itself where it is not to be found on the other side.
    theirs = [
        name if (name := kernel_name(each.name)) in known else f"kernel {i}" for i, each in enumerate(kernels)
    ]
    matcher = difflib.SequenceMatcher(None, theirs, [launch.kernel for launch in launches], autojunk=False)
    groups: list[Group] = []
    done, noted = 0, 0
    for block in matcher.get_matching_blocks():
        groups += _between(kernels[done : block.a], launches[noted : block.b])
        groups += [Group([kernels[block.a + i]], [launches[block.b + i]]) for i in range(block.size)]
        done, noted = block.a + block.size, block.b + block.size
    return groups


def _between(kernels: Sequence[Kernel], launches: Sequence[ForwardLaunch]) -> list[Group]:
    if not launches:
        return [Group([kernel], []) for kernel in kernels]
    if len(kernels) == len(launches):
        return [Group([kernel], [launch]) for kernel, launch in zip(kernels, launches, strict=True)]
    return [Group(kernels, launches)] if kernels else []


def profiled(step: Callable[[], Any]) -> list[Kernel]:
    """Returns the kernels of a step in their order; of the last one, where the steps start different kernels.

    Raises:
        ValueError: The profiler sees no kernel.
    """
    steps = []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        on_gpu = [e for e in profiler.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
        steps.append(sorted(on_gpu, key=lambda event: event.time_range.start))
    if not steps[-1]:
        raise ValueError("the profiler sees no kernel of this step")
    if len(set(map(len, steps))) > 1:
        steps = steps[-1:]
    return [
        Kernel(same[-1].name, round(statistics.median(event.device_time for event in same), 2))
        for same in zip(*steps, strict=True)
    ]


def recorded(step: Callable[[], Any]) -> list[ForwardLaunch]:
    """Returns the launches of a step, which runs."""
    recorder = Recorder()
    with recorder.recording():
        step()
    torch.cuda.synchronize()
    return recorder.launches


def warm_step(options: argparse.Namespace, job: Job) -> Callable[[], Any]:
    """Returns a step that has run a few times."""
    contender, train = CONTENDERS[options.contender], options.train
    subject = build_subject(options.model, None, options.image_size)
    model: Any = made(contender, job.cast(subject.plain.train(train)))
    run = model
    if contender.compile is not None:
        mode = mode_of(contender, options.batch_size, DEVICE, train=train)
        run = torch.compile(model, mode=mode, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) if train else None
    images = job.cast(torch.randn(options.batch_size, 3, subject.image_size, subject.image_size))

    def step() -> None:
        job.step(run, images)
        if optimizer is not None:
            optimizer.step()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    return step


def counters(options: Any, command: Sequence[str]) -> int:
    """Runs a step under ncu, for the longest kernels of the file; returns ncu's exit status."""
    content = json.loads(options.path.read_text(encoding="utf-8"))
    spent: dict[str, float] = {}
    for row in content["rows"]:
        for name in row["kernels"]:
            spent[name] = spent.get(name, 0.0) + row["us"] / len(row["kernels"])
    longest = sorted(spent, key=lambda name: -spent[name])[:LONGEST]
    names = "|".join(dict.fromkeys(re.escape(plain_name(name)) for name in longest))
    ncu = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "details"]
    ncu += ["--kernel-name", f"regex:^({names})$", "--launch-count", str(LAUNCHES)]
    ncu += [word for name in SECTIONS for word in ("--section", name)]
    ncu += ["--log-file", str(options.path.with_suffix(".csv"))]
    return subprocess.run([*ncu, *command, "--under-ncu"]).returncode


def plain_name(kernel: str) -> str:
    """Returns the name of a kernel's function alone, without its type, templates and parameters."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split("[<(]", name)[0].split("::")[-1]


def write(path: Path, schema: str, facts: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Writes a file in one piece; each row is a line."""
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    head = json.dumps({"schema": schema, **machine, "date": date, **facts}, indent=1)
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    with replacing(path) as file:
        file.write_text(f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Writes the file, or the counters."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("--model", default="cvt_13", help="default: cvt_13")
    parser.add_argument("--image-size", type=int, metavar="N", help="pixels of a side (default: the model's)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument("--contender", choices=tuple(CONTENDERS), default="accelerate-frozen")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument("--train", action="store_true", help="a step with fused AdamW under autocast")
    parser.add_argument("--counters", action="store_true", help="run under ncu what FILE has")
    parser.add_argument("--under-ncu", action="store_true", help="run one step within its range")
    words = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(words)
    if options.counters:
        rest = [word for word in words if word != "--counters"]
        return counters(options, [sys.executable, "-m", "benchmarks.kernels", *rest])
    job = Job("", DEVICE, options.dtype, options.train, torch.get_num_threads(), ())
    job.configure()
    step = warm_step(options, job)
    if options.under_ncu:
        torch.cuda.profiler.start()
        step()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        return 0
    kernels = profiled(step)
    launches = [] if options.contender.endswith("compile") else recorded(step)
    ceilings = Ceilings(copy_bandwidth(DEVICE), product_rate(DEVICE, DTYPES[options.dtype]))
    rows = [group.row(ceilings) for group in grouped(kernels, launches)]
    total, floor = sum(kernel.us for kernel in kernels), sum(row.get("floor_us", 0) for row in rows)
    facts = {name: getattr(options, name) for name in ("model", "dtype", "contender", "batch_size", "train")}
    facts |= {"ceilings": ceilings._asdict(), "launches": len(kernels), "us": total, "floor_us": floor}
    write(options.path, KERNELS, facts, rows)
    print(f"{len(kernels)} kernels, {total:.0f} µs, their floor {floor:.0f} µs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
