"""Tests of ``cvt bench``: its contenders, what it measures, its tables and its picture."""

import dataclasses
import json
import re
import statistics

import pytest
import torch
from PIL import Image
from torch import nn

import cvt_kernels as ck
from cvt import PRESETS, create_model
from cvt.tools import commands as cli
from cvt.tools.commands.bench import contenders, contest, workers
from cvt.tools.commands.bench import results as result_files
from cvt.tools.evaluation import cost
from cvt_kernels.tuning import ceilings
from tests.checks import bad
from tests.upstream import KERNELS_FIRST

BATCHES, ROUNDS = (1, 2), 4
CPU = torch.device("cpu")
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
    """Runs contenders in this process, one step in a turn, without a pause."""
    patch.setattr(workers, "Worker", Together)
    patch.setattr(workers, "_TURN", 1e-9)
    patch.setattr(contest, "_PAUSE", 0)
    patch.setitem(ceilings.PRODUCT_SIZE, "cpu", 64)


def make_small(patch):
    """Lets cvt_13 be a small model, and its measurement quick."""
    make_quick(patch)
    patch.setitem(PRESETS, "cvt_13", SMALL)


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


class Uncompilable(nn.Module):
    def forward(self, images):
        raise RuntimeError("no C++ compiler\nand more")


@pytest.fixture(scope="module")
def results():
    """Runs all contenders, small; torch.compile, which is slow, is replaced: it does nothing or fails."""

    def compile_quickly(model, mode, dynamic):
        assert not dynamic
        return model if mode is None else Uncompilable()

    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.setattr(torch, "compile", compile_quickly)
        with ck.use_backend(*KERNELS_FIRST):
            return result_files.run(
                image_size=64,
                batch_sizes=BATCHES,
                rounds=ROUNDS,
                peers=("compile", "compile-max", "eager", "accelerate-compile", "accelerate-graphed"),
            )


def rows_of(results):
    return {
        (batch["batch_size"], row["contender"]): row for batch in results["batches"] for row in batch["rows"]
    }


# Contenders -----------------------------------------------------------------------------------------------


def test_the_contenders_that_need_not_be_asked_for():
    """Nothing is frozen for a training step; on a GPU frozen models are replayed as graphs."""
    gpu = torch.device("cuda")
    assert contenders.chosen([], gpu, train=True) == ["hf", "cvt", "accelerate"]
    graphed = ["hf", "cvt", "accelerate", "cvt-graphed", "accelerate-graphed"]
    assert contenders.chosen([], gpu, train=False) == graphed
    frozen = ["hf", "eager", "cvt", "accelerate", "cvt-frozen", "accelerate-frozen", "accelerate-int8"]
    assert contenders.chosen(["accelerate-int8", "eager"], CPU, train=False) == frozen


def test_why_a_contender_cannot_run():
    for key, device, why_not in (
        ("cvt-frozen", CPU, "nothing is frozen in training"),
        ("accelerate-live-graphed", CPU, "CUDA graphs need an NVIDIA GPU"),
        ("accelerate-live-graphed", torch.device("cuda"), None),
    ):
        assert contenders.CONTENDERS[key].why_not(device, train=True) == why_not


