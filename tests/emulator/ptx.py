"""Decodes the PTX of one kernel for the machine in ``run.cpp``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np


class UnsupportedError(Exception):
    """PTX that the emulator does not know, with its line."""


INSTRUCTION = np.dtype(
    [(n, "i4") for n in ("op", "guard", "guard_not", "a", "b", "line")] + [("o", "i4", 18)]
)
CONSTANT = np.dtype([("offset", "i4"), ("wide", "i4"), ("value", "u8")])
_BRANCH, _RETURN, _BARRIER, _BRANCH_TABLE = -1, -2, -3, -4  # as ``enum Control`` of run.cpp

_UNSIGNED = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}
_BITS = {
    **_UNSIGNED, "f16": "u16", "bf16": "u16", "f32": "u32", "f16x2": "u32", "bf16x2": "u32", "f64": "u64",
}  # fmt: skip
_SPECIAL = {
    f"%{name}.{axis}": 3 * i + j
    for i, name in enumerate(("tid", "ctaid", "ntid", "nctaid"))
    for j, axis in enumerate("xyz")
} | {"%laneid": 12, "%warpid": 13}
_DROPPED = {"approx", "full", "rn"}
_INTEGER = (
    "add", "sub", "mul", "mad", "div", "rem", "min", "max", "and", "or", "xor", "not", "neg", "abs", "shl",
    "shr", "bfe", "popc", "clz",
)  # fmt: skip
_FLOAT = (
    "add", "sub", "mul", "fma", "div", "min", "max", "neg", "abs", "rcp", "sqrt", "rsqrt", "ex2", "lg2",
    "sin", "cos", "tanh",
)  # fmt: skip
_COMPARISON = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


class Kernel:
    """A kernel, decoded.

    Args:
        ptx: The text that ``triton.compile`` made.
        number: Returns the number of an instruction that the machine knows by this name, or None.

    Attributes:
        name: Its name.
        threads: Threads of a program.
        parameters: The offset and the bytes of each parameter.
        lines: The line of the PTX, the text and the line of the source of each instruction.
        code, pool, constants: Instructions, registers of wgmma and numbers, as the machine takes them.
        register_bytes, parameter_bytes: What the registers of a warp and the parameters take.
        shared_bytes: What the arrays in shared memory take whose size the text tells.

    Raises:
        UnsupportedError: The PTX has something that the emulator does not know.
    """

    def __init__(self, ptx: str, number: Callable[[str], int | None]) -> None:
        self._number = number
        header = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", ptx, re.DOTALL)
        if header is None:
            raise UnsupportedError("there is no kernel")
        self.name = header[1]
        found = re.search(r"\.reqntid\s+(\d+)", header[3])
        if found is None:
            raise UnsupportedError("the number of threads is not known")
        self.threads = int(found[1])
        self.parameters: dict[str, tuple[int, int]] = {}
        self.parameter_bytes = 0
        text = re.sub(r"//.*", "", header[2])
        for match in re.finditer(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)[^,]*?([\w$]+)(?:\[(\d+)\])?\s*(?:,|$)", text
        ):
            size = int(match[1]) // 8 * int(match[3] or 1)
            self.parameters[match[2]] = self.parameter_bytes, size
            self.parameter_bytes += max(size, 8)
        self.lines: list[tuple[int, str, str]] = []
        self._shared: dict[str, int] = {}  # the address of each array
        self.shared_bytes = 0
        body = ptx[header.end() - 1 :]
        for name, size in re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d*)\]", ptx):
            if name in body:
                self._shared[name] = self.shared_bytes
                self.shared_bytes += -(-int(size or 0) // 16) * 16
        self._scopes: list[dict[str, tuple[int, str]]] = []
        self._families: list[dict[str, str]] = []
        self.register_bytes = 256  # the first register is for what is thrown away
        self._constants: dict[tuple[int, bool], int] = {}
        self._labels: dict[str, int] = {}
        self._code: list[tuple[int, ...]] = []
        self._jumps: list[tuple[int, str]] = []
        self._tables: dict[str, list[str]] = {}
        self._table_jumps: list[tuple[int, str]] = []
        self._paths: list[int] = []  # numbers of the open braces: labels belong to one
        self._braces = 0
        self.register_limits: list[tuple[int, str, int]] = []  # of setmaxnreg: where, inc or dec, how many
        self._pool: list[int] = []
        self._decode_body(body, ptx.count("\n", 0, header.end() - 1) + 1)
        for index, (label, path) in self._jumps:
            self._code[index] = (
                *self._code[index][:3],
                self._labels[self._found(label, path)],
                *self._code[index][4:],
            )
        self._targets: dict[int, list[int]] = {}
        for index, label in self._table_jumps:
            places = [self._labels[self._found(t, (0,))] for t in self._tables[label]]
            self._targets[index] = places
            self._code[index] = (*self._code[index][:3], len(self._pool), len(places), *self._code[index][5:])
            self._pool += places
        for index, join in self._joins().items():
            self._code[index] = (*self._code[index][:4], join, *self._code[index][5:])
        self.code = np.zeros(len(self._code), INSTRUCTION)
        for record, (op, guard, inverse, a, b, line, *operands) in zip(self.code, self._code, strict=True):
            record["op"], record["guard"], record["guard_not"] = op, guard, inverse
            record["a"], record["b"], record["line"] = a, b, line
            record["o"][: len(operands)] = operands
        self.pool = np.array([*self._pool, 0], np.int32)
        self.constants = np.array(
            [(offset, wide, value) for (value, wide), offset in self._constants.items()], CONSTANT
        )

    def _found(self, label: str, path: tuple[int, ...]) -> str:
        """Returns a label as the innermost of some braces has it."""
        return next(name for brace in reversed(path) if (name := f"{label}@{brace}") in self._labels)

    def _decode_body(self, body: str, line: int) -> None:
        """Goes through the statements; a brace where one could begin is a scope of registers."""
        source, statement, start = "", "", line
        for number, text in enumerate(body.split("\n"), line):
            if ".loc" in text:
                source = text.partition("//")[2].strip() or text.strip()
                continue
            for char in text.partition("//")[0]:
                if not statement.strip():
                    statement, start = "", number
                    if char == "{":
                        self._scopes.append({})
                        self._families.append({})
                        self._paths.append(self._braces)
                        self._braces += 1
                        continue
                    if char == "}":
                        self._scopes.pop()
                        self._families.pop()
                        self._paths.pop()
                        if not self._scopes:
                            return
                        continue
                statement += char
                if char == ":" and re.fullmatch(r"\s*[\w$%]+:", statement):
                    self._label = statement.strip()[:-1]
                    self._labels[f"{self._label}@{self._paths[-1]}"] = len(self._code)
                    statement = ""
                elif char == ";":
                    self._decode(statement[:-1].strip(), start, source)
                    statement = ""
            statement += " " if statement else ""

    def _decode(self, statement: str, line: int, source: str) -> None:
        if statement.startswith(".reg"):
            kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL).groups()
            for name in map(str.strip, names.split(",")):
                family = re.fullmatch(r"([\w$%]+)<\d+>", name)
                self._families[-1][family[1] if family else name] = kind
            return
        if statement.startswith(".branchtargets"):
            self._tables[self._label] = [t.strip() for t in statement.split(None, 1)[1].split(",")]
        if statement.startswith("."):
            return
        guard, op, rest = re.fullmatch(
            r"(?:@(!?\S+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL
        ).groups()
        operands = [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+)+", rest)]
        where = len(self._code)
        try:
            decoded = self._instruction(op.split("."), [o for o in operands if o])
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UnsupportedError(f"line {line}: {statement}: {error!r}") from error
        if decoded is None:
            return
        name, o, a, b = decoded
        if isinstance(name, str):
            number = self._number(name)
            if number is None:
                raise UnsupportedError(f"line {line}: {statement}: {name}")
        else:
            number = name
            if number == _BRANCH:
                self._jumps.append((where, (operands[-1], tuple(self._paths))))
            if number == _BRANCH_TABLE:
                self._table_jumps.append((where, operands[1]))
        predicate = self._register(guard.lstrip("!")) if guard else -1
        self._code.append((number, predicate, int(bool(guard) and guard[0] == "!"), a, b, line, *o))
        self.lines.append((line, " ".join(statement.split()), source))

    def _register(self, name: str, wide: bool | None = None) -> int:
        """Returns where a register lies; raises ValueError if it is not as wide as wanted."""
        if name == "_":
            return 0  # as wide as any
        for scope, families in zip(reversed(self._scopes), reversed(self._families), strict=True):
            kind = families.get(name) or families.get(name.rstrip("0123456789"))
            if kind:
                if name not in scope:
                    scope[name] = self.register_bytes, kind
                    self.register_bytes += 256 if kind.endswith("64") else 128
                if wide is not None and wide != scope[name][1].endswith("64"):
                    raise ValueError(f"{name} is not as wide as the instruction")
                return scope[name][0]
        raise KeyError(name)

    def _constant(self, value: int, wide: bool) -> int:
        key = value & ((1 << 64) - 1 if wide else (1 << 32) - 1), wide
        if key not in self._constants:
            self._constants[key] = self.register_bytes
            self.register_bytes += 256 if wide else 128
        return self._constants[key]

    def _value(self, token: str, kind: str = "u32") -> int:
        """Returns the register of an operand; a constant's is filled before the kernel begins."""
        wide = kind.endswith("64")
        if token in self._shared:
            return self._constant(self._shared[token], wide)
        if token in self.parameters:  # where it lies among the parameters
            return self._constant(self.parameters[token][0], wide)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token):
            return self._constant(int(token[2:], 16), wide)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", token):
            number = int(token.rstrip("U"), 0)
            return self._constant(-int(number != 0) if kind == "pred" else number, wide)
        return self._register(token, wide)

    def _width(self, token: str) -> int:
        """Returns the bits of a register, or of the first of several."""
        name = token.strip("{} ").split(",")[0].strip()
        if name[0] in "-0123456789":
            return 32
        kinds = [scope[name][1] for scope in self._scopes if self._register(name) and name in scope]
        return 64 if kinds and kinds[-1].endswith("64") else 32

    def _vector(self, token: str, kind: str = "u32") -> list[int]:
        names = token.strip("{} ").split(",") if token.startswith("{") else [token]
        return [self._value(name.strip(), kind) for name in names]

    def _address(self, token: str, kind: str) -> tuple[int, int]:
        """Returns the register and the displacement of ``[%r1 + 16]``."""
        base, *more = (part.strip() for part in token.strip("[] ").split("+"))
        return self._value(base, kind), sum(int(part, 0) for part in more)

    def _plain_address(self, token: str) -> list[int]:
        base, displacement = self._address(token, "u32")
        if displacement:
            raise ValueError("a displacement")
        return [base]

    def _box(self, token: str) -> list[int]:
        """Returns the registers of ``[%map, {%column, %row}]``."""
        name, column, row = (part.strip(" {}[]") for part in token.split(","))
        return [self._value(name, "u64"), self._value(column), self._value(row)]

    def _instruction(self, op: list[str], x: list[str]) -> tuple[str | int, list[int], int, int] | None:
        """Returns the name in ``emu.cpp``, the registers and the two numbers of an instruction."""
        head, kind = op[0], op[-1]
        bits = _BITS.get(kind, kind)
        match op:
            case ["bra", *_]:
                return _BRANCH, [], 0, 0
            case ["ret" | "exit", *_]:
                return _RETURN, [], 0, 0
            case ["bar", "warp", "sync"]:
                return "bar.warp", [self._value(x[0])], 0, 0
            case ["bar" | "barrier", *_] if "sync" in op:
                return _BARRIER, [], int(x[0]), int(x[1]) if len(x) > 1 else 0
            case ["brx", "idx", *_]:
                return _BRANCH_TABLE, [self._value(x[0])], 0, 0
            case ["setmaxnreg", way, *_]:
                self.register_limits.append((len(self._code), way, int(x[0])))
                return None
            case ["mbarrier", "arrive", "shared::cta", "b64"]:
                base, displacement = self._address(x[1], "u32")
                return "mbarrier.arrive", [base], int(x[2], 0) if len(x) > 2 else 1, displacement
            case ["fence", "proxy", "async", *_]:
                return "fence.proxy", [], 0, 0
            case ["membar" | "fence", *_] | ["griddepcontrol", "launch_dependents"]:
                return None
            case ["griddepcontrol", "wait"]:
                return "griddepcontrol.wait", [], 0, 0
            case ["elect", "sync"]:
                leader, _, is_leader = x[0].partition("|")
                return "elect", [self._register(leader), self._register(is_leader), self._value(x[1])], 0, 0
            case ["mbarrier", "init" | "inval", *_]:
                base, displacement = self._address(x[0], "u32")
                return f"mbarrier.{op[1]}", [base], int(x[1], 0) if len(x) > 1 else 0, displacement
            case ["mbarrier", "arrive", "expect_tx", *_]:
                base, displacement = self._address(x[1], "u32")
                return "mbarrier.expect", [base], int(x[2], 0), displacement
            case ["mbarrier", "try_wait", "parity", *_]:
                base, displacement = self._address(x[1], "u32")
                return "mbarrier.try_wait", [self._register(x[0]), base, self._value(x[2])], 0, displacement
            case ["cp", "async", "bulk", "tensor", "2d", "global", "shared::cta", "bulk_group"]:
                return "bulk.store", [*self._box(x[0]), *self._plain_address(x[1])], 0, 0
            case ["cp", "async", "bulk", "tensor", "2d", *_] if "mbarrier::complete_tx::bytes" in op:
                operands = [*self._box(x[1]), *self._plain_address(x[0]), *self._plain_address(x[2])]
                return "bulk.load", operands, 0, 0
            case ["cp", "async", "bulk", "commit_group"]:
                return "bulk.commit", [], 0, 0
            case ["cp", "async", "bulk", "wait_group", *_]:
                return "bulk.wait", [], int(x[0]), 0
            case ["cvta", "param", "u64"] | ["cvta", "to", "global", "u64"]:
                return "mov.u64", [self._value(t, "u64") for t in x], 0, 0
            case ["ld", "param", *_]:
                parameter, _, more = (part.strip() for part in x[1].strip("[] ").partition("+"))
                width, offset = self._width(x[0]), int(more or "0", 0)
                registers = self._vector(x[0], f"u{width}")
                if parameter.startswith("%"):  # one among several, which LLVM chooses by its address
                    base = self._register(parameter, wide=True)
                    return f"ld.param_at.{bits}.{width}", [*registers, base], len(registers), offset
                offset += self.parameters[parameter][0]
                return f"ld.param.{bits}.{width}", registers, offset, len(registers)
            case ["ld" | "st", *_]:
                space = next(s for s in ("global", "shared") if any(p.split("::")[0] == s for p in op))
                data, address = (x[0], x[1]) if head == "ld" else (x[1], x[0])
                width = self._width(data)
                registers = self._vector(data, f"u{width}")
                base, displacement = self._address(address, "u64" if space == "global" else "u32")
                return f"{head}.{space}.{bits}.{width}", [*registers, base], len(registers), displacement
            case ["mov", "pred"]:
                return "mov.pred", [self._register(x[0]), *2 * [self._value(x[1], "pred")]], 0, 0
            case ["mov", _]:
                return self._move(bits, x)
            case ["and" | "or" | "xor" | "not", "pred"]:
                operands = 2 * [self._value(t, "pred") for t in x[1:]]
                return ".".join(op), [self._register(x[0]), *operands[:2]], 0, 0
            case ["selp", _]:
                operands = [*(self._value(t, bits) for t in x[:3]), self._value(x[3], "pred")]
                return f"selp.{bits}", operands, 0, 0
            case ["setp", comparison, *_]:
                comparison = _COMPARISON.get(comparison, comparison)
                if len(x) != 3 or "|" in x[0] or not set(op[2:-1]) <= {"ftz"}:
                    raise ValueError("a setp of two parts")
                name = ".".join(["setp", comparison, *op[2:-1], _UNSIGNED.get(kind, kind)])
                return name, [self._register(x[0]), *(self._value(t, bits) for t in x[1:])], 0, 0
            case ["cvt", *_]:
                name = ".".join(part for part in op if part not in ("ftz", "satfinite"))
                wide = op[-2].endswith("64")
                return name, [self._register(x[0], wide), *(self._value(t, bits) for t in x[1:])], 0, 0
            case ["prmt", "b32"] | ["bfi", "b32"] | ["shf", _, _, "b32"] | ["dp4a", "s32", "s32"]:
                name = "dp4a.s32" if head == "dp4a" else ".".join([*op[:-1], "u32"])
                return name, [self._value(t) for t in x], 0, 0
            case ["lop3", "b32"]:
                return "lop3.u32", [self._value(t) for t in x[:4]], int(x[4], 0), 0
            case ["shfl", "sync", mode, "b32"]:
                data, _, inside = x[0].partition("|")
                results = [self._register(data), self._register(inside or "_")]
                return f"shfl.{mode}", [*results, *map(self._value, x[1:])], 0, 0
            case ["vote", "sync", mode, _]:
                source = self._value(x[1].lstrip("!"), "pred")
                operands = [self._register(x[0]), source, self._value(x[2])]
                return f"vote.{mode}", operands, 0, int(x[1][0] == "!")
            case ["redux", "sync", mode, _]:
                return f"redux.{mode}.{bits}", [self._value(t) for t in x], 0, 0
            case ["ldmatrix" | "stmatrix", "sync", "aligned", "m8n8", count, *_]:
                data, address = (x[0], x[1]) if head == "ldmatrix" else (x[1], x[0])
                base, displacement = self._address(address, "u32")
                name = f"{head}.trans" if "trans" in op else head
                return name, [*self._vector(data), base], int(count[1:]), displacement
            case ["mma", "sync", "aligned", _, "row", "col", *rest]:
                sums, numbers = rest[-4], rest[-3]
                if (sums, rest[-1]) not in (("f32", "f32"), ("s32", "s32")) or rest[-2] != numbers:
                    raise ValueError("these types")
                d, a, b, c = (self._vector(t) for t in x)
                return f"mma.{numbers}", [*d, *a, *b, *c], len(a), len(b)
            case ["wgmma", "mma_async", "sync", "aligned", shape, _, numbers, _]:
                columns = int(re.fullmatch(r"m64n(\d+)k\d+", shape)[1])
                in_registers = x[1].startswith("{")
                scales, transposed = x[4:6], [int(t) for t in x[6:]]
                if scales not in ([], ["1", "1"]):
                    raise ValueError("these signs")
                flags = in_registers << 16 | [0, 0, *transposed][-1] << 18
                flags |= 0 if in_registers else [0, 0, *transposed][-2] << 17
                where = len(self._pool)
                self._pool += self._vector(x[0]) + (self._vector(x[1]) if in_registers else [])
                descriptor = 0 if in_registers else self._value(x[1], "u64")
                operands = [descriptor, self._value(x[2], "u64"), self._value(x[3], "pred")]
                return f"wgmma.{numbers}", operands, columns | flags, where
            case ["wgmma", "fence", *_]:
                return None
            case ["wgmma", "commit_group", *_]:
                return "wgmma.commit", [], 0, 0
            case ["wgmma", "wait_group", *_]:
                return "wgmma.wait", [], int(x[0]), 0
            case ["cp", "async", "commit_group"]:
                return "cp.async.commit", [], 0, 0
            case ["cp", "async", "wait_group" | "wait_all"]:
                return "cp.async.wait", [], int(x[0]) if x else -1, 0
            case ["cp", "async", "ca" | "cg", *_]:
                to, displacement = self._address(x[0], "u32")
                source, more = self._address(x[1], "u64")
                read = self._value(x[3] if len(x) > 3 else x[2])
                return "cp.async", [to, source, read, more], int(x[2], 0), displacement
        return self._arithmetic(op, x)

    def _move(self, bits: str, x: list[str]) -> tuple[str, list[int], int, int]:
        if x[1] in _SPECIAL:
            return "special", [self._register(x[0])], _SPECIAL[x[1]], 0
        vector, other = (x[0], x[1]) if x[0].startswith("{") else (x[1], x[0])
        if vector.startswith("{"):
            names = vector.strip("{} ").split(",")
            part = f"u{int(bits[1:]) // len(names)}"
            registers, whole = self._vector(vector, part), self._value(other, bits)
            names_of_both = f"{bits.replace('s', 'u')}.{part}"
            if vector == x[0]:
                return f"unpack.{names_of_both}", [*registers, whole], len(names), 0
            return f"pack.{names_of_both}", [whole, *registers], len(names), 0
        name = "mov.word" if bits in ("u32", "s32") else f"mov.{bits}"
        return name, [self._value(t, bits) for t in x], 0, 0

    def _arithmetic(self, op: list[str], x: list[str]) -> tuple[str, list[int], int, int]:
        head, kind = op[0], op[-1]
        kind = _UNSIGNED.get(kind, kind)
        if kind[0] in "us" and head in _INTEGER:
            kinds = [kind] * len(x)
            if head in ("shl", "shr", "bfe"):
                kinds[2:] = ["u32"] * len(kinds[2:])
            if "wide" in op:
                kinds[0] = f"{kind[0]}{2 * int(kind[1:])}"
                kinds[3:] = [kinds[0]] * len(kinds[3:])
            name = ".".join([*op[:-1], kind])
            return name, [self._value(t, k) for t, k in zip(x, kinds, strict=True)], 0, 0
        if kind[0] not in "us" and head in _FLOAT:
            modifiers = [part for part in op[1:-1] if part not in _DROPPED]
            if kind != "f32":
                modifiers = [part for part in modifiers if part != "ftz"]
            return ".".join([head, *modifiers, kind]), [self._value(t, _BITS[kind]) for t in x], 0, 0
        raise ValueError("unknown")

    def _joins(self) -> dict[int, int]:
        """Returns where lanes that part at a branch meet again: its first postdominator; −1 for nowhere."""
        end = len(self._code)
        ends = [i for i, (op, *_) in enumerate(self._code) if op in (_BRANCH, _RETURN, _BRANCH_TABLE)]
        of_tables = {t for targets in self._targets.values() for t in targets}
        starts = sorted(
            {0, end, *(i + 1 for i in ends), *(self._code[i][3] for i, _ in self._jumps), *of_tables}
        )
        after: dict[int, list[int]] = {end: []}
        for start, following in itertools.pairwise(starts):
            op, guard, _, target, *_ = self._code[following - 1]
            targets = (
                [target]
                if op == _BRANCH
                else [end]
                if op == _RETURN
                else self._targets.get(following - 1, [])
            )
            after[start] = targets if targets and guard < 0 else [*targets, following]
        beyond = {start: set(starts) for start in starts} | {end: {end}}
        changed = True
        while changed:
            changed = False
            for start in reversed(starts[:-1]):
                found = set.intersection(*(beyond[n] for n in after[start])) | {start}
                changed |= found != beyond[start]
                beyond[start] = found
        joins = {}
        for index, _ in self._jumps:
            own = beyond[max(start for start in starts if start <= index)]
            first = next((b for b in own if len(beyond[b]) == len(own) - 1), end)
            joins[index] = -1 if first == end else first
        return joins
