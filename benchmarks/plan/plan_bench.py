"""`python -m benchmarks plan`: seconds and memory to set up a large run and plan its first read tasks.

The metadata is real, the files that it names do not exist. Every size runs in a new process, which
does what a driver does before Ray starts, sends the plan, and plans for some of the workers as their
planning tasks do. The driver plans for nobody: its bounds hold for both together.
"""

import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import format_table, print_last, say
from benchmarks.options import PlanBench
from benchmarks.table.table_plot import Panel, draw_bars
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.feed.plan import Share, plan_segment
from vlatune.feed.sizing import Node, plan_on_nodes
from vlatune.run_setup import load_metas, make_setup
from vlatune.storage.files import write_text
from vlatune.storage.limits import SCALE
from vlatune.train.driver.launch import run_shape
from vlatune.train.driver.tiny_base import with_base

MOST_S, MOST_BYTES = 60.0, 2e9
"""Bounds for the largest size."""
FPS, EPISODES_PER_FILE, EPISODES_PER_TABLE = 30, 50, 100_000
NODE = Node(cpus=160, store_bytes=400 * 10**9, gpus=8)
STAGES = ("read meta/", "set up", "send", "plan a worker")


def run(options: PlanBench) -> None:
    """Print a table and a final JSON line, and draw the plot."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        base = _make_base(Path(scratch) / "base", options)
        for episodes in options.episodes:
            dataset = Path(scratch) / str(episodes)
            _make_meta(dataset, episodes, options.frames)
            found[episodes] = _measure_in_process(_config(options, dataset, base), options)
            say(f"{episodes} episodes: {found[episodes]['seconds']:.1f} s")
    header = ("episodes", "frames", *(f"{stage}, s" for stage in STAGES), "all, s", "CPU s", "peak, MB", "plan, MB")
    rows = [_row(episodes, one) for episodes, one in found.items()]
    sys.stdout.write(format_table(header, rows) + "\n")
    if options.plot is not None:
        names = {episodes: f"{one['frames'] / 1e6:.0f} M frames" for episodes, one in found.items()}
        seconds = {names[episodes]: one["seconds"] for episodes, one in found.items()}
        peaks = {names[episodes]: one["peak_bytes"] / 1e9 for episodes, one in found.items()}
        panels = [Panel("seconds", seconds, "{:.1f}".format), Panel("peak memory, GB", peaks, "{:.2f}".format)]
        write_text(Path(options.plot), draw_bars(panels, strong=names[options.episodes[-1]]))
    largest = options.episodes[-1]
    last = found[largest]
    figures = {"episodes": largest, **last, "sizes": found}
    within = last["seconds"] <= MOST_S and last["peak_bytes"] <= MOST_BYTES
    print_last("plan", figures | {"within_bounds": within}, options)


def _row(episodes: int, figures: Mapping[str, Any]) -> list[str]:
    stages = [f"{figures['stages'][stage]:.2f}" for stage in STAGES]
    sizes = [f"{figures[key] / 1e6:.0f}" for key in ("peak_bytes", "sent_bytes")]
    times = [f"{figures[key]:.1f}" for key in ("seconds", "cpu_seconds")]
    return [f"{episodes:,}", f"{figures['frames']:,}", *stages, *times, *sizes]


def _config(options: PlanBench, dataset: Path, base: Path | None = None) -> RunConfig:
    return RunConfig(
        dataset=DatasetConfig(root=(str(dataset),), eval_split=0.01),
        policy=PolicyConfig(path=str(base) if base else None, train="heads"),
        num_workers=options.num_workers,
        batch_size=options.batch_size,
        output_dir=str(dataset.parent / "run"),
        recipe="tiny",
    )


def _make_base(folder: Path, options: PlanBench) -> Path:
    """Make a tiny base model that fits the datasets."""
    _make_meta(folder.parent / "first", options.num_workers, 100)
    config = _config(options, folder.parent / "first")
    made = with_base(config, load_metas(config), say=say)
    return Path(str(made.policy.path))


def _make_meta(folder: Path, episodes: int, frames: int) -> None:
    """Write a dataset's meta/ with so many episodes of `frames` frames on average."""
    make_dataset(folder, SyntheticSpec(episodes=2, frames=10, cameras=3, fps=FPS))
    index = np.arange(episodes)
    length = frames // 2 + index * 7919 % (frames + 1)
    end, file = np.cumsum(length), index // EPISODES_PER_FILE
    from_s = (end - length - (end - length)[file * EPISODES_PER_FILE]) / FPS
    tasks = pq.read_table(folder / "meta/tasks.parquet")
    info = json.loads((folder / "meta/info.json").read_text())
    columns: dict[str, Any] = {"episode_index": index, "length": length, "dataset_from_index": end - length}
    keys = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    for place in ("data", *(f"videos/{key}" for key in keys)):
        columns |= {f"{place}/chunk_index": file // 1000, f"{place}/file_index": file % 1000}
    for key in keys:
        columns |= {f"videos/{key}/from_timestamp": from_s, f"videos/{key}/to_timestamp": from_s + length / FPS}
    names = tasks[next(name for name in tasks.column_names if name != "task_index")].to_pylist()
    columns["tasks"] = [[names[number % len(names)]] for number in range(episodes)]
    for path in (folder / "meta/episodes").rglob("*.parquet"):
        path.unlink()
    table = pa.table(columns)
    for number, begin in enumerate(range(0, episodes, EPISODES_PER_TABLE)):
        pq.write_table(
            table.slice(begin, EPISODES_PER_TABLE), folder / f"meta/episodes/chunk-000/file-{number:03d}.parquet"
        )
    info |= {"total_episodes": episodes, "total_frames": int(end[-1])}
    (folder / "meta/info.json").write_text(json.dumps(info))


def _measure_in_process(config: RunConfig, options: PlanBench) -> dict[str, Any]:
    """Return the figures of a new process, whose peak memory is its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), _allow_all_frames) as pool:
        return pool.submit(_measure, config, options).result()


def _allow_all_frames() -> None:
    os.environ[SCALE] = "100"


def _measure(config: RunConfig, options: PlanBench) -> dict[str, Any]:
    taken: dict[str, float] = {}
    cpu_s: dict[str, float] = {}

    def timed[T](stage: str, call: Callable[[], T]) -> T:
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        found = call()
        taken[stage], cpu_s[stage] = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        return found

    metas = timed(STAGES[0], lambda: load_metas(config))
    setup = timed(STAGES[1], lambda: make_setup(config, metas).with_lanes(options.lanes))
    nodes = [NODE] * -(-options.num_workers // NODE.gpus)
    sizing = plan_on_nodes(nodes, run_shape(config, setup))
    sent = timed(STAGES[2], lambda: pickle.dumps(setup.data_plan, protocol=5))
    middle, last_step = setup.order.batches_per_epoch // 2, setup.order.batches_per_epoch
    share = Share(options.num_workers // 2, options.num_workers)
    timed(STAGES[3], lambda: plan_segment(setup.data_plan, share, sizing.budget, middle, last_step))
    return {
        "frames": setup.metas[0].num_frames,
        "stages": taken,
        "seconds": sum(taken.values()),
        "cpu_seconds": sum(cpu_s.values()),
        "peak_bytes": _peak_bytes(),
        "sent_bytes": len(sent),
    }


def _peak_bytes() -> int:
    """Return the peak resident memory of this process; that of getrusage includes its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
