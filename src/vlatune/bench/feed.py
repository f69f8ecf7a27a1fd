"""`vlatune bench feed`: does the feed keep a consumer fed, without spilling, whatever its speed and the store's size?

Consumers of several speeds against stores of several sizes, ours and the template's way in one run. Every store is a
cluster in a process of its own (`feed_run.py`); spilled bytes are the raylets' own counters. First of all the reader
reads the same files in order, warm, into the generous store of `bench reader`: what decoding allows.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlatune.bench.feed_run import Job, job_json
from vlatune.bench.harness import format_table, last_line
from vlatune.bench.options import FeedBench, ReaderBench
from vlatune.bench.stage import make_videos

NAMES = {"reader": "vlatune.read_lerobot", "ours": "vlatune's feed", "template": "the template's way"}


def run(options: FeedBench) -> None:
    """Print a table and, as the last line, one JSON object."""
    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        root = options.root or _make(Path(scratch) / "dataset", options)
        cpus = os.cpu_count() or 1
        reader = _run(
            Job("reader", root, ReaderBench.object_store_bytes, cpus, options.batch_size, [{"name": "reader"}])
        )
        decode_s = 1 / reader[0]["samples_per_s"]
        seen = [one for job in _jobs(root, options, cpus, decode_s) for one in _run(job)]
    header = ["way", "store", "consumer", "samples/s", "wait", "peak store", "spilled", "on disk", "store/sample"]
    sys.stdout.write(format_table(header, [_row(one) for one in seen]) + "\n")
    sys.stdout.write(last_line(_figures(seen, decode_s), asdict(options)) + "\n")


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
    sys.stderr.write(f"vlatune: {NAMES[job.way]}, a store of {job.store_bytes / 1e6:.0f} MB\n")
    command = [sys.executable, "-m", "vlatune.bench.feed_run", job_json(job)]
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


def _figures(seen: Sequence[dict[str, Any]], decode_s: float) -> dict[str, Any]:
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
        "fast_over_reader": fast["samples_per_s"] * decode_s,
        "reader_samples_per_s": 1 / decode_s,
        "host_copies_per_sample": fast["host_copies_per_sample"],
        "runs": list(seen),
    }


def _make(folder: Path, options: FeedBench) -> str:
    sys.stderr.write(
        f"vlatune: making a dataset: {options.episodes} x {options.frames} frames, {options.cameras} cameras\n"
    )
    return make_videos(folder, options.codec, options)
