"""Which files a dataset has, and which its metadata points to.

Every folder is listed once and nothing is asked about single files, so that 10^5 episodes cost as much as their
folders do. Names are relative to the dataset's root, as `DatasetMeta.data_path` gives them.
"""

import os
import posixpath
from collections.abc import Iterator

import numpy as np

from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.remote_retry import retried, secrets_in
from vlatune.dataset.storage import Root

MAX_DEPTH = 8
"""Folders inside folders; LeRobot's layouts have three. A link that points upwards ends here."""


def list_files(root: Root, folder: str) -> dict[str, int]:
    """Name -> bytes of every file below a folder of the dataset; empty when there is no such folder."""
    found: dict[str, int] = {}
    folders = [(folder, 0)]
    while folders:
        here, depth = folders.pop()
        for name, size in _entries(root, here):
            if size is not None:
                found[name] = size
            elif depth < MAX_DEPTH:
                folders.append((name, depth + 1))
    return found


def _entries(root: Root, folder: str) -> Iterator[tuple[str, int | None]]:
    """(name, bytes) of what lies in a folder, None for the bytes of a folder; hidden names are left out."""
    prefix = f"{folder}/" if folder else ""
    for name, size in (_local_entries if root.is_local else _remote_entries)(root, folder):
        if not name.startswith("."):
            yield prefix + name, size


def _local_entries(root: Root, folder: str) -> Iterator[tuple[str, int | None]]:
    try:
        entries = os.scandir(root.join(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            try:
                yield entry.name, None if entry.is_dir() else entry.stat().st_size
            except FileNotFoundError:  # a link whose target is not there, as git-annex leaves them: the file is missing
                continue


def _remote_entries(root: Root, folder: str) -> Iterator[tuple[str, int | None]]:
    fs, full = root.filesystem(), root.join(folder).rstrip("/")
    fs.invalidate_cache(full)
    where = f"'{root.url.rstrip('/')}/{folder}'"
    try:
        listed = retried(lambda: fs.ls(full, detail=True), where, secrets=secrets_in(root.storage_options))
    except FileNotFoundError:
        return
    for entry in listed:
        name = str(entry["name"]).rstrip("/")
        if name != full:  # some stores list a folder as being in itself
            yield posixpath.basename(name), None if entry["type"] == "directory" else int(entry.get("size") or 0)


def top_folder(template: str) -> str:
    """The folder that all files of a path template lie in; empty when that is the root itself.

    "videos/{video_key}/file-{file_index:03d}.mp4" -> "videos"
    """
    first, _, rest = template.partition("/")
    return first if rest and "{" not in first else ""


def data_files(meta: DatasetMeta) -> list[str]:
    """The data files that the episodes lie in, each once."""
    positions, _ = _one_per_file(meta, "data_path", meta.episodes.data_chunk, meta.episodes.data_file)
    return list(dict.fromkeys(meta.data_path(position) for position in positions))


def video_files(meta: DatasetMeta, camera: str, *, fps: float) -> dict[str, int]:
    """mp4 file of a camera -> frames that it must have at this rate, up to the last row of its last episode.

    Empty for a camera whose pictures are in the data files.
    """
    if camera not in meta.episodes.videos:
        return {}
    span = meta.episodes.videos[camera]
    last_s = span.from_s + (meta.episodes.length - 1) / meta.fps
    frames = np.round(np.nan_to_num(last_s) * fps).astype(np.int64) + 1
    positions, group = _one_per_file(meta, "video_path", span.chunk, span.file)
    most = np.zeros(len(positions), dtype=np.int64)
    np.maximum.at(most, group, frames)
    names = (meta.video_path(position, camera) for position in positions)
    return dict(zip(names, most.tolist(), strict=True))


def _one_per_file(meta: DatasetMeta, which: str, chunk: np.ndarray, file: np.ndarray) -> tuple[list[int], np.ndarray]:
    """Position of one episode of every file, and for every episode its place in that list."""
    if "{episode_" in meta.templates[which]:  # a file for each
        return list(range(len(meta.episodes))), np.arange(len(meta.episodes))
    _, first, group = np.unique(np.stack([chunk, file]), axis=1, return_index=True, return_inverse=True)
    return first.tolist(), group.reshape(-1)
