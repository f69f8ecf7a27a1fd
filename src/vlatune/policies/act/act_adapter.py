"""ACT, the side without torch: what its folder says and may hold, and what happens to samples on the CPU.

It takes pictures as they were recorded, has no prompt, and learns with a latent (a VAE's) whose noise is the sample's own.
Reads LeRobot's `config.json` as plain JSON. The torch side is `act_module.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, NOISE, SLOT, STATE
from vlatune.files import whole_folder
from vlatune.pipeline.transforms import Rename, Select, Transform
from vlatune.policies.act.act_options import BACKBONES, OVERRIDES, PRETRAINED
from vlatune.policies.act.act_spec import ActSpec, DrawLatent
from vlatune.policies.base import (
    NO_OVERRIDES,
    NO_STATS,
    Binding,
    Draw,
    Fit,
    ModuleOptions,
    PolicyAdapter,
    Stats,
    check_action_steps,
)
from vlatune.policies.base_folder import read_config, read_steps
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
NORMALISATION = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
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
"""The twin of demo and tests, where it differs from LeRobot's defaults; the backbone is the smallest there is."""
USES_PER_POSITION = 3.3
"""How often a weight of a ResNet is used per position of its last feature map, on average."""


class ActAdapter(PolicyAdapter[ActSpec]):
    schema = SCHEMA

    def read_spec(self, folder: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> ActSpec:
        """What the folder says, if its weights can be those of such a model."""
        spec = _make_spec(folder, with_defaults(read_config(folder, SCHEMA, overrides)))
        read_steps(folder, SCHEMA)
        _check_weights(folder, spec.config)
        return spec

    def make_base(self, folder: Path, fit: Fit, *, small: bool, place: Path) -> None:
        """LeRobot's own class with random weights; at full size the backbone begins as torchvision's pretrained one."""
        from vlatune.policies.act.act_module import save_new

        config = new_config(fit, small=small)
        with whole_folder(folder) as aside:
            for name, content in plain_processors().items():
                (aside / name).write_text(json.dumps(content, indent=2))
            fetch = fit.overrides.get("pretrained_backbone_weights") is not None
            save_new(aside, config, fit.seed, small=small, fetch=fetch)

    def make_transforms(self, spec: ActSpec, binding: Binding, stats: Stats, draw: Draw) -> tuple[Transform, ...]:
        drawn = (DrawLatent(draw.seed, spec.latent_dim, draw.by_frame),) if spec.latent_dim else ()
        kept = (*spec.cameras, STATE, ACTION, ACTION_IS_PAD, *([NOISE] if drawn else []), *IDS, SLOT)
        return (Rename(dict(binding.cameras)), *make_normalisers(spec, stats), *drawn, Select(kept))

    def step_flops(self, spec: ActSpec, binding: Binding, options: ModuleOptions) -> float:
        """Six operations per weight and use: two forward, four backward."""
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


def with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checked config.json with what LeRobot takes where it leaves a field out."""
    defaults = {name: one.default for name, one in OVERRIDES.items()} | {"normalization_mapping": NORMALISATION}
    return defaults | {name: value for name, value in config.items() if value is not None or name not in defaults}


def new_config(fit: Fit, *, small: bool) -> dict[str, Any]:
    """config.json of a model made for some datasets."""
    sizes = set(fit.recorded_hw)
    if len(sizes) != 1:
        each = ", ".join(f"{name} {hw[0]} x {hw[1]}" for name, hw in zip(fit.cameras, fit.recorded_hw, strict=True))
        raise ValueError(
            f"ACT takes pictures as they were recorded, and all of one size; these cameras differ: {each}; re-encode the videos of "
            f"one, or leave it out of the dataset"
        )
    chunk = {"chunk_size": fit.horizon, "n_action_steps": fit.horizon} if small else {}
    if "chunk_size" in fit.overrides and "n_action_steps" not in fit.overrides:
        chunk["n_action_steps"] = min(fit.overrides["chunk_size"], 100)
    shape = [3, *sizes.pop()]
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
    made = with_defaults({**(SMALL if small else {}), **chunk, **fit.overrides, **own})
    made["pretrained_backbone_weights"] = _wanted_weights(fit, made["vision_backbone"], small=small)
    _check_config(made, "--policy.type=act")
    return made


def _wanted_weights(fit: Fit, backbone: str, *, small: bool) -> str | None:
    """What a new backbone begins with: what was asked for, else ImageNet's first version at full size, none for the twin."""
    name = "pretrained_backbone_weights"
    usual = next(weights for weights, (whose, _) in PRETRAINED.items() if whose == backbone)
    wanted = fit.overrides.get(name, None if small else usual)
    if wanted is not None and PRETRAINED[wanted][0] != backbone:
        raise ValueError(
            f"--policy.{name}={wanted}: these are weights of {PRETRAINED[wanted][0]}, and vision_backbone is {backbone}; give "
            f"--policy.{name}={usual}, or null"
        )
    return wanted


def _make_spec(folder: Path, config: Mapping[str, Any]) -> ActSpec:
    where = f"policy '{folder}'"
    _check_config(config, where)
    inputs, outputs = config.get("input_features") or {}, config.get("output_features") or {}
    cameras = {name: one["shape"] for name, one in inputs.items() if one["type"] == "VISUAL"}
    odd = [name for name, one in inputs.items() if one["type"] != "VISUAL" and name != STATE]
    if odd or STATE not in inputs or not cameras:
        what = f"'{odd[0]}' is not known here" if odd else f"there must be '{STATE}' and a camera"
        raise ValueError(f"{where}: config.json: input_features: {what}; it has {', '.join(inputs) or 'none'}")
    if [*outputs] != [ACTION]:
        raise ValueError(
            f"{where}: config.json: output_features must be '{ACTION}' alone, not {', '.join(outputs) or 'none'}"
        )
    for name, shape in {**cameras, STATE: inputs[STATE]["shape"], ACTION: outputs[ACTION]["shape"]}.items():
        if not all(map(is_size, shape)) or len(shape) != (3 if name in cameras else 1):
            raise ValueError(f"{where}: config.json: the feature '{name}' has shape {shape}; fetch the base model anew")
    sizes = {tuple(shape) for shape in cameras.values()}
    if len(sizes) > 1 or next(iter(sizes))[0] != 3:
        raise ValueError(
            f"{where}: its cameras must be colour pictures of one size, not {cameras}; fetch another base model"
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
        overrides={
            "pretrained_backbone_weights": None
        },  # the folder has them; LeRobot would fetch them to replace them
    )


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """What LeRobot's classes would stumble over, or take where we do not."""
    check_action_steps(config, where)
    backbone, width = config["vision_backbone"], config["dim_model"]
    if backbone not in BACKBONES:
        raise ValueError(f"{where}: vision_backbone is '{backbone[:80]}', expected one of {', '.join(BACKBONES)}")
    if config["replace_final_stride_with_dilation"] and backbone != "resnet50":
        raise ValueError(
            f"{where}: {backbone} cannot replace its final stride; leave --policy.replace_final_stride_with_dilation out"
        )
    if width % config["n_heads"] or width % 4:
        raise ValueError(
            f"{where}: dim_model is {width}, which must be a multiple of n_heads={config['n_heads']} and of 4; give another "
            f"--policy.dim_model or --policy.n_heads"
        )
    if config["temporal_ensemble_coeff"] is not None and config["n_action_steps"] != 1:
        raise ValueError(
            f"{where}: temporal_ensemble_coeff is {config['temporal_ensemble_coeff']}, which asks at every step; give "
            f"--policy.n_action_steps=1, it is {config['n_action_steps']}"
        )
    for name, override in OVERRIDES.items():
        expected = override.check(config[name])
        if expected is not None:
            raise ValueError(f"{where}: {name} is {config[name]}: {expected}")


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """The tensors that the config's numbers decide; all of them are held to the model when they are loaded."""
    shapes = stored_shapes(folder)
    for name, shape in _telling_shapes(config).items():
        if shapes.get(name) != shape:
            raise ValueError(
                f"policy '{folder}': the weights do not fit config.json: '{name}' has shape {shapes.get(name)}, expected {shape}; "
                f"fetch the base model anew"
            )


def _telling_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Name -> shape; None for what must not be there."""
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
