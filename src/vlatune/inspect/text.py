"""An `Inspection` as tables for people, no wider than the terminal.

Names and sentences come from the dataset, so everything that is not printable is replaced: a task must not be able to
move the cursor. rich lays out the columns; no colours, no lines, so that the text can be piped and pasted.

Below them the command that trains on what was inspected: roots, the map of names that they need, the statistics to take.
Names of cameras that differ between datasets are paired in their order, which is a guess that the text names.
"""

import io
import json
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from vlatune.batch import ACTION, STATE
from vlatune.console import printable
from vlatune.dataset.features import RESERVED, as_flag, camera_name, likely_name
from vlatune.errors import did_you_mean
from vlatune.inspect.inspection import CameraFacts, EpisodeFacts, FeatureFacts, Inspection, StatsFacts
from vlatune.inspect.problems import COMPUTE, RENAME, Problem
from vlatune.report.formatting import format_bytes, format_number, format_seconds, plural

MAX_ROWS = 20
"""Lines of a table; the rest is counted. `--json` has them all."""


def inspection_text(found: Inspection, *, width: int) -> str:
    """The whole report; sections without content are left out."""
    sections = [
        _table("features", ["name", "dtype", "shape", "names"], _feature_rows(found), width),
        _table("episodes", ["", ""], _episode_rows(found.episodes), width),
        _table("tasks", ["episodes", "task"], _task_rows(found), width),
        _table("cameras", ["name", "size", "codec", "pixels", "fps", "files", "bytes"], _camera_rows(found), width),
        _table("statistics", ["feature", "present", "not finite", "never changes"], _stats_rows(found), width),
        _table("on disk", ["", ""], [[kind, format_bytes(size)] for kind, size in found.bytes.items()], width),
        _problems(found.problems, width),
    ]
    return "\n\n".join([_title(found), *(section for section in sections if section)])


def _title(found: Inspection) -> str:
    kind = ", ".join(str(one) for one in (found.version and f"LeRobot {found.version}", found.robot_type) if one)
    return printable(f"{found.dataset}{f' ({kind})' if kind else ''}")


def _feature_rows(found: Inspection) -> list[list[str]]:
    return [
        [one.name, one.dtype, "x".join(map(str, one.shape)), ", ".join(map(str, one.names or ()))]
        for one in found.features
    ]


def _episode_rows(episodes: EpisodeFacts | None) -> list[list[str]]:
    if episodes is None:
        return []
    rows = [
        ["episodes", f"{episodes.count:,}"],
        ["frames", f"{episodes.frames:,}"],
        ["rate", f"{episodes.fps:g} fps"],
        ["duration", format_seconds(episodes.duration_s)],
    ]
    if episodes.median_length is not None:
        shortest, median, longest = episodes.min_length, format_number(episodes.median_length), episodes.max_length
        rows.append(["length", f"{shortest} to {longest} frames, median {median}"])
    return rows


def _task_rows(found: Inspection) -> list[list[str]]:
    return [[f"{one.episodes:,}", one.task + ("" if one.has_index else " (not in meta/tasks)")] for one in found.tasks]


def _camera_rows(found: Inspection) -> list[list[str]]:
    return [_camera_row(one) for one in found.cameras]


def _camera_row(one: CameraFacts) -> list[str]:
    size, fps = f"{one.height}x{one.width}", f"{one.fps:g}"
    if one.kind == "image":
        return [one.name, size, "images", "-", fps, "in data/", "-"]
    source = " (info)" if one.codec and not one.opened else ""  # no file was opened: what info.json says
    codec, pixels = f"{one.codec or '-'}{source}", one.pixel_format or "-"
    return [one.name, size, codec, pixels, fps, f"{one.files:,}", format_bytes(one.bytes)]


def _stats_rows(found: Inspection) -> list[list[str]]:
    return [_stats_row(one) for one in found.stats]


def _stats_row(one: StatsFacts) -> list[str]:
    return [one.feature, " ".join(one.present) or "none", _dims(one.nan_dims), _dims(one.degenerate_dims)]


def _dims(dims: Sequence[str]) -> str:
    more = f", and {len(dims) - MAX_ROWS} more" if len(dims) > MAX_ROWS else ""
    return ", ".join(dims[:MAX_ROWS]) + more


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
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


def _problems(problems: Sequence[Problem], width: int) -> str:
    if not problems:
        return "no problems found"
    errors = sum(problem.severity == "error" for problem in problems)
    title = f"problems: {plural(errors, 'error')}, {plural(len(problems) - errors, 'warning')}"
    return "\n\n".join([title, *("\n".join(_problem_lines(problem, width)) for problem in problems)])


