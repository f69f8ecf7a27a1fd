"""What `vlatune bench train` trains, and the three programs that train it, each called as its users call it.

A dataset, a base model and a run's config have the name of a configuration. `demo` is the demo's own. The others have
three cameras of 480 x 640 in AV1, as LeRobot records it, and a PI0.5 in the published proportions, at a width that
decides whether decoding or computing costs more. Made once and kept.
"""

import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.bench.harness import say
from vlatune.bench.options import StepBench, TrainBench
from vlatune.bench.train.watched_program import Program
from vlatune.config import RunConfig, to_json
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.demo import ensure_base, ensure_dataset
from vlatune.errors import did_you_mean
from vlatune.flags import config_from_dict
from vlatune.ray_internals import TRAIN_WORKER_TITLE
from vlatune.recipes import get_recipe
from vlatune.run_setup import make_setup

MIB = 1024 * 1024
VIDEOS = SyntheticSpec(
    episodes=20,
    frames=60,
    cameras=3,
    height=480,
    width=640,
    fps=30,
    episodes_per_file=5,
    codec="av1",
    texture=8,
    noise=2,
)
HORIZON, IMAGE_SIZE, PATCH_SIZE = 50, 224, 28
LOG_LINES = 40
"""Of a run, at least: as fine as steady state can be told from the rest."""


@dataclass(frozen=True)
class Case:
    """How a configuration trains. A run consumes several times what its store holds."""

    train: str
    steps: int
    batch_size: int
    store_bytes: int
    lr: float
    width: int = 0
    """Of the PI0.5 that is made; 0 for the demo's."""
    depth: int = 0


CASES = {
    "demo": Case("full", steps=800, batch_size=32, store_bytes=128 * MIB, lr=3e-3),
    "expert-balanced": Case("expert", steps=320, batch_size=16, store_bytes=256 * MIB, lr=1e-3, width=128, depth=2),
    "expert-step": Case("expert", steps=160, batch_size=16, store_bytes=256 * MIB, lr=1e-3, width=256, depth=4),
    "full-video": Case("full", steps=240, batch_size=16, store_bytes=256 * MIB, lr=1e-3, width=128, depth=2),
}
"""A row of the demo takes 16 kB in the store, one of the others 0.45 MB: a run consumes six times or more of what can lie
there and in the feed. At width 128 a step costs the CPU as much as decoding, about 12 ms a sample."""


@dataclass(frozen=True)
class TrainJob:
    """What all ways train."""

    config: RunConfig
    """Of our run, without its folder."""
    episodes: tuple[int, ...]
    """The episodes that are trained on, by their index."""
    num_workers: int
    """Processes of LeRobot's DataLoader."""


def make_job(options: TrainBench, folder: Path) -> TrainJob:
    """Make what is not there yet below `folder`."""
    case = find_case(options)
    root = options.root or str(_make_videos(folder / "videos") if case.width else ensure_dataset(folder / "dataset", 0))
    base = folder / f"base-{case.width}x{case.depth}" if case.width else ensure_base(folder / "base", Path(root), 0)
    if not base.exists():
        _make_base(base, root, case)
    config = _make_config(case, root, base, options)
    setup = make_setup(config)
    positions = setup.training.position
    return TrainJob(config, tuple(setup.metas[0].episodes.index[positions].tolist()), options.num_workers)


def find_case(options: TrainBench) -> Case:
    """The configuration with what the options say otherwise."""
    if options.config not in CASES:
        hint = did_you_mean(options.config, CASES) or f"; there are {', '.join(CASES)}"
        raise ValueError(f"--config={options.config}: there is no such configuration{hint}")
    changed = {name: getattr(options, name) for name in ("steps", "batch_size", "store_bytes", "width", "depth")}
    return replace(CASES[options.config], **{name: value for name, value in changed.items() if value is not None})


