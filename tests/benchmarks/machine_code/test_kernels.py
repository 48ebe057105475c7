"""The kernels compiled for real GPUs, without one, and what their machine code needs."""

import re
import shutil
from pathlib import Path

import pytest
import triton

from benchmarks.machine_code import cuda_kernels, instructions, page
from benchmarks.machine_code.__main__ import main
from cvt import config
from cvt_kernels.machine import load_extension
from tests.cvt.commands.test_compile import STARVED

DOCS = Path(__file__).parents[3] / "docs" / "kernels.md"


def assert_flawless(rows, *, most_shared=99):
    for row in rows:
        resources = row["resources"]
        assert row["flaws"] == []
        assert row["uncounted"] is None or row["arch"] != "sm_90", row
        assert resources["stack"] == 0, row
        assert (row["instructions"]["spill_loads"], row["instructions"]["spill_stores"]) == ({}, {}), row
        assert 0 < resources["registers"] <= 255
        assert resources["static_shared"] + resources["dynamic_shared"] <= most_shared * 1024
        assert 0 < resources["occupancy"] <= 1


def assert_documented(rows):
    """Fails if a row takes more than docs/kernels.md says."""
    text = DOCS.read_text(encoding="utf-8")
    if f"Triton {triton.__version__}" not in text:
        pytest.skip("docs/kernels.md is of another version of Triton")
    cells = {}
    for title, table in re.findall(r"<!-- compile: (\w+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL):
        heads, _, *lines = split_cells(table)
        for name, *values in lines:
            cells |= {(title, name, head): cell for head, cell in zip(heads[1:], values, strict=True)}
    for row in rows:
        cell = cells[page.table_name(row), page.line_name(row), f"{row['dtypes'][0]} {row['arch']}"]
        registers, shared, occupancy = (float(n) for n in cell.rstrip("%").split(" / "))
        resources = row["resources"]
        assert resources["registers"] <= registers
        assert resources["static_shared"] + resources["dynamic_shared"] <= (shared + 0.05) * 1024
        assert resources["occupancy"] * 100 >= occupancy - 0.5


def split_cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def accesses(row, kind):
    return {instructions.access_bytes(name) for name in row["instructions"][kind]}


# The last stage has a class token, the narrowest tiles and most of the blocks. All shapes and types take
# minutes: python -m benchmarks.machine_code --arch sm_80 sm_90 sm_100.
@pytest.mark.parametrize(
    ("arch", "dtype", "stages"),
    [("sm_90", "bfloat16", "3"), pytest.param("sm_100", "bfloat16", "1", marks=pytest.mark.slow)],
)
def test_conv_projection(compile_ahead, arch, dtype, stages):
    _, rows = compile_ahead(
        "--operator", "conv_projection", "--arch", arch, "--dtype", dtype, "--stage", *stages
    )
    assert_flawless(rows)
    parts = ("fwd", "stats", "bwd_sums", "bwd_conv", "bwd_input")
    large = [f"conv_projection_walk_{part}" for part in parts]
    assert {row["kernel"] for row in rows} == {*large, "merge_stats", "update_running", "sum_regions"}
    for row in rows:
        if row["kernel"] in large:  # two channels of half precision at a time
            assert accesses(row, "loads") <= {4, 8}, row
            assert accesses(row, "stores") <= {4, 8}, row
        else:
            assert 16 in accesses(row, "loads"), row
    modes = [{case["mode"] for case in row["cases"]} for row in rows if row["kernel"] == large[0]]
    assert modes == [{"inference"}, {"training"}] * len(stages)
    for row in rows:
        if row["kernel"] in large:
            (analysis,) = row["analyses"]
            assert 0 < analysis["predicted"]["share_of_floor"] <= 1
            assert analysis["predicted"]["bound"] in ("issue", "DRAM")
            counted = analysis["counted"]
            parts = sum(counted["classes_per_output"].values())
            assert parts == pytest.approx(counted["instructions_per_output"])
    assert_documented(rows)


# Stage 3 has the widest tiles and the most registers.
@pytest.mark.parametrize(
    ("arch", "operators"),
    [
        ("sm_90", ("linear_gelu", "linear_add", "linear_add_layer_norm")),
        pytest.param("sm_100", ("linear_gelu",), marks=pytest.mark.slow),
    ],
    ids=["sm_90", "sm_100"],
)
def test_linear(compile_ahead, arch, operators):
    _, rows = compile_ahead("--operator", *operators, "--arch", arch, "--dtype", "bfloat16", "--stage", "3")
    assert_flawless(rows, most_shared=227)
    assert [row["kernel"] for row in rows] == [kernel for kernel in operators for _ in range(2)]
    for row in rows:
        assert row["messages"] == []
        for analysis in row["analyses"]:
            assert analysis["counted"]["mufu_per_output"] <= 1.01
            assert arch != "sm_90" or analysis["predicted"]["bound"] in ("tensor", "DRAM")


def last_launches(operator, count):
    """Returns code that leaves the last launches of an operator."""
    return (
        "from cvt.commands.compile import launches; plan = launches.TRITON_OPERATORS; "
        f"plan[{operator!r}] = lambda *stage, old=plan[{operator!r}], **options: "
        f"old(*stage, **options)[-{count}:]"
    )


@pytest.mark.slow
def test_8_bit_numbers(compile_ahead):
    """Stage 3, without Q and proj: products of integers on tensor cores; what rounds is bound by memory."""
    operators = ("quantize_rows", "layer_norm_quantize", "gelu_quantize", "linear_int8")
    arguments = ["--operator", *operators, "--arch", "sm_90", "--dtype", "bfloat16", "--stage", "3"]
    _, rows = compile_ahead(*arguments, prelude=last_launches("linear_int8", 2))
    assert_flawless(rows, most_shared=227)
    assert [row["kernel"] for row in rows] == [*operators, "linear_int8"]
    for row in rows:
        (analysis,) = row["analyses"]
        assert row["messages"] == []
        if row["kernel"] != "linear_int8":
            assert accesses(row, "loads") == {16}
            assert 16 in accesses(row, "stores")
            assert analysis["predicted"]["bound"] == "DRAM"
        else:
            assert all(name.startswith("IGMMA") for name in row["instructions"]["tensor_cores"])
            assert row["instructions"]["waits"] == 1
            assert analysis["predicted"]["bound"] in ("tensor", "DRAM")
    assert_documented(rows)


@pytest.mark.slow
def test_tensor_cores_of_8_bit_numbers(compile_ahead):
    """The last layer of stage 1, on every generation that has products of its numbers."""
    prelude = f"{last_launches('linear_int8', 1)}; {last_launches('linear_float8', 1)}"
    _, rows = compile_ahead(
        "--operator", "linear_int8", "linear_float8", "--arch", "sm_80", "sm_90", "sm_100",
        "--dtype", "bfloat16", "--stage", "1", prelude=prelude,
    )  # fmt: skip
    assert_flawless(rows)
    assert [row["messages"] for row in rows] == [[]] * len(rows)  # not even a wait that ptxas inserts
    found = {
        (row["operator"], row["arch"], name.partition(".")[0])
        for row in rows
        for name in row["instructions"]["tensor_cores"]
    }
    assert found == {
        ("linear_int8", "sm_80", "IMMA"),
        ("linear_int8", "sm_90", "IGMMA"),
        ("linear_int8", "sm_100", "IMMA"),
        ("linear_float8", "sm_90", "QGMMA"),
        ("linear_float8", "sm_100", "UTCQMMA"),
    }


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_layer_norm_mlp(compile_ahead, arch):
    """CvT-13's first stage at 224²; on sm_90 its weights stay in shared memory."""
    _, rows = compile_ahead("--operator", "layer_norm_mlp", "--arch", arch, "--dtype", "bfloat16")
    assert_flawless(rows)
    (row,) = rows
    assert row["messages"] == []
    assert row["instructions"]["tensor_cores"]
    assert accesses(row, "stores") == {16}
    if arch == "sm_90":
        assert row["kernel"] == "layer_norm_mlp_fwd_resident"
        (analysis,) = row["analyses"]
        assert analysis["counted"]["mufu_per_output"] < 4.2  # one per hidden feature, and LayerNorm's root
        assert row["resources"]["occupancy"] == 0.25


@pytest.mark.slow
def test_conv_linear(compile_ahead):
    """CvT-13's first stage, on tensor cores within its budget."""
    _, rows = compile_ahead(
        "--operator", "conv_linear", "--arch", "sm_90", "--dtype", "bfloat16", "--stage", "1"
    )
    assert_flawless(rows)
    ((analysis,),) = (row["analyses"] for row in rows)
    (row,) = rows
    (analysis,) = row["analyses"]
    assert row["kernel"] == "conv_linear_fwd"
    assert any(name.startswith("HGMMA") for name in row["instructions"]["tensor_cores"])
    assert accesses(row, "loads") == {4, 16}
    assert accesses(row, "stores") == {16}
    assert analysis["counted"]["instructions_per_output"] < 25
    assert analysis["predicted"]["share_of_floor"] > 0.9


@pytest.mark.parametrize(
    ("arch", "stages"),
    [
        ("sm_90", "123"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sm_80", "1"), ("sm_100", "3"))),
    ],
)
def test_attention(compile_ahead, arch, stages):
    """CvT-13's three stages at 224²: the products on tensor cores."""
    arguments = ["--operator", "attention", "--arch", arch, "--dtype", "bfloat16"]
    out, rows = compile_ahead(*arguments, "--stage", *stages)
    assert_flawless(rows)
    assert "PREDICTED from them, not measured" in out
    names = [
        (row["cases"][0]["stage"], row["kernel"].removeprefix("attention_"))
        for row in rows
        if any(case["mode"] == "training" for case in row["cases"])
    ]
    inference = [row for row in rows if {case["mode"] for case in row["cases"]} == {"inference"}]
    assert [row["cases"][0]["stage"] for row in inference] == list(map(int, stages))  # without statistics
    kernels = {
        "1": ("fwd_loop", "bwd_dq", "bwd_dkdv"),
        "2": ("fwd", "bwd_dq", "bwd_dkdv"),
        "3": ("fwd", "bwd"),
    }
    assert names == [(int(stage), name) for stage in stages for name in kernels[stage]]
    tensor_cores = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[arch]
    for row in rows:
        assert any(name.startswith(tensor_cores) for name in row["instructions"]["tensor_cores"]), row
        assert (row["instructions"]["waits"] > 0) == (arch == "sm_90"), row
        assert 16 in accesses(row, "loads"), row
        for analysis in row["analyses"]:
            assert analysis["predicted"]["microseconds"]["tensor"] > 0, row
    assert_documented(rows)


@pytest.mark.slow
def test_attention_with_a_bias_by_position(compile_ahead):
    _, rows = compile_ahead(
        "--operator", "attention_by_position", "--arch", "sm_90", "--dtype", "bfloat16", "--stage", "3"
    )  # fmt: skip
    assert {row["kernel"] for row in rows} == {"attention_fwd", "attention_bwd", "attention_bwd_table"}
    assert_flawless(rows)
    assert_documented(rows)


def test_conv_embedding(compile_ahead):
    """CvT-13's three stages at 224²: one kernel, then two with PyTorch's convolution before each."""
    _, rows = compile_ahead("--operator", "conv_embedding", "--arch", "sm_90", "--dtype", "bfloat16")
    assert_flawless(rows)
    first, second, third = rows
    assert first["kernel"] == "conv_embedding_embed"
    assert any(name.startswith("HGMMA") for name in first["instructions"]["tensor_cores"])
    assert 4 in accesses(first, "loads")  # two pixels at a time
    assert accesses(first, "stores") == {16}
    for row in (second, third):
        assert row["kernel"] == "conv_embedding_normalize"
        assert 16 in accesses(row, "loads")
        assert 16 in accesses(row, "stores")
        assert row["resources"]["dynamic_shared"] == 0
    assert {case["mode"] for row in rows for case in row["cases"]} == {"inference"}
    for row in rows:
        (analysis,) = row["analyses"]
        assert 0 < analysis["predicted"]["share_of_floor"] <= 1


@pytest.mark.slow
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
    assert kernels == {
        "layer_norm", "add_layer_norm", "shift_layer_norm", "layer_norm_backward", "gelu", "gelu_backward",
        "bias_gelu", "bias_gelu_backward", "sum_over_blocks",
    }  # fmt: skip
    activations = ("identity", "none", "tanh", "quick")
    layouts = {
        "bfloat16": [(1, 16), (8, 1), (8, 3), (8, 4)],
        "float32": [(1, 16), *((4, n) for n in (2, 4, 6, 8))],
    }
    for dtype, expected in layouts.items():
        layer_norms = [row for row in rows if row["kernel"] == "layer_norm" and row["dtypes"] == [dtype]]
        others = ["bfloat16", "float16"] if dtype == "float32" else ["float32"]
        results = [*((name, "") for name in activations), *(("identity", result) for result in others)]
        assert sorted(tuple(row["cases"][0].values()) for row in layer_norms) == sorted(
            (activation, *layout, result) for activation, result in results for layout in expected
        )
    for row in rows:
        if row["kernel"] == "gelu" and row["cases"][0]["vector"] == 8:
            assert accesses(row, "loads") == {16}, row


@pytest.mark.slow
def test_cuda_kernels_by_nvcc(compile_ahead):
    """Compiles for a GPU that the extension was not built for."""
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    out, rows = compile_ahead(
        "--operator", "layer_norm_gelu", "--arch", "sm_80", "--dtype", "float16", "--cuda",
        prelude="from benchmarks.machine_code import cuda_kernels; "
        "cuda_kernels._cubins_of_extension = lambda arch: {}",
    )  # fmt: skip
    assert "CUDA kernels of sm_80: compiled from csrc by " in out
    assert len(rows) == 2 * 20 + 4 + 8 + 2 * 6 + 2 * 12 + 1
    assert_flawless(rows)


def test_where_there_are_no_cuda_kernels(monkeypatch, capsys):
    monkeypatch.setattr(cuda_kernels, "_cubins_of_extension", lambda arch: {})
    monkeypatch.setattr(cuda_kernels.toolkit, "find_nvcc", lambda: None)
    reason = "CUDA kernels of sm_86 are left out: the extension has none for it, and there is no nvcc here"
    assert cuda_kernels.cuda_kernels_for(86, config.DTYPES) == ([], reason)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["--arch", "sm_86", "--operator", "layer_norm_gelu", "--cuda"]) == 2
    assert capsys.readouterr().err == f"benchmarks.machine_code: error: {reason}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_91"], "--arch: got 'sm_91', expected one of sm_80, sm_86, sm_89, sm_90, sm_100, "
         "sm_120"),
        (["--model", "cvt_13", "--stage", "4", "--operator", "linear_add"],
         "--model, --operator, --stage: none of these models has such an operator or stage"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", f"benchmarks.machine_code: error: {message}\n")


def test_a_spill_fails_the_command(compile_ahead):
    out, rows = compile_ahead(
        "--operator", "conv_projection", "--dtype", "float32", "--stage", "3",
        prelude=STARVED,
        code=1,
    )  # fmt: skip
    flawed = {row["kernel"]: row["flaws"] for row in rows if row["flaws"]}
    assert set(flawed) == {"merge_stats"}
    flaws = flawed["merge_stats"]
    for flaw, text in zip(flaws, (r"\d+ bytes", r"[1-9]\d* loads, [1-9]\d* stores"), strict=True):
        assert re.fullmatch(f"spills: {text}", flaw)
        assert f"sm_90 merge_stats, float32 cvt_13 224²×256 3: {flaw}" in out.splitlines()
