"""The kernels compiled for GPUs that are not here: ``cvt compile``."""

import json
import re

import pytest
import torch
import triton

from cvt import config
from cvt.model import ConvEmbed, tokens_to_map
from cvt.tools import commands as cli
from cvt.tools.commands.compile import gpus, jobs, launches, triton_kernels
from cvt.tools.commands.compile.dependencies import overwritten
from cvt.tools.commands.compile.triton_kernels import Resources
from tests.checks import bad
from tests.processes import run_python


def compile_ahead(folder, *arguments, prelude="", code=0):
    """Runs the command in a process of its own: this one has imported the kernels for the interpreter.

    Returns:
        The lines that it prints, and its report.
    """
    report = folder / "report.json"
    command = ["compile", *arguments, "--json", str(report)]
    program = f"{prelude}\nimport sys\nfrom cvt.tools import commands\nsys.exit(commands.main({command}))"
    result = run_python(program, TRITON_INTERPRET="0")
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout.splitlines(), json.loads(report.read_text())


def test_kernels_of_a_model(tmp_path):
    """CvT-13's embeddings of three stages: the first convolves too, the others follow PyTorch's."""
    arguments = ("--model", "cvt_13", "--operator", "conv_embedding", "--dtype", "bfloat16", "--jobs", "1")
    lines, report = compile_ahead(tmp_path, *arguments, "--batch-size", "64")
    assert (report["schema"], report["version"]) == (jobs.SCHEMA, jobs.VERSION)
    names = ["conv_embedding_embed", "conv_embedding_normalize", "conv_embedding_normalize"]
    assert [row["kernel"] for row in report["kernels"]] == names
    assert len(lines) == 1 + 3 + 2
    assert lines[-1] == "3 kernels: nothing spills, everything fits"
    for number, (row, line) in enumerate(zip(report["kernels"], lines[1:4], strict=True), 1):
        resources = row["resources"]
        assert (row["flaws"], resources["stack"]) == ([], 0)
        assert 0 < resources["registers"] <= 255
        assert 0 < resources["occupancy"] <= 1
        shared = resources["static_shared"] + resources["dynamic_shared"]
        assert (shared > 0) == (number == 1)
        assert re.split(r"  +", line) == [
            "sm_90", row["kernel"], "bfloat16", "inference", f"cvt_13 224²×64 {number}",
            str(resources["registers"]), "0", str(shared), f"{resources['occupancy']:.0%}",
        ]  # fmt: skip
        assert row["cases"] == [
            {"operator": "conv_embedding", "dtype": "bfloat16", "model": "cvt_13", "image_size": 224,
             "batch_size": 64, "stage": number, "mode": "inference"}
        ]  # fmt: skip


#: Gives the kernel that merges statistics too few registers.
STARVED = """
from cvt.tools.commands.compile import launches
plan = launches.TRITON_OPERATORS["conv_projection"]
starve = lambda launch: launch._replace(options=launch.options | {"maxnreg": 24})
launches.TRITON_OPERATORS["conv_projection"] = lambda *stage, **options: [
    starve(launch) for launch in plan(*stage, **options) if "merge_stats" in launch.kernel.__name__
]
"""


def test_a_spill_fails_the_command(tmp_path):
    arguments = ("--operator", "conv_projection", "--dtype", "float32", "--stage", "3", "--jobs", "1")
    lines, report = compile_ahead(tmp_path, *arguments, prelude=STARVED, code=1)
    ((kernel, (flaw,)),) = [(row["kernel"], row["flaws"]) for row in report["kernels"] if row["flaws"]]
    assert re.fullmatch(r"spills: [1-9]\d* bytes", flaw)
    assert f"sm_90 {kernel}, float32 cvt_13 224²×256 3: {flaw}" in lines


def test_flaws():
    """On sm_90 a block may have 227 KiB of shared memory, and a multiprocessor has 65536 registers."""

    def flaws(registers, stack, shared, local, threads=128):
        usage = {"REG": registers, "STACK": stack, "SHARED": shared + 1024, "LOCAL": local}
        return Resources.of(90, threads, usage).flaws(90)

    assert flaws(255, 0, 227 * 1024, 0) == []
    assert flaws(255, 8, 0, 0) == flaws(255, 0, 0, 8) == ["spills: 8 bytes"]
    assert flaws(255, 0, 227 * 1024 + 1, 0) == ["shared memory: 232449 bytes, a block may have 232448"]
    assert flaws(255, 0, 0, 0, threads=512) == ["a block of 512 threads × 255 registers does not fit"]


