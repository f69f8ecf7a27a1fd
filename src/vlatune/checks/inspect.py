"""`vlatune inspect`: facts and findings of datasets as text and JSON, and a training command.

Names and tasks come from the dataset, so unprintable characters, which could move the cursor, are
replaced. `--json` prints the facts and the findings of an `Inspection`; the text shows the same facts.

The command has the roots and the flags that fix findings.
"""

import io
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from vlatune.batch import ACTION, STATE
from vlatune.checks.case import finding_lines
from vlatune.checks.dataset_checks import (
    COMPUTE,
    INFO,
    POLICY,
    SKIP,
    DatasetFiles,
    check_dataset,
    is_normalised,
    read_files,
    select_first,
)
from vlatune.console import printable
from vlatune.data.features import as_flag, own_map, with_names
from vlatune.data.frames.recorded import camera_fps
from vlatune.data.meta.dataset_meta import SUPPORTED, DatasetMeta, Feature, load_meta
from vlatune.data.meta.listing import list_files
from vlatune.data.meta.meta_v21 import EPISODES, read_lines
from vlatune.errors import did_you_mean
from vlatune.findings import Finding, worst
from vlatune.formatting import format_bytes, format_number, format_seconds, plural
from vlatune.registry import recipes_for
from vlatune.storage.files import parse_json
from vlatune.storage.parquet import opened
from vlatune.storage.root import CHECKSUMS, Root, write_checksums

MAX_ROWS = 20
"""Maximum rows of a table; `--json` prints all."""


@dataclass(frozen=True)
class Inspection:
    dataset: str
    findings: tuple[Finding, ...]
    """Failures first."""
    features: Mapping[str, Feature] = field(default_factory=dict)
    """Empty if the metadata is invalid."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values for `--json`; without findings."""

    @property
    def has_failed(self) -> bool:
        return worst(self.findings) == "fail"

    def to_json(self) -> dict[str, Any]:
        return {"dataset": self.dataset, **self.facts, "findings": [one.to_json() for one in self.findings]}


def inspect_dataset(
    root: str,
    *,
    videos: bool = False,
    rename_map: Mapping[str, str] | None = None,
    on_video: Callable[[int, int], None] = lambda done, total: None,
) -> Inspection:
    """Inspect the dataset in a folder or at a URL.

    `on_video` receives the number of opened mp4 files and their total. `rename_map` may contain
    names of other datasets.
    """
    place = Root(root)
    if not place.is_dir():
        raise ValueError(f"dataset '{place.url}': there is no such folder; give a dataset's folder or URL")
    try:
        meta = load_meta(place)
        meta = with_names([meta], own_map(meta, rename_map or {}, {}), what=("--rename_map", "--rename_map"))[0]
        tasks = list(_task_facts(meta))
        files = read_files(meta, every=videos, on_file=on_video)
    except ValueError as error:
        text, _, remedy = " ".join(str(error).split()).removeprefix(f"dataset '{place.url}': ").partition("; ")
        expected = f"the metadata of a LeRobot dataset, {' or '.join(SUPPORTED)}"
        remedy = remedy or "fetch or convert the dataset again"
        return Inspection(place.url, (Finding("fail", "meta", text, expected=expected, remedy=remedy),))
    length = meta.episodes.length
    facts = {
        "version": meta.version,
        "robot_type": parse_json(place.read_bytes(INFO), INFO).get("robot_type"),
        "features": [
            {"name": name, "dtype": one.dtype, "shape": one.shape, "names": one.names, "is_depth": one.is_depth}
            for name, one in meta.features.items()
        ],
        "episodes": {
            "count": len(length),
            "frames": meta.num_frames,
            "fps": meta.fps,
            "duration_s": meta.num_frames / meta.fps,
            "min_length": int(length.min()),
            "median_length": float(np.median(length)),
            "max_length": int(length.max()),
        },
        "tasks": tasks,
        "cameras": [_camera_facts(meta, camera, files) for camera in meta.cameras],
        "stats": {
            name: list(meta.stats.get(name, {}))
            for name, one in meta.features.items()
            if name in meta.stats or is_normalised(name, one)
        },
        "bytes": {kind: sum(present.values()) for kind, present in files.present.items()},
        "has_checksums": CHECKSUMS in files.present["meta"],
    }
    return Inspection(place.url, tuple(check_dataset(meta, files, every=videos)), meta.features, facts)


