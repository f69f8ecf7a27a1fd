"""[ray] `vlatune bench reader`: how near to the decoder does each way of reading a dataset come?

Everything in one run, alternating, on the same files and the same cores: plain PyAV (the limit), ours warm, the
template's way, `ray.data.read_lerobot`, LeRobot's DataLoader. Ours is also measured cold, from a cluster that has just
started to the first row, and alone: the memory of a read task, and whether ten times the episodes cost ten times the time.
The limit and ours go through the dataset several times in a round, the peers once through most of it: they are ten
times as slow, and a pass must be long against what starting it costs. Ours is also run with two observations a row.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

import vlatune
from vlatune.batch import STATE
from vlatune.bench import peer_readers as peers
from vlatune.bench.harness import Results, alternate, checked_root, format_table, print_last, say
from vlatune.bench.options import ReaderBench
from vlatune.bench.peer_readers import decode_rows_per_s, make_videos, start_ray
from vlatune.bench.reader.read_task_cost import measure_reading
from vlatune.dataset.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.pipeline.sizing import usable_cpus

LIMIT = "plain PyAV, decode + RGB (the limit)"
DECODE = "plain PyAV, decode only"
OURS = "vlatune.read_lerobot, warm"
OURS_2 = "the same, 2 observations a row"
TEMPLATE = "the template's way"
RAY = "ray.data.read_lerobot"
LEROBOT = "LeRobotDataset + DataLoader, in order"
LEROBOT_SHUFFLED = "LeRobotDataset + DataLoader, shuffled"


@dataclass(frozen=True)
class Measured:
    """What was seen on one dataset."""

    rows: int
    results: Results
    reading: Mapping[str, float]
    """Of one task alone: see `read_task_cost.py`."""
    bytes_per_row: Mapping[str, float]


def run(options: ReaderBench) -> None:
    """Print a table per dataset and, as the last line, one JSON object."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        roots = {"given": checked_root(options.root)} if options.root else _make_all(Path(scratch), options)
        metas = {name: load_meta(root) for name, root in roots.items()}
        alone = {name: measure_reading(meta.root.path) for name, meta in metas.items()}
        start_ray(usable_cpus(), options.object_store_bytes, as_ours=False)
        try:
            cold = _read_ours(next(iter(metas.values())))
            measured = {name: _measure(meta, options, alone[name]) for name, meta in metas.items()}
        finally:
            ray.shutdown()
    for name, one in measured.items():
        sys.stdout.write(f"\n{name}, {one.rows} rows\n{_table(one)}\n")
    sys.stdout.write(
        f"\ncold: first row {cold['first_row_s']:.1f} s after the call, on a cluster that has just started\n"
    )
    print_last("reader", _figures(measured, cold["first_row_s"]), options)


def _measure(meta: DatasetMeta, options: ReaderBench, reading: Mapping[str, float]) -> Measured:
    seen: dict[str, float] = {}
    results = alternate(_ways(meta, options, seen), options.rounds, say=say)
    return Measured(meta.num_frames, results, reading, seen)


def _ways(meta: DatasetMeta, options: ReaderBench, seen: dict[str, float]) -> dict[str, Callable[[], float]]:
    """Name -> rows/s; bytes per row in the object store go to `seen`."""
    cores = usable_cpus()

    def counted(name: str, read: Callable[[], peers.Read]) -> float:
        done = read()
        seen[name] = done.bytes / done.rows
        return done.rows_per_s

    ways = {
        DECODE: lambda: decode_rows_per_s(meta, to_rgb=False, threads=cores, passes=options.passes),
        LIMIT: lambda: decode_rows_per_s(meta, to_rgb=True, threads=cores, passes=options.passes),
        OURS: lambda: counted(OURS, lambda: peers.consume(vlatune.read_lerobot([meta.root.path] * options.passes))),
        OURS_2: lambda: counted(OURS_2, lambda: _read_two(meta, options.passes)),
    }
    if options.peers:
        some = peers.some_episodes(meta)
        rows = int(meta.episodes.length[some].sum())
        ways |= {
            TEMPLATE: lambda: counted(TEMPLATE, lambda: peers.read_as_template(meta, some)),
            RAY: lambda: counted(RAY, lambda: peers.read_as_ray(meta, some)),
            LEROBOT: lambda: peers.lerobot_rows_per_s(meta, shuffle=False, workers=cores, max_rows=rows),
            LEROBOT_SHUFFLED: lambda: peers.lerobot_rows_per_s(meta, shuffle=True, workers=cores, max_rows=rows),
        }
    return ways


