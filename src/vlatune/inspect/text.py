"""An `Inspection` as tables for people, no wider than the terminal.

Names and sentences come from the dataset, so everything that is not printable is replaced: a task must not be able to
move the cursor. rich lays out the columns; no colours, no lines, so that the text can be piped and pasted.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence

from vlatune.inspect.facts import CameraFacts, EpisodeFacts, StatsFacts
from vlatune.inspect.inspection import Inspection
from vlatune.inspect.problems import Problem
from vlatune.outgoing import printable
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
