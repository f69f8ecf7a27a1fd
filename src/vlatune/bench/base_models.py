"""A policy with random weights, of PI0.5 and PI0 at any size, and batches for it: as LeRobot's loader delivers them, and as ours does.

Sizes keep the published proportions, so that `width=2048` is the published PI0.5 at another depth. The vocabulary is
that of the small tokenizer: the table of a quarter of a million tokens costs memory and no time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, SLOT, STATE, TASK, Columns
from vlatune.bench.options import StepBench
from vlatune.pipeline.transforms import apply_all
from vlatune.policies.base import Binding, Draw, Fit, PolicyAdapter, PolicySpec
from vlatune.policies.model_size import write_size
from vlatune.policies.pi05.load import CLASSES, parse_config
from vlatune.policies.pi05.size import Pi05Size, building_at, read_size
from vlatune.policies.pi05.small import init_for_scratch
from vlatune.policies.registry import get_adapter

TASKS = ("pick up the red block and put it into the tray", "fold the towel twice")
DIMS = 7
PREPROCESSOR = "policy_preprocessor.json"


@dataclass(frozen=True)
class Base:
    """A base model's folder and what is needed to load it and to make batches for it."""

    folder: Path
    adapter: PolicyAdapter
    spec: PolicySpec
    binding: Binding

    def stats(self) -> dict[str, dict[str, np.ndarray]]:
        one = np.ones(DIMS, dtype=np.float32)
        of_any_mode = {"q01": -one, "q99": one, "min": -one, "max": one, "mean": 0 * one, "std": one}
        return dict.fromkeys((STATE, ACTION), of_any_mode)

    def columns(self, rows: Columns, *, flow_samples: int) -> Columns:
        """What a read task makes of rows: the transforms of training."""
        draw = Draw(seed=0, flow_samples=flow_samples)
        return apply_all(self.adapter.make_transforms(self.spec, self.binding, self.stats(), draw), rows)


def make_small_base(folder: Path, options: StepBench) -> Base:
    """The policy's small twin, as `vlatune demo` and the tests train it."""
    fit = _fit(options, num_cameras=2, horizon=8, image_size=48)
    get_adapter(options.policy.type).make_base(folder, fit, small=True, place=folder)
    return _base(folder, options.policy.type)


def make_base(folder: Path, options: StepBench) -> Base:
    """A folder with LeRobot's config and processors and random weights, at the size that the options name."""
    is_scaled = options.policy.type in CLASSES
    fit = _fit(options, num_cameras=options.cameras, horizon=options.horizon, image_size=options.image_size)
    get_adapter(options.policy.type).make_base(folder, fit, small=is_scaled, place=folder)
    if is_scaled:
        small = read_size(folder)
        assert small is not None  # make_base has written it
        size = scaled_size(options, small.vocab_size)
        rebuild_at(folder, size, seed=options.seed, tokens=options.tokens)
        _set_prompt_length(folder / PREPROCESSOR, options.tokens)
    return _base(folder, options.policy.type)


def _fit(options: StepBench, *, num_cameras: int, horizon: int, image_size: int) -> Fit:
    cameras = tuple(f"observation.images.camera{number}" for number in range(num_cameras))
    return Fit(cameras, DIMS, DIMS, horizon, image_size, TASKS, options.seed, ((image_size, image_size),) * num_cameras)


def rebuild_at(folder: Path, size: Pi05Size, *, seed: int, tokens: int | None = None) -> None:
    """Random weights of another size in place of a folder's own; `tokens` is another length of the prompt."""
    config = parse_config(folder)
    config.tokenizer_max_length = tokens or config.tokenizer_max_length
    with building_at(size), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = CLASSES[config.type][1](config)
        init_for_scratch(policy)
    policy.save_pretrained(folder)
    write_size(folder, size)


def scaled_size(options: StepBench, vocab_size: int) -> Pi05Size:
    """The published proportions at another width; at 2048 they are the published numbers themselves."""
    published, width = Pi05Size(), options.width
    vision_width = _multiple(width * published.vision_width / published.width, published.vision_heads)
    return Pi05Size(
        width=width,
        depth=options.depth,
        mlp_dim=width * published.mlp_dim // published.width,
        head_dim=_multiple(width * published.head_dim / published.width, 2),
        expert_width=_multiple(width * published.expert_width / published.width, 2),
        expert_mlp_dim=width * published.expert_mlp_dim // published.width,
        vision_width=vision_width,
        vision_depth=options.vision_depth,
        vision_mlp_dim=vision_width * published.vision_mlp_dim // published.vision_width,
        patch_size=published.patch_size if options.image_size % published.patch_size == 0 else options.image_size,
        vocab_size=vocab_size,
    )


def make_rows(base: Base, count: int, seed: int) -> Columns:
    """Rows as the reader delivers them: uint8 pictures at the policy's size, states, actions, sentences."""
    rng = np.random.default_rng(seed)
    height, width = base.spec.image_hw
    shape = (count, 3, height, width)
    cameras = {name: rng.integers(0, 256, shape, dtype=np.uint8) for name, _ in base.binding.cameras}
    numbers = np.arange(count, dtype=np.int64)
    return cameras | {
        STATE: rng.uniform(-1, 1, (count, DIMS)).astype(np.float32),
        ACTION: rng.uniform(-1, 1, (count, base.spec.horizon, DIMS)).astype(np.float32),
        ACTION_IS_PAD: np.zeros((count, base.spec.horizon), dtype=bool),
        TASK: np.array([TASKS[number % len(TASKS)] for number in range(count)], dtype=object),
        SLOT: numbers,
        **dict.fromkeys(IDS, numbers),
    }


def lerobot_batch(rows: Columns, device: torch.device) -> dict[str, Any]:
    """The same rows as LeRobot's loader delivers them: tensors on the device, pictures as uint8, sentences as text."""
    keys = [key for key in rows if key.startswith("observation.")] + [ACTION]
    return {key: torch.from_numpy(rows[key]).to(device) for key in keys} | {TASK: list(rows[TASK])}


def _base(folder: Path, policy_type: str) -> Base:
    adapter = get_adapter(policy_type)
    spec = adapter.read_spec(folder)
    binding = Binding(
        cameras=tuple((camera, camera) for camera in spec.cameras),
        missing_cameras=(),
        state_dim=DIMS,
        action_dim=DIMS,
        action_names=tuple(f"action_{number}" for number in range(DIMS)),
    )
    return Base(folder, adapter, spec, binding)


def _set_prompt_length(file: Path, tokens: int) -> None:
    saved: dict[str, Any] = json.loads(file.read_bytes())
    steps: list[Mapping[str, Any]] = saved["steps"]
    for step in steps:
        if step.get("registry_name") == "tokenizer_processor":
            step["config"]["max_length"] = tokens
    file.write_text(json.dumps(saved, indent=2))


def _multiple(value: float, of: int) -> int:
    return max(1, round(value / of)) * of
