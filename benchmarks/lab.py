"""Models, ways to run them, timing and reports, which the scripts of ``make gpu`` share."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

import cvt_kernels as ck
from cvt.config import DTYPES
from cvt.files import replacing
from cvt.tools.commands.bench import contenders, models
from cvt_kernels import machine
from cvt_kernels.autotune import clock

SCHEMA, VERSION = "benchmarks lab", 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# Models ---------------------------------------------------------------------------------------------------


def compiled(model: nn.Module, batch: int) -> Any:
    """Returns a model under torch.compile in its best mode for a batch size in inference.

    From 64 images on, the time on the GPU hides the host's, and CUDA graphs only cost memory.
    """
    graphs = batch < 64 and not model.training and DEVICE == "cuda"
    return torch.compile(model, mode="reduce-overhead" if graphs else None, dynamic=False)


def quantized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a frozen model with linear layers of 8-bit numbers."""
    ck.quantize(model, dtype=dtype)
    return ck.graphed(ck.accelerate(model, freeze=True))


#: Ways to run Hugging Face's model, made from it and the batch size.
WAYS: dict[str, Callable[[nn.Module, int], Any]] = {
    "eager": lambda model, batch: model,
    "compile": compiled,
    "live": lambda model, batch: ck.accelerate(model, freeze=False),
    "live-graphed": lambda model, batch: ck.graphed(ck.accelerate(model, freeze=False)),
    "live-compile": lambda model, batch: compiled(ck.accelerate(model, freeze=False), batch),
    "frozen": lambda model, batch: ck.accelerate(model, freeze=True),
    "graphed": lambda model, batch: ck.graphed(ck.accelerate(model, freeze=True)),
    "int8": lambda model, batch: quantized(model, torch.int8),
    "float8": lambda model, batch: quantized(model, torch.float8_e4m3fn),
}


def hugging_face(options: argparse.Namespace, dtype: torch.dtype) -> tuple[nn.Module, int]:
    """Returns Hugging Face's model on the device, in training mode with ``--train``, and its image size."""
    subject = models.build_subject(options.model, None, options.image_size)
    return subject.hf.train(options.train).to(DEVICE, dtype), subject.image_size


def images(batch: int, size: int, dtype: torch.dtype) -> Tensor:
    """Returns random images; those of a larger batch begin with those of a smaller one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, size, size, generator=generator).to(DEVICE, dtype)


def training_step(run: Any, model: nn.Module, batch: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Returns a step of training, with autocast to ``dtype`` and fused AdamW; it returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = dtype if dtype.itemsize == 2 else None

    def step() -> Tensor:
        loss = contenders.training_step(run, batch, autocast).loss
        optimizer.step()
        return loss

    return step


def forward(run: Any, batch: Tensor) -> Callable[[], Tensor]:
    """Returns a call of a model, which returns its logits."""
    return lambda: contenders.logits_of(run(batch))


# Timing ---------------------------------------------------------------------------------------------------


def spread(milliseconds: list[float]) -> dict[str, Any]:
    """Returns the median, the quartiles and the number of times."""
    low, middle, high = statistics.quantiles(milliseconds, n=4)
    return {"ms": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)], "runs": len(milliseconds)}


def timed(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Times a warm call by events around calls that follow one another, and by the clock.

    Each takes about ``seconds``. The clock's times are those that a client waits: the GPU is idle before the
    call and after it. Without a GPU there are only these.
    """
    start = clock.now(DEVICE)
    call()
    runs = int(max(5, min(400, seconds / (clock.now(DEVICE) - start))))
    (waits,) = clock.seconds_in_turns([call], runs, DEVICE)
    waited = spread([1e3 * wait for wait in waits])
    if DEVICE != "cuda":
        return {"clock": waited}
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in pairs:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return {"events": spread([begin.elapsed_time(end) for begin, end in pairs]), "clock": waited}


# Results --------------------------------------------------------------------------------------------------


def device_name() -> str:
    """Returns the name of the GPU, or of the CPU."""
    return torch.cuda.get_device_name() if DEVICE == "cuda" else machine.cpu_name()


class Report:
    """The rows of a script, in a file that is written after each of them."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path = path
        self.content = {
            "schema": SCHEMA,
            "version": VERSION,
            "device": device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **facts,
            "rows": [],
        }

    def add(self, *rows: dict[str, Any]) -> None:
        """Adds rows, and writes the file."""
        self.content["rows"] += rows
        write_report(self._path, self.content)


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a report in one piece, with a line for each row."""
    facts = json.dumps({name: value for name, value in content.items() if name != "rows"}, indent=1)
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in content["rows"])
    with replacing(path) as file:
        file.write_text(f'{facts[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n', encoding="utf-8")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of a script that runs a model."""
    made = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    made.add_argument("path", type=Path, help="the JSON file")
    made.add_argument("--model", default="cvt_13", help="default: cvt_13")
    made.add_argument("--image-size", type=int, metavar="N", help="pixels of a side (default: the model's)")
    made.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="default: bfloat16")
    made.add_argument("--tf32", action="store_true", help="allow TF32 in products of float32")
    made.add_argument("--way", choices=tuple(WAYS), default="graphed", help="default: graphed")
    made.add_argument("--batch-size", nargs="+", type=int, metavar="N", default=[256], help="default: 256")
    made.add_argument("--train", action="store_true", help="a step with fused AdamW under autocast")
    return made


@contextlib.contextmanager
def settings(options: argparse.Namespace) -> Any:
    """Sets what the options say of the process: TF32, and gradients only in training."""
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    torch.backends.cudnn.benchmark = True  # as everybody does who compares speeds
    with contextlib.nullcontext() if options.train else torch.no_grad():
        yield
