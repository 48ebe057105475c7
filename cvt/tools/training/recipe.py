"""The training recipe: its options, its formulas, and the losses and metrics of the tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from cvt.config import MOST_IMAGES, MOST_SEED, PRESETS, CvTConfig, Head, as_number
from cvt.model import Stages
from cvt.segmentation import pixel_loss
from cvt_kernels.checks import check_choice

from ..evaluation import Answers, Sums, add_up, add_up_pixels

#: The dtype to which autocast casts, None for no autocast.
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DISTILLATIONS = ("none", "soft", "hard")

_NANO: dict[str, Any] = {"embed_dims": (32, 64), "depths": (1, 2), "num_heads": (1, 2), "mlp_ratio": 2.0}
_NANO |= {"patch_sizes": 3, "patch_strides": 2, "patch_paddings": 1, "qkv_bias": True, "kernel_size": 3}
_NANO |= {"stride_q": 1, "stride_kv": (2, 1), "cls_token": (False, True)}
_NANO |= dict.fromkeys(("drop_rate", "attn_drop_rate", "drop_path_rate"), 0.0)
#: The models that can be trained by name: the paper's, and a small one for digits.
MODELS = {**PRESETS, "cvt_nano": CvTConfig(**_NANO)}


def _option(default: Any, help: str, least: float = 0, below: float = math.inf) -> Any:  # noqa: A002
    return dataclasses.field(default=default, metadata={"help": help, "range": (least, below)})


@dataclass(frozen=True)
class TrainConfig:
    """The training recipe; the defaults are for ImageNet from scratch.

    TypeError is raised for a value of the wrong type, ValueError for one out of range or a contradiction.
    """

    epochs: int = _option(300, "passes over the training set", 1, 10**6 + 1)
    batch_size: int = _option(256, "images per step, over processes and micro-batches", 1, MOST_IMAGES + 1)
    accumulate: int = _option(1, "micro-batches per step (gradient accumulation)", 1, MOST_IMAGES + 1)
    lr: float = _option(2.5e-4, "peak learning rate, after warm-up")
    min_lr: float = _option(1e-5, "final learning rate of the cosine schedule")
    warmup_epochs: float = _option(5.0, "epochs of linear warm-up; in a run no longer than that, half of it")
    weight_decay: float = _option(0.05, "weight decay; not for vectors, class tokens and position_bias")
    layer_decay: float = _option(1.0, "learning-rate factor per layer below the head", 1e-6, 1 + 1e-9)
    clip_norm: float = _option(0.0, "clip gradients to this norm; 0 for no clipping")
    label_smoothing: float = _option(0.1, "fraction of each target spread over all classes", 0, 1)
    mixup: float = _option(0.8, "alpha of Mixup; 0 for none")
    cutmix: float = _option(1.0, "alpha of CutMix; 0 for none; if Mixup is on too, each batch gets one")
    min_scale: float = _option(0.08, "smallest random crop, as a fraction of the image's area", 0, 1 + 1e-9)
    flip: float = _option(0.5, "probability of a horizontal flip", 0, 1 + 1e-9)
    color_jitter: float = _option(0.4, "random brightness, contrast and saturation without RandAugment", 0, 1)
    rand_augment: int = _option(9, "magnitude of RandAugment's operations; off below 128×128", 0, 30)
    random_erasing: float = _option(0.25, "probability of erasing a rectangle", 0, 1 + 1e-9)
    ema_decay: float = _option(0.0, "decay of the EMA of weights, then evaluated; 0 for none", 0, 1)
    precision: str = _option("fp32", "fp32, or autocast to bf16 or fp16")
    distillation: str = _option("none", "distillation from --teacher: none, soft or hard")
    distillation_weight: float = _option(0.5, "weight of that loss against the labels'", 0, 1 + 1e-9)
    temperature: float = _option(1.0, "temperature of soft distillation", 1e-3)
    freeze_bn: bool = _option(False, "keep BatchNorm's running statistics fixed and normalize by them", 0, 2)
    sync_bn: bool = _option(True, "SyncBatchNorm: statistics over all processes", 0, 2)
    seed: int = _option(0, "random seed", 0, MOST_SEED + 1)

    def __post_init__(self) -> None:
        kinds = {"int": int, "float": float, "bool": bool}
        for field in dataclasses.fields(self):
            if field.type in kinds:
                value = getattr(self, field.name)
                value = as_number(field.name, value, kinds[str(field.type)], *field.metadata["range"])
                object.__setattr__(self, field.name, value)
        check_choice("precision", self.precision, tuple(PRECISIONS))
        check_choice("distillation", self.distillation, DISTILLATIONS)
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs: got {self.warmup_epochs:g}, expected less than epochs, {self.epochs}"
            )


_UNMIXED: dict[str, Any] = {"mixup": 0.0, "cutmix": 0.0, "rand_augment": 0, "random_erasing": 0.0}
#: In place of TrainConfig's defaults: a minute on two CPU cores. No flips: a digit has a handedness.
DIGITS_OPTIONS: dict[str, Any] = {"epochs": 30, "batch_size": 64, "lr": 5e-3, "warmup_epochs": 1.0}
DIGITS_OPTIONS |= {"clip_norm": 1.0, "min_scale": 0.8, "flip": 0.0, "color_jitter": 0.0, **_UNMIXED}
#: In place of TrainConfig's defaults for a class of every pixel: SegFormer's, and no augmentation that would
#: leave labels where they were, or mix them.
SEGMENT_OPTIONS: dict[str, Any] = {"epochs": 100, "batch_size": 16, "lr": 6e-5, "min_lr": 0.0}
SEGMENT_OPTIONS |= {"weight_decay": 0.01, "label_smoothing": 0.0, "min_scale": 0.25, **_UNMIXED}


# Formulas -------------------------------------------------------------------------------------------------


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Returns the rate of a step, from 0: linear from lr / warm-up steps to lr, then cosine to ``min_lr``.

    PyTorch's ``LinearLR`` and ``CosineAnnealingLR`` give the same values, but the latter has one least rate
    for all groups, where layer-wise decay needs one per group; and steps that fp16 skips make them warn.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / (config.epochs * steps_per_epoch - warmup)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def parameter_groups(model: Stages, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Groups parameters for an optimizer by weight decay and ``lr_scale``, which is ``layer_decay ** depth``.

    The depth is 0 for norm and head, 1 for the last block, and so on down through all stages; a stage's
    embedding and class token have the depth of its first block, the first stage's one more. (timm groups so
    too, by the names of its own models.)
    """
    undecayed = model.no_weight_decay()
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        decay = 0.0 if parameter.ndim <= 1 or name in undecayed else weight_decay
        scale = layer_decay ** _depth_below_head(name, model.config.depths)
        group = {"params": [], "weight_decay": decay, "lr_scale": scale}
        groups.setdefault((decay, scale), group)["params"].append(parameter)
    return list(groups.values())


