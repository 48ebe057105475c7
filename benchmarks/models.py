"""The models of the suites, and a contest for the tests of a model, dtype and batch size.

The first of these tests runs the contest, for the contenders that this session of pytest has selected; each
test then reports its own. Every contender is a process of its own, and they take turns.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cvt.config import PRESETS, CvTConfig
from cvt.factory import SEED, create_model, randomize
from cvt.tools.commands.bench.contenders import CONTENDERS
from cvt.tools.commands.bench.contest import Contest, share_of_product
from cvt.tools.commands.bench.models import Subject, build_subject
from cvt.tools.commands.pyramids import PYRAMIDS
from cvt.tools.evaluation import cost
from cvt.weight_pruning import pruned_config
from cvt_kernels import machine

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
#: Timed turns of a contender, each of a quarter of a second.
ROUNDS = 10
_told = [0.0]
#: pytest-benchmark reads a timer before and after a call. This one stands still but for the seconds that it
#: is told, which were measured elsewhere: in another process, or by a GPU's events.
MARK = pytest.mark.benchmark(timer=lambda: sum(_told))


class Model(NamedTuple):
    """A model of the suites; it is trained in the last batch size on a CPU, in the first on a GPU."""

    build: Callable[[], Subject]
    on_cpu: tuple[int, ...] = (1, 8)
    on_gpu: tuple[int, ...] = (256,)
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


def _public(name: str, *on_gpu: int, size: int | None = None, **settings: Any) -> Model:
    keys = [key for key, each in CONTENDERS.items() if each.model == "hf" or name not in PYRAMIDS]
    build = functools.partial(build_subject, name, None, size)
    return Model(build, on_gpu=on_gpu, contenders=tuple(keys), **settings)


def _build_variant(
    name: str, image_size: int, model: str | CvTConfig = "cvt_13", **overrides: Any
) -> Subject:
    """Builds a CvT with random weights that transformers does not have, such as one that drops tokens."""
    ours = create_model(model, drop_path_rate=0.0, **overrides)
    randomize(ours)
    count = 2 * cost(ours.config, image_size).multiply_adds
    is_judged = ours.config.token_keep == 1.0
    return Subject(name, f"random weights (seed {SEED})", None, ours, image_size, count, is_judged)


def _variant(name: str, config: CvTConfig | str = "cvt_13", size: int = 224, **overrides: Any) -> Model:
    keys = "eager", "cvt", "cvt-frozen", "cvt-graphed"
    return Model(functools.partial(_build_variant, name, size, config, **overrides), contenders=keys)


_CVT_13 = PRESETS["cvt_13"]
#: By the name in the tests. Of the last ones there is no public model.
MODELS = {
    "cvt_13": _public("cvt_13", 256, 32, 8, 1, dtypes=("float32", "bfloat16", "float16", "tf32")),
    "segformer_b0": _public("segformer_b0", 16, 1),
    "pvt_v2_b2": _public("pvt_v2_b2", 64),
    "vit_s16": _public("vit_s16"),
    "vit_b16": _public("vit_b16"),
    "dinov2_s14": _public("dinov2_s14"),
    "dinov2_s14_518": _public("dinov2_s14", size=518),
    "clip_b32": _public("clip_b32"),
    "cvt_w24": _public("cvt_w24", 32, on_cpu=()),
    "token_keep": _variant("cvt_13, which keeps 0.7 of its tokens", token_keep=0.7),
    "hybrid": _variant("cvt_13 with hybrid mixing", mixing="hybrid"),
    "position_bias": _variant("cvt_13 with a bias by position", position_bias=True),
    "pruned_mlp": _variant("cvt_13, half of its hidden units", pruned_config(_CVT_13, mlp=0.5, heads=0.0)),
    "pruned_heads": _variant(
        "cvt_13, 3/4 of its hidden units, 2/3 of its heads", pruned_config(_CVT_13, mlp=0.25, heads=0.34)
    ),
    "segmenter": _variant("cvt_13 with classes for pixels", head="segment", num_classes=150),
}


def _tiny() -> Subject:
    """Returns the model of a smoke test, whose operations nobody counts."""
    sizes: dict[str, Any] = {"embed_dims": (16, 32, 48), "num_heads": (1, 1, 3), "depths": (1, 1, 1)}
    model = create_model("cvt_13", num_classes=10, **sizes)
    randomize(model)
    return Subject("tiny", "random weights", None, model, image_size=64, operations=1)


TINY = Model(_tiny, contenders=("eager", "cvt", "cvt-frozen"))


def is_tiny(config: pytest.Config) -> bool:
    """Returns whether this is a smoke test."""
    return bool(config.getoption("tiny", False) or config.getoption("benchmark_disable", False))


def dtypes() -> tuple[str, ...]:
    """Returns the dtypes worth timing here: on a CPU bfloat16 only where it has instructions for it."""
    if CUDA:
        return "float32", "bfloat16", "float16", "tf32"
    flags = Path("/proc/cpuinfo")
    known = flags.read_text(encoding="utf-8").split() if flags.exists() else []
    return ("float32", "bfloat16") if {"avx512_bf16", "amx_bf16"} & set(known) else ("float32",)


def cases(*, train: bool, tiny: bool) -> Iterator[tuple[str, str, int, str]]:
    """Yields model, dtype, batch size and contender of every test."""
    for name, model in {"tiny": TINY}.items() if tiny else MODELS.items():
        batches = model.on_gpu if CUDA else model.on_cpu
        if train:
            batches = batches[:1] if CUDA else batches[-1:]
        for dtype in dtypes()[:1] if tiny else [each for each in model.dtypes if each in dtypes()]:
            for batch in (2,) if tiny else batches:
                for key in model.contenders:
                    if CONTENDERS[key].why_not(DEVICE, train=train) is None and not (
                        CONTENDERS[key].runtime and (train or CUDA)
                    ):
                        yield name, dtype, batch, key


def parametrize(metafunc: pytest.Metafunc, *, train: bool) -> None:
    """Makes the tests of a suite; those that torch.compile makes for minutes, but for its own, are slow."""
    found = []
    for case in cases(train=train, tiny=is_tiny(metafunc.config)):
        *_, key = case
        is_slow = CONTENDERS[key].compile is not None and key != "compile"
        marks = [MARK, *([pytest.mark.slow] if is_slow else [])]
        found.append(pytest.param(*case, id="-".join(map(str, case)), marks=marks))
    metafunc.parametrize(("model", "dtype", "batch", "contender"), found)


class Outcome(NamedTuple):
    """The results of a contest, without its models: rows by contender, and what it has of the others."""

    rows: dict[str, dict[str, Any]]
    why_not: dict[str, str]
    failed: dict[str, Exception]


_outcomes = pytest.StashKey[dict[tuple[Any, ...], Outcome]]()


def report(request: pytest.FixtureRequest, benchmark: Any, *, train: bool) -> None:
    """Reports the seconds of a test's contender, fails if it has failed, or skips if it cannot run."""
    params = request.node.callspec.params
    key = params["contender"]
    rows, why_not, failed = outcome_of(request, train=train)
    if key in why_not:
        pytest.skip(why_not[key])
    if key in failed:
        raise failed[key]
    row = rows[key]
    name, dtype, batch = (params[field] for field in ("model", "dtype", "batch"))
    benchmark.group = f"{name}{', training' if train else ''}, {dtype}, batch {batch}"
    seconds = row["seconds"]
    benchmark.extra_info |= {
        "suite": "training" if train else "models",
        "model": name,
        "dtype": dtype,
        "batch": batch,
        "train": train,
        "device": torch.cuda.get_device_name() if CUDA else machine.cpu_device(),
        "threads": torch.get_num_threads(),
        "images_per_second": batch / statistics.median(seconds),
        **{field: value for field, value in row.items() if field != "seconds"},
    }
    left = iter(seconds)
    benchmark.pedantic(lambda: _told.append(next(left, 0.0)), rounds=len(seconds))


