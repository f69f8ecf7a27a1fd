"""The report's sections on what the model got to see: datasets, how samples were mixed, the first batch, held-out samples."""

from collections.abc import Sequence
from typing import Any

from vlatune.report import plots
from vlatune.report.chart import legend
from vlatune.report.formatting import Html, format_number, format_share, plural, shorten, tag
from vlatune.report.kept_samples import EvalSample, TrainedSample
from vlatune.report.page import MAX_TEXT, missing, row, section, shown_setting, table
from vlatune.report.run_folder import Run

MAX_SAMPLES = 6
"""Cards on the page; more are kept in eval_samples.npz only."""
MAX_TASKS, FEW_TASKS = 30, 12
"""Sentences that are listed, and up to how many stand there unfolded."""
DISTINCT_FINE = 0.9
"""Of the episodes in a permutation's batch; below, batches lean towards single episodes."""
NEIGHBOURS_FINE = 2.0
"""Times the permutation's rate of neighbouring frames; above, batches hold frames that are nearly the same."""


def data_seen(run: Run) -> Html:
    """Episodes, frames, tasks, and what share of the samples each dataset gives; how well they were mixed."""
    parts = [_datasets(run), *_tasks(run.data)] if run.data else [missing("The datasets were not recorded.")]
    return section("Data seen", *parts, tag("h3", "How the samples were mixed"), *_mixed(run))


def _mixed(run: Run) -> list[Html]:
    shuffle = run.summary.shuffle if run.summary else None
    if not shuffle:
        return [missing("Not recorded: the run has not written its summary.")]
    return [tag("p", shuffle_meaning(shuffle)), shuffle_table(shuffle)]


def _datasets(run: Run) -> Html:
    head = ("Dataset", "episodes", "held out", "frames", "share of the samples")
    rows = [
        row(
            shown_setting(one["root"]),
            f"{one['episodes']:,}",
            f"{one['held_out']:,}",
            f"{one['frames']:,}",
            format_share(one["share"]),
        )
        for one in run.data["datasets"]
    ]
    return Html(tag("p", _times_seen(run)) + table(head, rows, kind="figures"))


def _times_seen(run: Run) -> str:
    frames, seen = sum(one["frames"] for one in run.data["datasets"]), run.figure("samples_seen")
    if not seen or not frames:
        return "Nothing was trained on yet."
    times = seen / frames
    if times < 1:
        return f"{plural(seen, 'sample')} were trained on: {format_share(times)} of the {frames:,} frames, each at most once."
    return f"{plural(seen, 'sample')} were trained on: each of the {frames:,} frames {format_number(times, digits=3)} times in the mean."


def _tasks(data: dict[str, Any]) -> list[Html]:
    """Sentences with the episodes of each, the most frequent first; folded up where they are many."""
    tasks, count = data["tasks"], data["num_tasks"]
    counts = data.get("task_episodes") or [0] * len(tasks)
    most_first = sorted(zip(tasks, counts, strict=False), key=lambda pair: -pair[1])[:MAX_TASKS]
    total = (
        sum(one["episodes"] for one in data["datasets"]) if any(counts) else 0
    )  # a run of an earlier version told none
    rows = [_task_row(task, episodes, total) for task, episodes in most_first]
    if (rest := total - sum(counts)) > 0:
        rows.append(_task_row("of other sentences, of several, or of none that meta/ names", rest, total))
    listed = table(("Task", "episodes", "share of the episodes")[: 3 if total else 1], rows, kind="figures")
    if count <= FEW_TASKS:
        return [listed]
    shown = f", the first {len(most_first)}" if count > len(most_first) else ""
    return [tag("details", tag("summary", f"{plural(count, 'task')}{shown}"), listed)]


