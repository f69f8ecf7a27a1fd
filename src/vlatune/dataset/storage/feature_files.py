"""What a frozen part of a policy makes of each picture, kept in files: raw numbers, a file for some frames of one camera.

    features/manifest.json               what the numbers were made of; a folder of other things is refused
    features/0/1/000012-00003.raw        dataset 0, its camera 1, episode 12, frames 192 to 255: 64 rows, one after the other

Files have numbers for names: a camera's own name is a stranger's. Whole or not there, so what is missing is known from a
listing, and a stage that was killed goes on. Reading holds each file to its exact size and its numbers to be finite.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.dataset.storage.remote_retry import retried
from vlatune.dataset.storage.root import Root
from vlatune.files import RefusedFileError, make_folder, parse_json, refuse_link, write_aside

FEATURES = "features"
"""Folder of a run's features, in the run's own or below --storage_path."""
MANIFEST = "manifest.json"
PART_FRAMES = 64
"""Frames of a file: 8 MB of SmolVLA's in bfloat16, about a second of a GPU's work that a kill can cost."""
BFLOAT16_NOT_FINITE = 0x7F80
"""Exponent bits of bfloat16 that are all set in what is no finite number."""


def features_root(run_dir: Path, storage_path: str | None) -> Root:
    """In the run's folder, or below `storage_path` (a folder or URL) under the run's name, as checkpoints are."""
    folder = run_dir.resolve()
    url = f"{storage_path.rstrip('/')}/{folder.name}/{FEATURES}" if storage_path else str(folder / FEATURES)
    return Root(url, has_checksums=False)


@dataclass(frozen=True)
class FeatureRow:
    """What is kept of one picture."""

    part: str
    """The last part of the policy that has seen it; two may give the same shape."""
    shape: tuple[int, ...]
    dtype: str
    """float32 or bfloat16."""

    @property
    def column_dtype(self) -> np.dtype:
        """numpy has no bfloat16: its bits travel as int16."""
        return np.dtype("<i2" if self.dtype == "bfloat16" else "<f4")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.column_dtype.itemsize

    def is_finite(self, values: np.ndarray) -> bool:
        if self.dtype == "bfloat16":
            return not ((values & BFLOAT16_NOT_FINITE) == BFLOAT16_NOT_FINITE).any()
        return bool(np.isfinite(values).all())


@dataclass(frozen=True)
class FeatureFiles:
    """Those of one camera."""

    root: Root
    """The folder of features."""
    camera: str
    """Folder below it, such as 0/1."""
    row: FeatureRow

    def name(self, episode_index: int, part: int) -> str:
        return f"{self.camera}/{episode_index:06d}-{part:05d}.raw"

    def part_bytes(self, length: int, part: int) -> int:
        """Of a file of an episode of `length` frames."""
        return part_rows(length, part) * self.row.nbytes

    def read_into(self, episode_index: int, length: int, frames: np.ndarray, out: np.ndarray) -> None:
        """Rows of these frames of an episode of `length`, which rise."""
        for part in np.unique(frames // PART_FRAMES).tolist():
            mine = np.flatnonzero(frames // PART_FRAMES == part)
            first, last = frames[mine[0]] % PART_FRAMES, frames[mine[-1]] % PART_FRAMES
            rows = self._read_rows(episode_index, length, part, int(first), int(last) + 1)
            out[mine] = rows[frames[mine] % PART_FRAMES - first]

    def _read_rows(self, episode_index: int, length: int, part: int, begin: int, end: int) -> np.ndarray:
        name, num_bytes = self.name(episode_index, part), self.row.nbytes
        where = f"features '{self.root.url}/{name}'"
        try:
            with self.root.open(name) as file:
                self.check_size(name, file.seek(0, os.SEEK_END), self.part_bytes(length, part))
                file.seek(begin * num_bytes)
                data = file.read((end - begin) * num_bytes)
        except FileNotFoundError:
            raise ValueError(
                f"{where} are gone; start the same command again, which computes what is missing"
            ) from None
        except RefusedFileError as error:
            raise ValueError(str(error)) from None
        self.check_size(name, begin * num_bytes + len(data), end * num_bytes)  # it may have shrunk
        rows = np.frombuffer(data, self.row.column_dtype).reshape(end - begin, *self.row.shape)
        if not self.row.is_finite(rows):
            raise ValueError(
                f"{where}: rows {begin} to {end - 1} hold numbers that are not finite; {_anew(self.root.url)}"
            )
        return rows

    def check_size(self, name: str, num_bytes: int, expected: int) -> None:
        if num_bytes != expected:
            raise ValueError(
                f"features '{self.root.url}/{name}': {num_bytes:,} bytes, expected {expected:,}; {_anew(self.root.url)}"
            )

    def write(self, episode_index: int, part: int, rows: np.ndarray) -> None:
        """A whole file: aside and renamed, or one object."""
        data, name = np.ascontiguousarray(rows, self.row.column_dtype).tobytes(), self.name(episode_index, part)
        _write(self.root, name, data)


def part_rows(length: int, part: int) -> int:
    """Of an episode of `length` frames.

    >>> [part_rows(100, part) for part in range(2)]
    [64, 36]
    """
    return min(PART_FRAMES, length - part * PART_FRAMES)


def num_parts(length: int) -> int:
    return -(-length // PART_FRAMES)


def stored_sizes(root: Root, camera: str) -> dict[str, int]:
    """Name of each file of a camera, as `FeatureFiles.name` gives it -> bytes; what is no regular file is refused."""
    if not root.is_local:
        top, fs = root.join(camera), root.filesystem()
        fs.invalidate_cache(top)
        listed = retried(lambda: fs.find(top, detail=True), f"'{root.url}/{camera}'")
        return {f"{camera}/{name.rpartition('/')[2]}": int(info["size"]) for name, info in listed.items()}
    folder, sizes = _own_folder(root, camera), {}
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if not entry.is_file(follow_symlinks=False):
            kind = "a link" if entry.is_symlink() else "no regular file"
            raise ValueError(f"features '{entry.path}' is {kind}, expected a file of the run's own; {_anew(root.url)}")
        sizes[f"{camera}/{entry.name}"] = entry.stat(follow_symlinks=False).st_size
    return sizes


def remove_leftovers(root: Root, camera: str) -> None:
    """What writers left aside that were killed; only one run writes here."""
    for left in _own_folder(root, camera).glob(".*.aside") if root.is_local else ():
        left.unlink(missing_ok=True)


def open_features(root: Root, made_of: Mapping[str, Any]) -> None:
    """Write down what the folder's numbers are made of, or hold it to what is written there."""
    wanted = json.loads(json.dumps(made_of))
    if not root.exists(MANIFEST):
        _write(root, MANIFEST, (json.dumps(wanted, indent=2) + "\n").encode())
        return
    where = f"features '{root.url}/{MANIFEST}'"
    found = parse_json(root.read_bytes(MANIFEST), where, remedy=_anew(root.url))
    if found == wanted:
        return
    known = found if isinstance(found, dict) else {}
    other = [key for key in sorted(wanted.keys() | known.keys()) if wanted.get(key) != known.get(key)]
    raise ValueError(
        f"{where}: these were made of other things ({', '.join(map(str, other))[:200]}); {_anew(root.url)}"
    )


def free_bytes(root: Root) -> int | None:
    """On the disk that the folder is or will be on; None for an object store."""
    if not root.is_local:
        return None
    folder = Path(root.path).absolute()
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.is_dir())).free


def _own_folder(root: Root, camera: str) -> Path:
    """Of a camera, with no link on the way to it."""
    folder = Path(root.join(camera))
    for one in (Path(root.path), folder.parent, folder):
        refuse_link(one)
    return folder


def _write(root: Root, name: str, data: bytes) -> None:
    full = root.join(name)
    if root.is_local:
        folder, _, _ = name.rpartition("/")
        top = Path(root.path)
        refuse_link(top)
        write_aside(make_folder(top, folder) / Path(full).name, [data])
        return
    fs = root.filesystem()
    retried(lambda: fs.pipe_file(full, data), f"'{root.url}/{name}'")


def _anew(folder: str) -> str:
    return f"remove '{folder}', and the same command computes them anew"
