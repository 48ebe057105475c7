"""The kernels compiled for real GPUs, without one: ``cvt compile``."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

from cvt import commands as cli
from cvt import config
from cvt.commands.compile import (
    bounds,
    budgets,
    cuda_kernels,
    gpus,
    instructions,
    jobs,
    launches,
    loops,
    machine_code,
    page,
    triton_kernels,
    work,
)
from cvt.commands.compile.report import SCHEMA, VERSION
from cvt.commands.compile.resources import Compiled, Resources
from cvt.commands.compile.triton_kernels import TritonKernel, specialize
from cvt.model import ConvEmbed, tokens_to_map
from cvt_kernels.machine import Chip, Launch, load_extension
from cvt_kernels.ops.triton_launch import Budget
from tests.processes import Child, run_python

DOCS = Path(__file__).parents[3] / "docs" / "kernels.md"


#: Runs a command for each line that it reads, in a copy of itself: they share what takes time to import.
COMMANDS = """
import json, multiprocessing, os, sys, traceback
from triton.runtime.cache import triton_key
from cvt import commands as cli
from cvt.commands.compile import cuda_kernels, launches, report, triton_kernels

triton_key()  # which Triton remembers
multiprocessing.current_process()._config.pop("daemon")  # else it may not start processes
for line in sys.stdin:
    arguments, prelude, printed = json.loads(line)
    copy = os.fork()
    if copy == 0:
        code = 99
        try:
            os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            exec(prelude)
            code = cli.main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def commands():
    """Starts a process that runs commands: this one has imported the kernels for the interpreter."""
    child = Child(COMMANDS, TRITON_INTERPRET="0")
    yield child
    child.communicate()


@pytest.fixture
def compile_ahead(commands, tmp_path):
    """Runs the command, and returns what it prints and the rows of its report."""

    def run(*arguments, prelude="pass", code=0, jobs=1):
        report, printed = tmp_path / "report.json", tmp_path / "printed"
        command = ["compile", *arguments, "--jobs", str(jobs), "--json", str(report)]
        print(json.dumps([command, prelude, str(printed)]), file=commands.stdin, flush=True)
        returned, out = int(commands.stdout.readline()), printed.read_text(encoding="utf-8")
        assert returned == code, out
        return out, json.loads(report.read_text())["kernels"]

    return run


def assert_flawless(rows, *, most_shared=99):
    for row in rows:
        resources = row["resources"]
        assert row["flaws"] == []
        assert row["uncounted"] is None or row["arch"] != "sm_90", row
        assert (resources["stack"], resources["spill_loads"], resources["spill_stores"]) == (0, {}, {}), row
        assert 0 < resources["registers"] <= 255
        assert resources["static_shared"] + resources["dynamic_shared"] <= most_shared * 1024
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
    return {instructions.access_bytes(name) for name in row["resources"][kind]}


# The last stage has a class token, the narrowest tiles and most of the blocks. All shapes and types take
# minutes: cvt compile --arch sm_80 sm_90 sm_100.
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
            assert all(name.startswith("IGMMA") for name in row["resources"]["tensor_cores"])
            assert row["resources"]["waits"] == 1
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
        for name in row["resources"]["tensor_cores"]
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
    assert row["resources"]["tensor_cores"]
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
    assert any(name.startswith("HGMMA") for name in row["resources"]["tensor_cores"])
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
        assert any(name.startswith(tensor_cores) for name in row["resources"]["tensor_cores"]), row
        assert (row["resources"]["waits"] > 0) == (arch == "sm_90"), row
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
    assert any(name.startswith("HGMMA") for name in first["resources"]["tensor_cores"])
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
        prelude="from cvt.commands.compile import cuda_kernels; "
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
    assert cli.main(["compile", "--arch", "sm_86", "--operator", "layer_norm_gelu", "--cuda"]) == 2
    assert capsys.readouterr().err == f"cvt compile: error: {reason}\n"


