"""List the files of a dataset and find the files that its metadata refers to.

Every folder is listed once instead of querying single files, which is fast for many episodes. Names
are relative to the dataset's root, as in `DatasetMeta.data_path`.
"""

import difflib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.data.meta.meta_info import LEAVE_OUT
from vlatune.storage.root import Root

MAX_DEPTH = 8
"""Maximum folder depth; LeRobot's layouts have three levels, and cyclic links end here."""


def list_files(root: Root, folder: str) -> dict[str, int]:
    """Map every file below a folder to its size, except hidden ones; empty if the folder does not exist."""
    found: dict[str, int] = {}
    followed: set[str] = set()
    folders = [(folder, 0)]
    while folders:
        here, depth = folders.pop()
        for entry, size in root.entries(here).items():
            name = f"{here}/{entry}" if here else entry
            if entry.startswith("."):
                continue
            if size is not None:
                found[name] = size
            elif depth < MAX_DEPTH and _is_new(root, name, followed):
                folders.append((name, depth + 1))
    return found


def _is_new(root: Root, folder: str, followed: set[str]) -> bool:
    """True unless the folder is a link that was already followed or that leaves the root."""
    if not root.is_local or not Path(root.join(folder)).is_symlink():
        return True
    real = os.path.realpath(root.join(folder))
    is_new = real not in followed and Path(real).is_relative_to(os.path.realpath(root.path))
    followed.add(real)
    return is_new


def top_folder(template: str) -> str:
    """Return the folder that contains all files of a path template; empty if it is the root.

    "videos/{video_key}/file-{file_index:03d}.mp4" -> "videos"
    """
    first, _, rest = template.partition("/")
    return first if rest and "{" not in first else ""


def one_per_file(
    meta: DatasetMeta, camera: str | None = None, positions: Sequence[int] | None = None
) -> tuple[list[int], np.ndarray]:
    """Return the position of one episode per file, and the file number of every episode.

    The files are a camera's mp4 files, or without a camera the data files. File numbers index the first list:
    [0, 0, 1] for two files, the first with two episodes.
    """
    episodes = meta.episodes
    span = None if camera is None else episodes.videos[camera]
    chunk, file = (episodes.data_chunk, episodes.data_file) if span is None else (span.chunk, span.file)
    chosen = np.arange(len(episodes)) if positions is None else np.asarray(positions, dtype=np.int64)
    if "{episode_" in meta.templates["data_path" if camera is None else "video_path"]:  # one file per episode
        return chosen.tolist(), np.arange(len(chosen))
    _, first, group = np.unique(np.stack([chunk, file])[:, chosen], axis=1, return_index=True, return_inverse=True)
    return chosen[first].tolist(), group.reshape(-1)


def by_file(meta: DatasetMeta, camera: str | None, positions: Sequence[int]) -> list[list[int]]:
    """Group the positions of episodes by their data file, or by their mp4 file of a camera."""
    files, group = one_per_file(meta, camera, positions)
    groups: list[list[int]] = [[] for _ in files]
    for position, file in zip(positions, group.tolist(), strict=True):
        groups[file].append(position)
    return groups


def check_present(meta: DatasetMeta, cameras: Sequence[str], positions: Sequence[int]) -> None:
    """Reject episodes with missing files; `cameras` are those with videos."""
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
        of_kind = [name for name, one in wanted.items() if one == camera]
        number = f"one of {len(missing)} missing files" if len(missing) > 1 else "the only missing file"
        remedy = f"fetch it, or {LEAVE_OUT}"
        if not any(name in present for name in of_kind):
            number, remedy = f"as are all {len(of_kind)} of its files", "fetch them"
        folders = [name for name, size in meta.root.entries().items() if size is None and not name.startswith(".")]
        remedy = folder_remedy(missing[0].partition("/")[0], folders) or remedy
        raise ValueError(f"dataset '{meta.root.url}'{whose}: {missing[0]} is missing, {number}; {remedy}")


def folder_remedy(folder: str, folders: Collection[str]) -> str:
    """Return which folder to rename to `folder`; empty if it exists or nothing is similar."""
    others = sorted(set(folders) - {"meta", "data", "videos", folder})
    if not folder or folder in folders or not others:
        return ""
    close = difflib.get_close_matches(folder, others, n=1)
    other = f"{close[0]}/" if close else f"the folder that holds its files (of {', '.join(others[:10])})"
    return f"there is no folder {folder}/: rename {other} to {folder}/, or correct the path in meta/info.json"
