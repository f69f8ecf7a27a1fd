"""The data files, held against meta/: readable, long enough, with the declared columns and types, rows in order.

Of many files only the footers are read, in threads; of the first one also the columns that every dataset has, and state and
action, held against the statistics: shares outside, values that never change or are no numbers. A file that cannot be read
is a finding, not a failure.

Which files must be there, and how many rows or frames each must have, follows from the names that the path templates of
info.json give, held against a listing of the folders.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from vlatune.batch import ACTION, STATE
from vlatune.dataset.features import likely_name, numpy_type
from vlatune.dataset.health.row_checks import (
    INDEX_KINDS,
    check_kinds,
    misplaced,
    not_rising,
    with_other_sentence,
    without_sentence,
)
from vlatune.dataset.health.stats_check import MAX_FILES, MAX_ROWS, RowsSeen, doubts, is_flat, look_at_rows
from vlatune.dataset.meta.dataset_meta import DatasetMeta
from vlatune.dataset.meta.listing import folder_remedy, one_per_file, top_folder
from vlatune.dataset.storage.parquet import opened
from vlatune.dataset.storage.root import Root
from vlatune.dataset.storage.tables import read_columns
from vlatune.inspect.problems import COMPUTE, MAX_EXAMPLES, Problem, dim_name, is_normalised, refusal, with_examples
from vlatune.inspect.videos import Needed

THREADS = 8
FIRST_FILES = 100
"""Data files whose footers are read unless all are asked for."""
PLACE = ("episode_index", "frame_index", "index")
TIME_TOLERANCE_S = 1e-4
"""The reader's own default."""


@dataclass(frozen=True)
class Footer:
    file: str
    num_rows: int = 0
    types: Mapping[str, pa.DataType] | None = None
    error: str = ""
    """Why the file could not be read; nothing else is known then."""


def data_problems(meta: DatasetMeta, files: Mapping[str, int], *, every: bool) -> list[Problem]:
    """`files` are the data files that are there, with the rows that each must have."""
    names = list(files)[: None if every else FIRST_FILES]
    with ThreadPoolExecutor(THREADS) as pool:
        footers = list(pool.map(lambda name: read_footer(meta.root, name), names))
    good = [footer for footer in footers if not footer.error]
    problems = [*_unreadable(footers), *_too_short(good, files), *_columns(meta, good)]
    return problems + (_rows(meta, good[0].file) if good and not problems else [])


def read_footer(root: Root, name: str) -> Footer:
    try:
        with opened(root, name) as parquet:
            schema = parquet.schema_arrow
            return Footer(name, parquet.metadata.num_rows, dict(zip(schema.names, schema.types, strict=True)))
    except ValueError as error:
        return Footer(name, error=" ".join(str(error).split()).removeprefix(f"dataset '{root.url}': "))


def _unreadable(footers: Sequence[Footer]) -> list[Problem]:
    return with_examples(
        "error",
        [footer.error for footer in footers if footer.error],
        place="data files",
        found="files that cannot be read",
        expected="parquet files",
        fix="fetch them anew; a file of some 130 bytes is a Git LFS pointer: run `git lfs pull`",
    )


def _too_short(footers: Sequence[Footer], needed: Mapping[str, int]) -> list[Problem]:
    wrong = [footer for footer in footers if footer.num_rows < needed[footer.file]]
    return with_examples(
        "error",
        [f"{footer.file}: {footer.num_rows} rows, {needed[footer.file]} needed" for footer in wrong],
        place="data files",
        found="files with fewer rows than the episodes in them",
        expected="a row for every frame of meta/episodes",
        fix="fetch the files and meta/ anew",
    )


def _columns(meta: DatasetMeta, footers: Sequence[Footer]) -> list[Problem]:
    """Columns that are missing or of another type than info.json says; a camera with videos has none."""
    expected = {
        name: numpy_type(feature) or feature.dtype
        for name, feature in meta.features.items()
        if feature.dtype != "video"
    }
    expected |= {name: "" for name in INDEX_KINDS if name not in expected}
    missing, other = [], []
    for footer in footers:
        assert footer.types is not None  # it could be read
        for name, dtype in expected.items():
            if name not in footer.types:
                missing.append(f"{footer.file}: '{name}'")
            elif not _is_of(footer.types[name], dtype):
                other.append(f"{footer.file}: '{name}' is {footer.types[name]}, not {meta.features[name].dtype}")
    return [
        *with_examples(
            "error",
            missing,
            place="data files",
            found="columns that meta/info.json names are missing",
            expected="a column for every feature without videos",
            fix="fetch the files anew, or correct the features in meta/info.json",
        ),
        *with_examples(
            "error",
            other,
            place="data files",
            found="columns of another type than meta/info.json says",
            expected="the dtype of the feature, in all files",
            fix="write the files anew with that type, or correct the dtype in meta/info.json if all files have this one",
        ),
    ]


