"""PI0.5, the side without torch: what its folder says, and what happens to samples on the CPU.

Reads LeRobot's `config.json` and processor files as plain JSON: no class that they name is imported.
The torch side is `pi05_module.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlatune.batch import ACTION, ACTION_IS_PAD, IDS, NOISE, SLOT, STATE, TIME, TOKEN_MASK, TOKENS
from vlatune.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, parse_json, read_file, real_path
from vlatune.pipeline.tokenizer import check_tokenizer, pad_token, read_settings
from vlatune.pipeline.transforms import (
    DrawFlow,
    Normalise,
    PadActions,
    Rename,
    Select,
    StatePrompt,
    Tokenise,
    Transform,
)
from vlatune.policies.base import STATS_OF_MODE, Binding, Draw, ModuleOptions, PolicySpec
from vlatune.policies.pi05_size import Pi05Size, read_size
from vlatune.policies.pi05_weights import CONFIG_DEFAULTS, find_tensors
from vlatune.policies.processors import PREPROCESSOR, PROCESSORS, checked_config, checked_steps, is_hub_name

if TYPE_CHECKING:
    import torch

TOKENIZER = "tokenizer.json"


class Pi05Adapter:
    def read_spec(self, folder: Path) -> PolicySpec:
        """What the folder says, if its weights are all there: a base that cannot be loaded is refused at once."""
        config = _read_json(folder, "config.json")
        if config.get("type") != "pi05":
            raise ValueError(
                f"policy '{folder}': config.json says type '{config.get('type')}', expected 'pi05'; set --policy.type"
            )
        if config.get("use_relative_actions"):
            raise ValueError(
                f"policy '{folder}': use_relative_actions is on, which is not supported; use a base with absolute actions"
            )
        config = checked_config(config, f"policy '{folder}': config.json")
        step = _tokenizer_step(folder)
        tokenizer_file = _find_tokenizer(folder, step["tokenizer_name"])
        pad_id = _pad_id(tokenizer_file)
        try:
            spec = _make_spec(folder, config, step, tokenizer_file, pad_id)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"policy '{folder}': config.json is not as LeRobot writes it for PI0.5 ({type(error).__name__}: {error})"
            ) from error
        find_tensors(folder, config)
        return spec

    def make_transforms(
        self, spec: PolicySpec, binding: Binding, stats: Mapping[str, Mapping[str, np.ndarray]], draw: Draw
    ) -> tuple[Transform, ...]:
        """Rename, normalise, prompt, tokenise, pad, draw: LeRobot's processors in LeRobot's order."""
        cameras = tuple(target for _, target in binding.cameras)
        flow = DrawFlow(
            draw.seed,
            spec.horizon,
            spec.max_action_dim,
            draw.flow_samples,
            draw.by_frame,
            *spec.flow_time,
        )
        return (
            Rename(dict(binding.cameras)),
            *make_normalisers(spec, stats),
            StatePrompt(),
            Tokenise(spec.tokenizer_file, spec.max_tokens, spec.pad_id),
            PadActions(spec.max_action_dim),
            flow,
            Select((*cameras, STATE, ACTION, ACTION_IS_PAD, TOKENS, TOKEN_MASK, NOISE, TIME, *IDS, SLOT)),
        )

    def step_flops(self, spec: PolicySpec, binding: Binding, options: ModuleOptions) -> float:
        size = read_size(Path(spec.folder)) or Pi05Size()
        patches = math.prod(spec.image_hw) // size.patch_size**2 * len(spec.cameras)
        forward, both = 2, 6  # operations per weight and token; backward takes twice as many as forward
        prefix = both if options.train in ("lora", "full") else forward
        prefix_tokens = patches + spec.max_tokens
        return (
            prefix * (size.vision_weights * patches + size.language_weights * prefix_tokens)
            + both * size.expert_weights * spec.horizon * options.flow_samples
        )

    def load_module(
        self, spec: PolicySpec, binding: Binding, options: ModuleOptions, device: torch.device | str = "cpu"
    ) -> torch.nn.Module:
        from vlatune.policies.pi05_module import load_pi05

        return load_pi05(spec, binding, options, device)


def _make_spec(
    folder: Path, stored: Mapping[str, Any], step: Mapping[str, Any], tokenizer_file: Path, pad_id: int
) -> PolicySpec:
    config = {**CONFIG_DEFAULTS, **stored}
    return PolicySpec(
        type="pi05",
        folder=str(folder),
        cameras=_cameras(config),
        image_hw=(int(config["image_resolution"][0]), int(config["image_resolution"][1])),
        horizon=int(config["chunk_size"]),
        max_state_dim=int(config["max_state_dim"]),
        max_action_dim=int(config["max_action_dim"]),
        normalisation=dict(config["normalization_mapping"]),
        tokenizer_file=str(tokenizer_file),
        pad_id=pad_id,
        max_tokens=int(step.get("max_length", config["tokenizer_max_length"])),
        flow_time=(
            float(config["time_sampling_beta_alpha"]),
            float(config["time_sampling_beta_beta"]),
            float(config["time_sampling_scale"]),
            float(config["time_sampling_offset"]),
        ),
    )


def _cameras(config: Mapping[str, Any]) -> tuple[str, ...]:
    """With the empty ones, which LeRobot adds when it builds the policy."""
    named = [key for key, feature in (config["input_features"] or {}).items() if feature["type"] == "VISUAL"]
    if not named:
        raise ValueError("input_features names no camera; write the policy's cameras there")
    empty = [f"observation.images.empty_camera_{number}" for number in range(int(config["empty_cameras"]))]
    return tuple(dict.fromkeys([*named, *empty]))


def make_normalisers(spec: PolicySpec, stats: Mapping[str, Mapping[str, np.ndarray]]) -> list[Normalise]:
    """State and action normalisers, in this order, as the policy's config asks."""
    made = []
    for key, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        mode = spec.normalisation.get(kind, "IDENTITY")
        if mode != "IDENTITY":
            low, high = (stats[key][name] for name in STATS_OF_MODE[mode])
            made.append(Normalise(key, mode, low, high))
    return made


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    where, max_bytes = f"policy '{folder}': {name}", MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_JSON_BYTES
    try:
        data = read_file(folder, name, max_bytes=max_bytes)
    except FileNotFoundError as error:
        raise ValueError(
            f"policy '{folder}': no {name} in it; --policy.path must be a LeRobot pretrained_model folder"
        ) from error
    value = parse_json(data, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not readable JSON (it holds a {type(value).__name__}, expected an object)")
    return value


def _tokenizer_step(folder: Path) -> dict[str, Any]:
    """The settings of the preprocessor's step that tokenises; they name the tokenizer."""
    steps = _read_steps(folder)[PREPROCESSOR]
    found = [step["config"] for step in steps if step["registry_name"] == "tokenizer_processor"]
    if not found or not found[0].get("tokenizer_name"):
        raise ValueError(f"policy '{folder}': {PREPROCESSOR} names no tokenizer")
    if (side := found[0].get("padding_side", "right")) != "right":
        raise ValueError(f"policy '{folder}': {PREPROCESSOR} pads prompts on the {side}, expected right")
    return found[0]


def _read_steps(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The processors' steps, checked, by file; only the preprocessor has to be there."""
    found = [name for name in PROCESSORS if name == PREPROCESSOR or (folder / name).exists()]
    return {name: checked_steps(_read_json(folder, name), f"policy '{folder}': {name}") for name in found}


def _find_tokenizer(folder: Path, name: str) -> Path:
    """The tokenizer.json of that name: a folder in the policy's own, or a hub repository.

    A full path counts by its last part: an export names its own tokenizer so, and may have been moved.
    """
    for own in (Path(name).name, "tokenizer"):
        if (folder / own / TOKENIZER).exists():
            real_path(folder, f"{own}/{TOKENIZER}")  # not by a link that leads out
            return folder / own / TOKENIZER
    if not is_hub_name(name):
        raise ValueError(
            f"policy '{folder}': {PREPROCESSOR} names the tokenizer '{name}', which is not there; put its folder into the "
            f"policy's own, as '{folder / 'tokenizer'}'"
        )
    if (Path(name) / TOKENIZER).exists():  # LeRobot looks from the current folder, too
        return Path(name) / TOKENIZER
    from vlatune.policies.hub import fetch_file

    fetch_file(name, "tokenizer_config.json")
    return fetch_file(name, TOKENIZER)


def _pad_id(tokenizer_file: Path) -> int:
    """The id of the padding token; 0 in every Gemma tokenizer, but the file knows."""
    token = pad_token(read_settings(tokenizer_file.parent))
    content = _read_json(tokenizer_file.parent, tokenizer_file.name)
    check_tokenizer(content, f"tokenizer '{tokenizer_file.parent}': {TOKENIZER}")
    found = [entry["id"] for entry in content.get("added_tokens") or [] if entry["content"] == token]
    if not found:
        raise ValueError(f"tokenizer '{tokenizer_file.parent}': its pad token {token!r} is not in tokenizer.json")
    return int(found[0])
