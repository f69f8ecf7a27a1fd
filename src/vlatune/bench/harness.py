"""What every benchmark shares: rounds that alternate between the ways, a table, and the last line of JSON.

Ratios are taken inside a round, where the machine is in the same mood, and reported with their spread. A way that
cannot run here is named with the reason; it never counts as slow.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vlatune.bench.options import BenchOptions
from vlatune.files import open_to_append

NO_SETTINGS: Mapping[str, Any] = {}
PACKAGES = ("vlatune", "ray", "lerobot", "torch", "av", "pyarrow", "numpy", "torchcodec")


class CannotRunError(Exception):
    """This way of doing it is not possible on this machine; the text says why."""


def checked_root(root: str) -> str:
    """A dataset that the user gives. The peers' readers and plain PyAV have none of our checks, and read files that nobody
    lists, so it is looked at first, whole: what could run code or open an address does not come to them.
    """
    from vlatune.dataset.meta.listing import list_files
    from vlatune.dataset.storage.parquet import opened
    from vlatune.dataset.storage.root import Root
    from vlatune.inspect.inspection import inspect_dataset

    place = Root(root)
    wrong = [one for one in inspect_dataset(place, videos=True).problems if one.severity == "error"]
    if wrong:
        raise ValueError(
            f"--root={root}: `vlatune inspect` finds errors in it ({wrong[0].place}: {wrong[0].found}), and the readers that ours is measured "
            f"against have no checks; mend them, or leave --root out"
        )
    for name in list_files(place, ""):
        if name.endswith(".parquet"):
            with opened(place, name):
                pass
    return root


@dataclass
class Results:
    """rows/s (or whatever a way returns) per way and round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def median(self, way: str) -> float | None:
        return statistics.median(self.rounds[way]) if self.rounds.get(way) else None

    def ratio(self, way: str, other: str) -> float | None:
        """Median over the rounds of way / other."""
        pairs = list(zip(self.rounds.get(way, []), self.rounds.get(other, []), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def spread(self, way: str) -> str:
        values = self.rounds.get(way, [])
        return f"{min(values):.4g} - {max(values):.4g}" if values else ""


def alternate(ways: Mapping[str, Callable[[], float]], rounds: int, *, say: Callable[[str], None]) -> Results:
    """Run every way once a round, in turn."""
    results = Results()
    for number in range(rounds):
        for name, run in ways.items():
            if name in results.not_run:
                continue
            try:
                value = run()
            except CannotRunError as error:
                results.not_run[name] = str(error)
                say(f"{name}: not run: {error}")
                continue
            results.rounds.setdefault(name, []).append(value)
            say(f"round {number + 1} of {rounds}: {name}: {value:.4g}")
    return results


def say(text: str) -> None:
    """A line for the person who waits; the results alone go to stdout."""
    sys.stderr.write(f"vlatune: {text}\n")
    sys.stderr.flush()


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(str(row[column])) for row in [header, *rows]) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )


def print_last(
    bench: str, figures: Mapping[str, Any], options: BenchOptions, settings: Mapping[str, Any] = NO_SETTINGS
) -> None:
    """The JSON object that ends a benchmark's output, and is appended to the file of --output; `settings` are more than
    the options say.
    """
    line = last_line(bench, figures, asdict(options) | dict(settings))
    sys.stdout.write(line + "\n")
    if options.output is not None:
        with open_to_append(Path(options.output)) as file:
            file.write(line + "\n")


def last_line(bench: str, figures: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    known = {"commit": _commit(), "versions": _versions(), "hardware": hardware(), "settings": dict(settings)}
    return json.dumps({"bench": bench, **figures, **known})


def hardware() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_bytes": memory, "system": platform.platform()}


def _cpuinfo() -> list[str]:
    """psutil does not know the name of the CPU."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    folder = Path(__file__).resolve().parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return "unknown"
    return done.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
