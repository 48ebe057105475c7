"""Profiles CvT-13: one inference and one training step, by kernel, as JSON.

``python -m benchmarks.profile_model FILE``. On a GPU time is the device's, elsewhere the CPU's. The backends
are ``auto``'s, autotuned before.
"""

from typing import Any

import torch
from torch.profiler import profile

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.commands.bench.contenders import training_step
from cvt.factory import randomize
from cvt_kernels.autotune import clock

from . import suites

SCHEMA, VERSION = "benchmarks profile", 2
TOP = 40  # kernels that are listed


def main() -> None:
    """Profiles both steps, writes the profiles and prints the longest kernels."""
    options = suites.script_parser("profile_model", __doc__).parse_args()
    suites.TINY = options.tiny
    size, batch, dtype = 64 if options.tiny else 224, suites.batch(), suites.dtypes()[0]
    small = CvTConfig(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2))
    model = create_model(small if options.tiny else "cvt_13")
    randomize(model)
    x = suites.randn(batch, 3, size, size, dtype=torch.float32, seed=0)

    def training():
        training_step(trained, x, dtype if dtype.itemsize == 2 else None)

    def inference():
        with torch.inference_mode():
            served(images)

    trained = model.to(suites.DEVICE).train()
    steps = {"training": profiled(training)}
    model.zero_grad(set_to_none=True)
    served, images = model.eval().to(dtype), x.to(dtype)
    steps["inference"] = profiled(inference)
    report = {
        "schema": SCHEMA,
        "version": VERSION,
        "model": f"cvt_13 at {size}",
        "batch": batch,
        "dtype": suites.short(dtype),
        "device": suites.device_name(),
        "device_type": suites.DEVICE,
        "cvt_kernels": ck.__version__,
        "steps": steps,
    }
    suites.write_report(options.path, report)
    for name, step in steps.items():
        kernels, wall = step["microseconds"] / 1e3, step["wall_seconds"] * 1e3
        print(f"{name}: {kernels:.2f} ms of kernels, {wall:.2f} ms by the clock")
        for row in step["kernels"][:10]:
            print(f"  {row['share']:>6.1%}  {row['calls']:>4} × {row['name'][:90]}")


def by_kernel(profiler: profile, cuda: bool) -> list[dict[str, Any]]:
    """Lists the GPU's kernels or the CPU's operators, the longest first: name, calls and microseconds."""
    rows = []
    for row in profiler.key_averages():
        microseconds = row.self_cpu_time_total
        if cuda:
            on_gpu = row.device_type == torch.autograd.DeviceType.CUDA
            microseconds = row.self_device_time_total if on_gpu else 0.0
        if microseconds > 0:
            rows.append({"name": row.key, "calls": row.count, "microseconds": microseconds})
    return sorted(rows, key=lambda row: -row["microseconds"])


def profiled(step) -> dict:
    """Measures a step that is warm: time by the clock without the profiler, then by kernel."""
    served = suites.backends_serving(step)
    ((wall,),) = clock.seconds_in_turns([step], 1, suites.DEVICE)
    rows = by_kernel(clock.profiled(step, suites.DEVICE), suites.CUDA)
    total = sum(row["microseconds"] for row in rows)
    for row in rows:
        row["share"] = row["microseconds"] / total
    return {"wall_seconds": wall, "microseconds": total, "backends": served, "kernels": rows[:TOP]}


if __name__ == "__main__":
    main()
