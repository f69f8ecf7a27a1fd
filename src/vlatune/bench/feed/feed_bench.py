"""`vlatune bench feed`: does the feed keep a consumer fed, without spilling, whatever its speed and the store's size?

Consumers of several speeds against stores of several sizes, ours and the template's way in one run. Every store is a
cluster in a process of its own (`feed_consumers.py`); spilled bytes are the raylets' own counters. First of all, the
reader and the feed take turns: the reader reads the same files in order, warm, into the generous store of `bench
reader`; that is what decoding allows. The feed takes a turn with two observations a sample as well. And the length of a run of frames has its price: they are decoded in one go, on
one core, against whole episodes.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.bench.feed.feed_consumers import Job, job_json, read_spec
from vlatune.bench.harness import Results, alternate, checked_root, format_table, print_last, say
from vlatune.bench.options import FeedBench, ReaderBench
from vlatune.bench.peer_readers import make_videos
from vlatune.dataset.meta.dataset_meta import DatasetMeta, load_meta
from vlatune.dataset.reader import ReadSpec, Unit, make_unit, read_unit
from vlatune.pipeline.sizing import usable_cpus

READER, FEED, FEED_2 = "vlatune.read_lerobot, warm", "vlatune's feed", "vlatune's feed, 2 observations a sample"
NAMES = {"reader": "vlatune.read_lerobot", "ours": "vlatune's feed", "template": "the template's way"}


def run(options: FeedBench) -> None:
    """Print a table and, as the last line, one JSON object."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        root = checked_root(options.root) if options.root else _make(Path(scratch) / "dataset", options)
        cpus, meta = usable_cpus(), load_meta(root)
        say("what the length of a run costs")
        costs = cost_by_length(meta, read_spec(meta))
        results = alternate(_fastest(root, options, cpus), options.rounds, say=say)
        decode_s = 1 / (results.median(READER) or math.nan)
        seen = [one for job in _jobs(root, options, cpus, decode_s) for one in _run(job)]
    header = ["way", "store", "consumer", "samples/s", "wait", "peak store", "spilled", "on disk", "store/sample"]
    sys.stdout.write(format_table(header, [_row(one) for one in seen]) + "\n")
    sys.stdout.write("\nrun length, and CPU time of reading a row by that in whole episodes\n")
    sys.stdout.write(format_table([str(n) for n in costs], [[f"{cost:.2f}" for cost in costs.values()]]) + "\n")
    print_last("feed", _figures(seen, results) | {"cost_by_run_length": costs}, options)


def _fastest(root: str, options: FeedBench, cpus: int) -> dict[str, Callable[[], float]]:
    """Name -> samples/s of a consumer that takes everything at once."""
    epoch = options.episodes * options.frames // options.batch_size
    fast = {"name": "all at once", "step_s": 0.0, "batches": 3 * epoch}
    reader = Job("reader", root, ReaderBench.object_store_bytes, cpus, options.batch_size, [fast])
    feed = Job("ours", root, options.store_bytes, cpus, options.batch_size, [fast])
    ways = {READER: reader, FEED: feed, FEED_2: replace(feed, n_obs_steps=2)}
    return {name: partial(_samples_per_s, job) for name, job in ways.items()}


def _samples_per_s(job: Job) -> float:
    return _run(job)[0]["samples_per_s"]


def _jobs(root: str, options: FeedBench, cpus: int, decode_s: float) -> list[Job]:
    batches, epoch = options.rows // options.batch_size, options.episodes * options.frames // options.batch_size
    slow = {"name": f"{options.step_s:g} s a batch", "step_s": options.step_s, "batches": batches}
    every: list[dict[str, Any]] = [
        slow,
        {"name": "all at once", "step_s": 0.0, "batches": 3 * epoch},
        {"name": "1.3 x decoding", "step_s": 1.3 * decode_s * options.batch_size, "batches": 4 * epoch},
        {"name": "100 x decoding", "step_s": 100 * decode_s * options.batch_size, "batches": 8},
        {"name": "all at once, 2 workers", "step_s": 0.0, "batches": 2 * epoch, "num_workers": 2},
        {"name": "all at once, 10 epochs", "step_s": 0.0, "batches": 10 * epoch},
    ]
    jobs = [Job("ours", root, options.store_bytes, cpus, options.batch_size, every)]
    jobs.append(Job("ours", root, options.small_store_bytes, cpus, options.batch_size, [*every[:2], every[4]]))
    if options.peers:
        jobs.append(Job("template", root, options.store_bytes, cpus, options.batch_size, [slow]))
    return jobs


