"""Which files the metadata points to, how many rows or frames each must have, and whether they are there.

Compares the names that the path templates of info.json give with a listing of the folders. Nothing is opened.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.listing import folder_remedy, one_per_file, top_folder
from vlatune.inspect.problems import Problem, with_examples

SUFFIXES = {"data_path": ".parquet", "video_path": ".mp4"}


def file_problems(
    meta: DatasetMeta, which: str, wanted: Sequence[str], present: Mapping[str, int], folders: Collection[str]
) -> list[Problem]:
    """Missing and stray files of one kind; `which` is data_path or video_path, `folders` those at the top."""
    missing = [name for name in wanted if name not in present]
    known = set(wanted)
    stray = [name for name in present if name.endswith(SUFFIXES[which]) and name not in known]
    return [
        *with_examples(
            "error",
            missing,
            place=f"{top_folder(meta.templates[which]) or '.'}/",
            found=f"{len(missing):,} of {len(wanted):,} {SUFFIXES[which]} files are missing",
            expected=f"the files that {which} of meta/info.json points to: {meta.templates[which]}",
            fix=_remedy(meta.templates[which], which, stray, folders),
        ),
        *with_examples(
            "warning",
            sorted(stray),
            place=f"{top_folder(meta.templates[which]) or '.'}/",
            found=f"{SUFFIXES[which]} files that no episode lies in",
            expected="only files that meta/episodes names",
            fix="remove them, or fetch meta/ anew if it is older than they are",
        ),
    ]


def _remedy(template: str, which: str, stray: Sequence[str], folders: Collection[str]) -> str:
    renamed = folder_remedy(top_folder(template), folders)
    if renamed:
        return f"{renamed}; if none holds them, fetch them"
    if stray:
        return f"files such as {min(stray)} are there: move them, or correct {which} in meta/info.json"
    return "fetch the dataset anew; until then leave the episodes out with --dataset.on_bad_episode=skip"


def data_rows(meta: DatasetMeta) -> dict[str, int]:
    """Data file -> rows that it must have, up to the end of its last episode."""
    positions, group = one_per_file(meta)
    ends = np.zeros(len(positions), dtype=np.int64)
    np.maximum.at(ends, group, meta.episodes.data_offset + meta.episodes.length)
    return dict(zip((meta.data_path(position) for position in positions), ends.tolist(), strict=True))


def video_files(meta: DatasetMeta, camera: str, *, fps: float) -> dict[str, int]:
    """mp4 file of a camera -> frames that it must have at this rate, up to the last row of its last episode.

    Empty for a camera whose pictures are in the data files.
    """
    if camera not in meta.episodes.videos:
        return {}
    last_s = meta.episodes.videos[camera].from_s + (meta.episodes.length - 1) / meta.fps
    frames = np.round(np.nan_to_num(last_s) * fps).astype(np.int64) + 1
    positions, group = one_per_file(meta, camera)
    most = np.zeros(len(positions), dtype=np.int64)
    np.maximum.at(most, group, frames)
    names = (meta.video_path(position, camera) for position in positions)
    return dict(zip(names, most.tolist(), strict=True))