def _is_of(kind: pa.DataType, dtype: str) -> bool:
    """Types that the reader does not know, pictures among them, are left to it."""
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if dtype == "object":
        return pa.types.is_string(kind) or pa.types.is_large_string(kind)
    try:
        return pa.from_numpy_dtype(np.dtype(dtype)) == kind if dtype else True
    except (TypeError, pa.ArrowNotImplementedError):
        return True


def _rows(meta: DatasetMeta, file: str) -> list[Problem]:
    """What the rows of one file say of themselves."""
    try:
        columns = read_columns(meta.root, file, list(INDEX_KINDS))
        check_kinds(f"dataset '{meta.root.url}': {file}", columns)
    except ValueError as error:
        expected = "a data file with an index, a time and a task for every row"
        return [refusal(error, meta.root.url, place=file, expected=expected)]
    return [*_tasks(meta, file, columns["task_index"]), *_episodes(meta, file, columns), *_times(meta, file, columns)]


def _tasks(meta: DatasetMeta, file: str, task_index: np.ndarray) -> list[Problem]:
    numbers, rows = np.unique(task_index, return_counts=True)
    bad = without_sentence(numbers, len(meta.tasks))
    return with_examples(
        "error",
        [f"task_index {number}: {count} rows" for number, count in zip(numbers[bad], rows[bad], strict=True)],
        place=file,
        found="rows whose task_index has no sentence",
        expected=f"0 to {len(meta.tasks) - 1}, as meta/tasks lists",
        fix="add the sentences to meta/tasks, or fetch meta/ anew",
    )


def _episodes(meta: DatasetMeta, file: str, columns: Mapping[str, np.ndarray]) -> list[Problem]:
    """What reading would refuse, episode by episode."""
    wrong, falling, other = np.zeros((3, len(columns["index"])), bool)
    for position in _positions_in(meta, file):
        rows = slice(begin := int(meta.episodes.data_offset[position]), begin + int(meta.episodes.length[position]))
        own = {name: values[rows] for name, values in columns.items()}
        number, from_row = int(meta.episodes.index[position]), int(meta.episodes.from_row[position])
        wrong[rows] = misplaced(own, episode_index=number, from_row=from_row)
        falling[rows] = not_rising(own["timestamp"])
        if meta.episodes.task is not None:
            has_one = ~without_sentence(own["task_index"], len(meta.tasks))
            other[rows] = has_one & with_other_sentence(own["task_index"], int(meta.episodes.task[position]))
    said = {row: ", ".join(f"{name} {columns[name][row]}" for name in PLACE) for row in _first(wrong)}
    return [
        *with_examples(
            "error",
            [f"row {row}: {text}" for row, text in said.items()],
            count=int(wrong.sum()),
            place=file,
            found="rows that are not where meta/episodes places them",
            expected="the episode's index, and index and frame_index that count on by one from its first row",
            fix="fetch the file and meta/ anew, or convert the dataset anew",
        ),
        *with_examples(
            "error",
            [f"row {row}: {columns['timestamp'][row]:.4f} s" for row in _first(falling)],
            count=int(falling.sum()),
            place=file,
            found="timestamps that do not rise within their episode",
            expected="times that rise",
            fix="record or convert these episodes anew",
        ),
        *with_examples(
            "error",
            [f"row {row}: task_index {columns['task_index'][row]}" for row in _first(other)],
            count=int(other.sum()),
            place=file,
            found="rows with another sentence than meta/episodes names beside their episode",
            expected="the task_index that meta/tasks has for that sentence",
            fix="fetch the file and meta/ anew, or correct the one that is wrong",
        ),
    ]


def _first(wrong: np.ndarray) -> list[int]:
    return np.flatnonzero(wrong)[:MAX_EXAMPLES].tolist()


def _positions_in(meta: DatasetMeta, file: str) -> list[int]:
    """The episodes of a data file."""
    first = next(position for position in range(len(meta.episodes)) if meta.data_path(position) == file)
    if meta.version == "v2.1":  # a file for each
        return [first]
    chunk, number = meta.episodes.data_chunk, meta.episodes.data_file
    return np.flatnonzero((chunk == chunk[first]) & (number == number[first])).tolist()


def _times(meta: DatasetMeta, file: str, columns: Mapping[str, np.ndarray]) -> list[Problem]:
    expected_s = columns["frame_index"] / meta.fps
    no_times = np.flatnonzero(~np.isfinite(columns["timestamp"]))
    wrong = np.flatnonzero(~(np.abs(columns["timestamp"] - expected_s) <= TIME_TOLERANCE_S))
    lines = [
        f"row {row}: {columns['timestamp'][row]:.4f} s, not {expected_s[row]:.4f} s"
        for row in wrong[:MAX_EXAMPLES].tolist()
    ]
    of_no_time = with_examples(
        "error",
        [f"row {row}: {columns['timestamp'][row]} s" for row in no_times[:MAX_EXAMPLES].tolist()],
        count=len(no_times),
        place=file,
        found="rows whose timestamp is no finite number",
        expected="seconds that rise from frame to frame",
        fix="record or convert these episodes anew, or leave them out with --dataset.on_bad_episode=skip",
    )
    return of_no_time or with_examples(
        "warning",
        lines,
        count=len(wrong),
        place=file,
        found="rows whose timestamp is not frame_index / fps",
        expected=f"a difference of at most {TIME_TOLERANCE_S:g} s at {meta.fps:g} fps",
        fix="nothing if the frames of the videos have the same times; else correct fps in meta/info.json or record anew",
    )


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


