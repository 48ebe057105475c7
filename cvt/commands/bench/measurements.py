"""``cvt bench``: the same weights in Hugging Face's CvT and in ours, on real photographs.

Parity with float64 comes first, then speed in turns, then one step of each contender under the profiler, for
its memory and for where its time goes. ``report.py`` prints, draws and compares what :func:`run` returns.
It stands on top of both packages, so that it, and nothing else in ``cvt_kernels``, imports ``cvt``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import importlib
import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

from cvt_kernels import __version__, accelerate, backends, machine
from cvt_kernels.acceleration.verify import GRADIENT_FACTOR, VALUE_FACTOR
from cvt_kernels.ops import linear

from ...checkpoints import CheckpointError, read_checkpoint, save_huggingface
from ...config import PRESETS, CvTConfig
from ...extras import require
from ...factory import SEED, create_model, randomize
from ...images import UNCROPPED_SIZE, load_images, sample_photos
from ...model import CvT, Stage
from .report import SCHEMA, VERSION

#: What ours can be measured beside; Hugging Face's eager model always is, as the one to compare with.
PEERS = {
    "hf": "Hugging Face's CvtForImageClassification",
    "compile": "the same under torch.compile",
    "compile-max": 'the same under torch.compile(mode="max-autotune")',
    "eager": "the model of cvt in plain PyTorch: backend reference",
}
_OURS = {
    "cvt": "the model of cvt",
    "accelerate": "Hugging Face's after cvt_kernels.accelerate",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PACKAGES = ("torch", "transformers", "numpy")
# Units in the last place of the largest value that are allowed besides a multiple of Hugging Face's own
# error, which can be small by chance where a model has few classes.
_SLACK = 8


class _Contender(NamedTuple):
    """One way to run the weights.

    Attributes:
        key: Its name in ``--peers``, tables and files.
        model: Takes images (B, 3, H, W).
        backend: The backend that it asks for.
        hooks: Whether hooks can tell its stages apart; a compiled graph has no place for them.
    """

    key: str
    model: nn.Module
    backend: str
    hooks: bool

    def step(self, images: Tensor) -> Tensor:
        """A forward, or with a model in training mode a forward and a backward; returns the logits."""
        with backends.use_backend(self.backend), torch.set_grad_enabled(self.model.training):
            if not self.model.training:
                return _logits(self.model(images))
            self.model.zero_grad(set_to_none=True)
            logits = _logits(self.model(images))
            labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            F.cross_entropy(wide, labels).backward()
            return logits.detach()


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
) -> dict[str, Any]:
    """Measures our models beside others with the same weights: parity, speed, memory, and where time goes.

    Args:
        checkpoint: Weights of a CvT of the paper; None for random ones.
        model: Name of the CvT; None for what the checkpoint looks like, or CvT-13.
        images: Photographs; None for scikit-learn's two. They are repeated to fill a batch.
        image_size: Pixels of each side; None for 224, for CvT-W24 384.
        batch_sizes: Images per step, measured one after the other.
        rounds: Timed steps of each contender, in turns, after one that is not timed.
        device: Where everything runs.
        dtype: Of weights and images: a key of ``DTYPES``.
        train: Measure a training step, forward and backward, instead of a forward in evaluation.
        peers: Keys of ``PEERS`` besides ``"hf"``, which is always measured.
        save_weights: Directory in which to keep the weights, in Hugging Face's format.

    Returns:
        Facts and samples, ready for JSON; ``docs/report.md`` has the format.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
        FileNotFoundError, ImageError, CheckpointError: A file is missing or unusable.
        ValueError: An unknown name, or a contender that is less accurate than it may be.
    """
    device = torch.device(device)
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"peers: got {peer!r}, expected {', '.join(PEERS)}")
    peer_class = _import_peer()
    photos = list(sample_photos() if images is None else images)
    name, original = _build_ours(checkpoint, model)
    image_size = image_size or (UNCROPPED_SIZE if name == "cvt_w24" else 224)
    inputs = load_images(photos, image_size).to(device, DTYPES[dtype])
    with tempfile.TemporaryDirectory() as scratch:
        save_huggingface(original, scratch)
        hf = peer_class.from_pretrained(scratch).to(device, DTYPES[dtype]).train(train)
    # Of the rounded weights, since their rounding is nobody's error.
    exact = _Contender("float64", copy.deepcopy(hf).double(), "reference", hooks=False)
    ours = copy.deepcopy(original).to(device, DTYPES[dtype]).train(train)
    keys = [key for key in (*PEERS, *_OURS) if key == "hf" or key in peers or key in _OURS]
    contenders = [_contender(key, hf, ours) for key in keys]
    about: dict[str, dict[str, Any]] = {
        key: {"about": {**PEERS, **_OURS}[key], "ours": key in _OURS, "note": None} for key in keys
    }
    freezing = contextlib.nullcontext()
    compiled = [about[key] for key in keys if key.startswith("compile")]
    if compiled and device.type == "cpu" and not train:
        freezing, words = _freezing()
        for peer_about in compiled:
            peer_about["about"] += words

    batches = []
    steps = len(batch_sizes) * len(keys) * (rounds + 3)
    with freezing, tqdm(total=steps, leave=False, disable=None) as progress:
        for batch_size in batch_sizes:
            rows = _measure(contenders, exact, inputs, batch_size, rounds, about, progress)
            work = _work(ours.config, image_size, batch_size, DTYPES[dtype].itemsize)
            batches.append({"batch_size": batch_size, "work": work, "rows": rows})
    if save_weights is not None:
        save_huggingface(original, save_weights)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {**machine.facts()._asdict(), "gpus": list(machine.facts().gpus)},
        "versions": {"cvt-kernels": __version__, **{n: metadata.version(n) for n in _PACKAGES}},
        "config": {
            "model": name,
            "weights": f"random weights (seed {SEED})" if checkpoint is None else str(checkpoint),
            "photos": [Path(photo).name for photo in photos],
            "image_size": image_size,
            "dtype": dtype,
            "device": str(device),
            "threads": torch.get_num_threads(),
            "train": train,
            "rounds": rounds,
            "depths": list(ours.config.depths),
            "backends": {n: backends.backend_for(n, device.type) for n in backends.OPERATORS},
        },
        "ceilings": _ceilings(device, DTYPES[dtype]),
        "contenders": about,
        "batches": batches,
    }


def _import_peer() -> Any:
    transformers = require("transformers", "bench")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.CvtForImageClassification


def _build_ours(checkpoint: str | None, model: str | None) -> tuple[str, CvT]:
    """Ours with the activation that Hugging Face runs, and without drop path, which draws random numbers."""
    overrides: dict[str, Any] = {"activation": "gelu", "drop_path_rate": 0.0}
    if checkpoint is None:
        name = model or "cvt_13"
        built = create_model(name, **overrides)
        randomize(built)
        return name, built
    loaded = read_checkpoint(checkpoint)
    preset = model or loaded.preset
    if preset is None:
        raise CheckpointError(f"{checkpoint}: is not a CvT of {', '.join(PRESETS)}")
    return preset, create_model(preset, checkpoint=loaded, **overrides)


# Contenders -----------------------------------------------------------------------------------------------


def _contender(key: str, hf: nn.Module, ours: nn.Module) -> _Contender:
    requested = backends.requested_backend()
    if key == "hf":
        return _Contender(key, hf, "reference", hooks=True)
    if key in ("compile", "compile-max"):
        mode = "max-autotune" if key == "compile-max" else None
        # Every batch size gets code of its own, as the peer's users would have it.
        compiled: Any = torch.compile(copy.deepcopy(hf), mode=mode, dynamic=False)
        return _Contender(key, compiled, "reference", hooks=False)
    if key == "accelerate":
        return _Contender(key, accelerate(copy.deepcopy(hf)), requested, hooks=True)
    return _Contender(key, ours, "reference" if key == "eager" else requested, hooks=True)


def _freezing() -> tuple[Any, str]:
    """Lets torch.compile fold the weights in, and says so; its ``options`` would not reach dynamo."""
    settings: Any = None
    with contextlib.suppress(ImportError):
        settings = importlib.import_module("torch._inductor.config")
    if not hasattr(settings, "freezing"):
        return contextlib.nullcontext(), ", without freezing, which this torch does not have"
    return settings.patch(freezing=True), ", with freezing"


def _logits(outputs: Any) -> Tensor:
    return getattr(outputs, "logits", outputs)


# Measurements ---------------------------------------------------------------------------------------------


def _measure(
    contenders: list[_Contender],
    exact: _Contender,
    photos: Tensor,
    batch_size: int,
    rounds: int,
    about: dict[str, Any],
    progress: Any,
) -> list[dict[str, Any]]:
    """One row per contender that works, in one batch size; ``about`` notes why another does not."""
    batches = _fill(photos, batch_size)
    rows: dict[str, dict[str, Any]] = {}
    for contender, parity in _parities(contenders, exact, photos, batches, about, progress):
        rows[contender.key] = {"contender": contender.key, "parity": parity}
    contenders = [contender for contender in contenders if contender.key in rows]
    seconds = _time_in_turns(contenders, batches[0], rounds, progress)
    for contender in contenders:
        _tick(progress, f"batch {batch_size}, profile of {contender.key}")
        rows[contender.key] |= {"seconds": seconds[contender.key], **_profile(contender, batches[0])}
    return list(rows.values())


def _fill(photos: Tensor, batch_size: int) -> tuple[Tensor, ...]:
    """Full batches of all photos, the last one filled with the first photos again."""
    count = -(-len(photos) // batch_size) * batch_size
    return photos.repeat(-(-count // len(photos)), 1, 1, 1)[:count].split(batch_size)


def _parities(
    contenders: list[_Contender],
    exact: _Contender,
    photos: Tensor,
    batches: tuple[Tensor, ...],
    about: dict[str, Any],
    progress: Any,
) -> Iterator[tuple[_Contender, dict[str, Any]]]:
    """Logits of all photos against float64's; in training those of one batch, and its gradients.

    Raises:
        ValueError: A contender's error is larger than what Hugging Face's in the same dtype allows.
    """
    if exact.model.training:
        # At least 2: of one image, Hugging Face's gradients are wrong on a CPU (see docs/accelerate.md).
        photos = _fill(photos, min(max(len(batches[0]), 2), 8))[0]
        batches = (photos,)
    truth = torch.cat([exact.step(part.double()) for part in photos.split(len(batches[0]))])
    true_norms = _gradient_norms(exact.model)
    limits: dict[str, float] = {}
    for contender in contenders:
        _tick(progress, f"batch {len(batches[0])}, parity of {contender.key}")
        if about[contender.key]["note"] is not None:
            continue
        try:
            # Copies, because a CUDA graph of torch.compile writes its next logits to the same place.
            logits = torch.cat([contender.step(batch).clone() for batch in batches])[: len(photos)]
        except Exception as error:
            if not contender.key.startswith("compile"):
                raise
            reason = (str(error).splitlines() or ["no reason given"])[0]
            about[contender.key]["note"] = f"fails: {type(error).__name__}: {reason}"
            continue
        parity = _parity(logits, truth, _gradient_norms(contender.model), true_norms)
        limits = limits or _limits(parity, logits.dtype)  # the first is Hugging Face's
        for name, allowed in limits.items():
            if not parity[name] <= allowed:  # nor is NaN
                raise ValueError(
                    f"{contender.key}: {name.replace('_', ' ')} {parity[name]:.1e} against float64, expected "
                    f"at most {allowed:.1e} by Hugging Face's in the same dtype; nothing was timed"
                )
        yield contender, parity


def _parity(logits: Tensor, truth: Tensor, norms: Tensor, true_norms: Tensor) -> dict[str, Any]:
    k = min(5, truth.shape[1])
    top, true_top = (each.topk(k).indices.tolist() for each in (logits.double(), truth))
    gradient_error = None
    if len(true_norms):
        gradient_error = ((norms - true_norms).abs().max() / true_norms.max()).item()
    return {
        "error": (logits.double() - truth).abs().max().item(),
        "largest": truth.abs().max().item(),
        "top5": sum(len(set(a) & set(b)) for a, b in zip(top, true_top, strict=True)),
        "of": k * len(truth),
        "gradient_error": gradient_error,
    }


def _limits(parity: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """What the errors of all contenders may be, given Hugging Face's."""
    slack = _SLACK * torch.finfo(dtype).eps
    limits = {"error": VALUE_FACTOR * parity["error"] + slack * parity["largest"]}
    if parity["gradient_error"] is not None:
        limits["gradient_error"] = GRADIENT_FACTOR * parity["gradient_error"] + slack
    return limits


