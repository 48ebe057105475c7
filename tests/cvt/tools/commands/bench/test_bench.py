"""Tests of ``cvt bench``: what it measures, its files, its comparison and its page."""

import base64
import copy
import dataclasses
import html
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS, create_model
from cvt.tools import commands as cli
from cvt.tools.commands.bench import (
    breakdown,
    compare,
    contenders,
    measurements,
    plots,
    report,
    summary,
    workers,
)
from cvt.tools.commands.bench import results as result_files
from cvt.tools.evaluation import cost
from cvt_kernels import backends, coverage, graphs, machine
from cvt_kernels.autotune import clock, tuner
from tests.checks import bad, not_built
from tests.upstream import KERNELS_FIRST

BATCHES, ROUNDS = (1, 2), 4
SMALL = dataclasses.replace(
    PRESETS["cvt_13"], embed_dims=(16, 32, 48), num_heads=(1, 2, 3), depths=(1, 2, 3), num_classes=10
)


class Together:
    """Stands in for a process: the contender runs in the process of the test."""

    def __init__(self, key, job, cache=None):
        self.key, self._runner = key, workers.Runner(key, job)

    def ask(self, request, *arguments):
        return self._runner.answer(request, *arguments)

    def end(self):
        pass


def make_quick(patch):
    """Runs contenders in this process, one step in a turn and one under the profiler, without a pause."""
    patch.setattr(workers, "Worker", Together)
    patch.setattr(workers, "_TURN", 1e-9)
    patch.setattr(measurements, "_PAUSE", 0)
    patch.setattr(breakdown, "_PROFILES", 1)
    patch.setitem(clock.PRODUCT_SIZE, "cpu", 64)


def make_small(patch):
    """Lets cvt_13 be a small model, and its measurement quick."""
    make_quick(patch)
    patch.setitem(PRESETS, "cvt_13", SMALL)


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


