"""RUN/report.html: what happened in a run, on one page that needs nothing else.

Reads the run folder, writes one self-contained file: no script, no address it would fetch, pictures inside. A part that
is missing (no evaluation yet, a run that died on its first step) is said to be missing. All text goes through
`formatting.tag`, which escapes it: sentences and names come from datasets of strangers. Charts are plots.py's, words on the
figures verdict.py's.
"""

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vlatune.files import write_text
from vlatune.report import plots
from vlatune.report.chart import legend
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
from vlatune.report.run_folder import (
    EVAL_PAGE_FILE,
    REPORT_FILE,
    Checkpoints,
    EvalSample,
    Run,
    load_eval_samples,
    load_rollouts,
    read_evaluation,
    read_run,
    save_eval_samples,
)
from vlatune.report.summary import SUMMARY_FILE
from vlatune.report.verdict import WAIT_SHARE_FINE, Tone, Verdict, eval_meaning, judge, looked_at, success_text

__all__ = ["EvalSample", "load_eval_samples", "make_page", "save_eval_samples", "write_report"]

MAX_SAMPLES = 6
"""Cards on the page; more are kept in eval_samples.npz only."""
READING_ANEW = "times a process that schedules it died"
MAX_TEXT = 400
"""Characters shown of a sentence or setting."""
DISTINCT_FINE = 0.9
"""Of the episodes in a permutation's batch; below, batches lean towards single episodes."""
NEIGHBOURS_FINE = 2.0
"""Times the permutation's rate of neighbouring frames; above, batches hold frames that are nearly the same."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Should anything slip through the escaping, the browser still runs and fetches nothing."""


def write_report(run_dir: Path, *, eval_samples: list[EvalSample] | None = None) -> Path:
    """Write RUN/report.html; without `eval_samples`, with those that `save_eval_samples` kept in the folder."""
    run = read_run(Path(run_dir), eval_samples)
    parts = (
        _head,
        _tiles,
        _learning,
        _augmented,
        _seen,
        _evaluated,
        _rolled_out,
        _simulated,
        _time,
        _mixed,
        _memory,
        _settings,
    )
    path = Path(run_dir) / REPORT_FILE
    try:
        body = join([part(run) for part in parts])
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # figures that lack their others
        raise ValueError(
            f"{run_dir}: its figures are not as vlatune writes them ({type(error).__name__}: {error}); restore {SUMMARY_FILE}, metrics.jsonl "
            f"and eval.json, or remove what is damaged"
        ) from error
    write_text(path, make_page(f"{run.name} · vlatune", body))
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
    body = join([head, _evaluated(run), _rolled_out(run), _seen(run)])
    write_text(path, make_page(f"{name} · vlatune eval", body))
    return path


