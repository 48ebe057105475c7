"""The kernels compiled for real GPUs, without one: ``cvt compile``."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton

from cvt import commands as cli
from cvt import config
from cvt.commands.compile import cuda_kernels, gpus, launches, machine_code, page
from cvt.commands.compile.report import SCHEMA, VERSION
from cvt.commands.compile.resources import Resources
from cvt.commands.compile.triton_kernels import TritonKernel, specialize
from cvt.model import ConvEmbed, tokens_to_map
from cvt_kernels.machine import Chip, Launch, load_extension

DOCS = Path(__file__).parents[3] / "docs" / "kernels.md"


@pytest.fixture
def compile_ahead(tmp_path):
    """Runs the command in a process of its own: the other tests import the kernels for the interpreter."""

    def run(*arguments, prelude="pass", code=0, jobs=1):
        report = tmp_path / "report.json"
        script = f"import sys; from cvt import commands as cli; {prelude}; sys.exit(cli.main())"
        result = subprocess.run(
            [sys.executable, "-c", script, "compile", *arguments, "--jobs", str(jobs), "--json", str(report)],
            env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout, json.loads(report.read_text())["kernels"]

    return run


def assert_flawless(rows):
    for row in rows:
        resources = row["resources"]
        assert row["flaws"] == []
        assert (resources["stack"], resources["spill_loads"], resources["spill_stores"]) == (0, {}, {}), row
        assert 0 < resources["registers"] <= 255
        assert resources["static_shared"] + resources["dynamic_shared"] <= 99 * 1024
        assert 0 < resources["occupancy"] <= 1


def assert_documented(rows):
    """Fails if a row takes more than docs/kernels.md says."""
    text = DOCS.read_text(encoding="utf-8")
    if f"Triton {triton.__version__}" not in text:
        pytest.skip("docs/kernels.md is of another version of Triton")
    cells = {}
    for operator, table in re.findall(r"<!-- compile: (\w+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL):
        heads, _, *lines = split_cells(table)
        for name, *values in lines:
            cells |= {(operator, name, head): cell for head, cell in zip(heads[1:], values, strict=True)}
    for row in rows:
        cell = cells[row["operator"], page.line_name(row), f"{row['dtypes'][0]} {row['arch']}"]
        registers, shared, occupancy = (float(n) for n in cell.rstrip("%").split(" / "))
        resources = row["resources"]
        assert resources["registers"] <= registers
        assert resources["static_shared"] + resources["dynamic_shared"] <= (shared + 0.05) * 1024
        assert resources["occupancy"] * 100 >= occupancy - 0.5


def split_cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def accesses(row, kind):
    return {machine_code.access_bytes(name) for name in row["resources"][kind]}


# The last stage has a class token and the narrowest tiles, the first what CvT spends most time on. All shapes
# and types take minutes: cvt compile --arch sm_80 sm_90 sm_100.
@pytest.mark.parametrize(
    ("arch", "dtype", "stage"),
    [("sm_90", "bfloat16", 1), ("sm_100", "bfloat16", 3)],
)
def test_conv_projection(compile_ahead, arch, dtype, stage):
    _, rows = compile_ahead(
        "--operator", "conv_projection", "--arch", arch, "--dtype", dtype, "--stage", str(stage)
    )
    assert_flawless(rows)
    large = [f"conv_projection_{part}" for part in ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input")]
    assert {row["kernel"] for row in rows} == {*large, "merge_stats", "update_running", "sum_regions"}
    for row in rows:
        assert 16 in accesses(row, "loads") or row["kernel"] not in large, row
        if row["kernel"].endswith(("_fwd", "_bwd_conv", "_bwd_input")):
            assert 16 in accesses(row, "stores"), row
    modes = [
        {case["mode"] for case in row["cases"]} for row in rows if row["kernel"] == "conv_projection_fwd"
    ]
    assert modes == ([{"inference"}, {"training"}] if dtype == "bfloat16" else [{"inference", "training"}])
    assert_documented(rows)


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_80", "bfloat16"), ("sm_90", "bfloat16"), ("sm_90", "float32"), ("sm_100", "bfloat16")],
)
def test_attention(compile_ahead, arch, dtype):
    """CvT-13's three stages at 224²: the products on tensor cores, but for float32."""
    _, rows = compile_ahead("--operator", "attention", "--arch", arch, "--dtype", dtype)
    assert_flawless(rows)
    names = [
        (row["cases"][0]["stage"], row["kernel"].removeprefix("attention_"))
        for row in rows
        if any(case["mode"] == "training" for case in row["cases"])
    ]
    inference = [row for row in rows if {case["mode"] for case in row["cases"]} == {"inference"}]
    assert [row["cases"][0]["stage"] for row in inference] == [1, 2, 3]  # the forward without statistics
    looping = dtype == "float32"  # what does not fit on the chip at once, see keys_on_chip
    assert names == [
        *((1, name) for name in ("fwd_loop", "bwd_dq", "bwd_dkdv")),
        *((2, name) for name in ("fwd_loop" if looping else "fwd", "bwd_dq", "bwd_dkdv")),
        *((3, name) for name in ("fwd", "bwd")),
    ]
    tensor_cores = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[arch]
    for row in rows:
        uses = any(name.startswith(tensor_cores) for name in row["resources"]["tensor_cores"])
        assert uses == (dtype != "float32"), row
        assert 16 in accesses(row, "loads"), row
    assert_documented(rows)