class Compiled(nn.Module):
    """A compiled model, in which hooks on blocks would not run."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)


class Uncompilable(nn.Module):
    def forward(self, images):
        raise RuntimeError("no C++ compiler\nand more")


@pytest.fixture(scope="module")
def results():
    """Runs all contenders, small; torch.compile, which is slow, is replaced: it does nothing or fails."""

    def compile_quickly(model, mode, dynamic):
        assert not dynamic
        return Compiled(model) if mode is None else Uncompilable()

    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(torch, "compile", compile_quickly)
        with ck.use_backend(*KERNELS_FIRST):
            return measurements.run(
                image_size=64,
                batch_sizes=BATCHES,
                rounds=ROUNDS,
                peers=("compile", "compile-max", "eager", "accelerate-compile"),
            )


def rows_of(results):
    return {
        (batch["batch_size"], row["contender"]): row for batch in results["batches"] for row in batch["rows"]
    }


def test_samples_and_facts(results):
    rows = rows_of(results)
    ours = ["cvt", "accelerate", "cvt-frozen", "accelerate-frozen", "accelerate-compile"]
    contenders = ["hf", "compile", "eager", *ours]
    assert list(rows) == [(size, key) for size in BATCHES for key in contenders]
    for row in rows.values():
        assert len(row["seconds"]) == ROUNDS
        assert all(0 < s < 60 for s in row["seconds"])
        assert row["parity"]["error"] < 1e-4 < 1 < row["parity"]["largest"]
        assert row["parity"]["top5"] == row["parity"]["of"] == 10  # both photographs, in batches of 1 too
        assert row["parity"]["gradient_error"] is None
    assert results["contenders"]["compile-max"]["note"] == "fails: RuntimeError: no C++ compiler"
    assert results["contenders"]["accelerate-compile"]["about"].endswith("torch.compile, with freezing")
    assert [key for key, about in results["contenders"].items() if about["ours"]] == ours
    assert results["config"]["photos"] == ["china.jpg", "flower.jpg"]
    assert results["machine"]["torch"] == torch.__version__


def test_frozen_models_are_measured_in_inference_and_on_a_gpu_as_graphs():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    plain = ["hf", "eager", "cvt", "accelerate"]
    assert contenders.chosen(["eager"], gpu, train=False) == [*plain, *contenders.GRAPHED]
    assert contenders.chosen(["eager"], gpu, train=True) == plain
    assert contenders.chosen(["eager"], cpu, train=True) == plain
    assert contenders.chosen(["eager"], cpu, train=False) == [*plain, "cvt-frozen", "accelerate-frozen"]
    asked = ["compile", "cvt-compile", "accelerate-compile", "accelerate-frozen-compile"]
    assert contenders.chosen(asked, cpu, train=True) == ["hf", asked[0], *plain[2:], *asked[1:3]]
    assert contenders.chosen(asked, cpu, train=False)[-3:] == asked[1:]


def test_graphed_contenders_are_copies_without_parts(small):
    images = torch.randn(1, 3, 32, 32)
    models = [create_model("cvt_13").eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, graphed = (
        contenders.build_contender(key, None, model)
        for key, model in zip(("cvt", "cvt-graphed"), models, strict=True)
    )
    assert graphs.is_graphed(graphed.model)
    assert not graphs.is_graphed(graphed.launched().model)
    assert plain.launched() is plain
    assert not graphed.has_parts
    torch.testing.assert_close(graphed.step(images), plain.step(images), rtol=1e-4, atol=1e-5)
    assert any(row.class_name == "Stage" for row in coverage(graphed.model))


@pytest.mark.usefixtures("small")
def test_what_is_not_replayed_is_not_measured_as_a_graph(monkeypatch):
    monkeypatch.setattr(measurements, "chosen", lambda *peers, train: ["hf", "cvt", "cvt-graphed"])
    results = measurements.run(image_size=32, batch_sizes=(1,), rounds=1)
    assert [key for _, key in rows_of(results)] == ["hf", "cvt"]
    note = "is not replayed as a CUDA graph: an argument is on cpu, not on an NVIDIA GPU"
    assert results["contenders"]["cvt-graphed"]["note"] == note


def test_results_tell_what_served(results):
    cpu = "reference" if not_built() else "cpu"
    depth = sum(SMALL.depths)
    for (_, key), row in rows_of(results).items():
        served = row["backends"]
        if key in ("hf", "compile", "accelerate-compile"):  # nothing is labeled in what was compiled
            assert served == {}
        elif key == "eager":
            assert {name for by_backend in served.values() for name in by_backend} == {"reference"}
        elif key in contenders.FROZEN:
            assert sum(served["transformer_block"].values()) == depth
        else:
            assert served["conv_projection"] == {cpu: depth}
            assert served["layer_norm"].keys() == {cpu}
    served = results["config"]["backends"]
    assert served["attention"] == ("sdpa" if not_built() else "cpu")
    assert served["conv_projection"] == cpu
    assert "transformer_block" in served


@pytest.mark.usefixtures("small", "tuning")
def test_kernels_are_tuned_before_anything_is_timed(monkeypatch):
    timing, tuned = [], []
    tune, turn = tuner.tune, workers.Runner.turn

    def timed(self, batch_size):
        timing.append(True)
        seconds = turn(self, batch_size)
        timing.clear()
        return seconds

    monkeypatch.setattr(workers.Runner, "turn", timed)
    monkeypatch.setattr(tuner, "tune", lambda task, *how: tuned.append(bool(timing)) or tune(task, *how))
    measurements.run(image_size=64, batch_sizes=(1, 2), rounds=1)
    assert tuned
    assert not any(tuned)


def test_breakdown_finds_parts_and_kinds(results):
    for (_, key), row in rows_of(results).items():
        seconds = Counter()
        for cell in row["breakdown"]:
            seconds[cell["part"], cell["kind"]] += cell["seconds"]
        if key in contenders.COMPILED or key in contenders.FROZEN:
            assert {part for part, _ in seconds} == {"rest"}
            continue
        for stage in (1, 2, 3):
            for kind in ("linear", "attention", "convolution", "norm", "gelu"):
                assert seconds[f"block {stage}", kind] > 0, (key, stage, kind)
            assert {kind for part, kind in seconds if part == f"embedding {stage}"} >= {"convolution", "norm"}
        assert seconds["rest", "linear"] > 0  # of the head
        assert seconds["rest", "attention"] == 0


class Allocating(nn.Module):
    def forward(self, x):
        first = x.new_empty(1000, 1000)
        second = x.new_empty(500, 1000)
        del first
        return second.new_empty(400, 1000)


def contender(model, *requested, has_parts=False):
    return contenders.Contender("x", model.eval(), requested or ("auto",), has_parts)


def test_peak_of_memory_is_exact():
    measured = breakdown.memory_and_time(contender(Allocating()), torch.zeros(1))
    assert measured["peak_bytes"] == 4 * (1000 + 500) * 1000


@pytest.mark.skipif(not_built(), reason="no compiler for the compiled extension")
def test_memory_of_cpu_operators_is_seen():
    x = torch.randn(1000, 384)
    with ck.use_backend("cpu"):
        assert 4 * x.numel() <= clock.peak_bytes(lambda: ck.layer_norm(x), x.device) < 4.4 * x.numel()


def test_workspace_of_the_extension_counts_as_memory(monkeypatch):
    """A contender's own counts; what others left is given back before."""
    kept = [7]

    class Engine(nn.Module):
        def forward(self, x):
            kept.append(1000)
            return x + x

    extension = SimpleNamespace(workspace_bytes=lambda: sum(kept), release_workspace=kept.clear)
    monkeypatch.setattr(machine, "why_extension_unavailable", lambda device_type: None)
    monkeypatch.setattr(machine, "load_extension", lambda: extension)
    monkeypatch.setattr(breakdown, "_PROFILES", 1)
    x = torch.zeros(500)
    measured = breakdown.memory_and_time(contender(Engine(), "reference"), x)
    assert (measured["peak_bytes"], measured["workspace_bytes"]) == (x.nbytes + 1000, 1000)
    monkeypatch.setattr(machine, "load_extension", SimpleNamespace)  # one that keeps nothing
    breakdown.release_workspace()
    assert breakdown.workspace_bytes() == 0