def test_a_spill_fails_the_command(compile_ahead):
    out, rows = compile_ahead(
        "--operator", "conv_projection", "--dtype", "float32", "--stage", "3",
        prelude="from cvt.commands.compile import launches; "
        "plan = launches.conv_projection_launches; "
        "starve = lambda launch: launch._replace(options=launch.options | {'maxnreg': 24}); "
        "launches.TRITON_OPERATORS['conv_projection'] = lambda *stage, **options: "
        "[starve(launch) for launch in plan(*stage, **options) if 'merge_stats' in launch.kernel.__name__]",
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
        (["--stage", "5"], "--stage: got 5, expected one of 1, 2, 3, 4"),
        (["--model", "cvt_99"], "--model: got 'cvt_99', expected one of cvt_13, cvt_21, cvt_w24, "
         "segformer_b0, segformer_b5, pvt_v2_b2"),
        (["--operator", "conv"], "--operator: got 'conv', expected one of conv_projection, "
         "conv_projection_hybrid, conv_embedding, conv_linear, depthwise_conv_gelu, "
         "attention, attention_with_bias, attention_by_position, "
         "layer_norm_mlp, linear_gelu, linear_add, linear_add_layer_norm, quantize_rows, "
         "layer_norm_quantize, gelu_quantize, linear_int8, linear_float8, gather_rows, "
         "gather_add_layer_norm, scatter_rows, layer_norm_gelu"),
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


class Grid(NamedTuple):
    height: int
    width: int


def parameter(name, *, is_constexpr=False, do_not_specialize=False, do_not_specialize_on_alignment=False):
    return SimpleNamespace(
        name=name,
        is_constexpr=is_constexpr,
        do_not_specialize=do_not_specialize,
        do_not_specialize_on_alignment=do_not_specialize_on_alignment,
    )


def kernel_with(*parameters):
    return SimpleNamespace(params=parameters, __module__="module", __name__="name")


def test_arguments_are_specialized():
    arguments = {"x": torch.empty(8, device="meta"), "grid": Grid(32, 1), "n": 2**40 + 1, "eps": 1e-5, "K": 3}
    kernel = kernel_with(*(parameter(name, is_constexpr=name == "K") for name in arguments))
    specialized = specialize(Launch(kernel, (1,), arguments, {"num_warps": 4}), 90)
    divisible = [["tt.divisibility", 16]]
    signature = {"x": "*fp32", "grid": Grid("i32", "constexpr"), "n": "i64", "eps": "fp32", "K": "constexpr"}
    assert isinstance(specialized.signature["grid"], Grid)
    assert specialized == TritonKernel(
        90, "module", "name", signature, {(1, 1): 1, (4,): 3}, {(0,): divisible, (1, 0): divisible},
        {"num_warps": 4},
    )  # fmt: skip


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("specialized", [True, False])
@pytest.mark.parametrize(
    "value",
    [0, 1, 7, 16, -16, 2**31 - 1, 2**31, -(2**31) - 1, 1.0, True, None, (1, 16, 5), Grid(1, (16, 3)),
     torch.zeros(8), torch.zeros(9)[1:], torch.zeros(12)[4:],
     TensorDescriptor.from_tensor(torch.zeros(40, 64, dtype=torch.float16), [16, 32])],
    ids=lambda value: f"tensor of {len(value)}" if isinstance(value, torch.Tensor) else str(value)[:20],
)  # fmt: skip
def test_arguments_are_specialized_as_triton_does(value, specialized, aligned):
    """Compares with what Triton's launcher asks for each argument."""
    one = parameter("n", do_not_specialize=not specialized, do_not_specialize_on_alignment=not aligned)
    ours = specialize(Launch(kernel_with(one), (1,), {"n": value}, {}), 90)
    kind, key = native_specialize_impl(CUDABackend, value, False, specialized, aligned)
    constants, attributes = {}, {}

    def visit(kind, key, path):
        if isinstance(kind, tuple):
            for i, parts in enumerate(zip(kind, key, strict=True)):
                visit(*parts, (*path, i))
        elif kind == "constexpr":
            constants[path] = key
        elif key:
            attributes[path] = CUDABackend.parse_attr(key)

    visit(kind, key, (0,))
    assert (ours.signature["n"], ours.constants, ours.attributes) == (kind, constants, attributes)


@pytest.mark.parametrize("model", config.PRESETS)
@pytest.mark.parametrize("size", [224, 225, 384, 511])
def test_stages_are_the_models(model, size):
    maps, expected = torch.empty(1, 3, size, size, device="meta"), []
    for stage in config.PRESETS[model].stages:
        convolution = stage.patch_size, stage.patch_stride, stage.patch_padding
        embedding = (tuple(maps.shape[2:]), maps.shape[1], *convolution)
        tokens, grid = ConvEmbed(stage).to("meta")(maps)
        maps = tokens_to_map(tokens, grid)
        expected.append((grid, tokens.shape[2], int(stage.cls_token), embedding))
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
    assert instructions.access_bytes(instruction) == width


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
    loads = instructions.Block({"LDC": 1, "LDG.E.128": 1}, {"other": 1, "loads": 1}, [])
    ends = instructions.Block({"EXIT": 1}, {"control": 1}, [])
    assert machine_code._disassemble(b"") == {
        "k": machine_code.MachineCode(8, 0, 16, 4, {"LDC": 1, "LDG.E.128": 1}, [loads], 32 * 16),
        "_a_kernel_of_many_words": machine_code.MachineCode(255, 8, 0, 0, {"EXIT": 1}, [ends], 0),
    }


def test_what_was_read_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    blocks = [instructions.Block({"LDG.E.128": 2}, {"loads": 2}, [0])]
    code = {"kernel": machine_code.MachineCode(32, 0, 1024, 0, {"LDG.E.128": 2}, blocks, 1024)}
    monkeypatch.setattr(machine_code, "_disassemble", lambda cubin: code)
    assert machine_code.read(b"machine code") == code
    monkeypatch.setattr(machine_code, "_disassemble", lambda cubin: {})
    assert machine_code.read(b"machine code") == code
    assert machine_code.read(b"other machine code") == {}


# Instructions, loops and bounds, of code whose counts are known by hand -----------------------------------


def disassembled(*lines):
    """Returns code as the disassembler prints it, from one instruction or label in a line."""
    return "\n".join(
        line if line.endswith(":") else f"    /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines)
    )


def parsed(*lines):
    """Returns the blocks and the instructions of code with one instruction or label in a line."""
    found, labels = instructions.parse(disassembled(*lines))
    return instructions.blocks_of(found, labels), found


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("arithmetic", ["FFMA R1, R2, R3, R1", "MUFU.EX2 R1, R2", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4]",
                        "HFMA2.MMA R1, R2, R3, R4", "FADD.FTZ R1, -R2, R3", "FMNMX R1, R2, R3, !PT"]),
        ("loads", ["LDG.E.128.CONSTANT R4, desc[UR4][R2.64]", "LDS R1, [R2]", "LDGSTS.E.BYPASS.128 [R1]",
                   "LDSM.16.M88.4 R4, [R1]"]),
        ("stores", ["STG.E.128 desc[UR4][R2.64], R4", "STS.64 [R1], R2"]),
        ("address", ["IMAD.WIDE R2, R4, 0x2, R2", "IADD3 R1, R2, R3, RZ", "ISETP.GT.AND P0, PT, R1, RZ, PT",
                     "LEA R1, R2, R3, 0x4", "UIADD3 UR4, UR4, 0x8, URZ", "SHF.L.U32 R1, R2, 0x4, RZ",
                     "LOP3.LUT R1, R2, 0xf, RZ, 0xc0, !PT", "@!P1 VIADD R1, R2, 0x1"]),
        ("conversion", ["F2FP.BF16.F32.PACK_AB R1, R2, R3", "PRMT R1, R2, 0x7632, R1",
                        "HADD2.F32 R1, -RZ, R2.H0_H0", "IMAD.U32 R1, R2, 0x10000, RZ",
                        "SHF.L.U32 R1, R2, 0x10, RZ", "LOP3.LUT R1, R2, 0xffff0000, RZ, 0xc0, !PT"]),
        ("control", ["@P0 BRA `(.L_x_1)", "BSSY B0, `(.L_x_1)", "BAR.SYNC.DEFER_BLOCKING 0x0", "NOP",
                     "WARPGROUP.DEPBAR.LE gsb0, 0x0"]),
        ("other", ["MOV R1, R2", "IMAD.MOV.U32 R1, RZ, RZ, R2", "HFMA2.MMA R1, -RZ, RZ, 0, 0",
                   "S2R R1, SR_TID.X", "ULDC.64 UR4, c[0x0][0x208]", "SHFL.BFLY PT, R1, R2, 0x1, 0x1f",
                   "CS2R R2, SRZ"]),
    ],
)  # fmt: skip
def test_classes(kind, lines):
    found, _ = instructions.parse(disassembled(*lines))
    assert [instructions.class_of(each) for each in found] == [kind] * len(lines)


