"""Define the configurations of the train benchmark: dataset, base model and run config.

`demo` is what `vlatune demo` trains. The others have three AV1 cameras of 480 x 640, as LeRobot
records: `video` with the tiny model, so that decoding dominates, the others with a model in the
published proportions whose width balances decoding and computing. Datasets and models are created
once.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import say
from benchmarks.options import TrainBench
from vlatune.config.settings import DatasetConfig, PolicyConfig, RayConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.demo.demo import ensure_dataset
from vlatune.demo.generate import SyntheticSpec, make_dataset
from vlatune.errors import did_you_mean
from vlatune.registry import get_adapter, get_policy_info
from vlatune.run_setup import make_setup
from vlatune.storage.files import replace_folder
from vlatune.train.driver.tiny_base import fit_datasets

MIB = 1024 * 1024
VIDEOS = SyntheticSpec(
    episodes=120,
    frames=20,
    cameras=3,
    height=480,
    width=640,
    fps=30,
    episodes_per_file=30,
    codec="av1",
    noise=4,
)
HORIZON, PATCH_SIZE = 50, 28
LOG_LINES = 40
"""Minimum number of log lines per run, the resolution of the steady-state window."""
WARM_UP_STEPS, DECAY_STEPS, DECAY_FLOOR = 50, 800, 0.05
"""Learning rate schedule for policies that have one; both programs scale it for shorter runs."""


@dataclass(frozen=True)
class Case:
    """Settings of a configuration; a run should consume several times its object store."""

    train: str
    steps: int
    batch_size: int
    store_bytes: int
    lr: float
    image_size: int = 0
    """Image size of the tiny or scaled model; 0 for the demo's dataset and model."""
    width: int = 0
    """Width of the created language model; 0 for the tiny model."""
    depth: int = 0
    cache_epochs: int = 0
    """Epochs of a further run of vlatune with the frame cache or a kept prefix; 0 for none."""


VIDEO = Case("full", steps=96, batch_size=16, store_bytes=96 * MIB, lr=1e-3, image_size=96, cache_epochs=3)
PI_CASES = {
    "demo": Case("full", steps=800, batch_size=32, store_bytes=128 * MIB, lr=3e-3),
    "video": VIDEO,
    "expert-balanced": Case(
        "expert", 320, 16, store_bytes=256 * MIB, lr=1e-3, image_size=224, width=128, depth=2, cache_epochs=4
    ),
    "expert-step": Case("expert", 160, 16, store_bytes=256 * MIB, lr=1e-3, image_size=224, width=256, depth=4),
    "full-video": Case("full", 240, 16, store_bytes=256 * MIB, lr=1e-3, image_size=224, width=128, depth=2),
}
CASES: dict[str, dict[str, Case]] = {
    "pi05": PI_CASES,
    "pi0": PI_CASES,
    "smolvla": {
        "demo": PI_CASES["demo"],
        "video": VIDEO,
        "expert-step": Case("expert", 32, 16, store_bytes=256 * MIB, lr=1e-3, image_size=256, width=384, depth=4),
    },
    "act": {
        "demo": Case("full", steps=120, batch_size=16, store_bytes=128 * MIB, lr=5e-4),
        "video": Case("full", steps=12, batch_size=2, store_bytes=256 * MIB, lr=1e-4, image_size=640),
    },
    "diffusion": {
        "demo": Case("full", steps=200, batch_size=8, store_bytes=128 * MIB, lr=1e-3),
        "video": Case("full", steps=64, batch_size=16, store_bytes=96 * MIB, lr=1e-3, image_size=32),
        "step": Case("full", steps=40, batch_size=8, store_bytes=96 * MIB, lr=1e-3, image_size=96),
    },
}
"""Policy -> configurations. Store sizes are a small part of what a run consumes. ACT takes images
at recorded size through a ResNet, so on a CPU its step dominates even in `video`."""
OVERRIDES = ("steps", "batch_size", "store_bytes", "width", "depth", "cache_epochs")
"""Fields of a case that options of the same name replace."""
USUAL_CASE = {"pi05": "demo"}
"""Default configurations other than `video`."""


@dataclass(frozen=True)
class TrainJob:
    """Training job that all programs share."""

    config: RunConfig
    """Config of vlatune's run, without its folder."""
    episodes: tuple[int, ...]
    """Indices of the training episodes."""
    num_workers: int
    """Worker processes of LeRobot's DataLoader."""
    steps_per_epoch: int = 0
    cache_epochs: int = 0
    """Epochs of the run with the frame cache."""
    device: str = "cpu"
    """Device of LeRobot and of the template; vlatune uses GPUs if there are any."""