def outcome_of(request: pytest.FixtureRequest, *, train: bool) -> Outcome:
    """Returns what the contest of a test's model, dtype and batch size has found; the first test runs it."""

    def group(item: Any) -> tuple[Any, ...]:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return item.path, *(params.get(name) for name in ("model", "dtype", "batch"))

    mine, outcomes = group(request.node), request.config.stash.setdefault(_outcomes, {})
    if mine not in outcomes:
        items: list[Any] = request.session.items
        keys = {item.callspec.params["contender"] for item in items if group(item) == mine}
        outcomes[mine] = run(*mine[1:], keys=keys, train=train, tiny=is_tiny(request.config))
    return outcomes[mine]


def run(name: str, dtype: str, batch: int, *, keys: set[str], train: bool, tiny: bool) -> Outcome:
    """Runs a contest on images of noise."""
    subject = (TINY if tiny else MODELS[name]).build()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, subject.image_size, subject.image_size, generator=generator)
    in_order = [key for key in CONTENDERS if key in keys]
    settings: dict[str, Any] = {"device": DEVICE, "dtype": dtype, "train": train, "quick": tiny}
    with Contest(subject, in_order, images, **settings) as contest:
        measured = contest.measured(batch, 1 if tiny else ROUNDS)
    for row in measured["rows"]:
        row["percent_of_product"] = 100 * share_of_product(measured, row)
        first = contest.first[row["contender"]]
        row |= {"first_seconds": first["seconds"], "load_seconds": first["load"]}
        row |= {"image_size": subject.image_size}
    rows = {row["contender"]: row for row in measured["rows"]}
    return Outcome(rows, contest.why_not, contest.failed)
