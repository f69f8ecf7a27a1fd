"""Format the figures of an evaluation for the terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlatune.console import printable
from vlatune.formatting import format_number, plural
from vlatune.run.verdict import eval_meaning, evaluated_episodes

MAX_DIMS = 16
MAX_NAME = 40
MAX_EPISODES = 5
LABEL = 38
"""Width of the label column."""


def eval_text(figures: Mapping[str, Any], run: str) -> str:
    """Return all figures, with one line on their meaning."""
    parts = [[_basis(figures, run)], list(error_lines(figures))]
    if figures.get("datasets"):
        parts.append(list(_dataset_lines(figures["datasets"])))
    parts.append(list(_dim_lines(figures["per_dim_error"])))
    if figures.get("rollouts"):
        parts.append(list(_rollout_lines(figures["rollouts"])))
    parts.append([eval_meaning(figures)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def error_lines(figures: Mapping[str, Any], *, each_camera: bool = True) -> Iterator[str]:
    """Return the model's error, the baseline's, and the errors with blanked inputs."""
    error, cameras = figures["action_error"], (figures.get("blank_camera_errors") or {}) if each_camera else {}
    lines = {
        "the fine-tuned model": error,
        "predicting the mean action": figures["mean_action_error"],
        "the model with blank images": figures.get("blank_images_error"),
        **{f"  with {printable(name).split('.')[-1][:MAX_NAME]} blank": value for name, value in cameras.items()},
        "the model with a blank instruction": figures.get("blank_instruction_error"),
    }
    yield f"open-loop action error on {evaluated_episodes(figures)} (mean absolute, lower is better):"
    for label, value in lines.items():
        if value is not None:  # None if the policy lacks the input
            yield _row(label, value) + (f"   {value / error:5.2f} x" if error > 0 else "")


def _row(label: str, error: float) -> str:
    return f"  {label:<{LABEL}} {error:.4f}"


def _basis(figures: Mapping[str, Any], run: str) -> str:
    root, rate = figures.get("root"), figures.get("action_fps")
    episodes = plural(len(figures["episodes"]), "episode" if root else "held-out episode")
    data = f"{plural(figures['num_samples'], 'sample')} of {episodes}"
    data += f" of {printable(root)}" if root else ""
    data += f", {rate:.10g} actions a second" if rate else ""
    weights = f"checkpoint {figures['checkpoint']}, {figures['weights']} weights"
    if figures["weights"] == "stored":
        weights = "weights of the folder"
    loss = f"validation loss {format_number(figures['val_loss'])} (seed {figures['seed']})"
    return f"{run}: {weights}, on {figures['device']}; {data}; {loss}"


def _dataset_lines(datasets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "by dataset, each in its own units (above, means over all samples):"
    for one in datasets:
        name = f"{one['dataset']}: {printable(one['root'])[-MAX_NAME:]:<{MAX_NAME}}"
        errors = f"error {one['action_error']:.4f}, predicting the mean {one['mean_action_error']:.4f}"
        count = plural(one["num_samples"], "sample")
        yield f"  {name} {errors}, validation loss {format_number(one['val_loss'])} ({count})"


def _dim_lines(per_dim_error: Mapping[str, float]) -> Iterator[str]:
    yield "error by action dimension:"
    for name, value in list(per_dim_error.items())[:MAX_DIMS]:
        yield _row(printable(name)[:MAX_NAME], value)
    if len(per_dim_error) > MAX_DIMS:
        yield f"  and {len(per_dim_error) - MAX_DIMS} more, in eval.json"


def _rollout_lines(rollouts: Mapping[str, Any]) -> Iterator[str]:
    episodes, every = rollouts["episodes"], plural(rollouts["replan_every"], "frame")
    count = f"{plural(len(episodes), 'episode')}, {plural(rollouts['num_chunks'], 'chunk')}"
    yield f"complete episodes, replanning every {every} ({count}):"
    yield _row("all", rollouts["error"])
    horizon = [error for error in rollouts.get("per_horizon_error") or () if error is not None]
    if len(horizon) > 1:
        yield _row("first and last action of a chunk", horizon[0]) + f"   {horizon[-1]:.4f}"
    for one in episodes[:MAX_EPISODES]:
        dataset = f"dataset {one['dataset']}, " if "dataset" in one else ""
        yield _row(f"{dataset}episode {one['episode']} ({plural(one['frames'], 'frame')})", one["error"])
    if len(episodes) > MAX_EPISODES:
        yield f"  and {len(episodes) - MAX_EPISODES} with a lower error, in eval.json"