def watch_report(
    run_dir: Path, *, every_s: float, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Write the page again and again until the run has written its summary; the browser is left to reload it."""
    if not 0 < every_s < math.inf:
        raise ValueError(f"--every_s={every_s}: must be above 0")
    say(f"{write_report(run_dir)}: written again every {every_s:g} s until the run is finished; Ctrl-C ends it")
    while not (run_dir / SUMMARY_FILE).exists():
        sleep(every_s)
        write_report(run_dir)


def make_page(title: str, body: Html) -> str:
    """A whole document around the sections, in the report's style."""
    style = Html(resources.files("vlatune.report").joinpath("page.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", shorten(title, MAX_TEXT)),
        tag("style", style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', tag('main', body)), lang='en')}\n"


def _head(run: Run) -> Html:
    found = _verdict(run)
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


def _verdict(run: Run) -> Verdict:
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
        _tile("Samples per second", run.figure("samples_per_s"), _rate, note=pace),
        _tile("Waiting for data", wait, format_share, note="of the loop's time", tone="warn" if slow else None),
        _tile("Time to first batch", run.figure("time_to_first_batch_s"), format_seconds),
        _tile("Spilled to disk", spilled, format_bytes, tone="bad" if spilled else None),
        _tile("Peak object store", peak, format_bytes, note=_share_of(peak, run.capacity_bytes)),
        _tile("Restarts", restarts, _count, note="of the workers", tone="warn" if restarts else None),
        _tile("Best on held-out", _best_error(run), format_number, note=_best_step(run)),
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


def _learning(run: Run) -> Html:
    if not plots.has(run.metrics, "loss"):
        return _section("Learning", _missing("No loss was logged: the run has not reached its first log line."))
    held_out = [_validated(run), plots.validation_chart(run.validations)] if run.validations else []
    mixed = any(record.get("loss_by_dataset") for record in run.metrics)
    by_dataset = [plots.dataset_loss_chart(run.metrics)] if mixed else []
    loss, rest = plots.loss_chart(run.metrics, run.validations), plots.learning_charts(run.metrics)
    charts = (loss, *held_out, *by_dataset, rest)
    return _section("Learning", *charts)


def _validated(run: Run) -> Html:
    """Whether the model still got better on what it never saw, in one sentence."""
    errors = {one["optimizer_step"]: one["val_action_error"] for one in run.validations}
    best, last = min(errors, key=lambda step: (errors[step], step)), max(errors)
    text = f"On held-out samples the action error was lowest at step {best:,}: {format_number(errors[best])}"
    if best == last:
        return tag("p", f"{text}, at the last look; more steps may make it lower still.")
    return tag(
        "p", f"{text}; at step {last:,} it is {format_number(errors[last])}. --keep_best=1 keeps such a checkpoint."
    )


def _augmented(run: Run) -> Html:
    """Only of a run that augments: nothing is missing from the others."""
    if not run.first_batch:
        return Html("")
    cards = []
    for sample in run.first_batch[:MAX_SAMPLES]:
        place = f"episode {sample.episode_index}, frame {sample.frame_index}"
        pairs = [
            _picture(image, camera, place, what)
            for camera in sample.images
            for image, what in ((sample.images[camera], ""), (sample.trained[camera], ", augmented"))
        ]
        cards.append(tag("article", tag("div", *pairs, class_="cameras"), tag("p", place, class_="muted")))
    text = "Of the first batch: pictures as they were read, and as training sees them. Evaluation sees them as they were read."
    return _section("Augmented pictures", tag("p", text), *cards)


def _picture(image: Any, camera: str, place: str, what: str = "") -> Html:
    caption = tag("figcaption", shorten(camera.split(".")[-1], 60) + what)
    return tag("figure", plots.picture(image, alt=f"{shorten(camera, 60)}{what}, {place}"), caption)


def _seen(run: Run) -> Html:
    title = "What the model saw and what it predicted"
    if not run.samples:
        return _section(
            title,
            _missing("No evaluation yet: ", tag("code", "vlatune eval RUN"), " runs the model on held-out episodes."),
        )
    shown = run.samples[:MAX_SAMPLES]
    scales = plots.dim_scales(shown)
    names, rest = _dim_names(run, len(scales)), _undrawn(shown, len(scales))
    text = "Frames as they entered the model, and the actions that followed: time runs to the right." + rest
    keys = legend((("true action", "truth"), ("predicted", "main"), ("past the episode's end", "shade")))
    return _section(title, tag("p", text), keys, *(_card(sample, scales, names) for sample in shown))


def _dim_names(run: Run, count: int) -> list[str]:
    given = [shorten(str(name), 60) for name in run.evaluation.get("action_names") or []]
    return given if len(given) >= count else [f"action {dim}" for dim in range(count)]


def _undrawn(samples: Sequence[EvalSample], drawn: int) -> str:
    num_dims = samples[0].true_TA.shape[1]
    return f" The first {drawn} of {num_dims} action dimensions are drawn." if num_dims > drawn else ""


def _rolled_out(run: Run) -> Html:
    """Whole episodes, the worst first; nothing is missing where none were asked for."""
    rollouts = run.evaluation.get("rollouts")
    if not rollouts or not run.rollouts:
        return Html("")
    scales = plots.dim_scales(run.rollouts)
    names, every = _dim_names(run, len(scales)), plural(rollouts["replan_every"], "frame")
    text = (
        f"{plural(len(rollouts['episodes']), 'whole episode')}, the policy asked anew every {every} and shown what was recorded, its "
        f"actions laid end to end: error {format_number(rollouts['error'])}. The worst come first, with the frames after which "
        f"they went furthest wrong.{_undrawn(run.rollouts, len(scales))}"
    )
    details = [plots.dim_bars(rollouts["per_dim_error"])] if rollouts.get("per_dim_error") else []
    if rollouts.get("per_horizon_error"):
        details.append(plots.rollout_horizon_chart(rollouts))
    keys = legend((("recorded action", "truth"), ("predicted", "main")))
    cards = [_rollout_card(one, scales, names, rollouts["episodes"]) for one in run.rollouts]
    return _section("Whole episodes", tag("p", text), tag("div", *details, class_="pair"), keys, *cards)


def _simulated(run: Run) -> Html:
    """Only of a run that was simulated."""
    if not run.simulation:
        return Html("")
    task = f", task {shorten(run.simulation['task'], 60)}" if run.simulation.get("task") else ""
    rewards = {"Mean reward": "mean_reward", "Mean highest reward": "mean_max_reward"}
    given = {name: run.simulation.get(key) for name, key in rewards.items()}
    rows = [_row(name, format_number(value)) for name, value in given.items() if value is not None]
    return _section(
        "Simulated episodes",
        tag("p", f"Success in {shorten(run.simulation['env'], 60)}{task}: {success_text(run.simulation)}."),
        tag("table", tag("tbody", *rows), class_="settings"),
    )


def _rollout_card(one: EvalSample, scales: list[Any], names: list[str], episodes: Sequence[dict[str, Any]]) -> Html:
    place = f"episode {one.episode_index}"
    errors = [float(episode["error"]) for episode in episodes if episode["episode"] == one.episode_index]
    error = f", error {format_number(errors[0])}" if errors else ""
    pictures = (_picture(image, name, place) for name, image in one.images.items())
    sentence = tag("blockquote", shorten(one.task, MAX_TEXT), dir="auto")
    told = tag("p", f"{place}: {plural(len(one.valid_T), 'frame')}{error}", class_="muted")
    saw = tag("div", tag("div", *pictures, class_="cameras"), sentence, told, class_="saw")
    return tag("article", saw, plots.rollout_charts(one, scales, names), class_="card")


def _card(sample: EvalSample, scales: list[Any], names: list[str]) -> Html:
    place = f"episode {sample.episode_index}, frame {sample.frame_index}"
    cameras = (_picture(image, camera, place) for camera, image in sample.images.items())
    sentence = tag("blockquote", shorten(sample.task, MAX_TEXT), dir="auto")
    saw = tag("div", tag("div", *cameras, class_="cameras"), sentence, tag("p", place, class_="muted"), class_="saw")
    return tag("article", saw, plots.action_charts(sample, scales, names), class_="card")


def _evaluated(run: Run) -> Html:
    evaluation, title = run.evaluation, f"Evaluation on {looked_at(run.evaluation)}"
    if evaluation.get("action_error") is None or evaluation.get("mean_action_error") is None:
        return _section(title, _missing("No evaluation yet: ", tag("code", "vlatune eval RUN"), " measures it."))
    details = []
    if evaluation.get("per_dim_error"):
        details.append(plots.dim_bars(evaluation["per_dim_error"]))
    if evaluation.get("per_horizon_error"):
        details.append(plots.horizon_chart(evaluation["per_horizon_error"]))
    return _section(
        title,
        tag("p", eval_meaning(evaluation)),
        plots.eval_bars(evaluation),
        *_by_dataset(evaluation.get("datasets") or ()),
        tag("div", *details, class_="pair"),
        tag("p", _eval_basis(evaluation), class_="muted"),
    )


def _by_dataset(datasets: Sequence[dict[str, Any]]) -> list[Html]:
    """Of several robots: each dataset's errors, in its own units."""
    if not datasets:
        return []
    keys = ("action_error", "mean_action_error", "val_loss")
    head = _row("Dataset, each in its own units", "error", "always the mean action", "validation loss")
    body = [
        _row(
            shorten(f"{one['dataset']}: {shown_setting(one['root'])}", 120), *(format_number(one[key]) for key in keys)
        )
        for one in datasets
    ]
    return [tag("table", tag("tbody", head, *body), class_="settings")]


def _eval_basis(evaluation: dict[str, Any]) -> str:
    noun = "episode" if evaluation.get("root") else "held-out episode"
    episodes = plural(len(evaluation.get("episodes") or []), noun)
    text = f"Measured on {plural(int(evaluation.get('num_samples') or 0), 'sample')} of {episodes}"
    if evaluation.get("val_loss") is not None:
        text += f"; validation loss {format_number(evaluation['val_loss'])}"
    return text + "."


def _time(run: Run) -> Html:
    time_s = run.summary.time_s if run.summary else None
    bar = plots.time_bar(time_s) if time_s else _missing("Not recorded: the run has not written its summary.")
    beside = [plots.stage_bars(time_s)] if time_s and any(time_s.get(stage) for stage in plots.STAGES) else []
    speed = [plots.speed_charts(run.metrics)] if run.metrics else []
    return _section("Where the time went", bar, *beside, *speed)


def _mixed(run: Run) -> Html:
    title, shuffle = "How the samples were mixed", run.summary.shuffle if run.summary else None
    if not shuffle:
        return _section(title, _missing("Not recorded: the run has not written its summary."))
    return _section(title, tag("p", shuffle_meaning(shuffle)), shuffle_table(shuffle))


def _memory(run: Run) -> Html:
    spilled, fallback = run.figure("spilled_bytes"), run.figure("fallback_bytes")
    parts = []
    if spilled is not None:
        text = "Nothing was spilled to disk" if not spilled else f"{format_bytes(spilled)} were spilled to disk"
        if fallback is not None:
            text += f", and {format_bytes(fallback) if fallback else 'nothing'} had to be allocated there"
        parts.append(tag("p", text + "."))
    if plots.has(run.metrics, "object_store_bytes"):
        parts.append(plots.store_chart(run.metrics, run.capacity_bytes))
    return _section("Memory and object store", *(parts or [_missing("Not recorded.")]))


def _settings(run: Run) -> Html:
    versions = run.summary.versions if run.summary else {}
    return _section(
        "Settings and versions",
        tag("p", _kept_checkpoints(run.checkpoints)),
        _details(f"{plural(len(flat_settings(run.config)), 'setting')} (config.json)", flat_settings(run.config)),
        _details(plural(len(versions), "version"), flat_settings(versions))
        if versions
        else _missing("Versions are recorded at a run's end."),
    )


def _kept_checkpoints(kept: Checkpoints) -> str:
    place = f" in {shown_setting(kept.elsewhere)}" if kept.elsewhere else ""
    if kept.steps is None:
        return f"Checkpoints{place}: their place could not be asked when this page was written."
    return f"Checkpoints kept{place}, by optimizer step: {', '.join(f'{step:,}' for step in kept.steps) or 'none'}."


def _details(summary: str, rows: dict[str, Any]) -> Html:
    body = (
        tag("tr", tag("th", shorten(key, 120), scope="row"), tag("td", shown_setting(value)))
        for key, value in rows.items()
    )
    return tag("details", tag("summary", summary), tag("table", tag("tbody", *body), class_="settings"))


def flat_settings(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}: the names of the flags."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flat_settings(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
        )
    return flat


def shown_setting(value: Any) -> str:
    """A setting as text. A page is passed on more freely than a config: passwords and signatures in URLs stay behind."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = re.sub(r"(?<=://)[^/@\s\"]+@", "", text)
    return shorten(re.sub(r"(://[^\s\"?]+)\?[^\s\"]+", r"\1?…", text), MAX_TEXT)


def _section(title: str, *parts: Html) -> Html:
    return tag("section", tag("h2", title), *parts)


def _missing(*parts: str) -> Html:
    return tag("p", *parts, class_="missing")


def shuffle_meaning(shuffle: dict[str, Any]) -> str:
    """One sentence on what the figures mean for learning."""
    few = (shuffle["distinct_episodes"]["ratio"] or 1.0) < DISTINCT_FINE
    close = (shuffle["neighbour_rate"]["ratio"] or 0.0) > NEIGHBOURS_FINE
    if not few and not close:
        return "A batch is as varied as if all frames had been shuffled singly, though neighbours are decoded together."
    what = " and ".join(
        words for words, found in (("fewer episodes", few), ("more neighbouring frames", close)) if found
    )
    return (
        f"A batch holds {what} than if all frames had been shuffled singly, so its gradient is noisier: "
        f"a smaller --dataset.run_length or a larger --dataset.window_rows mixes better."
    )


def shuffle_table(shuffle: dict[str, Any]) -> Html:
    """The figures of the run's order beside those of a true permutation."""
    number = _rounded
    rows = (
        ("Episodes in a batch", shuffle["distinct_episodes"], number),
        ("Samples whose next frame is in the batch, too", shuffle["neighbour_rate"], format_share),
        ("Steps between a frame and the next one, median", shuffle["neighbour_steps"], number),
    )
    body = [_row(name, write(of["order"]), write(of["permutation"])) for name, of, write in rows]
    body.append(_row("Distance to a true permutation, 0 to 1", number(shuffle["distance"]), "0"))
    head = _row(f"First epoch, batches of {shuffle['global_batch']:,}", "this run", "a true permutation")
    return tag("table", tag("tbody", head, *body), class_="settings")


def _rounded(value: float) -> str:
    return format_number(value, digits=3)


def _row(name: str, *cells: str) -> Html:
    return tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells))