def make_job(options: TrainBench, folder: Path) -> TrainJob:
    """Create dataset and base model below `folder` if needed."""
    case, kind = find_case(options), options.policy.type
    root = options.root or str(_ensure_dataset(folder, case, kind))
    base = Path(options.base) if options.base else _ensure_base(folder, root, case, kind)
    config = _make_config(case, root, base, options)
    setup = make_setup(config)
    positions = setup.training.position
    episodes = tuple(setup.metas[0].episodes.index[positions].tolist())
    return TrainJob(config, episodes, options.num_workers, setup.order.batches_per_epoch, case.cache_epochs)


def case_name(options: TrainBench) -> str:
    return options.config or USUAL_CASE.get(options.policy.type, "video")


def find_case(options: TrainBench) -> Case:
    """Return the configuration with overrides from the options."""
    kind = get_policy_info(options.policy.type).type
    known, name = CASES.get(kind, {}), case_name(options)
    if name not in known:
        hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
        raise ValueError(f"--config={name}: --policy.type={kind} has no such configuration{hint}")
    changed = {name: getattr(options, name) for name in OVERRIDES}
    case = replace(known[name], **{name: value for name, value in changed.items() if value is not None})
    if case.width and not known[name].width:
        raise ValueError(f"--width={case.width}: --config={name} has a fixed model size; remove the flag")
    return case


def choose_log_freq(steps: int) -> int:
    """Return the log interval; it divides `steps`, so that the last step is logged.

    >>> choose_log_freq(800), choose_log_freq(130), choose_log_freq(7)
    (20, 2, 1)
    """
    return next(every for every in range(max(1, steps // LOG_LINES), 0, -1) if steps % every == 0)


def _make_config(case: Case, root: str, base: Path, options: TrainBench) -> RunConfig:
    """Build the config from LeRobot's presets, with our learning rate and schedule length."""
    info = get_policy_info(options.policy.type)
    recipe: RunConfig = next(one.config for one in info.recipes.values() if not one.small)
    scheduler = replace(
        recipe.scheduler,
        num_warmup_steps=WARM_UP_STEPS,
        num_decay_steps=DECAY_STEPS,
        decay_lr=DECAY_FLOOR * case.lr,
    )
    if scheduler.type == "diffuser":  # its warm-up is not scaled in short runs
        scheduler = replace(scheduler, num_warmup_steps=min(WARM_UP_STEPS, case.steps // 10))
    return RunConfig(
        dataset=DatasetConfig(root=(root,), eval_split=options.eval_split, cache="off"),
        policy=PolicyConfig(
            type=info.type,
            path=str(base),
            train=case.train,
            dtype="float32" if "dtype" in info.settings else None,
            overrides={"optimizer_lr_backbone": case.lr} if "optimizer_lr_backbone" in info.option_defaults else {},
        ),
        optimizer=replace(recipe.optimizer, lr=case.lr),
        scheduler=scheduler,
        ray=RayConfig(object_store_bytes=case.store_bytes),
        steps=case.steps,
        batch_size=case.batch_size,
        seed=options.seed,
        log_freq=choose_log_freq(case.steps),
        save_freq=0,
        save_every_s=0,
        eval_freq=0,
    )


def _ensure_dataset(folder: Path, case: Case, kind: str) -> Path:
    if not case.image_size:
        has_prompt = get_policy_info(kind).has_prompt
        return ensure_dataset(folder / ("dataset" if has_prompt else "dataset-one-task"), 0, has_prompt=has_prompt)
    return ensure_videos(folder / "videos", VIDEOS)


def ensure_videos(folder: Path, spec: SyntheticSpec) -> Path:
    if not folder.exists():
        say(f"making a dataset of {spec.episodes} episodes of {spec.frames} frames, {spec.cameras} cameras")
        make_dataset(folder, spec)
    return folder


def _ensure_base(folder: Path, root: str, case: Case, kind: str) -> Path:
    """Create a model with random weights for the dataset's features."""
    info = get_policy_info(kind)
    from benchmarks.base_models import SMOLVLA, Scale, make_scaled

    size = f"{case.width}x{case.depth}" if case.width else "small"
    base = folder / (f"base-{kind}-{size}-{case.image_size}" if case.image_size else f"base-{kind}")
    if base.exists():
        return base
    say(f"making a model with random weights: {info.title}, {size}")
    fit = fit_datasets((load_meta(root),), seed=0, max_dims=info.max_dims)
    if case.image_size:
        fit = replace(fit, horizon=HORIZON, image_size=case.image_size)
    temporary = folder / f".{base.name}.making"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
    if case.width:
        patch_size = None if kind == SMOLVLA else PATCH_SIZE
        make_scaled(
            temporary, kind, fit, Scale(case.width, case.depth, case.depth, case.image_size, patch_size), place=base
        )
    else:
        get_adapter(info.type).make_base(temporary, fit, small=True, place=base)
    replace_folder(temporary, base)
    return base
