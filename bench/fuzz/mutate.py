"""Damage and malice for files: bits, cuts, splices, lying headers, bombs, wrong types. Deterministic in the given `Random`."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zipfile
from random import Random

import numpy as np

HUGE = [
    "9" * 400,
    "1e999",
    "-1e308",
    str(2**63),
    str(-(2**63)),
    str(2**64),
    str(10**18),
    "1e-320",
    "NaN",
    "Infinity",
    "-0",
    "0",
]
ODD = [None, True, -1, 0, 10**6, 2**31, 2**63, 2**70, -(2**63), 1.5, 1e308, float("nan"), float("inf"), "", "é", "\x00", "../../x",
       "x" * 5000, [], {}, [[]], [None], {"a": 1}, [1, "a"], [[1, 2], [3]], "nan", [0] * 1000]  # fmt: skip
BOMB = 400 << 20  # bytes that a few hundred kilobytes of zip become
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class Trap:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def mutate(name: str, content: bytes, other: bytes, chance: Random, trap: str) -> bytes:
    """One file changed; `other`: another valid one of its kind, to splice with; `trap`: what a pickle would make."""
    kinds = [damage] * 3
    if name.endswith((".json", ".jsonl")):
        kinds += [json_node] * 6 + [numbers] * 2
    elif name.endswith((".toml", ".csv")):
        kinds += [numbers, literal, literal, damage]
    elif name.endswith(".npz"):
        kinds = [damage] + [archive] * 6
    elif name.endswith(".npy"):
        kinds += [lambda c, o, r, t: array(c, r, t)] * 5
    elif name.endswith(".pt"):
        kinds += [pickled] * 6
    elif name.endswith(".safetensors"):
        kinds += [tensors] * 5
    return chance.choice(kinds)(content, other, chance, trap)


def damage(content: bytes, other: bytes, chance: Random, trap: str = "") -> bytes:
    """Without knowing what it is."""
    at, end = sorted((chance.randrange(len(content) + 1), chance.randrange(len(content) + 1)))
    what = chance.randrange(9)
    if what == 0:
        return content[:at]
    if what == 1:
        return content[:at] + content[end:]
    if what == 2:
        return content[:end] + content[at:]
    if what == 3:
        return content[:at] + other[chance.randrange(len(other) + 1) :]
    if what == 4:
        return content[:at] + chance.randbytes(chance.randint(1, 20)) + content[at:]
    if what == 5:
        return content[:at] + b"\xff\xfe" + content[at:]
    if what == 6:
        return (
            content[:at]
            + chance.choice([b"[", b'{"a":', b"("]) * chance.choice([50, 3000, 100_000])
            + content[at:]
        )
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8, 64])):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def numbers(content: bytes, other: bytes, chance: Random, trap: str = "") -> bytes:
    """Some numbers in a text become others."""
    found = list(_NUMBER.finditer(content))
    for one in sorted(
        chance.sample(found, min(len(found), chance.choice([1, 1, 3]))), key=lambda m: -m.start()
    ):
        content = content[: one.start()] + chance.choice(HUGE).encode() + content[one.end() :]
    return content


def literal(content: bytes, other: bytes, chance: Random, trap: str = "") -> bytes:
    """A line's value becomes another kind of value; or a line goes, comes twice, or comes from another file."""
    lines, others = content.split(b"\n"), other.split(b"\n")
    at = chance.randrange(len(lines))
    what = chance.randrange(5)
    if what == 0:
        del lines[at]
    elif what == 1:
        lines.insert(at, lines[chance.randrange(len(lines))])
    elif what == 2:
        lines.insert(at, chance.choice(others))
    else:
        key = lines[at].split(b"=")[0]
        odd = [
            '"x"',
            "[]",
            "{}",
            "true",
            "nan",
            "-inf",
            "1979-05-27",
            "[[1.0]]",
            "[" * 2000,
            "0x10",
            "''",
            "1_0",
            *HUGE,
        ]
        lines[at] = (
            key + b"=" + chance.choice(odd).encode()
            if what == 3
            else chance.choice(odd).encode() + b"," + lines[at]
        )
    return b"\n".join(lines)