def _gradient_norms(model: nn.Module) -> Tensor:
    """Of every parameter, sorted, because the models name and order theirs differently; else empty."""
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).sort().values if norms else torch.empty(0)


def _time_in_turns(
    contenders: list[_Contender], batch: Tensor, rounds: int, progress: Any
) -> dict[str, list[float]]:
    """Seconds of every step, a step of each contender per round, so that all see the same machine."""
    seconds: dict[str, list[float]] = {contender.key: [] for contender in contenders}
    for i in range(rounds + 1):
        for contender in contenders:
            _tick(progress, f"batch {len(batch)}, {f'round {i}' if i else 'warm-up'}")
            _synchronize(batch.device)
            start = time.perf_counter()
            contender.step(batch)
            _synchronize(batch.device)
            if i > 0:  # the first round warms up
                seconds[contender.key].append(time.perf_counter() - start)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tick(progress: Any, what: str) -> None:
    progress.set_description(what)
    progress.update()


# Where memory and time go ---------------------------------------------------------------------------------

#: Kinds of operators, by the outermost operator that has one. Backward has its names in CamelCase.
_KINDS = {
    kind: re.compile(pattern, re.IGNORECASE)
    for kind, pattern in {
        # The only products of two tensors, and the only scaling, are attention's.
        "attention": r"attention|einsum|bmm|softmax|aten::(matmul|mul)$|^MulBackward",
        "linear": r"linear|addmm|aten::mm$|: MmBackward",
        "convolution": r"conv|batch_?norm",
        "norm": r"layer_?norm|aten::add_?$|: AddBackward",
        "gelu": r"gelu",
        "copies": r"aten::(copy_|clone|contiguous|cat|to)$|: (Clone|Cat|Copy)",
    }.items()
}
#: The fastest of this many is kept.
_PROFILES = 3

