"""Makers of files that ask for too much, and of numbers that nothing can be learnt from."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from place import Make, Place

INFO, TASKS, EPISODES = "meta/info.json", "meta/tasks.parquet", "meta/episodes/chunk-000/file-000.parquet"
DATA, VIDEO = "data/chunk-000/file-000.parquet", "videos/observation.images.top/chunk-000/file-000.mp4"


def column(file: str, name: str, change: Callable[[list[Any]], Any], *, kind: Any = None) -> Make:
    """A parquet file of the dataset with one column changed; `change` gets its values and may return others."""

    def make(place: Place) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = place.dataset / file
        table = pq.read_table(path)
        values = table.column(name).to_pylist()
        values = change(values) or values
        at = table.column_names.index(name)
        array = pa.array(values, kind or table.schema.field(name).type)
        pq.write_table(table.set_column(at, name, array), path)

    return make


def at(row: int, dim: int, value: float) -> Callable[[list[Any]], None]:
    return lambda rows: rows[row].__setitem__(dim, value)


def table(file: str, columns: Callable[[], dict[str, Any]]) -> Make:
    """A parquet file in the place of the dataset's, as small as it can be written."""

    def make(place: Place) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns()), place.dataset / file, compression="zstd", compression_level=9)

    return make


def a_list_of(count: int) -> dict[str, Any]:
    """One row whose list has so many equal values: a few bytes of run lengths."""
    import numpy as np
    import pyarrow as pa

    values = pa.array(np.zeros(count, np.bool_))  # the smallest to write; it is not read
    one = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)
    names = ("index", "episode_index", "frame_index", "task_index")
    return {
        **{name: [0] for name in names},
        "timestamp": pa.array([0.0], pa.float32()),
        "action": one,
        "observation.state": [[0.0]],
    }


def a_sentence_of(chars: int) -> dict[str, Any]:
    return {"task_index": [0], "task": ["x" * chars]}


def rows_of(count: int) -> dict[str, Any]:
    import numpy as np

    zeros = np.zeros(count, np.int8)
    return {"index": zeros}


def line(file: str, text: Callable[[], str]) -> Make:
    def make(place: Place) -> None:
        (place.older / file).write_text(text())

    return make


def json_text(which: str, file: str, text: str) -> Make:
    def make(place: Place) -> None:
        (getattr(place, which) / file).write_text(text)

    return make


def stats_of(width: int) -> Make:
    def make(place: Place) -> None:
        path = place.dataset / "meta/stats.json"
        stats = json.loads(path.read_text())
        stats["action"] = {name: (values * 9)[:width] for name, values in stats["action"].items()}
        path.write_text(json.dumps(stats))

    return make


def updated_camera(shape: list[int]) -> Make:
    def make(place: Place) -> None:
        info = json.loads((place.dataset / INFO).read_text())
        info["features"]["observation.images.top"]["shape"] = shape
        (place.dataset / INFO).write_text(json.dumps(info))

    return make


def claiming_frames(count: int) -> Make:
    """An mp4 file whose table of sizes says that it has so many frames, all of one size."""

    def make(place: Place) -> None:
        path = place.dataset / VIDEO
        data = bytearray(path.read_bytes())
        box = data.index(b"stsz")
        data[box + 8 : box + 16] = struct.pack(">II", 1, count)
        path.write_bytes(data)

    return make


def normalisers(count: int, content: str = "aa") -> Make:
    """Each makes two letters out of one: forty of them make a tera of it."""

    def make(place: Place) -> None:
        path = place.base / "tokenizer/tokenizer.json"
        raw = json.loads(path.read_text())
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
        raw["normalizer"] = {"type": "Sequence", "normalizers": [step] * count}
        path.write_text(json.dumps(raw))

    return make


def a_png_of(side: int) -> bytes:
    """Black, in a few kB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, row = zlib.compressobj(9), bytes(1 + 3 * side)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def damaged_after_checksums(file: str, change: Callable[[Path], None]) -> Make:
    """The checksums are written down, then a file changes."""

    def make(place: Place) -> None:
        from vlatune import cli

        assert cli.main(["inspect", str(place.dataset), "--write_checksums=true"]) == 0
        change(place.dataset / file)

    return make


def one_byte(path: Path) -> None:
    """In the middle, where values or pictures are."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def understated(make: Make, file: str, column: str, what: str) -> Make:
    """The footer says 1 of a column where it says more; the pages stay. `what` as pyarrow calls it: num_values, ..."""

    def change(place: Place) -> None:
        import pyarrow.parquet as pq

        make(place)
        path = place.dataset / file
        group = pq.read_metadata(path).row_group(0)
        chunks = [group.column(number) for number in range(group.num_columns)]
        told = next(getattr(one, what) for one in chunks if f"{one.path_in_schema}.".startswith(f"{column}."))
        data, true = path.read_bytes(), _varint(2 * told)
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        assert true in data[footer:]
        path.write_bytes(data[:footer] + data[footer:].replace(true, _varint(2, len(true))))

    return change


def _varint(value: int, length: int = 0) -> bytes:
    """Seven bits a byte, the lowest first; zeros fill it up to a length."""
    parts = []
    while value or not parts or len(parts) < length:
        parts.append(value & 127)
        value >>= 7
    return bytes([*(part | 128 for part in parts[:-1]), parts[-1]])


def a_group_without_end(path: Path, frames: int) -> None:
    """A video with one key frame, at its begin: whoever wants the last frame decodes all of them."""
    import av
    import numpy as np

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 96
        stream.codec_context.gop_size = 10**6
        for number in range(frames):
            picture = np.full((96, 96, 3), number % 200, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def renamed_camera(dataset: Path, new: str, old: str = "observation.images.wrist") -> None:
    """A camera by another name, in all of the dataset's files."""
    import pyarrow.parquet as pq

    (dataset / "videos" / old).rename(dataset / "videos" / new)
    for file in (dataset / INFO, dataset / "meta/stats.json"):
        content = json.loads(file.read_text())
        holder = content.get("features", content)
        holder[new] = holder.pop(old)
        file.write_text(json.dumps(content))
    for file in (dataset / "meta/episodes").rglob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([name.replace(old, new) for name in table.column_names]), file)


def swapped_lines(file: str, key: str) -> Make:
    """The values of one key of a file of JSON lines, in the opposite order."""

    def make(place: Place) -> None:
        path = place.older / file
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, value in zip(rows, [row[key] for row in rows][::-1], strict=True):
            row[key] = value
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return make