@pytest.mark.parametrize("backend", ["reference", "convolution", "float32"])
def test_linear_layers_are_linear_however_computed(backend):
    dtype = torch.bfloat16 if backend == "float32" else torch.float32

    class Layer(nn.Module):
        def forward(self, x):
            return ck.linear(x, torch.ones(64, 64, dtype=dtype))

    x = torch.randn(1000, 64, dtype=dtype)
    profiler, *_ = breakdown.profiled_steps(contender(Layer(), backend), x)
    assert breakdown.served_backends(profiler) == {"linear": {backend: 1}}
    seconds = breakdown.by_place(profiler, cuda=False)
    assert seconds["rest", "linear"] > 0
    assert {kind for _, kind in seconds} <= {"linear", "other"}


def test_profiling_leaves_no_trace_and_imports_nothing_that_cannot_serve():
    unloaded = backends.Implementation("no_such_package:attention", why_unavailable=lambda device: "not here")
    backends.register("attention", "triton", unloaded)
    before = backends.registered("gelu", "cpu")
    model = create_model(SMALL).eval()
    breakdown.profiled_steps(contender(model, has_parts=True), torch.randn(1, 3, 32, 32))
    assert backends.registered("gelu", "cpu") is before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.usefixtures("small")
def test_training_step():
    results = measurements.run(image_size=64, batch_sizes=(1,), rounds=1, train=True)
    rows = rows_of(results)
    assert list(rows) == [(1, "hf"), (1, "cvt"), (1, "accelerate")]
    for row in rows.values():
        assert row["parity"]["gradient_error"] < 1e-5
        kinds = {cell["kind"] for cell in row["breakdown"]}
        assert kinds >= {"linear", "attention", "convolution", "norm", "gelu"}
        assert row["peak_bytes"] > 4 * sum(p.numel() for p in create_model(SMALL).parameters())  # gradients
    assert [plot.name for plot in plots.draw(results)] == ["throughput", "memory", "operators-1"]


@pytest.mark.usefixtures("small")
def test_logits_that_are_not_finite_are_never_timed(tmp_path):
    model = create_model("cvt_13", num_classes=3)
    model.head.weight.data[0] = torch.finfo(torch.float32).max  # files of NaN are not read
    torch.save(model.state_dict(), tmp_path / "nan.pth")
    with pytest.raises(ValueError, match=r"hf: error nan against float64"):
        measurements.run(checkpoint=str(tmp_path / "nan.pth"), image_size=64, batch_sizes=(1,), rounds=1)


def test_without_freezing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    context, words = contenders.freezing()
    with context:
        assert words == ", without freezing, which this torch does not have"


# Files and comparison -------------------------------------------------------------------------------------


