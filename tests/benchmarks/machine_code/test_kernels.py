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
#: The tensor cores of each generation in half precision.
CORES = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}


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
    """Fails if a row of docs/kernels.md says less than its kernel takes."""
    text = DOCS.read_text(encoding="utf-8")
    if f"Triton {triton.__version__}" not in text:
        pytest.skip("docs/kernels.md is of another version of Triton")
    cells = {}
    for title, table in re.findall(r"<!-- compile: (\w+) -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL):
        heads, _, *lines = ([c.strip() for c in line.strip("|").split("|")] for line in table.splitlines())
        for name, *values in lines:
            cells |= {(title, name, head): cell for head, cell in zip(heads[1:], values, strict=True)}
    for row in rows:
        cell = cells[page.table_name(row), page.line_name(row), f"{row['dtypes'][0]} {row['arch']}"]
        registers, shared, occupancy = (float(n) for n in cell.rstrip("%").split(" / "))
        resources = row["resources"]
        assert resources["registers"] <= registers
        assert (
            resources["static_shared"] + resources["dynamic_shared"] <= (1.001 * shared + 0.05) * 1024
        )  # rounded
        assert resources["occupancy"] * 100 >= occupancy - 0.5


class Kernel:
    """The facts of a row that tests look at."""

    def __init__(self, row):
        self.row, self.arch, self.waits = row, row["arch"], row["instructions"]["waits"]
        self.cores = {name.partition(".")[0] for name in row["instructions"]["tensor_cores"]}
        self.loads, self.stores = (
            {instructions.access_bytes(name) for name in row["instructions"][kind]}
            for kind in ("loads", "stores")
        )
        self.counted = [analysis["counted"] for analysis in row["analyses"]]
        self.bounds = {analysis["predicted"]["bound"] for analysis in row["analyses"]}
        self.share = min((analysis["predicted"]["share_of_floor"] for analysis in row["analyses"]), default=0)

    def most(self, name):
        return max((counted[name] for counted in self.counted), default=0)


#: What is true of the kernels whose names match, by the bytes of accesses among others.
FACTS = {
    r"conv_projection_sliding_.*": lambda k: (
        k.loads <= {4, 8} and k.stores <= {4, 8} and k.bounds <= {"issue", "DRAM"} and 0 < k.share <= 1
    ),
    r"merge_stats|update_running": lambda k: 16 in k.loads,
    r"linear_(gelu|add|add_layer_norm)": lambda k: (
        k.most("mufu_per_output") <= 1.01 and (k.arch != "sm_90" or k.bounds <= {"tensor", "DRAM"})
    ),
    r".*quantize.*": lambda k: k.loads == {16} and 16 in k.stores and k.bounds == {"DRAM"},
    r"layer_norm_mlp_fwd.*": lambda k: k.cores and k.stores == {16},
    # One MUFU per hidden feature, and LayerNorm's root; its weights stay in shared memory.
    r"layer_norm_mlp_fwd_resident": lambda k: (
        k.most("mufu_per_output") < 4.2 and k.row["resources"]["occupancy"] == 0.25
    ),
    r"conv_linear_fwd": lambda k: (
        k.cores == {"HGMMA"} and k.loads == {4, 16} and k.stores == {16} and k.share > 0.9
        and k.most("instructions_per_output") < 25
    ),
    r"attention_(?!bwd_table).*": lambda k: (
        CORES[k.arch] in k.cores and (k.waits > 0) == (k.arch == "sm_90") and 16 in k.loads
    ),
    r"conv_embedding_embed": lambda k: (
        k.cores == {"HGMMA"} and 4 in k.loads and k.stores == {16} and 0 < k.share <= 1
    ),
    r"conv_embedding_normalize": lambda k: (
        16 in k.loads and 16 in k.stores and k.row["resources"]["dynamic_shared"] == 0 and 0 < k.share <= 1
    ),
    r"depthwise_conv_gelu_.*": lambda k: 8 in k.loads and k.stores <= {8, 4} and k.share > 0.9,
    r"(gather|scatter)_(?!rows_places).*": lambda k: k.bounds == {"DRAM"},
}  # fmt: skip
#: Operators in whose kernels the assembler has nothing to say.
SILENT = r"linear.*|.*quantize.*|layer_norm_mlp.*"


def last_launches(operator, count):
    """Returns code that leaves the last launches of an operator."""
    return (
        "from cvt.commands.compile import launches; plan = launches.TRITON_OPERATORS; "
        f"plan[{operator!r}] = lambda *stage, old=plan[{operator!r}], **options: "
        f"old(*stage, **options)[-{count}:]"
    )


#: Lists a call of depthwise_conv_gelu without bias too.
WITHOUT_BIAS = """
import torch
from cvt.commands.compile import launches
from cvt_kernels import launching, machine
from cvt_kernels.ops.depthwise_conv_gelu.triton import forward

listed = launches.TRITON_OPERATORS["depthwise_conv_gelu"]

def both(stage, dtype, chip, *, batch, training):
    with launching.recorded_launches(chip) as others:
        if not training:
            x = torch.empty(batch, 128 * 128, stage.channels, dtype=dtype, device="meta")
            forward.conv_gelu_forward(x, stage.grid, x.new_empty(stage.channels, 1, 3, 3), None, "tanh")
    return listed(stage, dtype, chip, batch=batch, training=training) + others

launches.TRITON_OPERATORS["depthwise_conv_gelu"] = both
"""
#: Operators, as ``--operator`` takes them, with other options → the kernels.
#: All shapes and types take minutes: python -m benchmarks.machine_code --arch sm_80 sm_90 sm_100.
CALLS = {
    # The last stage has a class token, the narrowest tiles and most of the blocks.
    "conv_projection --stage 3": "conv_projection_sliding_fwd conv_projection_sliding_stats merge_stats "
    "update_running conv_projection_sliding_bwd_sums conv_projection_sliding_bwd_conv sum_regions "
    "conv_projection_sliding_bwd_input",
    # Stage 3 has the widest tiles and the most registers.
    "linear_gelu linear_add linear_add_layer_norm --stage 3": "linear_gelu linear_add linear_add_layer_norm",
    "layer_norm_mlp": "layer_norm_mlp_fwd_resident",
    "conv_embedding": "conv_embedding_embed conv_embedding_normalize",
    "attention --stage 1 2 3": "attention_fwd_loop attention_fwd attention_bwd_dq attention_bwd_dkdv "
    "attention_bwd",
}
SLOW_CALLS = {
    "conv_projection --arch sm_100 --stage 1": CALLS["conv_projection --stage 3"],
    "linear_gelu --arch sm_100 --stage 3": "linear_gelu",
    "layer_norm_mlp --arch sm_80": "layer_norm_mlp_fwd",
    "attention --arch sm_80 --stage 1": "attention_fwd_loop attention_bwd_dq attention_bwd_dkdv",
    "attention --arch sm_100 --stage 3": "attention_fwd attention_bwd",
    "attention_by_position --stage 3": "attention_fwd attention_bwd attention_bwd_table",
    "conv_linear --stage 1": "conv_linear_fwd",
    "depthwise_conv_gelu --model segformer_b0 --stage 1": "conv_projection_sliding_bwd_input sum_regions "
    "depthwise_conv_gelu_bwd_conv depthwise_conv_gelu_fwd",
    "gather_rows gather_add_layer_norm scatter_rows --stage 3": "gather_rows gather_add_layer_norm "
    "gather_add_layer_norm_backward scatter_rows scatter_rows_places scatter_rows_inplace",
    # Stage 3, without Q and proj: products of integers on tensor cores.
    "quantize_rows layer_norm_quantize gelu_quantize linear_int8 --stage 3": "quantize_rows "
    "layer_norm_quantize gelu_quantize linear_int8",
}
PRELUDES = {"linear_int8": last_launches("linear_int8", 2), "depthwise_conv_gelu": WITHOUT_BIAS}


@pytest.mark.parametrize(
    "call", [*CALLS, *(pytest.param(call, marks=pytest.mark.slow) for call in SLOW_CALLS)]
)
def test_kernels(compile_ahead, call):
    arguments = ["--dtype", "bfloat16", *([] if "--arch" in call else ["--arch", "sm_90"])]
    prelude = next((code for operator, code in PRELUDES.items() if operator in call), "pass")
    out, rows = compile_ahead("--operator", *call.split(), *arguments, prelude=prelude)
    assert ("PREDICTED from them, not measured" in out) == any(row["analyses"] for row in rows)
    assert_flawless(rows, most_shared=227 if "linear" in call and "conv" not in call else 99)
    assert {row["kernel"] for row in rows} == {*(CALLS | SLOW_CALLS)[call].split()}
    if prelude is not WITHOUT_BIAS:  # the page has the launches of models, whose convolutions have one
        assert_documented(rows)
    for row in rows:
        kernel = Kernel(row)
        for pattern, is_true in FACTS.items():
            if re.fullmatch(pattern, row["kernel"]):
                assert is_true(kernel), row
        if re.fullmatch(SILENT, row["kernel"]):
            assert row["messages"] == []
        for counted in kernel.counted:
            parts = sum(counted["classes_per_output"].values())
            assert parts == pytest.approx(counted["instructions_per_output"])
    modes = [{case["mode"] for case in row["cases"]} for row in rows]
    if call.startswith("conv_embedding"):
        assert modes == [{"inference"}] * 3
    if call.startswith("attention "):  # in inference each stage has a kernel that stores no statistics
        assert modes.count({"inference"}) == len(re.findall(r" \d", call))
    if call.startswith("conv_projection"):
        assert modes.count({"inference"}) == 1
    if "linear_int8" in call:
        of_layer = Kernel(rows[-1])
        assert (of_layer.cores, of_layer.waits) == ({"IGMMA"}, 1)
        assert of_layer.bounds <= {"tensor", "DRAM"}


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
    assert {(row["operator"], row["arch"], name) for row in rows for name in Kernel(row).cores} == {
        ("linear_int8", "sm_80", "IMMA"),
        ("linear_int8", "sm_90", "IGMMA"),
        ("linear_int8", "sm_100", "IMMA"),
        ("linear_float8", "sm_90", "QGMMA"),
        ("linear_float8", "sm_100", "UTCQMMA"),
    }


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
    assert {row["kernel"] for row in rows} == {
        "layer_norm", "add_layer_norm", "shift_layer_norm", "layer_norm_backward", "gelu", "gelu_backward",
        "bias_gelu", "bias_gelu_backward", "sum_over_blocks",
    }  # fmt: skip
    layouts = {
        "bfloat16": [(1, 16), (8, 1), (8, 3), (8, 4)],
        "float32": [(1, 16), *((4, n) for n in (2, 4, 6, 8))],
    }
    for dtype, expected in layouts.items():
        layer_norms = [row for row in rows if row["kernel"] == "layer_norm" and row["dtypes"] == [dtype]]
        others = ["bfloat16", "float16"] if dtype == "float32" else ["float32"]
        results = [*((name, "") for name in ("identity", "none", "tanh", "quick"))]
        results += [("identity", result) for result in others]
        assert sorted(tuple(row["cases"][0].values()) for row in layer_norms) == sorted(
            (activation, *layout, result) for activation, result in results for layout in expected
        )
    for row in rows:
        if row["kernel"] == "gelu" and row["cases"][0]["vector"] == 8:
            assert Kernel(row).loads == {16}, row


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
    found, reason = cuda_kernels.cuda_kernels_for(86, config.DTYPES)
    assert found == []
    assert "sm_86" in reason
    assert "there is no nvcc here" in reason
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(["--arch", "sm_86", "--operator", "layer_norm_gelu", "--cuda"]) == 2
    assert capsys.readouterr().err == f"benchmarks.machine_code: error: {reason}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--arch sm_91", "--arch: got 'sm_91', expected one of sm_80"),
        ("--model cvt_13 --stage 4 --operator linear_add", "--model, --operator, --stage: none of these"),
    ],
)
def test_bad_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert main(arguments.split()) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert message in error


def test_a_spill_fails_the_command(compile_ahead):
    out, rows = compile_ahead(
        "--operator", "conv_projection", "--dtype", "float32", "--stage", "3", prelude=STARVED, code=1
    )
    flawed = {row["kernel"]: row["flaws"] for row in rows if row["flaws"]}
    assert set(flawed) == {"merge_stats"}
    for flaw, text in zip(
        flawed["merge_stats"], (r"\d+ bytes", r"[1-9]\d* loads, [1-9]\d* stores"), strict=True
    ):
        assert re.fullmatch(f"spills: {text}", flaw)
        assert f"sm_90 merge_stats, float32 cvt_13 224²×256 3: {flaw}" in out.splitlines()