def json_node(content: bytes, other: bytes, chance: Random, trap: str = "") -> bytes:
    """A value somewhere in it becomes another; JSON lines: in one of them."""
    lines = content.splitlines() or [b""]
    try:
        whole = json.loads(content)
        return json.dumps(changed(whole, chance)).encode()
    except ValueError:
        at = chance.randrange(len(lines))
        try:
            lines[at] = json.dumps(changed(json.loads(lines[at]), chance)).encode()
        except ValueError:
            return damage(content, other, chance)
        return b"\n".join(lines) + b"\n"


def changed(value, chance: Random):
    """A copy of plain data with one node replaced, removed, added or moved."""
    value = json.loads(json.dumps(value))
    holders = []

    def walk(one):
        if isinstance(one, dict | list) and one:
            holders.append(one)
            for inner in one.values() if isinstance(one, dict) else one[:200]:
                walk(inner)

    walk(value)
    if not holders:
        return chance.choice(ODD)
    for _ in range(chance.choice([1, 1, 1, 2])):
        holder = chance.choice(holders)
        if not holder:
            continue
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        what = chance.randrange(6)
        if what == 0:
            del holder[key]
        elif what == 1 and isinstance(holder, dict):
            holder[chance.choice([key + "x", "", "é", "__class__"])] = holder[key]
        elif what == 2:
            holder[key] = json.loads(json.dumps(chance.choice(holders)))
        elif what == 3:
            deep = chance.choice([3, 90, 900])
            holder[key] = json.loads("[" * deep + "1" + "]" * deep)
        elif what == 4 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] + chance.choice([1, -1, 10**9, 0.5, 2**62])
        else:
            holder[key] = chance.choice(ODD)
    return value


