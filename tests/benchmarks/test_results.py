"""The pages that ``make results`` makes from the JSON of benchmarks/results/."""

import json

import pytest

from benchmarks import tabulate_results as tabulate
from cvt.commands.bench import results as bench_results

README = f"{tabulate.BEGIN}old\n{tabulate.END}after\n"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_results(root, *, date="2026-01-02-0304", **changes):
    """Writes a run on a GPU with two suites; returns its folder."""
    folder = root / "some-gpu" / date
    summary = {
        "schema": tabulate.SCHEMA, "version": tabulate.VERSION, "device": "Some GPU", "device_type": "cuda",
        "date": date, "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "threads": None,
        "commit": 40 * "a", "tiny": False,
        "parts": {"build": {"status": "passed"}, "gpu_tests": {"status": "failed"}},
    }  # fmt: skip
    write(folder / "summary.json", summary | changes)

    def row(contender, seconds, suite="attention", case="stage1", **facts):
        facts |= {"suite": suite, "case": case, "contender": contender, "seconds": seconds}
        return {"extra_info": {"dtype": "bfloat16", "batch": 256, "share_of_ceiling": 0.5} | facts}

    model = {"suite": "model", "case": "cvt_13", "images_per_second": 1234.0, "peak_memory_bytes": 2**30}
    suites = {
        "attention": [row("sdpa", 3e-4), row("triton", 2e-4), {"extra_info": {}}],
        "model": [row("hf", 1e-3, **model), row("compile", 2e-3, **model, batch=1)],
    }
    for name, benchmarks in suites.items():
        ceilings = {"copy": 4e12, "matmul_bfloat16": 7e14}
        write(folder / f"{name}.json", {"ceilings": ceilings, "benchmarks": benchmarks})
    return folder