#: Two loops, one in the other, then one that only counts, then a third behind a branch; 20 instructions.
NESTED = (
    "S2R R0, SR_TID.X",
    "MOV R1, RZ",
    ".L_outer:",
    "LDG.E.128 R4, [R2.64]",
    ".L_inner:",
    "FFMA R8, R4, R5, R8",
    "@P2 BRA `(.L_skip)",
    "MUFU.EX2 R8, R8",
    ".L_skip:",
    "@P0 BRA `(.L_inner)",
    "IADD3 R1, R1, 0x1, RZ",
    "@!P1 BRA `(.L_outer)",
    ".L_counts:",
    "UIADD3 UR4, UR4, 0x8, URZ",
    "@P3 BRA `(.L_counts)",
    "BRA P4, `(.L_end)",
    ".L_last:",
    "FADD R8, R8, R9",
    "FADD R8, R8, R9",
    "@P5 BRA `(.L_last)",
    ".L_end:",
    "STG.E [R2.64], R8",
    "EXIT",
    ".L_trap:",
    "BRA `(.L_trap)",
    "NOP",
)


def test_loops_and_trips():
    blocks, _ = parsed(*NESTED)
    sizes = [sum(sum(blocks[i].classes.values()) for i in loop) for loop in loops.loops_of(blocks)]
    assert sizes == [7, 4, 3]  # outer, inner, last: not the one that only counts, nor the trap
    assert loops.why_not_counted(blocks, (3, 5, 2)) is None
    assert loops.why_not_counted(blocks, (3, 5)) == "not counted: the code has 3 loops, work.py describes 2"
    executed = loops.executed(blocks, (3, 5, 2))
    # 2 before, 3 · (3 + 5 · 4) in the nest, 3 that count and branch, 2 · 3, 2 at the end
    assert executed.total == 2 + 3 * (3 + 5 * 4) + 3 + 2 * 3 + 2
    assert executed.in_loops == 3 * (3 + 5 * 4) + 2 * 3
    assert executed.instructions["MUFU.EX2"] == 15  # behind a branch: it counts as executed
    assert executed.instructions["LDG.E.128"] == 3
    assert executed.classes == {
        "other": 2, "loads": 3, "arithmetic": 15 + 15 + 4, "control": 3 * (1 + 5 * 2) + 1 + 1 + 2 + 1,
        "address": 3 + 1, "stores": 1,
    }  # fmt: skip


def test_trips_may_be_a_mean_or_zero():
    blocks, _ = parsed(*NESTED)
    assert loops.executed(blocks, (1.5, 2, 0)).total == 2 + 1.5 * (3 + 2 * 4) + 3 + 2


