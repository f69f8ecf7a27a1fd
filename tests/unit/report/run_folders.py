"""Run folders as a run writes them: complete, unfinished and hostile."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from summaries import summary

from vlatune.config.flags import parse_flags
from vlatune.config.settings import RunConfig, to_json
from vlatune.run.kept_samples import EVAL_SAMPLES_FILE, FIRST_BATCH_FILE, EvalSample, TrainedSample, save_samples
from vlatune.run.summary import write_summary
from vlatune.storage.files import write_json

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&\ud800"
TASKS = ("put the cube in the bowl", "close the drawer", "fold the towel")
TIME_S = {"start": 14.0, "wait": 1.0, "compute": 80.0, "checkpoint": 5.0, "total": 100.0}


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics_line(step: int, *, tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
    """Return a line of metrics.jsonl; the first task occurs only at every second step."""
    by_task = {task: (None if number == 0 and step % 2 else (number + 1) / step) for number, task in enumerate(tasks)}
    return {
        "optimizer_step": step,
        "loss": 1 / step,
        "grad_norm": 1.0,
        "lr": 1e-5,
        "samples_per_s": 30.0,
        "wait_share": 0.01,
        "step_s": 0.26,
        "other_process_share": 0.2,
        "spilled_bytes": 0,
        "object_store_bytes": 10**8,
        "epoch": 0,
        "samples_seen": 8 * step,
        "loss_by_task": by_task,
        "loss_by_dim": [(dim + 1) / step for dim in range(3)],
    }


def sample(task: str = TASKS[0], camera: str = "observation.images.top", size: int = 24, dims: int = 3) -> EvalSample:
    rng = np.random.default_rng(0)
    true_TA = rng.normal(size=(10, dims))
    image = rng.integers(0, 256, (3, size, size), dtype=np.uint8)
    return EvalSample(3, 12, task, {camera: image}, true_TA, true_TA + 0.1, np.arange(10) < 8)


def write_config(folder: Path, *, steps: int, lr: float = 1e-3, root: str = "/data/a set") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--recipe=tiny", f"--steps={steps}", f"--optimizer.lr={lr}", f"--dataset.root={root}", "--batch_size=8"]
    write_json(folder / "config.json", to_json(parse_flags(flags, RunConfig)) | {"job_name": folder.name})


def write_started_run(folder: Path, *, lines: int = 20) -> Path:
    """Write a run that has logged some of 20 steps and nothing else."""
    write_config(folder, steps=20)
    write_lines(folder / "metrics.jsonl", [metrics_line(number + 1) for number in range(lines)])
    return folder


def write_complete_run(folder: Path, *, lr: float = 1e-3, steps: int = 300, word: str = TASKS[0]) -> Path:
    """Write a finished run with everything a report can show; `word` is untrusted text in it."""
    write_config(folder, steps=steps, lr=lr)
    tasks = (word, *TASKS[1:])
    write_lines(folder / "metrics.jsonl", [metrics_line(step, tasks=tasks) for step in range(1, steps + 1)])
    validations = [
        {"optimizer_step": step, "val_loss": 2 / step, "val_action_error": 0.3 / step} for step in range(50, steps, 50)
    ]
    write_lines(folder / "validation.jsonl", validations)
    times = (("start", 0, 0.0), ("checkpoint", 100, 90.0), ("start", 100, 200.0), ("checkpoint", 200, 290.0))
    events = [*times, ("end", steps, 400.0)]
    write_lines(folder / "events.jsonl", [{"event": e, "optimizer_step": n, "time_s": 1.7e9 + s} for e, n, s in events])
    dataset = {"root": "/data/a set", "episodes": 40, "held_out": 4, "frames": 800, "share": 1.0}
    data = {"tasks": list(tasks), "num_tasks": len(tasks), "task_episodes": (12, 20, 2)}
    write_json(folder / "data.json", {"datasets": [dataset], **data})
    episodes = [{"dataset": 0, "episode": number, "loss": 1.0 / (number + 1), "samples": 20} for number in range(30)]
    end = summary(
        optimizer_steps=steps,
        final_loss=1 / steps,
        restarts=1,
        loss_by_episode=tuple(episodes),
        object_store_capacity_bytes=512_000_000,
        versions={"ray": "2.60.0", word: word},
        time_s=TIME_S | {"decode": 50.0, "transport": 2.0, "collate": 1.0, "copy": 0.1},
        verdict=f"compute-bound: as written by the run {word}",
    )
    write_summary(folder, end)
    write_evaluation(folder, word)
    save_samples(folder, EVAL_SAMPLES_FILE, [sample(word), sample()])
    image = sample().images["observation.images.top"]
    first = [TrainedSample(3, number, word, {"observation.images.top": image}, {}) for number in range(4)]
    save_samples(folder, FIRST_BATCH_FILE, first)
    return folder


def write_evaluation(folder: Path, word: str = "grip") -> None:
    evaluation = {
        "episodes": [3, 7],
        "num_samples": 96,
        "val_loss": 0.046,
        "action_error": 0.08,
        "mean_action_error": 0.32,
        "blank_images_error": 0.2,
        "blank_instruction_error": 0.08,
        "per_dim_error": {"pan": 0.1, "lift": 0.06, word: 0.08},
        "per_horizon_error": [0.05, 0.08, 0.11],
        "action_names": ["pan", "lift", word],
    }
    write_json(folder / "eval.json", evaluation)