def test_cuda_kernels_of_the_extension(compile_ahead):
    architectures = [name for name in load_extension().architectures.split(",") if name.startswith("sm_")]
    if not architectures:
        pytest.skip("the extension was built without a CUDA toolkit")
    arch = architectures[0]
    out, rows = compile_ahead(
        "--operator", "layer_norm_gelu", "--arch", arch, "--dtype", "float32", "bfloat16", "--cuda", jobs=2
    )
    assert f"CUDA kernels of {arch}: those of the built extension" in out
    assert_flawless(rows)
    kernels = {row["kernel"] for row in rows}
    assert kernels == {"layer_norm", "layer_norm_backward", "gelu", "gelu_backward", "sum_over_blocks"}
    activations = ("identity", "none", "tanh", "quick")
    layouts = {
        "bfloat16": [(1, 16), (8, 1), (8, 3), (8, 4)],
        "float32": [(1, 16), *((4, n) for n in (2, 4, 6, 8))],
    }
    for dtype, expected in layouts.items():
        layer_norms = [row for row in rows if row["kernel"] == "layer_norm" and row["dtypes"] == [dtype]]
        assert sorted(tuple(row["cases"][0].values()) for row in layer_norms) == sorted(
            (activation, *layout) for activation in activations for layout in expected
        )
    for row in rows:
        if row["kernel"] == "gelu" and row["cases"][0]["vector"] == 8:
            assert accesses(row, "loads") == {16}, row


def test_cuda_kernels_by_nvcc(compile_ahead):
    """Compiles for a GPU that the extension was not built for."""
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    out, rows = compile_ahead(
        "--operator", "layer_norm_gelu", "--arch", "sm_80", "--dtype", "float16", "--cuda",
        prelude="from cvt.commands.compile import cuda_kernels; "
        "cuda_kernels._cubins_of_extension = lambda arch: {}",
    )  # fmt: skip
    assert "CUDA kernels of sm_80: compiled from csrc by " in out
    assert len(rows) == 2 * 16 + 2 * 12 + 1
    assert_flawless(rows)


def test_where_there_are_no_cuda_kernels(monkeypatch, capsys):
    monkeypatch.setattr(cuda_kernels, "_cubins_of_extension", lambda arch: {})
    monkeypatch.setattr(cuda_kernels.toolkit, "find_nvcc", lambda: None)
    reason = "CUDA kernels of sm_86 are left out: the extension has none for it, and there is no nvcc here"
    assert cuda_kernels.cuda_kernels_for(86, config.DTYPES) == ([], reason)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cli.main(["compile", "--arch", "sm_86", "--operator", "layer_norm_gelu", "--cuda"]) == 2
    assert capsys.readouterr().err == f"cvt compile: error: {reason}\n"