def test_code_that_a_loop_may_skip_runs_in_part_of_the_trips():
    """One in 4 of 12 trips runs the end of a tile, as where a loop goes over the steps of all tiles."""
    blocks, _ = parsed(
        "S2R R0, SR_CTAID.X", ".L_loop:", "FADD R1, R1, R2", "@P0 BRA `(.L_next)", "FMUL R1, R1, R2",
        "STG.E [R2.64], R1", ".L_next:", "IADD3 R3, R3, 0x1, RZ", "@P1 BRA `(.L_loop)", "EXIT",
    )  # fmt: skip
    assert loops.executed(blocks, (12,)).total == 1 + 12 * 6 + 1
    assert loops.executed(blocks, (12,), conditional=1 / 4).total == 1 + 12 * 4 + 3 * 2 + 1


def test_code_moved_behind_the_end_is_no_loop():
    """The branch back from there does not lead to itself again."""
    blocks, _ = parsed(
        "@P0 BRA `(.L_rare)", ".L_back:", "FADD R1, R1, R2", "EXIT", ".L_rare:", "FMUL R1, R1, R2",
        "BRA `(.L_back)",
    )  # fmt: skip
    assert loops.loops_of(blocks) == []
    assert loops.executed(blocks, ()).total == 5


def test_loops_may_begin_with_the_same_instruction():
    """An inner loop of 3 trips in an outer one of 10, which has nothing of its own before it."""
    blocks, _ = parsed(
        ".L_loop:", "FADD R1, R1, R2", "@P0 BRA `(.L_loop)", "FMUL R1, R1, R2", "@P1 BRA `(.L_loop)", "EXIT"
    )
    assert loops.executed(blocks, (10, 3)).total == 10 * (3 * 2 + 2) + 1


def test_calls():
    """On sm_80, a call of a label of the function is how it leaves a loop; other calls return."""
    blocks, _ = parsed(
        ".L_loop:", "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath)", "FADD R1, R1, R2",
        "@P0 CALL.REL.NOINC `(.L_end)", "BRA `(.L_loop)", ".L_end:", "EXIT",
    )  # fmt: skip
    assert loops.executed(blocks, (5,)).total == 5 * 4 + 1


def test_code_without_instructions_has_no_blocks():
    assert parsed() == ([], [])
    assert loops.executed([], ()).total == 0


@pytest.mark.parametrize(
    ("size", "lines"),
    [
        # Two loads of 16 bytes are under way together, then one of 4 with the second of them.
        (32 * (16 + 16), ["LDG.E.128 R4, [R2.64]", "LDG.E.128 R8, [R2.64]", "FADD R0, R7, R1",
                          "LDG.E R12, [R2.64]", "FADD R0, R12, R11"]),
        (32 * (16 + 4), ["LDG.E.128 R4, [R2.64]", "FADD R0, R0, R3", "LDG.E R8, [R2.64]"]),
        (32 * 16, ["LDG.E.128 R4, [R2.64]", "FADD R0, R4, R3", "LDG.E.128 R8, [R2.64]"]),
        # Asynchronous copies in groups, of which the wait leaves one under way.
        (32 * 16 * 3, ["LDGSTS.E.BYPASS.128 [R1], [R2.64]", "LDGDEPBAR", "LDGSTS.E.BYPASS.128 [R1], [R2.64]",
                       "LDGDEPBAR", "DEPBAR.LE SB0, 0x1", "LDGSTS.E.BYPASS.128 [R1], [R2.64]",
                       "LDGSTS.E.BYPASS.128 [R1], [R2.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x0"]),
        (0, ["LDS.128 R4, [R2]", "STG.E.128 [R2.64], R4"]),
    ],
)  # fmt: skip
def test_bytes_in_flight(size, lines):
    assert instructions.bytes_in_flight(parsed(*lines)[1]) == size


def test_bytes_in_flight_of_a_loop():
    """Loads before the loop do not count; what a trip loads for the next does, until that one uses it."""
    blocks, found = parsed(
        "LDG.E.128 R4, [R2.64]", "LDG.E.128 R8, [R2.64]", "LDG.E.128 R12, [R2.64]", ".L_loop:",
        "LDG.E.64 R20, [R2.64]", "FADD R0, R16, R0", "LDG.E.64 R16, [R2.64]", "FADD R0, R20, R0",
        "@P0 BRA `(.L_loop)", "EXIT",
    )  # fmt: skip
    assert loops.bytes_in_flight_of(found, blocks) == 32 * (8 + 8)
    assert loops.bytes_in_flight_of(found[:3], []) == 3 * 32 * 16


@pytest.mark.parametrize(
    ("instruction", "flops"),
    [
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16 // 4),
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8),
        ("IGMMA.64x128x32.S8.S8", 2 * 64 * 128 * 32 // 4),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", 2 * 64 * 64 * 32 // 4),
        ("IMMA.16832.S8.S8.SAT", 2 * 16 * 8 * 32),
        ("UTCHMMA", 0),
        ("FFMA", 0),
    ],
)
def test_flops_of_tensor_cores(instruction, flops):
    assert bounds.flops_of(instruction) == flops


