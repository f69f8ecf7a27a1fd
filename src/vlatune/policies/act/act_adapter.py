"""ACT without torch: validation of its folder, and transforms of samples on the CPU.

It takes images as recorded, has no prompt, and trains with a VAE latent whose noise comes with the
sample. Reads LeRobot's `config.json` as plain JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, NOISE, SLOT, STATE
from vlatune.data.transforms import Rename, Select, Transform
from vlatune.policies.act.act_options import BACKBONES, PRETRAINED, ActOptions
from vlatune.policies.act.act_spec import ActSpec, LatentNoise
from vlatune.policies.base import (
    NO_OVERRIDES,
    NO_STATS,
    Binding,
    Fit,
    ModuleOptions,
    NoiseSpec,
    PolicyAdapter,
    Stats,
    check_action_steps,
)
from vlatune.policies.base_folder import check_options, one_image_size, read_config, read_steps, with_defaults
from vlatune.policies.normalisation import make_normalisers
from vlatune.policies.processors import (
    Schema,
    is_flag,
    is_number,
    is_size,
    is_switch,
    is_text,
    plain_processors,
)
from vlatune.policies.weight_files import stored_shapes
from vlatune.storage.files import atomic_folder

if TYPE_CHECKING:
    import torch

SCHEMA = Schema(
    type="act",
    config={
        **dict.fromkeys(("chunk_size", "n_action_steps", "dim_model", "n_heads", "dim_feedforward"), is_size),
        **dict.fromkeys(("n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers", "latent_dim"), is_size),
        **dict.fromkeys(("vision_backbone", "pretrained_backbone_weights", "feedforward_activation"), is_text),
        **dict.fromkeys(("pre_norm", "use_vae"), is_flag),
        "replace_final_stride_with_dilation": is_switch,
        **dict.fromkeys(("temporal_ensemble_coeff", "dropout", "kl_weight"), is_number),
        **dict.fromkeys(("optimizer_lr", "optimizer_weight_decay", "optimizer_lr_backbone"), is_number),
    },
)
NORMALISATION: Mapping[str, str] = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
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
USES_PER_POSITION = 3.3
"""Average uses of a ResNet weight per position of the last feature map."""


class ActAdapter(PolicyAdapter[ActSpec]):
    schema = SCHEMA

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> ActSpec:
        """Read and validate the folder, including the shapes of its weights."""
        config = with_defaults(read_config(folder, SCHEMA, overrides), ActOptions(), NORMALISATION)
        spec = _make_spec(folder, config)
        read_steps(folder, SCHEMA)
        _check_weights(folder, spec.config)
        return spec

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
        latent = (LatentNoise(noise.seed, spec.latent_dim, noise.by_frame),) if spec.latent_dim else ()
        kept = (*spec.cameras, STATE, ACTION, ACTION_IS_PAD, *([NOISE] if latent else []), *IDS, SLOT)
        return (Rename(dict(binding.cameras)), *make_normalisers(spec, stats), *latent, Select(kept))

    def step_flops(self, spec: ActSpec, binding: Binding, options: ModuleOptions) -> float:
        """Count six operations per weight and use: two forward, four backward."""
        config, positions = spec.config, math.prod(-(-side // 32) for side in spec.image_hw) * len(spec.cameras)
        backbone = {"resnet18": 11.2e6, "resnet34": 21.3e6, "resnet50": 23.5e6}[config["vision_backbone"]]
        width, inner = config["dim_model"], config["dim_feedforward"]
        layer, tokens = 4 * width**2 + 2 * width * inner, positions + 2
        encoder = config["n_encoder_layers"] * layer * tokens
        latent = config["n_vae_encoder_layers"] * layer * (spec.horizon + 2) if spec.latent_dim else 0
        decoder = config["n_decoder_layers"] * (layer * spec.horizon + 4 * width**2 * (spec.horizon + tokens) / 2)
        return 6.0 * (backbone * positions * USES_PER_POSITION + encoder + latent + decoder)

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
    shape = [3, *one_image_size(fit, "ACT", "re-encode the videos of one, or remove it from the dataset")]
    chunk = {"chunk_size": fit.horizon, "n_action_steps": fit.horizon} if small else {}
    if "chunk_size" in fit.overrides and "n_action_steps" not in fit.overrides:
        chunk["n_action_steps"] = min(fit.overrides["chunk_size"], 100)
    own = {
        "type": "act",
        "device": "cpu",
        "push_to_hub": False,
        "input_features": {
            **{camera: {"type": "VISUAL", "shape": shape} for camera in fit.cameras},
            STATE: {"type": "STATE", "shape": [fit.state_dim]},
        },
        "output_features": {ACTION: {"type": "ACTION", "shape": [fit.action_dim]}},
    }
    config = with_defaults({**(SMALL if small else {}), **chunk, **fit.overrides, **own}, ActOptions(), NORMALISATION)
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


def _make_spec(folder: Path, config: Mapping[str, Any]) -> ActSpec:
    where = f"policy '{folder}'"
    _check_config(config, where)
    inputs, outputs = config.get("input_features") or {}, config.get("output_features") or {}
    cameras = {name: one["shape"] for name, one in inputs.items() if one["type"] == "VISUAL"}
    odd = [name for name, one in inputs.items() if one["type"] != "VISUAL" and name != STATE]
    if odd or STATE not in inputs or not cameras:
        what = f"'{odd[0]}' is not supported" if odd else f"expected '{STATE}' and a camera"
        raise ValueError(f"{where}: config.json: input_features: {what}; it has {', '.join(inputs) or 'none'}")
    if [*outputs] != [ACTION]:
        raise ValueError(
            f"{where}: config.json: output_features must be only '{ACTION}', not {', '.join(outputs) or 'none'}"
        )
    for name, shape in {**cameras, STATE: inputs[STATE]["shape"], ACTION: outputs[ACTION]["shape"]}.items():
        if not all(map(is_size, shape)) or len(shape) != (3 if name in cameras else 1):
            raise ValueError(
                f"{where}: config.json: the feature '{name}' has the invalid shape {shape}; download the base model again"
            )
    sizes = {tuple(shape) for shape in cameras.values()}
    if len(sizes) > 1 or next(iter(sizes))[0] != 3:
        raise ValueError(
            f"{where}: its cameras must have colour images of one size, not {cameras}; use another base model"
        )
    _, height, width = next(iter(sizes))
    return ActSpec(
        type="act",
        folder=str(folder),
        cameras=tuple(cameras),
        image_hw=(int(height), int(width)),
        action_offsets=tuple(range(int(config["chunk_size"]))),
        max_state_dim=int(inputs[STATE]["shape"][0]),
        max_action_dim=int(outputs[ACTION]["shape"][0]),
        normalisation=dict(config["normalization_mapping"]),
        latent_dim=int(config["latent_dim"]) if config["use_vae"] else 0,
        lr_backbone=float(config["optimizer_lr_backbone"]),
        config=config,
        overrides={"pretrained_backbone_weights": None},  # the folder has them; LeRobot would download them
    )


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


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Check tensors whose shapes depend on the config; loading checks all of them."""
    shapes = stored_shapes(folder)
    for name, shape in _expected_shapes(config).items():
        if shapes.get(name) != shape:
            raise ValueError(
                f"policy '{folder}': the weights do not match config.json: '{name}' has shape {shapes.get(name)}, expected "
                f"{shape}; download the base model again"
            )


def _expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Map tensor names to shapes; None for tensors that must not exist."""
    width, inner = config["dim_model"], config["dim_feedforward"]
    state, action = config["input_features"][STATE]["shape"][0], config["output_features"][ACTION]["shape"][0]
    layers = {"encoder": config["n_encoder_layers"], "decoder": config["n_decoder_layers"]}
    layers["vae_encoder"] = config["n_vae_encoder_layers"] if config["use_vae"] else 0
    shapes: dict[str, tuple[int, ...] | None] = {
        "model.action_head.weight": (action, width),
        "model.decoder_pos_embed.weight": (config["chunk_size"], width),
        "model.encoder_robot_state_input_proj.weight": (width, state),
        "model.encoder_latent_input_proj.weight": (width, config["latent_dim"]),
        "model.encoder_img_feat_input_proj.weight": (width, BACKBONES[config["vision_backbone"]], 1, 1),
    }
    for part, depth in layers.items():
        if depth:
            shapes[f"model.{part}.layers.{depth - 1}.linear1.weight"] = (inner, width)
        shapes[f"model.{part}.layers.{depth}.linear1.weight"] = None
    return shapes