def _run(job: Job) -> list[dict[str, Any]]:
    say(f"{NAMES[job.way]}, a store of {job.store_bytes / 1e6:.0f} MB")
    command = [sys.executable, "-m", "vlatune.bench.feed.feed_consumers", job_json(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        {"way": job.way, "store_bytes": job.store_bytes, "consumer": consumer["name"], **line}
        for consumer, line in zip(job.consumers, lines, strict=True)
    ]


def _row(one: dict[str, Any]) -> list[str]:
    wait = "" if one["wait_share"] is None else f"{one['wait_share']:.1%}"
    return [
        NAMES[one["way"]],
        f"{one['store_bytes'] / 1e6:.0f} MB",
        one["consumer"],
        f"{one['samples_per_s']:.1f}",
        wait,
        f"{one['peak_store_share']:.0%}",
        f"{one['spilled_bytes'] / 2**20:.0f} MiB",
        f"{one['fallback_bytes'] / 2**20:.0f} MiB",
        f"{one['bytes_per_sample'] / 1e6:.2f} MB",
    ]


def _figures(seen: Sequence[dict[str, Any]], results: Results) -> dict[str, Any]:
    ours = [one for one in seen if one["way"] == "ours"]
    template = [one for one in seen if one["way"] == "template"]
    fast = next(one for one in ours if one["consumer"] == "all at once")
    fed = next(one for one in ours if one["consumer"] == "1.3 x decoding")
    return {
        "spilled_bytes": max(one["spilled_bytes"] for one in ours),
        "fallback_bytes": max(one["fallback_bytes"] for one in ours),
        "peak_store_share": max(one["peak_store_share"] for one in ours),
        "wait_share": fed["wait_share"],
        "template_spilled_bytes": template[0]["spilled_bytes"] if template else None,
        "fast_over_reader": results.ratio(FEED, READER),
        "obs2_over_obs1": results.ratio(FEED_2, FEED),
        "obs1_rows_per_s": results.median(FEED),
        "obs2_rows_per_s": results.median(FEED_2),
        "rounds": results.rounds,
        "host_copies_per_sample": fast["host_copies_per_sample"],
        "runs": list(seen),
    }


def _make(folder: Path, options: FeedBench) -> str:
    say(f"making a dataset: {options.episodes} x {options.frames} frames, {options.cameras} cameras")
    return make_videos(folder, options.codec, options)


LENGTHS = (1, 2, 4, 8, 16, 32, 64)
MAX_ROWS, MIN_PIECES = 200, 16
"""Of a length; pieces are taken at random places, as a shuffled order does."""


def cost_by_length(meta: DatasetMeta, spec: ReadSpec) -> dict[int, float]:
    """Length -> CPU time per row, by that of whole episodes."""
    whole = _pieces(meta, spec, int(meta.episodes.length.max()))[: max(1, 2 * MAX_ROWS // int(meta.episodes.length[0]))]
    _seconds_per_row(spec, whole[:1])  # the files are in memory from here on
    whole_s = _seconds_per_row(spec, whole)
    chance = np.random.default_rng(0)
    costs = {}
    for length in (length for length in LENGTHS if length < meta.episodes.length.max()):
        pieces = _pieces(meta, spec, length)
        some = [pieces[number] for number in chance.permutation(len(pieces))[: max(MIN_PIECES, MAX_ROWS // length)]]
        costs[length] = _seconds_per_row(spec, some) / whole_s
    return costs


def _pieces(meta: DatasetMeta, spec: ReadSpec, length: int) -> list[Unit]:
    """All episodes, cut into pieces of this length."""
    units = []
    for position, frames in enumerate(meta.episodes.length.tolist()):
        for begin in range(0, frames, length):
            rows = np.arange(begin, min(begin + length, frames))
            units.append(make_unit(meta, spec, position, rows, rows))
    return units


def _seconds_per_row(spec: ReadSpec, units: Sequence[Unit]) -> float:
    begin = time.process_time()
    for unit in units:
        read_unit(spec, unit)
    return (time.process_time() - begin) / sum(len(unit.frames) for unit in units)