def analyzed(lines, *, programs, outputs, size, trips=(), flops=0, scores=0, arch=90):
    blocks, found = parsed(*lines)
    in_flight = loops.bytes_in_flight_of(found, blocks)
    code = machine_code.MachineCode(32, 0, 0, 0, {}, blocks, in_flight)
    launch = work.Work(programs, outputs, size, tuple(trips), flops, scores)
    return bounds.analyze(code, Resources.of(code, arch, 128), launch, arch)


def test_counts_of_an_output():
    """4 warps run 2 + 4 · 10 instructions each and write 256 elements."""
    lines = ["MOV R1, R2", ".L_x:", "LDG.E.64 R4, [R2.64]", "MUFU.EX2 R5, R4", "FADD R1, R1, R5",
             "@P0 BRA `(.L_x)", "EXIT"]  # fmt: skip
    counts = analyzed(lines, programs=1, outputs=256, size=0, trips=[10], scores=2 * 64 * 64).counts
    per_warp = 4 * 32 / 256
    assert counts.instructions_per_output == 42 * per_warp
    assert counts.classes_per_output == {
        "arithmetic": 20 * per_warp, "loads": 10 * per_warp, "stores": 0, "address": 0, "conversion": 0,
        "control": 11 * per_warp, "other": per_warp,
    }  # fmt: skip
    assert counts.mufu_per_output == 10 * per_warp
    assert counts.instructions_per_tile == 40 / 2
    assert counts.warps == 64  # 32 registers fill the multiprocessor
    assert counts.bytes_in_flight == 64 * 32 * 8


# On an H200, a microsecond has 1830 clocks of 132 multiprocessors.
@pytest.mark.parametrize(
    ("bound", "microseconds", "lines", "size", "flops"),
    [
        ("issue", 4 * 1000 / 4, ["FADD R1, R1, R2"] * 999 + ["EXIT"], 10, 0),
        ("MUFU", 4 * 1000 * 32 / 16, ["MUFU.EX2 R1, R2"] * 1000 + ["EXIT"], 10, 0),
        ("tensor", 32768 * 64 * 4 / 3270, ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4]"] * 64 + ["EXIT"], 10,
         32768 * 64),
        ("DRAM", 132 * 10**6 / 17.8 / 132, ["FADD R1, R1, R2", "EXIT"], 132 * 10**6, 0),
    ],
)  # fmt: skip
def test_predicted_bounds(bound, microseconds, lines, size, flops):
    predicted = analyzed(lines, programs=132, outputs=1, size=size, flops=132 * flops).predicted
    assert predicted.bound == bound
    assert predicted.microseconds[bound] == pytest.approx(microseconds / 1830)
    floor = max(size / 17.8, 132 * flops / 3270) / 132 / 1830
    assert predicted.floor_microseconds == pytest.approx(floor)
    assert predicted.share_of_floor == pytest.approx(floor / (microseconds / 1830))


def test_few_programs_leave_multiprocessors_idle():
    lines = ["FADD R1, R1, R2"] * 999 + ["EXIT"]
    full, few = (analyzed(lines, programs=programs, outputs=1, size=0).predicted for programs in (132, 12))
    assert few.microseconds["issue"] == full.microseconds["issue"]


def test_gpus_without_rates_have_counts_only():
    analysis = analyzed(["EXIT"], programs=1, outputs=32, size=0, arch=89)
    assert analysis.predicted is None
    assert analysis.counts.instructions_per_output == 4


# The assembler's messages, and budgets --------------------------------------------------------------------


def test_messages_of_the_assembler():
    lines = [
        "(C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions defining accumulator registers of a wgmma between start and end of the pipeline stage "
        "in the function '_attention_fwd_loop_kernel'",
        "24 bytes gmem",
        "Compiling entry function '_attention_fwd_loop_kernel' for 'sm_90a'",
        "(C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirement.",
    ]
    log = "\n".join(f"ptxas info    : {line}" for line in lines)
    assert triton_kernels.parse_messages(log) == [
        "C7515: Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions defining accumulator registers of a wgmma between start and end of the pipeline stage",
        "C7508: Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirement.",
    ]
    assert triton_kernels.parse_messages("ptxas info    : 24 bytes gmem\n") == []


