"""Damaged bytes and JSON, for the fuzzer: one thing changed in what was valid."""

import copy
import random

#: Values to stand in the place of any other.
ODD = (
    *(None, True, -1, 0, 1, 1.5, float("nan"), float("inf"), 10**8, 2**63, -(2**40), 10**400),
    *("", "x", "\x1b[31mred\n", "\ud800", "x" * 10**6, "../../etc/passwd", "9" * 5000),
    *([], {}, [1], [0] * 10**5, [[]], {"a": 1}, ["a", 1]),
    *([None] * 3, [10**8] * 3, [True] * 3, [-1.0, 2.0, 1e30]),
)


#: The ways to damage bytes.
BYTES = ("truncated", "bits", "block", "insertion", "swap", "head", "tail")


def damaged_bytes(rng: random.Random, data: bytes, what: str) -> bytes:
    """Returns bytes, damaged in one of the ways of ``BYTES``; no bytes stay none."""
    content, size = bytearray(data), len(data)
    if not size:
        return data
    if what == "truncated":
        kept = rng.choice([0, 1, 4, 8, 100, size // 2, size - 1, max(size - 22, 0), rng.randrange(size)])
        del content[kept:]
    elif what in ("bits", "head", "tail"):
        first = {"bits": 0, "head": 0, "tail": max(size - 300, 0)}[what]
        last = min(size, 300) if what == "head" else size
        for _ in range(rng.choice([1, 1, 3, 30])):
            content[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    elif what == "block":
        start = rng.randrange(size)
        end = min(size, start + rng.choice([1, 16, 1000]))
        content[start:end] = rng.choice([bytes(end - start), rng.randbytes(end - start), b""])
    elif what == "insertion":
        start = rng.randrange(size)
        content[start:start] = rng.choice([b"\0", b"x" * 1000, bytes(content[:100]), rng.randbytes(10)])
    elif what == "swap":
        a, b = (rng.randrange(size) for _ in range(2))
        content[a], content[b] = content[b], content[a]
        content[a : a + 64] = reversed(content[a : a + 64])
    return bytes(content)


def damaged(rng: random.Random, content: object) -> tuple[object, str]:
    """Returns a copy of nested mappings and lists with one thing changed, and the words for it."""
    root = {"": copy.deepcopy(content)}
    parent, key, path = root, "", ""
    while True:
        value = parent[key]
        is_inner = isinstance(value, dict | list) and len(value) > 0
        if not is_inner or (path and rng.random() < 0.2):
            break
        parent, key = value, rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        path += f".{key}"
    how = rng.random()
    if how < 0.15 and path:
        del parent[key]
        return root[""], f"without {path}"
    if how < 0.25 and isinstance(parent, dict) and path:
        parent[rng.choice(["other", "", "x" * 10**5, "a\nb"])] = rng.choice(ODD)
        return root[""], f"one more beside {path}"
    odd = rng.choice(ODD)
    parent[key] = odd if path else [odd]
    return root[""], f"{path} = {odd!r:.40}"
