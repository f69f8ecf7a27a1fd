"""`vlatune bench table FILE...`: what benchmarks have found, beside the bars, as one Markdown table.

A result is the last line of a benchmark, a JSON object; it is looked for in files (those of --output, or whole outputs that were
kept) and in folders of them. Of several results of one benchmark with one policy and configuration the last one counts.
The bars are those that the project has set itself on two idle CPU cores; a figure that was not measured is shown as such.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlatune.bench.harness import last_line
from vlatune.files import parse_json, read_file

MAX_BYTES = 64 * 1024 * 1024
HEADER = ("benchmark", "of", "figure", "measured", "bar", "", "commit", "hardware")
COMMIT_CHARS = 8
Result = Mapping[str, Any]
GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class Bar:
    """What a figure of a benchmark should be."""

    figure: str
    """A key of the result, or two with a slash between them: the quotient."""
    value: float
    at_least: bool = True
    """False: at most."""
    only: tuple[str, ...] = ()
    """Policies, configurations, or `CONFIGURATION of POLICY`, for which it holds; all when left out."""
    is_optional: bool = False
    """Not every result has it: shown where it was measured."""

    def is_met(self, found: float) -> bool:
        return found >= self.value if self.at_least else found <= self.value

    def text(self) -> str:
        return f"{'>=' if self.at_least else '<='} {_number(self.value)}"


def at_most(figure: str, value: float, *only: str, is_optional: bool = False) -> Bar:
    return Bar(figure, value, at_least=False, only=only, is_optional=is_optional)


PINNED = "pinned"
FROZEN = ("expert-balanced", "expert-step")
BARS: Mapping[str, Sequence[Bar]] = {
    "reader": (
        Bar("ours_warm_over_limit", 0.8),
        Bar("ours_over_template", 6),
        Bar("ours_over_ray", 6),
        Bar("ours_over_lerobot", 3),
        at_most("time_to_first_row_s", 14 / 3),
        at_most("peak_task_bytes", 300 * MB),
        at_most("checks_share", 0.02),
    ),
    "feed": (
        at_most("spilled_bytes", 0),
        at_most("fallback_bytes", 0),
        at_most("peak_store_share", 0.6),
        at_most("wait_share", 0.02),
        Bar("fast_over_reader", 0.9),
    ),
    "step": (
        Bar("heads_speedup", 1.5, only=("pi05",), is_optional=True),
        Bar("heads_speedup", 1.3, is_optional=True),
        Bar("expert_speedup", 1.3, is_optional=True),
        Bar("lora_speedup", 1, is_optional=True),
        Bar("language_speedup", 1, is_optional=True),
        Bar("full_speedup", 1, is_optional=True),
        at_most("host_syncs_per_micro_step", 0),
        at_most("host_overhead_share", 0.03),
        at_most("flow_samples_8_cost", 1.25, is_optional=True),
    ),
    "resume": (
        at_most("checkpoint_bytes", 60 * MB),
        at_most("stall_share", 0.02),
        at_most("restart_s", 45),
        at_most("redone_steps/interval", 1),
    ),
    "train": (
        Bar("over_lerobot", 2.3, only=("demo of pi05",)),
        Bar("over_lerobot", 1, only=("video of act",)),  # where its step decides as well
        Bar("over_lerobot", 2, only=("video",)),
        Bar("over_lerobot", 2.5, only=("expert-balanced", "expert-step of pi05")),
        Bar("over_lerobot", 1.7, only=("full-video",)),
        Bar("over_lerobot", 1),
        Bar("share_of_predicted", 0.85),
        Bar("share_of_ideal", 0.8, only=("demo of pi05",)),
        Bar("slowest_over_fastest", 0.75, only=("demo of pi05",)),
        at_most("step_in_run_over_alone", 1.05, PINNED),
        at_most("step_in_run_over_alone/sharing_explains", 1.15),
        at_most("other_threads_cpu_share", 0.08),
        at_most("spilled_bytes", 0),
        Bar("time_to_quality_over_lerobot", 2.5, only=FROZEN, is_optional=True),
        Bar("time_to_quality_over_lerobot", 2, is_optional=True),
        Bar("augmented_over_plain", 0.95, is_optional=True),
    ),
}
"""Benchmark -> its bars; of those of one figure that hold for a result the first counts."""


@dataclass(frozen=True)
class Row:
    """A bar and what was measured."""

    bench: str
    of: str
    """Policy, configuration, and what else tells one result from another."""
    figure: str
    measured: float | None
    bar: str
    is_met: bool | None
    """None where nothing was measured."""
    commit: str
    hardware: str

    def cells(self) -> tuple[str, ...]:
        measured = "not measured" if self.measured is None else _number(self.measured)
        met = {True: "met", False: "**missed**", None: ""}[self.is_met]
        figure = self.figure.replace("/", " / ")
        return (self.bench, self.of, figure, measured, self.bar, met, self.commit, self.hardware)


def run(places: Sequence[str]) -> None:
    """Print a Markdown table and, as the last line, one JSON object."""
    results = list(newest(read_results(places)))
    if not results:
        raise ValueError(
            f"{', '.join(places)}: there is no benchmark's last line in it; give --output=FILE to a benchmark, then this FILE"
        )
    rows = [row for result in results for row in rows_of(result)]
    sys.stdout.write(markdown(HEADER, [row.cells() for row in rows]) + "\n")
    missed = [row for row in rows if row.is_met is False]
    measured = [row for row in rows if row.is_met is not None]
    sys.stdout.write(f"\n{len(measured) - len(missed)} of {len(measured)} bars that were measured are met\n")
    figures = {"rows": [asdict(row) for row in rows], "measured": len(measured), "missed": len(missed)}
    sys.stdout.write(last_line("table", figures, {"places": list(places)}) + "\n")


def read_results(places: Iterable[str]) -> Iterator[Result]:
    """Of every file, and of every file in a folder, in the order of their names and lines."""
    for place in map(Path, places):
        files = sorted(one for one in place.iterdir() if one.is_file()) if place.is_dir() else [place]
        for file in files:
            for number, line in enumerate(read_file(file.parent, file.name, max_bytes=MAX_BYTES).splitlines(), start=1):
                if line.startswith(b'{"bench"'):
                    yield _checked(parse_json(line, f"{file}: line {number}", remedy="remove the line"), file, number)


def newest(results: Iterable[Result]) -> Iterator[Result]:
    """The last of each kind, in the order in which the kinds came first."""
    found: dict[tuple[str, str], Result] = {}
    for result in results:
        found[result["bench"], what_of(result)] = result
    yield from (one for one in found.values() if one["bench"] in BARS)


def what_of(result: Result) -> str:
    """What tells a result from others of the same benchmark.

    >>> what_of({"bench": "train", "settings": {"policy": {"type": "act"}, "config": "video", "pin": True}})
    'act, video, pinned'
    """
    settings = result["settings"]
    named = [(settings.get("policy") or {}).get("type"), settings.get("config")]
    return ", ".join([*(str(one) for one in named if one), *([PINNED] if settings.get("pin") else [])])


def rows_of(result: Result) -> Iterator[Row]:
    """A row for every bar that holds for a result."""
    hardware = result["hardware"]
    machine = f"{hardware.get('cores')} x {hardware.get('cpu')}, {hardware.get('memory_bytes', 0) / GB:.0f} GB"
    commit, plus, _ = result["commit"].partition("+")
    for bar in bars_of(result):
        found = _figure(result, bar.figure)
        if found is None and bar.is_optional:
            continue
        met = None if found is None else bar.is_met(found)
        short = commit[:COMMIT_CHARS] + plus
        yield Row(result["bench"], what_of(result), bar.figure, found, bar.text(), met, short, machine)


def bars_of(result: Result) -> list[Bar]:
    """A pinned run shows the step beside readers that run elsewhere, and nothing else."""
    name, kind = result["settings"].get("config"), (result["settings"].get("policy") or {}).get("type")
    names = {PINNED} if result["settings"].get("pin") else {name, kind, f"{name} of {kind}"}
    chosen: dict[str, Bar] = {}
    for bar in BARS[result["bench"]]:
        if names & set(bar.only) or not (bar.only or PINNED in names):
            chosen.setdefault(bar.figure, bar)
    return list(chosen.values())


def _figure(result: Result, name: str) -> float | None:
    found = [{**result["settings"], **result}.get(one) for one in name.split("/")]
    numbers = [float(one) for one in found if isinstance(one, int | float)]
    if len(numbers) < len(found):
        return None
    return numbers[0] if len(numbers) == 1 else numbers[0] / numbers[1]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _checked(found: Any, file: Path, number: int) -> Result:
    """A line of a benchmark's, as far as it is read here."""
    kinds = {"bench": str, "commit": str, "hardware": dict, "settings": dict}
    if not isinstance(found, dict) or any(not isinstance(found.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{file}: line {number} is no benchmark's last line: it lacks {', '.join(kinds)}; remove it")
    return found


def _number(value: float) -> str:
    """Short, and never 1e+08.

    >>> _number(0.0), _number(2.345678), _number(60e6), _number(26_012_345)
    ('0', '2.35', '60 MB', '26 MB')
    """
    if value >= MB:
        return f"{value / MB:.0f} MB"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
