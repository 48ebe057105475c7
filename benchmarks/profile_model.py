"""Where the time of CvT-13 goes: one inference and one training step, by kernel, as JSON.

``python benchmarks/profile_model.py FILE``. On a GPU time is the device's, elsewhere the CPU's.
"""

import argparse
import json
import time
from pathlib import Path

import timing
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import cvt_kernels as ck
from cvt import CvTConfig, create_model
from cvt.factory import randomize
from cvt_kernels import backends

SCHEMA = 1
TOP = 40  # kernels that are listed


def main() -> None:
    """Profiles and writes."""
    parser = argparse.ArgumentParser(prog="benchmarks/profile_model.py", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    timing.TINY = options.tiny
    size, batch, dtype = 64 if options.tiny else 224, timing.batch(), timing.dtypes()[0]
    small = CvTConfig(embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 1, 2))
    model = create_model(small if options.tiny else "cvt_13")
    randomize(model)
    x = timing.randn(batch, 3, size, size, dtype=torch.float32, seed=0)
    labels = torch.arange(batch, device=timing.DEVICE) % 1000

    def training():
        with torch.autocast(timing.DEVICE, dtype, enabled=dtype.itemsize == 2):
            loss = F.cross_entropy(trained(x), labels)
        torch.autograd.grad(loss, list(trained.parameters()))

    def inference():
        with torch.inference_mode():
            served(images)

    trained = model.to(timing.DEVICE).train()
    with timing.every_kernel():
        steps = {"training": profiled(training)}
        served, images = model.eval().to(dtype), x.to(dtype)
        steps["inference"] = profiled(inference)
        report = {
            "schema": SCHEMA,
            "model": f"cvt_13 at {size}",
            "batch": batch,
            "dtype": timing.short(dtype),
            "device": timing.device_name(),
            "device_type": timing.DEVICE,
            "cvt_kernels": ck.__version__,
            "backends": {o: backends.backend_for(o, timing.DEVICE) for o in backends.OPERATORS},
            "steps": steps,
        }
    options.path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, step in steps.items():
        kernels, wall = step["microseconds"] / 1e3, step["wall_seconds"] * 1e3
        print(f"{name}: {kernels:.2f} ms of kernels, {wall:.2f} ms by the clock")
        for row in step["kernels"][:10]:
            print(f"  {row['share']:>6.1%}  {row['calls']:>4} × {row['name'][:90]}")


def profiled(step) -> dict:
    """One step after two that warm up: time by kernel, and by the clock without the profiler."""
    for _ in range(2):
        step()
    timing.synchronize()
    start = time.perf_counter()
    step()
    timing.synchronize()
    wall = time.perf_counter() - start
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if timing.CUDA else [])]
    with profile(activities=activities) as found:
        step()
        timing.synchronize()
    rows = [
        {"name": row.key, "calls": row.count, "microseconds": microseconds(row)}
        for row in found.key_averages()
        if microseconds(row) > 0
    ]
    rows.sort(key=lambda row: -row["microseconds"])
    total = sum(row["microseconds"] for row in rows)
    for row in rows:
        row["share"] = row["microseconds"] / total
    return {"wall_seconds": wall, "microseconds": total, "kernels": rows[:TOP]}


def microseconds(row) -> float:
    """Of a kernel on the GPU, or of an operator without those that it calls on the CPU."""
    if not timing.CUDA:
        return row.self_cpu_time_total
    return row.self_device_time_total if row.device_type == torch.autograd.DeviceType.CUDA else 0.0


if __name__ == "__main__":
    main()
