"""CvT for semantic segmentation, with the all-MLP decoder of SegFormer (Xie et al. 2021, 3.2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from cvt_kernels.models.forward import apply_layer_norm, apply_linear

from .config import MOST_LABELS, CvTConfig
from .model import CvT, Stages, init_weights
from .pretrained import PretrainedModel

#: The label of pixels that count neither in training nor in evaluation.
IGNORED = MOST_LABELS

_DROP_RATE = 0.1  # SegFormer's


class Decoder(nn.Module):
    """A linear layer per stage, all fused at the grid of the first stage by a 1×1 layer, and a classifier.

    SegFormer upsamples the maps, concatenates them and applies the 1×1 layer to the result. That layer is the
    sum of one layer per map, ``fuse.0``, ``fuse.1``, …, and commutes with bilinear interpolation, whose
    weights add up to 1. So each map is fused at its own size, with fewer multiply-adds. The norm is a
    LayerNorm in place of SegFormer's BatchNorm: no pixel depends on the batch.

    Args:
        channels: Channels of the maps of the stages.
        dim: Channels within.
        num_classes: Outputs for every pixel.
    """

    def __init__(self, channels: tuple[int, ...], dim: int, num_classes: int):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(of_stage, dim) for of_stage in channels)
        self.fuse = nn.ModuleList(nn.Linear(dim, dim, bias=i == 0) for i in range(len(channels)))
        self.norm = nn.LayerNorm(dim)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(_DROP_RATE)
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Turns maps (B, C, H, W), the finest first, into logits (B, num_classes, H, W) of its size."""
        parts = [
            apply_linear(fuse, apply_linear(projection, each.permute(0, 2, 3, 1)))
            for projection, fuse, each in zip(self.projections, self.fuse, maps, strict=True)
        ]
        x, *others = (part.permute(0, 3, 1, 2) for part in parts)
        for other in others:
            x = x + resize(other, x)
        x = self.act(apply_layer_norm(self.norm, x.permute(0, 2, 3, 1)))
        return apply_linear(self.classifier, self.drop(x)).permute(0, 3, 1, 2)


class CvTSegmenter(Stages, PretrainedModel):
    """A CvT for semantic segmentation, with a class per pixel.

    Parameters of the stages have the names of :class:`CvT`; names of the head begin with ``decoder``.

    Args:
        config: The sizes and choices, with ``head="segment"``; ``create_model`` has them by name.

    Attributes:
        config: The configuration.
        num_classes: Classes.
        feature_info: Channels and reduction of every stage's map, as in timm.

    Shape:
        Input (B, in_chans, H, W), of the sizes that :class:`CvT` takes; output logits (B, num_classes, H, W).
    """

    def __init__(self, config: CvTConfig):
        super().__init__(config, head="segment")
        self.decoder = Decoder(config.embed_dims, config.decoder_dim, config.num_classes)
        self.apply(init_weights)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.config.num_classes

    def forward(self, images: Tensor) -> Tensor:
        """Turns images into logits per pixel."""
        return resize(self.decoder(self.maps(images)), images)


def resize(maps: Tensor, like: Tensor) -> Tensor:
    """Interpolates maps (B, C, H, W) bilinearly to the height and width of others."""
    return F.interpolate(maps, like.shape[2:], mode="bilinear", align_corners=False)


def pixel_loss(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """Computes the cross-entropy over the labeled pixels; 0 if all are ignored.

    Args:
        logits: (B, K, H, W) float32.
        labels: (B, H, W): classes, or :data:`IGNORED`.
        label_smoothing: Fraction of each target spread over all classes.
        reduction: ``"mean"`` or ``"sum"``, over these pixels.
    """
    options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, labels, reduction="sum", **options)
    return loss if reduction == "sum" else loss / (labels != IGNORED).sum().clamp_min(1)


def build(config: CvTConfig) -> CvT | CvTSegmenter:
    """Builds the model with the head that its configuration names."""
    return CvT(config) if config.head == "classify" else CvTSegmenter(config)
