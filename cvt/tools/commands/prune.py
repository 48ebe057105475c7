"""``cvt prune``: removal of a model's least important hidden units and heads, with the loss of accuracy."""

from __future__ import annotations

import argparse
import contextlib
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from tqdm import tqdm

from cvt.card import ModelCard
from cvt.checkpoints import Checkpoint, save_safetensors
from cvt.config import CvTConfig
from cvt.files import check_writable, filling, making, replacing
from cvt.huggingface import BEST, CONFIGS, WEIGHTS
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from ..evaluation import Cost, Evaluation, cost
from ..weight_pruning import Saliency, hidden_units, prune_weights, pruned_config, why_unprunable
from .common import (
    LoadedModel,
    add_batch_arguments,
    add_calibrate_argument,
    add_device_argument,
    add_labels_argument,
    add_model_arguments,
    load_model,
    naming_options,
    open_calibration,
    positive_int,
    print_result,
    recorded_warnings,
    resolve_device,
    seed,
)
from .paths import add_json_argument, output_path, reporting
from .smaller import SUFFIX, accuracy, card_of, evaluated, settings, size_of, table

if TYPE_CHECKING:
    from ..datasets import Batches

# Of files, which nobody wants a directory to be called.
_OTHER_SUFFIXES = (".pth", ".pt", ".pt2", ".bin", ".ckpt", ".onnx", ".json", ".pkl", ".npz", ".h5", ".zip")
_ROUNDS = 10  # of the measurement of speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_model_arguments(parser)
    for option, what in (
        ("--mlp", "hidden units of every MLP"),
        ("--heads", "attention heads of every block"),
    ):
        text = f"fraction of the {what} to remove (default: 0)"
        parser.add_argument(option, type=float, default=0.0, metavar="FRACTION", help=text)
    parser.add_argument(
        "--output",
        type=output_path,
        required=True,
        metavar="PATH",
        help=f"{SUFFIX} file or Hugging Face directory to write",
    )
    add_calibrate_argument(parser, required=False)
    parser.add_argument(
        "--saliency",
        choices=get_args(Saliency),
        help="importance score: size of the weights (magnitude), or estimated change of the loss (taylor) "
        "(default: taylor with --calibrate, else magnitude)",
    )
    parser.add_argument(
        "--batches", type=positive_int, default=8, help="most batches to calibrate with (default: 8)"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, help="seed for choosing the calibration images (default: 0)"
    )
    add_labels_argument(parser)
    add_batch_arguments(parser)
    add_json_argument(parser, "accuracy, size and speed before and after")
    add_device_argument(parser)
    parser.set_defaults(run=_prune, written=_names_written)


