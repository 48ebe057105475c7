"""``cvt prune``: removal of a model's least important hidden units and heads, with the loss of accuracy."""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from typing import Any, get_args

import torch
from tqdm import tqdm

from cvt.config import CvTConfig
from cvt.weight_pruning import Saliency, hidden_units, prune_weights, pruned_config, why_unprunable
from cvt_kernels.messages import aligned
from cvt_kernels.tuning import clock

from ..datasets import Batches
from ..evaluation import cost
from . import common, smaller
from .paths import staged

_ROUNDS = 10  # of the measurement of speed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    smaller.add_shared_arguments(parser, "accuracy, size and speed before and after", calibrate=False)
    for name, what in (("mlp", "hidden units of every MLP"), ("heads", "attention heads of every block")):
        text = f"fraction of the {what} to remove"
        common.option(parser, f"--{name}", text, type=float, default=0.0, metavar="FRACTION")
    text = (
        "importance score: size of the weights (magnitude), or estimated change of the loss (taylor) "
        "(default: taylor with --calibrate, else magnitude)"
    )
    common.option(parser, "--saliency", text, choices=get_args(Saliency))
    common.option(parser, "--batches", "most batches to calibrate with", type=common.positive_int, default=8)
    parser.set_defaults(run=_prune)


def _prune(arguments: argparse.Namespace) -> None:
    smaller.check_output(arguments.output)
    if arguments.saliency == "taylor" and not arguments.calibrate:
        raise ValueError("--saliency: taylor needs images with labels, expected --calibrate with it")
    loaded = common.load_model(arguments)
    model, config = loaded.model, loaded.model.config
    if (why_not := why_unprunable(model)) is not None:
        raise ValueError(f"--checkpoint: {loaded.checkpoint.path} {why_not}")
    fractions = {"mlp": arguments.mlp, "heads": arguments.heads}
    with common.naming_options(*fractions):  # before the long run
        pruned_config(config, **fractions)
    if arguments.calibrate and config.head != "classify":
        raise ValueError(
            f"--calibrate: is for classifiers, and {loaded.checkpoint.path} gives every pixel a class; leave "
            "it out, or use cvt.prune_weights"
        )
    labels, data = loaded.labels(arguments.labels), None
    if arguments.calibrate:
        data = common.open_calibration(arguments, loaded, arguments.batches * arguments.batch_size)
    with staged(arguments) as (file, report_json):
        batches = None
        if data is not None and arguments.saliency != "magnitude":
            batches = tqdm(data[0], desc="saliency", unit="batch", leave=False, disable=None)
        pruned = prune_weights(model, **fractions, batches=batches, saliency=arguments.saliency)
        before, after = _measure(loaded, pruned, data, arguments.batch_size)
        classes = None if data is None else data[0].dataset.classes
        card = smaller.card_of(loaded, pruned.config, labels, classes)
        after["bytes"] = smaller.write(file, pruned.state_dict(), card)
        held_out = None if data is None else len(data[1].dataset)
        given = smaller.settings(arguments, loaded)
        report_json(given | {"held_out_images": held_out, "before": before, "after": after})
    heading = f"{arguments.output}: {arguments.checkpoint}, pruned by the "
    if data is None or batches is None:
        heading += "magnitude of its weights"
    else:
        heading += f"loss of {len(data[0].dataset)} images"
    if data is not None:
        heading += f", measured on {held_out} held-out images of {arguments.calibrate}"
    if before["is_disturbed"] or after["is_disturbed"]:
        warnings.warn(clock.DISTURBED, stacklevel=1)
    lines = [heading, "", *_stages(config, pruned.config), "", *smaller.table(before, after)]
    common.print_result(arguments, lines)


def _measure(
    loaded: common.LoadedModel, pruned: Any, data: tuple[Batches, Batches] | None, batch_size: int
) -> list[dict[str, Any]]:
    """Returns the figures of the model as it was and of the smaller one, whose speed is measured by turns."""
    models, size = {"before": loaded.model, "after": pruned}, loaded.image_size
    images = torch.randn(batch_size, pruned.config.in_chans, size, size, device=loaded.device)
    runs = [partial(model, images) for model in models.values()]
    with torch.inference_mode():
        timed = clock.times_in_turns(runs, _ROUNDS, loaded.device)
    return [
        {
            **smaller.accuracy(None if data is None else smaller.evaluated(model, data[1], title)),
            **cost(model.config, size)._asdict(),
            "bytes": smaller.size_of(model),
            "images_per_second": batch_size / times.median,
            "is_disturbed": times.is_disturbed,
            "hidden_units": hidden_units(model.config),
            "heads": model.config.num_heads,
        }
        for (title, model), times in zip(models.items(), timed, strict=True)
    ]


def _stages(before: CvTConfig, after: CvTConfig) -> list[str]:
    """Returns the lines of how many hidden units and heads each block has."""
    rows = [("stage", "hidden units", "heads")]
    counts = hidden_units(before), hidden_units(after), before.num_heads, after.num_heads
    for i, (units, units_left, heads, heads_left) in enumerate(zip(*counts, strict=True)):
        rows.append((f"{i}", f"{units} → {units_left}", f"{heads} → {heads_left}"))
    return aligned(rows, right=(1, 2))