def bench_file(path, ours="cvt", date="2026-01-02", model="cvt_13", **versions):
    """Writes a file of ``cvt bench``: hf, and ours, which is twice as fast with 0.41 of its memory."""
    parity = {"error": 0.0, "largest": 1.0, "top5": 5, "of": 5, "gradient_error": None}
    speeds = {"hf": ([2.0, 4.0, 6.0, 8.0], 1000), ours: ([1.0, 2.0, 3.0, 4.0], 410)}
    rows = [
        {"contender": name, "seconds": seconds, "peak_bytes": peak, "parity": parity}
        for name, (seconds, peak) in speeds.items()
    ]
    config = {
        "model": model, "weights": "random weights", "image_size": 224, "dtype": "float32", "device": "cpu",
        "threads": 2, "train": False, "rounds": 4,
    }  # fmt: skip
    results = {
        "schema": bench_results.SCHEMA, "version": bench_results.VERSION,
        "date": f"{date}T03:04:05+00:00", "config": config, "machine": {"cpu": "Some CPU", "gpus": []},
        "versions": {"torch": "2.13.0", "transformers": "5.20.2"},
        "contenders": {name: {"about": name, "ours": name == ours, "note": None} for name in speeds},
        "batches": [{"batch_size": 8, "rows": rows}],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    bench_results.write(results, path)


@pytest.fixture
def make(tmp_path):
    """Returns a function that makes the pages of a folder, and returns the exit code and the page."""
    readme, page, quantize = (tmp_path / name for name in ("README.md", "page.md", "quantize.md"))
    readme.write_text(README)
    quantize.write_text(f"before\n{tabulate.BEGIN}old\n{tabulate.END}after\n")

    def run():
        paths = ["--results", tmp_path, "--page", page, "--readme", readme, "--quantize", quantize]
        code = tabulate.main(list(map(str, paths)))
        return code, page.read_text() if page.exists() else None

    return run


def test_the_pages_are_what_the_json_says():
    """The results of this repository have every kind of table except for GPUs and the model's suite."""
    runs = tabulate.load(tabulate.RESULTS)
    pyramids = tabulate.pyramids_by_device(tabulate.RESULTS)
    others = [*map(tabulate.pyramids_of, pyramids.values()), *tabulate.variants_by_device(tabulate.RESULTS)]
    assert tabulate.PAGE.read_text(encoding="utf-8") == tabulate.page(runs, others)
    readme = tabulate.README.read_text(encoding="utf-8")
    assert tabulate.fill_readme(readme, runs, pyramids) == readme
    quantize = tabulate.QUANTIZE.read_text(encoding="utf-8")
    assert tabulate.fill_quantize(quantize, tabulate.RESULTS) == quantize


def test_the_newest_run_of_a_gpu(tmp_path, make):
    write_results(tmp_path, date="2025-12-31-0000", device="Older run")
    write_results(tmp_path)
    code, text = make()
    assert code == 0
    assert "Older run" not in text
    assert "There are no GPU results" not in text
    assert "### Linear layers" not in text
    assert {
        "**There are no CPU results yet.** `make bench` makes them.",
        "## Some GPU",
        "2026-01-02-0304, torch 2.11.0, triton 3.6.0, CUDA 13.0, commit aaaaaaaaa.",
        "Ceilings: copy 4,000 GB/s, bfloat16 products 700 TFLOP/s.",
        "Parts that did not pass: gpu_tests: failed.",
        "| case | dtype | batch | sdpa | triton | gain |",
        "| stage1 | bfloat16 | 256 | 300 (50%) | 200 (50%) | 1.50× |",
        "| cvt_13 | bfloat16 | 256 | 1,234 (1,024 MiB) | – | – |",
        "| cvt_13 | bfloat16 | 1 | – | 1,234 (1,024 MiB) | – |",
    } <= set(text.splitlines())
    assert (tmp_path / "README.md").read_text() == README  # nothing was measured for it


def test_the_newest_files_of_other_models(tmp_path, make):
    """Each device has the newest of each file, wherever it lies; they are no newer run of CvT's."""
    folder = write_results(tmp_path, device_type="cpu", cuda=None, threads=2)
    bench_file(folder / "bench.json")
    bench_file(folder / "bench_segformer_b0.json", "accelerate", model="old")
    newer = tmp_path / "some-gpu" / "2026-02-03-0000"
    write(newer / "summary.json", json.loads((folder / "summary.json").read_text()))
    bench_file(newer / "bench_segformer_b0.json", "accelerate", model="segformer_b0")
    bench_file(tmp_path / "b" / "1" / "bench_pvt_v2_b2.json", "accelerate", "2026-03-01", "newest")
    bench_file(tmp_path / "c" / "1" / "bench_pvt_v2_b2.json", "accelerate", "2026-02-01", "newer")
    code, text = make()
    assert code == 0
    assert "## Some GPU" in text
    assert "\nold" not in text
    assert "| 8 | `accelerate` | 3.2 | 2.00 (2.00–2.00) | 0.41 |" in text.splitlines()
    assert text.count("## SegFormer and PVT on Some CPU\n\n") == 3
    # What was measured on the same machine, newest first where there are two.
    table = (tmp_path / "README.md").read_text().splitlines()
    assert "| CvT-13, float32 | 8 | 1.6 | – | – |" in table
    assert "| SegFormer-B0, float32 | 8 | 1.6 | 2.00 × | 0.41 |" in table


def test_runtimes_have_columns_and_a_table_of_the_first_result(tmp_path, make):
    folder = write_results(tmp_path, device_type="cpu", cuda=None, threads=2)
    bench_file(folder / "bench.json", "openvino")
    results = json.loads((folder / "bench.json").read_text())
    first = {"batch_size": 8, "load": 1.0, "seconds": 0.25, "untuned_seconds": None}
    results["contenders"]["openvino"]["first"] = first
    results["contenders"]["onnxruntime"] = {"about": "a", "ours": False, "note": "fails: its process ended"}
    write(folder / "bench.json", results)
    code, text = make()
    assert code == 0
    assert "| batch | contender | images/s | × hf | × openvino | memory, of hf's |" in text.splitlines()
    assert "| openvino | 0.25 | – | 1.00 |" in text.splitlines()
    assert "`onnxruntime` was not measured: fails: its process ended." in text
    table = (tmp_path / "README.md").read_text().splitlines()
    assert "| CvT-13, float32 | 8 | 1.6 | 2.00 × | – | – |" in table


def test_what_is_not_known_is_a_dash():
    alone = {"hf": {"seconds": [1.0], "peak_bytes": 1000}}
    assert tabulate.share_of_memory(alone, "cvt") == tabulate.times_as_fast(alone, "cvt") == "–"
    rows = [{"set": "avx2", "batch": 8, "model": name, "seconds": [0.5]} for name in ("float32", "int8")]
    rows.append({"set": None, "batch": 8, "model": "float32", "seconds": [0.2, 0.4, 0.3]})
    assert tabulate.speed_of_8_bits(rows)[1:] == [
        ["`avx2`", "8", "16", "1.00 ×"], ["newest", "8", "26.7", "–"]
    ]  # fmt: skip
    row = {"model": "b", "scheme": "dynamic", "sqnr": 48.0, "top1": [0.9, 0.875]}
    assert tabulate.accuracy_of_8_bits([row])[1][3:] == ["90.00%, 87.50%", "–", "–"]
    assert list(map(tabulate.entry, ("a", None, 1234.5, 22.6834))) == ["a", "–", "1,234", "22.68"]


_WRONG = {
    "summary.json": {"schema": "other"},
    "attention.json": None,
    "bench.json": {},
    "auto.json": {"schema": tabulate.AUTO_SCHEMA, "version": 0},
    "variants.json": {"schema": tabulate.VARIANTS_SCHEMA, "version": 2},
    "quantization.json": {"schema": tabulate.QUANTIZATION_SCHEMA, "version": 2},
}


@pytest.mark.parametrize("name", _WRONG)
def test_results_that_cannot_be_used(tmp_path, capsys, make, name):
    path = write(write_results(tmp_path) / name, _WRONG[name])
    if _WRONG[name] is None:
        path.write_text("[")
    assert make() == (2, None)
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["attention.json", "bench_pvt_v2_b2.json"])
def test_a_rehearsal_is_no_result(tmp_path, capsys, make, name):
    folder = write_results(tmp_path, tiny=True)
    bench_file(folder / "bench_pvt_v2_b2.json")
    if name != "attention.json":
        (folder / "attention.json").unlink()
        (folder / "model.json").unlink()
    assert make() == (2, None)
    assert "rehearsal" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.md", "quantize.md"])
def test_a_page_without_marks_is_refused(tmp_path, capsys, make, name):
    folder = write_results(tmp_path, device_type="cpu")
    bench_file(folder / "bench.json")
    facts = {"schema": tabulate.QUANTIZATION_SCHEMA, "version": tabulate.QUANTIZATION_VERSION}
    facts |= {"device": "Some CPU", "torch": "2.13.0", "threads": 2, "speed": [], "accuracy": []}
    write(folder / "quantization.json", facts)
    (tmp_path / name).write_text("nothing\n")
    assert make() == (2, None)
    assert f"{name}: has no <!-- measured" in capsys.readouterr().err
