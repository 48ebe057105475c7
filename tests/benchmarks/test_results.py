"""The tables, the picture and the pages that are made from pytest-benchmark's JSON."""

import json

import pytest

from benchmarks import report

README = f"{report.BEGIN['cuda']}old\n{report.END}{report.BEGIN['cpu']}old\n{report.END}after\n"


def row(seconds, rounds=None, **facts):
    stats = {"median": seconds, **({} if rounds is None else {"data": rounds})}
    return {"group": "", "name": "", "extra_info": facts, "stats": stats}


def model_row(contender, seconds, rounds=None, *, batch=8, model="cvt_13", dtype="float32", **facts):
    facts = {"suite": "models", "train": False, "peak_bytes": 1000} | facts
    return row(seconds, rounds, model=model, dtype=dtype, batch=batch, contender=contender, **facts)


def operator_row(contender, seconds, *, operator="gelu", case="gelu-cvt_13-stage1-float32-forward", **facts):
    rates = {"gigabytes_per_second": 1e-9 / seconds, "teraflop_per_second": 0.0, "percent_of_ceiling": 50.0}
    errors = {"error": 1e-7, "error_allowed": 2e-7, "is_disturbed": False}
    settings = {"suite": "operators", "operator": operator, "case": case, "model": "cvt_13", "batch": 8}
    return row(
        seconds, contender=contender, dtype="float32", train=False, **settings | rates | errors | facts
    )


def write(root, *rows, name="models", device="Some CPU", date="2026-01-02", kind="cpu", **machine):
    """Writes a file of pytest-benchmark; returns its path."""
    path = root / device.lower().replace(" ", "-") / date / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"device": device, "device_type": kind, "torch": "2.13.0", "threads": 2, "tiny": False}
    content = {
        "machine_info": facts | machine,
        "commit_info": {"id": 40 * "a"},
        "datetime": f"{date}T03:04:05+00:00",
        "benchmarks": rows,
    }
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def pages(tmp_path):
    """Returns a function that makes the pages of a folder of results, and returns them."""
    page, everything, readme = (tmp_path / name for name in ("page.md", "everything.md", "README.md"))
    readme.write_text(README)

    def make():
        report.write_pages(tmp_path, page, everything, readme)
        return everything.read_text(), readme.read_text(), page.read_text()

    return make


def test_the_pages_are_what_the_json_says(tmp_path):
    page, everything, readme = (tmp_path / name for name in ("page.md", "everything.md", "README.md"))
    readme.write_text(report.README.read_text(encoding="utf-8"), encoding="utf-8")
    report.write_pages(report.RESULTS, page, everything, readme)
    for made, kept in ((page, report.PAGE), (everything, report.EVERYTHING), (readme, report.README)):
        assert made.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


def test_models_on_a_gpu(tmp_path, pages):
    gpu = {"device": "Some GPU", "kind": "cuda"}
    facts = {"batch": 256, "dtype": "bfloat16"}
    write(tmp_path, model_row("hf", 0.03, **facts), date="2025-12-31", **gpu)
    write(
        tmp_path,
        model_row("hf", 0.02, waits=[0.021], **facts),
        model_row("accelerate-graphed", 0.005, waits=[0.005, 0.006, 0.007], **facts),
        model_row("accelerate-int8-graphed", 0.004, **facts),
        **gpu,
    )
    write(tmp_path, model_row("compile", 0.006, **facts), date="2025-12-30", **gpu)
    kernels = [
        {"kernels": ["_linear_add_kernel"], "us": 30.0, "operators": ["linear_add"], "floor_us": 10.0},
        {"kernels": ["_linear_add_kernel"], "us": 10.0, "operators": ["linear_add"], "floor_us": 10.0},
        {"kernels": ["void some::kernel<float>(int)"], "us": 5.0},
    ]
    listed = {
        "schema": report.KERNELS, "device": "Some GPU", "model": "cvt_13", "train": False, "us": 45.0,
        "contender": "accelerate-frozen", "batch_size": 256, "launches": 3, "floor_us": 20.0,
        "ceilings": {"copy": 4e12, "product": 7e14}, "rows": kernels,
    }  # fmt: skip
    (tmp_path / "some-gpu/2026-01-02/kernels_256.json").write_text(json.dumps(listed))
    text, readme, page = pages()
    ours = "| CvT-13, bfloat16 | 256 | 20 (21) | 6† | 5 (6) | 4.00 | 1.20† |"
    assert {
        ours,
        "| CvT-13, bfloat16, int8 | 256 | 20 (21) | 6† | 4 | 5.00 | 1.50† |",
        "† from an earlier run than ours, on another machine of the same kind.",
        "**There are no results of a CPU yet.** `make bench` makes them.",
        "### Kernels of a forward, `accelerate-frozen`, batch 256",
        "3 kernels take 45 µs; memory at 4.00 TB/s and tensor cores at 700 TFLOP/s would take 20.",
        "| `linear_add` | 2 | 40 | 20 | 50% |",
        "| `some::kernel` | 1 | 5 | – | – |",
    } <= set(text.splitlines())
    assert ours in page
    assert "| CvT-13, bfloat16 | 256 | 6† | 5 | 1.20† |" in readme.splitlines()
    assert "† from an earlier run than ours, on another machine of the same kind." in readme
    assert "int8" not in readme
    assert "2025-12-30 at aaaaaaaaa, 2026-01-02 at aaaaaaaaa; torch 2.13.0." in text


