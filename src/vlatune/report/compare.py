"""Several runs on one page: their verdicts, their curves over each other, their figures side by side, and the settings in which
they differ.

As self-contained and as careful as report.html: names and settings come from folders of strangers and are escaped.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.files import write_text
from vlatune.report.chart import Chart, Line, Unit, draw, scale_of, span_of
from vlatune.report.formatting import (
    Html,
    format_bytes,
    format_number,
    format_seconds,
    format_share,
    join,
    shorten,
    tag,
)
from vlatune.report.html import DAMAGED, told_verdict
from vlatune.report.page import MAX_TEXT, flat_settings, make_page, row, section, shown_setting, table, told
from vlatune.report.plots import loss_scale, smooth, told_scale
from vlatune.report.run_folder import Run, read_run

MAX_RUNS = 6
"""As many as page.css has colours for."""
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "optimizer_steps": ("Optimizer steps", lambda count: f"{count:,}"),
    "final_loss": ("Final loss", format_number),
    "samples_per_s": ("Samples per second", lambda rate: format_number(rate, digits=3)),
    "wait_share": ("Waiting for data", format_share),
    "time_to_first_batch_s": ("Time to first batch", format_seconds),
    "spilled_bytes": ("Spilled to disk", format_bytes),
    "restarts": ("Restarts", str),
}


def write_comparison(run_dirs: Sequence[Path], file: Path, *, reload_s: float | None = None) -> Path:
    if len(run_dirs) > MAX_RUNS:
        raise ValueError(
            f"{len(run_dirs)} runs: at most {MAX_RUNS} can be told apart on one page; compare fewer at a time"
        )
    runs = {name: read_run(path, []) for name, path in zip(_names(run_dirs), run_dirs, strict=True)}
    title = f"{len(runs)} runs compared"
    head = tag("header", tag("p", "vlatune", class_="eyebrow"), tag("h1", title))
    try:
        body = join([head, _verdicts(runs), _figures(runs), _curves(runs), _differences(runs)])
    except DAMAGED as error:
        raise ValueError(
            f"{', '.join(map(str, run_dirs))}: figures that are not as vlatune writes them ({type(error).__name__}: {error}); "
            f"`vlatune report RUN` of each names the run"
        ) from error
    finished = all(run.summary for run in runs.values())
    write_text(file, make_page(f"{title} · vlatune", body, reload_s=None if finished else reload_s))
    return file


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """The folders' names; with as much of their path as tells them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{run_dirs[0]}: the same run folder is given twice; give each run once")


def _verdicts(runs: dict[str, Run]) -> Html:
    lines = []
    for number, (name, run) in enumerate(runs.items()):
        found = told_verdict(run)
        words = tag("span", shorten(found.line, MAX_TEXT), class_=f"verdict {found.tone}")
        lines.append(tag("li", tag("b", _mark(number), shorten(name, 60)), words))
    return tag("ul", *lines, class_="verdicts")


def _mark(number: int) -> Html:
    return tag("i", class_=f"mark run{number}")


def _curves(runs: dict[str, Run]) -> Html:
    metrics = {name: run.metrics for name, run in runs.items()}
    validations = {name: run.validations for name, run in runs.items()}
    wide = [
        _chart("Loss, smoothed", metrics, "loss", height_px=280, noisy=True),
        _chart("Open-loop action error on held-out samples", validations, "val_action_error"),
    ]
    pairs = [
        _chart("Loss on held-out samples", validations, "val_loss"),
        _chart("Learning rate", metrics, "lr"),
        _chart("Samples per second", metrics, "samples_per_s", noisy=True),
        _chart("Waiting for data", metrics, "wait_share", unit="share", least_top=0.1, noisy=True),
    ]
    shown = [chart for chart in pairs if chart is not None]
    return section(
        "Learning and speed", *(chart for chart in wide if chart is not None), tag("div", *shown, class_="pair")
    )


def _chart(
    title: str,
    records: dict[str, list[dict[str, Any]]],
    key: str,
    *,
    height_px: int = 200,
    unit: Unit = "number",
    least_top: float = 0.0,
    noisy: bool = False,
) -> Html | None:
    """One quantity of all runs that logged it; smoothed where noise of several runs would hide them from each other."""
    lines = []
    for number, (name, each) in enumerate(records.items()):
        points = [(one["optimizer_step"], one[key]) for one in each if isinstance(one.get(key), int | float)]
        if points:
            xs, ys = np.array(points, dtype=np.float64).T
            lines.append(Line(shorten(name, 60), xs, smooth(ys) if noisy else ys, f"run{number}"))
    if not lines:
        return None
    xs, ys = np.concatenate([line.xs for line in lines]), np.concatenate([line.ys for line in lines])
    scale = loss_scale(ys) if "loss" in key else scale_of(ys, [least_top], from_zero=True)
    return draw(Chart(title + told_scale(scale), tuple(lines), span_of(xs), scale, unit=unit, height_px=height_px))


def _figures(runs: dict[str, Run]) -> Html:
    rows = [
        row(title, *(told(run.figure(key), write) for run in runs.values())) for key, (title, write) in FIGURES.items()
    ]
    best = [run.summary.best_validation if run.summary else None for run in runs.values()]
    if any(best):
        words = [
            f"{format_number(one['action_error'])} at step {one['optimizer_step']:,}" if one else "-" for one in best
        ]
        rows.append(row("Best validation error", *words))
    errors = [run.evaluation.get("action_error") for run in runs.values()]
    if any(error is not None for error in errors):
        rows.append(row("Evaluation: action error", *(told(error, format_number) for error in errors)))
    return section("Figures", _table(runs, rows, kind="figures compared"))


def _differences(runs: dict[str, Run]) -> Html:
    title, flat = "Settings that differ", [flat_settings(run.config) for run in runs.values()]
    keys = sorted({key for one in flat for key in one})
    differing = [key for key in keys if len({shown_setting(one.get(key)) for one in flat}) > 1]
    if not differing:
        return section(title, tag("p", "None: the runs have the same settings."))
    rows = [row(key, *(shown_setting(one[key]) if key in one else "-" for one in flat)) for key in differing]
    return section(title, _table(runs, rows, kind="settings compared"))


def _table(runs: dict[str, Run], rows: list[Html], *, kind: str) -> Html:
    names = (join([_mark(number), shorten(name, 60)]) for number, name in enumerate(runs))
    return table(["", *names], rows, kind=kind)
