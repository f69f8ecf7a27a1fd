"""The report's sections on what was learnt: the loss and what it splits into, validation, and what `vlatune eval` adds: held-out
episodes, whole ones gone through, simulated ones.
"""

from collections.abc import Sequence
from typing import Any

from vlatune.report import plots
from vlatune.report.chart import legend
from vlatune.report.formatting import Html, format_number, plural, shorten, tag
from vlatune.report.kept_samples import EvalSample
from vlatune.report.page import MAX_TEXT, missing, row, section, shown_setting, table
from vlatune.report.run_folder import Run
from vlatune.report.section_data import dim_names, figure, undrawn
from vlatune.report.verdict import eval_meaning, looked_at, success_text

MAX_RANKED, MAX_EPISODES = 20, 10
"""Bars of a ranking."""


def learning(run: Run) -> Html:
    if not plots.has(run.metrics, "loss"):
        return section("Learning", missing("No loss was logged: the run has not reached its first log line."))
    held_out = [_validated(run), plots.validation_chart(run.validations)] if run.validations else []
    loss, rest = plots.loss_chart(run.metrics, run.validations, run.restart_steps), plots.learning_charts(run.metrics)
    return section("Learning", loss, *held_out, rest)


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


def split_loss(run: Run) -> Html:
    """Where the loss is: by dataset, task, action dimension and episode; nothing of a run that did not split it."""
    parts = [*_by_dataset(run), *_by_task(run), *_by_dim(run), *_by_episode(run)]
    return section("Where the loss is", *parts) if parts else Html("")


def _by_dataset(run: Run) -> list[Html]:
    found = sorted(plots.late_means(run.metrics, "loss_by_dataset"))
    labels = {number: f"dataset {number}" for number in found}
    return [plots.split_loss_chart("Loss by dataset", run.metrics, "loss_by_dataset", labels)] if found else []


def _by_task(run: Run) -> list[Html]:
    losses = plots.late_means(run.metrics, "loss_by_task")
    if not losses:
        return []
    labels = {task: shorten(str(task), 120) or "(no sentence)" for task in losses}
    rows = [(labels[task], loss) for task, loss in losses.items()]
    text = (
        "A task whose loss stays above the others' is harder, or is shown in fewer or rougher episodes: "
        "record more of it, or look at its episodes."
    )
    return [
        tag("p", text),
        plots.split_loss_chart("Loss by task, the highest", run.metrics, "loss_by_task", labels),
        plots.ranked_bars(rows, name="Loss by task, last quarter of the run", most=MAX_RANKED),
    ]


def _by_dim(run: Run) -> list[Html]:
    losses = plots.late_means(run.metrics, "loss_by_dim")
    if not losses:
        return []
    given = [shorten(str(name), 60) for name in run.evaluation.get("action_names") or []]
    names = (
        given if len(given) > max(map(int, losses)) else [f"action {dim}" for dim in range(max(map(int, losses)) + 1)]
    )
    labels = {dim: names[int(dim)] for dim in losses}
    rows = [(labels[dim], loss) for dim, loss in losses.items()]
    return [
        plots.split_loss_chart("Loss by action dimension, the highest", run.metrics, "loss_by_dim", labels),
        plots.ranked_bars(rows, name="Loss by action dimension, last quarter of the run", most=MAX_RANKED),
    ]


def _by_episode(run: Run) -> list[Html]:
    worst = run.summary.loss_by_episode if run.summary else ()
    if not worst:
        return []
    several = len({one["dataset"] for one in worst}) > 1
    rows = [
        (
            f"{f'dataset {one["dataset"]}, ' if several else ''}episode {one['episode']:,} ({plural(int(one['samples']), 'sample')})",
            float(one["loss"]),
        )
        for one in worst
    ]
    return [
        plots.ranked_bars(rows, name="Episodes of the highest loss", most=MAX_EPISODES),
        tag(
            "p",
            "Look at them first where something was recorded wrong; --dataset.episodes leaves an episode out.",
            class_="muted",
        ),
    ]