def test_models_on_a_cpu(tmp_path, pages):
    """A ratio is the median of the rounds' own; the newest file of a model counts, of the newest machine."""
    rounds = [2.0, 4.0, 6.0, 8.0]
    halves = [each / 2 for each in rounds]
    write(
        tmp_path,
        model_row("hf", 5.0, rounds, resident_bytes=2000, error=1e-6),
        model_row(
            "accelerate-frozen", 2.5, halves,
            peak_bytes=410, first_seconds=0.25, resident_bytes=3000, error=2e-6,
        ),
        model_row("openvino", 5.0, rounds, peak_bytes=None),
    )  # fmt: skip
    write(tmp_path, model_row("hf", 50.0, [50.0] * 4), date="2025-01-01")
    write(tmp_path, model_row("hf", 1.0), device="Old CPU", date="2024-01-01")
    text, readme, page = pages()
    assert "| 8 | `accelerate-frozen` | 3.2 | 2.00 × | 2.00 × | 0.41 | 0.25 |" in text.splitlines()
    assert "| 8 | `openvino` | 1.6 | 1.00 × | 1.00 × | – | – |" in text.splitlines()
    assert "## Old CPU" in text
    assert "| CvT-13, float32 | 8 | 1.6 | 1.00 × | 2.00 × | 1.50 |" in readme.splitlines()
    assert "batch sizes on Old CPU, Some CPU: float32 2.00 to 2.00." in readme
    assert "| CvT-13, float32|8|1.6|1.00×|2.00×|1.50 |" in page.splitlines()
    assert "| CvT-13, float32 | 1.0e-06 | 2.0e-06 |" in text.splitlines()


def test_operators_have_a_table_each_and_a_picture(tmp_path, capsys):
    other = {"case": "gelu-cvt_13-stage2-float32-forward"}
    path = write(
        tmp_path,
        operator_row("reference", 0.004),
        operator_row("torch.compile", 0.003),
        operator_row("cpu", 0.002, is_disturbed=True),
        operator_row("reference", 0.004, **other),
        operator_row("cpu", 0.001, **other),
        operator_row("reference", 0.1, operator="linear", case="linear-cvt_13-stage1-float32-forward"),
        name="operators",
    )
    plot = tmp_path / "new" / "operators.png"
    assert report.main([str(path), "--plot", str(plot)]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    words = "cvt_13 stage1 float32 forward"
    assert [*words.split(), "cpu", "2", "?", "2.00", "1.50", "5e-07", "0", "50", "50%"] in printed
    assert [*words.split(), "torch.compile", "3", "1.33", "1.00", "3.33e-07", "0", "50", "50%"] in printed
    assert printed[-3][:6] == ["1", "of", "6", "rows", "(marked", "?):"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    # A page has what is fastest of this project's, where it was measured.
    tables = report.operator_tables(report.read(path), brief=True)
    assert list(tables) == ["gelu"]
    assert [line[1] for line in tables["gelu"][1:]] == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "is no JSON of the suites: JSONDecodeError"),
        ("[]", "is no JSON of the suites: TypeError"),
        ('{"benchmarks": []}', "is no JSON of the suites: KeyError 'machine_info'"),
    ],
)
def test_files_that_are_no_results(tmp_path, capsys, text, told):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert report.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{path}: {told}" in error
    assert error.count("\n") == 1


def test_a_page_without_marks_is_refused(tmp_path):
    write(tmp_path, model_row("hf", 1.0))
    (tmp_path / "README.md").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"README.md: has no <!-- measured"):
        report.write_pages(*(tmp_path / name for name in (".", "page.md", "everything.md", "README.md")))
    assert not (tmp_path / "page.md").exists()