def _names_written(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the names of the files of a folder that is ``--output``."""
    is_file = os.path.splitext(arguments.output)[1] == SUFFIX
    return {} if is_file else {"output": [WEIGHTS[0], *CONFIGS]}


def _prune(arguments: argparse.Namespace) -> None:
    output = Path(arguments.output)
    _check(output, arguments)
    device = resolve_device(arguments.device)
    loaded = load_model(arguments, device)
    why_not = why_unprunable(loaded.model)
    if why_not is not None:
        raise ValueError(f"--checkpoint: {loaded.checkpoint.path} {why_not}")
    with naming_options("mlp", "heads"):  # before the long run
        pruned_config(loaded.model.config, mlp=arguments.mlp, heads=arguments.heads)
    if arguments.calibrate and loaded.model.config.head != "classify":
        raise ValueError(
            f"--calibrate: is for classifiers, and {loaded.checkpoint.path} gives every pixel a class; leave "
            "it out, or use cvt.prune_weights"
        )
    labels, data = loaded.labels(arguments.labels), None
    if arguments.calibrate:
        data = open_calibration(arguments, loaded, arguments.batches * arguments.batch_size)
    with contextlib.ExitStack() as stack:
        if output.suffix != SUFFIX:
            stack.enter_context(making(output))
        staged = filling(output) if output.suffix != SUFFIX else replacing(output)
        file = stack.enter_context(staged)
        report_json = stack.enter_context(reporting(arguments.json))  # fails before --output is replaced
        remarks = stack.enter_context(recorded_warnings())
        smaller = _pruned(loaded.model, arguments, data)
        figures = _measure(loaded, smaller, data, arguments.batch_size)
        classes = None if data is None else data[0].dataset.classes
        size = _write(file, smaller, card_of(loaded, smaller.config, labels, classes))
        figures = figures[0], figures[1]._replace(size=size)
        given = settings(arguments, loaded, device)
        report_json(given | _as_json(loaded.model.config, smaller.config, *figures))
    stages = _stages(loaded.model.config, smaller.config)
    lines = [_heading(arguments, data), "", *stages, "", *table(*map(_column, figures))]
    if any(each.is_disturbed for each in figures):
        remarks.append(clock.DISTURBED)
    print_result(arguments, lines, [*loaded.remarks, *dict.fromkeys(remarks)])


def _check(output: Path, arguments: argparse.Namespace) -> None:
    """Raises ValueError or OSError for arguments that cannot be, before anything is read."""
    suffix = output.suffix
    is_other = suffix.lower() in _OTHER_SUFFIXES or suffix.lower() == SUFFIX != suffix
    if is_other or not arguments.output:
        raise ValueError(
            f"--output: got {arguments.output!r}, expected a name that ends with {SUFFIX}, or a directory"
        )
    is_directory = output.suffix != SUFFIX
    if is_directory and (output.is_file() or (output / BEST).exists()):
        what = "a file" if output.is_file() else f"the directory of a training, which has {BEST}"
        raise ValueError(f"--output: {arguments.output} is {what}, expected a directory for the new model")
    check_writable("--output", output, directory=is_directory)
    if arguments.saliency == "taylor" and not arguments.calibrate:
        raise ValueError("--saliency: taylor needs images with labels, expected --calibrate with it")


def _pruned(model: Any, arguments: argparse.Namespace, data: tuple[Batches, Batches] | None) -> Any:
    batches = None
    if data is not None and arguments.saliency != "magnitude":
        batches = tqdm(data[0], desc="saliency", unit="batch", leave=False, disable=None)
    fractions = {"mlp": arguments.mlp, "heads": arguments.heads}
    return prune_weights(model, **fractions, batches=batches, saliency=arguments.saliency)


def _write(path: Path, model: Any, card: ModelCard) -> int:
    """Writes a model as a file or a directory, and returns the bytes of its weights."""
    if path.suffix == SUFFIX:
        tensors = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        save_safetensors(Checkpoint(str(path), tensors, card=card), path)
        return path.stat().st_size
    size, crop_fraction = card.image_size, card.crop_fraction
    model.save_pretrained(path, labels=card.labels, image_size=size, crop_fraction=crop_fraction)
    return (path / WEIGHTS[0]).stat().st_size


# Figures --------------------------------------------------------------------------------------------------


class _Figures(NamedTuple):
    """The figures of a model; the evaluation is None without images, the size is in bytes.

    Where other work on the machine disturbed the measurement of its speed, this is rough.
    """

    evaluation: Evaluation | None
    cost: Cost
    size: int
    images_per_second: float
    is_disturbed: bool


def _measure(
    loaded: LoadedModel, smaller: Any, data: tuple[Batches, Batches] | None, batch_size: int
) -> tuple[_Figures, _Figures]:
    """Returns the figures of the model as it was and of the smaller one, whose speed is measured by turns."""
    models, size = {"before": loaded.model, "after": smaller}, loaded.image_size
    device = next(smaller.parameters()).device
    images = torch.randn(batch_size, smaller.config.in_chans, size, size, device=device)
    with torch.inference_mode():
        timed = clock.times_in_turns([partial(model, images) for model in models.values()], _ROUNDS, device)
    before, after = (
        _Figures(
            None if data is None else evaluated(model, data[1], title),
            cost(model.config, size),
            size_of(model),
            batch_size / times.median,
            times.is_disturbed,
        )
        for (title, model), times in zip(models.items(), timed, strict=True)
    )
    return before, after


# Output ---------------------------------------------------------------------------------------------------


def _heading(arguments: argparse.Namespace, data: tuple[Batches, Batches] | None) -> str:
    text = f"{arguments.output}: {arguments.checkpoint}, pruned by the "
    if data is None or arguments.saliency == "magnitude":
        text += "magnitude of its weights"
    else:
        text += f"loss of {len(data[0].dataset)} images"
    if data is None:
        return text
    return f"{text}, measured on {len(data[1].dataset)} held-out images of {arguments.calibrate}"


def _stages(before: CvTConfig, after: CvTConfig) -> list[str]:
    """Returns the lines of how many hidden units and heads each block has."""
    rows = [("stage", "hidden units", "heads")]
    counts = hidden_units(before), hidden_units(after), before.num_heads, after.num_heads
    for i, (units, units_left, heads, heads_left) in enumerate(zip(*counts, strict=True)):
        rows.append((f"{i}", f"{units} → {units_left}", f"{heads} → {heads_left}"))
    return aligned(rows, right=(1, 2))


def _column(figures: _Figures) -> dict[str, str]:
    """Returns the column of a model in the table of figures."""
    return {
        **({} if figures.evaluation is None else accuracy(figures.evaluation)),
        "parameters": f"{figures.cost.parameters / 1e6:.2f} M",
        "multiply-adds": f"{figures.cost.multiply_adds / 1e6:.2f} M",
        "size": f"{figures.size / 1e6:.2f} MB",
        "images/s": f"{figures.images_per_second:.1f}",
    }


def _as_json(before: CvTConfig, after: CvTConfig, *figures: _Figures) -> dict[str, Any]:
    """Returns the figures as numbers; the accuracy is null without images."""
    told = []
    for config, each in zip((before, after), figures, strict=True):
        accuracy = {name: getattr(each.evaluation, name, None) for name in ("top1", "top5", "loss")}
        speed = {"images_per_second": each.images_per_second, "is_disturbed": each.is_disturbed}
        sizes = {"hidden_units": hidden_units(config), "heads": config.num_heads}
        told.append(accuracy | each.cost._asdict() | {"bytes": each.size} | speed | sizes)
    images = None if figures[0].evaluation is None else figures[0].evaluation.images
    return {"held_out_images": images, "before": told[0], "after": told[1]}
