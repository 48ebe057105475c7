"""Prepared launches: what a driver that only notes it gets, and what Triton's launcher gets."""

import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import cvt_kernels as ck
from cvt_kernels import backends, machine
from cvt_kernels.ops import launch_plans, prepared_launches
from cvt_kernels.ops.prepared_launches import descriptor_on, prepared, why_not_prepared

pytest.importorskip("triton")
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

ROOT = Path(__file__).parents[3]
INCLUDE = Path(triton.__file__).parent / "backends/nvidia/include"
OPTIONS = ["-I", ROOT / "csrc", "-isystem", Path(torch.__file__).parent / "include"]
OPTIONS += ["-isystem", sysconfig.get_path("include")]
needs_extension = pytest.mark.skipif(not machine.has_extension(), reason="the extension is not built")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")

DRIVER = """
#include <cstring>
#include "launches/launches.h"
using namespace cvt_kernels::launches;

extern "C" {
void* context = reinterpret_cast<void*>(7);
int answer = 0, sizes[32], count = 0;
Config config;
Attribute attribute;
void* function;
unsigned char bytes[4096];

int cuCtxGetCurrent(void** result) { *result = context; return 0; }
int cuCtxSetCurrent(void* wanted) { context = wanted; return 0; }
int cuGetErrorString(int, const char** text) { *text = "a wrong one"; return 0; }
#ifndef OLD
int cuTensorMapReplaceAddress(void* map, void* address) {
  if (reinterpret_cast<uintptr_t>(map) % 128) return 1;
  std::memcpy(map, &address, 8);
  return 0;
}
#endif
int cuLaunchKernelEx(const Config* given, void* which, void** parameters, void** extra) {
  if (context == nullptr || extra != nullptr) return 201;
  config = *given;
  attribute = given->attribute_count ? *given->attributes : Attribute{};
  function = which;
  unsigned char* to = bytes;
  for (int i = 0; i < count; to += sizes[i++]) std::memcpy(to, parameters[i], sizes[i]);
  return answer;
}
}
"""

BEGIN = """
import ctypes, struct, sys, threading, types
fake = ctypes.CDLL("libcuda.so.1")
import torch
from cvt_kernels import machine
from cvt_kernels.ops import prepared_launches
extension = machine.load_extension()

def number(name, kind=ctypes.c_int):
    return kind.in_dll(fake, name)

def expect(sizes):
    (ctypes.c_int * 32).in_dll(fake, "sizes")[: len(sizes)] = sizes
    number("count").value = len(sizes)

def taken(sizes):
    return bytes((ctypes.c_ubyte * 4096).in_dll(fake, "bytes"))[: sum(sizes)]

def config():
    raw = bytes((ctypes.c_ubyte * 56).in_dll(fake, "config"))
    return struct.unpack("7I4xQQI4x", raw)

def raises(error, text, function, *arguments):
    try:
        function(*arguments)
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(text)
"""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory):
    """Folders with a driver that notes the last launch: a new one, and one that cannot move tensor maps."""
    folders = []
    for options in ([], ["-DOLD"]):
        folders.append(tmp_path_factory.mktemp("driver"))
        source = folders[-1] / "driver.cpp"
        source.write_text(DRIVER)
        command = ["c++", "-std=c++20", "-shared", "-fPIC", *options, *OPTIONS]
        subprocess.run([*command, source, "-o", folders[-1] / "libcuda.so.1"], check=True)
    return folders


def run(folder, code):
    """Runs code in a process of its own, whose driver is the folder's."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_extension
@needs_compiler
def test_the_driver_gets_parameters_addresses_stream_and_overlap(drivers):
    run(
        drivers[0],
        """
template = bytes(range(128))
parts = [("p", bytes(8)), ("c", struct.pack("<i", -5)), ("m", template), ("c", b"\\1"), ("p", bytes(8))]
sizes = [8, 4, 128, 1, 8]
expect(sizes)
for overlaps in (True, False):
    start = extension.prepare_launch("kernel", 99, (3, 2, 1), 128, 4096, overlaps, parts)
    assert start(17, 1 << 40, 256, (1 << 64) - 1) is None
    moved = struct.pack("<Q", 256) + template[8:]
    wanted = struct.pack("<Qi", 1 << 40, -5) + moved + b"\\1" + b"\\xff" * 8
    assert taken(sizes) == wanted
    assert config()[:8] == (3, 2, 1, 128, 1, 1, 4096, 17)
    assert config()[9] == overlaps
    assert number("function", ctypes.c_void_p).value == 99
    attribute = bytes((ctypes.c_ubyte * 72).in_dll(fake, "attribute"))
    assert attribute == ((struct.pack("<II", 6, 0) + b"\\1").ljust(72, b"\\0") if overlaps else bytes(72))
