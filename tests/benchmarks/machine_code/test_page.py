"""The tables of docs/kernels.md, made from a report."""

import json

import pytest

from benchmarks.machine_code import page
from benchmarks.machine_code.disassembly import MachineCode
from benchmarks.machine_code.examined import KeyInstructions
from benchmarks.machine_code.report import SCHEMA, VERSION
from cvt.commands.compile.resources import Resources, Usage


def test_tables(tmp_path):
    def analysis(instructions, bound, share, per_tile=None):
        counted = {"instructions_per_output": instructions, "instructions_per_tile": per_tile}
        return {"counted": counted, "predicted": {"bound": bound, "share_of_floor": share}}

    def row(kernel, registers, *analyses, arch="sm_90", dtype="bfloat16", **case):
        code = MachineCode(Usage(registers, 0, 3072, 0), {"LDG.E.128": 2, "LDG.E.U16": 1, "STG.E": 1})
        resources = Resources.of(code.usage, 90, 128, dynamic_shared=4096)._asdict()
        return {
            "operator": "attention", "kernel": kernel, "arch": arch, "dtypes": [dtype], "cases": [case],
            "resources": resources, "instructions": KeyInstructions.of(code)._asdict(), "analyses": analyses,
        }  # fmt: skip

    report = {
        "schema": SCHEMA,
        "version": VERSION,
        "kernels": [
            row("attention_fwd", 30, analysis(20, "issue", 0.9, per_tile=1000), stage=1),
            row("attention_fwd", 255, analysis(30, "tensor", 0.5, per_tile=303.4), stage=2),
            row("attention_fwd", 64, analysis(40, "MUFU", 0.7), arch="sm_80", dtype="float32", stage=1),
            row("gelu", 40, analysis(20.44, "DRAM", 1.0), vector=8, vectors=3, result=""),
            row("gelu", 38, vector=1, vectors=16, result=""),
        ],
    }
    file, target = tmp_path / "report.json", tmp_path / "page.md"
    file.write_text(json.dumps(report))
    target.write_text(
        "before\n<!-- compile: attention -->\n<!-- end -->\nafter\n"
        "<!-- compile: attention, predicted -->\n<!-- end -->\n"
    )
    page.main([file, target])
    written = target.read_text()
    page.main([file, target])
    assert target.read_text() == written
    assert target.read_text().splitlines() == [
        "before",
        "<!-- compile: attention -->",
        "| kernel | bytes per load | per store "
        "| bfloat16 sm_90 | bfloat16 sm_80 | float32 sm_90 | float32 sm_80 |",
        "|---|---|---|---|---|---|---|",
        "| `fwd` | 2–16 | 4 | 255 / 6 / 12% |  |  | 64 / 6 / 50% |",
        "| `gelu`, 24 elements | 2–16 | 4 | 40 / 6 / 75% |  |  |  |",
        "| `gelu`, 16 single elements | 2–16 | 4 | 38 / 6 / 75% |  |  |  |",
        "<!-- end -->",
        "after",
        "<!-- compile: attention, predicted -->",
        "| kernel, predicted | bfloat16 sm_90 | bfloat16 sm_80 | float32 sm_90 | float32 sm_80 |",
        "|---|---|---|---|---|",
        "| `fwd` | 1000 / tensor 50% |  |  | 40 / MUFU 70% |",
        "| `gelu`, 24 elements | 20.4 / DRAM 100% |  |  |  |",
        "<!-- end -->",
    ]
    target.write_text("before\n<!-- compile: attention -->\nafter\n")
    with pytest.raises(ValueError, match="has no <!-- compile: attention --> and <!-- end -->"):
        page.main([file, target])
    with pytest.raises(ValueError, match=f"expected a report of {SCHEMA}, version {VERSION}"):
        page.tables(report | {"version": 0})
