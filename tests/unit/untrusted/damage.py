"""Ways to damage a dataset, policy or run folder. Each function returns `damage(folder)`."""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Damage = Callable[[Path], None]
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
CAMERA = "observation.images.top"
VIDEO = f"videos/{CAMERA}/chunk-000/file-000.mp4"
CHECKPOINT = "checkpoints/00000002"
ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"
"""Sets a terminal's title, clears it, and reverses the direction of writing."""


def link_out(name: str) -> Damage:
    """Replace a file by a link to the same content in `outside`, next to the folder."""

    def damage(folder: Path) -> None:
        path, outside = folder / name, folder.parent / "outside"
        target = outside / path.name
        if path.exists():
            shutil.move(path, target)
        else:
            target = outside / "secret.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    return damage


def replace(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return damage


def fifo(name: str) -> Damage:
    return replace(name, os.mkfifo)


def link_to(name: str, target: str) -> Damage:
    return replace(name, lambda path: path.symlink_to(target))


def text(name: str, content: str) -> Damage:
    return replace(name, lambda path: path.write_text(content))


def remove(name: str) -> Damage:
    return replace(name, lambda _: None)


def truncate(name: str, share: float) -> Damage:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def flip_bit(name: str) -> Damage:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return damage


def edit(name: str, change: Callable[[Any], object]) -> Damage:
    """Change the content of a JSON file in place."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def update(name: str, **values: Any) -> Damage:
    return edit(name, lambda content: content.update(values))


def feature(name: str, **values: Any) -> Damage:
    return edit(INFO, lambda info: info["features"][name].update(values))


def rename_feature(old: str, new: str) -> Damage:
    return edit(INFO, lambda info: info["features"].update({new: info["features"].pop(old)}))


def column(file: str, name: str, change: Callable[[list[Any]], Any], kind: pa.DataType | None = None) -> Damage:
    """Replace the values of a parquet column by `change(values)`."""

    def damage(folder: Path) -> None:
        table = pq.read_table(folder / file)
        values = pa.array(change(table.column(name).to_pylist()), kind or table.schema.field(name).type)
        pq.write_table(table.set_column(table.column_names.index(name), name, values), folder / file)

    return damage


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    """Return a change that replaces the first row."""
    return lambda rows: [value, *rows[1:]]


def number(row: int, dim: int, value: float) -> Callable[[list[Any]], list[Any]]:
    """Return a change that replaces one number of a row."""

    def change(rows: list[Any]) -> list[Any]:
        rows[row][dim] = value
        return rows

    return change


def drop_column(file: str, name: str) -> Damage:
    return lambda folder: pq.write_table(pq.read_table(folder / file).drop_columns([name]), folder / file)


def keep_rows(file: str, count: int) -> Damage:
    return lambda folder: pq.write_table(pq.read_table(folder / file).slice(0, count), folder / file)


def table(file: str, make: Callable[[], dict[str, Any]]) -> Damage:
    return lambda folder: pq.write_table(pa.table(make()), folder / file, compression="zstd", compression_level=9)


def long_list(count: int) -> dict[str, Any]:
    """Return one row whose action has so many values; in a file they take a few bytes."""
    values = pa.array(np.zeros(count, np.bool_))
    action = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)
    numbers = {name: [0] for name in ("index", "episode_index", "frame_index", "task_index")}
    return {**numbers, "timestamp": pa.array([0.0], pa.float32()), "action": action, "observation.state": [[0.0]]}


def long_task(chars: int) -> dict[str, Any]:
    return {"task_index": [0], "task": ["x" * chars]}


def understate(file: str, name: str, what: str) -> Damage:
    """Make the footer state 1 for a column's `what` (num_values, total_uncompressed_size); its pages stay."""

    def damage(folder: Path) -> None:
        group = pq.read_metadata(folder / file).row_group(0)
        chunks = [group.column(at) for at in range(group.num_columns)]
        stated = next(getattr(one, what) for one in chunks if f"{one.path_in_schema}.".startswith(f"{name}."))
        data, old = (folder / file).read_bytes(), _varint(2 * stated)
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        assert old in data[footer:]
        (folder / file).write_bytes(data[:footer] + data[footer:].replace(old, _varint(2, len(old))))

    return damage


def _varint(value: int, length: int = 0) -> bytes:
    parts = []
    while value or not parts or len(parts) < length:
        parts.append(value & 127)
        value >>= 7
    return bytes([*(part | 128 for part in parts[:-1]), parts[-1]])


def claim_frames(count: int) -> Damage:
    """Make the mp4 header claim so many frames."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / VIDEO).read_bytes())
        box = data.index(b"stsz")
        data[box + 8 : box + 16] = struct.pack(">II", 1, count)
        (folder / VIDEO).write_bytes(data)

    return damage


def large_image(side: int) -> Damage:
    """Store a camera's images in the data files; the first is black, `side` pixels wide and high, in a few kB."""

    def damage(folder: Path) -> None:
        feature(CAMERA, dtype="image")(folder)
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        for file in sorted((folder / "data").rglob("*.parquet")):
            rows = pq.read_table(file)
            sides = [side if file.name == "file-000.parquet" else 96] + [96] * (len(rows) - 1)
            images = pa.array([{"bytes": _black_png(one), "path": None} for one in sides], kind)
            pq.write_table(rows.append_column(CAMERA, images), file)

    return damage


def _black_png(side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + 3 * side)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def processor_step(name: str, step: dict[str, Any]) -> Damage:
    return edit(name, lambda content: content["steps"].append(step))


def normalizers(count: int, content: str) -> Damage:
    """Give the tokenizer so many normalizers that each replace an 'a' by `content`."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return update("tokenizer/tokenizer.json", normalizer={"type": "Sequence", "normalizers": [step] * count})


def with_new_hashes(damage: Damage) -> Damage:
    """Recompute the manifest of the run's checkpoint afterwards, as an attacker would."""

    def damage_and_hash(run: Path) -> None:
        damage(run)
        folder = run / CHECKPOINT
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
        data = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        files = {name: {"bytes": len(one), "sha256": sha256(one).hexdigest()} for name, one in data.items()}
        update(f"{CHECKPOINT}/manifest.json", files=files)(run)

    return damage_and_hash
