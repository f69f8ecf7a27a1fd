"""RUN/report.html: what happened in a run, on one page that needs nothing else.

Reads the run folder and puts sections one after the other, the verdict first; each section is a function of the run, in
section_learning.py, section_speed.py and section_data.py. A part that is missing (no evaluation yet, a run that died on its
first step) is said to be missing. All text goes through `formatting.tag`, which escapes it: sentences and names come from
datasets of strangers. The document around it is page.py's, charts are plots.py's, words on the figures verdict.py's.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlatune.config import RunConfig
from vlatune.console import printable, redacted
from vlatune.files import write_text
from vlatune.flags import config_from_dict, flags_of, typed
from vlatune.report.formatting import (
    Html,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    join,
    plural,
    shorten,
    tag,
)
from vlatune.report.kept_samples import EvalSample, load_eval_samples, load_rollouts, save_eval_samples
from vlatune.report.page import MAX_TEXT, command, flat_settings, make_page, missing, row, section, shown_setting, table
from vlatune.report.run_folder import CONFIG_FILE, EVAL_PAGE_FILE, REPORT_FILE, Run, read_evaluation, read_run
from vlatune.report.section_data import data_seen, first_batch, predicted
from vlatune.report.section_learning import evaluated, learning, rolled_out, simulated, split_loss
from vlatune.report.section_speed import memory, spent_time, time_line
from vlatune.report.summary import SUMMARY_FILE
from vlatune.report.verdict import WAIT_SHARE_FINE, Tone, Verdict, judge

__all__ = ["EvalSample", "load_eval_samples", "make_page", "save_eval_samples", "write_report"]

READING_ANEW = "times a process that schedules it died"
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What figures raise that lack their others."""


def write_report(
    run_dir: Path,
    *,
    eval_samples: list[EvalSample] | None = None,
    file: Path | None = None,
    reload_s: float | None = None,
) -> Path:
    """Write RUN/report.html, or `file`; without `eval_samples`, with those that `save_eval_samples` kept in the folder."""
    run = read_run(Path(run_dir), eval_samples)
    parts = (
        _head,
        _tiles,
        learning,
        spent_time,
        memory,
        time_line,
        data_seen,
        first_batch,
        predicted,
        evaluated,
        rolled_out,
        simulated,
        split_loss,
        _settings,
    )
    path = file or Path(run_dir) / REPORT_FILE
    try:
        body = join([part(run) for part in parts])
    except DAMAGED as error:
        raise ValueError(
            f"{run_dir}: its figures are not as vlatune writes them ({type(error).__name__}: {error}); restore {SUMMARY_FILE}, metrics.jsonl "
            f"and eval.json, or remove what is damaged"
        ) from error
    write_text(path, make_page(f"{run.name} · vlatune", body, reload_s=None if run.summary else reload_s))
    return path


def write_eval_page(folder: Path, name: str) -> Path:
    """Write eval.html beside the figures of an evaluation that is not a run's own."""
    evaluation = read_evaluation(folder)
    run = Run(name, evaluation=evaluation, samples=load_eval_samples(folder), rollouts=load_rollouts(folder))
    head = tag(
        "header",
        tag("p", f"vlatune eval · {shown_setting(evaluation.get('root') or '')}", class_="eyebrow"),
        tag("h1", shorten(name, MAX_TEXT)),
    )
    path = folder / EVAL_PAGE_FILE
    body = join([head, evaluated(run), rolled_out(run), predicted(run)])
    write_text(path, make_page(f"{name} · vlatune eval", body))
    return path