def _read_two(meta: DatasetMeta, passes: int) -> peers.Read:
    """Two observations a row, as Diffusion Policy looks at them: every frame is still decoded once."""
    window = [-1 / meta.fps, 0.0]
    windows = dict.fromkeys((*meta.cameras, STATE), window)
    return peers.consume(vlatune.read_lerobot([meta.root.path] * passes, delta_timestamps=windows))


def _read_ours(meta: DatasetMeta) -> dict[str, float]:
    begin = time.perf_counter()
    done = peers.consume(vlatune.read_lerobot(meta.root.path))
    assert done.rows == meta.num_frames, f"read {done.rows} rows of {meta.num_frames}"
    return {"first_row_s": time.perf_counter() - begin - done.seconds + done.first_row_s}


def _table(one: Measured) -> str:
    rows = []
    for way in (DECODE, LIMIT, OURS, OURS_2, TEMPLATE, RAY, LEROBOT, LEROBOT_SHUFFLED):
        median, ratio = one.results.median(way), one.results.ratio(way, LIMIT)
        stored = f"{one.bytes_per_row[way] / 1e6:.2f} MB" if way in one.bytes_per_row else ""
        if median is not None and ratio is not None:
            rows.append([way, f"{median:.1f}", f"{ratio:.2f}", one.results.spread(way), stored])
        elif way in one.results.not_run:
            rows.append([way, "not run", "", one.results.not_run[way], ""])
    table = format_table(["way", "rows/s", "of the limit", "spread", "in the store per row"], rows)
    return (
        f"{table}\na read task of ours: {one.reading['task_bytes'] / 1e6:.0f} MB over the interpreter's; "
        f"{one.reading['rows'] / one.reading['few_rows']:.0f} x the episodes cost {one.reading['tenfold_cost']:.2f} of as many times the time; "
        f"checks of what is read take {100 * one.reading['checks_share']:.1f} % of its CPU time"
    )


def _figures(measured: Mapping[str, Measured], first_row_s: float) -> dict[str, Any]:
    """The contract's figures are those of the dataset on which each is worst."""
    by_dataset = {name: _figures_of(one) for name, one in measured.items()}
    names = ("ours_warm_over_limit", "ours_over_template", "ours_over_ray", "ours_over_lerobot", "obs2_over_obs1")
    names += ("obs1_rows_per_s", "obs2_rows_per_s")
    worst = {name: _least([one[name] for one in by_dataset.values()]) for name in names}
    return worst | {
        "time_to_first_row_s": first_row_s,
        "bytes_per_row": max(one["bytes_per_row"] for one in by_dataset.values()),
        "peak_task_bytes": max(one["peak_task_bytes"] for one in by_dataset.values()),
        "checks_share": max(one["checks_share"] for one in by_dataset.values()),
        "by_dataset": by_dataset,
    }


def _figures_of(one: Measured) -> dict[str, Any]:
    results = one.results
    return {
        "ours_warm_over_limit": results.ratio(OURS, LIMIT),
        "ours_over_template": results.ratio(OURS, TEMPLATE),
        "ours_over_ray": results.ratio(OURS, RAY),
        "ours_over_lerobot": results.ratio(OURS, LEROBOT_SHUFFLED),
        "obs2_over_obs1": results.ratio(OURS_2, OURS),
        "obs1_rows_per_s": results.median(OURS),
        "obs2_rows_per_s": results.median(OURS_2),
        "bytes_per_row": one.bytes_per_row[OURS],
        "peak_task_bytes": one.reading["task_bytes"],
        "tenfold_cost": one.reading["tenfold_cost"],
        "checks_share": one.reading["checks_share"],
        "rows_per_s": {way: results.median(way) for way in results.rounds},
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
