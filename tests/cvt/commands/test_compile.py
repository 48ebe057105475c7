"""The kernels compiled for GPUs that are not here: ``cvt compile``."""

import json
import re
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
from cvt.commands.compile import gpus, jobs, launches
from cvt.commands.compile.report import SCHEMA, VERSION
from cvt.commands.compile.resources import Resources, Usage
from cvt.commands.compile.triton_kernels import TritonKernel, specialize
from cvt.model import ConvEmbed, tokens_to_map
from cvt_kernels.machine import Launch
from tests.processes import run_python


def compile_ahead(folder, *arguments, prelude="", code=0):
    """Runs the command in a process of its own: this one has imported the kernels for the interpreter.

    Returns:
        The lines that it prints, and its report.
    """
    report = folder / "report.json"
    command = ["compile", *arguments, "--json", str(report)]
    program = f"{prelude}\nimport sys\nfrom cvt import commands\nsys.exit(commands.main({command}))"
    result = run_python(program, TRITON_INTERPRET="0")
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout.splitlines(), json.loads(report.read_text())


def test_kernels_of_a_model(tmp_path):
    """CvT-13's embeddings of three stages: the first convolves too, the others follow PyTorch's."""
    arguments = ("--model", "cvt_13", "--operator", "conv_embedding", "--dtype", "bfloat16", "--jobs", "1")
    lines, report = compile_ahead(tmp_path, *arguments, "--batch-size", "64")
    assert (report["schema"], report["version"]) == (SCHEMA, VERSION)
    names = ["conv_embedding_embed", "conv_embedding_normalize", "conv_embedding_normalize"]
    assert [row["kernel"] for row in report["kernels"]] == names
    heading, *cells, empty, verdict = lines
    assert re.split(r"  +", heading) == [
        "arch", "kernel", "dtype", "mode", "for", "registers", "spilled B", "shared B", "occupancy",
    ]  # fmt: skip
    assert (empty, verdict) == ("", "3 kernels: nothing spills, everything fits")
    for number, (row, line) in enumerate(zip(report["kernels"], cells, strict=True), 1):
        resources = row["resources"]
        assert (row["flaws"], resources["stack"]) == ([], 0)
        assert 0 < resources["registers"] <= 255
        assert 0 < resources["occupancy"] <= 1
        shared = resources["static_shared"] + resources["dynamic_shared"]
        assert (shared > 0) == (number == 1)
        assert re.split(r"  +", line) == [
            "sm_90", row["kernel"], "bf16", "inference", f"stage {number}", str(resources["registers"]), "0",
            str(shared), f"{resources['occupancy']:.0%}",
        ]  # fmt: skip
        (case,) = row["cases"]
        assert case == {
            "operator": "conv_embedding", "dtype": "bfloat16", "model": "cvt_13", "image_size": 224,
            "batch_size": 64, "stage": number, "mode": "inference",
        }  # fmt: skip


#: Gives the kernel that merges statistics too few registers.
STARVED = """
from cvt.commands.compile import launches
plan = launches.conv_projection_launches
starve = lambda launch: launch._replace(options=launch.options | {"maxnreg": 24})
launches.TRITON_OPERATORS["conv_projection"] = lambda *stage, **options: [
    starve(launch) for launch in plan(*stage, **options) if "merge_stats" in launch.kernel.__name__
]
"""


def test_a_spill_fails_the_command(tmp_path):
    lines, report = compile_ahead(
        tmp_path, "--operator", "conv_projection", "--dtype", "float32", "--stage", "3", "--jobs", "1",
        prelude=STARVED,
        code=1,
    )  # fmt: skip
    flawed = {row["kernel"]: row["flaws"] for row in report["kernels"] if row["flaws"]}
    assert set(flawed) == {"merge_stats"}
    (flaw,) = flawed["merge_stats"]
    assert re.fullmatch(r"spills: [1-9]\d* bytes", flaw)
    assert f"sm_90 merge_stats, float32 cvt_13 224²×256 3: {flaw}" in lines