def test_a_spill_fails_the_command(compile_ahead):
    out, rows = compile_ahead(
        "--operator", "conv_projection", "--dtype", "float32", "--stage", "3",
        prelude="from cvt.commands.compile import launches; "
        "plan = launches.conv_projection_launches; "
        "starve = lambda launch: launch._replace(options=launch.options | {'maxnreg': 24}) "
        "if launch.kernel.__name__ == '_merge_stats_kernel' else launch; "
        "launches.TRITON_OPERATORS['conv_projection'] = "
        "lambda *stage, **options: list(map(starve, plan(*stage, **options)))",
        code=1,
    )  # fmt: skip
    flawed = {row["kernel"]: row["flaws"] for row in rows if row["flaws"]}
    assert set(flawed) == {"merge_stats"}
    (flaw,) = flawed["merge_stats"]
    assert re.fullmatch(r"spills: \d+ bytes, [1-9]\d* loads, [1-9]\d* stores", flaw)
    assert f"sm_90 merge_stats, float32 cvt_13 224²×256 3: {flaw}" in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_91"], "--arch: got 'sm_91', expected one of sm_80, sm_86, sm_89, sm_90, sm_100, "
         "sm_120"),
        (["--dtype", "int8"], "--dtype: got 'int8', expected one of bfloat16, float16, float32"),
        (["--stage", "4"], "--stage: got 4, expected one of 1, 2, 3"),
        (["--model", "cvt_99"], "--model: got 'cvt_99', expected one of cvt_13, cvt_21, cvt_w24"),
        (["--operator", "conv"], "--operator: got 'conv', expected one of conv_projection, attention, "
         "attention_with_bias, layer_norm_gelu"),
        (["--json", "/nowhere/report.json"], "--json: /nowhere/report.json cannot be written: "
         "/nowhere is no directory that takes files"),
        (["--json", "/"], "--json: / is a directory, expected a file"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cli.main(["compile", *arguments]) == 2
    assert capsys.readouterr() == ("", f"cvt compile: error: {message}\n")


def test_the_interpreter_compiles_nothing(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["compile"]) == 2
    assert "the interpreter compiles nothing" in capsys.readouterr().err


def test_what_does_not_compile_is_named():
    *_, launch = launches.attention_launches(launches.stages("cvt_13")[2], torch.float16, Chip(90, 132))
    kernel = TritonKernel(90, launch.kernel.fn.__module__, launch.kernel.__name__, {}, {}, {}, {})
    with pytest.raises(RuntimeError, match=r"^_attention_bwd_kernel does not compile for sm_90: "):
        kernel.examine()


def test_arguments_are_specialized_as_triton_does():
    class Grid(NamedTuple):
        height: int
        width: int

    arguments = {"x": torch.empty(8, device="meta"), "grid": Grid(32, 1), "n": 2**40 + 1, "eps": 1e-5, "K": 3}
    parameters = [SimpleNamespace(name=name, is_constexpr=name == "K") for name in arguments]
    kernel = SimpleNamespace(params=parameters, __module__="module", __name__="name")
    specialized = specialize(Launch(kernel, (1,), arguments, {"num_warps": 4}), 90)
    divisible = [["tt.divisibility", 16]]
    signature = {"x": "*fp32", "grid": Grid("i32", "constexpr"), "n": "i64", "eps": "fp32", "K": "constexpr"}
    assert isinstance(specialized.signature["grid"], Grid)
    assert specialized == TritonKernel(
        90, "module", "name", signature, {(1, 1): 1, (4,): 3}, {(0,): divisible, (1, 0): divisible},
        {"num_warps": 4},
    )  # fmt: skip


@pytest.mark.parametrize("model", config.PRESETS)
@pytest.mark.parametrize("size", [224, 225, 384, 511])
def test_stages_are_the_models(model, size):
    maps, expected = torch.empty(1, 3, size, size, device="meta"), []
    for stage in config.PRESETS[model].stages:
        tokens, grid = ConvEmbed(stage).to("meta")(maps)
        maps = tokens_to_map(tokens, grid)
        expected.append((grid, tokens.shape[2], int(stage.cls_token)))
    assert launches.stages(model, size) == expected


def test_stages_of_a_models_own_image_size():
    grids = {model: [stage.grid for stage in launches.stages(model)] for model in config.PRESETS}
    small = [(56, 56), (28, 28), (14, 14)]
    assert grids == {"cvt_13": small, "cvt_21": small, "cvt_w24": [(96, 96), (48, 48), (24, 24)]}


# Blocks of a multiprocessor as cuda_occupancy.h of CUDA 13.0 computes them: bound by registers, shared
# memory, threads, the number of blocks, and what does not fit at all.
@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        (80, 128, 255, 2048, 2),
        (80, 640, 84, 111690, 1),
        (80, 416, 250, 0, 0),
        (86, 32, 32, 0, 16),
        (89, 32, 32, 0, 24),
        (90, 128, 168, 0, 3),
        (90, 128, 32, 76 * 1024, 2),
        (90, 32, 32, 227 * 1024, 1),
        (90, 32, 32, 227 * 1024 + 1, 0),
        (100, 1024, 64, 0, 1),
        (120, 512, 40, 0, 3),
    ],
)
def test_occupancy(arch, threads, registers, shared, blocks):
    warps = gpus.LIMITS[arch].warps
    assert gpus.occupancy(arch, threads, registers, shared) == blocks * threads / 32 / warps


