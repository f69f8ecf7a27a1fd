"""`python -m benchmarks table`: the template, pull request #705, `lerobot-train` and vlatune in one table.

All programs train the same base on the same dataset for the same steps, one after the other. The
time of a step is the pull request's measure: the seconds from the start of reading until the last
step (the execution of the dataset, the producer's time), over the number of steps. Writes the table
and a plot beside the JSON result of `--output`.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import format_table, print_last, say
from benchmarks.options import StepBench, TableBench, TrainBench
from benchmarks.processes import Program, Seen, ends_in_order, folder_bytes, watch
from benchmarks.table.table_plot import Panel, draw_bars
from benchmarks.table.template_program import DATA_BEGIN, MODEL, PROGRESS, RESULT
from benchmarks.table.template_step import TEMPLATE, TEMPLATE_705
from benchmarks.tables import markdown_table
from benchmarks.train import train_programs as programs
from benchmarks.train.time_to_quality import ErrorMeter, lerobot_folder, our_folder
from benchmarks.train.train_cases import TrainJob, make_job
from benchmarks.train.train_figures import first_step_at
from vlatune.checkpoint.store import list_checkpoints
from vlatune.formatting import format_bytes
from vlatune.run.run_folder import EVENTS_FILE
from vlatune.run.summary import read_summary
from vlatune.storage.files import write_text

LEROBOT, OURS = "lerobot-train", "vlatune"
PROGRAMS = (TEMPLATE, TEMPLATE_705, LEROBOT, OURS)
CONFIG = "full-video"
"""Configuration of the train benchmark: three cameras of 480 x 640, and a small model."""
SYNC_STEP = StepBench(width=128, depth=2, vision_depth=1, image_size=56, tokens=32, horizon=10, rounds=1)
"""Step in which host syncs are counted; their number does not depend on the size."""


@dataclass(frozen=True)
class Row:
    """Figures of one program; None if it has no such thing."""

    step_s: float
    """Seconds of reading and training per step."""
    producer_s: float
    """Seconds from the start of reading until the last step."""
    peak_store_bytes: int | None
    spilled_bytes: int | None
    samples_per_s: float
    """Rate of the complete run, including start-up."""
    host_syncs: int | None
    """Host syncs per step."""
    first_step_s: float
    checkpoint_bytes: int
    held_out_error: float


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "s per step": lambda row: f"{row.step_s:.3f}",
    "producer, s": lambda row: f"{row.producer_s:.1f}",
    "peak store": lambda row: _bytes(row.peak_store_bytes),
    "spilled": lambda row: _bytes(row.spilled_bytes),
    "samples/s": lambda row: f"{row.samples_per_s:.1f}",
    "host syncs": lambda row: "-" if row.host_syncs is None else str(row.host_syncs),
    "first step, s": lambda row: f"{row.first_step_s:.1f}",
    "checkpoint": lambda row: _bytes(row.checkpoint_bytes),
    "held-out error": lambda row: f"{row.held_out_error:.4f}",
}


def run(options: TableBench) -> None:
    """Print a table and a final JSON line."""
    for name in options.programs:
        if name not in PROGRAMS:
            raise ValueError(f"--programs={name}: must be one of {', '.join(PROGRAMS)}")
    with ExitStack() as stack:
        stack.enter_context(ends_in_order())
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="vlatune-bench-")))
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        job = make_table_job(options, folder)
        meter = ErrorMeter(job, options.eval_samples)
        start_error = meter.error_of(Path(str(job.config.policy.path)))
        syncs = count_syncs(options.train) if {LEROBOT, OURS} & set(options.programs) else {}
        rows = {}
        for name in options.programs:
            say(f"{name}: {job.config.steps} steps of {job.config.batch_size} samples")
            rows[name] = measure(name, job, folder / "runs" / name.replace(" ", ""), meter, syncs, options.timeout_s)
        shutil.rmtree(folder / "runs", ignore_errors=True)
    print_report(options, rows, start_error)


def make_table_job(options: TableBench, folder: Path) -> TrainJob:
    """Create dataset and base if needed, and return the job of all programs."""
    job = make_job(
        TrainBench(
            config=CONFIG,
            root=options.root,
            base=options.base,
            steps=options.steps,
            batch_size=options.batch_size,
            store_bytes=options.store_bytes,
            eval_split=options.eval_split,
            num_workers=options.loader_workers,
            seed=options.seed,
        ),
        folder,
    )
    policy = replace(job.config.policy, train=options.train)
    config = replace(job.config, policy=policy, num_workers=options.num_workers, log_freq=1)
    return replace(job, config=config, device=options.device)


def count_syncs(train: str) -> dict[str, int]:
    """Return the host syncs of a step of LeRobot and of vlatune."""
    import torch

    from benchmarks.base_models import make_base
    from benchmarks.step.step_bench import measure as measure_step

    with tempfile.TemporaryDirectory(prefix="vlatune-bench-") as scratch:
        base = make_base(Path(scratch) / "base", SYNC_STEP)
        figures = measure_step(base, train, SYNC_STEP, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {LEROBOT: figures.lerobot.host_syncs, OURS: figures.ours.host_syncs}


def measure(
    name: str, job: TrainJob, folder: Path, meter: ErrorMeter, syncs: Mapping[str, int], timeout_s: float
) -> Row:
    """Run a program and return its figures."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seen = watch(make_program(name, job, folder), timeout_s=timeout_s)
    steps, samples = job.config.steps, job.config.steps * job.config.batch_size * job.config.num_workers
    producer_s = seen.marks[-1].at_s - data_begin_s(name, folder, seen)
    peak_bytes: int | None = None
    spilled_bytes: int | None = None
    host_syncs = syncs.get(name)
    if name == LEROBOT:
        model = lerobot_folder(job, folder, steps)
        saved_bytes = folder_bytes(model.parent)
    elif name == OURS:
        summary = read_summary(folder / "run")
        assert summary is not None  # the run has finished
        peak_bytes, spilled_bytes = summary.peak_object_store_bytes, summary.spilled_bytes
        model, saved_bytes = our_folder(folder, steps), folder_bytes(list_checkpoints(folder / "run")[-1])
    else:
        result = json.loads((folder / RESULT).read_text())
        peak_bytes, spilled_bytes = result["peak_store_bytes"], result["spilled_bytes"]
        model, saved_bytes, host_syncs = folder / MODEL, result["checkpoint_bytes"], result["host_syncs"]
    return Row(
        step_s=producer_s / steps,
        producer_s=producer_s,
        peak_store_bytes=peak_bytes,
        spilled_bytes=spilled_bytes,
        samples_per_s=samples / (seen.marks[-1].at_s - seen.begin_s),
        host_syncs=host_syncs,
        first_step_s=first_step_at(seen.marks) - seen.begin_s,
        checkpoint_bytes=saved_bytes,
        held_out_error=meter.error_of(model),
    )


