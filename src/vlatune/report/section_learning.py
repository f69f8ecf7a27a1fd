"""Render the report's sections on learning: losses, validation and evaluation."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlatune.formatting import Html, format_number, plural, shorten, tag
from vlatune.report.chart import (
    MAX_COLORS,
    Chart,
    Line,
    Scale,
    bars,
    column,
    draw,
    has,
    legend,
    loss_chart,
    metric_chart,
    scale_of,
    smooth,
    smoothed_lines,
)
from vlatune.report.page import camera_image, instruction, missing, pair, row, section, shown_setting, table
from vlatune.run.kept_samples import EvalSample
from vlatune.run.run_folder import DatasetErrors, Evaluation, RolloutErrors, Run
from vlatune.run.verdict import eval_meaning, evaluated_episodes

MAX_RANKED, MAX_EPISODES = 20, 10
"""Maximum number of bars in a ranking."""
MAX_SAMPLES = 6
"""Maximum number of samples on the page; eval_samples.npz may hold more."""
MAX_DIMS = 8
"""Action dimensions drawn per sample."""


def learning(run: Run) -> Html:
    if not has(run.metrics, "loss"):
        return section("Learning", missing("No loss was logged: the run has not reached its first log line."))
    steps, loss = column(run.metrics, "optimizer_step"), column(run.metrics, "loss")
    lines = [*smoothed_lines(steps, loss)]
    validation = []
    if run.validations:
        at, losses = column(run.validations, "optimizer_step"), column(run.validations, "val_loss")
        lines.append(Line("held out", at, losses, "truth"))
        title = "Open-loop action error on held-out samples"
        if len(at) > 1:
            validation = [metric_chart(run.validations, "val_action_error", title, smoothed=False)]
    marks = tuple(float(step) for step in run.restart_steps if steps.min() <= step <= steps.max())
    rate = metric_chart(run.metrics, "lr", "Learning rate", smoothed=False)
    norm = metric_chart(run.metrics, "grad_norm", "Gradient norm")
    return section("Learning", loss_chart("Loss", lines, height_px=280, marks=marks), *validation, pair(rate, norm))


def split_loss(run: Run) -> Html:
    """Render the loss by dataset, task, action dimension and episode; empty if it was not split."""
    task_text = tag(
        "p",
        "A task whose loss stays above the others' is harder, or has fewer or worse episodes: "
        "record more of it, or check its episodes.",
    )
    by_task = _split(run, "task", "loss_by_task", lambda task: shorten(str(task), 120) or "(no instruction)")
    by_dim = _split(run, "action dimension", "loss_by_dim", lambda dim: _dim_names(run, int(dim) + 1)[int(dim)])
    by_dataset = _split(run, "dataset", "loss_by_dataset", lambda number: f"dataset {number}")[:1]
    parts = [*by_dataset, *([task_text] if by_task else []), *by_task, *by_dim, *_by_episode(run)]
    return section("Where the loss is", *parts) if parts else Html("")


def _split(run: Run, what: str, key: str, label: Any) -> list[Html]:
    """Plot the parts of a split loss (a dict or list under `key`) with the highest loss, smoothed,
    and rank all parts by their mean over the last quarter of the log lines."""
    kept = [record for record in run.metrics if record.get(key)]
    if not kept:
        return []
    split = [dict(one) if isinstance(one := record[key], Mapping) else dict(enumerate(one)) for record in kept]
    last, means = split[len(split) * 3 // 4 :], {}
    for part in dict.fromkeys(itertools.chain.from_iterable(last)):
        losses = [one[part] for one in last if one.get(part) is not None]
        means |= {part: sum(losses) / len(losses)} if losses else {}
    ranked = sorted(means, key=lambda part: -means[part])
    if not ranked:
        return []
    steps, highest = column(kept, "optimizer_step"), ranked[:MAX_COLORS]
    lines = [
        Line(shorten(label(part), 60), steps, smooth(column(split, part)), f"run{number}")
        for number, part in enumerate(highest)
    ]
    title = f"Loss by {what}" + (", the highest" if len(ranked) > MAX_COLORS else "")
    rows = [(label(part), means[part], "main") for part in ranked]
    return [loss_chart(title, lines), bars(rows, f"Loss by {what}, last quarter of the run", most=MAX_RANKED)]


def _by_episode(run: Run) -> list[Html]:
    worst = run.summary.loss_by_episode if run.summary else ()
    if not worst:
        return []
    several, rows = len({one["dataset"] for one in worst}) > 1, []
    for one in worst:
        dataset = f"dataset {one['dataset']}, " if several else ""
        label = f"{dataset}episode {one['episode']:,} ({plural(int(one['samples']), 'sample')})"
        rows.append((label, float(one["loss"]), "main"))
    text = "Check these first for recording errors; --dataset.exclude_episodes leaves an episode out."
    return [bars(rows, "Episodes with the highest loss", most=MAX_EPISODES), tag("p", text, class_="muted")]


def evaluated(run: Run) -> Html:
    evaluation, title = run.evaluation, f"Evaluation on {evaluated_episodes(run.evaluation)}"
    if evaluation.get("action_error") is None or evaluation.get("mean_action_error") is None:
        return section(title, missing("No evaluation yet: ", tag("code", "vlatune eval RUN"), " measures it."))
    return section(
        title,
        tag("p", eval_meaning(evaluation)),
        _eval_bars(evaluation),
        _errors_by_dataset(evaluation.get("datasets") or ()),
        pair(_dim_bars(evaluation.get("per_dim_error")), _horizon_chart(evaluation.get("per_horizon_error"))),
        tag("p", _eval_basis(evaluation), class_="muted"),
    )


def _eval_bars(evaluation: Evaluation) -> Html:
    """Draw the action error of the model, of the mean action, and with blanked inputs."""
    named = [
        ("the model", evaluation.get("action_error"), "main"),
        ("always the mean action", evaluation.get("mean_action_error"), "plain"),
        ("the model, images blanked", evaluation.get("blank_images_error"), "faded"),
        ("the model, instruction blanked", evaluation.get("blank_instruction_error"), "faded"),
    ]
    cameras = (evaluation.get("blank_camera_errors") or {}).items()
    named[3:3] = [(f"the model, {shorten(name.split('.')[-1], 60)} blanked", error, "faded") for name, error in cameras]
    rows = [(label, float(error), style) for label, error, style in named if error is not None]
    return bars(rows, f"Action error on {evaluated_episodes(evaluation)}; shorter is better")


def _errors_by_dataset(datasets: Sequence[DatasetErrors]) -> Html:
    """Render the errors of each dataset in its own units."""
    if not datasets:
        return Html("")
    rows = []
    for one in datasets:
        cells = (format_number(one[key]) for key in ("action_error", "mean_action_error", "val_loss"))
        rows.append(row(f"{one['dataset']}: {shown_setting(one['root'])}", *cells))
    head = ("Dataset, each in its own units", "error", "always the mean action", "validation loss")
    return table(head, rows, kind="figures")


def _dim_bars(per_dim_error: Mapping[str, Any] | None) -> Html:
    rows = [(name, float(error), "main") for name, error in (per_dim_error or {}).items() if error is not None]
    return bars(rows, "Error by action dimension") if rows else Html("")


def _horizon_chart(errors: Sequence[Any] | None, by_dim: Mapping[str, Sequence[Any]] | None = None) -> Html:
    """Plot the error over the position in the action chunk, and of the two worst dimensions."""
    if not errors:
        return Html("")
    ahead = np.arange(len(errors), dtype=np.float64)
    lines = [Line("all dimensions", ahead, np.array(errors, dtype=np.float64))]
    dims = {name: np.array(one, dtype=np.float64) for name, one in (by_dim or {}).items() if len(one) == len(errors)}
    worst = sorted(dims, key=lambda name: -float(np.nansum(dims[name])))[:2]
    lines += [Line(shorten(name, 40), ahead, dims[name], f"run{number}") for number, name in enumerate(worst, start=1)]
    return draw(Chart("Error by position in the chunk", tuple(lines), x_name="actions ahead", height_px=150))


def _eval_basis(evaluation: Evaluation) -> str:
    noun, loss = "episode" if evaluation.get("root") else "held-out episode", evaluation.get("val_loss")
    episodes = plural(len(evaluation.get("episodes") or ()), noun)
    text = f"Measured on {plural(evaluation.get('num_samples') or 0, 'sample')} of {episodes}"
    return f"{text}; validation loss {format_number(loss)}." if loss is not None else f"{text}."


def predicted(run: Run) -> Html:
    """Render held-out frames with the recorded and the predicted actions."""
    title = "What the model saw and what it predicted"
    if not run.samples:
        hint = "No evaluation yet: ", tag("code", "vlatune eval RUN"), " runs the model on held-out episodes."
        return section(title, missing(*hint))
    shown = run.samples[:MAX_SAMPLES]
    scales, cards = _dim_scales(shown), []
    for sample in shown:
        place = f"episode {sample.episode_index}, frame {sample.frame_index}"
        cards.append(_card(run, sample, scales, place, place, x_name="actions ahead", height_px=84))
    text = f"Frames as they entered the model, and the actions that followed.{_omitted(shown)}"
    keys = legend((("true action", "truth"), ("predicted", "main"), ("past the episode's end", "shade")))
    return section(title, tag("p", text), keys, *cards)


def rolled_out(run: Run) -> Html:
    """Render complete episodes, worst first; empty without rollouts."""
    rollouts: RolloutErrors | None = run.evaluation.get("rollouts")
    if not rollouts or not run.rollouts:
        return Html("")
    scales, cards, episodes = _dim_scales(run.rollouts), [], rollouts["episodes"]
    errors = {one["episode"]: f", error {format_number(one['error'])}" for one in episodes}
    for one in run.rollouts:
        place = f"episode {one.episode_index}"
        label = f"{place}: {plural(len(one.valid_T), 'frame')}{errors.get(one.episode_index, '')}"
        cards.append(_card(run, one, scales, place, label, x_name="frame", height_px=180))
    text = (
        f"{plural(len(episodes), 'complete episode')}: the policy predicts a chunk every "
        f"{plural(rollouts['replan_every'], 'frame')} from the recorded observation, and the chunks are joined; error "
        f"{format_number(rollouts['error'])}. The worst episodes come first, with the frames where the error is "
        f"largest.{_omitted(run.rollouts)}"
    )
    horizon = _horizon_chart(rollouts.get("per_horizon_error"), rollouts.get("per_dim_horizon_error"))
    details = pair(_dim_bars(rollouts.get("per_dim_error")), horizon)
    keys = legend((("recorded action", "truth"), ("predicted", "main")))
    return section("Complete episodes", tag("p", text), details, keys, *cards)


def _dim_scales(samples: Sequence[EvalSample]) -> list[Scale]:
    """Return one scale per action dimension, shared by all samples so that their charts compare."""
    num_dims = min(MAX_DIMS, *(sample.true_TA.shape[1] for sample in samples))
    shown = [actions[one.valid_T] for one in samples for actions in (one.true_TA, one.predicted_TA)]
    return [scale_of(*(actions[:, dim] for actions in shown)) for dim in range(num_dims)]


def _omitted(samples: Sequence[EvalSample]) -> str:
    num_dims = samples[0].true_TA.shape[1]
    return f" The first {MAX_DIMS} of {num_dims} action dimensions are drawn." if num_dims > MAX_DIMS else ""


def _dim_names(run: Run, count: int) -> list[str]:
    """Return the names of the action dimensions as in the evaluation."""
    given = [shorten(name, 60) for name in run.evaluation.get("action_names") or ()]
    return given if len(given) >= count else [f"action {dim}" for dim in range(count)]


def _card(run: Run, sample: EvalSample, scales: list[Scale], place: str, label: str, **options: Any) -> Html:
    """Render images and instruction, and a chart per action dimension with the true and the
    predicted actions; steps past the episode's end are shaded."""
    images = (camera_image(image, camera, place) for camera, image in sample.images.items())
    text = instruction(sample.task), tag("p", label, class_="muted")
    ahead, num_valid = np.arange(len(sample.valid_T), dtype=np.float64), int(sample.valid_T.sum())
    names, charts = _dim_names(run, len(scales)), []
    for dim, scale in enumerate(scales):
        lines = tuple(
            Line(name, ahead, np.where(sample.valid_T, actions[:, dim], np.nan).astype(np.float64), style)
            for name, actions, style in (("true", sample.true_TA, "truth"), ("predicted", sample.predicted_TA, "main"))
        )
        shade_from = max(num_valid - 1, 0) if num_valid < len(ahead) else None
        few = {"y_ticks": 2, "x_ticks": 2, "keys": False, "shade_from": shade_from}
        charts.append(draw(Chart(names[dim], lines, scale, **few, **options)))
    saw = tag("div", tag("div", *images, class_="cameras"), *text, class_="saw")
    return tag("article", saw, tag("div", *charts, class_="dims"), class_="card")
