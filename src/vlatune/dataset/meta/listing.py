"""Which files a dataset has, and which its metadata points to.

Every folder is listed once and nothing is asked about single files, so that 10^5 episodes cost as much as their
folders do. Names are relative to the dataset's root, as `DatasetMeta.data_path` gives them.
"""

import difflib
import errno
import os
import posixpath
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.storage.remote_fs import secrets_in
from vlatune.dataset.storage.remote_retry import retried
from vlatune.dataset.storage.root import Root

MAX_DEPTH = 8
"""Folders inside folders; LeRobot's layouts have three. A link that points upwards ends here."""


def list_files(root: Root, folder: str) -> dict[str, int]:
    """Name -> bytes of every file below a folder of the dataset; empty when there is no such folder."""
    found: dict[str, int] = {}
    followed: set[str] = set()
    folders = [(folder, 0)]
    while folders:
        here, depth = folders.pop()
        for name, size in _entries(root, here):
            if size is not None:
                found[name] = size
            elif depth < MAX_DEPTH and _is_new(root, name, followed):
                folders.append((name, depth + 1))
    return found


def _is_new(root: Root, folder: str, followed: set[str]) -> bool:
    """A linked folder is listed once, and only if it lies below the root: links to each other would never end."""
    if not root.is_local or not Path(root.join(folder)).is_symlink():
        return True
    real = os.path.realpath(root.join(folder))
    is_new = real not in followed and Path(real).is_relative_to(os.path.realpath(root.path))
    followed.add(real)
    return is_new


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
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise  # a link to itself leads to no file, either


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


def one_per_file(
    meta: DatasetMeta, camera: str | None = None, positions: Sequence[int] | None = None
) -> tuple[list[int], np.ndarray]:
    """Position of one episode of every file of a camera (of the data files without one), and the file of every episode.

    The second counts over the first: [0, 0, 1] for two files, the first with two episodes.
    """
    episodes = meta.episodes
    span = None if camera is None else episodes.videos[camera]
    chunk, file = (episodes.data_chunk, episodes.data_file) if span is None else (span.chunk, span.file)
    chosen = np.arange(len(episodes)) if positions is None else np.asarray(positions, dtype=np.int64)
    if "{episode_" in meta.templates["data_path" if camera is None else "video_path"]:  # a file for each
        return chosen.tolist(), np.arange(len(chosen))
    _, first, group = np.unique(np.stack([chunk, file])[:, chosen], axis=1, return_index=True, return_inverse=True)
    return chosen[first].tolist(), group.reshape(-1)


def check_present(meta: DatasetMeta, cameras: Sequence[str], positions: Sequence[int]) -> None:
    """Refuse episodes whose files are not there, from a listing of the folders; `cameras` are those with videos."""
    wanted = {meta.data_path(at): None for at in one_per_file(meta, None, positions)[0]}
    for camera in cameras:
        wanted |= {meta.video_path(at, camera): camera for at in one_per_file(meta, camera, positions)[0]}
    folders = {top_folder(meta.templates["data_path"])} | (
        {top_folder(meta.templates["video_path"])} if cameras else set()
    )
    present = {name for folder in folders for name in list_files(meta.root, folder)}
    missing = [name for name in wanted if name not in present]
    if missing:
        camera = wanted[missing[0]]
        whose = f", camera '{camera}'" if camera else ""
        raise ValueError(
            f"dataset '{meta.root.url}'{whose}: {missing[0]} is missing, one of {len(missing)} missing files; "
            f"{missing_remedy(meta.root, missing[0])}"
        )


def missing_remedy(root: Root, name: str) -> str:
    """What would bring a missing file back: a folder of another name, or fetching it."""
    folder = name.partition("/")[0]
    renamed = folder_remedy(folder, [entry for entry, size in _entries(root, "") if size is None])
    return renamed or "fetch it, or leave bad episodes out with on_bad_episode=skip"


def folder_remedy(folder: str, folders: Collection[str]) -> str:
    """What to do when a dataset has folders, but not this one; empty when it has it, or no likely other."""
    others = sorted(set(folders) - {"meta", "data", "videos", folder})
    if not folder or folder in folders or not others:
        return ""
    close = difflib.get_close_matches(folder, others, n=1)
    other = f"{close[0]}/" if close else f"the folder that holds its files (of {', '.join(others[:10])})"
    return f"there is no folder {folder}/: rename {other} to {folder}/, or correct the path in meta/info.json"