def _depth_below_head(name: str, depths: Sequence[int]) -> int:
    parts = name.split(".")
    if not parts[0].startswith("stage"):
        return 0
    stage = int(parts[0].removeprefix("stage"))
    if parts[1] == "blocks":
        return sum(depths[stage:]) - int(parts[2])
    return sum(depths[stage:]) + (stage == 0)


def distillation_loss(logits: Tensor, teacher: Tensor, kind: str, temperature: float = 1.0) -> Tensor:
    """Computes the distillation loss of a student, the mean over the batch.

    ``"soft"``: T² · KL(softmax(teacher / T) ‖ softmax(logits / T)) (Hinton et al. 2015). ``"hard"``: the
    cross-entropy with the teacher's choice (Touvron et al. 2021).
    """
    if teacher.shape != logits.shape:
        raise ValueError(f"teacher: gives {tuple(teacher.shape)}, expected {tuple(logits.shape)}")
    if kind == "hard":
        return F.cross_entropy(logits, teacher.argmax(dim=-1))
    log_p, log_q = (F.log_softmax(x.float() / temperature, dim=-1) for x in (logits, teacher))
    return F.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * temperature**2


# Tasks ----------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A task, chosen by the head of the model.

    The best weights are chosen by the metric ``score``, whose name for people is ``title``. ``loss`` is the
    mean over the batch, with label smoothing. Options that are ``unfit`` must have these values.
    """

    score: str
    title: str
    evaluate: Callable[..., dict[str, float]]
    loss: Callable[..., Tensor]
    unfit: dict[str, object]


def _classify(answers: Answers, device: torch.device, classes: list[str], together: bool) -> dict[str, float]:
    sums = add_up(answers, device)
    if together:
        joined = torch.tensor(sums, dtype=torch.float64, device=device)
        dist.all_reduce(joined)
        sums = Sums(*joined.tolist())
    images = sums.images or math.nan  # without any the loss is not finite, which stops the training
    return {"val_loss": sums.loss / images, "top1": sums.top1 / images, "top5": sums.top5 / images}


def _segment(answers: Answers, device: torch.device, classes: list[str], together: bool) -> dict[str, float]:
    sums = add_up_pixels(answers, device, len(classes), together=together)
    if not sums.confusion.sum():
        raise ValueError("data: the validation images have no labeled pixels, expected at least one")
    figures = {"val_loss": sums.loss, "miou": sums.miou, "pixel_accuracy": sums.pixel_accuracy}
    return figures | {f"iou/{name}": iou for name, iou in zip(classes, sums.iou.tolist(), strict=True)}


#: The task of each head.
TASKS: dict[Head, Task] = {
    "classify": Task("top1", "top-1", _classify, F.cross_entropy, {}),
    "segment": Task(
        "miou",
        "mIoU",
        _segment,
        pixel_loss,
        {"mixup": 0, "cutmix": 0, "rand_augment": 0, "random_erasing": 0, "distillation": "none"},
    ),
}
