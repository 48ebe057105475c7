"""Measures variants of CvT that no public model has, each beside the plain model in the same run.

``python -m benchmarks.variants FILE`` writes JSON; ``--sections`` chooses some of it. A section is a function
of ``tiny`` (a smoke test) in :data:`SECTIONS`. It returns rows: a value by the name of its column, which says
the unit (``"images/s"``, ``"multiply-adds, G"``, ``"top-1, %"``). A value is a number, a text, or None where
there is none. Consecutive rows with the same columns are a table of docs/results.md, in this order and as
they are, so ratios and medians are made here. What is set beside one another is timed by :func:`speeds`, in
turns. Models have random weights unless the section says otherwise; all sections together take at most eight
minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cvt_kernels as ck
from cvt import PRESETS, create_model, prune_weights
from cvt.factory import randomize
from cvt.files import replacing, write_json
from cvt.model import CvT
from cvt.tools.datasets import Batches, RandomCrop, open_dataset
from cvt.tools.evaluation import TokenCounter, cost, evaluate, evaluate_pixels
from cvt.tools.label_maps import open_label_maps, save_digit_scenes
from cvt.tools.training.recipe import DIGITS_OPTIONS, MODELS, SEGMENT_OPTIONS, TrainConfig
from cvt.tools.training.trainer import Trainer
from cvt.tools.weight_pruning import pruned_config
from cvt_kernels.autotune import clock
from cvt_kernels.records import PositionBias

from . import lab

SCHEMA, VERSION = "benchmarks variants", 1

Row = dict[str, str | float | None]


def main() -> int:
    """Measures, and writes the file after each section; returns 1 if one raises, which costs no other."""
    parser = argparse.ArgumentParser(prog="benchmarks.variants", description=__doc__)
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("--tiny", action="store_true", help="shapes of a smoke test")
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    options = parser.parse_args()
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "device": lab.device_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "sections": {},
        "failures": {},
    }
    for name in options.sections:
        try:
            report["sections"][name] = SECTIONS[name](options.tiny)
        except Exception as error:
            traceback.print_exc()
            report["failures"][name] = f"{type(error).__name__}: {error}"
        with replacing(options.path) as file:
            write_json(file, report, indent=1)
    return int(bool(report["failures"]))


def speeds(calls: Mapping[Any, Callable[[], Any]], batch: int, tiny: bool) -> dict[Any, float]:
    """Returns the images per second of calls that are timed in turns, by the median of their runs."""
    timed = clock.seconds_in_turns(list(calls.values()), 2 if tiny else 10, lab.DEVICE)
    return {name: batch / statistics.median(seconds) for name, seconds in zip(calls, timed, strict=True)}


def serving(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    """Returns a call of a model whose kernels have been tuned."""

    def call() -> Tensor:
        with torch.inference_mode():
            return model(images)

    call()
    return call


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns random numbers that are the same in every process."""
    generator = torch.Generator(lab.DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=lab.DEVICE, dtype=dtype)


def plain_and_frozen(models: Mapping[Any, nn.Module], images: Tensor, tiny: bool) -> dict[Any, Row]:
    """Returns the columns of speed of each model, as it is and frozen for serving, beside the first one's."""
    calls = {}
    for name, model in models.items():
        frozen = ck.accelerate(copy.deepcopy(model).to(lab.DEVICE), freeze=True)
        calls["plain", name] = serving(model.to(lab.DEVICE), images)
        calls["frozen", name] = serving(frozen, images)
    rate = speeds(calls, len(images), tiny)
    first = next(iter(models))
    return {
        name: {
            column: value
            for kind in ("plain", "frozen")
            for column, value in (
                (f"{kind}, images/s", rate[kind, name]),
                (f"{kind}, × as fast", rate[kind, name] / rate[kind, first]),
            )
        }
        for name in models
    }


def batches(tiny: bool) -> tuple[int, ...]:
    """Returns the batch sizes that are worth measuring."""
    return (2,) if tiny else (256,) if lab.DEVICE == "cuda" else (1, 8)


def random_model(model: Any = "cvt_13", **settings: Any) -> CvT:
    """Returns a model with random weights, in evaluation."""
    made = create_model(model, **settings).eval()
    randomize(made)
    return made


def random_images(batch: int, tiny: bool) -> Tensor:
    """Returns images of noise, 224×224."""
    size = 64 if tiny else 224
    return randn(batch, 3, size, size, dtype=torch.float32, seed=0)