def test_the_interpreter_compiles_nothing(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "the interpreter compiles nothing" in bad(capsys, cli.main, "compile")


def test_what_does_not_compile_is_named():
    program = (
        "from cvt.tools.commands.compile.triton_kernels import TritonKernel, examine\n"
        "module = 'cvt_kernels.ops.attention.triton.backward'\n"
        "examine(TritonKernel(90, module, '_attention_bwd_kernel', {}, {}, {}, {}))"
    )
    result = run_python(program, TRITON_INTERPRET="0")
    assert "RuntimeError: _attention_bwd_kernel does not compile for sm_90: " in result.stderr


#: Compiles the kernels of an operator, and checks that Triton's launcher finds them in its cache.
LAUNCHED = """
import os, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from cvt.tools.commands.compile import launches
from cvt_kernels.launch.launching import Chip, specialize

class Driver:
    get_current_device = get_current_stream = lambda self, *device: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
stage = launches.stages_of("cvt_13")[0]
embed = launches.TRITON_OPERATORS["conv_embedding"]
for launch in embed(stage, torch.bfloat16, Chip(90, 132), batch=1, training=False):
    compiled = specialize(launch, 90).compile()
    kept = sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))
    found = launch.kernel.warmup(**launch.arguments, grid=launch.grid, **launch.options)
    assert found.hash == compiled.hash
    assert sorted(os.listdir(os.environ["TRITON_CACHE_DIR"])) == kept
    print(launch.kernel.__name__)
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.7"), reason="the cache key of Triton 3.7")
def test_a_launch_finds_what_was_compiled(tmp_path):
    result = run_python(LAUNCHED, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout


@pytest.mark.parametrize("model", config.PRESETS)
@pytest.mark.parametrize("size", [None, 225, 511])
def test_stages_are_the_models(model, size):
    own = {"cvt_13": 224, "cvt_21": 224, "cvt_w24": 384}[model]
    maps, expected = torch.empty(1, 3, *[size or own] * 2, device="meta"), []
    for stage in config.PRESETS[model].stages:
        convolution = stage.patch_size, stage.patch_stride, stage.patch_padding
        embedding = (tuple(maps.shape[2:]), maps.shape[1], *convolution)
        tokens, grid = ConvEmbed(stage).to("meta")(maps)
        maps = tokens_to_map(tokens, grid)
        expected.append((grid, tokens.shape[2], int(stage.cls_token), embedding, 0, 0))
    assert launches.stages_of(model, size) == expected


# Blocks of a multiprocessor as cuda_occupancy.h of CUDA 13.0 computes them: bound by registers, shared
# memory, threads, the number of blocks, tensor memory, and what does not fit at all.
@pytest.mark.parametrize(
    ("arch", "threads", "registers", "memory", "blocks"),
    [
        (80, 128, 255, (2048,), 2),
        (80, 640, 84, (111690,), 1),
        (80, 416, 250, (0,), 0),
        (86, 32, 32, (0,), 16),
        (89, 32, 32, (0,), 24),
        (90, 128, 168, (0,), 3),
        (90, 128, 32, (76 * 1024,), 2),
        (90, 32, 32, (227 * 1024,), 1),
        (90, 32, 32, (227 * 1024 + 1,), 0),
        (100, 1024, 64, (0,), 1),
        (100, 128, 32, (0, 128), 4),
        (120, 512, 40, (0,), 3),
    ],
)
def test_occupancy(arch, threads, registers, memory, blocks):
    warps = gpus.LIMITS[arch].warps
    assert gpus.occupancy(arch, threads, registers, *memory) == blocks * threads / 32 / warps


def test_every_model_has_its_own_operators():
    found = {
        (operator, model, stage)
        for operator in ("conv_linear", "depthwise_conv_gelu")
        for model, size in (("cvt_13", 224), ("pvt_v2_b2", 224), ("cvt_w24", 384))
        for stage in (1, 3, 4)
        if jobs.launches_of(jobs.LaunchCase(operator, "bfloat16", model, size, 8, stage, "inference"), 90)
    }
    assert found == {
        *(("conv_linear", model, stage) for model in ("cvt_13", "cvt_w24") for stage in (1, 3)),
        *(("depthwise_conv_gelu", "pvt_v2_b2", stage) for stage in (1, 3, 4)),
    }


#: Kernel → the most specializations that batches from 1 to 512 may need, in inference and in training.
SPECIALIZATIONS = {
    "inference": {
        "_conv_projection_sliding_fwd_kernel": 3,
        "_attention_fwd_kernel": 2,
        "_attention_fwd_loop_kernel": 1,
    },
    "training": {
        "_conv_projection_sliding_fwd_kernel": 3,
        "_conv_projection_sliding_stats_kernel": 3,
        "_merge_stats_kernel": 1,
        "_conv_projection_sliding_bwd_sums_kernel": 3,
        "_sum_regions_kernel": 2,
        "_conv_projection_sliding_bwd_conv_kernel": 3,
        "_conv_projection_sliding_bwd_input_kernel": 3,
        "_attention_fwd_kernel": 2,
        "_attention_fwd_loop_kernel": 1,
        "_attention_bwd_kernel": 1,
        "_attention_bwd_dq_kernel": 2,
        "_attention_bwd_dkdv_kernel": 2,
    },
}
COUNTING = """
import json
from types import SimpleNamespace
from cvt.tools.commands.compile import jobs
found = {"inference": {}, "training": {}}
batches = [*range(1, 34), 64, 128, 255, 256, 512]
asked = SimpleNamespace(
    archs=["sm_90"], models=["cvt_13"], dtypes=["bfloat16"], operators=["conv_projection", "attention"],
    stages=[1, 2, 3], image_sizes=[None], batch_sizes=batches,
)
for job in jobs.triton_jobs(asked):
    for mode in {case.mode for case in job.cases}:
        found[mode][job.source.name] = found[mode].get(job.source.name, 0) + 1
print(json.dumps(found))
"""


def test_specializations_of_batches():
    """Counts in a process of its own, since the interpreter's kernels have no specializations."""
    counts = json.loads(run_python(COUNTING, TRITON_INTERPRET="0").stdout)
    grown = {
        (mode, kernel): count
        for mode, kernels in counts.items()
        for kernel, count in kernels.items()
        if count > SPECIALIZATIONS[mode].get(kernel, 0)
    }
    assert grown == {}


def test_messages_of_the_assembler():
    told = "Potential Performance Loss: wgmma.mma_async instructions are serialized"
    log = f"ptxas info : (C7515) {told} in the function '_kernel'\nptxas info : Used 168 registers\n"
    (message,) = triton_kernels.messages_of(log)
    assert message == f"C7515: {told}"
    resources = Resources(128, 168, 0, 0, 0, 0, 0.25, (message,))
    assert resources.flaws(90) == [message]


#: Machine code for sm_90, as ``nvdisasm`` prints it: products whose operand is in registers, in a loop.
PRODUCTS = """
.text.kernel:
        /*0000*/                   LDSM.16.M88.4 R4, [R3] ;
.L_x_0:
        /*0010*/                   WARPGROUP.ARRIVE ;
        /*0020*/                   HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0030*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR12], R24, gsb0 ;
        /*0040*/                   {between} ;
        /*0050*/                   HGMMA.64x16x16.F32.BF16 R40, gdesc[UR8], R40, UP0, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0070*/                   {after} ;
        /*0080*/               @P0 BRA `(.L_x_0) ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   FMUL R40, R40, R2 ;
        /*00b0*/                   EXIT ;
"""
AHEAD = "writes a register of a product before its wait"


@pytest.mark.parametrize(
    ("between", "after", "is_wrong"),
    [
        ("NOP", "NOP", ""),
        ("IMAD.MOV.U32 R12, RZ, RZ, R4", "FADD R24, R24, R31", ""),  # of the products that it waited for
        ("ISETP.GE.AND P0, PT, R8, R9, PT", "STS.128 [R3], R24", ""),  # which read
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R24+URZ], R8", "LDSM.16.M88.4 R4, [R3]", ""),
        ("MOV R11, R2", "NOP", "between"),  # the last of the second operand
        ("NOP", "@!P1 FADD R47, R24, R31", "after"),  # the last sum of the product that is under way
        ("SHFL.BFLY PT, R24, R3, 0x2, 0x1f", "NOP", "between"),
        ("LDS.64 R3, [R2]", "NOP", "between"),  # R3 and R4
        ("NOP", "IMAD.WIDE R38, R2, R3, R4", ""),
        ("NOP", "IMAD.WIDE R39, R2, R3, R4", "after"),
        ("@P1 BRA `(.L_x_1)", "NOP", ""),
    ],
)
def test_registers_of_a_product_are_left_alone_until_its_wait(between, after, is_wrong):
    wrong = {"between": between, "after": after, "": None}[is_wrong]
    expected = () if wrong is None else (f"{wrong} {AHEAD}",)
    assert overwritten(PRODUCTS.format(between=between, after=after)) == expected


def test_a_product_under_way_at_the_end_of_a_loop_meets_its_beginning():
    """The assembler moves what a loop does first over its end, where the last product runs yet."""
    listing = PRODUCTS.format(between="NOP", after="NOP")
    start = ".L_x_0:\n"
    for register, flaws in ((24, ()), (41, (f"MOV R41, RZ {AHEAD}",))):
        assert overwritten(listing.replace(start, f"{start}/*000c*/ MOV R{register}, RZ ;\n")) == flaws