def watch(
    write: Callable[[], Path],
    run_dirs: list[Path],
    *,
    every_s: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write a page again and again until all its runs have written their summaries; the page loads itself again."""
    if not 0 < every_s < math.inf:
        raise ValueError(f"--every_s={every_s}: must be above 0")
    until = "the run is" if len(run_dirs) == 1 else "all runs are"
    say(f"{write()}: written again every {every_s:g} s until {until} finished; Ctrl-C ends it")
    while not all((run_dir / SUMMARY_FILE).exists() for run_dir in run_dirs):
        sleep(every_s)
        write()


def _head(run: Run) -> Html:
    found = told_verdict(run)
    policy, dataset = run.config.get("policy") or {}, run.config.get("dataset") or {}
    roots = dataset.get("root") or [dataset.get("repo_id")]
    roots = [roots] if isinstance(roots, str) else roots
    names = (shown_setting(root).rstrip("/").split("/")[-1] for root in roots if root)
    about = ["vlatune run", *(str(word) for word in (policy.get("type"), policy.get("train"), *names) if word)]
    return tag(
        "header",
        tag("p", " · ".join(about), class_="eyebrow"),
        tag("h1", shorten(run.name, MAX_TEXT)),
        tag("p", shorten(found.line, MAX_TEXT), class_=f"verdict {found.tone}"),
    )


def told_verdict(run: Run) -> Verdict:
    """The run's own, or what can be said before its end."""
    if run.summary:
        found = judge(run.summary, run.config)
        return Verdict(found.tone, run.summary.verdict or found.line)
    if not run.metrics:
        return Verdict("bad", "nothing was logged: the run has not come to its first log line, or died; see logs/")
    steps = plural(run.figure("optimizer_steps"), "optimizer step")
    return Verdict("warn", f"not finished: {steps} logged and no summary; the run is going on, or died (see logs/)")


def _tiles(run: Run) -> Html:
    wait, spilled, restarts = run.figure("wait_share"), run.figure("spilled_bytes"), run.figure("restarts")
    reading_anew = run.figure("reader_restarts")
    peak, planned, step_s = run.figure("peak_object_store_bytes"), run.config.get("steps"), run.figure("step_s")
    of_planned, pace = f"of {planned:,}" if planned else "", f"{format_seconds(step_s)} a step" if step_s else ""
    loss_name, slow = "Final loss" if run.summary else "Last loss", wait is not None and wait >= WAIT_SHARE_FINE
    tiles = (
        _tile("Optimizer steps", run.figure("optimizer_steps"), _count, note=of_planned),
        _tile(loss_name, run.figure("final_loss"), format_number, note=_first_loss(run)),
        _tile("Best on held-out", _best_error(run), format_number, note=_best_step(run)),
        _tile("Samples per second", run.figure("samples_per_s"), _rate, note=pace),
        _tile("Waiting for data", wait, format_share, note="of the loop's time", tone="warn" if slow else None),
        _tile("Time to first batch", run.figure("time_to_first_batch_s"), format_seconds),
        _tile("Spilled to disk", spilled, format_bytes, tone="bad" if spilled else None),
        _tile("Peak object store", peak, format_bytes, note=_share_of(peak, run.capacity_bytes)),
        _tile("Restarts", restarts, _count, note="of the workers", tone="warn" if restarts else None),
        _tile("Reading begun anew", reading_anew, _count, note=READING_ANEW, tone="warn" if reading_anew else None),
    )
    return tag("dl", *tiles, class_="tiles")


def _best_error(run: Run) -> float | None:
    return min((one["val_action_error"] for one in run.validations), default=None)


def _best_step(run: Run) -> str:
    best = min(run.validations, key=lambda one: one["val_action_error"], default=None)
    return f"action error, at step {best['optimizer_step']:,}" if best else ""


def _count(number: int) -> str:
    return f"{number:,}"


def _rate(per_second: float) -> str:
    return format_number(per_second, digits=3)


def _first_loss(run: Run) -> str:
    first = run.metrics[0] if len(run.metrics) > 1 else {}
    return f"{format_number(first['loss'])} at step {first['optimizer_step']:,}" if "loss" in first else ""


def _share_of(peak: float | None, capacity_bytes: float | None) -> str:
    return f"{format_share(peak / capacity_bytes)} of the store" if peak and capacity_bytes else ""


def _tile(name: str, value: Any, write: Callable[[Any], str], *, note: str = "", tone: Tone | None = None) -> Html:
    figure = tag("dd", "not recorded", class_="none") if value is None else tag("dd", write(value))
    return tag(
        "div",
        tag("dt", name),
        figure,
        tag("dd", note if value is not None else "", class_="note"),
        class_=f"tile {tone or ''}".strip(),
    )


def _settings(run: Run) -> Html:
    versions = run.summary.versions if run.summary else {}
    return section(
        "Settings, versions, command",
        *_command(run),
        _details(f"{plural(len(flat_settings(run.config)), 'setting')} ({CONFIG_FILE})", flat_settings(run.config)),
        _details(plural(len(versions), "version"), flat_settings(versions))
        if versions
        else missing("Versions are recorded at a run's end."),
    )


def _command(run: Run) -> list[Html]:
    """The run as flags, quoted for a shell: what differs from its recipe. Secrets stay behind."""
    try:
        words = flags_of(config_from_dict(RunConfig, run.config, CONFIG_FILE))
    except ValueError as error:  # of another version, or edited
        return [missing(f"No command can be made of {CONFIG_FILE}: {shorten(str(error), MAX_TEXT)}")]
    text = "The same run as a command. Where its folder is, it goes on with it; with another "
    line = [printable(redacted(typed([word]))) for word in ("vlatune", "train", *words)]
    return [tag("p", text, tag("code", "--output_dir=DIR"), " it begins anew."), command(line)]


def _details(summary: str, rows: dict[str, Any]) -> Html:
    body = (row(key, shown_setting(value)) for key, value in rows.items())
    return tag("details", tag("summary", summary), table(None, body))
