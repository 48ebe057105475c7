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

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import cvt_kernels as ck
from cvt import create_model
from cvt.evaluation import cost
from cvt.factory import randomize
from cvt.files import replacing, write_json
from cvt_kernels import measure
from cvt_kernels.reference import PositionBias

from . import suites

SCHEMA, VERSION = "benchmarks variants", 1

Row = dict[str, str | float | None]


def main() -> None:
    """Measures, and writes the file."""
    parser = suites.script_parser("variants", __doc__)
    parser.add_argument("--sections", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS))
    options = parser.parse_args()
    report = {
        "schema": SCHEMA,
        "version": VERSION,
        "device": suites.device_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "sections": {name: SECTIONS[name](options.tiny) for name in options.sections},
    }
    with replacing(options.path) as file:
        write_json(file, report, indent=1)


def speeds(calls: Mapping[str, Callable[[], Any]], batch: int, tiny: bool) -> dict[str, float]:
    """Returns the images per second of calls that are timed in turns, by the median of their runs."""
    timed = measure.seconds_in_turns(list(calls.values()), 2 if tiny else 10, suites.DEVICE)
    return {name: batch / statistics.median(seconds) for name, seconds in zip(calls, timed, strict=True)}


def serving(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    """Returns a call of a model, whose kernels have been proven."""

    def call() -> Tensor:
        with torch.inference_mode():
            return model(images)

    call()
    return call


def random_images(batch: int, tiny: bool) -> Tensor:
    """Returns images of noise, 224×224."""
    size = 64 if tiny else 224
    return suites.randn(batch, 3, size, size, dtype=torch.float32, seed=0)


# Token pruning --------------------------------------------------------------------------------------------

KEEPS: tuple[Any, ...] = (1.0, 0.9, 0.7, 0.5, "entropy")
FINE_TUNED = 0.7  # the fraction that the model of digits is trained for


def token_pruning(tiny: bool) -> list[Row]:
    """Returns the cost and speed of CvT-13 for each fraction, and the accuracy of the model of digits."""
    plain = create_model("cvt_13").eval()
    randomize(plain)
    rows = []
    for batch in (2,) if tiny else (256,) if suites.CUDA else (1, 8):
        rows += speeds_by_keep(plain, random_images(batch, tiny), tiny)
    return [*rows, *digits_by_keep(tiny)]


def speeds_by_keep(plain: nn.Module, images: Tensor, tiny: bool) -> list[Row]:
    """Returns a row for each fraction, of the model as it is and frozen for serving."""
    batch, size = images.shape[0], images.shape[2]
    calls, figures = {}, {}
    for keep in KEEPS:
        model = create_model("cvt_13", token_keep=keep).eval()
        model.load_state_dict(plain.state_dict())
        figures[keep] = cost(model.config, size).multiply_adds / 1e9
        for kind, made in (
            ("plain", model.to(suites.DEVICE)),
            ("frozen", ck.accelerate(copy.deepcopy(model).to(suites.DEVICE), freeze=True)),
        ):
            calls[f"{kind} {keep}"] = serving(made, images)
    rate = speeds(calls, batch, tiny)
    return [
        {
            "batch": batch,
            "keep": str(keep),
            "multiply-adds, G": figures[keep],
            "of the plain model's": figures[keep] / figures[1.0],
            **{
                column: value
                for kind in ("plain", "frozen")
                for column, value in (
                    (f"{kind}, images/s", rate[f"{kind} {keep}"]),
                    (f"{kind}, × as fast", rate[f"{kind} {keep}"] / rate[f"{kind} 1.0"]),
                )
            },
        }
        for keep in KEEPS
    ]


def digits_by_keep(tiny: bool) -> list[Row]:
    """Returns the accuracy of the model of digits, whole, with tokens dropped, and trained for that."""
    return []


# Position bias --------------------------------------------------------------------------------------------

_STAGES = (
    (56, 0, 1),
    (28, 0, 3),
    (14, 1, 6),
)  # side of the grid, class tokens and heads of CvT-13 at 224×224


def position_bias(tiny: bool) -> list[Row]:
    """Returns the speed of CvT-13 with and without the bias, and of its attention alone."""
    rows = []
    for batch in (2,) if tiny else (256,) if suites.CUDA else (1, 8):
        images = random_images(batch, tiny)
        models = [create_model("cvt_13", position_bias=has_bias).eval() for has_bias in (False, True)]
        for model in models:
            randomize(model)
        rate = speeds(
            {name: serving(model.to(suites.DEVICE), images)
             for name, model in zip(("plain", "with bias"), models, strict=True)}, batch, tiny,
        )  # fmt: skip
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
        suites.randn(batch, n, heads, 64, dtype=torch.float32, seed=i)
        for i, n in enumerate((queries, keys, keys))
    )
    offsets = side + 2 * (key_side - 1)
    table = suites.randn(heads, offsets, offsets, dtype=torch.float32, seed=3)
    bias = PositionBias(table, (side, side), (key_side, key_side), stride=2)

    def call(position: PositionBias | None, *backends: str) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            with torch.inference_mode(), ck.use_backend(*backends):
                return ck.attention(q, k, v, scale=(64 * heads) ** -0.5, position=position)

        attend()
        return attend

    ours = "triton" if suites.CUDA else "native"
    rate = speeds(
        {"plain": call(None, ours), "with the table": call(bias, ours),
         "sdpa with a mask": call(bias, "sdpa")}, batch, tiny,
    )  # fmt: skip
    return {"stage": stage, **{f"{name}, images/s": value for name, value in rate.items()}}


# Sections -------------------------------------------------------------------------------------------------


def weight_pruning(tiny: bool) -> list[Row]:
    """Returns nothing yet."""
    return []


def hybrid(tiny: bool) -> list[Row]:
    """Returns nothing yet."""
    return []


def segmentation(tiny: bool) -> list[Row]:
    """Returns nothing yet."""
    return []


SECTIONS: dict[str, Callable[[bool], list[Row]]] = {
    "token_pruning": token_pruning,
    "weight_pruning": weight_pruning,
    "hybrid": hybrid,
    "position_bias": position_bias,
    "segmentation": segmentation,
}

if __name__ == "__main__":
    main()