def test_flaws():
    """On sm_90 a block may have 227 KiB of shared memory, and a multiprocessor has 65536 registers."""

    def flaws(registers, stack, shared, local, threads=128):
        return Resources.of(Usage(registers, stack, shared + 1024, local), 90, threads).flaws(90)

    assert flaws(255, 0, 227 * 1024, 0) == []
    assert flaws(255, 8, 0, 0) == flaws(255, 0, 0, 8) == ["spills: 8 bytes"]
    assert flaws(255, 0, 227 * 1024 + 1, 0) == ["shared memory: 232449 bytes, a block may have 232448"]
    assert flaws(255, 0, 0, 0, threads=512) == ["a block of 512 threads × 255 registers does not fit"]


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
         "gather_add_layer_norm, scatter_rows"),
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
    program = (
        "from cvt.commands.compile.triton_kernels import TritonKernel\n"
        "module = 'cvt_kernels.ops.attention.triton.backward'\n"
        "TritonKernel(90, module, '_attention_bwd_kernel', {}, {}, {}, {}).examine()"
    )
    result = run_python(program, TRITON_INTERPRET="0")
    assert "RuntimeError: _attention_bwd_kernel does not compile for sm_90: " in result.stderr


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


#: Compares the attributes of every kernel with those that Triton's launcher makes of the same arguments, and
#: for one operator the key in Triton's cache; prints the kernels.
LAUNCHED = """
import os, torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import create_function_from_signature
from cvt.commands.compile import launches, triton_kernels
from cvt_kernels.machine import Chip

class Driver:
    get_current_device = get_current_stream = lambda self, *device: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
backend = make_backend(GPUTarget("cuda", 90, 32))
for operator, launches_of in launches.TRITON_OPERATORS.items():
    model = "segformer_b0" if operator == "depthwise_conv_gelu" else "cvt_13"
    stage = launches.stages_of(model, launches.image_size_of(model))[0]
    for training in (False, True):
        for launch in launches_of(stage, torch.bfloat16, Chip(90, 132), batch=1, training=training):
            kernel, function = triton_kernels.specialize(launch, 90), launch.kernel
            binder = create_function_from_signature(function.signature, function.params, backend)
            bound, specialization, _ = binder(**launch.arguments)
            *_, expected = function._pack_args(backend, {}, bound, specialization, {})
            assert str(kernel.launch_attributes(function.params)) == str(expected), kernel.name
            if operator == "conv_embedding":
                compiled = kernel.compile()
                kept = os.listdir(os.environ["TRITON_CACHE_DIR"])
                found = function.warmup(**launch.arguments, grid=launch.grid, **launch.options)
                assert found.hash == compiled.hash
                assert sorted(os.listdir(os.environ["TRITON_CACHE_DIR"])) == sorted(kept)
            print(kernel.name)
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.7"), reason="the cache key of Triton 3.7")
def test_a_launch_finds_what_was_compiled(tmp_path):
    result = run_python(LAUNCHED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(result.stdout.split()) > 40


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


def test_stages_of_pyramids():
    grids = [[stage.grid for stage in launches.stages_of(model, 225)] for model in launches.PYRAMIDS]
    assert grids == [[(57, 57), (29, 29), (15, 15), (8, 8)]] * 3
    segformer = launches.stages_of("segformer_b0", launches.image_size_of("segformer_b0"))
    assert [(stage.grid[0], stage.channels) for stage in segformer] == [
        (128, 128), (64, 256), (32, 640), (16, 1024)
    ]  # fmt: skip
    assert launches.stages_of("cvt_13", launches.image_size_of("cvt_13")) == launches.stages("cvt_13")


def test_every_model_has_its_own_operators():
    found = {
        (operator, model, stage)
        for operator in ("conv_linear", "depthwise_conv_gelu")
        for model, size in (("cvt_13", 224), ("pvt_v2_b2", 224))
        for stage in (1, 4)
        if jobs.launches_of(jobs.LaunchCase(operator, "bfloat16", model, size, 8, stage, "inference"), 90)
    }
    assert found == {
        ("conv_linear", "cvt_13", 1),
        ("depthwise_conv_gelu", "pvt_v2_b2", 1),
        ("depthwise_conv_gelu", "pvt_v2_b2", 4),
    }


@pytest.mark.parametrize(
    "arguments", [("--model", "cvt_13", "--operator", "depthwise_conv_gelu"), ("--model", "segformer_b0",
     "--operator", "attention"), ("--model", "cvt_21", "--operator", "attention", "--stage", "4")], ids=str
)  # fmt: skip
def test_nothing_to_compile(arguments, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cli.main(["compile", *arguments]) == 2
    message = "--model, --operator, --stage: none of these models has such an operator or stage"
    assert capsys.readouterr() == ("", f"cvt compile: error: {message}\n")
