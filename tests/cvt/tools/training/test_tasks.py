"""Training of a segmenter: resumed, refused, in two processes."""

import csv
import dataclasses
import socket

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from cvt import create_model
from cvt.tools.datasets import Batches, RandomCrop
from cvt.tools.evaluation import add_up_pixels, answers
from cvt.tools.label_maps import open_label_maps
from cvt.tools.training.recipe import MODELS, SEGMENT_OPTIONS, TrainConfig
from cvt.tools.training.trainer import LAST, Trainer, epoch_line
from tests.cvt.tools.training.test_trainer import assert_same_bits
from tests.processes import run_ranks

CPU = torch.device("cpu")
TINY = dataclasses.replace(
    MODELS["cvt_nano"], embed_dims=(8, 16), depths=(1, 1), head="segment", decoder_dim=8, num_classes=3
)


def trainer(folder, output, resume=False, config=TINY, image_size=16, **options):
    torch.manual_seed(0)
    settings = {"epochs": 3, "batch_size": 4, "lr": 1e-3, "warmup_epochs": 1.0, "ema_decay": 0.5}
    recipe = TrainConfig(**{**SEGMENT_OPTIONS, **settings, "color_jitter": 0.0, **options})
    crop = RandomCrop(recipe.min_scale, flip=recipe.flip)
    sets = (
        open_label_maps(folder, "train", image_size, random_crop=crop),
        open_label_maps(folder, "val", image_size),
    )
    return Trainer(create_model(config), *sets, recipe, output=output, resume=resume)


def test_figures_in_the_log_and_the_best_weights(label_maps, tmp_path):
    ours = trainer(label_maps, tmp_path)
    evaluate, scores = ours.evaluate, iter([0.3, 0.5, 0.4])
    ours.evaluate = lambda: {**evaluate(), "miou": next(scores)}
    history = ours.fit()
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    columns = ["val_loss", "miou", "pixel_accuracy", "iou/class 0", "iou/class 1", "iou/class 2"]
    assert list(rows[0]) == ["epoch", "lr", "train_loss", *columns, "images_per_second", "seconds"]
    best = torch.load(tmp_path / "best.pth", weights_only=True)
    assert (best["epoch"], best["metrics"]["miou"]) == (2, 0.5)
    assert "  mIoU  40.00%  " in epoch_line(history[-1], 3)


def test_images_without_labels_stop_the_training(label_maps, tmp_path):
    for file in (label_maps / "val" / "labels").iterdir():
        Image.new("L", (72, 48), 255).save(file)
    with pytest.raises(ValueError, match="data: the validation images have no labeled pixels, expected"):
        trainer(label_maps, tmp_path / "run", epochs=1, warmup_epochs=0.5).fit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": 0.8}, "mixup: got 0.8, expected 0 for head='segment'"),
        ({"cutmix": 1.0}, "cutmix: got 1.0, expected 0"),
        ({"rand_augment": 9}, "rand_augment: got 9, expected 0"),
        ({"random_erasing": 0.25}, "random_erasing: got 0.25, expected 0"),
        ({"distillation": "soft"}, "distillation: got soft, expected none"),
    ],
)
def test_what_makes_no_sense_for_the_head(label_maps, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(label_maps, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_resumed_training_has_the_same_bits(label_maps, tmp_path):
    trainer(label_maps, tmp_path / "whole").fit()
    stopped = trainer(label_maps, tmp_path / "stopped")
    steps = [stopped.step] * 3  # two in each of three epochs
    stopped.step = lambda *args: steps.pop()(*args)
    with pytest.raises(IndexError):
        stopped.fit()
    resumed = trainer(label_maps, tmp_path / "stopped", resume=True)
    assert resumed.epoch == 1
    resumed.fit()
    for name in (LAST, "best.pth"):
        states = (torch.load(tmp_path / run / name, weights_only=True) for run in ("whole", "stopped"))
        assert_same_bits(*states)


def _join(rank, port, folder, output):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    trainer(folder, output, epochs=1, warmup_epochs=0.5, flip=0.0, min_scale=1.0, ema_decay=0.0).fit()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_add_up_their_pixels(label_maps, tmp_path):
    """Three images of validation, so that the processes have two and one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(_join, port, str(label_maps), str(tmp_path / "run"))
    state = torch.load(tmp_path / "run" / LAST, weights_only=True)
    model = create_model(TINY).eval()
    model.load_state_dict(state["model"])
    batches = Batches(open_label_maps(label_maps, "val", 16), 3)
    sums = add_up_pixels(answers(model, batches, CPU), CPU, 3)
    (row,) = state["history"]
    assert row["miou"] == pytest.approx(sums.miou, rel=1e-6)
    assert row["pixel_accuracy"] == sums.pixel_accuracy
    assert row["val_loss"] == pytest.approx(sums.loss, rel=1e-5)