#: Loops that torch.compile made, in which operators can no longer be told apart.
_COMPILED = re.compile(r"^triton_|cpp_fused|Compiled|Inductor", re.IGNORECASE)


def _profile(contender: _Contender, batch: Tensor) -> dict[str, Any]:
    """Peak memory of a step, and the seconds of its operators by part of the model and kind."""
    cuda = batch.device.type == "cuda"
    peak = _cuda_peak(contender, batch) if cuda else None
    profiles = [_profiled_step(contender, batch) for _ in range(_PROFILES)]
    seconds = min((_seconds(each, cuda) for each in profiles), key=lambda found: sum(found.values()))
    return {
        "peak_bytes": peak if cuda else _cpu_peak(profiles[0]),
        "breakdown": [
            {"part": part, "kind": kind, "seconds": total}
            for (part, kind), total in sorted(seconds.items())
            if total > 0
        ],
    }


def _profiled_step(contender: _Contender, batch: Tensor) -> profile:
    contender.model.zero_grad(set_to_none=True)
    cuda = batch.device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler reports its own start on stderr
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with (
        _labelled_parts(contender),
        _labelled_operators(),
        profile(activities=activities, profile_memory=not cuda) as profiler,
    ):
        contender.step(batch)
        _synchronize(batch.device)
    return profiler


