"""`vlatune bench resume`: what does it cost to save a run, and to lose a process of it?

A small model's real run is killed twice and watched (`killed_run.py`): how long it stands still for a save, when it is
back at work, and what it waits for until then. A wide model is saved our way and the template's (`save_cost.py`).

`checkpoint_bytes`, `stall_s` and their like of the template are of the wide model, heads trained; `stall_share`,
`restart_s` and `redone_steps` are of the small model's run.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlatune.bench.harness import format_table, print_last, say
from vlatune.bench.options import ResumeBench
from vlatune.bench.processes import ends_in_order
from vlatune.bench.resume.killed_run import Comeback, RunFigures, measure_run, stall_share
from vlatune.bench.resume.save_cost import OURS, TEMPLATE, Saves, measure_saves
from vlatune.config import RunConfig


def run(options: ResumeBench) -> None:
    """Print tables and, as the last line, one JSON object."""
    check(options)
    with ends_in_order(), tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        run_folder, save_folder = Path(scratch) / "small", Path(scratch) / "wide"
        for folder in (run_folder, save_folder):
            folder.mkdir()
        of_run = measure_run(run_folder, options, say=say)
        by_train = measure_saves(save_folder, options, say=say)
    print_report(options, of_run, by_train)


def check(options: ResumeBench) -> None:
    for name, value in vars(options).items():
        least = 0 if name == "seed" else 1
        if isinstance(value, int | float) and value < least:
            raise ValueError(f"--{name}={value}: must be {least} or more")
    if options.interval < 2:
        raise ValueError(f"--interval={options.interval}: must be 2 or more, as the run is killed between two saves")
    if options.steps < 4 * options.interval:
        raise ValueError(
            f"--steps={options.steps}: must be {4 * options.interval} or more, four times --interval={options.interval}; "
            f"the run is killed twice on its way"
        )


def print_report(options: ResumeBench, of_run: RunFigures, by_train: Mapping[str, Saves]) -> None:
    rows = [_save_row(train, way, saves[way]) for train, saves in by_train.items() for way in (OURS, TEMPLATE)]
    tables = [format_table(["trained", "way", "checkpoint MB", "training stands still s", "background s"], rows)]
    for what, comeback in {"a worker killed": of_run.worker, "the driver killed": of_run.driver}.items():
        header = [f"{what}, then", "after s", "it took s"]
        tables.append(format_table(header, profile_rows(comeback.profile())))
    sys.stdout.write("\n\n".join(tables) + "\n\n")
    sys.stdout.writelines(f"{line}\n" for line in _sentences(options, of_run))
    print_last("resume", figures(options, of_run, by_train), options)


def _save_row(train: str, way: str, saves: list[Any]) -> list[str]:
    stall_s, background_s = (
        statistics.median(getattr(one, name) for one in saves) for name in ("stall_s", "background_s")
    )
    return [train, way, f"{saves[-1].num_bytes / 1e6:.1f}", f"{stall_s:.4f}", f"{background_s:.2f}"]


def profile_rows(profile: Mapping[str, float | None]) -> list[list[str]]:
    """Moments with their seconds since the beginning and since the moment before that was seen."""
    rows, before_s = [], 0.0
    for name, at_s in profile.items():
        if at_s is None:
            rows.append([name, "not seen", ""])
            continue
        rows.append([name, f"{at_s:.1f}", f"{at_s - before_s:.1f}"])
        before_s = at_s
    return rows


def _sentences(options: ResumeBench, of_run: RunFigures) -> list[str]:
    shares = _shares(options, of_run)
    return [
        f"first step {of_run.start_s:.1f} s after the command, with nothing to go on from",
        f"steps made again: {of_run.worker.redone_steps} after the worker's kill, {of_run.driver.redone_steps} after the "
        f"driver's, of {options.interval} between two saves",
        f"{of_run.num_saves} saves of the small model: {1000 * of_run.stall_s:.1f} ms of stall each, "
        f"{shares['stall_share_measured']:.3%} of the loop's time with a save every {options.interval} steps of "
        f"{1000 * of_run.step_s:.0f} ms, {shares['stall_share']:.3%} at the default interval",
    ]


def _shares(options: ResumeBench, of_run: RunFigures) -> dict[str, float]:
    """As it was measured, and at the interval that a run has by default."""
    usual, stall_s, step_s = RunConfig(), of_run.stall_s, of_run.step_s
    return {
        "stall_share": stall_share(stall_s, step_s, save_freq=usual.save_freq, save_every_s=usual.save_every_s),
        "stall_share_measured": stall_share(stall_s, step_s, save_freq=options.interval),
    }


def figures(options: ResumeBench, of_run: RunFigures, by_train: Mapping[str, Saves]) -> dict[str, Any]:
    ours, template = by_train["heads"][OURS], by_train["heads"][TEMPLATE]
    return {
        "checkpoint_bytes": ours[-1].num_bytes,
        "template_checkpoint_bytes": template[-1].num_bytes,
        "stall_s": statistics.median(one.stall_s for one in ours),
        "template_stall_s": statistics.median(one.stall_s for one in template),
        "template_stall_over_ours": statistics.median(
            theirs.stall_s / mine.stall_s for mine, theirs in zip(ours, template, strict=True)
        ),
        **_shares(options, of_run),
        "run_stall_s": of_run.stall_s,
        "run_step_s": of_run.step_s,
        "run_saves": of_run.num_saves,
        "start_s": of_run.start_s,
        **_comeback_figures("", of_run.worker),
        **_comeback_figures("driver_", of_run.driver),
        "saves": {
            train: {way: [asdict(one) for one in saves[way]] for way in saves} for train, saves in by_train.items()
        },
    }


def _comeback_figures(prefix: str, comeback: Comeback) -> dict[str, Any]:
    return {
        f"{prefix}restart_s": comeback.restart_s,
        f"{prefix}redone_steps": comeback.redone_steps,
        f"{prefix}resumed_step": comeback.resumed_step,
        f"{prefix}restart_profile_s": comeback.profile(),
    }
