"""Machine code as it is read, its loops, what is counted and predicted from them, and budgets."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
import triton

from benchmarks.machine_code import (
    bounds,
    budgets,
    disassembly,
    examined,
    instructions,
    jobs,
    loops,
    work,
)
from benchmarks.machine_code.examined import Compiled
from cvt.commands.compile import launches, resources
from cvt.commands.compile.jobs import LaunchCase
from cvt.commands.compile.resources import Resources, Usage
from cvt.commands.compile.triton_kernels import TritonKernel
from cvt_kernels.launching import Chip
from cvt_kernels.ops.triton_launch import Budget


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
    for module in (disassembly, resources):
        monkeypatch.setattr(module, "run_tool", lambda name, *arguments: outputs[name])
    loads = instructions.Block({"LDC": 1, "LDG.E.128": 1}, {"other": 1, "loads": 1}, [])
    ends = instructions.Block({"EXIT": 1}, {"control": 1}, [])
    assert disassembly._disassemble(b"") == {
        "k": disassembly.MachineCode(Usage(8, 0, 16, 4), {"LDC": 1, "LDG.E.128": 1}, [loads], 32 * 16),
        "_a_kernel_of_many_words": disassembly.MachineCode(Usage(255, 8, 0, 0), {"EXIT": 1}, [ends], 0),
    }


def test_what_was_read_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    blocks = [instructions.Block({"LDG.E.128": 2}, {"loads": 2}, [0])]
    code = {"kernel": disassembly.MachineCode(Usage(32, 0, 1024, 0), {"LDG.E.128": 2}, blocks, 1024)}
    monkeypatch.setattr(disassembly, "_disassemble", lambda cubin: code)
    assert disassembly.read(b"machine code") == code
    monkeypatch.setattr(disassembly, "_disassemble", lambda cubin: {})
    assert disassembly.read(b"machine code") == code
    assert disassembly.read(b"other machine code") == {}


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


_SKIPS = (
    "S2R R0, SR_CTAID.X", ".L_loop:", "FADD R1, R1, R2", "@P0 BRA `(.L_next)", "FMUL R1, R1, R2",
    "STG.E [R2.64], R1", ".L_next:", "IADD3 R3, R3, 0x1, RZ", "@P1 BRA `(.L_loop)", "EXIT",
)  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "trips", "conditional", "total"),
    [
        # Trips may be a mean, or zero.
        (NESTED, (1.5, 2, 0), 1, 2 + 1.5 * (3 + 2 * 4) + 3 + 2),
        # One in 4 of 12 trips runs the end of a tile, as where a loop goes over the steps of all tiles.
        (_SKIPS, (12,), 1, 1 + 12 * 6 + 1),
        (_SKIPS, (12,), 1 / 4, 1 + 12 * 4 + 3 * 2 + 1),
        # Code that was moved behind the end: the branch back from there does not lead to itself again.
        (("@P0 BRA `(.L_rare)", ".L_back:", "FADD R1, R1, R2", "EXIT", ".L_rare:", "FMUL R1, R1, R2",
          "BRA `(.L_back)"), (), 1, 5),
        # An inner loop of 3 trips in an outer one of 10, which begins with the same instruction.
        ((".L_loop:", "FADD R1, R1, R2", "@P0 BRA `(.L_loop)", "FMUL R1, R1, R2", "@P1 BRA `(.L_loop)",
          "EXIT"), (10, 3), 1, 10 * (3 * 2 + 2) + 1),
        # On sm_80, a call of a label of the function is how it leaves a loop; other calls return.
        ((".L_loop:", "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_rcp_rn_f32_slowpath)", "FADD R1, R1, R2",
          "@P0 CALL.REL.NOINC `(.L_end)", "BRA `(.L_loop)", ".L_end:", "EXIT"), (5,), 1, 5 * 4 + 1),
        ((), (), 1, 0),
    ],
    ids=["mean", "skipped code", "conditional", "moved code", "same beginning", "calls", "nothing"],
)  # fmt: skip
def test_instructions_that_are_executed(lines, trips, conditional, total):
    blocks, _ = parsed(*lines)
    assert loops.why_not_counted(blocks, trips) is None
    assert loops.executed(blocks, trips, conditional).total == total


@pytest.mark.parametrize(
    ("size", "lines"),
    [
        # Two loads of 16 bytes are under way together, then one of 4 with the second of them.
        (32 * (16 + 16), ["LDG.E.128 R4, [R2.64]", "LDG.E.128 R8, [R2.64]", "FADD R0, R7, R1",
                          "LDG.E R12, [R2.64]", "FADD R0, R12, R11"]),
        (32 * (16 + 4), ["LDG.E.128 R4, [R2.64]", "FADD R0, R0, R3", "LDG.E R8, [R2.64]"]),
        (32 * 16, ["LDG.E.128 R4, [R2.64]", "FADD R0, R4, R3", "LDG.E.128 R8, [R2.64]"]),
        # Asynchronous copies in groups; the wait leaves one under way.
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
    code = disassembly.MachineCode(Usage(32, 0, 0, 0), {}, blocks, in_flight)
    launch = work.Work(programs, outputs, size, tuple(trips), flops, scores)
    return bounds.analyze(code, Resources.of(code.usage, arch, 128), launch, arch)


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
    assert examined.parse_messages(log) == [
        "C7515: Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma "
        "instructions defining accumulator registers of a wgmma between start and end of the pipeline stage",
        "C7508: Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirement.",
    ]
    assert examined.parse_messages("ptxas info    : 24 bytes gmem\n") == []


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
    monkeypatch.setattr(examined, "make_backend", lambda target: backend)

    def log_of(ptx, printed=""):
        compiled = SimpleNamespace(asm={"ptx": ptx})
        return examined._assembler_log(compiled, printed, "sm_90", {"num_warps": 4})

    assert log_of("printed", "ptxas info : 4 registers") == "ptxas info : 4 registers"
    assert log_of("printed") == "ptxas info : 4 registers"
    assert assembled == []
    for _ in range(2):
        assert examined.parse_messages(log_of("cached")) == ["C7515: cached is slow"]
    assert assembled == ["cached"]


def row_of(lines, kernel, *, messages=(), trips=(), registers=100, batch=256, described=True):
    """Returns the row of a kernel of attention that computes 64 × 64 scores in its loop."""
    blocks, _ = parsed(*lines)
    code = disassembly.MachineCode(Usage(registers, 0, 0, 0), {}, blocks, 0)
    compiled = Compiled(code, Resources.of(code.usage, 90, 128), messages)
    case = LaunchCase("attention", "bfloat16", "cvt_13", 224, batch, 3, "inference")
    source = TritonKernel(90, "module", f"_{kernel}_kernel", {}, {}, {}, {})
    works = [work.Work(10, 1280, 0, tuple(trips), scores=64 * 64)] if described else []
    return jobs.triton_row(source, {case: works}, compiled)


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


def test_products_of_8_bits_are_predicted_at_twice_the_speed():
    lines = ["IGMMA.64x64x32.S8.S8 R24, gdesc[UR4]"] * 64 + ["EXIT"]
    blocks, _ = parsed(*lines)
    code = disassembly.MachineCode(Usage(32, 0, 0, 0), {}, blocks, 0)
    one, two = (
        bounds.analyze(
            code, Resources.of(code.usage, 90, 128), work.Work(132, 1, 10, (), 132 * 2**24, speed=speed), 90
        ).predicted
        for speed in (1.0, 2.0)
    )
    assert one.bound == two.bound == "tensor"
    assert one.microseconds["tensor"] == 2 * two.microseconds["tensor"]
    assert one.share_of_floor == two.share_of_floor


def test_every_budget_is_that_of_a_kernel_that_is_launched(monkeypatch):
    """A budget for a kernel that does not exist would guard nothing."""
    monkeypatch.setattr(budgets, "_OLDER", {})
    stages = launches.stages("cvt_13")
    others = {"depthwise_conv_gelu": launches.stages_of("segformer_b0", 512)}
    used = {
        id(budgets.budget_of(operator, launch.kernel.__name__.strip("_").removesuffix("_kernel"), 90))
        for operator, listed in launches.TRITON_OPERATORS.items()
        for stage, training in itertools.product(others.get(operator, stages), (False, True))
        for launch in listed(stage, torch.bfloat16, Chip(90, 132), training=training)
    }
    for family in set(budgets._FAMILIES.values()):
        for kernel, budget in importlib.import_module(family).BUDGETS[90].items():
            assert id(budget) in used, (family, kernel)
    assert budgets.budget_of("attention_with_bias", "attention_fwd", 90) is None
    assert budgets.is_budgeted("segformer_b0", 512, 256, "bfloat16")
    assert not budgets.is_budgeted("segformer_b0", 224, 256, "bfloat16")


@pytest.mark.parametrize(("version", "registers"), [("3.6.0", 250), ("3.7.1", 176), ("4.0", 176)])
def test_the_code_of_an_older_triton_may_take_more(monkeypatch, version, registers):
    monkeypatch.setattr(triton, "__version__", version)
    budget = budgets.budget_of("linear_gelu", "linear_gelu", 90)
    assert (budget.registers, budget.instructions_per_output) == (registers, 17)
    assert budgets.budget_of("linear_gelu", "linear_gelu", 80) is None
