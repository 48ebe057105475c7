"""Training: steps by hand, in half precision, fused, resumed, killed, in two processes."""

import copy
import csv
import dataclasses
import itertools
import math
import os
import socket
import sys
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from cvt import create_model
from cvt.tools.datasets import ImageDataset, RandomCrop
from cvt.tools.training.recipe import DIGITS_OPTIONS, MODELS, TrainConfig, distillation_loss
from cvt.tools.training.trainer import LAST, Logs, NonFiniteLossError, Trainer, distributed, epoch_line
from cvt_kernels import graphs
from tests.checks import Terminal
from tests.processes import run_ranks
from tests.tape import FakeCapture

CLASSES = ["a", "b", "c"]
TINY = dataclasses.replace(
    MODELS["cvt_nano"], embed_dims=(8, 16), depths=(1, 1), drop_path_rate=(0.1, 0.1), num_classes=3
)
MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
PLAIN = {**DIGITS_OPTIONS, "epochs": 3, "batch_size": 8, "lr": 1e-3}


def noise(count=24, classes=CLASSES, **options):
    """Images of random pixels; the same ones whenever it is called."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    images = [Image.fromarray(image) for image in pixels]
    return ImageDataset(images, [i % 3 for i in range(count)], classes, 16, **options)


def trainer(
    output,
    config=TINY,
    teacher=None,
    resume=False,
    count=24,
    classes=CLASSES,
    val=None,
    graph=True,
    **options,
):
    torch.manual_seed(0)
    recipe = TrainConfig(**{**PLAIN, **options})
    train = noise(count, classes, random_crop=RandomCrop(recipe.min_scale, flip=recipe.flip))
    sets = train, val or noise(9, classes)
    settings = {"output": output, "teacher": teacher, "resume": resume, "graph": graph}
    return Trainer(create_model(config), *sets, recipe, **settings)


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def batch(count=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 3, (count,), generator=generator)


def parameters(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(a, b):
    """Compares nested states: tensors bit by bit, anything else by ==."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds", "images_per_second"}:
            assert_same_bits(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_same_bits(x, y)
    else:
        assert a == b


# Steps ----------------------------------------------------------------------------------------------------


def test_steps_are_those_of_a_loop_by_hand(tmp_path):
    """Three steps with label smoothing, clipping, warm-up, weight decay and EMA."""
    options = {"label_smoothing": 0.2, "clip_norm": 0.5, "weight_decay": 0.3, "ema_decay": 0.7}
    config = dataclasses.replace(TINY, drop_path_rate=(0.0, 0.0))
    ours = trainer(tmp_path, config, **options)
    model, average = copy.deepcopy(ours.model).train(), None
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "cls_token" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim <= 1 or "cls_token" in n]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    assert ours.steps_per_epoch == 3
    for step in range(3):
        images, labels = batch(seed=step)
        loss = ours.step([(images, labels)], step)
        x = (images / 255 - MEAN) / STD
        log_p = torch.log_softmax(model(x), 1)
        expected = -(0.8 * log_p[range(8), labels] + 0.2 * log_p.mean(1)).mean()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
        optimizer.zero_grad()
        expected.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert norm > 0.5
        for p in model.parameters():
            p.grad *= 0.5 / (norm + 1e-6)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 3
        optimizer.step()
        state = {k: t.detach().clone() for k, t in model.state_dict().items() if t.is_floating_point()}
        average = {k: t if average is None else 0.7 * average[k] + 0.3 * t for k, t in state.items()}
    # Adam divides by the root of tiny second moments: single weights may differ by a part of the step.
    torch.testing.assert_close(parameters(ours.model), parameters(model), rtol=1e-4, atol=2e-5)
    averaged = ours.ema.module.state_dict()
    torch.testing.assert_close({k: averaged[k] for k in average}, average, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "precision": "bf16", "ema_decay": 0.9}])
