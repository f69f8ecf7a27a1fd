"""Several runs on one page: their curves over each other, their figures side by side, and the settings in which they differ.

As self-contained and as careful as report.html: names and settings come from folders of strangers and are escaped.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlatune.files import write_text
from vlatune.report.chart import Chart, Line, draw, scale_of, span_of
from vlatune.report.formatting import Html, format_number, format_seconds, format_share, join, shorten, tag
from vlatune.report.html import flat_settings, make_page, shown_setting
from vlatune.report.run_folder import Run, read_run

MAX_RUNS = 6
"""As many as page.css has colours for."""
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "optimizer_steps": ("Optimizer steps", lambda count: f"{count:,}"),
    "final_loss": ("Final loss", format_number),
    "samples_per_s": ("Samples per second", lambda rate: format_number(rate, digits=3)),
    "wait_share": ("Waiting for data", format_share),
    "time_to_first_batch_s": ("Time to first batch", format_seconds),
    "restarts": ("Restarts", str),
}


def write_comparison(run_dirs: Sequence[Path], file: Path) -> Path:
    if len(run_dirs) > MAX_RUNS:
        raise ValueError(
            f"{len(run_dirs)} runs: at most {MAX_RUNS} can be told apart on one page; compare fewer at a time"
        )
    runs = {name: read_run(path, []) for name, path in zip(_names(run_dirs), run_dirs, strict=True)}
    title = f"{len(runs)} runs compared"
    head = tag("header", tag("p", "vlatune", class_="eyebrow"), tag("h1", title))
    body = join([head, _curves(runs), _figures(runs), _differences(runs)])
    write_text(file, make_page(f"{title} · vlatune", body))
    return file


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """The folders' names; with as much of their path as tells them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{run_dirs[0]}: the same run folder is given twice; give each run once")


def _curves(runs: dict[str, Run]) -> Html:
    charts = [
        _chart("Loss", {name: run.metrics for name, run in runs.items()}, "loss", height_px=280),
        _chart(
            "Open-loop action error on held-out samples",
            {name: run.validations for name, run in runs.items()},
            "val_action_error",
        ),
        _chart("Samples per second", {name: run.metrics for name, run in runs.items()}, "samples_per_s"),
        _chart("Learning rate", {name: run.metrics for name, run in runs.items()}, "lr"),
    ]
    return tag("section", tag("h2", "Learning and speed"), *(chart for chart in charts if chart is not None))


def _chart(title: str, records: dict[str, list[dict[str, Any]]], key: str, *, height_px: int = 200) -> Html | None:
    lines = []
    for number, (name, each) in enumerate(records.items()):
        points = [(one["optimizer_step"], one[key]) for one in each if isinstance(one.get(key), int | float)]
        if points:
            xs, ys = np.array(points, dtype=np.float64).T
            lines.append(Line(shorten(name, 60), xs, ys, f"run{number}"))
    if not lines:
        return None
    xs, ys = np.concatenate([line.xs for line in lines]), np.concatenate([line.ys for line in lines])
    return draw(Chart(title, tuple(lines), span_of(np.sort(xs)), scale_of(ys, from_zero=True), height_px=height_px))


def _figures(runs: dict[str, Run]) -> Html:
    rows = [
        _row(title, [_told(run.figure(key), write) for run in runs.values()]) for key, (title, write) in FIGURES.items()
    ]
    best = [run.summary.best_validation if run.summary else None for run in runs.values()]
    if any(best):
        told = [
            f"{format_number(one['action_error'])} at step {one['optimizer_step']:,}" if one else "-" for one in best
        ]
        rows.append(_row("Best validation error", told))
    errors = [run.evaluation.get("action_error") for run in runs.values()]
    if any(error is not None for error in errors):
        rows.append(_row("Evaluation: action error", [_told(error, format_number) for error in errors]))
    return tag("section", tag("h2", "Figures"), _table(runs, rows))


def _differences(runs: dict[str, Run]) -> Html:
    flat = [flat_settings(run.config) for run in runs.values()]
    keys = sorted({key for one in flat for key in one})
    differing = [key for key in keys if len({shown_setting(one.get(key)) for one in flat}) > 1]
    if not differing:
        return tag("section", tag("h2", "Settings that differ"), tag("p", "None: the runs have the same settings."))
    rows = [_row(key, [shown_setting(one[key]) if key in one else "-" for one in flat]) for key in differing]
    return tag("section", tag("h2", "Settings that differ"), _table(runs, rows))


def _table(runs: dict[str, Run], rows: list[Html]) -> Html:
    cells = (
        tag("th", tag("i", class_=f"mark run{number}"), shorten(name, 60), scope="col")
        for number, name in enumerate(runs)
    )
    return tag("table", tag("thead", tag("tr", tag("th", ""), *cells)), tag("tbody", *rows), class_="settings compared")


def _row(title: str, cells: Sequence[str]) -> Html:
    return tag("tr", tag("th", shorten(title, 120), scope="row"), *(tag("td", cell) for cell in cells))


def _told(value: Any, write: Callable[[Any], str]) -> str:
    return "-" if value is None else write(value)
