"""Create policies of any size with random weights, and batches for LeRobot and for vlatune.

Sizes keep the published proportions: `width=2048` is the published PI0.5 at another depth. The
the tiny tokenizer's vocabulary is used, because the published one costs memory but no time.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig

from benchmarks.options import StepBench
from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, SLOT, STATE, TASK, Columns
from vlatune.data.transforms import apply_all
from vlatune.policies.base import Binding, Fit, NoiseSpec, PolicyAdapter, PolicySpec
from vlatune.policies.model_size import building_at, read_size_file, write_size
from vlatune.policies.pi05.size import Pi05Size, read_size
from vlatune.policies.pi05.tiny import init_for_scratch
from vlatune.policies.pi05.weights import CLASSES, parse_config
from vlatune.policies.smolvla import size as smolvla_size
from vlatune.policies.smolvla import tiny as smolvla_tiny
from vlatune.registry import get_adapter

TASKS = ("pick up the red block and put it into the tray", "fold the towel twice")
DIMS = 7
PREPROCESSOR = "policy_preprocessor.json"
SMOLVLA = "smolvla"
IMAGE_STATS = {"mean": 0.5, "std": 0.25}
STAGES = 3
"""Stages of Diffusion Policy's U-Net; each halves the length and doubles the width."""


@dataclass(frozen=True)
class Usual:
    """Defaults of the step benchmark: published width and image size, LeRobot's chunk size."""

    width: int
    image_size: int
    horizon: int


USUAL = {
    "pi05": Usual(2048, 224, 50),
    "pi0": Usual(2048, 224, 50),
    SMOLVLA: Usual(960, 512, 50),
    "act": Usual(512, 224, 100),
    "diffusion": Usual(512, 224, 64),
}


@dataclass(frozen=True)
class Scale:
    """Size of a vision-language policy."""

    width: int
    """Width of the language model; other widths follow."""
    depth: int
    vision_depth: int
    image_size: int
    patch_size: int | None = None
    """Patch size of the vision tower (default: published, or the image size if not divisible)."""


@dataclass(frozen=True)
class Base:
    """A base model's folder, and what is needed to load it and to make batches."""

    folder: Path
    adapter: PolicyAdapter
    spec: PolicySpec
    binding: Binding

    def stats(self) -> dict[str, dict[str, np.ndarray]]:
        one, pixel = np.ones(DIMS, dtype=np.float32), np.ones((3, 1, 1), dtype=np.float32)
        of_any_mode = {"q01": -one, "q99": one, "min": -one, "max": one, "mean": 0 * one, "std": one}
        of_images = {name: value * pixel for name, value in IMAGE_STATS.items()}
        return dict.fromkeys((STATE, ACTION), of_any_mode) | dict.fromkeys(self.spec.cameras, of_images)

    def columns(self, rows: Columns, *, flow_samples: int = 1) -> Columns:
        """Apply the transforms of training to rows."""
        noise = NoiseSpec(seed=0, flow_samples=flow_samples)
        return apply_all(self.adapter.make_transforms(self.spec, self.binding, self.stats(), noise), rows)


def make_base(folder: Path, options: StepBench) -> Base:
    """Create a folder with LeRobot's config and processors and random weights of the given size."""
    kind = options.policy.type
    usual = USUAL.get(kind, Usual(0, 224, 50))
    width, image_size = options.width or usual.width, options.image_size or usual.image_size
    fit = _fit(options, num_cameras=options.cameras, horizon=options.horizon or usual.horizon, image_size=image_size)
    if kind in CLASSES or kind == SMOLVLA:
        scale = Scale(width, options.depth, options.vision_depth, image_size)
        make_scaled(folder, kind, fit, scale, tokens=options.tokens)
    else:
        fit = replace(fit, overrides=_from_scratch(kind, width, fit.horizon))
        get_adapter(kind).make_base(folder, fit, small=False, place=folder)
    return _base(folder, kind)


def make_scaled(
    folder: Path, kind: str, fit: Fit, scale: Scale, *, tokens: int | None = None, place: Path | None = None
) -> None:
    """Create a vision-language policy of a given size. `tokens` overrides the prompt length of
    PI0.5 and PI0; `place` is the final location of the folder."""
    if kind == SMOLVLA:
        _check_smolvlm(scale)
    fit = replace(fit, image_size=scale.image_size)
    get_adapter(kind).make_base(folder, fit, small=True, place=place or folder)
    if kind == SMOLVLA:
        _rebuild_smolvla(folder, scale, fit.seed)
        return
    small = read_size(folder)
    assert small is not None  # written by make_base
    rebuild_at(folder, scaled_size(scale, small.vocab_size), seed=fit.seed, tokens=tokens)
    if tokens:
        _set_prompt_length(folder / PREPROCESSOR, tokens)


