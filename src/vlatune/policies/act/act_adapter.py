"""ACT without torch: validation of its folder, and transforms of samples on the CPU.

It takes images as recorded, has no prompt, and trains with a VAE latent whose noise comes with the
sample. Reads LeRobot's `config.json` as plain JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, NOISE, SLOT, STATE, Columns
from vlatune.data.transforms import Rename, Select, Transform
from vlatune.policies.act import ActOptions
from vlatune.policies.base import (
    NO_OVERRIDES,
    NO_STATS,
    Binding,
    Fit,
    ModuleOptions,
    NoiseSpec,
    PolicyAdapter,
    PolicySpec,
    Stats,
    check_action_steps,
)
from vlatune.policies.base_folder import (
    check_options,
    make_features,
    one_image_size,
    option_defaults,
    read_config,
    read_features,
    read_steps,
    with_defaults,
)
from vlatune.policies.normalisation import make_normalisers
from vlatune.policies.processors import Schema, make_fields, plain_processors
from vlatune.policies.weight_files import count_flops
from vlatune.storage.files import atomic_folder

if TYPE_CHECKING:
    import torch

SCHEMA = Schema(
    type="act",
    config=make_fields(
        size="chunk_size n_action_steps dim_model n_heads dim_feedforward n_encoder_layers n_decoder_layers "
        "n_vae_encoder_layers latent_dim",
        text="vision_backbone pretrained_backbone_weights feedforward_activation",
        flag="pre_norm use_vae",
        switch="replace_final_stride_with_dilation",
        number="temporal_ensemble_coeff dropout kl_weight optimizer_lr optimizer_weight_decay optimizer_lr_backbone",
    ),
)
PRETRAINED = {
    "ResNet18_Weights.IMAGENET1K_V1": ("resnet18", "timm/resnet18.tv_in1k"),
    "ResNet34_Weights.IMAGENET1K_V1": ("resnet34", "timm/resnet34.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V1": ("resnet50", "timm/resnet50.tv_in1k"),
    "ResNet50_Weights.IMAGENET1K_V2": ("resnet50", "timm/resnet50.tv2_in1k"),
}
"""Maps torchvision's weights to their backbone and the hub repository with safetensors."""
DEFAULTS = option_defaults(ActOptions, dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD"))
SMALL: Mapping[str, Any] = {
    "pretrained_backbone_weights": None,
    "dim_model": 64,
    "n_heads": 4,
    "dim_feedforward": 128,
    "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1,
    "latent_dim": 8,
    "dropout": 0.0,
}
"""The tiny model of the demo and tests, where it differs from LeRobot's defaults."""


@dataclass(frozen=True, kw_only=True)
class ActSpec(PolicySpec):
    fixed_inputs: bool = True
    latent_dim: int
    """0 if trained without a latent."""
    lr_backbone: float
    config: Mapping[str, Any] = field(repr=False)
    """config.json with LeRobot's defaults and the run's overrides."""


@dataclass(frozen=True)
class LatentNoise:
    """Sample N(0, 1) noise of the latent."""

    noise: NoiseSpec
    dims: int

    def __call__(self, columns: Columns) -> Columns:
        noise_NL = np.empty((len(columns[ACTION]), self.dims), dtype=np.float32)
        for row, rng in enumerate(self.noise.generators(columns)):
            rng.standard_normal(out=noise_NL[row], dtype=np.float32)
        return columns | {NOISE: noise_NL}


class ActAdapter(PolicyAdapter[ActSpec]):
    schema = SCHEMA

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> ActSpec:
        """Read and validate the folder; loading compares it with the weights."""
        config, where = with_defaults(read_config(folder, SCHEMA, overrides), DEFAULTS), f"policy '{folder}'"
        read_steps(folder, SCHEMA)
        _check_config(config, where)
        features = read_features(config, where)
        return ActSpec(
            type="act",
            folder=str(folder),
            cameras=features.cameras,
            image_hw=features.image_hw,
            action_offsets=tuple(range(int(config["chunk_size"]))),
            max_state_dim=features.state_dim,
            max_action_dim=features.action_dim,
            normalisation=dict(config["normalization_mapping"]),
            latent_dim=int(config["latent_dim"]) if config["use_vae"] else 0,
            lr_backbone=float(config["optimizer_lr_backbone"]),
            config=config,
            overrides={"pretrained_backbone_weights": None},  # the folder has them; LeRobot would download them
        )

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """Save LeRobot's class with random weights; a full-size backbone starts pretrained."""
        from vlatune.policies.act.act_module import save_new

        config = new_config(fit, small=small)
        with atomic_folder(folder) as temporary:
            for name, content in plain_processors().items():
                (temporary / name).write_text(json.dumps(content, indent=2))
            fetch = fit.overrides.get("pretrained_backbone_weights") is not None
            save_new(temporary, config, fit.seed, small=small, fetch=fetch)

    def make_transforms(self, spec: ActSpec, binding: Binding, stats: Stats, noise: NoiseSpec) -> tuple[Transform, ...]:
        latent = (LatentNoise(noise, spec.latent_dim),) if spec.latent_dim else ()
        kept = (*spec.cameras, STATE, ACTION, ACTION_IS_PAD, *([NOISE] if latent else []), *IDS, SLOT)
        return (Rename(dict(binding.cameras)), *make_normalisers(spec, stats), *latent, Select(kept))

    def step_flops(self, spec: ActSpec, binding: Binding, options: ModuleOptions) -> float:
        positions = math.prod(-(-side // 32) for side in spec.image_hw) * len(spec.cameras)
        tokens = {r"\.encoder\.": positions + 2, r"\.decoder\.": spec.horizon, r"\.vae_encoder\.": spec.horizon + 2}
        return count_flops(Path(spec.folder), tokens, image_hw=spec.image_hw, num_images=len(spec.cameras))

    def rate_factors(self, spec: ActSpec, lr: float) -> Mapping[str, float]:
        return {"policy.model.backbone": spec.lr_backbone / lr}

    def load_module(
        self,
        spec: ActSpec,
        binding: Binding,
        options: ModuleOptions,
        device: torch.device | str = "cpu",
        *,
        stats: Stats = NO_STATS,
    ) -> torch.nn.Module:
        from vlatune.policies.act.act_module import load_act

        return load_act(spec, device, stats)


def new_config(fit: Fit, *, small: bool) -> dict[str, Any]:
    """Return the config.json of a new model for the datasets."""
    image_hw = one_image_size(fit, "ACT", "re-encode the videos of one, or remove it from the dataset")
    chunk = {"chunk_size": fit.horizon, "n_action_steps": fit.horizon} if small else {}
    if "chunk_size" in fit.overrides and "n_action_steps" not in fit.overrides:
        chunk["n_action_steps"] = min(fit.overrides["chunk_size"], 100)
    own = {"type": "act", "device": "cpu", "push_to_hub": False, **make_features(fit, image_hw)}
    config = with_defaults({**(SMALL if small else {}), **chunk, **fit.overrides, **own}, DEFAULTS)
    config["pretrained_backbone_weights"] = _initial_weights(fit, config["vision_backbone"], small=small)
    _check_config(config, "--policy.type=act")
    return config


def _initial_weights(fit: Fit, backbone: str, *, small: bool) -> str | None:
    """Return the initial backbone weights: the run's, else ImageNet V1, or None if tiny."""
    name = "pretrained_backbone_weights"
    default = next(weights for weights, (owner, _) in PRETRAINED.items() if owner == backbone)
    given = fit.overrides.get(name, None if small else default)
    if given is not None and PRETRAINED[given][0] != backbone:
        raise ValueError(
            f"--policy.{name}={given}: are weights of {PRETRAINED[given][0]}, but vision_backbone is {backbone}; use "
            f"--policy.{name}={default}, or null"
        )
    return given


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise on values that LeRobot's classes reject or that are not supported here."""
    check_action_steps(config, where)
    backbone, width = config["vision_backbone"], config["dim_model"]
    check_options(config, ActOptions, where)
    if config["replace_final_stride_with_dilation"] and backbone != "resnet50":
        raise ValueError(
            f"{where}: {backbone} cannot replace its final stride; remove --policy.replace_final_stride_with_dilation"
        )
    if width % config["n_heads"] or width % 4:
        raise ValueError(
            f"{where}: dim_model is {width}, must be a multiple of n_heads={config['n_heads']} and of 4; change --policy.dim_model "
            f"or --policy.n_heads"
        )
    if config["temporal_ensemble_coeff"] is not None and config["n_action_steps"] != 1:
        raise ValueError(
            f"{where}: temporal_ensemble_coeff needs n_action_steps=1, not {config['n_action_steps']}; add "
            f"--policy.n_action_steps=1"
        )
