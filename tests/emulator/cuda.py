"""Runs the CUDA kernels of csrc in the emulator, as nvcc compiles them."""

from __future__ import annotations

import concurrent.futures
import ctypes
import struct
from pathlib import Path

import numpy as np

from cvt_kernels.machine.toolkit import find_nvcc
from tests.checks import compiled, compiler
from tests.emulator.program import Fault, Program, Region
from tests.emulator.ptx import kernels_of

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SOURCE = CSRC / "layer_norm_gelu" / "cuda_launches.cu"
HOST = ROOT / "tests" / "csrc" / "simt_layer_norm_gelu.cpp"
TYPES = ("float", "BFloat16", "Half")


class _Launched(ctypes.Structure):
    """A launch, as launched.h packs it."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("blocks", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("arguments", ctypes.c_void_p),
        ("argument_bytes", ctypes.c_int64),
        ("arrays", ctypes.c_void_p),
        ("array_count", ctypes.c_int64),
    ]


class CudaKernels:
    """The CUDA kernels of LayerNorm and GELU, for one GPU.

    Args:
        arch: The GPU that they are compiled for, as 80.
    """

    def __init__(self, arch: int) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            commands = (_ptx_command(element, arch) for element in TYPES)
            files = list(pool.map(lambda command: compiled(command, sources(), ".ptx"), commands))
        self._kernels: dict[str, str] = {}
        for path in files:
            self._kernels |= kernels_of(path.read_text())
        self._programs: dict[tuple[str, int], Program] = {}
        self._host = ctypes.CDLL(str(compiled(_host_command(), sources(), ".so")))
        self._faults: list[Fault] = []

    def run(self, calls: bytes, size: int) -> tuple[bytes, list[Fault]]:
        """Runs calls as simt_layer_norm_gelu.cpp reads them; returns `size` bytes of results and faults."""
        self._faults = []
        results = (ctypes.c_char * (size + 1))()
        emulate = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Launched))(self._launch)
        self._host.run_on(calls, ctypes.c_int64(len(calls)), results, ctypes.c_int64(size + 1), emulate)
        return bytes(results)[:size], self._faults

    def _launch(self, launched: ctypes._Pointer[_Launched]) -> None:
        told = launched.contents
        name, threads = told.kernel.decode(), told.threads
        if (name, threads) not in self._programs:
            self._programs[name, threads] = Program(self._kernels[name], threads)
        program = self._programs[name, threads]
        data, arguments = ctypes.string_at(told.arguments, told.argument_bytes), []
        while data:
            (size,) = struct.unpack_from("q", data)
            arguments.append(data[8 : 8 + size])
            data = data[8 + size :]
        arrays = struct.iter_unpack("Qq", ctypes.string_at(told.arrays, 16 * told.array_count))
        regions = [Region(begin, np.ones(size, np.uint8)) for begin, size in arrays if size]
        self._faults += program.run((told.blocks,), arguments, regions).faults


def _ptx_command(element: str, arch: int) -> list[str]:
    names = [f"-DKERNELS=kernels_{element}", f"-DTYPE={element}"]
    options = ["-w", "-std=c++20", "-ptx", f"-arch=compute_{arch}", *names, "-I", str(CSRC)]
    return [str(find_nvcc()), *options, str(SOURCE)]


def _host_command() -> list[str]:
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-DEMULATED", "-Wno-unknown-pragmas"]
    return [*compiler(), *options, "-I", str(CSRC), "-I", str(ROOT), str(HOST)]


def sources() -> list[Path]:
    """Returns the files that are compiled into kernels on the host, and into their PTX."""
    folders = (CSRC / "common", CSRC / "layer_norm_gelu", HOST.parent)
    paths = [path for folder in folders for path in sorted(folder.glob("*.[ch]*"))]
    return [*paths, Path(__file__).with_name("launched.h")]
