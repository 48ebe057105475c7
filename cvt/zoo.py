"""The published checkpoints of the supported architectures, and what transformers' own tests expect of some.

``python -m cvt.zoo`` prints the table of docs/model.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .extras import require
from .hub import MICROSOFT

#: The photograph of transformers' tests, of COCO's validation set: two cats on a couch, 640×480.
PHOTO = "http://images.cocodataset.org/val2017/000000039769.jpg"


class Published(NamedTuple):
    """A checkpoint on the Hugging Face Hub.

    Attributes:
        name: ``"owner/name"``.
        model: Its class in transformers.
        image_size: Height and width of its images, in pixels; None for sizes divisible by 32.
        config: Arguments of the class's configuration.
        first_values: The first values of its result for :data:`PHOTO`, in the order of memory, by
            transformers' tests; empty where they have none.
    """

    name: str
    model: str
    image_size: tuple[int, int] | None
    config: dict[str, Any]
    first_values: tuple[float, ...] = ()


def _cvt(name: str) -> Published:
    size = 384 if "-384" in name else 224
    config: dict[str, Any] = {"depth": [1, 4, 16] if "-21" in name else [1, 2, 10]}
    if "-w24" in name:
        config = {"depth": [2, 2, 20], "embed_dim": [192, 768, 1024], "num_heads": [3, 12, 16]}
    values = (0.9285, 0.9015, -0.3150) if name == "microsoft/cvt-13" else ()
    return Published(name, "CvtForImageClassification", (size, size), config | {"num_labels": 1000}, values)


_DEPTHS = ([2, 2, 2, 2], [2, 2, 2, 2], [3, 4, 6, 3], [3, 4, 18, 3], [3, 8, 27, 3], [3, 6, 40, 3])
_NARROW, _WIDE = [32, 64, 160, 256], [64, 128, 320, 512]


def _segformer(letter: int, labels: str, size: tuple[int, int]) -> Published:
    name = f"nvidia/segformer-b{letter}-finetuned-{labels}-{size[0]}-{size[1]}"
    config = {
        "depths": _DEPTHS[letter],
        "hidden_sizes": _WIDE if letter else _NARROW,
        "decoder_hidden_size": 768 if letter > 1 else 256,
        "num_labels": 150 if labels == "ade" else 19,
    }
    values = (-4.6310, -5.5232, -6.2356) if (letter, labels) == (0, "ade") else ()
    return Published(name, "SegformerForSemanticSegmentation", size, config, values)


def _mit(letter: int) -> Published:
    config = {"depths": _DEPTHS[letter], "hidden_sizes": _WIDE if letter else _NARROW, "num_labels": 1000}
    return Published(f"nvidia/mit-b{letter}", "SegformerForImageClassification", (224, 224), config)


def _pvt(name: str, depths: list[int]) -> Published:
    values = (-1.4192, -1.9158, -0.9702) if name == "tiny" else ()
    config = {"depths": depths, "num_labels": 1000}
    return Published(f"Zetatech/pvt-{name}-224", "PvtForImageClassification", (224, 224), config, values)


def _pvt_v2(name: str) -> Published:
    letter = int(name[1])
    config: dict[str, Any] = {"depths": _DEPTHS[letter], "hidden_sizes": _WIDE if letter else _NARROW}
    config |= {"mlp_ratios": [4, 4, 4, 4] if letter == 5 else [8, 8, 4, 4], "num_labels": 1000}
    config["linear_attention"] = name.endswith("linear")
    return Published(f"OpenGVLab/pvt_v2_{name}", "PvtV2ForImageClassification", (224, 224), config)


def _glpn(name: str) -> Published:
    config = {"depths": _DEPTHS[4], "hidden_sizes": _WIDE}
    values = (3.4291, 2.7865, 2.5151) if name == "kitti" else ()
    return Published(f"vinvino02/glpn-{name}", "GLPNForDepthEstimation", None, config, values)


#: All checkpoints by name. Their names and the expected values are those of transformers' documentation and
#: tests; transformers' test of PVT v2 repeats the values of PVT, so none is expected of it here.
ZOO = {
    each.name: each
    for each in (
        *map(_cvt, MICROSOFT),
        *map(_mit, range(6)),
        *(_segformer(letter, "ade", (512, 512) if letter < 5 else (640, 640)) for letter in range(6)),
        *(_segformer(letter, "cityscapes", (1024, 1024)) for letter in range(6)),
        *(_segformer(0, "cityscapes", size) for size in ((512, 1024), (640, 1280), (768, 768))),
        *(_pvt(name, _DEPTHS[1 + i]) for i, name in enumerate(("tiny", "small", "medium", "large"))),
        *map(_pvt_v2, ("b0", "b1", "b2", "b2_linear", "b3", "b4", "b5")),
        *map(_glpn, ("kitti", "nyu")),
    )
}


def build(published: Published, **changes: Any) -> Any:
    """Builds a checkpoint's model of transformers with random weights, in evaluation mode.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    model = getattr(require("transformers", "hf"), published.model)
    return model(model.config_class(**published.config | changes)).eval()


def table() -> list[str]:
    """Returns the table of the documentation, in Markdown; it builds every model without memory."""
    lines = [
        "| checkpoint | class in transformers | image | parameters | expected |",
        "|---|---|---|---|---|",
    ]
    for each in ZOO.values():
        with torch.device("meta"):
            millions = sum(p.numel() for p in build(each).parameters()) / 1e6
        image = "any/32" if each.image_size is None else "×".join(map(str, each.image_size))
        values = ", ".join(f"{value:.4f}" for value in each.first_values)
        lines.append(f"| `{each.name}` | `{each.model}` | {image} | {millions:.1f} M | {values} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