def test_help_lists_every_contender(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    text = "".join(capsys.readouterr().out.split())  # a line may end at a hyphen
    words = re.split("[,():]", text)
    assert not contenders.CONTENDERS.keys() - set(words)


# What is measured -----------------------------------------------------------------------------------------


def test_samples_and_facts(results):
    rows = rows_of(results)
    ours = ["cvt", "accelerate", "cvt-frozen", "accelerate-frozen", "accelerate-compile"]
    assert list(rows) == [(size, key) for size in BATCHES for key in ["hf", "compile", "eager", *ours]]
    for row in rows.values():
        assert len(row["seconds"]) == ROUNDS
        assert all(0 < s < 60 for s in row["seconds"])
        assert row["waits"] is None
        assert row["error"] <= row["error_allowed"] < 1e-4 < 1 < row["largest"]
        assert row["top5"] == row["of"] == 10  # both photographs, in batches of 1 too
        assert row["gradient_error"] is row["gradient_error_allowed"] is None
        assert row["peak_bytes"] > 0
        assert row["resident_bytes"] >= 0
    found = results["contenders"]
    assert found["compile-max"]["note"] == "fails: RuntimeError: no C++ compiler"
    assert found["accelerate-graphed"]["note"] == "CUDA graphs need an NVIDIA GPU"
    assert found["accelerate-compile"]["about"].endswith("under torch.compile, mode best")
    assert [key for key, about in found.items() if about["ours"]] == [*ours, "accelerate-graphed"]
    assert results["config"]["photos"] == ["china.jpg", "flower.jpg"]
    assert results["machine"]["torch"] == torch.__version__


@pytest.mark.usefixtures("small")
def test_what_is_not_replayed_is_not_measured_as_a_graph(monkeypatch):
    monkeypatch.setattr(contenders.Contender, "why_not", lambda self, device, train: None)
    results = result_files.run(image_size=32, batch_sizes=(1,), rounds=1, peers=["cvt-graphed"])
    assert (1, "cvt-graphed") not in rows_of(results)
    note = "is not replayed as a CUDA graph: an argument is on cpu, not on an NVIDIA GPU"
    assert results["contenders"]["cvt-graphed"]["note"] == note


class Allocating(nn.Module):
    def forward(self, x):
        first = x.new_empty(1000, 1000)
        second = x.new_empty(500, 1000)
        del first
        return second.new_empty(400, 1000)


def test_peak_of_memory_is_exact(tmp_path):
    job = workers.Job(str(tmp_path), CPU, "float32", False, 1, ("auto",))
    job.save(hf=Allocating().eval(), images=torch.zeros(1, 3, 1, 1))
    runner = workers.Runner("hf", job)
    runner.answer("first", 1)
    assert runner.answer("facts", 1)["peak_bytes"] == 4 * (1000 + 500) * 1000


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_step_leaves_the_weights(dtype, monkeypatch):
    """Dtypes of 16 bits run under autocast."""
    is_left, first = [], workers.Runner.first

    def made(self, batch_size):
        answer = first(self, batch_size)
        before = [p.detach().clone() for p in self._model.parameters()]
        self._step(workers.filled(self._images, batch_size)[0])
        is_left.append(all(map(torch.equal, before, self._model.parameters())))
        return answer

    monkeypatch.setattr(workers.Runner, "first", made)
    results = result_files.run(image_size=64, batch_sizes=(1,), rounds=1, train=True, dtype=dtype)
    rows = rows_of(results)
    assert list(rows) == [(1, "hf"), (1, "cvt"), (1, "accelerate")]
    assert is_left == [True] * 3
    for row in rows.values():
        least = 0 if dtype == "float32" else 1e-6
        assert least < row["gradient_error"] <= row["gradient_error_allowed"] < (1e-4 if least == 0 else 0.3)
        assert row["peak_bytes"] > 4 * sum(p.numel() for p in create_model(SMALL).parameters())  # gradients


@pytest.mark.usefixtures("small")
def test_logits_that_are_not_finite_are_never_timed(tmp_path):
    model = create_model("cvt_13", num_classes=3)
    model.head.weight.data[0] = torch.finfo(torch.float32).max  # files of NaN are not read
    torch.save(model.state_dict(), tmp_path / "nan.pth")
    with pytest.raises(ValueError, match=r"hf: error nan against float64"):
        result_files.run(checkpoint=str(tmp_path / "nan.pth"), image_size=64, batch_sizes=(1,), rounds=1)


def test_operations_and_product_of_a_run(results):
    per_image = 2 * cost(SMALL, 64).multiply_adds
    for batch in results["batches"]:
        assert batch["operations"] == batch["batch_size"] * per_image
        assert (batch["product"]["n"], batch["product"]["operations"]) == (64, 2 * 64**3)
        assert len(batch["product"]["seconds"]) == ROUNDS
        assert all(0 < contest.share_of_product(batch, row) < 100 for row in batch["rows"])
    lines = result_files.text(results).splitlines()
    (line,) = [line for line in lines if "of a matrix product of 64×64×64" in line]
    assert line.endswith(f" GFLOP/s), at {per_image / 1e9:.2f} GFLOP per image.")


# Table, picture and command -------------------------------------------------------------------------------


def test_table(results):
    batch = results["batches"][0]
    header, *table = result_files.table(results, batch)
    assert header[:5] == ["batch 1", "images/s", "ms", "× hf", "% of product"]
    assert [line[0] for line in table] == [row["contender"] for row in batch["rows"]]
    assert "waiting, ms" not in header
    assert "Δ of gradients' norms" not in header
    for row, line in zip(batch["rows"], table, strict=True):
        told = dict(zip(header, line, strict=True))
        seconds = statistics.median(row["seconds"])
        assert (told["images/s"], told["ms"]) == (f"{1 / seconds:.2f}", f"{1e3 * seconds:.2f}")
        assert told["max |Δ logit|"] == f"{row['error']:.1e}"
        assert told["allowed"] == f"{row['error_allowed']:.1e}"
        assert told["top-5 agreement"] == "10/10"
        assert told["process MiB"] == f"{row['resident_bytes'] / 2**20:.1f}"
    assert table[0][3] == "1.00 (1.00–1.00)"


def test_summary(results):
    """Two lines about what was measured, then ours beside Hugging Face's in each batch size."""
    named = {**results, "contenders": {"hf": results["contenders"]["eager"], **results["contenders"]}}
    batches = [
        {**batch, "rows": [{**batch["rows"][0], "contender": "hf"}, *batch["rows"]]}
        for batch in results["batches"]
    ]
    lines = result_files.summary({**named, "batches": batches}).splitlines()
    assert results["config"]["weights"] in lines[1]
    header, *table, memory = lines[3:]
    assert header.split()[:3] == ["batch", "model", "images/s"]
    assert len(table) == 2 * len(batches)
    assert memory.startswith("Process: ")


def test_command(results, tmp_path, capsys, monkeypatch):
    asked = {}
    monkeypatch.setattr(result_files, "run", lambda **arguments: asked.update(arguments) or results)
    new, plot = tmp_path / "new.json", tmp_path / "new.png"
    arguments = ["bench", "--batch-size", "1", "8", "--dtype", "bfloat16", "--train", "--peers", "hf,eager"]
    arguments += ["--device", "cpu", "--json", new, "--plot", plot]
    assert cli.main(list(map(str, arguments))) == 0
    out = capsys.readouterr().out
    assert (asked["batch_sizes"], asked["dtype"], asked["train"]) == ([1, 8], "bfloat16", True)
    assert asked["peers"] == ["hf", "eager"]
    assert out.startswith(result_files.text(results))
    assert json.loads(new.read_text()) == results
    monkeypatch.setattr(result_files, "summary", lambda measured: f"in short, {asked['summary']}")
    assert cli.main(["bench", "--summary"]) == 0
    assert capsys.readouterr().out == "in short, True\n"
    low, high = Image.open(plot).convert("L").getextrema()
    assert low < 100 < high == 255  # something is drawn


@pytest.mark.usefixtures("small")
def test_the_summary_is_ours_beside_hugging_faces():
    results = result_files.run(image_size=32, batch_sizes=(1,), rounds=1, summary=True, peers=("eager",))
    assert list(rows_of(results)) == [(1, "hf"), (1, "accelerate-frozen")]


def test_too_large_a_batch_is_one_line(capsys, monkeypatch):
    def run(**arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(result_files, "run", run)
    line = bad(capsys, cli.main, "bench", "--device", "cpu")
    assert "there is not enough memory for images of this size and number: CUDA out of memory. Tri" in line
