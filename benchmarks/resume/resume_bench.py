"""`python -m benchmarks resume`: measure the cost of checkpoints and of lost processes.

A run of a tiny model is killed twice (`killed_run.py`). The table benchmark compares its checkpoints
with those of other programs.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import print_last, say
from benchmarks.options import ResumeBench
from benchmarks.processes import ends_in_order
from benchmarks.resume.killed_run import Comeback, RunFigures, measure_run, stall_share
from vlatune.config.settings import RunConfig


def run(options: ResumeBench) -> None:
    """Print tables and a final JSON line."""
    check(options)
    with ends_in_order(), tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        print_report(options, measure_run(Path(scratch), options, say=say))


def check(options: ResumeBench) -> None:
    for name, value in vars(options).items():
        least = 0 if name == "seed" else 1
        if isinstance(value, int | float) and value < least:
            raise ValueError(f"--{name}={value}: must be {least} or more")
    if options.interval < 2:
        raise ValueError(
            f"--interval={options.interval}: must be 2 or more, because the run is killed between two checkpoints"
        )
    if options.steps < 4 * options.interval:
        raise ValueError(
            f"--steps={options.steps}: must be {4 * options.interval} or more, four times --interval={options.interval}; "
            f"the run is killed twice"
        )


def print_report(options: ResumeBench, of_run: RunFigures) -> None:
    sys.stdout.writelines(f"{line}\n" for line in _summary_lines(options, of_run))
    print_last("resume", figures(options, of_run), options)


def _summary_lines(options: ResumeBench, of_run: RunFigures) -> list[str]:
    shares = _shares(options, of_run)
    return [
        f"first step {of_run.start_s:.1f} s after the command, without a checkpoint",
        f"restart after {of_run.worker.restart_s:.1f} s (worker killed) and {of_run.driver.restart_s:.1f} s (driver killed)",
        f"repeated steps: {of_run.worker.redone_steps} (worker killed) and {of_run.driver.redone_steps} (driver killed), with "
        f"{options.interval} steps between checkpoints",
        f"{of_run.num_saves} checkpoints of the tiny model: {1000 * of_run.stall_s:.1f} ms blocked each, "
        f"{shares['stall_share_measured']:.3%} of the loop's time with a checkpoint every {options.interval} steps of "
        f"{1000 * of_run.step_s:.0f} ms, {shares['stall_share']:.3%} at the default interval",
    ]


def _shares(options: ResumeBench, of_run: RunFigures) -> dict[str, float]:
    """Return the share of time spent saving, as measured and at the default interval."""
    usual, stall_s, step_s = RunConfig(), of_run.stall_s, of_run.step_s
    return {
        "stall_share": stall_share(stall_s, step_s, save_freq=usual.save_freq, save_every_s=usual.save_every_s),
        "stall_share_measured": stall_share(stall_s, step_s, save_freq=options.interval),
    }


def figures(options: ResumeBench, of_run: RunFigures) -> dict[str, Any]:
    return {
        "checkpoint_bytes": of_run.checkpoint_bytes,
        **_shares(options, of_run),
        "run_stall_s": of_run.stall_s,
        "run_step_s": of_run.step_s,
        "run_saves": of_run.num_saves,
        "start_s": of_run.start_s,
        **_comeback_figures("", of_run.worker),
        **_comeback_figures("driver_", of_run.driver),
    }


def _comeback_figures(prefix: str, comeback: Comeback) -> dict[str, Any]:
    return {
        f"{prefix}restart_s": comeback.restart_s,
        f"{prefix}redone_steps": comeback.redone_steps,
        f"{prefix}resumed_step": comeback.resumed_step,
    }