def made(**seconds):
    """Results with these samples in batches of 2, and nothing else that a comparison reads."""
    rows = [{"contender": key, "seconds": samples} for key, samples in seconds.items()]
    config = {
        "model": "cvt_13", "weights": "random", "image_size": 224, "dtype": "float32", "device": "cpu",
        "threads": 1, "train": False, "rounds": 4,
    }  # fmt: skip
    return {
        "schema": result_files.SCHEMA,
        "version": result_files.VERSION,
        "date": "2026-01-01",
        "machine": {"cpu": "x"},
        "versions": {"torch": "2.11"},
        "config": config,
        "batches": [{"batch_size": 2, "rows": rows}],
    }


def test_files_come_back(results, tmp_path):
    result_files.write(results, tmp_path / "a.json")
    assert result_files.read(tmp_path / "a.json") == results


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has schema None, expected 'cvt bench'"),
        ('{"machine_info": {}, "benchmarks": []}', "has schema None"),
        ('{"schema": "cvt bench", "version": 99}', "has version 99, expected 1"),
        ('{"schema": "cvt bench", "version": 1}', "is damaged: KeyError 'config'"),
        ('{"schema": "cvt bench", "version": 1, "config": 3}', "is damaged: TypeError"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert message in bad(capsys, cli.main, "bench", "--compare", path, path)


def test_operations_and_product_of_a_run(results):
    per_image = 2 * cost(SMALL, 64).multiply_adds
    for batch in results["batches"]:
        assert batch["operations"] == batch["batch_size"] * per_image
        assert (batch["product"]["n"], batch["product"]["operations"]) == (64, 2 * 64**3)
        assert len(batch["product"]["seconds"]) == ROUNDS
        assert all(0 < result_files.share_of_product(batch, row) < 100 for row in batch["rows"])
    (line,) = result_files.products(results)
    assert "of a matrix product of 64×64×64" in line
    assert line.endswith(f" GFLOP/s), at {per_image / 1e9:.2f} GFLOP per image.")


def test_advice_on_unsure_choices_and_results_from_before(results):
    old = copy.deepcopy(results)
    assert old["config"].pop("advice") is None
    for batch in old["batches"]:
        del batch["product"]
    assert not any(words in result_files.text(old) for words in ("of product", "cvt tune"))
    old["config"]["advice"] = "run `cvt tune`"
    assert "run `cvt tune`." in result_files.text(old).splitlines()
    assert "run `cvt tune`." in report._page(old, [])


def test_numbers_are_of_each_round_by_itself():
    """So the machine's pace cancels."""
    assert result_files.quartiles([5, 1, 4, 2, 3]) == (3, 2, 4)
    assert result_files.quartiles([7]) == (7, 7, 7)
    assert result_files.ratio([1, 2, 3, 10], [2, 4, 6, 20]) == (2, 2, 2)
    batch = {"product": {"operations": 100, "seconds": [0.5, 1.0, 2.0]}, "operations": 60}
    row = {"seconds": [1.0, 2.0, 4.0]}
    assert result_files.share_of_product(batch, row) == pytest.approx(60 / 200)


def test_comparison_by_hand():
    old = made(hf=[4, 4, 4, 4], cvt=[2, 2, 2, 2], eager=[1, 2, 3, 4])
    # The machine has become twice as slow. cvt was 2 times as fast as hf and is 1.6 times; eager stays.
    new = made(hf=[8, 8, 8, 8], cvt=[5, 5, 5, 5], accelerate=[1, 1, 1, 1], eager=[2, 4, 6, 8])
    hf, cvt, eager = compare.compare(old, new)
    assert hf[:5] == (2, "hf", 0.5, 0.25, (0.5, 0.5, 0.5))
    assert hf.summary == "slower"
    assert cvt[:5] == (2, "cvt", 1.0, 0.4, (0.8, 0.8, 0.8))
    assert cvt.summary == "slower"
    # Ratios to hf 4, 2, 4/3, 1 in both: median 5/3, quartiles 1.25 and 2.5.
    assert eager.factor == pytest.approx((1.0, 0.5, 2.0))
    assert eager.summary == "within noise"
    old["versions"]["torch"], old["config"]["dtype"] = "2.13", "bfloat16"
    lines = compare.comparison(old, new).splitlines()
    words = [line.split()[-1] for line in lines if line.startswith(("hf", "cvt", "eager"))]
    assert words == ["slower", "slower", "noise"]
    differing = [line for line in lines if line.startswith("differs")]
    assert differing == ["differs: torch: 2.13 → 2.11", "differs: dtype: bfloat16 → float32"]
    better = compare.compare(made(cvt=[2, 2, 2, 2]), made(cvt=[1, 1, 1, 1]))
    assert [(c.factor.median, c.summary) for c in better] == [(2, "faster")]
    assert compare.compare(made(cvt=[2, 2]), made(cvt=[1, 1]))[0].summary == "too few rounds, expected 4"
    with pytest.raises(ValueError, match="no contender in the same batch size in common"):
        compare.compare(made(cvt=[1]), made(hf=[1]))
    other = made(cvt=[1])
    other["config"] |= {"model": "pvt_v2_b0", "image_size": 64}
    other["batches"][0]["batch_size"] = 8
    with pytest.raises(ValueError, match="model cvt_13 → pvt_v2_b0; image size 224 → 64; batch size 2 → 8"):
        compare.compare(made(cvt=[1]), other)


# Summary --------------------------------------------------------------------------------------------------


def judged(batches=None, errors=None, **overrides):
    """Results of these seconds, by contender or by batch size and contender; hf and eager are peers."""
    batches = {8: batches} if isinstance(next(iter(batches.values())), list) else batches
    found = made(hf=[1]) | {"machine": {"cpu": "A CPU, 2 threads", "gpus": ["A GPU"]}}
    parity = {"error": 1e-6, "largest": 4.0, "top5": 10, "of": 10, "gradient_error": None}
    found["batches"] = [
        {
            "batch_size": size,
            "rows": [
                {"contender": key, "seconds": s, "parity": parity | {"error": (errors or {}).get(key, 1e-6)}}
                for key, s in seconds.items()
            ],
        }
        for size, seconds in batches.items()
    ]
    names = dict.fromkeys(key for seconds in batches.values() for key in seconds)
    found["contenders"] = {key: {"ours": key not in ("hf", "eager")} for key in names}
    found["config"] |= overrides
    return found


def test_the_summary_names_the_machine_the_equality_and_the_fastest():
    fast = {"hf": [4.0] * 4, "cvt": [2.0] * 4, "eager": [3.0] * 4}
    slow = {"hf": [1.0] * 4, "cvt": [2.0] * 4, "accelerate": [4.0] * 4}
    close = {"hf": [4.0] * 4, "cvt": [2.0, 2.0, 2.1, 2.1], "accelerate": [2.1, 2.1, 2.0, 2.0]}
    few = {"hf": [4.0] * 2, "cvt": [2.0] * 2}
    assert summary.sentence(judged(fast)) == (
        "In a forward on A CPU, 2 threads, all results equal Hugging Face's up to rounding, and the fastest "
        "is cvt in batches of 8 (2.00 times as fast as Hugging Face's)."
    )
    both = summary.sentence(judged({1: fast, 8: slow}, train=True, device="cuda:0"))
    assert both.startswith("In a training step on A GPU, ")
    assert both.endswith("and hf in batches of 8 (the best of ours is cvt, 0.50 times).")
    assert "1.95 times as fast as Hugging Face's, too close to accelerate" in summary.sentence(judged(close))
    assert summary.sentence(judged(few, rounds=2)).endswith(", as far as 2 rounds can tell.")


def test_the_summary_names_whose_results_are_not_equal():
    seconds = {"hf": [4.0], "cvt": [2.0], "accelerate": [2.0], "eager": [3.0]}
    rule = 2 * 1e-6 + 8 * torch.finfo(torch.float32).eps * 4
    assert "all results equal" in summary.sentence(judged(seconds, {"cvt": 0.99 * rule}))
    assert "the results of cvt do not equal" in summary.sentence(judged(seconds, {"cvt": 1.01 * rule}))
    errors = {"cvt": 1.0, "accelerate": torch.nan, "eager": 1.0}
    assert "of cvt, accelerate and eager do not" in summary.sentence(judged(seconds, errors))


def test_doubts_are_as_they_are_defined():
    assert summary.doubt(result_files.Range(1.1, 1.0, 1.2)) == "too close"
    assert summary.doubt(result_files.Range(0.9, 0.8, 1.0)) == "too close"
    assert summary.doubt(result_files.Range(2.0, 1.81, 2.2)) == ""
    assert summary.doubt(result_files.Range(2.0, 1.79, 2.2)) == "rough"
    assert "more than 20% of it apart" in summary.DOUBTS


# Table, page and command ----------------------------------------------------------------------------------


def test_table(results):
    lines = result_files.text(results).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("batch 1")))
    header, *table = lines[start : start + len(results["batches"][0]["rows"]) + 1]
    assert header.split("  ")[-1].strip() == "× eager"
    assert [line.split()[0] for line in table] == [row["contender"] for row in results["batches"][0]["rows"]]
    for column in ("images/s", "slowest", "fastest", "% of product", "memory MiB"):
        end = header.index(column) + len(column)
        assert all(line[end - 1].isdigit() and line[end : end + 2] == "  " for line in table)