def _from_scratch(kind: str, width: int, horizon: int) -> dict[str, Any]:
    """Return LeRobot's settings for a new policy of this width; nothing is downloaded."""
    if kind == "act":
        own = {"dim_model": width, "dim_feedforward": width * 3200 // 512, "chunk_size": horizon}
        return own | {"pretrained_backbone_weights": None}
    if kind == "diffusion":
        widths = tuple(width * 2**stage for stage in range(STAGES))
        return {"down_dims": widths, "horizon": -(-horizon // 2**STAGES) * 2**STAGES}
    return {}


def _fit(options: StepBench, *, num_cameras: int, horizon: int, image_size: int) -> Fit:
    cameras = tuple(f"observation.images.camera{number}" for number in range(num_cameras))
    return Fit(cameras, DIMS, DIMS, horizon, image_size, TASKS, options.seed, ((image_size, image_size),) * num_cameras)


def rebuild_at(folder: Path, size: Pi05Size, *, seed: int, tokens: int | None = None) -> None:
    """Replace a folder's weights by random ones of another size; `tokens` is the prompt length."""
    config = parse_config(folder)
    config.tokenizer_max_length = tokens or config.tokenizer_max_length
    with building_at(size), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = CLASSES[config.type][1](config)
        init_for_scratch(policy)
    policy.save_pretrained(folder)
    write_size(folder, size)


def _rebuild_smolvla(folder: Path, scale: Scale, seed: int) -> None:
    """Replace a SmolVLA's weights by random ones of another size."""
    config: Any = PreTrainedConfig.from_pretrained(folder)
    config.num_vlm_layers = scale.depth
    config.expert_width_multiplier = get_adapter(SMOLVLA).defaults["expert_width_multiplier"]
    small = read_size_file(folder, smolvla_size.SmolVLMSize)
    assert small is not None  # written by make_base
    size = scaled_smolvlm(scale, small.vocab_size)
    smolvla_tiny.make_policy(config, size, seed).save_pretrained(folder)
    write_size(folder, size)


def scaled_size(scale: Scale, vocab_size: int) -> Pi05Size:
    """Return the published proportions of PI0.5 at another width."""
    published, width = Pi05Size(), scale.width
    vision_width = _multiple(width * published.vision_width / published.width, published.vision_heads)
    patch_size = published.patch_size if scale.image_size % published.patch_size == 0 else scale.image_size
    return Pi05Size(
        width=width,
        depth=scale.depth,
        mlp_dim=width * published.mlp_dim // published.width,
        head_dim=_multiple(width * published.head_dim / published.width, 2),
        expert_width=_multiple(width * published.expert_width / published.width, 2),
        expert_mlp_dim=width * published.expert_mlp_dim // published.width,
        vision_width=vision_width,
        vision_depth=scale.vision_depth,
        vision_mlp_dim=vision_width * published.vision_mlp_dim // published.vision_width,
        patch_size=scale.patch_size or patch_size,
        vocab_size=vocab_size,
    )


def scaled_smolvlm(scale: Scale, vocab_size: int) -> smolvla_size.SmolVLMSize:
    """Return the published proportions of SmolVLM at another width, with constant head size."""
    published, width = smolvla_size.SmolVLMSize(), scale.width
    vision_heads = max(1, round(published.vision_heads * width / published.width))
    vision_width = vision_heads * published.vision_width // published.vision_heads
    return replace(
        published,
        width=width,
        depth=scale.depth,
        mlp_dim=width * published.mlp_dim // published.width,
        heads=width // published.head_dim,
        kv_heads=width // published.head_dim * published.kv_heads // published.heads,
        vision_width=vision_width,
        vision_depth=scale.vision_depth,
        vision_mlp_dim=vision_width * published.vision_mlp_dim // published.vision_width,
        vision_heads=vision_heads,
        image_size=scale.image_size,
        vocab_size=vocab_size,
    )


def _check_smolvlm(scale: Scale) -> None:
    published = smolvla_size.SmolVLMSize()
    group = published.head_dim * published.heads // published.kv_heads
    token = published.patch_size * published.shuffle
    for name, value, of, what in (
        ("width", scale.width, group, "the heads that share keys and values"),
        ("image_size", scale.image_size, token, "a side of an image token"),
    ):
        if value % of:
            raise ValueError(f"--{name}={value}: must be a multiple of {of} for SmolVLA, {what}")


def make_rows(base: Base, count: int, seed: int) -> Columns:
    """Return rows like the reader: uint8 images at the policy's size, states, actions, tasks."""
    rng = np.random.default_rng(seed)
    window = () if base.spec.observation_offsets is None else (len(base.spec.observation_offsets),)
    shape = (count, *window, 3, *base.spec.image_hw)
    cameras = {name: rng.integers(0, 256, shape, dtype=np.uint8) for name, _ in base.binding.cameras}
    numbers = np.arange(count, dtype=np.int64)
    return cameras | {
        STATE: rng.uniform(-1, 1, (count, *window, DIMS)).astype(np.float32),
        ACTION: rng.uniform(-1, 1, (count, base.spec.horizon, DIMS)).astype(np.float32),
        ACTION_IS_PAD: np.zeros((count, base.spec.horizon), dtype=bool),
        TASK: np.array([TASKS[number % len(TASKS)] for number in range(count)], dtype=object),
        SLOT: numbers,
        **dict.fromkeys(IDS, numbers),
    }


def lerobot_batch(rows: Columns, device: torch.device) -> dict[str, Any]:
    """Return rows like LeRobot's loader: tensors on the device, uint8 images, tasks as text."""
    keys = [key for key in rows if key.startswith("observation.")] + [ACTION, ACTION_IS_PAD]
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
