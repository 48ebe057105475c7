"""``cvt compile``: every kernel compiled for a named GPU, without one, and what came out.

The launchers of the Triton kernels run on tensors without memory (``device="meta"``), and each launch that
they would make is compiled instead, once for all launches that Triton specialises alike. The CUDA kernels are
those of the built extension if it holds code for the GPU; else nvcc compiles csrc. Triton ships the assembler
and the disassembler, and its cache (``TRITON_CACHE_DIR``) keeps what was compiled and what was read from it.

``python -m cvt.commands.compile.kernels REPORT.json PAGE.md`` puts its tables into docs/kernels.md.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from cvt_kernels import __version__, machine

#: Of the JSON report, which a reader refuses if it is another, and of what is kept of machine code.
SCHEMA = 1


class Limits(NamedTuple):
    """What a multiprocessor holds: shared memory in KiB, blocks, warps; and how many of them a GPU has."""

    shared_kib: int
    blocks: int
    warps: int
    multiprocessors: int


#: Per compute capability, as in CUDA 13.0 (``cuda_occupancy.h``; CCCL's ``cuda/__device/arch_traits.h``). The
#: number of multiprocessors, which sizes small launches: A100, RTX 3090, RTX 4090, H100, B200, RTX 5090.
LIMITS = {
    80: Limits(164, 32, 64, 108),
    86: Limits(100, 16, 48, 82),
    89: Limits(100, 24, 48, 128),
    90: Limits(228, 32, 64, 132),
    100: Limits(228, 32, 64, 148),
    120: Limits(100, 24, 48, 170),
}
_REGISTERS, _REGISTERS_OF_UNIT, _PARTITIONS = 65536, 256, 4  # of a multiprocessor; given to warps in units
_RESERVED_SHARED, _SHARED_UNIT = 1024, 128  # bytes that the system takes of every block
_TENSOR_MEMORY = 512  # columns of a multiprocessor's tensor memory, sm_100

#: Instructions of the tensor cores: up to Ada and on consumer Blackwell, on Hopper, on Blackwell.
_MMA = ("HMMA", "DMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")

_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
}
DTYPES = ("bfloat16", "float16", "float32")

# What is launched ------------------------------------------------------------------------------------------


#: What one stage's attention block works on: (H, W), channels, class tokens.
Stage = tuple[tuple[int, int], int, int]

#: Image size of the published weights and channels per stage. cvt_21 differs from cvt_13 in depth only.
MODELS = {
    "cvt_13": (224, (64, 192, 384)),
    "cvt_21": (224, (64, 192, 384)),
    "cvt_w24": (384, (192, 768, 1024)),
}


def stages(model: str, image_size: int | None = None) -> tuple[Stage, Stage, Stage]:
    """The three stages of a model of ``MODELS``, for square images of its own size or another."""
    own_size, channels = MODELS[model]
    first = ((image_size or own_size) + 1) // 4  # 7 × 7, stride 4, padding 2; then 3 × 3, stride 2, padding 1
    second, third = -(-first // 2), -(-first // 4)
    return (
        ((first, first), channels[0], 0),
        ((second, second), channels[1], 0),
        ((third, third), channels[2], 1),
    )


def conv_projection_launches(
    stage: Stage, dtype: torch.dtype, chip: machine.Chip, *, batch: int = 256, training: bool = True
) -> list[machine.Launch]:
    """What CvT's projection launches (q stride 1, k and v stride 2).

    In training under autocast, with BatchNorm's parameters in float32; else with all of them in ``dtype``.
    """
    from cvt_kernels.ops.conv_projection import triton as kernels

    grid, channels, class_tokens = stage
    geometry = kernels.Geometry(grid, (3, 3, 3), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1e-5,) * 3)

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = meta(batch, grid[0] * grid[1] + class_tokens, channels)
    weights = [meta(channels, 1, 3, 3)] * 3
    vectors = [meta(channels, dtype=torch.float32 if training else dtype)] * 3
    tracked = [meta(dtype=torch.int64)] * 3
    dys = [meta(batch, h * w + class_tokens, channels) for h, w in geometry.output_grids]
    with machine.recorded_launches(chip) as launches:
        kernels.forward(x, geometry, weights, *[vectors] * 4)
        if training:
            mean, variance = kernels.statistics(x, geometry, weights)
            kernels.update_running(mean, variance, range(3), vectors, vectors, tracked, [0.1] * 3, [1.1] * 3)
            sums = kernels.backward_sums(x, geometry, weights, vectors, vectors, dys)
            dconvs, _ = kernels.backward_conv(
                x, geometry, weights, vectors, vectors, vectors, dys, sums, [1.0] * 3
            )
            kernels.backward_input(geometry, weights, dconvs, dys)
    return launches


def attention_launches(
    stage: Stage,
    dtype: torch.dtype,
    chip: machine.Chip,
    *,
    batch: int = 256,
    training: bool = True,
    bias: bool = False,
) -> list[machine.Launch]:
    """What CvT's attention launches (heads of 64, k and v strided by 2)."""
    from cvt_kernels.ops.attention.triton.backward import attention_backward
    from cvt_kernels.ops.attention.triton.forward import attention_forward

    (height, width), channels, class_tokens = stage
    queries, keys = (h * w + class_tokens for h, w in ((height, width), (-(-height // 2), -(-width // 2))))
    heads = channels // 64

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = (meta(batch, tokens, heads, 64) for tokens in (queries, keys, keys))
    table = meta(heads, queries, keys) if bias else None
    with machine.recorded_launches(chip) as launches:
        out, lse = attention_forward(q, k, v, table, channels**-0.5)
        if training:
            attention_backward(q, k, v, table, out, lse, out, channels**-0.5, need_bias=bias)
    return launches


#: Operators with Triton kernels, by name. CvT has no bias.
TRITON_OPERATORS: dict[str, Callable[..., list[machine.Launch]]] = {
    "conv_projection": conv_projection_launches,
    "attention": attention_launches,
    "attention_with_bias": functools.partial(attention_launches, bias=True),
}
#: The operators with CUDA kernels, which depend on no shape: all that the extension has.
CUDA_OPERATORS = "layer_norm_gelu"

# What is compiled. A job goes to another process; it knows how to come by machine code. ---------------------


class Resources(NamedTuple):
    """What one kernel takes.

    Attributes:
        threads: Of a block.
        registers: Of a thread.
        stack: Bytes of a thread in local memory.
        spill_loads, spill_stores: Instruction → how often it stands in the code, of local memory.
        static_shared, dynamic_shared: Bytes of a block.
        tensor_memory: Columns of a block, on sm_100.
        occupancy: Warps that a multiprocessor holds, of those that it could: what registers, shared and
            tensor memory and the number of blocks allow.
        loads, stores: Instruction → count, of global memory.
        tensor_cores: Instruction → count.
    """

    threads: int
    registers: int
    stack: int
    spill_loads: dict[str, int]
    spill_stores: dict[str, int]
    static_shared: int
    dynamic_shared: int
    tensor_memory: int
    occupancy: float
    loads: dict[str, int]
    stores: dict[str, int]
    tensor_cores: dict[str, int]

    @classmethod
    def of(cls, code: Code, arch: int, threads: int, dynamic: int = 0, columns: int = 0) -> Resources:
        """From machine code and what the launch adds."""
        # From Hopper on the assembler counts what the system takes.
        static = max(code.shared - (_RESERVED_SHARED if arch >= 90 else 0), 0)

        def select(*prefixes: str) -> dict[str, int]:
            return {name: count for name, count in code.counts.items() if name.startswith(prefixes)}

        return cls(
            threads=threads,
            registers=code.registers,
            stack=max(code.stack, code.local),
            spill_loads=select("LDL"),
            spill_stores=select("STL"),
            static_shared=static,
            dynamic_shared=dynamic,
            tensor_memory=columns,
            occupancy=occupancy(arch, threads, code.registers, static + dynamic, columns),
            loads=select("LDG"),
            stores=select("STG"),
            tensor_cores=select(*_MMA),
        )

    def flaws(self, arch: int) -> list[str]:
        """What must not be: registers in memory, or more of something than a block may have."""
        found = []
        loads, stores = (sum(spills.values()) for spills in (self.spill_loads, self.spill_stores))
        if self.stack or loads or stores:
            found.append(f"spills: {self.stack} bytes, {loads} loads, {stores} stores")
        shared, most = self.static_shared + self.dynamic_shared, _block_shared(arch)
        if shared > most:
            found.append(f"shared memory: {shared} bytes, a block may have {most}")
        elif self.occupancy == 0:
            found.append(f"a block of {self.threads} threads × {self.registers} registers does not fit")
        return found


class Code(NamedTuple):
    """Machine code of one function: what the assembler says, and instruction → count."""

    registers: int
    stack: int
    shared: int
    local: int
    counts: dict[str, int]


class TritonKernel(NamedTuple):
    """A Triton kernel specialised for some arguments; plain data, for another process."""

    arch: int
    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]

    def examine(self) -> dict[str, Resources]:
        """Compiles it; function name → resources.

        Raises:
            RuntimeError: It does not compile.
        """
        kernel = getattr(importlib.import_module(self.module), self.name)
        try:
            compiled = triton.compile(
                ASTSource(kernel, self.signature, self.constants, self.attributes),
                target=GPUTarget("cuda", self.arch, 32),
                options=self.options,
            )
        except Exception as error:  # Triton's own do not all survive the way back to the parent
            raise RuntimeError(f"{self.name} does not compile for sm_{self.arch}: {error}") from error
        facts = compiled.metadata
        launch = 32 * facts.num_warps, facts.shared, getattr(facts, "tmem_size", None) or 0
        found = read(compiled.asm["cubin"])
        return {name: Resources.of(code, self.arch, *launch) for name, code in found.items()}


class CudaKernels(NamedTuple):
    """The CUDA kernels of one type of elements; ``cubin`` is None where nvcc has yet to compile them."""

    arch: int
    dtype: str
    cubin: bytes | None = None

    def examine(self) -> dict[str, Resources]:
        """Compiles them if need be; function name → resources.

        Raises:
            ValueError: nvcc fails.
        """
        found = read(self.cubin or _compile_cuda(self.arch, self.dtype))
        threads = {name: 256 if "sum_over_blocks" in name else 128 for name in found}  # at CvT's widths
        return {name: Resources.of(code, self.arch, threads[name]) for name, code in found.items()}


def specialise(launch: machine.Launch, arch: int) -> TritonKernel:
    """The kernel as Triton would specialise it for a launch with these arguments."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(describe(v, (*path, i)) for i, v in enumerate(value))
        if isinstance(value, Tensor):
            if value.storage_offset() * value.element_size() % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return f"*{_DTYPES[value.dtype]}"
        if isinstance(value, float):
            return "fp32"
        if value == 1:
            constants[path] = 1
            return "constexpr"
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if value < 2**31 else "i64"

    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[i,] = value
        else:
            signature[parameter.name] = describe(value, (i,))
    kernel = launch.kernel
    return TritonKernel(
        arch, kernel.__module__, kernel.__name__, signature, constants, attributes, launch.options
    )


def occupancy(arch: int, threads: int, registers: int, shared: int, tensor_memory: int = 0) -> float:
    """Warps that a multiprocessor holds of a kernel, of those that it could; 0 if not even one block fits.

    Args:
        arch: Compute capability, 90 for sm_90.
        threads: Of a block.
        registers: Of a thread.
        shared: Bytes of a block, static and dynamic.
        tensor_memory: Columns of a block.
    """
    limits = LIMITS[arch]
    if shared > _block_shared(arch):
        return 0.0
    warps = -(-threads // 32)
    warp_registers = _round_up(registers * 32, _REGISTERS_OF_UNIT)
    fitting_warps = _REGISTERS // _PARTITIONS // warp_registers * _PARTITIONS
    blocks = min(
        limits.blocks,
        limits.warps // warps,
        fitting_warps // warps,
        limits.shared_kib * 1024 // _round_up(shared + _RESERVED_SHARED, _SHARED_UNIT),
    )
    if tensor_memory:
        blocks = min(blocks, _TENSOR_MEMORY // tensor_memory)
    return blocks * warps / limits.warps


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _block_shared(arch: int) -> int:
    return LIMITS[arch].shared_kib * 1024 - _RESERVED_SHARED


# Machine code ----------------------------------------------------------------------------------------------


def _cached(name: str, key: Iterable[bytes], make: Callable[[], bytes]) -> bytes:
    """What was made from the same contents before, in Triton's cache, or what ``make`` makes."""
    digest = hashlib.sha256(b"\0".join([f"cvt_kernels {SCHEMA}".encode(), *key])).hexdigest()
    cache = get_cache_manager(digest)
    path = cache.get_file(name)
    if path is not None:
        return Path(path).read_bytes()
    made = make()
    cache.put(made, name)
    return made


def read(cubin: bytes) -> dict[str, Code]:
    """Function name → its machine code."""
    found = _cached("code.json", [cubin], lambda: json.dumps(_disassemble(cubin)).encode())
    return {name: Code(*code) for name, code in json.loads(found).items()}


def _disassemble(cubin: bytes) -> dict[str, Code]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", path)
        text = _tool("nvdisasm", "-c", path)
    # nvdisasm writes a line //---- .text.NAME ---- above each function.
    parts = re.split(r"^//-+ \.text\.(\S+) -+$", text, flags=re.MULTILINE)
    counts = {
        name: Counter(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", code))
        for name, code in zip(parts[1::2], parts[2::2], strict=True)
    }
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    return {
        name: Code(int(registers), int(stack), int(shared), int(local), counts[name])
        for name, registers, stack, shared, local in found
    }


def _tool(name: str, *arguments: object, directory: str | None = None) -> str:
    """What a program that Triton ships prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = list(map(str, (path, *arguments)))
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory).stdout


def width(instruction: str) -> int:
    """Bytes of one access: 16 for LDG.E.128, 2 for LDG.E.U16, 4 for LDG.E."""
    bits = re.search(r"\.[US]?(8|16|32|64|128|256)\b", instruction)
    return int(bits[1]) // 8 if bits else 4


# The CUDA kernels ------------------------------------------------------------------------------------------

_SOURCE = Path(__file__).parents[3] / "csrc" / "layer_norm_gelu.cu"
_CUDA_TYPES = {"float32": "float", "bfloat16": "BFloat16", "float16": "Half"}
_ACTIVATIONS = ("identity", "none", "tanh", "quick")  # as csrc/math.h numbers them


def cuda_jobs(arch: int, dtypes: Collection[str]) -> tuple[list[CudaKernels], str]:
    """The CUDA kernels for a GPU, and a line that says whence; none, and why."""
    cubins = _cubins_of_extension(arch)
    if cubins:
        jobs = [CudaKernels(arch, dtype, cubin) for dtype, cubin in cubins.items() if dtype in dtypes]
        return jobs, f"CUDA kernels of sm_{arch}: those of the built extension"
    nvcc = machine.find_nvcc()
    if nvcc is None or not _SOURCE.exists():
        lacking = "there is no nvcc here" if nvcc is None else "csrc is not part of this installation"
        reason = f"the extension has none for it, and {lacking}"
    elif f"compute_{arch}" not in _output(nvcc, "--list-gpu-arch").split():
        reason = f"the extension has none for it, and {nvcc} does not know it"
    else:
        jobs = [CudaKernels(arch, dtype) for dtype in dtypes]
        return jobs, f"CUDA kernels of sm_{arch}: compiled from csrc by {nvcc}"
    return [], f"CUDA kernels of sm_{arch} are left out: {reason}"


def _cubins_of_extension(arch: int) -> dict[str, bytes]:
    """Element type → machine code for a GPU, as far as the extension that was built has it."""
    extension = importlib.util.find_spec("cvt_kernels._C")
    if extension is None or extension.origin is None:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _tool("cuobjdump", "-xelf", "all", extension.origin, directory=scratch)
        except subprocess.CalledProcessError:  # there is none in it
            return {}
        cubins = [path.read_bytes() for path in sorted(Path(scratch).glob(f"*.sm_{arch}.cubin"))]
    return {
        dtype: cubin
        for cubin in cubins
        for dtype, name in _CUDA_TYPES.items()
        if f"sum_over_blocks_kernelI{_mangled(name)}E".encode() in cubin
    }


def _mangled(name: str) -> str:
    return "f" if name == "float" else f"NS_{len(name)}{name}"


def _compile_cuda(arch: int, dtype: str) -> bytes:
    nvcc = machine.find_nvcc()
    if nvcc is None:
        raise ValueError("nvcc is gone")
    flags = ["-std=c++20", "-O3", f"-arch=sm_{arch}", f"-DTYPE={_CUDA_TYPES[dtype]}", "-DKERNELS=kernels"]
    sources = [_SOURCE, *sorted(_SOURCE.parent.glob("*.cuh")), *sorted(_SOURCE.parent.glob("*.h"))]

    def compile_cuda() -> bytes:
        with tempfile.TemporaryDirectory() as scratch:
            cubin = Path(scratch, "kernels.cubin")
            _output(nvcc, *flags, "-cubin", "-o", str(cubin), str(_SOURCE))
            return cubin.read_bytes()

    key = [_output(nvcc, "--version").encode(), *map(str.encode, flags)]
    return _cached("kernels.cubin", key + [path.read_bytes() for path in sources], compile_cuda)


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise ValueError(f"{command[0]} fails: {lines[0]}")
    return done.stdout


def _cuda_case(function: str) -> tuple[str, dict[str, Any]]:
    """(kernel, what it is compiled for) of a mangled name: activation, elements of a load, loads of a row."""
    found = re.search(
        r"\d+([a-z_]+)_kernelI(?:f|NS_\w+?E)(?:LNS_10ActivationE(\d)ELi(\d+)ELi(\d+)E)?", function
    )
    if found is None:
        raise ValueError(f"a kernel of another kind in the extension: {function}")
    kernel, activation, vector, vectors = found.groups()
    if activation is None:
        return kernel, {}
    return kernel, {
        "activation": _ACTIVATIONS[int(activation)],
        "vector": int(vector),
        "vectors": int(vectors),
    }


# The command -----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the report: the GPU, the kernel, the types and cases that it serves, what it takes."""

    arch: str
    operator: str
    kernel: str
    dtypes: list[str]
    cases: list[dict[str, Any]]
    resources: Resources
    flaws: list[str]


Job = TritonKernel | CudaKernels
#: A job, and what its Triton kernel is launched for.
Planned = tuple[Job, list[dict[str, Any]]]


def run(
    *,
    archs: Sequence[str] = ("sm_90",),
    models: Sequence[str] = ("cvt_13",),
    dtypes: Sequence[str] = DTYPES,
    operators: Sequence[str] = ("conv_projection", "attention", CUDA_OPERATORS),
    only_stages: Sequence[int] = (1, 2, 3),
    image_sizes: Sequence[int] | None = None,
    batch_sizes: Sequence[int] = (256,),
    jobs: int | None = None,
    cuda: bool = False,
    report: str | None = None,
) -> int:
    """Compiles and prints a table; see ``cvt compile --help`` for the arguments.

    Returns:
        1 if a kernel spills or does not fit, else 0.

    Raises:
        ValueError: An unknown name; ``cuda``, and there are no CUDA kernels to look at.
        OSError: ``report`` cannot be written.
    """
    numbers = list(dict.fromkeys(map(_parse_arch, archs)))
    _check_names("--model", models, MODELS)
    _check_names("--dtype", dtypes, DTYPES)
    _check_names("--operator", operators, (*TRITON_OPERATORS, CUDA_OPERATORS))
    _check_names("--stage", only_stages, (1, 2, 3))
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set: the interpreter compiles nothing")
    if report is not None:
        with open(report, "a", encoding="utf-8"):  # fails now rather than after minutes
            pass
    plan: list[Planned] = []
    notes = []
    for arch in numbers if CUDA_OPERATORS in operators else ():
        found, note = cuda_jobs(arch, dtypes)
        if cuda and not found:
            raise ValueError(note)
        notes.append(note)
        plan += [(job, []) for job in found]  # nvcc takes longest, so it comes first
    sizes = image_sizes or (None,)
    for arch in numbers:
        plan += _triton_jobs(arch, models, dtypes, operators, only_stages, sizes, batch_sizes)
    rows = sorted(_rows(plan, jobs or _cores()), key=lambda row: row.operator == CUDA_OPERATORS)
    if report is not None:
        with open(report, "w", encoding="utf-8") as file:
            json.dump(_report(rows, notes), file, indent=1)
            file.write("\n")
    print("\n".join([_table(rows), "", *notes, *_verdict(rows)]))
    return int(any(row.flaws for row in rows))


def _parse_arch(name: str) -> int:
    known = {f"sm_{number}": number for number in LIMITS}
    if name not in known:
        raise ValueError(f"--arch: got {name!r}, expected one of {', '.join(known)}")
    return known[name]


def _check_names(option: str, given: Iterable[Any], known: Collection[Any]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{option}: got {name!r}, expected one of {', '.join(map(str, known))}")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _triton_jobs(
    arch: int, models: Sequence[str], dtypes: Sequence[str], operators: Sequence[str],
    only_stages: Sequence[int], image_sizes: Sequence[int | None], batch_sizes: Sequence[int],
) -> list[Planned]:  # fmt: skip
    """Every specialisation once, with the cases that it serves."""
    chip = machine.Chip(arch, LIMITS[arch].multiprocessors)
    found: dict[str, Planned] = {}
    for operator, model, size, batch, dtype, stage, mode in itertools.product(
        (name for name in TRITON_OPERATORS if name in operators),
        models, image_sizes, batch_sizes, dtypes, only_stages, ("inference", "training"),
    ):  # fmt: skip
        case = {
            "operator": operator,
            "dtype": dtype,
            "model": model,
            "image_size": size or MODELS[model][0],
            "batch_size": batch,
            "stage": stage,
            "mode": mode,
        }
        work = stages(model, size)[stage - 1], getattr(torch, dtype), chip
        launches = TRITON_OPERATORS[operator](*work, batch=batch, training=mode == "training")
        for kernel in (specialise(launch, arch) for launch in launches):
            _, cases = found.setdefault(repr(kernel), (kernel, []))
            if case not in cases:
                cases.append(case)
    return list(found.values())


def _rows(plan: list[Planned], processes: int) -> list[Row]:
    """Compiles everything: in this process, or in some of their own."""
    progress = functools.partial(tqdm, desc="compile", total=len(plan), unit="job", disable=None)
    if processes == 1:
        found = [job.examine() for job, _ in progress(plan)]
    else:
        spawn = multiprocessing.get_context("spawn")  # PyTorch's threads do not survive a fork
        with futures.ProcessPoolExecutor(processes, spawn, _ignore_interrupts) as pool:
            pending = [pool.submit(job.examine) for job, _ in plan]
            try:
                for done in progress(futures.as_completed(pending)):
                    done.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        found = [done.result() for done in pending]
    return [
        _row(job, cases, name, resources)
        for (job, cases), by_name in zip(plan, found, strict=True)
        for name, resources in sorted(by_name.items())
    ]


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair


def _row(job: Job, cases: list[dict[str, Any]], function: str, resources: Resources) -> Row:
    arch, flaws = f"sm_{job.arch}", resources.flaws(job.arch)
    if isinstance(job, CudaKernels):
        kernel, case = _cuda_case(function)
        return Row(arch, CUDA_OPERATORS, kernel, [job.dtype], [case] if case else [], resources, flaws)
    kernel = function.strip("_").removesuffix("_kernel")
    dtypes = list(dict.fromkeys(case["dtype"] for case in cases))
    return Row(arch, cases[0]["operator"], kernel, dtypes, cases, resources, flaws)


_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _table(rows: list[Row]) -> str:
    heads = (
        "arch", "kernel", "dtype", "mode", "for", "registers", "spills", "stack B", "shared B", "occupancy",
        "load B", "store B", "tensor cores",
    )  # fmt: skip
    settings = {_setting(case) for row in rows for case in row.cases if "model" in case}
    cells = [heads, *(_cells(row, brief=len(settings) == 1) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = ["<"] * 5 + [">"] * 5 + ["<"] * 3
    lines = [
        "  ".join(f"{cell:{side}{n}}" for cell, side, n in zip(line, aligned, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def _cells(row: Row, *, brief: bool) -> tuple[str, ...]:
    found = row.resources
    spills = [sum(counts.values()) for counts in (found.spill_loads, found.spill_stores)]
    return (
        row.arch,
        row.kernel,
        " ".join(_SHORT[dtype] for dtype in row.dtypes),
        " ".join(dict.fromkeys(case["mode"] for case in row.cases if "mode" in case)),
        _purpose(row.cases, brief=brief),
        str(found.registers),
        f"{spills[0]}+{spills[1]}" if any(spills) else "0",
        str(found.stack),
        str(found.static_shared + found.dynamic_shared),
        f"{found.occupancy:.0%}",
        _widths(found.loads),
        _widths(found.stores),
        " ".join(f"{count}×{name}" for name, count in _families(found.tensor_cores).items()),
    )


def _setting(case: dict[str, Any]) -> str:
    return f"{case['model']} {case['image_size']}²×{case['batch_size']}"


def _purpose(cases: list[dict[str, Any]], *, brief: bool) -> str:
    """Which stages of which model, or which activation and layout."""
    by_setting: dict[str, list[str]] = {}
    for case in cases:
        if "activation" in case:
            return f"{case['activation']}, {case['vectors']} × {case['vector']}"
        by_setting.setdefault("stage" if brief else _setting(case), []).append(str(case["stage"]))
    return ", ".join(f"{setting} {' '.join(dict.fromkeys(ns))}" for setting, ns in by_setting.items())


def _widths(counts: dict[str, int]) -> str:
    """The narrowest and the widest access."""
    found = sorted({width(name) for name in counts})
    return "–".join(map(str, dict.fromkeys(found[:1] + found[-1:])))


def _families(counts: dict[str, int]) -> dict[str, int]:
    totals: dict[str, int] = Counter()
    for name, count in counts.items():
        totals[name.split(".")[0]] += count
    return totals


def _verdict(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        what = " ".join([*row.dtypes, _purpose(row.cases, brief=False)])
        lines += [f"{row.arch} {row.kernel}, {what}: {flaw}" for flaw in row.flaws]
    return lines or [f"{len(rows)} kernels: nothing spills, everything fits"]


def _report(rows: list[Row], notes: list[str]) -> dict[str, Any]:
    return {
        "report": "cvt compile",
        "schema": SCHEMA,
        "versions": {"cvt_kernels": __version__, "torch": torch.__version__, "triton": triton.__version__},
        "notes": notes,
        "kernels": [row._asdict() | {"resources": row.resources._asdict()} for row in rows],
    }


# The tables of docs/kernels.md -----------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Operator → a Markdown table: the worst of each kernel over all shapes, per type and GPU.

    A cell is registers of a thread / KiB of shared memory of a block / occupancy. The CUDA kernels have a
    line for each number of elements that a thread holds.

    Raises:
        ValueError: It is not a report of this version.
    """
    if report.get("report") != "cvt compile" or report.get("schema") != SCHEMA:
        raise ValueError(f"expected a report of cvt compile, schema {SCHEMA}")
    grouped: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in report["kernels"]:
        grouped.setdefault(row["operator"], {}).setdefault(_line_of(row), []).append(row)
    archs = list(dict.fromkeys(row["arch"] for row in report["kernels"]))
    return {operator: _markdown(lines, archs) for operator, lines in grouped.items()}


def _line_of(row: dict[str, Any]) -> str:
    name = row["kernel"].removeprefix(row["operator"]).strip("_") or row["kernel"]
    for case in row["cases"]:
        if "vector" in case:
            return f"`{name}`, {case['vector'] * case['vectors']}{' single' * (case['vector'] == 1)} elements"
    return f"`{name}`"


def _markdown(lines: dict[str, list[dict[str, Any]]], archs: list[str]) -> str:
    columns = [(dtype, arch) for dtype in ("bfloat16", "float32") for arch in archs]
    text = ["| kernel | bytes per load | per store | " + " | ".join(map(" ".join, columns)) + " |"]
    text.append("|" + "---|" * (3 + len(columns)))
    for name, rows in lines.items():
        accesses = (
            _widths({n: 1 for row in rows for n in row["resources"][kind]}) for kind in ("loads", "stores")
        )
        cells = (
            _worst([row["resources"] for row in rows if row["arch"] == arch and dtype in row["dtypes"]])
            for dtype, arch in columns
        )
        text.append("| " + " | ".join([name, *accesses, *cells]) + " |")
    return "\n".join(text)


def _worst(found: list[dict[str, Any]]) -> str:
    if not found:
        return ""
    registers = max(f["registers"] for f in found)
    shared = max(f["static_shared"] + f["dynamic_shared"] for f in found)
    return f"{registers} / {shared / 1024:.3g} / {min(f['occupancy'] for f in found):.0%}"


def main(arguments: Sequence[str]) -> None:
    """Puts the tables of a report between their marks in a page, ``<!-- compile: OPERATOR -->`` and on."""
    report, page = map(Path, arguments)
    text = page.read_text(encoding="utf-8")
    for operator, table in tables(json.loads(report.read_text(encoding="utf-8"))).items():
        begin, end = f"<!-- compile: {operator} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"{page}: has no {begin.strip()} and {end}")
        text = before + begin + table + "\n" + end + after
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
