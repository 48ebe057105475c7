"""Machine code of NVIDIA's GPUs, read with the disassembler that Triton ships and kept in Triton's cache."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from triton.runtime.cache import get_cache_manager

from cvt.commands.compile.resources import Usage, run_tool, usages_of

from .instructions import Block, blocks_of, parse
from .loops import bytes_in_flight_of

#: The version of what the cache keeps; another number makes earlier entries unreadable.
_CACHE_VERSION = 3


class MachineCode(NamedTuple):
    """The machine code of one function.

    Attributes:
        usage: Its registers and memory, as the assembler notes them.
        counts: Instruction → how often it stands in the code.
        blocks: The basic blocks.
        bytes_in_flight: The most bytes that a warp's global loads have under way at once in a loop.
    """

    usage: Usage
    counts: dict[str, int]
    blocks: Sequence[Block] = ()
    bytes_in_flight: int = 0


def read(cubin: bytes) -> dict[str, MachineCode]:
    """Returns the machine code of each function of a cubin, by name."""
    text = cached("code.json", [cubin], lambda: json.dumps(_disassemble(cubin)).encode())
    return {
        name: MachineCode(Usage(*usage), counts, [Block(*block) for block in blocks], bytes_in_flight)
        for name, (usage, counts, blocks, bytes_in_flight) in json.loads(text).items()
    }


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
        usages = usages_of(path)
        text = run_tool("nvdisasm", "-c", path)
    # nvdisasm writes a line //---- .text.NAME ---- above each function, and pads short names.
    parts = re.split(r"^//-+ \.text\.(\S+) +-+$", text, flags=re.MULTILINE)
    codes = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {name: _machine_code(codes[name], usage) for name, usage in usages.items()}


def _machine_code(code: str, usage: Usage) -> MachineCode:
    instructions, labels = parse(code)
    counts = Counter(instruction.name for instruction in instructions)
    blocks = blocks_of(instructions, labels)
    return MachineCode(usage, counts, blocks, bytes_in_flight_of(instructions, blocks))
