"""Compare several runs on one page: figures, settings that differ, curves, and speed limits.
The page is self-contained and escaped like report.html: names and settings are untrusted."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vlatune.formatting import Html, format_bytes, format_number, format_seconds, format_share, join, shorten, tag
from vlatune.report.chart import MAX_COLORS, Chart, Line, Unit, column, draw, has, loss_chart, scale_of, smooth
from vlatune.report.html import damage_reported
from vlatune.report.page import make_page, or_dash, pair, row, section, shown_setting, table
from vlatune.report.section_speed import run_verdict, verdict_line
from vlatune.run.run_folder import Run, flat_settings, read_run
from vlatune.storage.files import write_text

FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "optimizer_steps": ("Optimizer steps", lambda count: f"{count:,}"),
    "final_loss": ("Final loss", format_number),
    "samples_per_s": ("Samples per second", lambda rate: format_number(rate, digits=3)),
    "wait_share": ("Waiting for data", format_share),
    "time_to_first_batch_s": ("Time to first batch", format_seconds),
    "spilled_bytes": ("Spilled to disk", format_bytes),
    "restarts": ("Restarts", str),
}
Count = Literal["episodes", "frames", "held_out"]
OWN_NAMES = ("job_name", "output_dir")
"""Settings that always differ between runs."""
HELD_OUT = ("seed", "dataset.eval_split", "dataset.episodes")
"""Settings that decide which episodes are held out."""


def write_comparison(run_dirs: Sequence[Path], file: Path) -> Path:
    if len(run_dirs) > MAX_COLORS:
        raise ValueError(f"{len(run_dirs)} runs: at most {MAX_COLORS} can be compared on one page")
    runs = {name: read_run(path, with_samples=False) for name, path in zip(_names(run_dirs), run_dirs, strict=True)}
    title = f"{len(runs)} runs compared"
    with damage_reported(", ".join(map(str, run_dirs))):
        warnings = (tag("p", text, class_="verdict warn") for text in _data_warnings(runs.values()))
        head = tag("header", tag("p", "vlatune", class_="eyebrow"), tag("h1", title), *warnings)
        body = join([head, _figures(runs), _differences(runs), _curves(runs), _speed(runs)])
    write_text(file, make_page(f"{title} · vlatune", body))
    return file


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the folders' names, with as many parent folders as needed to make them unique."""
    parts = [path.resolve().parts for path in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{run_dirs[0]}: the same run folder is given twice; give each run once")


def _total(run: Run, key: Count) -> int | None:
    return sum(one[key] for one in run.data["datasets"]) if run.data else None


def _data_warnings(runs: Collection[Run]) -> list[str]:
    """Return why losses and errors of the runs may not be comparable."""
    # Compared by the last part of the path: the same dataset may be given as a relative path, too.
    names = [tuple(root.rstrip("/").split("/")[-1] for root in run.roots) for run in runs]
    totals = [(_total(run, "frames"), run.data["tasks"] if run.data else ()) for run in runs]
    data = set(zip(names, totals, strict=True))
    settings = [flat_settings(run.config) for run in runs]
    if len(data) > 1:
        return [
            "The runs were trained on different datasets: unless these are copies, losses and errors are not directly comparable."
        ]
    if len({tuple(shown_setting(one.get(key)) for key in HELD_OUT) for one in settings}) > 1:
        return ["The runs held out different episodes: their validation errors are not directly comparable."]
    return []


def _speed(runs: dict[str, Run]) -> Html:
    names = (tag("b", _mark(number), shorten(name, 60)) for number, name in enumerate(runs))
    verdicts = (verdict_line(run_verdict(run)) for run in runs.values())
    items = (tag("li", name, verdict) for name, verdict in zip(names, verdicts, strict=True))
    return section("What limited the speed", tag("ul", *items, class_="verdicts"))


def _mark(number: int) -> Html:
    return tag("i", class_=f"mark run{number}")


def _curves(runs: dict[str, Run]) -> Html:
    metrics = {name: run.metrics for name, run in runs.items()}
    validations = {name: run.validations for name, run in runs.items()}
    return section(
        "Learning and speed",
        _chart("Loss, smoothed", metrics, "loss", height_px=280, smoothed=True),
        _chart("Open-loop action error on held-out samples", validations, "val_action_error"),
        pair(
            _chart("Loss on held-out samples", validations, "val_loss"),
            _chart("Learning rate", metrics, "lr"),
            _chart("Samples per second", metrics, "samples_per_s", smoothed=True),
            _chart("Waiting for data", metrics, "wait_share", unit="share", least_top=0.1, smoothed=True),
        ),
    )


def _chart(
    title: str,
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    key: str,
    *,
    height_px: int = 200,
    unit: Unit = "number",
    least_top: float = 0.0,
    smoothed: bool = False,
) -> Html:
    """Plot one value of all runs that logged it; empty if none did."""
    lines = []
    for number, (name, each) in enumerate(records.items()):
        if has(each, key):
            xs, ys = column(each, "optimizer_step"), column(each, key)
            lines.append(Line(shorten(name, 60), xs, smooth(ys) if smoothed else ys, f"run{number}"))
    if not lines:
        return Html("")
    if "loss" in key:
        return loss_chart(title, lines, height_px=height_px)
    scale = scale_of(*(line.ys for line in lines), [least_top], from_zero=True)
    return draw(Chart(title, tuple(lines), scale, unit=unit, height_px=height_px))


def _figures(runs: dict[str, Run]) -> Html:
    each = list(runs.values())
    best = [run.best_validation for run in each]
    errors = [run.evaluation.get("action_error") for run in each]
    rows = [
        row(
            "Best validation error",
            *(
                or_dash(one, lambda one: f"{format_number(one['val_action_error'])} at step {one['optimizer_step']:,}")
                for one in best
            ),
        ),
        row("Evaluation: action error", *(or_dash(error, format_number) for error in errors)),
    ]
    for key, (title, write) in FIGURES.items():
        rows.append(row(title, *(or_dash(run.figure(key), write) for run in each)))
    titles: dict[Count, str] = {"episodes": "Episodes", "frames": "Frames", "held_out": "Held-out episodes"}
    for key, title in titles.items():
        rows.append(row(title, *(or_dash(_total(run, key), lambda count: f"{count:,}") for run in each)))
    return section("Figures", _table(runs, rows))


def _differences(runs: dict[str, Run]) -> Html:
    """Return the settings that differ, without each run's own name and folder."""
    title, flat = "Settings that differ", [flat_settings(run.config) for run in runs.values()]
    keys = sorted({key for one in flat for key in one if key not in OWN_NAMES})
    differing = [key for key in keys if len({shown_setting(one.get(key)) for one in flat}) > 1]
    if not differing:
        return section(title, tag("p", "None: the runs have the same settings."))
    rows = [row(key, *(shown_setting(one[key]) if key in one else "-" for one in flat)) for key in differing]
    return section(title, _table(runs, rows, kind="settings compared"))


def _table(runs: dict[str, Run], rows: list[Html], *, kind: str = "figures compared") -> Html:
    names = (join([_mark(number), shorten(name, 60)]) for number, name in enumerate(runs))
    return table(["", *names], rows, kind=kind)