assert extension.moved_tensor_map(template, 256) == moved
""",
    )


@needs_extension
@needs_compiler
def test_wrong_arguments_and_errors_of_the_driver_are_named(drivers):
    run(
        drivers[0],
        """
make = lambda grid=(1, 1, 1), function=9, threads=32, shared=0, parts=(): extension.prepare_launch(
    "kernel", function, grid, threads, shared, False, list(parts))
raises(ValueError, "grid: got 0, expected 1 to", make, (1, 0, 1))
raises(ValueError, "grid: got 65536, expected 1 to 65535", make, (1, 65536, 1))
raises(ValueError, "function: got 0", make, (1, 1, 1), 0)
raises(ValueError, "threads: got 2048, expected 1 to 1024", make, (1, 1, 1), 9, 2048)
raises(ValueError, "shared_bytes: got -1", make, (1, 1, 1), 9, 32, -1)
raises(ValueError, "parameter: got 9 bytes, expected 1 to 8", make, (1, 1, 1), 9, 32, 0, [("c", bytes(9))])
raises(ValueError, "parameter: got 64 bytes, expected 128", make, (1, 1, 1), 9, 32, 0, [("m", bytes(64))])
raises(ValueError, "unknown kind", make, (1, 1, 1), 9, 32, 0, [("x", bytes(8))])
raises(ValueError, "more than 4096 bytes", make, (1, 1, 1), 9, 32, 0, [("m", bytes(128))] * 33)
raises(ValueError, "or 256 parameters", make, (1, 1, 1), 9, 32, 0, [("c", bytes(4))] * 257)
raises(ValueError, "map: got 3 bytes, expected 128", extension.moved_tensor_map, b"abc", 0)
raises(ValueError, "expected more than 128", extension.bytes_at_end, object(), 128)
start = make(parts=[("p", bytes(8))])
raises(TypeError, "got 1 arguments, expected a stream and 1 addresses", start, 0)
raises(TypeError, "got 3 arguments", start, 0, 1, 2)
raises(OverflowError, "", start, 0, -16)
raises(TypeError, "", start, 0, "16")
raises(TypeError, "", start, None, 16)
number("answer").value = 700
raises(RuntimeError, "kernel: a wrong one (CUDA error 700)", start, 0, 16)
""",
    )


@needs_extension
@needs_compiler
def test_a_new_thread_gets_the_context_and_threads_may_overlap(drivers):
    run(
        drivers[0],
        """
start = extension.prepare_launch("kernel", 9, (1, 1, 1), 32, 0, False, [("p", bytes(8))])
number("context", ctypes.c_void_p).value = None
assert start(0, 16) is None
assert number("context", ctypes.c_void_p).value == 7
threads = [threading.Thread(target=lambda: [start(0, 16) for _ in range(1000)]) for _ in range(4)]
[each.start() for each in threads]
[each.join() for each in threads]
""",
    )


COMPILED = """
from triton.backends.nvidia.driver import CudaLauncher
from triton.tools.tensor_descriptor import TensorDescriptor

def compiled(signature, **facts):
    known = dict(num_warps=4, num_ctas=1, shared=64, launch_pdl=True, launch_cooperative_grid=False,
                 global_scratch_size=0, profile_scratch_size=0, tensordesc_meta=[])
    return types.SimpleNamespace(
        run=object.__new__(CudaLauncher), packed_metadata=None, name="kernel",
        metadata=types.SimpleNamespace(**known | facts), function=5,
        src=types.SimpleNamespace(signature=dict(enumerate(signature))))

x, y = torch.zeros(4, 16), torch.zeros(64)
"""


@needs_extension
@needs_compiler
def test_kernels_of_triton_are_prepared_for_their_types(drivers):
    run(
        drivers[0],
        COMPILED
        + """