def test_occupancy_by_tensor_memory():
    assert gpus.occupancy(100, 128, 32, 0, tensor_memory=128) == 4 * 4 / 64


@pytest.mark.parametrize(
    ("instruction", "width"),
    [
        ("LDG.E.128.CONSTANT", 16),
        ("LDG.E.64", 8),
        ("LDG.E", 4),
        ("LDG.E.U16", 2),
        ("STG.E.S8", 1),
        ("LDGSTS.E.BYPASS.LTC128B.128", 16),
        ("LDG.E.LTC128B", 4),
        ("LDG.E.ENL2.256", 32),
    ],
)
def test_access_bytes(instruction, width):
    assert machine_code.access_bytes(instruction) == width


def test_disassembly(monkeypatch):
    outputs = {
        "cuobjdump": " Function k:\n  REG:8 STACK:0 SHARED:16 LOCAL:4 CONSTANT[0]:560\n"
        " Function _a_kernel_of_many_words:\n  REG:255 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:560\n",
        "nvdisasm": "//--------------------- .text.k                   --------------------------\n"
        "        /*0000*/                   LDC R1, c[0x0][0x28] ;\n"
        "        /*0010*/              @!P0 LDG.E.128 R4, [R2.64] ;\n"
        "//--------------------- .text._a_kernel_of_many_words --------------------------\n"
        "        /*0000*/               @UP0 EXIT ;\n",
    }
    monkeypatch.setattr(machine_code, "run_tool", lambda name, *arguments: outputs[name])
    assert machine_code._disassemble(b"") == {
        "k": machine_code.MachineCode(8, 0, 16, 4, {"LDC": 1, "LDG.E.128": 1}),
        "_a_kernel_of_many_words": machine_code.MachineCode(255, 8, 0, 0, {"EXIT": 1}),
    }


def test_what_was_read_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    code = {"kernel": machine_code.MachineCode(32, 0, 1024, 0, {"LDG.E.128": 2})}
    monkeypatch.setattr(machine_code, "_disassemble", lambda cubin: code)
    assert machine_code.read(b"machine code") == code
    monkeypatch.setattr(machine_code, "_disassemble", lambda cubin: {})
    assert machine_code.read(b"machine code") == code
    assert machine_code.read(b"other machine code") == {}


def test_tables(tmp_path):
    def row(kernel, registers, arch="sm_90", dtype="bfloat16", **case):
        code = machine_code.MachineCode(registers, 0, 3072, 0, {"LDG.E.128": 2, "LDG.E.U16": 1, "STG.E": 1})
        resources = Resources.of(code, 90, 128, dynamic_shared=4096)._asdict()
        return {
            "operator": "attention", "kernel": kernel, "arch": arch, "dtypes": [dtype], "cases": [case],
            "resources": resources,
        }  # fmt: skip

    report = {
        "schema": SCHEMA,
        "version": VERSION,
        "kernels": [
            row("attention_fwd", 30, stage=1),
            row("attention_fwd", 255, stage=2),
            row("attention_fwd", 64, arch="sm_80", dtype="float32", stage=1),
            row("gelu", 40, vector=8, vectors=3),
            row("gelu", 38, vector=1, vectors=16),
        ],
    }
    file, target = tmp_path / "report.json", tmp_path / "page.md"
    file.write_text(json.dumps(report))
    target.write_text("before\n<!-- compile: attention -->\n<!-- end -->\nafter\n<!-- end -->\n")
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
        "<!-- end -->",
    ]
    target.write_text("before\n<!-- compile: attention -->\nafter\n")
    with pytest.raises(ValueError, match="has no <!-- compile: attention --> and <!-- end -->"):
        page.main([file, target])
    with pytest.raises(ValueError, match=f"expected a report of cvt compile, version {VERSION}"):
        page.tables(report | {"version": 0})
