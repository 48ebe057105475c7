"""The cards of these operators; see ``cvt_kernels/ops/cards.py``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...launch.records import Product
from .. import cards


def _linear(m: Any) -> Any:
    return (m.activation(*cards.shape_of(m)), *m.linear(m.outputs, m.channels)), {}


def _linear_gelu(m: Any) -> Any:
    return _linear(m)[0], {"approximate": m.approximate}


def _linear_add(m: Any) -> Any:
    args = _linear(m)[0]
    residual, settings = m.activation(*cards.shape_of(m)[:-1], m.outputs), {"inplace": m.inplace}
    return (*args, residual), settings | ({} if m.inplace else factors(m, residual))


def factors(m: Any, residual: Tensor) -> dict[str, Any]:
    """Makes the factors of the images of stochastic depth, where an example has them."""
    if not m.scaled or residual.ndim == 1:
        return {}
    scale = torch.rand(residual.shape[0], generator=m._generator, dtype=torch.float32)
    return {"scale": scale, "scales_sum": m.scales_sum}


def _linear_add_layer_norm(m: Any) -> Any:
    args = _linear(m)[0]
    args, settings = (*args, m.activation(*cards.shape_of(m)[:-1], m.outputs)), {"inplace": m.inplace}
    shift = m.parameter(m.outputs) if m.shifted else None
    return (*args, *m.norm(m.outputs)[:2]), {"eps": m.eps, "shift": shift, **settings}


#: The kernels of the gradient of a bias.
BIAS_GRADIENT = "linear_starts sum_regions"
#: Examples with factors of images.
SCALED = {
    "scaled": cards.ROWS | {"outputs": 33, "scaled": True},
    "scaled sum": cards.ROWS | {"outputs": 33, "scaled": True, "scales_sum": True},
}


def _linear_gelu_stage(step: cards.Step) -> None:
    """Runs a CvT block's first linear layer of the MLP, with Microsoft's GELU."""
    x, weight, bias, _ = step.linear(1, 4)
    step.call("linear_gelu", x, weight, bias, approximate="quick")


def _linear_add_stage(step: cards.Step) -> None:
    """Runs a CvT block's layers that end its residual branches, attention's and the MLP's.

    Training is beside a stream of float32, as under autocast, with stochastic depth and without.
    """
    if not step.training:
        for width in (1, 4):
            step.call("linear_add", *step.linear(width, 1))
        return
    x, weight, bias, residual = step.linear(1, 1)
    stream = step.tensor(*residual.shape, dtype=torch.float32)
    factors = step.tensor(step.batch, dtype=torch.float32).detach()
    as_images = [each.unflatten(0, (step.batch, -1)) for each in (x, stream)]
    for scale, scales_sum in ((None, False), (factors, False), (factors, True)):
        step.call("linear_add", as_images[0], weight, bias, as_images[1], scale=scale, scales_sum=scales_sum)


def _linear_stage(step: cards.Step) -> None:
    """Runs a CvT block's layers of queries, keys and values, which have kernels in training only."""
    step.call("linear", *step.linear(1, 1)[:3])


def _linear_gluon_stage(step: cards.Step) -> None:
    """Runs the layers of the two above, without gradients, by the product in Gluon on GPUs that have it."""
    x, weight, bias, _ = step.linear(1, 4)
    for approximate in ("none", "tanh", "quick"):
        step.call("linear_gelu", x, weight, bias, approximate=approximate, backend="gluon")
    for width in (1, 4):
        step.call("linear_add", *step.linear(width, 1), backend="gluon")


def _linear_add_layer_norm_stage(step: cards.Step) -> None:
    """Runs the layers of ``_linear_add_stage`` with the LayerNorm that follows each of them."""
    for width in (1, 4):
        x, weight, bias, residual = step.linear(width, 1)
        step.call("linear_add_layer_norm", x, weight, bias, residual, bias, bias)


def linear_work(arguments: dict[str, Any], results: str) -> cards.Work:
    """Returns the work of a linear layer that writes ``results``."""
    spec = arguments["SPEC"]
    written = [cards.matrix(arguments[name]) for name in results.split() if arguments[name] is not None]
    read = [cards.matrix(arguments[name]) for name in ("x", "weight")]
    read += [value for name, value in arguments.items() if name.endswith("_ptr")]
    is_exact = read[0].element_size() > 2 and spec.precision != "tf32"
    return cards.Work(cards.bytes_of(read, written), 0 if is_exact else 2 * written[0].numel() * spec.inputs)


def _pingpong_product(arguments: dict[str, Any]) -> cards.Work:
    spec, out = arguments["SPEC"], cards.matrix(arguments["out"])
    moved = [cards.matrix(arguments["x"]), cards.matrix(arguments["weight"]), out]
    moved += [cards.matrix(arguments["residual"])] if spec.has_residual else []
    moved += [arguments["sums_ptr"]] if spec.has_sums else []
    moved += [arguments["statistics_ptr"]] if spec.norm_width else []
    return cards.Work(cards.bytes_of(moved), 2 * out.numel() * spec.inputs)