def video_files(meta: DatasetMeta, camera: str, *, fps: float) -> dict[str, Needed]:
    """mp4 file of a camera -> what it must have at this rate, from the first row of its episodes to the last.

    Empty for a camera whose pictures are in the data files.
    """
    if camera not in meta.episodes.videos:
        return {}
    from_s = np.nan_to_num(meta.episodes.videos[camera].from_s)
    frames = np.round((from_s + (meta.episodes.length - 1) / meta.fps) * fps).astype(np.int64) + 1
    positions, group = one_per_file(meta, camera)
    most, begin_s = np.zeros(len(positions), dtype=np.int64), np.full(len(positions), np.inf)
    np.maximum.at(most, group, frames)
    np.minimum.at(begin_s, group, from_s)
    names = (meta.video_path(position, camera) for position in positions)
    return dict(zip(names, map(Needed, most.tolist(), begin_s.tolist()), strict=True))


FIX = f"train with {COMPUTE}, which takes the statistics of all rows"


def row_stats_problems(meta: DatasetMeta, *, every: bool, is_told: bool) -> list[Problem]:
    """Of data files whose footers and first rows are as they should be; `is_told`: why some cannot be read is known."""
    limits = {} if not every else {"max_files": len(meta.episodes), "max_rows": meta.num_frames}
    problems: list[Problem] = []
    for own in _normalised(meta):
        stats = meta.stats.get(own, {})
        try:
            seen = look_at_rows(meta, own, stats, **({"max_files": MAX_FILES, "max_rows": MAX_ROWS} | limits))
        except ValueError as error:  # null values, lists of several lengths: no footer tells of them
            if is_told:
                continue
            place, expected = f"data files, feature '{own}'", "a value of the feature's shape in every row"
            problems.append(refusal(error, meta.root.url, place=place, expected=expected))
            continue
        problems += _of_feature(meta, own, seen) if seen else []
    return problems


def _normalised(meta: DatasetMeta) -> Iterator[str]:
    """Own names of the state and the action, or of what may be them."""
    vectors = [name for name, feature in meta.features.items() if is_normalised(name, feature)]
    for key in (STATE, ACTION):
        own = meta.own(key) if meta.own(key) in vectors else likely_name(key, vectors)
        if own is not None:
            yield own


def _of_feature(meta: DatasetMeta, own: str, seen: RowsSeen) -> list[Problem]:
    feature, stats = meta.features[own], meta.stats.get(own, {})
    looked_at = f"in {'all' if seen.is_all else 'the'} {seen.num_rows:,} rows{'' if seen.is_all else ' looked at'}"
    bad = [f"dim {dim_name(int(dim), feature)}" for dim in np.flatnonzero(~seen.is_finite_D)]
    still_D = (seen.stats["min"] == seen.stats["max"]) & seen.is_finite_D
    if {"q01", "q99"} <= stats.keys() and stats["q01"].shape == still_D.shape:
        still_D &= ~is_flat(stats["q01"], stats["q99"])  # else the statistics have told
    still = [dim_name(int(dim), feature) for dim in np.flatnonzero(still_D)]
    return [
        *with_examples(
            "error",
            [*seen.not_finite[:5], *bad],
            count=len(bad),
            place=f"data files, feature '{own}'",
            found=f"dims with values that are not finite numbers, {looked_at}",
            expected="finite numbers: one that is not ends a run",
            fix="record or convert these episodes anew, or leave them out with --dataset.on_bad_episode=skip",
        ),
        *with_examples(
            "warning",
            still,
            place=f"data files, feature '{own}'",
            found=f"dims that never change, {looked_at}",
            expected="dims that vary",
            fix=f"nothing if the joint was not used; its statistics say that it varies, so {FIX}"
            if stats
            else "nothing if the joint was not used in the recordings",
        ),
        *(
            problem
            for what, dims in doubts(stats, seen, feature.names)
            for problem in with_examples(
                "warning",
                dims,
                place=f"statistics of '{own}'",
                found=f"{what}, {looked_at}",
                expected="statistics of the rows; a policy sees values outside as beyond its scale, a state as cut off at its end",
                fix=f"{FIX}; LeRobot's own are averages of the episodes'",
                flag=COMPUTE,
            )
        ),
    ]
