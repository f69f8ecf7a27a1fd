"""`python -m benchmarks resume`: measure the cost of checkpoints and of a lost worker.

A worker of a tiny model's run is killed (`killed_run.py`): `stall_share`, `restart_s` and
`redone_steps`. The trained heads of a large model are saved (`save_cost.py`): `checkpoint_bytes` and
`stall_s`.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import print_last
from benchmarks.options import ResumeBench
from benchmarks.processes import ends_in_order
from benchmarks.resume.killed_run import RunFigures, measure_run, stall_share
from benchmarks.resume.save_cost import Save, measure_saves
from vlatune.config.settings import RunConfig


def run(options: ResumeBench) -> None:
    """Print the figures and a final JSON line."""
    check(options)
    with ends_in_order(), tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        run_folder, save_folder = Path(scratch) / "small", Path(scratch) / "wide"
        for folder in (run_folder, save_folder):
            folder.mkdir()
        of_run, saves = measure_run(run_folder, options), measure_saves(save_folder, options)
    print_report(options, of_run, saves)


def check(options: ResumeBench) -> None:
    if options.interval < 2:
        raise ValueError(
            f"--interval={options.interval}: must be 2 or more, because a worker is killed between two checkpoints"
        )
    if options.steps < 3 * options.interval:
        raise ValueError(
            f"--steps={options.steps}: must be {3 * options.interval} or more, three times --interval={options.interval}"
        )


def print_report(options: ResumeBench, of_run: RunFigures, saves: Sequence[Save]) -> None:
    last = figures(options, of_run, saves)
    sys.stdout.write(
        f"large model: {last['checkpoint_bytes'] / 1e6:.1f} MB, {1000 * last['stall_s']:.1f} ms blocked\n"
        f"tiny model: first step {of_run.start_s:.1f} s after the command; after the kill of a worker, "
        f"{of_run.restart_s:.1f} s to the next step, {of_run.redone_steps} steps repeated\n"
        f"{of_run.num_saves} checkpoints: {1000 * of_run.stall_s:.1f} ms blocked each, {last['stall_share_measured']:.3%} "
        f"of the time with one every {options.interval} steps, {last['stall_share']:.3%} at the default interval\n"
    )
    print_last("resume", last, options)


def figures(options: ResumeBench, of_run: RunFigures, saves: Sequence[Save]) -> dict[str, Any]:
    usual, stall_s, step_s = RunConfig(), of_run.stall_s, of_run.step_s
    return {
        "checkpoint_bytes": saves[-1].num_bytes,
        "stall_s": statistics.median(one.stall_s for one in saves),
        "stall_share": stall_share(stall_s, step_s, save_freq=usual.save_freq, save_every_s=usual.save_every_s),
        "stall_share_measured": stall_share(stall_s, step_s, save_freq=options.interval),
        "restart_s": of_run.restart_s,
        "redone_steps": of_run.redone_steps,
        "run": asdict(of_run),
        "saves": [asdict(one) for one in saves],
    }