def _task_facts(meta: DatasetMeta) -> Iterator[dict[str, Any]]:
    """Yield tasks ordered by task_index, then tasks that only episodes list (has_index is False)."""
    counts: Counter[str] = Counter()
    if meta.version == "v2.1":
        for _, row in read_lines(meta.root, EPISODES):
            listed = row.get("tasks")
            counts.update(str(task) for task in (listed if isinstance(listed, list) else []))
    else:
        for name in meta.root.glob("meta/episodes/*/*.parquet"):  # file by file, to limit memory
            with opened(meta.root, name, texts=["tasks"]) as parquet:
                schema = parquet.schema_arrow
                if "tasks" in schema.names and pa.types.is_list(schema.field("tasks").type):
                    tasks: Any
                    for tasks in parquet.read(["tasks"]).column(0).chunks:
                        tasks.validate(full=True)  # may contain bytes that are not valid text
                        for pair in tasks.flatten().value_counts().to_pylist():
                            counts[str(pair["values"])] += pair["counts"]
    known = dict.fromkeys(meta.tasks)
    for task in [*known, *sorted(counts.keys() - known)]:
        yield {"task": task, "episodes": counts[task], "has_index": task in known}


def _camera_facts(meta: DatasetMeta, camera: str, files: DatasetFiles) -> dict[str, Any]:
    """Return the facts of a camera; the first opened mp4 file provides size, codec and fps."""
    feature, sizes = meta.features[camera], files.present_videos(camera)
    video = next((one for one in files.headers[camera] if not one.error), None)
    height, width = (video.height, video.width) if video else feature.height_width
    return {
        "name": camera,
        "kind": feature.dtype,
        "height": height,
        "width": width,
        "codec": video.codec if video else feature.declared("codec"),
        "pixel_format": video.pixel_format if video else feature.declared("pix_fmt"),
        "fps": video.fps if video else camera_fps(meta, camera),
        "files": len(sizes),
        "bytes": sum(sizes.values()),
        "opened": len(files.headers[camera]),
    }


def write_dataset_checksums(found: Inspection) -> str:
    """Write checksums and return a summary; reject datasets that failed."""
    if found.has_failed:
        raise ValueError(f"dataset '{found.dataset}' has errors, so {CHECKSUMS} was not written; fix them first")
    root = Root(found.dataset)
    return f"{CHECKSUMS}: wrote the checksums of {write_checksums(root, list_files(root, '')):,} files"


def inspection_text(found: Inspection, *, width: int) -> str:
    """Return the report; empty sections are left out."""
    sections = _sections(found.facts, width) if found.facts else []
    failed = sum(one.level == "fail" for one in found.findings)
    problems = f"problems: {plural(failed, 'error')}, {plural(len(found.findings) - failed, 'warning')}"
    sections.append(problems if found.findings else "no problems found")
    sections += ["\n".join(finding_lines(one, width, first=f"  {one.level:5}")) for one in found.findings]
    about = [f"LeRobot {found.facts['version']}", found.facts["robot_type"]] if found.facts else []
    title = printable(f"{found.dataset}{f' ({", ".join(str(one) for one in about if one)})' if about else ''}")
    return "\n\n".join([title, *(section for section in sections if section)])