def pickled(content: bytes, other: bytes, chance: Random, trap: str) -> bytes:
    """A file of torch.save with its pickle damaged, or a trap for one, or a member that is not what it was."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        members = {item.filename: source.read(item) for item in source.infolist()}
    program = next(name for name in members if name.endswith("data.pkl"))
    what = chance.randrange(6)
    if what == 0:
        members[program] = pickle.dumps({"logical_count": Trap(trap)}, chance.choice([0, 2, 4, 5]))
    elif what == 1:
        members[program] = members[program].replace(
            b"_rebuild_tensor_v2", chance.choice([b"eval", b"_rebuild_x"])
        )
    elif what == 2:
        huge = chance.choice(
            [b"r\xff\xff\xff\x7f", b"\x96" + struct.pack("<Q", 1 << 36), b"\x8b\xff\xff\xff\x7f"]
        )
        at = chance.randrange(2, len(members[program]))
        members[program] = members[program][:at] + huge + members[program][at:]
    else:
        name = program if what < 5 else chance.choice(list(members))
        members[name] = damage(members[name], members[name], chance)
    out = io.BytesIO()
    with zipfile.ZipFile(
        out, "w", chance.choice([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED])
    ) as target:
        for name, inner in members.items():
            target.writestr(name, inner)
    return out.getvalue()


def archive(content: bytes, other: bytes, chance: Random, trap: str) -> bytes:
    """An .npz with one member changed, a bomb for one, or a directory that lies."""
    with zipfile.ZipFile(io.BytesIO(content)) as source:
        members = [(item.filename, source.read(item)) for item in source.infolist()]
    at = chance.randrange(len(members))
    name, inner = members[at]
    what = chance.randrange(10)
    if what == 0:
        del members[at]
    elif what == 1:
        members.append((chance.choice([name, "rows.npy", "../../evil.npy", "x", "counts.npy"]), inner))
    elif what == 2 and chance.random() < 0.03:  # a bomb costs a second to make
        members[at] = (name, bomb(inner, chance))
    else:
        members[at] = (name, array(inner, chance, trap))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as target:
        for name, inner in members:
            if name in target.namelist():
                name = f"other/{name}"
            target.writestr(name, inner)
    found = bytearray(out.getvalue())
    if what == 9:  # sizes in the directory
        place = found.rfind(b"PK\x01\x02") + chance.choice([10, 16, 20, 24, 42])
        found[place : place + 4] = struct.pack("<I", chance.choice([0, 1, 2**31, 2**32 - 1, len(found)]))
    return bytes(found)


def bomb(inner: bytes, chance: Random) -> bytes:
    """More bytes than its header promises; or a header of hundreds of megabytes."""
    if chance.random() < 0.5:
        return inner + bytes(BOMB)
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", BOMB) + b" " * BOMB


def array(content: bytes, chance: Random, trap: str) -> bytes:
    """An .npy with another header, another content, or a pickle inside."""
    try:
        honest = np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError:
        return damage(content, content, chance)
    what = chance.randrange(7)
    if what == 0:
        return damage(content, content, chance)
    if what == 1:
        return header("|O", chance.choice([(1,), (), honest.shape])) + pickle.dumps(Trap(trap))
    if what == 2:
        shapes = [
            (10**12,),
            (2**62, 2),
            (2**40, 2**40),
            (-1,),
            (),
            (0,),
            (0, 2**60),
            (1,) * 40,
            (honest.size + 1,),
            ("a",),
            (1.5,),
        ]
        return header(honest.dtype.str, chance.choice(shapes)) + honest.tobytes()
    if what == 3:
        kinds = [
            "<f8",
            "<i8",
            ">i4",
            "|b1",
            "<c16",
            "<U3",
            "|S9",
            "<M8[s]",
            "|V8",
            "<f2",
            "i9",
            [("a", "<i8")],
            "x" * 2000,
        ]
        return header(chance.choice(kinds), honest.shape) + honest.tobytes()
    if what == 4 and honest.dtype.kind == "U":
        text = json_node(str(honest).encode(), b"{}", chance).decode(errors="replace")
        return saved(np.array(text))
    if what == 5:
        odd = [np.zeros((0, 0)), np.array(3), np.full((2, 2), np.nan), np.full(honest.shape or (1,), 2**63 - 1), np.array("x"),
               np.full(honest.shape or (1,), -1), np.array([[1.5]]), np.full((3, 3), 1e300), np.zeros((1, 2, 3, 4, 5), int)]  # fmt: skip
        return saved(chance.choice(odd))
    other = np.array(honest).reshape(-1)
    if other.size and other.dtype.kind in "iuf":
        worst = np.iinfo(other.dtype).max if other.dtype.kind in "iu" else np.nan
        other[chance.randrange(other.size)] = chance.choice([worst, 0, 1])
    return saved(np.asfortranarray(other.reshape(honest.shape)))


def header(kind, shape) -> bytes:
    text = repr({"descr": kind, "fortran_order": False, "shape": shape}).encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def saved(values) -> bytes:
    out = io.BytesIO()
    np.save(out, values, allow_pickle=False)
    return out.getvalue()


def tensors(content: bytes, other: bytes, chance: Random, trap: str) -> bytes:
    """A safetensors file with a header that lies, or none."""
    (length,) = struct.unpack("<Q", content[:8])
    text, data = content[8 : 8 + length], content[8 + length :]
    what = chance.randrange(8)
    if what == 0:
        return (
            struct.pack("<Q", chance.choice([0, 1, 2**63, 2**64 - 1, length - 1, length + 1, 90 << 20]))
            + text
            + data
        )
    if what == 1:
        return pickle.dumps(Trap(trap)) + data
    if what == 2:
        text = damage(text, text, chance)
    else:
        entries = json.loads(text)
        name = chance.choice([n for n in entries if n != "__metadata__"])
        if what == 3:
            size = chance.choice([2**62, 10**12, 0, 1, -1, 2**31])
            entries[name]["shape"] = chance.choice([[size], [size, size], [], [0, size], ["a"], None, [1.5]])
        elif what == 4:
            ends = [[0, 10**15], [-8, 8], [5, 1], [0], None, [2**63, 2**64], [0, 1], "ab", [1.5, 2.5]]
            entries[name]["data_offsets"] = chance.choice(ends)
        elif what == 5:
            entries[name]["dtype"] = chance.choice(
                ["F64", "BOOL", "U8", "X", None, 3, "F8_E4M3", "I64", ["F32"]]
            )
        else:
            entries = changed(entries, chance)
        text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data
