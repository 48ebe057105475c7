"""The suites of models: their cases, what fails and what is skipped, and seconds measured by others."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import models
from cvt import create_model
from cvt.tools.commands.bench import contest, workers
from cvt.tools.commands.bench.contenders import CONTENDERS
from tests.cvt.tools.commands.bench.test_bench import SMALL, make_quick

TURN = workers.Turn(0.25, 0.5, 0.0)


class Benchmark:
    """Stands in for pytest-benchmark's fixture: it times by a timer."""

    def __init__(self, timer=models.MARK.kwargs["timer"]):
        self.timer, self.extra_info, self.group, self.data = timer, {}, None, []

    def pedantic(self, target, rounds):
        for _ in range(rounds):
            start = self.timer()
            target()
            self.data.append(self.timer() - start)
        self.stats = SimpleNamespace(stats=SimpleNamespace(total=sum(self.data)))


@pytest.fixture
def reported(monkeypatch):
    """Returns a function that runs the smoke test of some contenders, as a session of pytest does."""
    make_quick(monkeypatch)
    for name, value in {"CUDA": False, "DEVICE": torch.device("cpu")}.items():
        monkeypatch.setattr(models, name, value)
    config = SimpleNamespace(stash=pytest.Stash(), getoption=lambda name, default: True)

    def report(key, *selected):
        items = [
            SimpleNamespace(
                path="test_models.py",
                originalname="test_forward",
                callspec=SimpleNamespace(
                    params={"model": "tiny", "dtype": "float32", "batch": 2, "contender": contender}
                ),
            )
            for contender in (key, *selected)
        ]
        session = SimpleNamespace(items=[*items, SimpleNamespace(path="other.py")])
        benchmark = Benchmark()
        request = SimpleNamespace(node=items[0], session=session, config=config)
        models.report(request, benchmark, train=False)
        return benchmark

    return report


def test_every_contender_is_in_the_suites(monkeypatch):
    """On a CPU and on a GPU together, forwards and training steps."""
    keys, ids = set(), set()
    monkeypatch.setattr(models, "dtypes", lambda: ("float32", "bfloat16", "float16", "tf32"))
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(models, "CUDA", device == "cuda")
        monkeypatch.setattr(models, "DEVICE", torch.device(device))
        for train in (False, True):
            cases = list(models.cases(train=train, tiny=False))
            assert len(set(cases)) == len(cases)
            keys |= {key for *_, key in cases}
            ids |= {"-".join(map(str, case)) for case in cases if not train}
    assert keys == CONTENDERS.keys()
    assert {
        *("cvt_13-bfloat16-256-accelerate-graphed", "cvt_13-float16-1-hf", "cvt_13-tf32-32-compile"),
        *("cvt_13-float32-8-openvino-int8", "segformer_b0-bfloat16-16-accelerate-float8-graphed"),
        *("cvt_w24-bfloat16-32-cvt-graphed", "pvt_v2_b2-float32-64-hf", "token_keep-float32-1-cvt-frozen"),
    } <= ids
    assert not [each for each in ids if each.startswith("segformer_b0") and each.endswith("-cvt")]


@pytest.mark.parametrize(
    "name", [name for name in models.MODELS if models.MODELS[name].contenders[0] == "eager"]
)
def test_variants_can_be_built(name):
    subject = models.MODELS[name].build()
    assert subject.operations > 1e9
    assert subject.hf is None
    assert subject.is_judged == (name != "token_keep")


def test_tests_report_what_one_contest_has_measured(reported, monkeypatch):
    """Turns are those of the contenders that the session selected."""
    turns = []
    monkeypatch.setattr(workers.Runner, "turn", lambda self, size: turns.append(self._contender) or TURN)
    frozen, eager = reported("cvt-frozen", "eager"), reported("eager", "cvt-frozen")
    assert turns == [CONTENDERS["eager"], CONTENDERS["cvt-frozen"]]
    for key, benchmark in {"eager": eager, "cvt-frozen": frozen}.items():
        assert benchmark.data == [pytest.approx(0.25)]
        assert benchmark.group == "tiny, float32, batch 2"
        facts = benchmark.extra_info
        assert facts["images_per_second"] == pytest.approx(2 / 0.25)
        assert facts["error"] <= facts["error_allowed"]
        assert (facts["model"], facts["image_size"], facts["waits"]) == ("tiny", 64, [0.5])
        assert (facts["contender"], facts["first_seconds"] > 0) == (key, True)
        assert facts["peak_bytes"] > 0


def test_a_wrong_contender_fails_instead_of_being_timed(reported, monkeypatch):
    made, timed = workers.made, []

    def wrong(contender, model):
        if contender.freeze:
            with torch.no_grad():
                next(p for p in model.parameters() if p.ndim == 4).mul_(1.01)
        return made(contender, model)

    monkeypatch.setattr(workers, "made", wrong)
    monkeypatch.setattr(workers.Runner, "turn", lambda self, size: timed.append(self._contender) or TURN)
    with pytest.raises(ValueError, match=r"cvt-frozen: error \S+ against float64, expected at most .* timed"):
        reported("cvt-frozen", "cvt")
    assert timed == [CONTENDERS["cvt"]]
    assert reported("cvt", "cvt-frozen").data


@pytest.mark.parametrize(
    ("key", "why_not"),
    [
        ("openvino", "not_there is not installed"),
        ("accelerate", "transformers has no such model"),
        ("cvt-graphed", "CUDA graphs need an NVIDIA GPU"),
        ("cvt-compile", "fails: RuntimeError: no C.. compiler"),
        ("cvt-frozen", "convolutions are summed"),
    ],
)
def test_a_contender_that_cannot_run_is_skipped_with_the_reason(key, why_not, reported, monkeypatch):
    def compile_nothing(model, mode, dynamic):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    if key == "cvt-frozen":
        hybrid = models.TINY.build()._replace(ours=create_model(SMALL, mixing="hybrid"))
        monkeypatch.setattr(models, "TINY", models.TINY._replace(build=lambda: hybrid))
    if key == "openvino":
        monkeypatch.setattr(contest.peers.OpenVINO, "packages", ("not_there",))
        hf = nn.Identity()
        hf.config = None
        subject = models.TINY.build()._replace(hf=hf)
        monkeypatch.setattr(models, "TINY", models.TINY._replace(build=lambda: subject))
    with pytest.raises(pytest.skip.Exception, match=why_not):
        reported(key)
