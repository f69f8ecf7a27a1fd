"""The report's sections on what `vlatune eval` adds: whole episodes gone through, episodes that were simulated."""

from collections.abc import Sequence
from typing import Any

from vlatune.report import plots
from vlatune.report.chart import legend
from vlatune.report.formatting import Html, format_number, plural, shorten, tag
from vlatune.report.kept_samples import EvalSample
from vlatune.report.page import MAX_TEXT, row, section
from vlatune.report.run_folder import Run
from vlatune.report.section_data import dim_names, figure, undrawn
from vlatune.report.verdict import success_text


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