def make_program(name: str, job: TrainJob, folder: Path) -> Program:
    if name == LEROBOT:
        return programs.lerobot(job, folder)
    return programs.ours(job, folder) if name == OURS else programs.template(job, folder, name)


def data_begin_s(name: str, folder: Path, seen: Seen) -> float:
    """Return the monotonic time at which a program began to read data."""
    if name == LEROBOT:
        assert seen.data_begin_s is not None  # it logs a line before its first batch
        return seen.data_begin_s
    file, key = (folder / "run" / EVENTS_FILE, "time_s") if name == OURS else (folder / PROGRESS, DATA_BEGIN)
    first = json.loads(file.read_text().splitlines()[0])
    return first[key] + time.monotonic() - time.time()


def print_report(options: TableBench, rows: Mapping[str, Row], start_error: float) -> None:
    table = format_table(("program", *COLUMNS), [_cells(name, row) for name, row in rows.items()])
    sys.stdout.write(f"{table}\nheld-out error of the base: {start_error:.4f}\n")
    if options.output is not None:
        output = Path(options.output)
        cells = [_cells(name, row) for name, row in rows.items()]
        write_text(output.with_suffix(".md"), markdown_table(("", *COLUMNS), cells) + "\n")
        write_text(output.with_suffix(".svg"), plot(rows))
    print_last("table", figures(rows, start_error), options)


def figures(rows: Mapping[str, Row], start_error: float) -> dict[str, Any]:
    ours = rows.get(OURS)
    over = {name: row.step_s / ours.step_s for name, row in rows.items() if name != OURS} if ours else {}
    return {
        "template_over_ours": over.get(TEMPLATE),
        "template_705_over_ours": over.get(TEMPLATE_705),
        "lerobot_over_ours": over.get(LEROBOT),
        "spilled_bytes": ours and ours.spilled_bytes,
        "template_spilled_bytes": rows[TEMPLATE].spilled_bytes if TEMPLATE in rows else None,
        "base_held_out_error": start_error,
        "rows": {name: asdict(row) for name, row in rows.items()},
    }


def plot(rows: Mapping[str, Row]) -> str:
    """Return the plot as SVG: seconds per step and bytes spilled."""
    steps = Panel("seconds per step", {name: row.step_s for name, row in rows.items()}, lambda value: f"{value:.2f} s")
    spilled = {name: float(row.spilled_bytes or 0) for name, row in rows.items()}
    errors = {name: row.held_out_error for name, row in rows.items()}
    return draw_bars(
        (
            steps,
            Panel("spilled to disk", spilled, lambda value: format_bytes(value) if value else "0"),
            Panel("held-out error", errors, lambda value: f"{value:.3f}"),
        ),
        strong=OURS,
    )


def _cells(name: str, row: Row) -> list[str]:
    return [name, *(column(row) for column in COLUMNS.values())]


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)
