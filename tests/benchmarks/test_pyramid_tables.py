"""Tests of the tables of models besides CvT, and of the parts that measure them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks import tabulate_results as tabulate
from cvt.commands.bench import models
from tests.benchmarks.test_benchmarks import bench_file, write_results

ROOT = Path(__file__).parents[2]


def pyramid_file(path, device="Some CPU, 2 threads", date="2026-01-02T03:04:05+00:00", **config):
    """Writes a file of ``cvt bench``: hf, and accelerate, which is twice as fast with 0.41 of its memory."""
    bench_file(path, hf=1000, cvt=410)
    results = json.loads(path.read_text())
    results["batches"][0]["rows"][1]["contender"] = "accelerate"
    results["contenders"]["accelerate"] = results["contenders"].pop("cvt")
    results["config"] |= {"model": "segformer_b0", "image_size": 512, **config}
    results |= {"date": date, "machine": {"cpu": device, "gpus": []}}
    results["versions"] = {"torch": "2.13.0", "transformers": "5.20.2"}
    path.write_text(json.dumps(results))


def test_each_part_measures_a_known_model_into_its_own_file(tmp_path):
    parts = run.plan("cpu", tmp_path, tiny=False, minutes=60.0)
    for name in tabulate.PYRAMID_BENCHES:
        command = parts[name].command
        assert command[command.index("--json") + 1] == str(tmp_path / f"{name}.json")
        assert command[command.index("--model") + 1] in models.PYRAMIDS
    words = {name: " ".join(parts[name].command) for name in tabulate.PYRAMID_BENCHES}
    assert words["bench_segformer_b0"].endswith("--model segformer_b0 --batch-size 1 --peers compile")
    assert words["bench_pvt_v2_b2"].endswith("--model pvt_v2_b2 --batch-size 1 8 --peers compile")
    assert words["bench_pvt_v2_b2_training"].endswith("--model pvt_v2_b2 --batch-size 8 --train")
    (bench,) = re.findall(r"--parts (.*)", (ROOT / "Makefile").read_text().replace("\\\n", " "))
    assert set(tabulate.PYRAMID_BENCHES) < set(bench.split())


def test_a_rehearsal_is_small(tmp_path):
    words = run.plan("cpu", tmp_path, tiny=True, minutes=9.0)["bench_pvt_v2_b2"].command
    assert " ".join(words).endswith("--batch-size 2 --peers hf --image-size 64 --rounds 4")


def test_tables_of_other_models(tmp_path):
    """Each device has the newest of each file, wherever it lies; they are no newer run of CvT's."""
    folder = write_results(tmp_path, device_type="cpu", cuda=None, threads=2)
    bench_file(folder / "bench.json", hf=1000, cvt=410)
    pyramid_file(folder / "bench_segformer_b0.json", model="old")
    newer = tmp_path / "some-gpu" / "2026-02-03-0000"
    newer.mkdir()
    (newer / "summary.json").write_text((folder / "summary.json").read_text())
    pyramid_file(newer / "bench_segformer_b0.json")
    pyramid_file(folder / "bench_pvt_v2_b2_training.json", model="pvt_v2_b2", image_size=224, train=True)
    readme, page, quantize = (tmp_path / name for name in ("README.md", "page.md", "quantize.md"))
    readme.write_text(
        f"{tabulate.BEGIN}old\n{tabulate.END}between\n{tabulate.BEGIN_PYRAMIDS}old\n{tabulate.END}after\n"
    )
    quantize.write_text("untouched\n")
    arguments = ["--results", tmp_path, "--page", page, "--readme", readme, "--quantize", quantize]
    assert tabulate.main(list(map(str, arguments))) == 0
    lines = page.read_text().splitlines()
    at = lines.index("## SegFormer and PVT on Some CPU")
    assert lines[at + 2] == "2026-01-02, torch 2.13.0, transformers 5.20.2."
    assert lines[at + 4 : at + 9] == [
        "segformer_b0, random weights, 512×512, float32 on cpu, 2 threads, forward, 4 rounds:",
        "",
        "| batch | contender | images/s | × hf | memory, of hf's |",
        "|---|---|---|---|---|",
        "| 8 | `hf` | 1.6 | 1 | 1.00 |",
    ]
    assert "| 8 | `accelerate` | 3.2 | 2.00 (2.00–2.00) | 0.41 |" in lines[at:]
    assert "## Some GPU" in lines[:at]
    assert not any(line.startswith("old") for line in lines)
    assert readme.read_text().splitlines()[-5:] == [
        "|  | batch | Hugging Face's, images/s | `torch.compile` | accelerated | with `freeze=False` "
        "| memory, accelerated |",
        "|---|---|---|---|---|---|---|",
        "| segformer_b0, 512×512, float32 | 8 | 1.6 | – | 2.00 × | 2.00 × | 0.41 |",
        tabulate.END.strip(),
        "after",
    ]
    assert "`cvt` | memory of `cvt`" in readme.read_text().partition("between")[0]


def test_the_newest_device_is_in_the_readme(tmp_path):
    for name, date in (("a", "2026-01-01"), ("b", "2026-03-01"), ("c", "2026-02-01")):
        folder = tmp_path / name / date
        folder.mkdir(parents=True)
        pyramid_file(folder / "bench_pvt_v2_b2.json", date=date, model=f"of {name}")
    page = f"{tabulate.BEGIN_PYRAMIDS}{tabulate.END}"
    filled = tabulate.fill_readme(page, [], tabulate.pyramids_by_device(tmp_path))
    assert ("of a" in filled, "of b" in filled, "of c" in filled) == (False, True, False)
    assert tabulate.fill_readme("no results", [], {}) == "no results"
    with pytest.raises(ValueError, match=r"README.md: has no <!-- measured, other models"):
        tabulate.fill_readme(f"{tabulate.BEGIN}{tabulate.END}", [], tabulate.pyramids_by_device(tmp_path))


def test_a_rehearsal_is_no_result(tmp_path):
    folder = write_results(tmp_path, tiny=True)
    pyramid_file(folder / "bench_pvt_v2_b2.json")
    with pytest.raises(ValueError, match="holds a rehearsal"):
        tabulate.pyramids_by_device(tmp_path)