def choose_log_freq(steps: int) -> int:
    """Optimizer steps between two lines: divides `steps`, so that the last line is that of the last step.

    >>> choose_log_freq(800), choose_log_freq(130), choose_log_freq(7)
    (20, 2, 1)
    """
    return next(every for every in range(max(1, steps // LOG_LINES), 0, -1) if steps % every == 0)


def _make_config(case: Case, root: str, base: Path, options: TrainBench) -> RunConfig:
    values: dict[str, Any] = get_recipe("tiny")
    values |= {
        "dataset": {"root": [root], "eval_split": options.eval_split},
        "policy": values["policy"] | {"path": str(base), "train": case.train},
        "optimizer": values["optimizer"] | {"lr": case.lr},
        "scheduler": values["scheduler"] | {"decay_lr": case.lr / 20},
        "ray": {"object_store_bytes": case.store_bytes},
        "steps": case.steps,
        "batch_size": case.batch_size,
        "seed": options.seed,
        "log_freq": choose_log_freq(case.steps),
        "save_freq": 0,
        "save_every_s": 0,
    }
    return config_from_dict(RunConfig, values, f"--config={options.config}")


def _make_videos(folder: Path) -> Path:
    if not folder.exists():
        say(f"making a dataset of {VIDEOS.episodes} episodes of {VIDEOS.frames} frames, {VIDEOS.cameras} cameras")
        make_dataset(folder, VIDEOS)
    return folder


def _make_base(folder: Path, root: str, case: Case) -> None:
    """A PI0.5 with random weights for the dataset's features, in the published proportions at another width."""
    from vlatune.bench.base_models import rebuild_at, scaled_size
    from vlatune.policies.pi05.size import read_size
    from vlatune.policies.pi05.small import make_small_pi05

    say(f"making a PI0.5 with random weights: width {case.width}, depth {case.depth}")
    meta = load_meta(root)
    make_small_pi05(
        folder,
        cameras=meta.cameras,
        state_dim=meta.features["observation.state"].shape[0],
        action_dim=meta.features["action"].shape[0],
        horizon=HORIZON,
        image_size=IMAGE_SIZE,
        tasks=meta.tasks,
    )
    small = read_size(folder)
    assert small is not None  # make_small_pi05 has written it
    proportions = StepBench(width=case.width, depth=case.depth, vision_depth=case.depth, image_size=IMAGE_SIZE)
    rebuild_at(folder, replace(scaled_size(proportions, small.vocab_size), patch_size=PATCH_SIZE), seed=0)


LEROBOT_LINE = re.compile(rb"\bstep:\S+ smpl:\S+ ")
"""In a line of LeRobot's log that comes every `--log_freq` steps; its progress bar may stand before it."""
TEMPLATE_MARK = "optimizer_step"
"""The first key of every line that the template's way prints."""
METRICS, CONFIG_FILE = "metrics.jsonl", "bench.json"


@dataclass(frozen=True)
class TemplateJob:
    """What `template_train.py` is told."""

    root: str
    base: str
    train: str
    episodes: list[int]
    steps: int
    batch_size: int
    log_freq: int
    lr: float


def ours(job: TrainJob, folder: Path, *, save_freq: int = 0, flow_samples: int = 1) -> Program:
    """`vlatune train`, its config in a file."""
    config = replace(
        job.config,
        policy=replace(job.config.policy, flow_samples=flow_samples),
        output_dir=str(folder / "run"),
        save_freq=save_freq,
        keep_checkpoints=1_000_000,  # all of them are evaluated
    )
    return Program(
        command=_python("vlatune.cli", "train", f"--config_path={write_config(folder, config)}"),
        env=_env(folder),
        output=folder / "output.txt",
        progress=folder / "run" / METRICS,
        is_mark=lambda line: line.startswith(b"{"),
        log_freq=config.log_freq,
        trainer=TRAIN_WORKER_TITLE,
    )


def lerobot(job: TrainJob, folder: Path, *, save_freq: int = 0) -> Program:
    """`lerobot-train`, with a DataLoader's workers."""
    return Program(
        command=_python(
            "vlatune.bench.train.lerobot_main", str(job.config.policy.path), *_flags(job, folder, save_freq)
        ),
        env=_env(folder),
        output=folder / "output.txt",
        progress=folder / "output.txt",
        is_mark=is_lerobot_line,
        log_freq=job.config.log_freq,
    )


def template(job: TrainJob, folder: Path) -> Program:
    """The template's pipeline and step, in one process beside Ray's."""
    config = job.config
    what = TemplateJob(
        root=config.dataset.root[0],
        base=str(config.policy.path),
        train=config.policy.train,
        episodes=list(job.episodes),
        steps=config.steps,
        batch_size=config.batch_size,
        log_freq=config.log_freq,
        lr=config.optimizer.lr,
    )
    return Program(
        command=_python("vlatune.bench.train.template_train", json.dumps(asdict(what))),
        env=_env(folder),
        output=folder / "output.txt",
        progress=folder / "output.txt",
        is_mark=lambda line: line.startswith(f'{{"{TEMPLATE_MARK}"'.encode()),
        log_freq=config.log_freq,
    )


def alone(job: TrainJob, folder: Path, what: str, measure_s: float) -> tuple[list[str], dict[str, str]]:
    """Command and environment of `parts_alone`; threads wait as a training worker's do."""
    config = write_config(folder, job.config)
    env = _env(folder) | {"OMP_WAIT_POLICY": "PASSIVE"}
    return _python("vlatune.bench.train.parts_alone", what, str(config), str(measure_s)), env


def is_lerobot_line(line: bytes) -> bool:
    return LEROBOT_LINE.search(line) is not None


def write_config(folder: Path, config: RunConfig) -> Path:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(to_json(config)))
    return file


def _flags(job: TrainJob, folder: Path, save_freq: int) -> list[str]:
    """LeRobot's own flags for the run that our config describes."""
    config = job.config
    flags = {
        "dataset.repo_id": "bench/train",
        "dataset.root": config.dataset.root[0],
        "dataset.episodes": json.dumps(job.episodes),
        "policy.device": "cpu",
        "policy.dtype": "float32",
        "policy.push_to_hub": "false",
        "policy.train_expert_only": json.dumps(config.policy.train == "expert"),
        "policy.optimizer_lr": config.optimizer.lr,
        "policy.scheduler_warmup_steps": config.scheduler.num_warmup_steps,
        "policy.scheduler_decay_steps": config.scheduler.num_decay_steps,
        "policy.scheduler_decay_lr": config.scheduler.decay_lr,
        "output_dir": folder / "run",
        "steps": config.steps,
        "batch_size": config.batch_size,
        "num_workers": job.num_workers,
        "seed": config.seed,
        "log_freq": config.log_freq,
        "save_freq": save_freq,
        "env_eval_freq": 0,
        "wandb.enable": "false",
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _env(folder: Path) -> dict[str, str]:
    """A user's: no cluster of others, no setting of this process' threads, nothing fetched, caches below the folder."""
    ours_alone = ("RAY_ADDRESS", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours_alone}
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