# Token pruning --------------------------------------------------------------------------------------------

KEEPS: tuple[Any, ...] = (1.0, 0.9, 0.7, 0.5, "entropy")
PIXELS, EPOCHS = 16, 12  # of digits; of the model that learns them here
FINE_TUNED = 0.7  # the fraction that models of digits are trained for


def token_pruning(tiny: bool) -> list[Row]:
    """Returns the cost and speed of CvT-13 for each fraction, and the accuracy of the model of digits."""
    plain = random_model()
    rows = []
    for batch in batches(tiny):
        rows += speeds_by_keep(plain, random_images(batch, tiny), tiny)
    return [*rows, *digits_by_keep(tiny)]


def speeds_by_keep(plain: nn.Module, images: Tensor, tiny: bool) -> list[Row]:
    """Returns a row for each fraction, of the model as it is and frozen for serving."""
    models, figures = {}, {}
    for keep in KEEPS:
        models[keep] = model = create_model("cvt_13", token_keep=keep).eval()
        model.load_state_dict(plain.state_dict())
        model.to(lab.DEVICE)
        with TokenCounter(model) as tokens, torch.inference_mode():
            model(images)
        figures[keep] = cost(model.config, images.shape[2], tokens.means()).multiply_adds / 1e9
    columns = plain_and_frozen(models, images, tiny)
    return [
        {
            "batch": len(images),
            "keep": str(keep),
            "multiply-adds, G": figures[keep],
            "of the plain model's": figures[keep] / figures[1.0],
            **columns[keep],
        }
        for keep in KEEPS
    ]


def digits_by_keep(tiny: bool) -> list[Row]:
    """Returns the accuracy on digits of models whole, with tokens dropped, and trained for that.

    In the model of the package tokens can drop out before its last block only, where a class token does not
    see what became of the others. So a deeper one is trained here, with a last stage of 4 blocks on 8×8
    tokens.
    """
    shipped = create_model(checkpoint="digits")
    rows = [fine_tuned("digits (cvt_nano)", shipped, 1 if tiny else 5)]
    if not tiny:
        torch.manual_seed(0)
        config = dataclasses.replace(MODELS["cvt_nano"], depths=(1, 4), patch_strides=(2, 1), num_classes=10)
        deeper = create_model(config)
        train_on_digits(deeper, EPOCHS)
        rows.append(fine_tuned("cvt_nano with 4 blocks on 8×8 tokens", deeper, 5))
    return rows


def fine_tuned(name: str, model: CvT, epochs: int) -> Row:
    """Returns the accuracy of a model whole, with tokens dropped, and after epochs of training so."""
    whole = cost(model.config, PIXELS).multiply_adds
    before = accuracy(model)
    model.set_token_keep(FINE_TUNED)
    dropped = accuracy(model)
    train_on_digits(model, epochs, lr=1e-4)
    return {
        "model": name,
        "keep": str(FINE_TUNED),
        "multiply-adds": f"{cost(model.config, PIXELS).multiply_adds / whole:.1%}",
        "whole, top-1, %": before,
        "dropped, top-1, %": dropped,
        f"after {epochs} epochs, top-1, %": accuracy(model),
    }


def train_on_digits(model: CvT, epochs: int, **options: Any) -> None:
    """Trains a model on scanned digits; it is left with the weights of the last epoch."""
    config = TrainConfig(
        **DIGITS_OPTIONS | {"epochs": epochs, "warmup_epochs": min(1.0, epochs / 2)} | options
    )
    crop = RandomCrop(config.min_scale, flip=config.flip)
    sets = open_dataset("digits", "train", PIXELS, random_crop=crop), open_dataset("digits", "val", PIXELS)
    with tempfile.TemporaryDirectory() as scratch:
        Trainer(model, *sets, config, output=scratch, device=lab.DEVICE).fit()


def accuracy(model: CvT) -> float:
    """Returns the percentage of the held-out digits that a model recognizes."""
    held_out = open_dataset("digits", "val", PIXELS)
    return 100 * evaluate(model.to(lab.DEVICE), Batches(held_out, 120)).top1


# Position bias --------------------------------------------------------------------------------------------

#: The side of the grid, class tokens and heads of CvT-13's stages at 224×224.
_STAGES = ((56, 0, 1), (28, 0, 3), (14, 1, 6))