def test_page_stands_alone(results, tmp_path):
    page, *plots = report.write_report(results, tmp_path / "new" / "report")
    names = ["throughput", "memory", "operators-1", "operators-2"]
    assert [path.stem for path in plots] == names
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import|<(script|link|iframe|object)| (href|style)=", text)
    images = re.findall(r'<div class="scroll"><img alt="[^"]+" src="data:image/png;base64,([^"]+)">', text)
    assert len(images) == len(plots) == text.count("<img ") == text.count(" src=")
    for data, plot in zip(images, plots, strict=True):
        assert base64.b64decode(data) == plot.read_bytes()
        image = Image.open(plot)
        assert min(image.size) > 300
        low, high = image.convert("L").getextrema()
        assert low < 100 < high == 255  # something is drawn
    assert "no C++ compiler" in text
    body = text[text.index("<body>") :]
    assert body.index(html.escape(summary.sentence(results), quote=False)[:40]) < body.index("<table")
    assert text.count('<div class="scroll">\n<table') == text.count("<table")
    assert text.count("<tr>") > 5 * len(BATCHES)


def test_page_of_doubtful_results(results):
    results = copy.deepcopy(results) | {"batches": results["batches"][1:]}
    for row in results["batches"][0]["rows"]:
        row["seconds"] = {"cvt": [1.0, 2.0] * 2, "accelerate": [9.0] * 4}.get(row["contender"], [8.0] * 4)
    results["contenders"]["cvt"]["about"] = "<script>alert(1)</script>"
    figures = [{"title": "Throughput", "caption": "", "data": ""}]
    text = report._page(results, figures)
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "6.00 (4.00–8.00) <em>rough</em>" in text
    assert "1.00 (1.00–1.00) <em>too close</em>" in text
    assert "<td>0.89 (0.89–0.89)</td>" in text
    assert text.count(summary.DOUBTS) == 1


