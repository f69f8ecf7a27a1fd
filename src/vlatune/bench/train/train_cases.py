"""What `vlatune bench train` trains: a dataset, a base model and a run's config by the name of a configuration.

Each policy has its own configurations. `demo` is what `vlatune demo` trains. The others have three cameras of 480 x 640 in AV1, as
LeRobot records it: `video` with the policy's small twin, so that decoding decides, the rest with a model in the published
proportions, at a width that decides whether decoding or computing costs more. Made once and kept.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlatune.bench.harness import checked_root, say
from vlatune.bench.options import TrainBench
from vlatune.config import RunConfig
from vlatune.dataset.meta.dataset_meta import load_meta
from vlatune.dataset.synthetic.generate import SyntheticSpec, make_dataset
from vlatune.demo import ensure_base, ensure_dataset
from vlatune.errors import did_you_mean
from vlatune.files import put_folder
from vlatune.flags import config_from_dict
from vlatune.policies.registry import get_policy
from vlatune.recipes import get_recipe
from vlatune.run_setup import make_setup
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
    texture=8,
    noise=2,
)
HORIZON, PATCH_SIZE = 50, 28
LOG_LINES = 40
"""Of a run, at least: as fine as steady state can be told from the rest."""
WARM_UP_STEPS, DECAY_STEPS, DECAY_FLOOR = 50, 800, 0.05
"""Of the learning rate, where the policy's schedule has them; both programs shorten them alike in a shorter run."""


@dataclass(frozen=True)
class Case:
    """How a configuration trains. A run consumes several times what its store holds."""

    train: str
    steps: int
    batch_size: int
    store_bytes: int
    lr: float
    image_size: int = 0
    """Pixels on a side that the small twin or the scaled model looks at; 0 for the demo's dataset and model."""
    width: int = 0
    """Of the language model that is made; 0 for the policy's small twin."""
    depth: int = 0


