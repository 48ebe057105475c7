"""The pages that ``make results`` makes from the JSON of benchmarks/results/."""

import json

import pytest

from benchmarks import tabulate_results as tabulate
from cvt.tools.commands.bench import results as bench_results

README = f"{tabulate.BEGIN_GPU}old\n{tabulate.END}{tabulate.BEGIN}old\n{tabulate.END}after\n"


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_results(root, *, date="2026-01-02-0304", **changes):
    """Writes a run on a GPU with models and kernels; returns its folder."""
    folder = root / "some-gpu" / date
    summary = {
        "schema": tabulate.SCHEMA, "version": tabulate.VERSION, "device": "Some GPU", "device_type": "cuda",
        "date": date, "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "threads": None,
        "commit": 40 * "a", "tiny": False,
        "parts": {"build": {"status": "passed"}, "gpu_tests": {"status": "failed"}},
    }  # fmt: skip
    write(folder / "summary.json", summary | changes)
    facts = {
        "schema": tabulate.LAB_SCHEMA, "version": tabulate.LAB_VERSION, "model": "cvt_13", "image_size": None,
        "dtype": "bfloat16", "tf32": False, "train": False,
    }  # fmt: skip
    times = {"eager": (20.0, 21.0), "compile": (6.0, 6.5), "graphed": (5.0, 5.5), "int8": (4.0, 4.5)}
    for way, (events, waited) in times.items():
        row = {"way": way, "batch": 256, "events": {"ms": events}, "clock": {"ms": waited}}
        rows = [row] if way != "eager" else [row, {"way": way, "batch": 1, "failed": "no good"}]
        write(folder / f"{way}.json", facts | {"way": way, "rows": rows})
    kernels = [
        {"kernels": ["_linear_add_kernel"], "us": 30.0, "operators": ["linear_add"], "floor_us": 10.0},
        {"kernels": ["_linear_add_kernel"], "us": 10.0, "operators": ["linear_add"], "floor_us": 10.0},
        {"kernels": ["void some::kernel<float>(int)"], "us": 5.0},
    ]
    ceilings = {"ceilings": {"copy": 4e12, "product": 7e14}, "launches": 3, "us": 45.0, "floor_us": 20.0}
    write(
        folder / "kernels_256.json",
        facts | ceilings | {"way": "frozen", "batch_size": [256], "rows": kernels},
    )
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
    readme, page = tmp_path / "README.md", tmp_path / "page.md"
    readme.write_text(README)

    def run():
        paths = ["--results", tmp_path, "--page", page, "--readme", readme]
        code = tabulate.main(list(map(str, paths)))
        return code, page.read_text() if page.exists() else None

    return run


def test_the_pages_are_what_the_json_says():
    runs = tabulate.load(tabulate.RESULTS)
    pyramids = tabulate.pyramids_by_device(tabulate.RESULTS)
    others = [*map(tabulate.pyramids_of, pyramids.values()), *tabulate.variants_by_device(tabulate.RESULTS)]
    assert tabulate.PAGE.read_text(encoding="utf-8") == tabulate.page(runs, others)
    readme = tabulate.README.read_text(encoding="utf-8")
    assert tabulate.fill_readme(readme, runs, pyramids) == readme


def test_the_newest_run_of_a_gpu(tmp_path, make):
    write_results(tmp_path, date="2025-12-31-0000", device="Older run")
    write_results(tmp_path)
    code, text = make()
    assert code == 0
    assert "Older run" not in text
    assert "There are no GPU results" not in text
    model = "| CvT-13, bfloat16 | 256 | 20 (21) | 6 (6.5) | 5 (5.5) | 4.00 | 1.20 |"
    assert {
        model,
        "| CvT-13, bfloat16, int8 | 256 | 20 (21) | 6 (6.5) | 4 (4.5) | 5.00 | 1.50 |",
        "**There are no CPU results yet.** `make bench` makes them.",
        "## Some GPU",
        "2026-01-02-0304, torch 2.11.0, triton 3.6.0, CUDA 13.0, commit aaaaaaaaa.",
        "Parts that did not pass: gpu_tests: failed.",
        "### Kernels of a forward, frozen, batch 256",
        "3 kernels take 45 µs; memory at 4.00 TB/s and tensor cores at 700 TFLOP/s would take 20.",
        "| `linear_add` | 2 | 40 | 20 | 50% |",
        "| `some::kernel` | 1 | 5 | – | – |",
    } <= set(text.splitlines())
    readme = (tmp_path / "README.md").read_text()
    assert model in readme
    assert "int8" not in readme


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
    assert list(map(tabulate.entry, ("a", None, 1234.5, 22.6834))) == ["a", "–", "1,234", "22.68"]


_WRONG = {
    "summary.json": {"schema": "other"},
    "eager.json": None,
    "compile.json": {"schema": tabulate.LAB_SCHEMA, "version": 0},
    "variants.json": {"schema": tabulate.VARIANTS_SCHEMA, "version": 2},
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


def test_a_rehearsal_is_no_result(tmp_path, capsys, make):
    write_results(tmp_path, tiny=True)
    assert make() == (2, None)
    assert "rehearsal" in capsys.readouterr().err


def test_a_page_without_marks_is_refused(tmp_path, capsys, make):
    write_results(tmp_path)
    (tmp_path / "README.md").write_text("nothing\n")
    assert make() == (2, None)
    assert "README.md: has no <!-- measured" in capsys.readouterr().err
