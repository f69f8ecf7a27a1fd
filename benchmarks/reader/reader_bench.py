"""[ray] `python -m benchmarks reader`: compare reading speed with plain PyAV and other readers.

All readers alternate on the same files and cores: plain PyAV (the limit), vlatune, vlatune's read
tasks with a warm frame cache, the template, `ray.data.read_lerobot`, LeRobot's DataLoader. vlatune
is also measured cold (time to the first row on a new cluster). PyAV and vlatune read the dataset several times per round; the others, which are
much slower, read most of it once.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import vlatune
from benchmarks import peer_readers as peers
from benchmarks.harness import Results, alternate, format_table, print_last, say
from benchmarks.options import ReaderBench
from benchmarks.peer_readers import decode_rows_per_s, make_videos, start_ray
from benchmarks.reader.cached_reads import read_cached
from vlatune.data.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.feed.sizing import usable_cpus

LIMIT = "plain PyAV, decode + RGB (the limit)"
OURS = "vlatune.read_lerobot, warm"
CACHED = "vlatune's read tasks, warm frame cache"
TEMPLATE = "the template"
RAY = "ray.data.read_lerobot"
LEROBOT = "LeRobotDataset + DataLoader, shuffled"


@dataclass(frozen=True)
class Measured:
    """Measurements on one dataset."""

    rows: int
    results: Results
    bytes_per_row: Mapping[str, float]
    cached_cpu_ms_per_row: float
    """CPU of the read tasks with a warm frame cache, median over the rounds."""


def run(options: ReaderBench) -> None:
    """Print a table per dataset and a final JSON line."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        roots = {"given": options.root} if options.root else _make_all(Path(scratch), options)
        metas = {name: load_meta(root) for name, root in roots.items()}
        start_ray(usable_cpus(), options.object_store_bytes, as_ours=False)
        try:
            first_row_s = _first_row_s(next(iter(metas.values())))
            measured = {name: _measure(meta, options, Path(scratch)) for name, meta in metas.items()}
        finally:
            ray.shutdown()
    for name, one in measured.items():
        sys.stdout.write(f"\n{name}, {one.rows} rows\n{_table(one)}\n")
        sys.stdout.write(f"warm frame cache: {one.cached_cpu_ms_per_row:.2f} ms of CPU per row\n")
    sys.stdout.write(f"\ncold: first row {first_row_s:.1f} s after the call, on a cluster that has just started\n")
    print_last("reader", _figures(measured, first_row_s), options)


def _measure(meta: DatasetMeta, options: ReaderBench, scratch: Path) -> Measured:
    seen: dict[str, float] = {}
    cpu_ms: list[float] = []
    with tempfile.TemporaryDirectory(prefix="frames-", dir=scratch) as cache:

        def read_warm(passes: int) -> float:
            done = read_cached(meta, Path(cache), readers=usable_cpus(), passes=passes)
            cpu_ms.append(1000 * done.cpu_s / done.rows)
            return done.rows / done.seconds

        read_warm(1)  # fills the cache
        cpu_ms.clear()
        programs = _ways(meta, options, seen) | {CACHED: lambda: read_warm(options.passes)}
        results = alternate(programs, options.rounds, say=say)
    return Measured(meta.num_frames, results, seen, statistics.median(cpu_ms))


def _ways(meta: DatasetMeta, options: ReaderBench, seen: dict[str, float]) -> dict[str, Callable[[], float]]:
    """Return name -> function that measures rows/s; `seen` gets the stored bytes per row."""
    cores = usable_cpus()

    def counted(name: str, read: Callable[[], peers.Read]) -> float:
        done = read()
        seen[name] = done.bytes / done.rows
        return done.rows_per_s

    programs = {
        LIMIT: lambda: decode_rows_per_s(meta, threads=cores, passes=options.passes),
        OURS: lambda: counted(OURS, lambda: peers.consume(vlatune.read_lerobot([meta.root.path] * options.passes))),
    }
    if options.peers:
        some = peers.some_episodes(meta)
        rows = int(meta.episodes.length[some].sum())
        programs |= {
            TEMPLATE: lambda: counted(TEMPLATE, lambda: peers.read_as_template(meta, some)),
            RAY: lambda: counted(RAY, lambda: peers.read_as_ray(meta, some)),
            LEROBOT: lambda: peers.lerobot_rows_per_s(meta, workers=cores, max_rows=rows),
        }
    return programs


def _first_row_s(meta: DatasetMeta) -> float:
    begin = time.perf_counter()
    done = peers.consume(vlatune.read_lerobot(meta.root.path))
    assert done.rows == meta.num_frames, f"read {done.rows} rows of {meta.num_frames}"
    return time.perf_counter() - begin - done.seconds + done.first_row_s


def _table(one: Measured) -> str:
    rows = []
    for program in (LIMIT, OURS, CACHED, TEMPLATE, RAY, LEROBOT):
        median, ratio = one.results.median(program), one.results.ratio(program, LIMIT)
        stored = f"{one.bytes_per_row[program] / 1e6:.2f} MB" if program in one.bytes_per_row else ""
        if median is not None and ratio is not None:
            rows.append([program, f"{median:.1f}", f"{ratio:.2f}", one.results.spread(program), stored])
        elif program in one.results.not_run:
            rows.append([program, "not run", "", one.results.not_run[program], ""])
    return format_table(["program", "rows/s", "of the limit", "spread", "in the store per row"], rows)


def _figures(measured: Mapping[str, Measured], first_row_s: float) -> dict[str, Any]:
    """Return each figure of the dataset on which it is worst."""
    by_dataset = {name: _figures_of(one) for name, one in measured.items()}
    names = (
        "ours_warm_over_limit",
        "ours_cached_over_limit",
        "ours_over_template",
        "ours_over_ray",
        "ours_over_lerobot",
    )
    worst = {name: _least([one[name] for one in by_dataset.values()]) for name in names}
    return worst | {
        "time_to_first_row_s": first_row_s,
        "cached_cpu_ms_per_row": max(one.cached_cpu_ms_per_row for one in measured.values()),
        "bytes_per_row": max(one["bytes_per_row"] for one in by_dataset.values()),
        "by_dataset": by_dataset,
    }


def _figures_of(one: Measured) -> dict[str, Any]:
    results = one.results
    return {
        "ours_warm_over_limit": results.ratio(OURS, LIMIT),
        "ours_cached_over_limit": results.ratio(CACHED, LIMIT),
        "cached_cpu_ms_per_row": one.cached_cpu_ms_per_row,
        "ours_over_template": results.ratio(OURS, TEMPLATE),
        "ours_over_ray": results.ratio(OURS, RAY),
        "ours_over_lerobot": results.ratio(OURS, LEROBOT),
        "bytes_per_row": one.bytes_per_row[OURS],
        "rows_per_s": {program: results.median(program) for program in results.rounds},
        "bytes_per_row_of": dict(one.bytes_per_row),
        "not_run": results.not_run,
        "rows": one.rows,
    }


def _least(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _make_all(scratch: Path, options: ReaderBench) -> dict[str, str]:
    return {codec: _make(scratch / codec, codec, options) for codec in options.codec}


def _make(folder: Path, codec: str, options: ReaderBench) -> str:
    say(f"making a dataset: {options.episodes} x {options.frames} frames, {options.cameras} cameras, {codec}")
    return make_videos(folder, codec, options)