def evaluated(run: Run) -> Html:
    evaluation, title = run.evaluation, f"Evaluation on {looked_at(run.evaluation)}"
    if evaluation.get("action_error") is None or evaluation.get("mean_action_error") is None:
        return section(title, missing("No evaluation yet: ", tag("code", "vlatune eval RUN"), " measures it."))
    details = []
    if evaluation.get("per_dim_error"):
        details.append(plots.dim_bars(evaluation["per_dim_error"]))
    if evaluation.get("per_horizon_error"):
        details.append(plots.horizon_chart(evaluation["per_horizon_error"]))
    return section(
        title,
        tag("p", eval_meaning(evaluation)),
        plots.eval_bars(evaluation),
        *_errors_by_dataset(evaluation.get("datasets") or ()),
        tag("div", *details, class_="pair"),
        tag("p", _eval_basis(evaluation), class_="muted"),
    )


def _errors_by_dataset(datasets: Sequence[dict[str, Any]]) -> list[Html]:
    """Of several robots: each dataset's errors, in its own units."""
    if not datasets:
        return []
    keys = ("action_error", "mean_action_error", "val_loss")
    head = ("Dataset, each in its own units", "error", "always the mean action", "validation loss")
    body = [
        row(f"{one['dataset']}: {shown_setting(one['root'])}", *(format_number(one[key]) for key in keys))
        for one in datasets
    ]
    return [table(head, body, kind="figures")]


def _eval_basis(evaluation: dict[str, Any]) -> str:
    noun = "episode" if evaluation.get("root") else "held-out episode"
    episodes = plural(len(evaluation.get("episodes") or []), noun)
    text = f"Measured on {plural(int(evaluation.get('num_samples') or 0), 'sample')} of {episodes}"
    if evaluation.get("val_loss") is not None:
        text += f"; validation loss {format_number(evaluation['val_loss'])}"
    return text + "."


def rolled_out(run: Run) -> Html:
    """Whole episodes, the worst first; nothing is missing where none were asked for."""
    rollouts = run.evaluation.get("rollouts")
    if not rollouts or not run.rollouts:
        return Html("")
    scales = plots.dim_scales(run.rollouts)
    names, every = dim_names(run, len(scales)), plural(rollouts["replan_every"], "frame")
    text = (
        f"{plural(len(rollouts['episodes']), 'whole episode')}, the policy asked anew every {every} and shown what was recorded, its "
        f"actions laid end to end: error {format_number(rollouts['error'])}. The worst come first, with the frames after which "
        f"they went furthest wrong.{undrawn(run.rollouts, len(scales))}"
    )
    details = [plots.dim_bars(rollouts["per_dim_error"])] if rollouts.get("per_dim_error") else []
    if rollouts.get("per_horizon_error"):
        details.append(plots.rollout_horizon_chart(rollouts))
    keys = legend((("recorded action", "truth"), ("predicted", "main")))
    cards = [_rollout_card(one, scales, names, rollouts["episodes"]) for one in run.rollouts]
    return section("Whole episodes", tag("p", text), tag("div", *details, class_="pair"), keys, *cards)


def _rollout_card(one: EvalSample, scales: list[Any], names: list[str], episodes: Sequence[dict[str, Any]]) -> Html:
    place = f"episode {one.episode_index}"
    errors = [float(episode["error"]) for episode in episodes if episode["episode"] == one.episode_index]
    error = f", error {format_number(errors[0])}" if errors else ""
    pictures = (figure(image, name, place) for name, image in one.images.items())
    sentence = tag("blockquote", shorten(one.task, MAX_TEXT), dir="auto")
    told = tag("p", f"{place}: {plural(len(one.valid_T), 'frame')}{error}", class_="muted")
    saw = tag("div", tag("div", *pictures, class_="cameras"), sentence, told, class_="saw")
    return tag("article", saw, plots.rollout_charts(one, scales, names), class_="card")


def simulated(run: Run) -> Html:
    """Only of a run that was simulated."""
    if not run.simulation:
        return Html("")
    task = f", task {shorten(run.simulation['task'], 60)}" if run.simulation.get("task") else ""
    rewards = {"Mean reward": "mean_reward", "Mean highest reward": "mean_max_reward"}
    given = {name: run.simulation.get(key) for name, key in rewards.items()}
    rows = [row(name, format_number(value)) for name, value in given.items() if value is not None]
    return section(
        "Simulated episodes",
        tag("p", f"Success in {shorten(run.simulation['env'], 60)}{task}: {success_text(run.simulation)}."),
        tag("table", tag("tbody", *rows), class_="settings"),
    )
