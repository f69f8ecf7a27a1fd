"""Describe a run in words: what it learned, what limited its speed, what its evaluation means.

The speed verdict names the limit and a remedy, most severe first: no step taken, bytes spilled,
waiting for data, waiting for checkpoints. A run that was too short to judge is marked as such.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vlatune.formatting import format_bytes, format_number, format_seconds, format_share, plural, shorten
from vlatune.run.summary import Summary

WAIT_SHARE_FINE = 0.05
"""A smaller share of time spent waiting for data is acceptable."""
CHECKPOINT_SHARE_FINE = 0.05
"""A smaller share of time spent saving checkpoints is acceptable."""
READERS_BUSY = 0.7
"""Readers that decode for this share of the time count as saturated."""
STEPS_TO_JUDGE = 20
"""Shorter runs measure mostly allocation, compilation and filling of queues."""
USED_GROWTH = 0.10
"""An input counts as used if the error without it grows by this share; less may be seed noise."""
ETA_LINES = 10
"""Number of log lines whose step time estimates the time left."""

Tone = Literal["good", "warn", "bad"]


@dataclass(frozen=True)
class Verdict:
    tone: Tone
    line: str


def judge(summary: Summary, config: Mapping[str, Any]) -> Verdict:
    """Return what limited the speed, e.g. 'compute-bound: data wait 1.2 % of the time', with its
    tone (the color on a page)."""
    steps, restarts = summary.optimizer_steps, summary.restarts
    if steps == 0:
        return Verdict("bad", "no optimizer step was taken; the reason is in logs/")
    found = _spilled(summary, config) or _waited(summary, config) or _checkpointed(summary) or _computed(summary)
    restarted = f"; restarted {plural(restarts, 'time')}" if restarts else ""
    rough = f" (a rough figure: only {plural(steps, 'step')})" if steps < STEPS_TO_JUDGE else ""
    return Verdict(found.tone, found.line + restarted + rough)


def time_left_s(lines: Sequence[Mapping[str, Any]], total_steps: int | None) -> float | None:
    """Estimate the seconds from the newest log line to the last step; None without log lines."""
    newest = [line for line in lines[-ETA_LINES:] if line.get("step_s")]
    if not newest or total_steps is None:
        return None
    step_s = sum(line["step_s"] for line in newest) / len(newest)
    return max(0, total_steps - lines[-1]["optimizer_step"]) * step_s


def learning_verdict(
    metrics: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]
) -> Verdict | None:
    """Return one line on loss, best validation and evaluation; None before the first log line."""
    losses = [line["loss"] for line in metrics if line.get("loss") is not None]
    if not losses:
        return None
    parts, is_good = [f"loss {format_number(losses[0])} to {format_number(losses[-1])}"], losses[-1] <= losses[0]
    if best := min(validations, key=lambda one: one["val_action_error"], default=None):
        error, step = best["val_action_error"], best["optimizer_step"]
        parts.append(f"lowest action error on held-out samples {format_number(error)}, at step {step:,}")
    error, mean_error = evaluation.get("action_error"), evaluation.get("mean_action_error")
    if error is not None and mean_error:
        better = f"action error {format_share(1 - error / mean_error)} below the mean action's"
        parts.append(
            f"evaluation: {better if error < mean_error else 'no better than always predicting the mean action'}"
        )
        is_good = is_good and error < mean_error
    return Verdict("good" if is_good else "warn", "; ".join(parts))


def eval_meaning(evaluation: Mapping[str, Any]) -> str:
    """Return what the errors mean: whether the model acts, and uses images and instruction."""
    error, mean_error = evaluation["action_error"], evaluation["mean_action_error"]
    if error >= mean_error:
        return (
            "The model is no better than always predicting the mean action: "
            "it does not yet use the images and the instruction."
        )
    share = format_share(1 - error / mean_error)
    parts = [f"The model's error is {share} below the error of always predicting the mean action."]
    for key, what in (("blank_images_error", "the images"), ("blank_instruction_error", "the instruction")):
        if evaluation.get(key) is not None:
            parts.append(_use_of(what, evaluation[key], error))
    for camera, blank_error in (evaluation.get("blank_camera_errors") or {}).items():
        if blank_error < error * (1 + USED_GROWTH):
            name = shorten(camera.split(".")[-1], 60)
            parts.append(f"Without the camera {name} it hardly changes: here the other cameras suffice.")
    return " ".join(parts)


def _use_of(what: str, blank_error: float, error: float) -> str:
    growth = blank_error / error - 1 if error > 0 else math.inf
    if growth >= USED_GROWTH:
        times = f"{1 + growth:.1f} times" if math.isfinite(growth) else "many times"
        return f"Without {what} it is {times} as large, so the model uses {what}."
    return f"Without {what} it hardly grows, so on these samples the model does not rely on {what}."


def evaluated_episodes(evaluation: Mapping[str, Any]) -> str:
    """Return which episodes were evaluated."""
    root = evaluation.get("root")
    return f"episodes of {shorten(str(root), 200)}" if root else "held-out episodes"


def _spilled(summary: Summary, config: Mapping[str, Any]) -> Verdict | None:
    store = summary.object_store_capacity_bytes or (config.get("ray") or {}).get("object_store_bytes")
    remedy = f"use --ray.object_store_bytes={2 * store}" if store else "raise --ray.object_store_bytes"
    if summary.spilled_bytes:
        amount = format_bytes(summary.spilled_bytes)
        return Verdict("bad", f"SPILLED {amount}: the object store was too small for the data in flight; {remedy}")
    if summary.fallback_bytes:
        amount = format_bytes(summary.fallback_bytes)
        return Verdict("bad", f"{amount} went to disk because shared memory was full; {remedy}")
    return None


def _waited(summary: Summary, config: Mapping[str, Any]) -> Verdict | None:
    """Return whether decoding or another stage made the trainer wait; None if it did not wait."""
    share, readers, decode_s = summary.wait_share, summary.num_readers, summary.time_s.get("decode")
    if share < WAIT_SHARE_FINE:
        return None
    waited = f"the trainer waited {format_share(share)} of the time"
    # A starved trainer runs at the readers' rate r, a fed one at r / (1 - share).
    factor, loop_s = 1 / (1 - min(share, 0.99)), _loop_s(summary)
    if not readers or not decode_s or loop_s <= 0:
        return Verdict("warn", f"data-bound: {waited}; use {factor:.1f} times as many CPU readers")
    busy = decode_s / (loop_s * readers)
    if busy >= READERS_BUSY:
        # Tolerate rounding: 2 * 1.5 - 2 = 1.0000000000000002 must not become 2.
        more = plural(math.ceil(readers * (factor - 1) - 1e-6), "more CPU reader")
        workers = plural(config.get("num_workers", 1), "worker")
        decoded = f"{plural(readers, 'reader')} decoded {format_share(min(busy, 1.0))} of it"
        return Verdict("warn", f"decode-bound: {more} would keep {workers} fed; {waited}, {decoded}")
    idle = f"readers decoded only {format_share(busy)} of it, so more of them would not help"
    remedy = "a larger --ray.object_store_bytes lets more of them run at once"
    return Verdict("warn", f"data-bound: {waited}; {idle}; {remedy}")


def _checkpointed(summary: Summary) -> Verdict | None:
    loop_s, saving_s = _loop_s(summary), summary.time_s.get("checkpoint", 0.0)
    if loop_s <= 0 or saving_s / loop_s < CHECKPOINT_SHARE_FINE:
        return None
    took = f"saving took {format_share(saving_s / loop_s)} of the time ({format_seconds(saving_s)})"
    return Verdict("warn", f"checkpoint-bound: {took}; raise --save_freq")


def _computed(summary: Summary) -> Verdict:
    line, others = (
        f"compute-bound: data wait {format_share(summary.wait_share)} of the time",
        summary.other_process_share,
    )
    if others is not None:
        line += f"; other processes, readers included, used {format_share(others)} of the CPUs"
    return Verdict("good", line + "; 0 bytes spilled")


def _loop_s(summary: Summary) -> float:
    return summary.time_s.get("total", 0.0) - summary.time_s.get("start", 0.0)
