"""An evaluation for people, in a terminal: the four errors side by side, every variant, every action dimension.

Pure: the figures of eval.json in, text out. Names come from datasets of strangers and may hold anything.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlatune.outgoing import printable
from vlatune.report.formatting import format_number, plural
from vlatune.report.verdict import eval_meaning

MAX_DIMS = 16
MAX_NAME = 40


def eval_text(figures: Mapping[str, Any], run: str) -> str:
    """All of it, with one line on what the figures mean."""
    parts = [[_basis(figures, run)], list(error_lines(figures))]
    if figures.get("datasets"):
        parts.append(list(_dataset_lines(figures["datasets"])))
    if len(figures["variants"]) > 1:
        parts.append(list(_variant_lines(figures["variants"])))
    parts.append(list(_dim_lines(figures["per_dim_error"])))
    parts.append([eval_meaning(dict(figures))])
    return "\n\n".join("\n".join(lines) for lines in parts)


def error_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The model's error beside those that it must beat, and those without a part of its input."""
    error = figures["action_error"]
    lines = {
        "the fine-tuned model": error,
        "predicting the mean action": figures["mean_action_error"],
        "the model with its pictures blanked": figures.get("blank_images_error"),
        "the model with its sentence blanked": figures.get("blank_sentence_error"),
    }
    yield "open-loop action error on held-out episodes (mean absolute, lower is better):"
    for what, value in (
        (what, value) for what, value in lines.items() if value is not None
    ):  # not every policy has both
        times = f"   {value / error:5.2f} x" if error > 0 else ""
        yield f"  {what:<38} {value:.4f}{times}"


def _basis(figures: Mapping[str, Any], run: str) -> str:
    of = f"{plural(figures['num_samples'], 'sample')} of {plural(len(figures['episodes']), 'held-out episode')}"
    return (
        f"{run}: checkpoint {figures['checkpoint']}, {figures['weights']} weights, on {figures['device']}; {of}; "
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
        yield f"  {printable(name)[:MAX_NAME]:<38} {value:.4f}"
    if len(per_dim_error) > MAX_DIMS:
        yield f"  and {len(per_dim_error) - MAX_DIMS} more, in eval.json"


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"
