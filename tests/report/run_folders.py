"""Run folders as a run leaves them, written by hand: whole, half and hostile."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from summaries import summary

from vlatune.config import RunConfig, to_json
from vlatune.files import write_json
from vlatune.flags import parse_flags
from vlatune.report.kept_samples import EvalSample, TrainedSample, save_eval_samples, save_first_batch
from vlatune.report.summary import write_summary

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&\ud800"
TASKS = ("put the cube in the bowl", "close the drawer", "fold the towel")
TASK_EPISODES = (12, 20, 2)


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics_line(step: int) -> dict[str, Any]:
    return {
        "optimizer_step": step,
        "loss": 1 / step,
        "grad_norm": 1.0,
        "lr": 1e-5,
        "samples_per_s": 30.0,
        "wait_share": 0.01,
        "step_s": 0.26,
        "spilled_bytes": 0,
        "object_store_bytes": 10**8,
        "epoch": 0,
        "samples_seen": 8 * step,
    }


def sample(task: str = TASKS[0], camera: str = "observation.images.top", size: int = 24, dims: int = 3) -> EvalSample:
    rng = np.random.default_rng(0)
    true_TA = rng.normal(size=(10, dims))
    image = rng.integers(0, 256, (3, size, size), dtype=np.uint8)
    return EvalSample(3, 12, task, {camera: image}, true_TA, true_TA + 0.1, np.arange(10) < 8)


def split_line(step: int, *, tasks: tuple[str, ...] = TASKS, dims: int = 3) -> dict[str, Any]:
    """A line whose loss is also split; the first task is met only at every second step."""
    by_task = {task: (None if number == 0 and step % 2 else (number + 1) / step) for number, task in enumerate(tasks)}
    return metrics_line(step) | {"loss_by_task": by_task, "loss_by_dim": [(dim + 1) / step for dim in range(dims)]}


def write_whole_run(folder: Path, *, lr: float = 1e-3, steps: int = 300, word: str = TASKS[0]) -> Path:
    """A finished run with everything a report can show; `word` is the text of strangers in it."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [
        "--recipe=tiny",
        f"--steps={steps}",
        f"--optimizer.lr={lr}",
        "--dataset.root=/data/a set",
        "--batch_size=8",
    ]
    config = to_json(parse_flags(flags, RunConfig)) | {"job_name": folder.name}
    write_json(folder / "config.json", config)
    tasks = (word, *TASKS[1:])
    write_lines(folder / "metrics.jsonl", [split_line(step, tasks=tasks) for step in range(1, steps + 1)])
    looks = [
        {"optimizer_step": step, "val_loss": 2 / step, "val_action_error": 0.3 / step} for step in range(50, steps, 50)
    ]
    write_lines(folder / "validation.jsonl", looks)
    times = (("start", 0, 0.0), ("checkpoint", 100, 90.0), ("start", 100, 200.0), ("checkpoint", 200, 290.0))
    times = (*times, ("end", steps, 400.0))
    write_lines(
        folder / "events.jsonl",
        [{"event": event, "optimizer_step": step, "time_s": 1.7e9 + s} for event, step, s in times],
    )
    dataset = {"root": "/data/a set", "episodes": 40, "held_out": 4, "frames": 800, "share": 1.0}
    data = {"tasks": list(tasks), "num_tasks": len(tasks), "task_episodes": TASK_EPISODES}
    write_json(folder / "data.json", {"datasets": [dataset], **data})
    mixed = {"order": 3.0, "permutation": 3.1, "ratio": 0.97}
    episodes = [{"dataset": 0, "episode": number, "loss": 1.0 / (number + 1), "samples": 20} for number in range(30)]
    end = summary(
        optimizer_steps=steps,
        final_loss=1 / steps,
        restarts=1,
        loss_by_episode=tuple(episodes),
        object_store_capacity_bytes=512_000_000,
        versions={"ray": "2.60.0", word: word},
        best_validation={"optimizer_step": 250, "action_error": 0.0012},
        time_s=summary().time_s | {"decode": 50.0, "transport": 2.0, "collate": 1.0, "copy": 0.1},
        shuffle={
            "global_batch": 8,
            "batches": 100,
            "distinct_episodes": mixed,
            "neighbour_rate": mixed,
            "neighbour_steps": mixed,
            "distance": 0.1,
        },
    )
    write_summary(folder, end)
    evaluation = {
        "episodes": [3, 7],
        "num_samples": 96,
        "val_loss": 0.046,
        "action_error": 0.08,
        "mean_action_error": 0.32,
        "blank_images_error": 0.2,
        "blank_sentence_error": 0.08,
        "per_dim_error": {"pan": 0.1, "lift": 0.06, word: 0.08},
        "per_horizon_error": [0.05, 0.08, 0.11],
        "action_names": ["pan", "lift", word],
    }
    write_json(folder / "eval.json", evaluation)
    save_eval_samples(folder, [sample(word), sample()])
    picture = sample().images["observation.images.top"]
    save_first_batch(
        folder, [TrainedSample(3, number, word, {"observation.images.top": picture}, {}) for number in range(4)]
    )
    return folder
