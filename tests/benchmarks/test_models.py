"""Times of models, and the reports that hold them."""

import json

import pytest

from benchmarks import lab, models
from tests import upstream


@pytest.fixture(autouse=True)
def _small_on_cpu(monkeypatch):
    """Measures a small model on the CPU, whatever the machine has."""

    def small(options, dtype):
        return upstream.huggingface().train(options.train).to(dtype), 32

    monkeypatch.setattr(lab, "DEVICE", "cpu")
    monkeypatch.setattr(lab, "hugging_face", small)


def measured(path, *options):
    code = models.main([str(path), "--seconds", "0.01", *options])
    return code, json.loads(path.read_text())


def test_a_forward_has_times_and_an_error(tmp_path):
    code, report = measured(tmp_path / "a.json", "--way", "live", "--batch-size", "2", "1")
    assert code == 0
    assert (report["schema"], report["model"], report["dtype"]) == (lab.SCHEMA, "cvt_13", "bfloat16")
    assert [row["batch"] for row in report["rows"]] == [2, 1]
    for row in report["rows"]:
        assert 0 < row["error"] < 0.1
        low, high = row["clock"]["quartiles"]
        assert 0 < low <= row["clock"]["ms"] <= high


def test_a_training_step_has_losses(tmp_path):
    code, report = measured(tmp_path / "a.json", "--way", "live", "--batch-size", "4", "--train")
    assert code == 0
    (row,) = report["rows"]
    assert row["losses"][0] > row["losses"][-1] > 0  # AdamW has changed the weights
    assert row["train"]


def test_a_way_that_fails_leaves_its_reason(tmp_path, monkeypatch):
    def failing(model, batch):
        raise ValueError("no good")

    monkeypatch.setitem(lab.WAYS, "graphed", failing)
    code, report = measured(tmp_path / "a.json", "--batch-size", "1")
    assert code == 1
    assert report["rows"][0]["failed"] == "ValueError: no good"


def test_a_report_has_a_line_for_each_row(tmp_path):
    report = lab.Report(tmp_path / "a.json", {"fact": 1})
    report.add({"a": 1}, {"a": "µ"})
    text = (tmp_path / "a.json").read_text()
    assert [line.strip().rstrip(",") for line in text.splitlines()[-4:-2]] == ['{"a": 1}', '{"a": "µ"}']
    assert json.loads(text)["rows"] == [{"a": 1}, {"a": "µ"}]
