"""Shared parts of the benchmarks: alternating rounds, a table, and the final JSON line.

Ratios are computed within a round, under the same machine load, and reported with their spread. An
implementation that cannot run is listed with the reason, and never counts as slow.
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

from benchmarks.options import BenchOptions
from vlatune.formatting import text_table
from vlatune.storage.files import write_text

NO_SETTINGS: Mapping[str, Any] = {}
PACKAGES = ("vlatune", "ray", "lerobot", "torch", "av", "pyarrow", "numpy", "torchcodec")


class CannotRunError(Exception):
    """Raised if an implementation cannot run on this machine; the message states why."""


@dataclass
class Results:
    """Values, usually rows/s, per implementation and round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def median(self, program: str) -> float | None:
        return statistics.median(self.rounds[program]) if self.rounds.get(program) else None

    def ratio(self, program: str, other: str) -> float | None:
        """Return the median over the rounds of program / other."""
        pairs = list(zip(self.rounds.get(program, []), self.rounds.get(other, []), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None

    def spread(self, program: str) -> str:
        values = self.rounds.get(program, [])
        return f"{min(values):.4g} - {max(values):.4g}" if values else ""


def alternate(programs: Mapping[str, Callable[[], float]], rounds: int, *, say: Callable[[str], None]) -> Results:
    """Run every implementation once per round, in turn."""
    results = Results()
    for number in range(rounds):
        for name, run in programs.items():
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
    """Print progress to stderr; stdout is for results only."""
    sys.stderr.write(f"vlatune: {text}\n")
    sys.stderr.flush()


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(text_table([header, ["-" * width for width in widths], *rows]))


def print_last(
    bench: str, figures: Mapping[str, Any], options: BenchOptions, settings: Mapping[str, Any] = NO_SETTINGS
) -> None:
    """Print the final JSON line and write it to --output; `settings` are added to the options."""
    line = last_line(bench, figures, asdict(options) | dict(settings))
    sys.stdout.write(line + "\n")
    if options.output is not None:
        write_text(Path(options.output), line + "\n")


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
    """Read the CPU model, which psutil does not report."""
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
