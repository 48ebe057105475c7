"""The instructions of a disassembled function, their classes, and the basic blocks that they form."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

#: The classes, in the order of the report. A load or store is an access to any memory but the constants.
CLASSES = ("arithmetic", "loads", "stores", "address", "conversion", "control", "other")

#: Instruction, up to its first dot → class. Those of the uniform datapath have a U before it; everything else
#: that is not here is "other": moves, constants, shuffles, special registers.
_NAMES = {
    "arithmetic": """FADD FADD2 FMUL FMUL2 FFMA FFMA2 FMNMX FMNMX3 FSEL FSET FSETP FCHK MUFU HADD2 HMUL2 HFMA2
        HMNMX2 HSET2 HSETP2 DADD DMUL DFMA DSETP HMMA DMMA QMMA OMMA IMMA HGMMA QGMMA IGMMA UTCHMMA UTCQMMA
        UTCOMMA UTCIMMA""",
    "loads": "LD LDG LDS LDSM LDL LDT LDTM LDGSTS UTMALDG UTCCP",
    "stores": "ST STG STS STSM STL STT STTM RED REDG ATOM ATOMG ATOMS UTMASTG UTMAREDG",
    "address": """IMAD IADD IADD3 VIADD VIADDMNMX LEA SHF SHL SHR LOP LOP3 PLOP3 ISETP IMNMX VIMNMX VIMNMX3
        IABS SEL SGXT BMSK POPC FLO BREV P2R R2P VOTE VOTEU R2UR""",
    "conversion": "F2F F2FP F2I F2IP I2F I2FP I2I I2IP FRND PRMT",
    "control": """BRA BRX JMP CALL RET EXIT KILL BPT BREAK BSSY BSYNC BMOV WARPSYNC YIELD NANOSLEEP NOP BAR
        DEPBAR LDGDEPBAR ARRIVES SYNCS WARPGROUP WARPGROUPSET MEMBAR FENCE ERRBAR CCTL CCTLL ELECT ACQBULK
        UTCBAR UTMACMDFLUSH""",
}  # fmt: skip
_CLASS_OF = {name: kind for kind, names in _NAMES.items() for name in names.split()}

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"\bR(\d+)")


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        predicate: The predicate that it is executed under, such as ``!P0``; empty if it always is.
        name: Its name with all suffixes, such as ``LDG.E.128``.
        operands: Its operands, as the disassembler writes them.
    """

    predicate: str
    name: str
    operands: str

    @property
    def base(self) -> str:
        """The name up to the first dot."""
        return self.name.partition(".")[0]


class Block(NamedTuple):
    """A basic block: code without a branch into it or out of it.

    Attributes:
        instructions: Name → how often it stands in the block.
        classes: Class → instructions of that class.
        successors: The indices of the blocks that may follow.
        first: The index of its first instruction in the function.
    """

    instructions: dict[str, int]
    classes: dict[str, int]
    successors: list[int]
    first: int = 0


def class_of(instruction: Instruction) -> str:
    """Returns the class of an instruction.

    Half precision is unpacked by integer instructions, a shift by 16 bits or a mask of the upper 16, and by
    products with 1 in half precision; these are conversions. Constants made by arithmetic are moves.
    """
    base, operands = instruction.base, instruction.operands
    if base == "IMAD" and ".MOV" in instruction.name:
        return "other"
    if base == "HFMA2" and "-RZ, RZ, " in operands:  # a constant
        return "other"
    if base == "HADD2" and ".F32" in instruction.name:  # float16 to float32
        return "conversion"
    shifts = (base == "SHF" and ", 0x10, RZ" in operands) or (base == "IMAD" and ", 0x10000, RZ" in operands)
    if shifts or (base == "LOP3" and ", 0xffff0000, RZ, 0xc0" in operands):
        return "conversion"
    return _CLASS_OF.get(base) or (_CLASS_OF.get(base[1:]) if base.startswith("U") else None) or "other"


def parse(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Returns the instructions of a function as nvdisasm prints it, and label → index of the next one."""
    instructions: list[Instruction] = []
    labels = {}
    for line in code.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(Instruction(found[1] or "", found[2], found[3]))
    return instructions, labels


def blocks_of(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[Block]:
    """Returns the basic blocks that a function can reach, in code order, the entry first.

    Subroutines, which are the rare cases of divisions and square roots, are not followed.
    """
    successors = [_successors(i, instructions, labels) for i in range(len(instructions))]
    reached, pending = set[int](), [0] if instructions else []
    while pending:
        i = pending.pop()
        if i not in reached:
            reached.add(i)
            pending += successors[i]
    targets = {t for i in reached if successors[i] != [i + 1] for t in (*successors[i], i + 1)}
    firsts = sorted(({0} | targets) & reached)
    index = {first: number for number, first in enumerate(firsts)}
    blocks = []
    for first, end in itertools.pairwise([*firsts, len(instructions)]):
        own = [i for i in range(first, end) if i in reached]
        blocks.append(
            Block(
                Counter(instructions[i].name for i in own),
                Counter(class_of(instructions[i]) for i in own),
                [index[target] for target in successors[own[-1]]],
                first,
            )
        )
    return blocks


def _successors(i: int, instructions: Sequence[Instruction], labels: dict[str, int]) -> list[int]:
    """Returns the indices of the instructions that may follow one."""
    predicate, _, operands = instructions[i]
    following = [i + 1] if i + 1 < len(instructions) else []
    base = instructions[i].base
    if base in ("EXIT", "RET", "KILL"):
        return following if predicate else []
    target = _TARGET.search(operands)
    if base in ("BRA", "JMP") or (base == "CALL" and target):  # a call of a label of the function is a jump
        is_conditional = predicate or not operands.startswith("`")  # BRA P0, `(.L_x_0)
        return [*([labels[target[1]]] if target else []), *(following if is_conditional else [])]
    return following


def bytes_in_flight(instructions: Sequence[Instruction]) -> int:
    """Returns the most bytes that global loads have under way at once if a warp executes these instructions.

    A load is under way until an instruction names one of its registers; an asynchronous copy, until its group
    is waited for.
    """
    loads: dict[int, tuple[range, int]] = {}
    copies, committed, most = 0, [], 0
    for i, instruction in enumerate(instructions):
        base, operands = instruction.base, instruction.operands
        named = {int(number) for number in _REGISTER.findall(operands)}
        loads = {j: load for j, load in loads.items() if named.isdisjoint(load[0])}
        size = 32 * access_bytes(instruction.name)
        if base == "LDG" and (target := _REGISTER.match(operands)):
            first = int(target[1])
            loads[i] = range(first, first + max(size // 128, 1)), size
        elif base == "LDGSTS":
            copies += size
        elif base == "LDGDEPBAR":
            committed.append(copies)
            copies = 0
        elif base == "DEPBAR" and (left := re.search(r"SB0, 0x([0-9a-f]+)", operands)):
            committed = committed[max(len(committed) - int(left[1], 16), 0) :]
        most = max(most, sum(size for _, size in loads.values()) + copies + sum(committed))
    return most


def access_bytes(name: str) -> int:
    """Returns the bytes of one access to memory: 16 for LDG.E.128, 2 for LDG.E.U16, 4 for LDG.E."""
    bits = re.search(r"\.[US]?(8|16|32|64|128|256)\b", name)
    return int(bits[1]) // 8 if bits else 4