def test_graphs_change_nothing(tmp_path, monkeypatch, options):
    monkeypatch.setattr(graphs, "_CudaCapture", FakeCapture)
    monkeypatch.setattr(FakeCapture, "tapes", [])
    without = trainer(tmp_path / "without", graph=False, **options)
    without.fit()
    assert not FakeCapture.tapes
    graphed = trainer(tmp_path / "graphed", **options)
    graphed.fit()
    forward, backward, *_ = FakeCapture.tapes
    assert forward.replays == backward.replays > 2
    assert_same_bits(graphed.history, without.history)
    assert_same_bits(graphed.model.state_dict(), without.model.state_dict())


def test_accumulated_micro_batches_are_one_batch(tmp_path):
    images, labels = batch()
    config = dataclasses.replace(TINY, drop_path_rate=(0.0, 0.0))
    results = []
    for accumulate in (1, 4):
        ours = trainer(tmp_path / str(accumulate), config, accumulate=accumulate)
        ours.wrapped.train()
        for module in ours.model.modules():  # statistics are of a micro-batch
            module.train(not isinstance(module, nn.BatchNorm2d))
        chunks = zip(images.chunk(accumulate), labels.chunk(accumulate), strict=True)
        results.append((ours.step(list(chunks), 0), parameters(ours.model)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_a_student_with_all_weight_on_its_teacher_learns_from_it_alone(tmp_path, kind):
    class Teacher(nn.Module):  # as Hugging Face's models answer
        def forward(self, images):
            assert not torch.is_grad_enabled()
            return type("Output", (), {"logits": images.mean(dim=(2, 3)) * 5})

    options = {"distillation": kind, "temperature": 2.0, "distillation_weight": 0.25}
    ours = trainer(tmp_path, dataclasses.replace(TINY, drop_path_rate=(0.0, 0.0)), Teacher(), **options)
    images, labels = batch()
    x, _ = ours.augment(images, labels)
    logits = copy.deepcopy(ours.model)(x)
    distilled = distillation_loss(logits, x.mean(dim=(2, 3)) * 5, kind, 2.0)
    expected = 0.75 * F.cross_entropy(logits, labels, label_smoothing=0.1) + 0.25 * distilled
    torch.testing.assert_close(ours.step([(images, labels)], 0), expected.detach())


def test_frozen_batch_norm_keeps_its_statistics(tmp_path):
    ours = trainer(tmp_path, freeze_bn=True)
    before = {name: buffer.clone() for name, buffer in ours.model.named_buffers()}
    ours.train_epoch()
    assert_same_bits(dict(ours.model.named_buffers()), before)
    other = trainer(tmp_path / "other")
    other.train_epoch()
    assert any(not torch.equal(buffer, before[name]) for name, buffer in other.model.named_buffers())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_as_float32_does(tmp_path, precision):
    curves = []
    for chosen in ("fp32", precision):
        ours = trainer(tmp_path / chosen, precision=chosen, lr=5e-3)
        assert ours.scaler.is_enabled() == (chosen == "fp16")
        curves.append([ours.step([batch()], 3).item() for _ in range(15)])
        assert all(p.dtype == torch.float32 for p in ours.model.parameters())
    assert curves[0] != curves[1]
    assert curves[1][-1] < curves[1][0] - 0.2
    if precision == "fp16":  # its first scale is too large, so it skips a step and halves it
        assert curves[1].pop(0) == curves[1][0]
    np.testing.assert_allclose(curves[1], curves[0][: len(curves[1])], atol=0.01)


# Progress -------------------------------------------------------------------------------------------------


def test_a_library_prints_and_reports_what_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    ours, reported = trainer(tmp_path, epochs=2), []
    ours.fit(report=lambda row: reported.append((row, (tmp_path / LAST).exists())))
    assert sys.stderr.getvalue() == capsys.readouterr().out == ""
    assert reported == [(row, True) for row in ours.history]
    assert ours.train_batches.dataset.epoch == 1  # the second has an order and crops of its own
    assert set(ours.history[0]) == set(rows(tmp_path / "log.csv")[0])
    assert all(24 / row["seconds"] < row["images_per_second"] < math.inf for row in ours.history)
    shown = trainer(tmp_path / "shown", epochs=2)
    shown.fit(progress=True)
    assert f"loss={shown.history[1]['train_loss']:.4f}" in sys.stderr.getvalue()


def test_the_line_of_an_epoch():
    row = {"epoch": 7, "lr": 1e-3, "train_loss": 0.55555, "val_loss": 0.25, "top1": 0.9125, "top5": 1.0}
    row |= {"images_per_second": 1234.5, "seconds": 61.0}
    assert epoch_line(row, 100) == (
        "epoch   7/100  loss 0.5555  validation loss 0.2500  top-1  91.25%  1234 images/s  1:34:33 left"
    )


# Checkpoints ----------------------------------------------------------------------------------------------


EVERYTHING = {"mixup": 0.8, "cutmix": 1.0, "random_erasing": 0.5, "ema_decay": 0.9, "accumulate": 2}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Returns the directory of a run of three epochs with everything random."""
    output = tmp_path_factory.mktemp("uninterrupted")
    trainer(output, **EVERYTHING).fit()
    return output


def test_a_resumed_run_has_the_same_bits(uninterrupted, tmp_path):
    for interruption in range(2):
        ours = trainer(tmp_path, resume=interruption > 0, **EVERYTHING)
        assert ours.epoch == interruption
        steps = [ours.step] * 4  # of six, so that the next one raises
        ours.step = lambda *args, steps=steps: steps.pop()(*args)
        with pytest.raises(IndexError):
            ours.fit()
    trainer(tmp_path, resume=True, **EVERYTHING).fit()
    for name in (LAST, "best.pth"):
        states = [torch.load(path / name, weights_only=True) for path in (uninterrupted, tmp_path)]
        assert_same_bits(*states)
    logs = [rows(path / "log.csv") for path in (uninterrupted, tmp_path)]
    assert [row["epoch"] for row in logs[0]] == ["1", "2", "3"]
    assert [row["train_loss"] for row in logs[0]] == [row["train_loss"] for row in logs[1]]


def test_resume_refuses_what_was_trained_otherwise(uninterrupted, tmp_path):
    for options, message in (
        ({"lr": 1e-2, "clip_norm": 2.0}, "trained with lr 0.001, now 0.01; clip_norm 1.0, now 2.0$"),
        ({"count": 27}, "trained with images 24, now 27$"),
        ({"config": dataclasses.replace(TINY, mlp_ratio=1.0)}, r"mlp_ratio \(2.0, 2.0\), now \(1.0, 1.0\)$"),
        ({"classes": ["a", "b", "z"]}, r"labels \['a', 'b', 'c'\], now \['a', 'b', 'z'\]$"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(uninterrupted, resume=True, **EVERYTHING, **options)
    with pytest.raises(ValueError, match=r"output: .*last.pth exists; go on with --resume"):
        trainer(uninterrupted)
    with pytest.raises(FileNotFoundError, match=r"resume: .*last.pth does not exist"):
        trainer(tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()


def test_the_optimizers_settings_are_those_of_the_recipe(tmp_path):
    """Whatever the file says."""
    recipe = {"epochs": 1, "warmup_epochs": 0}
    trainer(tmp_path, **recipe).fit()
    state = torch.load(tmp_path / LAST, weights_only=True)
    state["optimizer"]["param_groups"][0] |= {"betas": "x", "amsgrad": True, "lr": None}
    torch.save(state, tmp_path / LAST)
    resumed = trainer(tmp_path, resume=True, **recipe)
    assert resumed.epoch == 1
    group = resumed.optimizer.param_groups[0]
    assert (group["betas"], group["amsgrad"]) == ((0.9, 0.999), False)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path):
    ours = trainer(tmp_path)
    step, calls = ours.step, itertools.count(1)
    ours.step = lambda *args: step(*args) * (math.nan if next(calls) == 5 else 1)
    with pytest.raises(NonFiniteLossError, match=r"^loss is nan at step 4; .*last.pth is of epoch 1$"):
        ours.fit()
    last, best = (torch.load(tmp_path / name, weights_only=True) for name in (LAST, "best.pth"))
    assert last["epoch"] == best["epoch"] == 1


def break_weights(trainer):
    def breaking(*args, step=trainer.step):
        loss = step(*args)
        nn.init.constant_(trainer.model.head.bias, math.nan)
        return loss

    trainer.steps_per_epoch, trainer.step = 1, breaking


@pytest.mark.parametrize("change", [break_weights, lambda trainer: setattr(trainer, "val_batches", [])])
def test_a_validation_loss_that_is_not_finite_stops(tmp_path, change):
    """After a last step that broke the weights, or without an image that can be used."""
    ours = trainer(tmp_path)
    change(ours)
    with pytest.raises(NonFiniteLossError, match=r"validation loss is nan at step [13]; nothing was saved$"):
        ours.fit()
    assert not (tmp_path / LAST).exists()


# Bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 9, "accumulate": 2}, "batch_size: got 9, expected a multiple of 2, 2 micro-batches"),
        ({"batch_size": 32}, "batch_size: 32 images at a time are more than the data set has, 24"),
        ({"batch_size": 32, "accumulate": 2}, "batch_size: 32 is more than the 24 images"),
        ({"distillation": "soft"}, "teacher: expected one with distillation soft or hard"),
        ({"teacher": nn.Identity()}, "teacher: expected one with distillation soft or hard"),
        ({"val": noise(9, ["a", "b", "z"])}, "data: train and val have different classes: c, z"),
    ],
)
def test_arguments_that_contradict_each_other(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_logs_need_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"is not installed; .*'\.\[train\]'"):
        trainer(tmp_path)


def test_the_averaged_weights_are_evaluated(tmp_path):
    ours = trainer(tmp_path, ema_decay=0.5)
    ours.step([batch()], 0)
    expected = ours.evaluate()
    nn.init.constant_(ours.model.head.bias, math.nan)
    assert ours.evaluate() == expected


def test_later_rows_may_have_more_columns(tmp_path):
    Logs(tmp_path, 0).epoch(2, [{"epoch": 1, "top1": 0.5}, {"epoch": 2, "top1": 0.75, "seconds": 3.0}])
    assert (tmp_path / "log.csv").read_text() == "epoch,top1,seconds\n1,0.5,\n2,0.75,3.0\n"


# Two processes --------------------------------------------------------------------------------------------


JOINED = {"batch_size": 8, "epochs": 2, "freeze_bn": False, "lr": 2e-3}
RUNS = {"ddp": {}, "accumulated": {"accumulate": 2}}


def _process(rank, port, directory):
    torch.set_num_threads(1)
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    config = dataclasses.replace(TINY, drop_path_rate=(0.0, 0.0))
    with warnings.catch_warnings(), distributed(torch.device("cpu")):
        warnings.simplefilter("ignore")  # PyTorch's own deprecations
        with pytest.raises(
            ValueError, match=r"batch_size: got 1, expected a multiple of 2, .* of 2 processes"
        ):
            trainer(f"{directory}/odd", config, batch_size=1)
        for name, options in RUNS.items():
            ours = trainer(f"{directory}/{name}", config, **{**JOINED, **options})
            convs = [m for m in ours.model.modules() if isinstance(m, nn.SyncBatchNorm)]
            assert len(convs) == 6
            reported = []
            history = ours.fit(report=reported.append)
            assert reported == ([] if rank else history)


@pytest.mark.slow
def test_two_processes_learn_what_one_does_from_the_joined_batch(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(_process, port, str(tmp_path))
    config = dataclasses.replace(TINY, drop_path_rate=(0.0, 0.0))
    for name, options in RUNS.items():
        alone = trainer(tmp_path / f"{name} alone", config, **{**JOINED, **options})
        expected = alone.fit()
        state = torch.load(tmp_path / name / LAST, weights_only=True)
        for row, other in zip(state["history"], expected, strict=True):
            for key in ("train_loss", "val_loss", "top1", "top5"):
                assert row[key] == pytest.approx(other[key], rel=1e-4), (name, key)
        # Adam's first steps are as large for tiny gradients as for others: rounding may turn one of them.
        torch.testing.assert_close(state["model"], dict(alone.model.state_dict()), rtol=1e-3, atol=2e-4)