kinds = ["*fp32", ("*bf16", "*bf16", "constexpr"), "constexpr", "i32", "i64", "fp32", "u1", "constexpr"]
kinds.append("*fp32")
given = [x, (y, y, None), (1, 2), 7, 1 << 40, 0.5, True, None, None]
made = prepared_launches.prepared(compiled(kinds), (2, 1, 1), given)
assert made.why_by_triton is None, made
sizes = [8, 8, 8, 4, 8, 4, 1, 8, 8, 8]
expect(sizes)
made.start(3, 16, 32, 48)
assert taken(sizes) == struct.pack("<QQQiqfbQQQ", 16, 32, 48, 7, 1 << 40, 0.5, True, 0, 0, 0)
assert config()[:8] == (2, 1, 1, 128, 1, 1, 64, 3)
assert config()[9] == 1

def encoded(descriptor, meta, address):
    assert meta == "meta"
    return struct.pack("<Q", address) + bytes(112) + struct.pack("<Q", descriptor.shape[0])

prepared_launches._encoded = encoded
kinds = ["tensordesc<fp32[4, 16]>", "*fp32"]
kernel = compiled(kinds, tensordesc_meta=["meta"])
descriptor = TensorDescriptor.from_tensor(x, [4, 16])
made = prepared_launches.prepared(kernel, (1, 1, 1), [descriptor, y])
assert made.why_by_triton is None, made
sizes = [128, 4, 4, 8, 8, 8]
expect(sizes)
made.start(0, 4096, 64)
wanted = struct.pack("<Q", 4096) + bytes(112) + struct.pack("<QiiqqQ", 4, 4, 16, 16, 1, 64)
assert taken(sizes) == wanted

prepared_launches._encoded = lambda descriptor, meta, address: struct.pack("<QQ", 1, address) + bytes(112)
made = prepared_launches.prepared(kernel, (1, 1, 1), [descriptor, y])
assert made.why_by_triton == "this Triton keeps tensor maps in another way"
""",
    )


@needs_extension
@needs_compiler
def test_what_the_extension_does_not_do_is_left_to_triton_and_says_why(drivers):
    code = """
matrix = TensorDescriptor.from_tensor(x, [4, 16])
for reason, kernel, grid, given in [
    ("global_scratch_size=8", compiled(["*fp32"], global_scratch_size=8), (1, 1, 1), [x]),
    ("launch_cooperative_grid", compiled(["*fp32"], launch_cooperative_grid=True), (1, 1, 1), [x]),
    ("in clusters", compiled(["*fp32"], num_ctas=2), (1, 1, 1), [x]),
    ("has no programs", compiled(["*fp32"]), (1, 0, 1), [x]),
    ("of type fp16", compiled(["fp16"]), (1, 1, 1), [0.5]),
    ("given are 1", compiled([("*fp32", "*fp32")]), (1, 1, 1), [(x,)]),
    ("takes descriptors apart", compiled(["tensordesc<fp32[4, 16]>"]), (1, 1, 1), [matrix]),
    ("expected 1 to 1024", compiled(["*fp32"], num_warps=64), (1, 1, 1), [x]),
]:
    made = prepared_launches.prepared(kernel, grid, given)
    assert reason in made.why_by_triton, (reason, made.why_by_triton)
"""
    run(drivers[0], COMPILED + code)
    unknown = """
for name in ("profile_scratch_size", "launch_cooperative_grid", "num_ctas", "shared", "launch_pdl"):
    kernel = compiled(["*fp32"])
    delattr(kernel.metadata, name)  # of another version of Triton
    made = prepared_launches.prepared(kernel, (1, 1, 1), [x])
    assert "in another way" in made.why_by_triton and name in made.why_by_triton, made
"""
    run(drivers[0], COMPILED + unknown)
    old = """
prepared_launches._encoded = lambda descriptor, meta, address: bytes(128)
kernel = compiled(["tensordesc<fp32[4, 16]>"], tensordesc_meta=["meta"])
made = prepared_launches.prepared(kernel, (1, 1, 1), [TensorDescriptor.from_tensor(x, [4, 16])])
assert made.why_by_triton == "the CUDA driver has no cuTensorMapReplaceAddress", made
assert prepared_launches.prepared(compiled(["*fp32"]), (1, 1, 1), [x]).why_by_triton is None
"""
    run(drivers[1], COMPILED + old)


class Launcher:
    """A launcher that is not Triton's."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(arguments)


