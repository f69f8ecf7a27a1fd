"""Write RUN/report.html, a self-contained page about a run.

Each section is a function of the run, in section_learning.py, section_data.py and section_speed.py.
Missing parts (no evaluation yet, a run that failed at its first step) are shown as missing.
`formatting.tag` escapes all text, because instructions and names are untrusted.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlatune.config.flags import config_from_dict, flags_of, quote_flags
from vlatune.config.settings import RunConfig
from vlatune.console import printable, redacted
from vlatune.formatting import (
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
from vlatune.report.page import MAX_TEXT, command, folded, make_page, missing, row, section, shown_setting, table
from vlatune.report.section_cache import stored
from vlatune.report.section_data import data_used, first_batch
from vlatune.report.section_learning import evaluated, learning, predicted, rolled_out, split_loss
from vlatune.report.section_speed import run_verdict, speed, time_line, verdict_line
from vlatune.run.kept_samples import EVAL_SAMPLES_FILE, ROLLOUTS_FILE, EvalSample, load_samples
from vlatune.run.run_folder import (
    CONFIG_FILE,
    EVAL_PAGE_FILE,
    REPORT_FILE,
    Run,
    flat_settings,
    read_evaluation,
    read_run,
)
from vlatune.run.summary import SUMMARY_FILE
from vlatune.run.verdict import WAIT_SHARE_FINE, Tone, learning_verdict, time_left_s
from vlatune.storage.files import write_text


@contextmanager
def damage_reported(where: object) -> Iterator[None]:
    """Report values that have the right types but cannot be shown, such as numbers of 300 digits."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: its values are not as vlatune writes them ({type(error).__name__}: {error}); restore {SUMMARY_FILE}, "
            f"metrics.jsonl and eval.json, or remove what is damaged"
        ) from error


def write_report(run_dir: Path, *, file: Path | None = None) -> Path:
    """Write RUN/report.html, or `file`."""
    run = read_run(Path(run_dir))
    learned_parts = (_head, _tiles, learning, evaluated, predicted, rolled_out, split_loss)
    parts = (*learned_parts, data_used, first_batch, speed, stored, time_line, _settings)
    path = file or Path(run_dir) / REPORT_FILE
    with damage_reported(run_dir):
        body = join([part(run) for part in parts])
    write_text(path, make_page(f"{run.name} · vlatune", body))
    return path


def write_eval_page(folder: Path, name: str) -> Path:
    """Write eval.html for an evaluation outside of a run folder."""
    samples, rollouts = (load_samples(folder, file, EvalSample) for file in (EVAL_SAMPLES_FILE, ROLLOUTS_FILE))
    run = Run(name, evaluation=read_evaluation(folder), samples=samples, rollouts=rollouts)
    about = " · ".join(["vlatune eval", *([shown_setting(root)] if (root := run.evaluation.get("root")) else [])])
    head = tag("header", tag("p", about, class_="eyebrow"), tag("h1", shorten(name, MAX_TEXT)))
    body = join([head, evaluated(run), rolled_out(run), predicted(run)])
    write_text(folder / EVAL_PAGE_FILE, make_page(f"{name} · vlatune eval", body))
    return folder / EVAL_PAGE_FILE


def _head(run: Run) -> Html:
    """Render name, data and what was learned, and the state of a failed or unfinished run."""
    state = run_verdict(run)
    found = [learning_verdict(run.metrics, run.validations, run.evaluation)]
    found += [state] if state.tone == "bad" or run.summary is None else []
    policy = run.config.get("policy") or {}
    datasets = (shown_setting(root).rstrip("/").split("/")[-1] for root in run.roots)
    about = ["vlatune run", *(str(word) for word in (policy.get("type"), policy.get("train"), *datasets) if word)]
    title = tag("p", " · ".join(about), class_="eyebrow"), tag("h1", shorten(run.name, MAX_TEXT))
    return tag("header", *title, *(verdict_line(one) for one in found if one))


def _tiles(run: Run) -> Html:
    """Render the main figures: learning in the first row, speed in the second."""
    wait, spilled, restarts = run.figure("wait_share"), run.figure("spilled_bytes"), run.figure("restarts")
    planned, error = run.config.get("steps"), run.evaluation.get("action_error")
    best, slow = run.best_validation, wait is not None and wait >= WAIT_SHARE_FINE
    best_error, best_note = (
        (best["val_action_error"], f"action error, at step {best['optimizer_step']:,}") if best else (None, "")
    )
    first = run.metrics[0] if len(run.metrics) > 1 else {}
    first_note = f"{format_number(first['loss'])} at step {first['optimizer_step']:,}" if first.get("loss") else ""
    if run.summary:
        duration = _tile("Duration", run.summary.time_s.get("total"), format_seconds, note="of the last start")
    else:
        left_s = time_left_s(run.metrics, planned)
        duration = _tile("Time left", left_s, format_seconds, note="estimated from the newest log lines")
    count, rate = "{:,}".format, lambda per_s: format_number(per_s, digits=3)
    tiles = (
        _tile("Optimizer steps", run.figure("optimizer_steps"), count, note=f"of {planned:,}" if planned else ""),
        _tile("Final loss" if run.summary else "Last loss", run.figure("final_loss"), format_number, note=first_note),
        _tile("Best validation", best_error, format_number, note=best_note),
        *([_tile("Evaluation", error, format_number, note="action error")] if error is not None else []),
        duration,
        _tile("Samples per second", run.figure("samples_per_s"), rate),
        _tile("Waiting for data", wait, format_share, note="of the training time", tone="warn" if slow else None),
        _tile("Time to first batch", run.figure("time_to_first_batch_s"), format_seconds),
        _tile("Spilled to disk", spilled, format_bytes, tone="bad" if spilled else None),
        _tile("Restarts", restarts, count, note="of the workers", tone="warn" if restarts else None),
    )
    return tag("dl", *tiles, class_="tiles")


def _tile(
    name: str, value: Any, format_value: Callable[[Any], str], *, note: str = "", tone: Tone | None = None
) -> Html:
    figure = tag("dd", "not recorded", class_="none") if value is None else tag("dd", format_value(value))
    below = tag("dd", note if value is not None else "", class_="note")
    return tag("div", tag("dt", name), figure, below, class_=f"tile {tone or ''}".strip())


def _settings(run: Run) -> Html:
    versions = run.summary.versions if run.summary else {}
    count = plural(len(flat_settings(run.config)), "setting")
    last = _listed(plural(len(versions), "version"), versions) if versions else missing("No versions were recorded.")
    return section("Settings, versions, command", *_command(run), _listed(f"{count} ({CONFIG_FILE})", run.config), last)


def _command(run: Run) -> list[Html]:
    """Return the shell command of the run with its non-default flags; secrets are redacted."""
    try:
        words = flags_of(config_from_dict(RunConfig, dict(run.config), CONFIG_FILE))
    except ValueError as error:  # written by another version, or edited
        return [missing(f"No command can be made of {CONFIG_FILE}: {shorten(str(error), MAX_TEXT)}")]
    text = "The same run as a command. It resumes the run if its folder exists; with another "
    line = [printable(redacted(quote_flags([word]))) for word in ("vlatune", "train", *words)]
    return [tag("p", text, tag("code", "--output_dir=DIR"), " it starts a new one."), command(line)]


def _listed(summary: str, values: Mapping[str, Any]) -> Html:
    return folded(
        summary, table(None, [row(key, shown_setting(value)) for key, value in flat_settings(values).items()])
    )