VIDEO = Case("full", steps=96, batch_size=16, store_bytes=96 * MIB, lr=1e-3, image_size=96)
PI_CASES = {
    "demo": Case("full", steps=800, batch_size=32, store_bytes=128 * MIB, lr=3e-3),
    "video": VIDEO,
    "expert-balanced": Case("expert", 320, 16, store_bytes=256 * MIB, lr=1e-3, image_size=224, width=128, depth=2),
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
"""Policy -> configuration. A row of the demo takes 16 kB in the store, one at 224 pixels 0.45 MB: a run consumes six times or
more of what can lie there and in the feed. At PI0.5's width 128 a step costs the CPU as much as decoding, about 12 ms a sample.
ACT takes pictures as they were recorded, through a ResNet: on a CPU its step decides even in `video`, by a hundred times."""
USUAL_CASE = {"pi05": "demo"}
"""Where --config is left out; `video` for the others."""


@dataclass(frozen=True)
class TrainJob:
    """What all ways train."""

    config: RunConfig
    """Of our run, without its folder."""
    episodes: tuple[int, ...]
    """The episodes that are trained on, by their index."""
    num_workers: int
    """Processes of LeRobot's DataLoader."""
    epoch_samples: int = 0
    """Frames that are trained on."""


def make_job(options: TrainBench, folder: Path) -> TrainJob:
    """Make what is not there yet below `folder`."""
    case, kind = find_case(options), options.policy.type
    root = checked_root(options.root) if options.root else str(_ensure_dataset(folder, case, kind))
    base = _ensure_base(folder, root, case, kind)
    config = _make_config(case, root, base, options)
    setup = make_setup(config)
    positions = setup.training.position
    episodes = tuple(setup.metas[0].episodes.index[positions].tolist())
    return TrainJob(config, episodes, options.num_workers, setup.order.num_samples)


def case_name(options: TrainBench) -> str:
    return options.config or USUAL_CASE.get(options.policy.type, "video")


def find_case(options: TrainBench) -> Case:
    """The configuration with what the options say otherwise."""
    kind = get_policy(options.policy.type).type
    known, name = CASES.get(kind, {}), case_name(options)
    if name not in known:
        hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
        raise ValueError(f"--config={name}: --policy.type={kind} has no such configuration{hint}")
    changed = {name: getattr(options, name) for name in ("steps", "batch_size", "store_bytes", "width", "depth")}
    case = replace(known[name], **{name: value for name, value in changed.items() if value is not None})
    if case.width and not known[name].width:
        raise ValueError(f"--width={case.width}: --config={name} trains a model of its own size; leave it out")
    return case


def choose_log_freq(steps: int) -> int:
    """Optimizer steps between two lines: divides `steps`, so that the last line is that of the last step.

    >>> choose_log_freq(800), choose_log_freq(130), choose_log_freq(7)
    (20, 2, 1)
    """
    return next(every for every in range(max(1, steps // LOG_LINES), 0, -1) if steps % every == 0)


def _make_config(case: Case, root: str, base: Path, options: TrainBench) -> RunConfig:
    """With LeRobot's presets of the policy, as its recipe has them, but for the learning rate and its schedule's length."""
    card = get_policy(options.policy.type)
    recipe = get_recipe(next(name for name, one in card.recipes.items() if not one.small))
    own = {"dtype": "float32"} if "dtype" in card.settings else {}
    own |= {"optimizer_lr_backbone": case.lr} if "optimizer_lr_backbone" in card.overrides else {}
    lengths = {"num_warmup_steps": WARM_UP_STEPS, "num_decay_steps": DECAY_STEPS, "decay_lr": DECAY_FLOOR * case.lr}
    if recipe["scheduler"].get("type") == "diffuser":  # the one whose warm-up stays as long in a short run
        lengths["num_warmup_steps"] = min(WARM_UP_STEPS, case.steps // 10)
    values: dict[str, Any] = {
        "dataset": {"root": [root], "eval_split": options.eval_split},
        "policy": own | {"type": card.type, "path": str(base), "train": case.train},
        "optimizer": recipe["optimizer"] | {"lr": case.lr},
        "scheduler": recipe["scheduler"] | lengths,
        "ray": {"object_store_bytes": case.store_bytes},
        "steps": case.steps,
        "batch_size": case.batch_size,
        "torch_threads": 1 if options.pin else None,
        "seed": options.seed,
        "log_freq": choose_log_freq(case.steps),
        "save_freq": 0,
        "save_every_s": 0,
        "eval_freq": 0,
    }
    return config_from_dict(RunConfig, values, f"--config={case_name(options)}")


def _ensure_dataset(folder: Path, case: Case, kind: str) -> Path:
    if not case.image_size:
        sentences = get_policy(kind).has_prompt
        return ensure_dataset(folder / ("dataset" if sentences else "dataset-one-task"), 0, sentences=sentences)
    return ensure_videos(folder / "videos", VIDEOS)


def ensure_videos(folder: Path, spec: SyntheticSpec) -> Path:
    if not folder.exists():
        say(f"making a dataset of {spec.episodes} episodes of {spec.frames} frames, {spec.cameras} cameras")
        make_dataset(folder, spec)
    return folder


def _ensure_base(folder: Path, root: str, case: Case, kind: str) -> Path:
    """A model with random weights for the dataset's features."""
    card = get_policy(kind)
    if not case.image_size:
        return ensure_base(folder / f"base-{kind}", Path(root), 0, card)
    from vlatune.bench.base_models import SMOLVLA, Scale, make_scaled

    size = f"{case.width}x{case.depth}" if case.width else "small"
    base = folder / f"base-{kind}-{size}-{case.image_size}"
    if base.exists():
        return base
    say(f"making a model with random weights: {card.title}, {size}")
    fit = fit_datasets((load_meta(root),), seed=0, max_dims=card.max_dims)
    fit = replace(fit, horizon=HORIZON, image_size=case.image_size)
    aside = folder / f".{base.name}.making"
    shutil.rmtree(aside, ignore_errors=True)  # of a start that was killed
    if case.width:
        patch_size = None if kind == SMOLVLA else PATCH_SIZE
        make_scaled(
            aside, kind, fit, Scale(case.width, case.depth, case.depth, case.image_size, patch_size), place=base
        )
    else:
        card.adapter().make_base(aside, fit, small=True, place=base)
    put_folder(aside, base)
    return base