def _sweep(part: str, stages: tuple[int, ...], **values: tuple[int, ...]) -> dict[str, cards.Sweep]:
    """Returns the configurations of ``linear_`` and the part's name."""
    name = f"linear_{part}"
    return {name: cards.Sweep(part, stages, name, Product, cards.TILES | values)}


CARDS = {
    "linear": cards.Card(
        call=_linear,
        choices=cards.LAYER | {"bare": cards.BOTH},
        examples=cards.of_rows("bare=True", outputs=33),
        without_gradients=("float32",),
        needed={"float32": {"dtype": "bfloat16", "bare": True}},
        wrong={"bias": ((3,), (33, 33))},  # F.linear takes a scalar
        stages={"linear": cards.Launches(_linear_stage), "linear_gluon": cards.Launches(_linear_gluon_stage)},
        work={
            "grouped_linear": functools.partial(linear_work, results="out"),
            "linear_starts": functools.partial(
                cards.once, names="dout pre dproduct dresidual activated partial"
            ),
            "pingpong_product": _pingpong_product,
        },
        uncounted={"linear_starts": "scale"},
        accesses={
            "gradient of a bias": cards.Accesses(
                BIAS_GRADIENT, "gradient=all rows=131 channels=5 outputs=67"
            ),
            "gradient of a bias, many rows": cards.Accesses(
                BIAS_GRADIENT, "dtype=float16 gradient=all rows=2099 channels=3 outputs=192"
            ),
        },
        emulated={"linear, training": "gradient=all rows=2099 channels=8 outputs=136"},
    ),
    "linear_gelu": cards.Card(
        call=_linear_gelu,
        choices=cards.LAYER | {"bare": cards.BOTH} | cards.APPROXIMATE,
        examples=cards.of_rows("bare=True", *cards.GELUS, outputs=33),
        stages={"linear_gelu": cards.Launches(_linear_gelu_stage)},
        work={"linear_gelu": functools.partial(linear_work, results="out pre")},
        accesses={
            name: cards.Accesses(f"linear_gelu {BIAS_GRADIENT}", f"gradient=all {words}")
            for name, words in {
                "GELU": "rows=131 channels=5 outputs=67",
                "GELU by descriptors": "dtype=float16 rows=259 channels=72 outputs=264",
                "GELU of half a tile": "dtype=float16 rows=5 channels=20 outputs=384",
            }.items()
        },
        emulated={"linear_gelu": "gradient=all rows=150 channels=200 outputs=136"},
        factors=("x", "weight"),
        sweeps=_sweep("gelu", (3, 2, 1), block_k=(32, 64, 128), num_stages=(2, 3, 4), programs=(0, 1, 2)),
    ),
    "linear_add": cards.Card(
        call=_linear_add,
        choices=cards.LAYER | cards.INPLACE | dict.fromkeys(("bare", "scaled", "scales_sum"), cards.BOTH),
        examples=cards.of_rows("bare=True", "inplace=True", outputs=33) | SCALED,
        stages={"linear_add": cards.Launches(_linear_add_stage)},
        work={
            "linear_add": functools.partial(linear_work, results="out"),
            "linear_ends": functools.partial(cards.once, names="product residual out"),
        },
        uncounted={"linear_ends": "bias scale"},
        accesses={
            "sum": cards.Accesses("linear_add", "rows=131 channels=5 outputs=67"),
            "sum of 16 bits": cards.Accesses("linear_add", "dtype=bfloat16 rows=3 channels=17 outputs=5", 80),
            "sum of two thirds of a tile": cards.Accesses(
                "linear_add", "dtype=float16 rows=5 channels=24 outputs=1024"
            ),
            "sum in place by descriptors": cards.Accesses(
                "linear_add", "dtype=float16 rows=131 channels=72 outputs=200 inplace=True"
            ),
        },
        emulated={"linear_add": "rows=150 channels=264 outputs=136"},
        factors=("x", "weight"),
        sweeps=_sweep(
            "add", (3, 2, 1), width=(32, 64, 128), block_k=(64, 256), num_stages=(3, 4), parts=(1, 3)
        ),
    ),
    "linear_add_layer_norm": cards.Card(
        call=_linear_add_layer_norm,
        choices=cards.LAYER | cards.NORM | cards.SHIFTED | cards.INPLACE,
        examples=cards.of_rows("bare=True", "shifted=True", "inplace=True", outputs=33),
        without_gradients=("triton",),
        normalizes=True,
        stages={"linear_add_layer_norm": cards.Launches(_linear_add_layer_norm_stage)},
        work={"linear_add_layer_norm": functools.partial(linear_work, results="h y")},
        accesses={
            name: cards.Accesses("linear_add_layer_norm", f"shifted=True {words}")
            for name, words in {
                "LayerNorm": "rows=37 channels=5 outputs=67",
                "LayerNorm of wide rows": "rows=1 channels=3 outputs=401",
                "LayerNorm in place by descriptors": (
                    "dtype=float16 rows=131 channels=72 outputs=200 inplace=True"
                ),
            }.items()
        },
        emulated={"linear_add_layer_norm": "rows=150 channels=264 outputs=192 shifted=True"},
        factors=("x", "weight"),
        sweeps=_sweep("add_layer_norm", (3, 2), num_stages=(2, 3), parts=(3,)),
    ),
}