def test_command(results, tmp_path, capsys, monkeypatch):
    asked = {}
    results = {**results, "batches": results["batches"][:1]}
    monkeypatch.setattr(measurements, "run", lambda **arguments: asked.update(arguments) or results)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    result_files.write(results, old)
    arguments = ["bench", "--batch-size", "1", "8", "--dtype", "bfloat16", "--train", "--peers", "hf,eager"]
    arguments += ["--device", "cpu", "--json", new, "--report", tmp_path / "report", "--against", old]
    assert cli.main(list(map(str, arguments))) == 0
    out = capsys.readouterr().out
    assert (asked["batch_sizes"], asked["dtype"], asked["train"]) == ([1, 8], "bfloat16", True)
    assert asked["peers"] == ["hf", "eager"]
    assert asked["against"] == results
    assert out.startswith(result_files.text(results))
    assert f"report: {tmp_path}/report/index.html" in out
    assert out.count("within noise") == len(rows_of(results))
    assert json.loads(new.read_text()) == results
    assert cli.main(["bench", "--compare", str(old), str(new)]) == 0
    assert capsys.readouterr().out.strip() in out


def test_too_large_a_batch_is_one_line(capsys, monkeypatch):
    def run(**arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(measurements, "run", run)
    line = bad(capsys, cli.main, "bench", "--device", "cpu")
    assert "there is not enough memory for --batch-size 8: CUDA out of memory. Tried to allocate" in line


def test_command_without_matplotlib_fails_before_it_measures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measurements, "run", lambda **arguments: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is not installed; pip" in bad(capsys, cli.main, "bench", "--report", tmp_path)
