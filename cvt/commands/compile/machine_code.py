"""Machine code of NVIDIA's GPUs, read with the disassembler that Triton ships and kept in Triton's cache."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import triton
from triton.runtime.cache import get_cache_manager

#: The version of what the cache keeps; another number makes earlier entries unreadable.
_CACHE_VERSION = 1


class MachineCode(NamedTuple):
    """The machine code of one function.

    Attributes:
        registers: Registers of a thread.
        stack: Bytes of a thread's stack.
        shared: Bytes of static shared memory of a block.
        local: Bytes of a thread's local memory.
        counts: Instruction → how often it stands in the code.
    """

    registers: int
    stack: int
    shared: int
    local: int
    counts: dict[str, int]


def read(cubin: bytes) -> dict[str, MachineCode]:
    """Returns the machine code of each function of a cubin, by name."""
    text = cached("code.json", [cubin], lambda: json.dumps(_disassemble(cubin)).encode())
    return {name: MachineCode(*fields) for name, fields in json.loads(text).items()}


def cached(name: str, key: Iterable[bytes], make: Callable[[], bytes]) -> bytes:
    """Returns what ``make`` makes, from Triton's cache if it was made from the same key before.

    Args:
        name: The name of the file in the cache.
        key: Everything that the contents depend on.
        make: Called where the cache has no such file.
    """
    digest = hashlib.sha256(b"\0".join([f"cvt_kernels {_CACHE_VERSION}".encode(), *key])).hexdigest()
    cache = get_cache_manager(digest)
    path = cache.get_file(name)
    if path is not None:
        return Path(path).read_bytes()
    contents = make()
    cache.put(contents, name)
    return contents


def _disassemble(cubin: bytes) -> dict[str, MachineCode]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(cubin)
        usage = run_tool("cuobjdump", "-res-usage", path)
        text = run_tool("nvdisasm", "-c", path)
    # nvdisasm writes a line //---- .text.NAME ---- above each function, and pads short names.
    parts = re.split(r"^//-+ \.text\.(\S+) +-+$", text, flags=re.MULTILINE)
    counts = {
        name: Counter(re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", code))
        for name, code in zip(parts[1::2], parts[2::2], strict=True)
    }
    usages = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    return {
        name: MachineCode(int(registers), int(stack), int(shared), int(local), counts[name])
        for name, registers, stack, shared, local in usages
    }


def run_tool(name: str, *arguments: object, directory: str | None = None) -> str:
    """Runs a program that Triton ships, in ``directory`` if given, and returns what it prints.

    Raises:
        CalledProcessError: It fails.
    """
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    command = list(map(str, (path, *arguments)))
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=directory).stdout


def access_bytes(instruction: str) -> int:
    """Returns the bytes of one access to memory: 16 for LDG.E.128, 2 for LDG.E.U16, 4 for LDG.E."""
    bits = re.search(r"\.[US]?(8|16|32|64|128|256)\b", instruction)
    return int(bits[1]) // 8 if bits else 4