def _seconds(profiler: profile, cuda: bool) -> Counter[tuple[str, str]]:
    """Of the operators themselves, without those that they call: on the GPU, or else on the CPU."""
    seconds: Counter[tuple[str, str]] = Counter()
    for event in profiler.events() or ():
        if event.device_type.name == "CPU":
            microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
            seconds[_place(event)] += microseconds / 1e6
    return seconds


def _cuda_peak(contender: _Contender, batch: Tensor) -> int:
    contender.model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats(batch.device)
    before = torch.cuda.memory_allocated(batch.device)
    contender.step(batch)
    return torch.cuda.max_memory_allocated(batch.device) - before


def _cpu_peak(profiler: profile) -> int | None:
    """Most bytes that PyTorch's CPU allocator held at once, beyond what it held before; None if not told."""
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    held = peak = 0
    for change in changes:
        held += change["args"]["Bytes"]
        peak = max(peak, held)
    return peak if changes else None


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The embeddings and blocks of either model, named by their stage, from 1 on."""
    encoder = getattr(getattr(model, "cvt", None), "encoder", None)
    stages: Any = encoder.stages if encoder else [m for m in model.children() if isinstance(m, Stage)]
    for i, stage in enumerate(stages, 1):
        yield f"embedding {i}", stage.embedding if encoder else stage.patch_embed
        for block in stage.layers if encoder else stage.blocks:
            yield f"block {i}", block


@contextlib.contextmanager
def _labelled_parts(contender: _Contender) -> Iterator[None]:
    """Shows the parts of a model as ranges in a profile."""
    open_ranges: list[record_function] = []

    def enter(label: str) -> None:
        open_ranges.append(record_function(label))
        open_ranges[-1].__enter__()

    handles = []
    for label, module in _parts(contender.model) if contender.hooks else ():
        handles += [
            module.register_forward_pre_hook(lambda module, args, label=label: enter(label)),
            module.register_forward_hook(
                lambda module, args, output: open_ranges.pop().__exit__(None, None, None)
            ),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _labelled_operators() -> Iterator[None]:
    """Shows our operators as ranges in a profile.

    A Triton kernel has no name of PyTorch's around it, and a linear layer may be computed as a convolution.
    """

    def labelled(operator: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"cvt_kernels::{operator}"):
                return function(*args, **kwargs)

        return call

    def labelled_implementation(
        operator: str, backend: str, implementation: backends.Implementation
    ) -> backends.Implementation:
        function = labelled(operator, implementation.load().function)
        return dataclasses.replace(implementation, function=function)

    primitives = linear._PRIMITIVES
    plain = dict(primitives)
    try:
        primitives.update({name: labelled("linear", function) for name, function in plain.items()})
        with backends.replaced(labelled_implementation):
            yield
    finally:
        primitives.update(plain)


def _place(event: Any) -> tuple[str, str]:
    """The part of the model and the kind of an event, by the ranges and operators around it."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    names.reverse()
    part = next((name for name in names if re.fullmatch(r"(embedding|block) \d+", name)), "rest")
    kinds = (kind for name in names for kind, pattern in _KINDS.items() if pattern.search(name))
    compiled = any(map(_COMPILED.search, names))
    return part, next(kinds, "compiled" if compiled else "other")


