"""Whether the files are where meta/ says, and whether the rows' task numbers have sentences.

Compares the names that the path templates of info.json give with a listing of the folders (files.py); of the
data files, only the first is opened, for one column of it.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from vlatune.dataset.meta import DatasetMeta
from vlatune.dataset.tables import read_columns
from vlatune.inspect.files import top_folder
from vlatune.inspect.problems import MAX_EXAMPLES, Problem, with_examples

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
    folder = top_folder(template)
    others = sorted(set(folders) - {"meta", folder})
    if folder and folder not in folders and others:
        close = difflib.get_close_matches(folder, others, n=1)
        other = f"{close[0]}/" if close else f"the folder that holds them (of {', '.join(others[:MAX_EXAMPLES])})"
        return f"rename {other} to {folder}/, or correct {which} in meta/info.json; if none holds them, fetch them"
    if stray:
        return f"files such as {min(stray)} are there: move them, or correct {which} in meta/info.json"
    return "fetch the dataset anew; leave the episodes out with --dataset.episodes until then"


def task_problems(meta: DatasetMeta, file: str) -> list[Problem]:
    """Rows of one data file whose task_index has no sentence."""
    try:
        task_index = read_columns(meta.root, file, ["task_index"])["task_index"].reshape(-1)
    except ValueError as error:
        return [refusal(error, meta.root.url, place=file, expected="a data file with a task_index for every row")]
    numbers, rows = np.unique(task_index, return_counts=True)
    bad = (numbers < 0) | (numbers >= len(meta.tasks))
    return with_examples(
        "error",
        [f"task_index {number}: {count} rows" for number, count in zip(numbers[bad], rows[bad], strict=True)],
        place=file,
        found="rows whose task_index has no sentence",
        expected=f"0 to {len(meta.tasks) - 1}, as meta/tasks lists",
        fix="add the sentences to meta/tasks, or fetch meta/ anew",
    )


def refusal(error: Exception, url: str, *, place: str, expected: str) -> Problem:
    """An error of the reading code as a problem: our messages say what was found, then what to do."""
    text = " ".join(str(error).split()).removeprefix(f"dataset '{url}': ").removeprefix(f"{place} ")
    if not isinstance(error, ValueError):
        text = f"{type(error).__name__}: {text}"
    found, _, fix = text.partition("; ")
    return Problem("error", place=place, found=found, expected=expected, fix=fix or "fetch or convert the dataset anew")