def test_log_of_the_assembler_is_kept(monkeypatch, tmp_path):
    """A kernel of Triton's cache, whose compilation printed nothing, is assembled again, once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assembled = []

    def assemble(ptx, metadata):
        assembled.append(ptx)
        print(f"ptxas info : (C7515) {ptx} is slow")

    backend = SimpleNamespace(
        parse_options=lambda options: options,
        add_stages=lambda stages, options, language: stages.update(cubin=assemble),
    )
    monkeypatch.setattr(triton_kernels, "make_backend", lambda target: backend)

    def log_of(ptx, printed=""):
        compiled = SimpleNamespace(asm={"ptx": ptx})
        return triton_kernels._assembler_log(compiled, printed, "sm_90", {"num_warps": 4})

    assert log_of("printed", "ptxas info : 4 registers") == "ptxas info : 4 registers"
    assert log_of("printed") == "ptxas info : 4 registers"
    assert assembled == []
    for _ in range(2):
        assert triton_kernels.parse_messages(log_of("cached")) == ["C7515: cached is slow"]
    assert assembled == ["cached"]


def row_of(lines, kernel, *, messages=(), trips=(), registers=100, batch=256, described=True):
    """Returns the row of a kernel of attention that computes 64 × 64 scores in its loop."""
    blocks, _ = parsed(*lines)
    code = machine_code.MachineCode(registers, 0, 0, 0, {}, blocks, 0)
    compiled = Compiled(code, Resources.of(code, 90, 128), messages)
    case = jobs.LaunchCase("attention", "bfloat16", "cvt_13", 224, batch, 3, "inference")
    source = TritonKernel(90, "module", f"_{kernel}_kernel", {}, {}, {}, {})
    works = [work.Work(10, 1280, 0, tuple(trips), scores=64 * 64)] if described else []
    job = jobs.Job(source, {case: works})
    return jobs._row(job, source.name, compiled)


def test_budgets(monkeypatch):
    from cvt_kernels.ops.attention.triton import common

    limits = Budget(instructions_per_output=10, instructions_per_tile=8, registers=120)
    monkeypatch.setattr(common, "BUDGETS", {90: {"fwd": limits}})
    loop = [".L_x:", *["FADD R1, R1, R2"] * 8, "@P0 BRA `(.L_x)", "EXIT"]
    assert row_of(["FADD R1, R1, R2", "EXIT"], "attention_fwd").flaws == []
    assert row_of(loop, "attention_fwd", trips=[1], registers=128).flaws == [
        "over its budget: 128 registers, 120 allowed",
        "over its budget: 9 instructions per 64 × 64 scores, 8 allowed",
    ]
    assert row_of(loop, "attention_fwd", trips=[2]).flaws == [
        "over its budget: 19 instructions per output, 10 allowed",
        "over its budget: 18 instructions per 64 × 64 scores, 8 allowed",
    ]
    assert row_of(loop, "attention_fwd", trips=[2], batch=1).flaws == []  # budgets are for one size
    assert row_of(loop, "attention_bwd", trips=[2]).flaws == []
    other_loops = "not counted: the code has 1 loops, work.py describes 2"
    assert row_of(loop, "attention_fwd", trips=[2, 2]).flaws == [other_loops]
    assert row_of(loop, "attention_fwd", registers=128, described=False).flaws == [
        "over its budget: 128 registers, 120 allowed",
        "not counted: work.py does not describe it",
    ]
    row = row_of(loop, "attention_bwd", trips=[2, 2])
    assert (row.flaws, row.uncounted, row.analyses) == ([], other_loops, [])


def test_serialized_products_are_a_flaw():
    serialized = "C7515: Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"
    row = row_of(["EXIT"], "attention_bwd", messages=[serialized, "C7508: another"])
    assert row.flaws == [serialized]
    assert row.messages == [serialized, "C7508: another"]


def test_budgets_name_kernels():
    """A budget for a kernel that does not exist would guard nothing."""
    from cvt_kernels.ops.attention.triton import common as attention
    from cvt_kernels.ops.conv_embedding.triton import common as embedding
    from cvt_kernels.ops.conv_linear.triton import common as conv_linear
    from cvt_kernels.ops.conv_projection.triton import common as projection
    from cvt_kernels.ops.linear.triton import common as linear
    from cvt_kernels.ops.mlp.triton import common as mlp

    assert set(mlp.BUDGETS[90]) <= set(mlp.CONFIGS[90, 2, "small"])
    assert budgets.budget_of("layer_norm_mlp", "layer_norm_mlp_fwd_resident", 90) is not None
    assert set(embedding.BUDGETS[90]) <= {kernel for kernel, generation, _ in embedding.CONFIGS}
    assert set(projection.BUDGETS[90]) <= set(projection.CONFIGS[90])
    assert set(attention.BUDGETS[90]) <= set(attention.CONFIGS[90, 2, 64])
    budget = budgets.budget_of("conv_linear", "conv_linear_fwd", 90)
    assert budget is conv_linear.BUDGETS[90]["fwd"]
    budget = budgets.budget_of("conv_projection", "conv_projection_walk_fwd", 90)
    assert budget is projection.BUDGETS[90]["walk_fwd"]
    assert budgets.budget_of("attention_with_bias", "attention_fwd", 90) is None
    for operator in linear.BUDGETS[90]:
        assert budgets.budget_of(operator, operator, 90) is linear.BUDGETS[90][operator]


@pytest.mark.parametrize(("version", "registers"), [("3.6.0", 250), ("3.7.1", 176), ("4.0", 176)])
def test_the_code_of_an_older_triton_may_take_more(monkeypatch, version, registers):
    monkeypatch.setattr(triton, "__version__", version)
    budget = budgets.budget_of("linear_gelu", "linear_gelu", 90)
    assert (budget.registers, budget.instructions_per_output) == (registers, 17)
    assert budgets.budget_of("linear_gelu", "linear_gelu", 80) is None


@pytest.mark.parametrize("operator", launches.TRITON_OPERATORS)
def test_every_large_kernel_has_its_work_described(operator):
    for number, stage in enumerate(launches.stages("cvt_13"), 1):
        training = operator != "conv_linear"
        for launch in launches.TRITON_OPERATORS[operator](
            stage, torch.bfloat16, Chip(90, 132), training=training
        ):
            described = work.work_of(launch)
            if launch.kernel.__name__ == "_update_running_kernel":
                assert described is None
                continue
            assert described.programs > 0
            assert described.outputs > 0
            assert described.bytes > 0
            assert all(count > 0 for count in described.trips), (number, launch.kernel.__name__)


def test_work_of_linear_layers():
    """Stage 3: 394 by 6 tiles for GELU, of 6 steps each; whole rows for LayerNorm, with K = C, then 4C."""
    stage = launches.stages("cvt_13")[2]
    rows, channels = 256 * 197, 384
    (gelu,) = launches.linear_gelu_launches(stage, torch.bfloat16, Chip(90, 132), training=True)
    described = work.work_of(gelu)
    assert (described.programs, described.outputs) == (132, rows * 4 * channels)
    assert described.bytes == 2 * (rows * channels * (1 + 4 + 4) + 4 * channels**2 + 4 * channels)
    assert described.flops == 2 * rows * 4 * channels**2
    assert described.trips == (6 * 394 * 6 / 132,)
    assert described.conditional == 1 / 6
    assert launches.linear_add_launches(stage, torch.bfloat16, Chip(90, 132), training=True) == []
    both = launches.linear_add_layer_norm_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    narrow, wide = map(work.work_of, both)
    assert narrow.bytes == 2 * (rows * channels * 4 + channels**2 + 3 * channels)
    assert (narrow.programs, narrow.trips, narrow.conditional) == (394, (6,), 1)
    assert wide.trips == (24,)
    (exact,) = launches.linear_gelu_launches(stage, torch.float32, Chip(90, 132), training=False)
    assert work.work_of(exact).flops == 0


def test_work_of_the_projection():
    """Stage 1: every program walks down 14 pairs of rows of 7 images, but for the last of 37."""
    stage = launches.stages("cvt_13")[0]
    launch, *_ = launches.conv_projection_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    elements = 256 * 64 * 56 * 56
    described = work.work_of(launch)
    assert described.outputs == elements * 3 // 2
    assert described.bytes == elements * 5 // 2 * 2
    assert described.programs == 37 * 2 * 7
    assert described.trips == (256 / 37, 14)


def test_work_of_the_general_projection(monkeypatch):
    """Stage 1: strips of 14 of 56 rows, 2 column blocks of 28; k and v have half of both."""
    from cvt_kernels.ops.conv_projection.triton import forward

    monkeypatch.setattr(forward, "is_walk", lambda geometry: False)
    stage = launches.stages("cvt_13")[0]
    launch, *_ = launches.conv_projection_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    tiles_of_region = [launch.arguments["TILE"].pixels // branch.columns * branch.rows
                       for branch in launch.arguments["BRANCHES"]]  # fmt: skip
    rows = [-(-size // tile) for size, tile in zip((14, 7, 7), tiles_of_region, strict=True)]
    columns = [
        -(-size // branch.columns)
        for size, branch in zip((28, 14, 14), launch.arguments["BRANCHES"], strict=True)
    ]
    assert work.work_of(launch).trips == (rows[0], columns[0], rows[1], columns[1], rows[2], columns[2])


def test_work_of_attention():
    """Stage 3: 197 queries in 4 tiles of 64, walked over by one program of a head; 50 keys in a tile."""
    stage = launches.stages("cvt_13")[2]
    launch, *_ = launches.attention_launches(stage, torch.bfloat16, Chip(90, 132), training=False)
    described = work.work_of(launch)
    assert described.programs == 256 * 6
    assert described.outputs == 256 * 197 * 384
    assert described.flops == 4 * 256 * 6 * 197 * 50 * 64
    assert described.trips == (4,)
    assert described.scores == 4 * 64 * 64
    launch, *_ = launches.attention_launches(stage, torch.float32, Chip(90, 132), training=False)
    assert work.work_of(launch).flops == 0  # without tensor cores


def test_work_of_the_mlp():
    """Stage 1 only: 6272 tiles of 128 rows, on 2 programs of each of 132 multiprocessors."""
    chip = Chip(90, 132)
    first, *others = launches.stages("cvt_13")
    assert all(launches.layer_norm_mlp_launches(other, torch.bfloat16, chip) == [] for other in others)
    assert launches.layer_norm_mlp_launches(first, torch.bfloat16, chip, training=True) == []
    (launch,) = launches.layer_norm_mlp_launches(first, torch.bfloat16, chip, training=False)
    rows = 256 * 56 * 56
    described = work.work_of(launch)
    assert described.programs == 264
    assert described.outputs == rows * 64
    assert described.bytes == 2 * (2 * rows * 64 + 2 * 64 * 256)
    assert described.trips == (6272 / 264,)
    assert described.flops == 4 * rows * 64 * 256
    (launch,) = launches.layer_norm_mlp_launches(first, torch.float32, chip, training=False)
    described = work.work_of(launch)
    assert described.trips == (12544 / 264, 8)  # tiles of 64 rows, and chunks of 32 hidden features
    assert described.flops == 0  # without tensor cores


def test_work_of_8_bit_numbers():
    """Stage 3: a byte per number and a scale per row; products at twice the speed of half precision."""
    stage, chip = launches.stages("cvt_13")[2], Chip(90, 132)
    rows = 256 * 197
    for operator, width in (("quantize_rows", 384), ("layer_norm_quantize", 384), ("gelu_quantize", 1536)):
        (launch,) = launches.TRITON_OPERATORS[operator](stage, torch.bfloat16, chip, training=False)
        described = work.work_of(launch)
        assert described.outputs == rows * width
        assert described.bytes == 3 * rows * width + 4 * rows
        assert (described.trips, described.flops) == ((), 0)
    query, proj, fc1, fc2 = launches.linear_int8_launches(stage, torch.bfloat16, chip, training=False)
    described = work.work_of(fc1)
    assert described.flops == 2 * rows * 384 * 1536
    assert described.speed == 2
    # Weights, a scale of each row, and a scale and a bias of each output beside the tokens.
    assert described.bytes == rows * (384 + 2 * 1536) + 384 * 1536 + 4 * rows + 6 * 1536
    assert described.trips == (3 * fc1.arguments["tiles"] / fc1.arguments["programs"],)
    assert work.work_of(fc2).trips == (12,)
    assert work.work_of(proj).bytes - work.work_of(query).bytes == 2 * rows * 384
    assert launches.linear_float8_launches(stage, torch.bfloat16, Chip(80, 108), training=False) == []
    assert len(launches.linear_float8_launches(stage, torch.bfloat16, chip, training=False)) == 7
    assert launches.linear_float8_launches(stage, torch.bfloat16, chip, training=True) == []


def test_products_of_8_bits_are_predicted_at_twice_the_speed():
    lines = ["IGMMA.64x64x32.S8.S8 R24, gdesc[UR4]"] * 64 + ["EXIT"]
    blocks, _ = parsed(*lines)
    code = machine_code.MachineCode(32, 0, 0, 0, {}, blocks, 0)
    one, two = (
        bounds.analyze(
            code, Resources.of(code, 90, 128), work.Work(132, 1, 10, (), 132 * 2**24, speed=speed), 90
        ).predicted
        for speed in (1.0, 2.0)
    )
    assert one.bound == two.bound == "tensor"
    assert one.microseconds["tensor"] == 2 * two.microseconds["tensor"]
    assert one.share_of_floor == two.share_of_floor


# Specializations ------------------------------------------------------------------------------------------


#: Kernel → the most specializations that batches from 1 to 512 may need, in inference and in training.
SPECIALIZATIONS = {
    "inference": {
        "_conv_projection_walk_fwd_kernel": 3,
        "_attention_fwd_kernel": 2,
        "_attention_fwd_loop_kernel": 1,
    },
    "training": {
        "_conv_projection_walk_fwd_kernel": 3,
        "_conv_projection_walk_stats_kernel": 3,
        "_merge_stats_kernel": 1,
        "_update_running_kernel": 1,
        "_conv_projection_walk_bwd_sums_kernel": 3,
        "_sum_regions_kernel": 2,
        "_conv_projection_walk_bwd_conv_kernel": 3,
        "_conv_projection_walk_bwd_input_kernel": 3,
        "_attention_fwd_kernel": 2,
        "_attention_fwd_loop_kernel": 1,
        "_attention_bwd_kernel": 1,
        "_attention_bwd_dq_kernel": 2,
        "_attention_bwd_dkdv_kernel": 2,
    },
}


def test_specializations_of_batches():
    """Counts in a process of its own, since the interpreter's kernels have no specializations."""
    code = (
        "import json; from cvt.commands.compile.jobs import count_specializations as count;"
        "print(json.dumps({mode: count(mode, range(1, 513)) for mode in ('inference', 'training')}))"
    )
    counts = json.loads(run_python(code, TRITON_INTERPRET="0").stdout)
    grown = {
        (mode, kernel): count
        for mode, kernels in counts.items()
        for kernel, count in kernels.items()
        if count > SPECIALIZATIONS[mode].get(kernel, 0)
    }
    assert grown == {}


