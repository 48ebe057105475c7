"""``cvt-kernels bench``: the same weights in Hugging Face's CvT and in ours, on real photographs.

It stands on top of both packages, so that it, and nothing else in ``cvt_kernels``, imports ``cvt``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from cvt.checkpoints import CheckpointError, read_checkpoint, save_huggingface
from cvt.config import PRESETS
from cvt.data import load_images
from cvt.model import CvT, create_model

_SEED = 0


def run(
    *,
    checkpoint: str | None = None,
    images: Sequence[str | os.PathLike[str]] | None = None,
    batch_size: int = 8,
    rounds: int = 10,
    device: torch.device | str = "cpu",
    save_weights: str | os.PathLike[str] | None = None,
) -> str:
    """Compares Hugging Face's ``CvtForImageClassification`` with ours, both in evaluation mode in float32.

    Throughput is measured in turns, a forward of each per round, so that both see the same machine.

    Args:
        checkpoint: Weights of a CvT of the paper; None for random ones in CvT-13.
        images: Photographs; None for scikit-learn's two. They are repeated to fill a batch.
        batch_size: Images per timed forward.
        rounds: Timed forwards of each model, after one that is not timed.
        device: Where both run.
        save_weights: Directory in which to keep the weights, in Hugging Face's format.

    Returns:
        A report of a few lines.

    Raises:
        ModuleNotFoundError: The ``bench`` extra is not installed.
        FileNotFoundError, ImageError, CheckpointError: A file is missing or unusable.
    """
    peer_class = _import_peer()
    photos = list(sample_photos() if images is None else images)
    inputs = load_images(photos).to(device)
    name, ours = _build_ours(checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        save_huggingface(ours, scratch)
        peer = peer_class.from_pretrained(scratch)
    peer.to(device).eval()
    ours.to(device).eval()
    forwards: dict[str, Callable[[Tensor], Tensor]] = {
        "Hugging Face": lambda x: peer(x).logits,
        "cvt-kernels": ours,
    }
    with torch.inference_mode():
        logits = [forward(inputs) for forward in forwards.values()]
        copies = -(-batch_size // len(photos))
        seconds = _time_in_turns(forwards, inputs.repeat(copies, 1, 1, 1)[:batch_size], rounds)
    if save_weights is not None:
        save_huggingface(ours, save_weights)
    source = f"random weights (seed {_SEED})" if checkpoint is None else checkpoint
    heading = f"{name}, {source}, float32 on {device}, {torch.get_num_threads()} threads, batch {batch_size}"
    return "\n".join([heading, "", *_speed_table(seconds, batch_size), "", *_parity_table(photos, *logits)])


def sample_photos() -> list[Path]:
    """The two photographs that come with scikit-learn.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    try:
        import sklearn.datasets
    except ModuleNotFoundError as error:
        raise _missing_extra(error) from error
    folder = Path(sklearn.datasets.__file__).parent / "images"
    return [folder / "china.jpg", folder / "flower.jpg"]


def randomize(model: nn.Module, seed: int = _SEED) -> None:
    """Fills a model with reproducible weights whose every parameter and statistic matters to the output.

    A freshly initialised model has biases of 0, norms of 1 and logits that hardly depend on the image, which
    would hide errors.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
                tensor.copy_(noise.mul(0.2).exp())
            elif tensor.ndim == 1:
                tensor.copy_(noise.mul(0.1))
            else:
                fan_in = tensor[0].numel()
                tensor.copy_(noise / fan_in**0.5)


def _import_peer() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise _missing_extra(error) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers.CvtForImageClassification


def _missing_extra(error: ModuleNotFoundError) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"{error.name} is not installed; pip install 'cvt-kernels[bench]'")


def _build_ours(checkpoint: str | None) -> tuple[str, CvT]:
    """Ours with the activation that Hugging Face runs."""
    if checkpoint is None:
        model = create_model("cvt_13", activation="gelu")
        randomize(model)
        return "cvt_13", model
    loaded = read_checkpoint(checkpoint)
    if loaded.preset is None:
        raise CheckpointError(f"{checkpoint}: is not a CvT of {', '.join(PRESETS)}")
    return loaded.preset, create_model(loaded.preset, checkpoint=loaded, activation="gelu")


def _time_in_turns(
    forwards: dict[str, Callable[[Tensor], Tensor]], batch: Tensor, rounds: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in forwards}
    for i in tqdm(range(rounds + 1), desc="rounds", leave=False, disable=None):
        for name, forward in forwards.items():
            _synchronize(batch.device)
            start = time.perf_counter()
            forward(batch)
            _synchronize(batch.device)
            if i > 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _speed_table(seconds: dict[str, list[float]], batch_size: int) -> list[str]:
    """Medians over the rounds; the ratio is the median of the rounds' own ratios."""
    baseline = next(iter(seconds.values()))
    lines = [f"{'throughput':<14}{'images/s':>10}{'slowest':>10}{'fastest':>10}{'ratio':>8}"]
    for name, times in seconds.items():
        rates = [batch_size / t for t in times]
        ratio = statistics.median(b / t for b, t in zip(baseline, times, strict=True))
        rate = statistics.median(rates)
        lines.append(f"{name:<14}{rate:>10.2f}{min(rates):>10.2f}{max(rates):>10.2f}{ratio:>8.2f}")
    return lines


def _parity_table(photos: Sequence[str | os.PathLike[str]], theirs: Tensor, ours: Tensor) -> list[str]:
    names = [Path(photo).name for photo in photos]
    width = max(len("parity"), *map(len, names)) + 2
    lines = [f"{'parity':<{width}}{'max |Δ logit|':>15}{'max |logit|':>13}{'top-5 agreement':>17}"]
    for name, a, b in zip(names, theirs, ours, strict=True):
        k = min(5, len(a))
        common = len(set(a.topk(k).indices.tolist()) & set(b.topk(k).indices.tolist()))
        lines.append(
            f"{name:<{width}}{(a - b).abs().max():>15.1e}{a.abs().max():>13.2f}{f'{common}/{k}':>17}"
        )
    return lines
