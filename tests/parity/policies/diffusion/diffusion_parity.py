"""LeRobot's own Diffusion Policy beside ours: folders that LeRobot wrote, and the same batch and noise through both."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.diffusion import DiffusionConfig, DiffusionPolicy, make_diffusion_pre_post_processors
from torch import Tensor

from vlatune.batch import ACTION, ACTION_IS_PAD, IMAGE_PREFIX, NOISE, STATE, TIME
from vlatune.config.settings import DatasetConfig, PolicyConfig, RunConfig
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.reader import make_unit, read_unit
from vlatune.policies.diffusion.diffusion_module import SAMPLING_SEED
from vlatune.run_setup import Setup, make_setup

TINY: dict[str, Any] = {
    "down_dims": (16, 32),
    "diffusion_step_embed_dim": 16,
    "spatial_softmax_num_keypoints": 6,
    "horizon": 8,
    "n_action_steps": 5,
    "drop_n_last_frames": 2,
    "num_train_timesteps": 12,
    "pretrained_backbone_weights": None,
}
CASES: dict[str, dict[str, Any]] = {
    "group norm, cropped": {"use_group_norm": True, "crop_shape": (64, 72)},
    "batch norm, shared encoder, DDIM": {
        "use_separate_rgb_encoder_per_camera": False,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 4,
        "resize_shape": (56, 48),
        "crop_ratio": 0.9,
        "n_obs_steps": 1,
        "do_mask_loss_for_padding": True,
        "prediction_type": "sample",
    },
}


def make_base(folder: Path, dataset: Path, **settings: Any) -> Path:
    """A folder as LeRobot saves it, at a tiny size, with random weights, so that every part has an effect."""
    meta = load_meta(str(dataset))
    state, action = (meta.features[key].shape for key in (STATE, ACTION))
    images = {name: (3, *meta.features[name].height_width) for name in meta.cameras}
    config = DiffusionConfig(
        input_features={name: PolicyFeature(FeatureType.VISUAL, shape) for name, shape in images.items()}
        | {STATE: PolicyFeature(FeatureType.STATE, state)},
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, action)},
        device="cpu",
        push_to_hub=False,
        **TINY | settings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = DiffusionPolicy(config)
        for one in policy.parameters():
            if one.ndim == 1:
                one.data += 0.1 * torch.randn(one.shape)
        for name, one in policy.named_buffers():
            if "running_" in name:
                one += 0.1 * torch.rand(one.shape)
    policy.save_pretrained(folder)
    for pipeline in make_diffusion_pre_post_processors(config):
        pipeline.save_pretrained(folder)
    return folder


def run_config(dataset: Path, base: Path, **changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "dataset": DatasetConfig(root=(str(dataset),), eval_split=0.2, run_length=4, window_rows=8),
        "policy": PolicyConfig(path=str(base), type="diffusion", train="full"),
        "steps": 20,
        "save_every_s": 0.0,
    }
    return RunConfig(**given | changes)


def setup_of(dataset: Path, base: Path, **changes: Any) -> Setup:
    return make_setup(run_config(dataset, base, **changes))


def read_rows(setup: Setup, *, image_hw: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """The first frames of an episode, at the policy's size or another."""
    spec, frames = setup.specs[0], np.arange(5)
    if image_hw:
        sized = [replace(camera, height=image_hw[0], width=image_hw[1]) for camera in spec.cameras]
        spec = replace(spec, cameras=tuple(sized))
    return read_unit(spec, make_unit(setup.metas[0], spec, 1, frames, frames + 3))


def as_tensors(columns: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {key: torch.from_numpy(values) for key, values in columns.items() if values.dtype != object}


def lerobot_stats(setup: Setup) -> dict[str, dict[str, Tensor]]:
    return {key: {name: torch.from_numpy(v).float() for name, v in of.items()} for key, of in setup.stats.items()}


def lerobot_batch(setup: Setup, config: DiffusionConfig, rows: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Rows as the reader gives them, through LeRobot's own processor."""
    before, _ = make_diffusion_pre_post_processors(config, lerobot_stats(setup))
    raw = {key: torch.from_numpy(v) for key, v in rows.items() if key in (STATE, ACTION, ACTION_IS_PAD)}
    raw |= {key: torch.from_numpy(v) / 255.0 for key, v in rows.items() if v.dtype == np.uint8}
    done = before(raw)
    return {key: done[key] for key in (STATE, ACTION, *(name for name in rows if _is_camera(name)))} | {
        ACTION_IS_PAD: raw[ACTION_IS_PAD]
    }


def _is_camera(name: str) -> bool:
    return name.startswith(IMAGE_PREFIX) and not name.endswith("_is_pad")


@contextmanager
def sampling(noise: Tensor, time: Tensor) -> Iterator[None]:
    """Replace the noise and times that LeRobot samples with torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **options: noise)
        patch.setattr(torch, "randint", lambda *bounds, **options: time)
        yield


@contextmanager
def fixed_step_noise() -> Iterator[None]:
    """Let DDPM add the noise of our module in every step."""
    from diffusers.schedulers import scheduling_ddpm

    generator = torch.Generator().manual_seed(SAMPLING_SEED)
    with pytest.MonkeyPatch.context() as patch:
        noise = lambda shape, **options: torch.randn((1, *shape[1:]), generator=generator).expand(shape)  # noqa: E731
        patch.setattr(scheduling_ddpm, "randn_tensor", noise)
        yield


def lerobot_loss(policy: DiffusionPolicy, theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> Tensor:
    with sampling(ours[NOISE], ours[TIME]):
        return policy.forward(dict(theirs))[0]
