"""The figures of an evaluation as a person reads them in a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlatune.console import printable
from vlatune.report.formatting import format_number, plural
from vlatune.report.verdict import eval_meaning, looked_at

MAX_DIMS = 16
MAX_NAME = 40
MAX_EPISODES = 5
LABEL = 38
"""Characters before the figures."""


def eval_text(figures: Mapping[str, Any], run: str) -> str:
    """All of it, with one line on what the figures mean."""
    parts = [[_basis(figures, run)], list(error_lines(figures))]
    if figures.get("datasets"):
        parts.append(list(_dataset_lines(figures["datasets"])))
    if len(figures["variants"]) > 1:
        parts.append(list(_variant_lines(figures["variants"])))
    parts.append(list(_dim_lines(figures["per_dim_error"])))
    if figures.get("rollouts"):
        parts.append(list(_rollout_lines(figures["rollouts"])))
    parts.append([eval_meaning(dict(figures))])
    return "\n\n".join("\n".join(lines) for lines in parts)


def error_lines(figures: Mapping[str, Any], *, each_camera: bool = True) -> Iterator[str]:
    """The model's error beside those that it must beat, and those without a part of its input."""
    error, cameras = figures["action_error"], (figures.get("blank_camera_errors") or {}) if each_camera else {}
    lines = {
        "the fine-tuned model": error,
        "predicting the mean action": figures["mean_action_error"],
        "the model with its pictures blanked": figures.get("blank_images_error"),
        **{
            f"  with {printable(name).split('.')[-1][:MAX_NAME]} alone blanked": value
            for name, value in cameras.items()
        },
        "the model with its sentence blanked": figures.get("blank_sentence_error"),
    }
    yield f"open-loop action error on {looked_at(figures)} (mean absolute, lower is better):"
    for what, value in (
        (what, value) for what, value in lines.items() if value is not None
    ):  # not every policy has all
        times = f"   {value / error:5.2f} x" if error > 0 else ""
        yield f"  {what:<{LABEL}} {value:.4f}{times}"


def _basis(figures: Mapping[str, Any], run: str) -> str:
    noun = "episode" if figures.get("root") else "held-out episode"
    of = f"{plural(figures['num_samples'], 'sample')} of {plural(len(figures['episodes']), noun)}"
    of += f" of {printable(figures['root'])}" if figures.get("root") else ""
    which = "its own" if figures["weights"] == "stored" else f"checkpoint {figures['checkpoint']}, {figures['weights']}"
    return (
        f"{run}: {which} weights, on {figures['device']}; {of}; "
        f"validation loss {format_number(figures['val_loss'])} (seed {figures['seed']})"
    )


def _dataset_lines(datasets: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "by dataset, each in its own units (above, means over all samples):"
    for one in datasets:
        yield (
            f"  {one['dataset']}: {printable(one['root'])[-MAX_NAME:]:<{MAX_NAME}} error {one['action_error']:.4f}, predicting the mean "
            f"{one['mean_action_error']:.4f}, validation loss {format_number(one['val_loss'])} ({plural(one['num_samples'], 'sample')})"
        )


def _variant_lines(variants: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    keys = {
        "checkpoint": "checkpoint",
        "weights": "weights",
        "val_loss": "validation loss",
        "action_error": "error",
        "blank_images_error": "pictures blanked",
        "blank_sentence_error": "sentence blanked",
    }
    keys = {key: title for key, title in keys.items() if key in variants[0]}
    rows = [list(keys.values()), *([_cell(variant[key]) for key in keys] for variant in variants)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    yield "variants:"
    for row in rows:
        yield "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _dim_lines(per_dim_error: Mapping[str, float]) -> Iterator[str]:
    yield "error by action dimension:"
    for name, value in list(per_dim_error.items())[:MAX_DIMS]:
        yield f"  {printable(name)[:MAX_NAME]:<{LABEL}} {value:.4f}"
    if len(per_dim_error) > MAX_DIMS:
        yield f"  and {len(per_dim_error) - MAX_DIMS} more, in eval.json"


def _rollout_lines(rollouts: Mapping[str, Any]) -> Iterator[str]:
    episodes, every = rollouts["episodes"], plural(rollouts["replan_every"], "frame")
    yield f"whole episodes, asking anew every {every} ({plural(len(episodes), 'episode')}, {plural(rollouts['num_chunks'], 'chunk')}):"
    yield f"  {'all':<{LABEL}} {rollouts['error']:.4f}"
    horizon = [error for error in rollouts.get("per_horizon_error") or () if error is not None]
    if len(horizon) > 1:
        yield f"  {'first and last action of a chunk':<{LABEL}} {horizon[0]:.4f}   {horizon[-1]:.4f}"
    for one in episodes[:MAX_EPISODES]:
        of = f"dataset {one['dataset']}, " if "dataset" in one else ""
        what = f"{of}episode {one['episode']} ({plural(one['frames'], 'frame')})"
        yield f"  {what:<{LABEL}} {one['error']:.4f}"
    if len(episodes) > MAX_EPISODES:
        yield f"  and {len(episodes) - MAX_EPISODES} better ones, in eval.json"


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"
