"""Ways to change a file: of JSON and parquet the values, of all else the bytes. Decided by a generator alone."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    255,
    10**9,
    2**31,
    2**63,
    -(2**63),
    10**30,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
]
ODD += [
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "0",
    "nan",
    "x" * 5000,
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
]
ODD += [
    "\x1b[2J",
    "{0.__class__}",
    "{chunk_index:999999d}",
    "{episode_index}",
    "\ud800",
    [],
    {},
    [[]],
    [{}],
    [1, [2]],
    {"": ""},
]
ODD += [[0] * 1000, {"a": {"b": {"c": 1}}}]


def mutate(path: Path, rng: random.Random) -> str:
    """Change a file in place; returns what was done."""
    by_kind = {".json": (json_values, raw), ".jsonl": (json_lines, raw), ".parquet": (parquet_values, raw)}
    by_kind |= {".mp4": (mp4_boxes, raw)}
    ways: tuple[Callable[[Path, random.Random], str], ...] = by_kind.get(path.suffix, (raw,))
    way = ways[0] if rng.random() < 0.7 else ways[-1]
    return way(path, rng)


def replace_file(path: Path, data: bytes) -> None:
    """Never through the link that a copy of an honest folder is made of."""
    path.unlink()
    path.write_bytes(data)


def raw(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    size = max(len(data), 1)
    how = rng.choice(("flip", "flip", "flip", "end", "begin", "cut", "insert", "swap", "number"))
    at = rng.randrange(size)
    if how in ("flip", "end", "begin"):  # headers and footers are at the ends
        span = {"flip": (0, size), "end": (max(0, size - 400), size), "begin": (0, min(size, 400))}[how]
        for _ in range(rng.choice((1, 1, 2, 8, 40))):
            place = rng.randrange(*span)
            data[place : place + 1] = bytes([rng.randrange(256)])
    elif how == "cut":
        del data[at:]
    elif how == "insert":
        data[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
    elif how == "swap":
        other = rng.randrange(size)
        data[at : at + 16], data[other : other + 16] = data[other : other + 16], data[at : at + 16]
    else:
        data[at : at + 4] = rng.choice(
            (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\0\x98\x96\x80")
        )
    replace_file(path, bytes(data))
    return f"bytes: {how}"


BOXES = (
    b"moov",
    b"trak",
    b"mdia",
    b"mdhd",
    b"tkhd",
    b"stbl",
    b"stsd",
    b"stts",
    b"ctts",
    b"stsc",
    b"stsz",
    b"stco",
    b"stss",
)
BOXES += (b"avc1", b"avcC", b"elst", b"mvhd", b"hdlr", b"mdat", b"ftyp")


def mp4_boxes(path: Path, rng: random.Random) -> str:
    """The size of a box, its name, or a number in its first part."""
    data = bytearray(path.read_bytes())
    there = [name for name in BOXES if name in data]
    if not there:
        return raw(path, rng)
    name = rng.choice(there)
    at = data.index(name)
    how = rng.choice(("size", "name", "number", "number", "number", "copy"))
    if how == "size":
        data[at - 4 : at] = rng.choice(
            (b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\x09", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff")
        )
    elif how == "name":
        data[at : at + 4] = rng.choice((*BOXES, b"cmov", b"free", b"moof", b"\0\0\0\0"))
    elif how == "number":
        place = at + 4 + 4 * rng.randrange(8)
        numbers = (
            b"\0\0\0\0",
            b"\0\0\0\1",
            b"\0\0\1\0",
            b"\0\x98\x96\x80",
            b"\x7f\xff\xff\xff",
            b"\x80\0\0\0",
            b"\xff\xff\xff\xff",
        )
        data[place : place + 4] = rng.choice(numbers)
    else:
        data[at - 4 : at - 4] = data[at - 4 : at + 60]
    replace_file(path, bytes(data))
    return f"box {name.decode()}: {how}"


def json_values(path: Path, rng: random.Random) -> str:
    content = json.loads(path.read_text())
    done = _change_tree(content, rng)
    replace_file(path, json.dumps(content).encode())
    return done


def json_lines(path: Path, rng: random.Random) -> str:
    lines = path.read_text().splitlines()
    number = rng.randrange(len(lines))
    content = json.loads(lines[number])
    done = _change_tree(content, rng)
    lines[number] = json.dumps(content)
    if rng.random() < 0.2:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
        done += ", a line twice"
    replace_file(path, ("\n".join(lines) + "\n").encode())
    return done


def _change_tree(content: Any, rng: random.Random) -> str:
    """One value somewhere in it, by a walk from the top that may stop anywhere."""
    here, trail = content, "$"
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            return f"{trail}: nothing"
        key = rng.choice(keys)
        trail += f".{key}"
        inner = here[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.85:
            here = inner
            continue
        return f"{trail}: {_change_value(here, key, rng)}"


def _change_value(here: Any, key: Any, rng: random.Random) -> str:
    how = rng.choice(("odd", "odd", "odd", "remove", "near", "rename", "deep"))
    if how == "remove":
        del here[key]
    elif how == "near" and isinstance(here[key], int | float) and not isinstance(here[key], bool):
        here[key] = rng.choice(
            (here[key] + 1, here[key] - 1, -here[key], here[key] * 2, here[key] * 1000, float(here[key]))
        )
    elif how == "rename" and isinstance(here, dict):
        here[rng.choice((f"{key}x", "", "action", "\x1b"))] = here.pop(key)
    elif how == "deep":
        for _ in range(rng.choice((10, 70, 700))):
            here[key] = [here[key]]
    else:
        here[key] = rng.choice(ODD)
    return how


def parquet_values(path: Path, rng: random.Random) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path, use_threads=False)
    name = rng.choice(table.column_names)
    at = table.column_names.index(name)
    values, kind = table.column(name).to_pylist(), table.schema.field(name).type
    how = rng.choice(("cell", "cell", "cell", "drop", "type", "rows", "twice", "order", "null"))
    row = rng.randrange(len(values)) if values else 0
    if how == "drop":
        table = table.drop_columns([name])
    elif how == "rows":
        table = table.slice(0, row)
    elif how == "twice":
        table = pa.concat_tables([table, table.slice(row, 1)])
    elif how == "order":
        rng.shuffle(values)
        table = table.set_column(at, name, pa.array(values, kind))
    elif values:
        values[row] = None if how == "null" else _odd_cell(values[row], rng)
        kind = None if how == "type" else kind
        try:
            table = table.set_column(at, name, pa.array([str(one) for one in values] if kind is None else values, kind))
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            how = "nothing"
    replace_file(path, b"")
    pq.write_table(table, path)
    return f"{name}: {how}"


def _odd_cell(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.7:
        changed = list(value)
        changed[rng.randrange(len(changed))] = _odd_cell(changed[0], rng)
        return changed
    if isinstance(value, list):
        return rng.choice(([], value * 2, value[:-1], value * 100_000))
    if isinstance(value, str):
        return rng.choice(("", "x" * 50_000, "\x1b[2J", value + "x"))
    if isinstance(value, float):
        return rng.choice((float("nan"), float("inf"), 1e30, -value, value + 1e-3, 0.0, 1e9))
    return rng.choice((0, -1, 1, 2**31 - 1, 10**9, 2**62, -(2**63), 99))
