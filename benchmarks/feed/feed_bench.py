"""`python -m benchmarks feed`: check that the feed keeps consumers fed without spilling.

Consumers of several speeds run against object stores of several sizes, with vlatune's feed and the
template, each on a separate cluster (`feed_consumers.py`). Spilled bytes are the raylets' counters.
First, the reader (same files in order, warm, large store: the decoding limit) and the feed
alternate.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.feed.feed_consumers import Job, job_json
from benchmarks.harness import Results, alternate, format_table, print_last, say
from benchmarks.options import FeedBench, ReaderBench
from benchmarks.peer_readers import make_videos
from vlatune.feed.sizing import usable_cpus

READER, FEED = "vlatune.read_lerobot, warm", "vlatune's feed"
NAMES = {"reader": "vlatune.read_lerobot", "ours": "vlatune's feed", "template": "the template"}


def run(options: FeedBench) -> None:
    """Print a table and a final JSON line."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        root = options.root or _make(Path(scratch) / "dataset", options)
        cpus = usable_cpus()
        results = alternate(_fastest(root, options, cpus), options.rounds, say=say)
        decode_s = 1 / (results.median(READER) or math.nan)
        seen = [one for job in _jobs(root, options, cpus, decode_s) for one in _run(job)]
    header = ["program", "store", "consumer", "samples/s", "wait", "peak store", "spilled", "on disk", "store/sample"]
    sys.stdout.write(format_table(header, [_row(one) for one in seen]) + "\n")
    print_last("feed", _figures(seen, results), options)


def _fastest(root: str, options: FeedBench, cpus: int) -> dict[str, Callable[[], float]]:
    """Return name -> function that measures samples/s of a consumer without delay."""
    epoch = options.episodes * options.frames // options.batch_size
    fast = {"name": "all at once", "step_s": 0.0, "batches": 3 * epoch}
    reader = Job("reader", root, ReaderBench.object_store_bytes, cpus, options.batch_size, [fast])
    feed = Job("ours", root, options.store_bytes, cpus, options.batch_size, [fast])
    return {name: partial(_samples_per_s, job) for name, job in ((READER, reader), (FEED, feed))}


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
    say(f"{NAMES[job.program]}, a store of {job.store_bytes / 1e6:.0f} MB")
    command = [sys.executable, "-P", "-m", "benchmarks.feed.feed_consumers", job_json(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [
        {"program": job.program, "store_bytes": job.store_bytes, "consumer": consumer["name"], **line}
        for consumer, line in zip(job.consumers, lines, strict=True)
    ]


def _row(one: dict[str, Any]) -> list[str]:
    wait = "" if one["wait_share"] is None else f"{one['wait_share']:.1%}"
    return [
        NAMES[one["program"]],
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
    ours = [one for one in seen if one["program"] == "ours"]
    template = [one for one in seen if one["program"] == "template"]
    fast = next(one for one in ours if one["consumer"] == "all at once")
    fed = next(one for one in ours if one["consumer"] == "1.3 x decoding")
    return {
        "spilled_bytes": max(one["spilled_bytes"] for one in ours),
        "fallback_bytes": max(one["fallback_bytes"] for one in ours),
        "peak_store_share": max(one["peak_store_share"] for one in ours),
        "wait_share": fed["wait_share"],
        "template_spilled_bytes": template[0]["spilled_bytes"] if template else None,
        "fast_over_reader": results.ratio(FEED, READER),
        "rounds": results.rounds,
        "host_copies_per_sample": fast["host_copies_per_sample"],
        "runs": list(seen),
    }


def _make(folder: Path, options: FeedBench) -> str:
    say(f"making a dataset: {options.episodes} x {options.frames} frames, {options.cameras} cameras")
    return make_videos(folder, options.codec, options)