def test_another_launcher_gets_addresses_in_the_place_of_tensors(monkeypatch):
    run, x = Launcher(), torch.zeros(4, 16)
    compiled = types.SimpleNamespace(run=run, function=5, packed_metadata="metadata")
    descriptor = TensorDescriptor.from_tensor(x, [4, 16])
    given = [x, (x, None, 3), descriptor, (1, 2), None]
    made = prepared(compiled, (3, 2, 1), given)
    other = "the kernel has another launcher than Triton's for NVIDIA"
    assert made.why_by_triton == (why_not_prepared() or other)
    made.start(9, 16, 32, 48)
    ((*first, one, several, like, constant, absent),) = run.calls
    assert first == [3, 2, 1, 9, 5, "metadata", None, None, None]
    assert (one, several, constant, absent) == (16, (32, None, 3), (1, 2), None)
    assert (like.base, like.base.data_ptr(), like.shape) == (48, 48, descriptor.shape)
    assert descriptor.base is x
    assert descriptor_on(descriptor, 5).base == 5
    monkeypatch.setattr(prepared_launches, "why_not_prepared", lambda: "not built")
    assert prepared(compiled, (3, 2, 1), given).why_by_triton == "not built"


@pytest.mark.gpu
def test_a_gpu_starts_all_kernels_by_its_driver_with_the_same_results(monkeypatch):
    reasons, prepare = [], launch_plans.prepared

    def noted(*arguments):
        made = prepare(*arguments)
        reasons.append(made.why_by_triton)
        return made

    monkeypatch.setattr(launch_plans, "prepared", noted)
    backends.forget()
    sizes = (25088, 192), (768, 192)
    x, weight = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    with ck.use_backend("triton"), torch.no_grad():
        outs = [ck.linear_gelu(x, weight, weight[:, 0].contiguous()) for _ in range(4)]
    assert reasons
    assert set(reasons) == {None}
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_missing_extension_and_an_older_one_are_reasons(monkeypatch):
    monkeypatch.setattr(machine, "has_extension", lambda: False)
    assert "is not installed" in why_not_prepared.__wrapped__()
    monkeypatch.setattr(machine, "has_extension", lambda: True)
    monkeypatch.setattr(machine, "load_extension", lambda: types.SimpleNamespace(cuda="", cuda_request="0"))
    assert why_not_prepared.__wrapped__() == "the extension is of an older version"


def test_a_variable_leaves_launches_to_triton(monkeypatch):
    monkeypatch.setenv("CVT_KERNELS_DIRECT_LAUNCHES", "0")
    assert why_not_prepared.__wrapped__() == "CVT_KERNELS_DIRECT_LAUNCHES is 0"
    monkeypatch.setenv("CVT_KERNELS_DIRECT_LAUNCHES", "off")
    with pytest.raises(ValueError, match=r"CVT_KERNELS_DIRECT_LAUNCHES: got 'off', expected 0 or 1"):
        why_not_prepared.__wrapped__()


@needs_compiler
@pytest.mark.skipif(not (INCLUDE / "cuda.h").exists(), reason="this Triton has no cuda.h")
def test_declarations_agree_with_the_header_of_cuda(tmp_path):
    source = tmp_path / "agree.cpp"
    source.write_text("""
#include <cuda.h>
#include "launches/launches.h"
using namespace cvt_kernels::launches;
#define SAME(ours, theirs, of_ours, of_theirs) \\
  static_assert(offsetof(ours, of_ours) == offsetof(theirs, of_theirs) && \\
                sizeof(ours::of_ours) == sizeof(theirs::of_theirs))
static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute) && sizeof(Config) == sizeof(CUlaunchConfig));
SAME(Attribute, CUlaunchAttribute, id, id);
SAME(Attribute, CUlaunchAttribute, value, value);
SAME(Config, CUlaunchConfig, shared_bytes, sharedMemBytes);
SAME(Config, CUlaunchConfig, stream, hStream);
SAME(Config, CUlaunchConfig, attributes, attrs);
SAME(Config, CUlaunchConfig, attribute_count, numAttrs);
static_assert(offsetof(Config, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(Config, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(kProgrammaticStreamSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(kTensorMapBytes == sizeof(CUtensorMap) && kTensorMapAlignment % alignof(CUtensorMap) == 0);
static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUcontext) == sizeof(void*));
""")
    command = ["c++", "-std=c++20", "-fsyntax-only", *OPTIONS, "-isystem", INCLUDE, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