def _problem_lines(problem: Problem, width: int) -> Iterable[str]:
    yield from _wrapped(f"{problem.severity}: {problem.place}: {problem.found}", width, first="  ", rest="      ")
    for example in problem.examples:
        yield from _wrapped(example, width, first="      - ", rest="        ")
    if problem.count > len(problem.examples) > 0:
        yield f"      - and {problem.count - len(problem.examples):,} more"
    yield from _wrapped(f"expected: {problem.expected}", width, first="      ", rest="        ")
    yield from _wrapped(f"fix: {problem.fix}", width, first="      ", rest="        ")


def _wrapped(text: str, width: int, *, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text), max(width, 40), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


type Names = dict[str, str]


def check_names(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> None:
    """Refuse a name that none of the datasets has."""
    known = {feature.name for one in found for feature in one.features}
    for name in rename_map:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known))}"
            raise ValueError(f"--rename_map: no dataset has a feature '{name}'{hint}")


def command_text(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> str:
    """The command in one line, to be copied, and what in it is a guess; empty where none would train."""
    command = train_command(found, rename_map)
    if command is None:
        return ""
    lines = ["a small model trains on it, on a CPU too, with:", f"  {command}"]
    for names, one in zip(_all_maps(found, rename_map) or [], found, strict=True):
        lines += _guesses(names, one, found[0], rename_map)
    return "\n".join(lines)


def train_command(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> str | None:
    """None where something other than names is in the way."""
    maps = _all_maps(found, rename_map)
    in_the_way = [p for one in found for p in one.problems if p.severity == "error" and p.flag != RENAME]
    if maps is None or in_the_way or any(one.episodes is None for one in found):
        return None
    words = ["vlatune", "train", "--recipe=tiny", *(f"--dataset.root={shlex.quote(one.dataset)}" for one in found)]
    words += _map_flags(found, maps)
    if len(found) == 1 and any(
        problem.flag == COMPUTE for problem in found[0].problems
    ):  # of several datasets they are computed anyway
        words.append(COMPUTE)
    text = " ".join(words)
    return text if text.isprintable() else None


def _all_maps(found: Sequence[Inspection], rename_map: Mapping[str, str]) -> list[Names] | None:
    """For each dataset the names that it needs; None where an action, a state or a camera is nowhere to be seen."""
    maps: list[Names] = []
    for one in found:
        names = _own_map(one.features, rename_map)
        if names is None:
            return None
        maps.append(names)
    targets = _cameras(found[0], maps[0]).values()
    for one, names in zip(found[1:], maps[1:], strict=True):
        mine = _cameras(one, names)
        unmatched = [own for own, name in mine.items() if name not in targets and own not in rename_map]
        free = [name for name in targets if name not in mine.values()]
        names |= dict(zip(unmatched, free, strict=False))
    return maps


def _own_map(features: Sequence[FeatureFacts], rename_map: Mapping[str, str]) -> Names | None:
    names = {one.name: rename_map[one.name] for one in features if one.name in rename_map}
    taken = {names.get(one.name, one.name) for one in features}
    vectors = [one.name for one in features if not one.is_camera and one.name not in RESERVED and one.name not in names]
    for key in (ACTION, STATE):
        if key not in taken:
            likely = likely_name(key, vectors)
            if likely is None:
                return None
            names[likely] = key
    for one in features:
        wanted = camera_name(one.name)
        if one.is_camera and not one.is_depth and one.name not in names and wanted not in taken:
            names[one.name] = wanted
            taken.add(wanted)
    return names if any(one.is_camera and not one.is_depth for one in features) else None


def _cameras(one: Inspection, names: Names) -> Names:
    """Own name -> delivered name of the colour cameras."""
    return {f.name: names.get(f.name, f.name) for f in one.features if f.is_camera and not f.is_depth}


def _map_flags(found: Sequence[Inspection], maps: Sequence[Names]) -> list[str]:
    """One map for all where the datasets' names do not contradict each other, else one for each."""
    if not any(maps):
        return []
    common = {own: name for names in maps for own, name in names.items()}
    features = [[feature.name for feature in one.features] for one in found]
    if all(
        {own: common[own] for own in each if own in common} == names for each, names in zip(features, maps, strict=True)
    ):
        return [as_flag(common)]
    return [as_flag(names, "--dataset.rename_map") for names in maps]


def _guesses(names: Names, one: Inspection, first: Inspection, rename_map: Mapping[str, str]) -> list[str]:
    if one is first:
        return []
    return [
        f"  a guess: {json.dumps(own)} of {shlex.quote(one.dataset)} shows what {json.dumps(name)} of "
        f"{shlex.quote(first.dataset)} does; correct the map if not"
        for own, name in _cameras(one, names).items()
        if own not in rename_map and name != camera_name(own)
    ]