def test_tables(tmp_path):
    def analysis(instructions, bound, share, per_tile=None):
        counted = {"instructions_per_output": instructions, "instructions_per_tile": per_tile}
        return {"counted": counted, "predicted": {"bound": bound, "share_of_floor": share}}

    def row(kernel, registers, *analyses, arch="sm_90", dtype="bfloat16", **case):
        code = machine_code.MachineCode(registers, 0, 3072, 0, {"LDG.E.128": 2, "LDG.E.U16": 1, "STG.E": 1})
        resources = Resources.of(code, 90, 128, dynamic_shared=4096)._asdict()
        return {
            "operator": "attention", "kernel": kernel, "arch": arch, "dtypes": [dtype], "cases": [case],
            "resources": resources, "analyses": analyses,
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
        "| kernel | bfloat16 sm_90 | bfloat16 sm_80 | float32 sm_90 | float32 sm_80 |",
        "|---|---|---|---|---|",
        "| `fwd` | 1000 / tensor 50% |  |  | 40 / MUFU 70% |",
        "| `gelu`, 24 elements | 20.4 / DRAM 100% |  |  |  |",
        "<!-- end -->",
    ]
    target.write_text("before\n<!-- compile: attention -->\nafter\n")
    with pytest.raises(ValueError, match="has no <!-- compile: attention --> and <!-- end -->"):
        page.main([file, target])
    with pytest.raises(ValueError, match=f"expected a report of cvt compile, version {VERSION}"):
        page.tables(report | {"version": 0})