def _task_row(task: str, episodes: int, total: int) -> Html:
    sentence = tag("th", shorten(task, MAX_TEXT) or "(no sentence)", scope="row", dir="auto")
    cells = (f"{episodes:,}", format_share(episodes / total)) if total else ()
    return tag("tr", sentence, *(tag("td", cell) for cell in cells))


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
    rows = (
        ("Episodes in a batch", shuffle["distinct_episodes"], _rounded),
        ("Samples whose next frame is in the batch, too", shuffle["neighbour_rate"], format_share),
        ("Steps between a frame and the next one, median", shuffle["neighbour_steps"], _rounded),
    )
    body = [row(name, write(of["order"]), write(of["permutation"])) for name, of, write in rows]
    body.append(row("Distance to a true permutation, 0 to 1", _rounded(shuffle["distance"]), "0"))
    head = (f"First epoch, batches of {shuffle['global_batch']:,}", "this run", "a true permutation")
    return table(head, body, kind="figures")


def _rounded(value: float) -> str:
    return format_number(value, digits=3)


def first_batch(run: Run) -> Html:
    if not run.first_batch:
        return section("First batch", missing("Not recorded: the run has not read its first samples."))
    changed = any(sample.is_augmented for sample in run.first_batch)
    text = "Some samples of the first optimizer step, as they were read and resized for the policy."
    if changed:
        text += " Beside each picture is what training sees of it, augmented; evaluation sees them as they were read."
    cards = [_first_card(sample) for sample in run.first_batch[:MAX_SAMPLES]]
    return section("First batch", tag("p", text), tag("div", *cards, class_="batch"))


def _first_card(sample: TrainedSample) -> Html:
    place = f"episode {sample.episode_index}, frame {sample.frame_index}"
    pairs = []
    for camera, image in sample.images.items():
        pairs.append(figure(image, camera, place))
        pairs += [figure(sample.trained[camera], camera, place, ", augmented")] if sample.is_augmented else []
    sentence = [tag("blockquote", shorten(sample.task, MAX_TEXT), dir="auto")] if sample.task.strip() else []
    return tag("article", tag("div", *pairs, class_="cameras"), *sentence, tag("p", place, class_="muted"))


def figure(image: Any, camera: str, place: str, what: str = "") -> Html:
    caption = tag("figcaption", shorten(camera.split(".")[-1], 60) + what)
    return tag("figure", plots.picture(image, alt=f"{shorten(camera, 60)}{what}, {place}"), caption)


def predicted(run: Run) -> Html:
    """Held-out frames, and beside them what was done next and what the model would have done."""
    title = "What the model saw and what it predicted"
    if not run.samples:
        return section(
            title,
            missing("No evaluation yet: ", tag("code", "vlatune eval RUN"), " runs the model on held-out episodes."),
        )
    shown = run.samples[:MAX_SAMPLES]
    scales = plots.dim_scales(shown)
    names, rest = dim_names(run, len(scales)), undrawn(shown, len(scales))
    text = "Frames as they entered the model, and the actions that followed: time runs to the right." + rest
    keys = legend((("true action", "truth"), ("predicted", "main"), ("past the episode's end", "shade")))
    return section(title, tag("p", text), keys, *(_card(sample, scales, names) for sample in shown))


def dim_names(run: Run, count: int) -> list[str]:
    """As the evaluation names them."""
    given = [shorten(str(name), 60) for name in run.evaluation.get("action_names") or []]
    return given if len(given) >= count else [f"action {dim}" for dim in range(count)]


def undrawn(samples: Sequence[EvalSample], drawn: int) -> str:
    num_dims = samples[0].true_TA.shape[1]
    return f" The first {drawn} of {num_dims} action dimensions are drawn." if num_dims > drawn else ""


def _card(sample: EvalSample, scales: list[Any], names: list[str]) -> Html:
    place = f"episode {sample.episode_index}, frame {sample.frame_index}"
    cameras = (figure(image, camera, place) for camera, image in sample.images.items())
    sentence = tag("blockquote", shorten(sample.task, MAX_TEXT), dir="auto")
    saw = tag("div", tag("div", *cameras, class_="cameras"), sentence, tag("p", place, class_="muted"), class_="saw")
    return tag("article", saw, plots.action_charts(sample, scales, names), class_="card")