def position_bias(tiny: bool) -> list[Row]:
    """Returns the speed of CvT-13 with and without the bias, and of its attention alone."""
    rows: list[Row] = []
    for batch in batches(tiny):
        images = random_images(batch, tiny)
        models = {"plain": random_model(), "with bias": random_model(position_bias=True)}
        calls = {name: serving(m.to(lab.DEVICE), images) for name, m in models.items()}
        rate = speeds(calls, batch, tiny)
        rows.append(
            {"batch": batch, **{f"{name}, images/s": value for name, value in rate.items()},
             "with bias, × as fast": rate["with bias"] / rate["plain"]}
        )  # fmt: skip
    return [*rows, *(attention_by_position(stage, tiny) for stage in range(1, len(_STAGES) + 1))]


def attention_by_position(stage: int, tiny: bool) -> Row:
    """Returns the time of one stage's attention: plain, with the table, and by PyTorch with a mask of it."""
    side, class_tokens, heads = _STAGES[stage - 1]
    batch = 1 if tiny else 8
    key_side = -(-side // 2)
    queries, keys = (n * n + class_tokens for n in (side, key_side))
    q, k, v = (
        randn(batch, n, heads, 64, dtype=torch.float32, seed=i) for i, n in enumerate((queries, keys, keys))
    )
    offsets = side + 2 * (key_side - 1)
    table = randn(heads, offsets, offsets, dtype=torch.float32, seed=3)
    bias = PositionBias(table, (side, side), (key_side, key_side), stride=2)

    def call(position: PositionBias | None, *backends: ck.Backend) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            with torch.inference_mode(), ck.use_backend(*backends):
                return ck.attention(q, k, v, scale=(64 * heads) ** -0.5, position=position)

        attend()
        return attend

    ours: ck.Backend = "triton" if lab.DEVICE == "cuda" else "cpu"
    rate = speeds(
        {"plain": call(None, ours), "with the table": call(bias, ours),
         "sdpa with a mask": call(bias, "sdpa")}, batch, tiny,
    )  # fmt: skip
    return {"stage": stage, **{f"{name}, images/s": value for name, value in rate.items()}}


# Weight pruning -------------------------------------------------------------------------------------------

#: The fractions of hidden units and of heads that are removed, first none.
REMOVED = ((0.0, 0.0), (0.25, 0.0), (0.5, 0.0), (0.25, 0.34))


def weight_pruning(tiny: bool) -> list[Row]:
    """Returns the cost and speed of CvT-13 for fractions that are removed, and the accuracy of digits."""
    rows = []
    for batch in batches(tiny):
        rows += speeds_by_removed(random_images(batch, tiny), tiny)
    for mlp, heads, epochs, lr in ((0.25, 0.0, 5, 1e-4), (0.25, 0.5, 10, 5e-4)):
        rows.append(pruned_digits(mlp, heads, 1 if tiny else epochs, lr))
    return rows


def speeds_by_removed(images: Tensor, tiny: bool) -> list[Row]:
    """Returns a row for each pair of fractions, of the model as it is and frozen for serving."""
    models, costs = {}, {}
    for removed in REMOVED:
        config = PRESETS["cvt_13"]
        if any(removed):
            config = pruned_config(config, mlp=removed[0], heads=removed[1])
        models[removed] = random_model(config)
        costs[removed] = cost(config, images.shape[2])
    columns = plain_and_frozen(models, images, tiny)
    return [
        {
            "batch": len(images),
            "hidden units removed": f"{removed[0]:.0%}",
            "heads removed": f"{removed[1]:.0%}",
            "parameters, M": costs[removed].parameters / 1e6,
            "multiply-adds, G": costs[removed].multiply_adds / 1e9,
            **columns[removed],
        }
        for removed in REMOVED
    ]


def pruned_digits(mlp: float, heads: float, epochs: int, lr: float) -> Row:
    """Returns the accuracy of the model of digits whole, pruned, and pruned and trained for some epochs."""
    whole = create_model(checkpoint="digits")
    data = Batches(open_dataset("digits", "train", PIXELS), 64)
    smaller = prune_weights(whole, mlp=mlp, heads=heads, batches=data)
    pruned = accuracy(smaller)
    train_on_digits(smaller, epochs, lr=lr)
    costs = [cost(model.config, PIXELS).multiply_adds for model in (smaller, whole)]
    return {
        "model": "digits (cvt_nano)",
        "hidden units removed": f"{mlp:.0%}",
        "heads removed": f"{heads:.0%}",
        "multiply-adds": f"{costs[0] / costs[1]:.1%}",
        "whole, top-1, %": accuracy(whole),
        "pruned, top-1, %": pruned,
        "epochs of training": epochs,
        "trained, top-1, %": accuracy(smaller),
    }


# Hybrid mixing --------------------------------------------------------------------------------------------


def hybrid(tiny: bool) -> list[Row]:
    """Returns the cost and speed of CvT-13 with plain and with hybrid mixing."""
    images = random_images(batches(tiny)[-1], tiny)
    models = {mixing: random_model(mixing=mixing) for mixing in ("plain", "hybrid")}
    calls = {name: serving(model.to(lab.DEVICE), images) for name, model in models.items()}
    rate = speeds(calls, len(images), tiny)
    return [
        {
            "batch": len(images),
            "mixing": name,
            "multiply-adds, G": cost(model.config, images.shape[2]).multiply_adds / 1e9,
            "images/s": rate[name],
            "× as fast": rate[name] / rate["plain"],
        }
        for name, model in models.items()
    ]


# Segmentation ---------------------------------------------------------------------------------------------

SCENE_PIXELS, SCENE_EPOCHS = 48, 12
DECODER_DIM = 64  # of the model of scenes


def segmentation(tiny: bool) -> list[Row]:
    """Returns what the head costs a CvT-13, and what a small model learns of scenes."""
    return [*cost_of_the_head(tiny), scenes_learned(tiny)]


def cost_of_the_head(tiny: bool) -> list[Row]:
    """Returns a row for CvT-13 without a head, with one for pixels, and that frozen for serving."""
    model = random_model(head="segment", num_classes=150)
    batch = 2 if tiny else 4
    images = random_images(batch, tiny).to(lab.DEVICE)
    models = {
        "stages alone": create_model("cvt_13", features_only=True).eval(),
        "segmenter": model,
        "frozen": ck.accelerate(copy.deepcopy(model).to(lab.DEVICE), freeze=True),
    }
    calls = {name: serving(each.to(lab.DEVICE), images) for name, each in models.items()}
    rate = speeds(calls, batch, tiny)
    whole, size = cost(model.config, images.shape[2]).multiply_adds, images.shape[2]
    without = cost(create_model("cvt_13", num_classes=0).config, size).multiply_adds
    return [
        {
            "CvT-13, 150 classes": name,
            "batch": batch,
            "multiply-adds, G": (without if name == "stages alone" else whole) / 1e9,
            "images/s": rate[name],
        }
        for name in models
    ]


def scenes_learned(tiny: bool) -> Row:
    """Returns the mean intersection over union of a cvt_nano that learned to tell ink from photographs."""
    epochs, size = (1, 32) if tiny else (SCENE_EPOCHS, SCENE_PIXELS)
    options = {"epochs": epochs, "batch_size": 32, "lr": 4e-3, "warmup_epochs": min(1.0, epochs / 2)}
    config = TrainConfig(**SEGMENT_OPTIONS | options | {"min_scale": 0.5, "flip": 0.0, "clip_norm": 1.0})
    torch.manual_seed(0)
    model = create_model(MODELS["cvt_nano"], head="segment", decoder_dim=DECODER_DIM, num_classes=2)
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {"train": 64, "val": 32} if tiny else {"train": 256, "val": 128}
        folder = save_digit_scenes(scratch, **sizes, image_size=size, apart=False)
        crop = RandomCrop(config.min_scale, flip=config.flip)
        held_out = open_label_maps(folder, "val", size)
        sets = open_label_maps(folder, "train", size, random_crop=crop), held_out
        Trainer(model, *sets, config, output=folder / "run", device=lab.DEVICE).fit()
        figures = evaluate_pixels(model, Batches(held_out, 32))
    background = figures.sums.confusion[0].sum() / figures.sums.confusion.sum()
    return {
        "model": "cvt_nano, ink on photographs",
        "epochs": epochs,
        "mIoU, %": 100 * figures.miou,
        "pixel accuracy, %": 100 * figures.pixel_accuracy,
        "mIoU of the photograph everywhere, %": 100 * background.item() / 2,
    }


# Sections -------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[bool], list[Row]]] = {
    "token_pruning": token_pruning,
    "weight_pruning": weight_pruning,
    "hybrid": hybrid,
    "position_bias": position_bias,
    "segmentation": segmentation,
}

if __name__ == "__main__":
    sys.exit(main())