def _sections(facts: Mapping[str, Any], width: int) -> list[str]:
    """Return the tables of the facts."""
    episodes = facts["episodes"]
    median = format_number(episodes["median_length"])
    lengths = {
        "episodes": f"{episodes['count']:,}",
        "frames": f"{episodes['frames']:,}",
        "rate": f"{episodes['fps']:g} fps",
        "duration": format_seconds(episodes["duration_s"]),
        "length": f"{episodes['min_length']} to {episodes['max_length']} frames, median {median}",
    }
    features = [
        [one["name"], one["dtype"], "x".join(map(str, one["shape"])), ", ".join(map(str, one["names"] or ()))]
        for one in facts["features"]
    ]
    tasks = [
        [f"{one['episodes']:,}", one["task"] + ("" if one["has_index"] else " (not in meta/tasks)")]
        for one in facts["tasks"]
    ]
    stats = [[name, " ".join(present) or "none"] for name, present in facts["stats"].items()]
    none = "none, so that corrupt files are not detected; write them with --write_checksums=true"
    disk = {kind: format_bytes(size) for kind, size in facts["bytes"].items()}
    disk["checksums"] = CHECKSUMS if facts["has_checksums"] else none
    heads = ["name", "size", "codec", "pixels", "fps", "files", "bytes"]
    return [
        _table("features", ["name", "dtype", "shape", "names"], features, width),
        _table("episodes", ["", ""], [*lengths.items()], width),
        _table("tasks", ["episodes", "task"], tasks, width),
        _table("cameras", heads, [_camera_row(one) for one in facts["cameras"]], width),
        _table("statistics", ["feature", "present"], stats, width),
        _table("on disk", ["", ""], [*disk.items()], width),
    ]


def _camera_row(one: Mapping[str, Any]) -> list[str]:
    size, fps = f"{one['height']}x{one['width']}", f"{one['fps']:g}"
    if one["kind"] == "image":
        return [one["name"], size, "images", "-", fps, "in data/", "-"]
    source = " (info)" if one["codec"] and not one["opened"] else ""  # no file was opened: from info.json
    codec, pixels = f"{one['codec'] or '-'}{source}", one["pixel_format"] or "-"
    return [one["name"], size, codec, pixels, fps, f"{one['files']:,}", format_bytes(one["bytes"])]


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Format a table without lines and colours, so that it can be piped and pasted."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return ""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=any(header), pad_edge=False)
    columns = [column for column in zip(header, *rows[:MAX_ROWS], strict=True) if any(column[1:])]
    for name, *_ in columns:
        table.add_column(name, overflow="fold")
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=max(width - 2, 40), color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    lines = [f"  {line.rstrip()}" for line in capture.get().splitlines()]
    rest = [f"  and {len(rows) - MAX_ROWS:,} more"] if len(rows) > MAX_ROWS else []
    return "\n".join([title, *lines, *rest])


def check_names(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> None:
    """Reject names that none of the datasets has."""
    known = {name for one in found for name in one.features}
    for name in rename_map:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
            raise ValueError(f"--rename_map: no dataset has a feature '{name}'{hint}")


def train_command(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> str | None:
    """Return a command that trains a tiny model, or None if flags do not fix all failures."""
    findings = [finding for one in found for finding in one.findings]
    has_cameras = all(any(one.is_camera and not one.is_depth for one in each.features.values()) for each in found)
    if not has_cameras or any(one.level == "fail" and not one.flags for one in findings):
        return None
    fixes = {flag for one in findings for flag in one.flags}
    names: dict[str, str] = dict(rename_map)
    for flag in sorted(fixes):
        if flag.startswith("--rename_map="):
            names |= json.loads(flag.partition("=")[2])
    is_used = {ACTION, STATE, *(own for own, name in names.items() if name in (ACTION, STATE))}
    widths: list[dict[str, int]] = [
        {names.get(own, own): one.features[own].shape[0] for own in is_used & one.features.keys()} for one in found
    ]
    widest, mixed = max(dims for each in widths for dims in each.values()), any(one != widths[0] for one in widths)
    wider = recipes_for(widest, small=True, mixed=mixed) if widest > POLICY.max_dims else []
    recipe = wider[0] if wider else POLICY.small_recipe
    words = ["vlatune", "train", f"--recipe={recipe}", *(f"--dataset.root={shlex.quote(one.dataset)}" for one in found)]
    words += [as_flag(names)] if names else []
    if widest > POLICY.max_dims and not wider:
        words += [select_first(each) for each in widths]
    words += [COMPUTE] if COMPUTE in fixes and len(found) == 1 else []  # always computed for several datasets
    words += [SKIP] if SKIP in fixes else []
    text = " ".join(words)
    return text if text.isprintable() else None
