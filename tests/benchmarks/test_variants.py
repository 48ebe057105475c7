"""The file of benchmarks/variants.py, and the tables that are made of it."""

import json

import pytest

from benchmarks import tabulate_results as tabulate
from benchmarks import variants


def test_every_section_is_a_table_of_plain_values(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["benchmarks.variants", str(tmp_path / "variants.json"), "--tiny", "--sections", "hybrid"]
    )
    monkeypatch.setitem(variants.SECTIONS, "hybrid", lambda tiny: [{"batch": 2, "images/s": 1.5, "a": None}])
    variants.main()
    content = tabulate.read(tmp_path / "variants.json", variants.SCHEMA, variants.VERSION)
    assert content["sections"] == {"hybrid": [{"batch": 2, "images/s": 1.5, "a": None}]}
    assert content["threads"] >= 1


def test_a_section_that_raises_costs_no_other_its_rows(tmp_path, monkeypatch):
    def raising(tiny):
        raise RuntimeError("no good")

    path = tmp_path / "variants.json"
    monkeypatch.setattr(variants, "SECTIONS", {"first": raising, "second": lambda tiny: [{"a": 1}]})
    monkeypatch.setattr("sys.argv", ["benchmarks.variants", str(path), "--sections", "first", "second"])
    assert variants.main() == 1
    report = json.loads(path.read_text())
    assert report["sections"] == {"second": [{"a": 1}]}
    assert report["failures"] == {"first": "RuntimeError: no good"}


def test_the_page_has_a_table_for_each_kind_of_row(tmp_path):
    assert tabulate.variants_by_device(tmp_path) == []
    for date in ("2026-01-01-0000", "2026-01-02-0304"):
        folder = tmp_path / "some-cpu" / date
        folder.mkdir(parents=True)
        content = {
            "schema": tabulate.VARIANTS_SCHEMA,
            "version": tabulate.VARIANTS_VERSION,
            "device": "Some CPU",
            "torch": "2.13.0",
            "threads": 2,
            "sections": {
                "token_pruning": [
                    {"keep": "0.7", "images/s": 1234.5},
                    {"keep": "0.5", "images/s": 22.6834},
                    {"model": "digits", "top-1, %": 99.7222, "note": None},
                ],
                "hybrid": [],
            },
        }
        (folder / "variants.json").write_text(json.dumps(content))
    (section,) = tabulate.variants_by_device(tmp_path)
    assert section.split("\n") == [
        "## Variants on Some CPU",
        "",
        "2026-01-02-0304, torch 2.13.0, 2 threads.",
        "",
        "### Token pruning",
        "",
        "| keep | images/s |",
        "|---|---|",
        "| 0.7 | 1,234 |",
        "| 0.5 | 22.68 |",
        "",
        "| model | top-1, % | note |",
        "|---|---|---|",
        "| digits | 99.72 | – |",
    ]
    assert tabulate.page([], [section]).endswith(f"\n\n{section}\n")
    (folder / "variants.json").write_text(json.dumps(content | {"version": 2}))
    with pytest.raises(ValueError, match="got version 2, expected 1"):
        tabulate.variants_by_device(tmp_path)