# What the machine could do, and what there is to do -------------------------------------------------------


def _ceilings(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and operations per second of a matrix product."""
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    products: list[Callable[[], Any]] = [lambda: a @ b]
    if device.type == "cpu" and dtype == torch.float32:
        # On AMD's CPUs MKL is slow; oneDNN does the same product as a convolution of n pixels by 1×1.
        pixels, weight = a.view(1, n, 1, n).permute(0, 3, 1, 2), b.view(n, n, 1, 1)
        products.append(lambda: F.conv2d(pixels, weight))
    with torch.no_grad():
        return {
            "bytes_per_second": 2 * source.numel() / _fastest(lambda: target.copy_(source), device),
            "flops_per_second": 2 * n**3 / min(_fastest(product, device) for product in products),
        }


def _fastest(function: Callable[[], Any], device: torch.device) -> float:
    seconds: list[float] = []
    while len(seconds) < 6 and sum(seconds) < 2:  # the first warms up, and is not the fastest
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _work(config: CvTConfig, image_size: int, batch_size: int, itemsize: int) -> list[dict[str, Any]]:
    """Operations and bytes of a forward, by part and kind, all blocks of a stage together.

    An operator reads its inputs and its weights once and writes its outputs once, and a multiplication and an
    addition are two operations; LayerNorm is counted as 7 per element, GELU as 8.
    """
    rows: list[dict[str, Any]] = []

    def add(part: str, kind: str, count: int, flops: float, elements: float, weights: int = 0) -> None:
        size = itemsize * (batch_size * elements + weights)
        rows.append({"part": part, "kind": kind, "flops": count * batch_size * flops, "bytes": count * size})

    side, channels = image_size, config.in_chans
    for i, stage in enumerate(config.stages, 1):
        pixels, inputs = side**2, channels
        side = (side + 2 * stage.patch_padding - stage.patch_size) // stage.patch_stride + 1
        grid, keys = side**2, ((side - 1) // stage.stride_kv + 1) ** 2
        dim = channels = stage.embed_dim
        weights = dim * inputs * stage.patch_size**2
        add(f"embedding {i}", "convolution", 1, 2 * grid * weights, pixels * inputs + grid * dim, weights)
        add(f"embedding {i}", "norm", 1, 7 * grid * dim, 2 * grid * dim)

        part, taps, hidden = f"block {i}", stage.kernel_size**2, int(dim * stage.mlp_ratio)
        q, kv = grid + stage.cls_token, keys + stage.cls_token
        products = q * (2 * dim**2 + 2 * dim * hidden) + kv * 2 * dim**2
        moved = q * (6 * dim + 2 * hidden) + kv * 4 * dim
        add(part, "linear", stage.depth, 2 * products, moved, 4 * dim**2 + 2 * dim * hidden)
        add(part, "attention", stage.depth, 4 * q * kv * dim, (2 * q + 2 * kv) * dim)
        # Three branches, each with a scale and a shift for BatchNorm.
        convolved = (2 * taps + 2) * (grid + 2 * keys) * dim
        add(part, "convolution", stage.depth, convolved, (2 * q + 2 * kv) * dim)
        # Two LayerNorms and two residual sums, of which the first is one operator with the second LayerNorm.
        add(part, "norm", stage.depth, 16 * q * dim, (2 + 4 + 3) * q * dim)
        add(part, "gelu", stage.depth, 8 * q * hidden, 2 * q * hidden)
    return rows
