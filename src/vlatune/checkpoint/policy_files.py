"""The small files of a LeRobot `pretrained_model` folder, with the dataset's part filled in: config and processors.

They are the base model's own JSON, with the dataset's widths, statistics and camera names in the places that LeRobot
reads. Every checkpoint carries them, so that it can be exported without the dataset. Only what processors.py lists goes
into them and comes out of them, and nothing in them says where on this machine something lies.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vlatune.batch import ACTION, STATE
from vlatune.files import read_file
from vlatune.policies import processors
from vlatune.policies.base import Binding, PolicySpec, Stats
from vlatune.policies.normalisation import stats_needed, stats_of
from vlatune.policies.processors import (
    CONFIG,
    POSTPROCESSOR,
    PREPROCESSOR,
    PROCESSORS,
    Schema,
    checked_config,
    checked_state_files,
    checked_steps,
    is_hub_name,
)
from vlatune.policies.registry import get_adapter

POLICY_FOLDER = "policy"
"""Where they lie in a checkpoint."""
NORMALISER = {PREPROCESSOR: "normalizer_processor", POSTPROCESSOR: "unnormalizer_processor"}
TOKENIZER_FOLDER = "tokenizer"
MAX_STATS_BYTES = 64 << 20


def make_policy_files(spec: PolicySpec, binding: Binding, stats: Stats, *, dtype: str | None) -> dict[str, bytes]:
    """File name -> content, for the exported folder; weights and tokenizer are not among them."""
    config = _make_config(spec, _read(spec, CONFIG), binding, dtype)
    files = {CONFIG: config}
    state_files: dict[str, bytes] = {}
    if rename_map(binding):
        _require_step(spec, PREPROCESSOR, "rename_observations_processor")
    for name in PROCESSORS:
        files[name] = _read(spec, name)
        for step in files[name]["steps"]:
            step.pop("state_file", None)  # the base's own statistics stay with it
        if spec.relative_exclude is not None:
            _ensure_relative(name, files[name]["steps"])
        _fill_steps(spec, files[name]["steps"], config, binding)
        state_files |= _put_stats(spec, name, files[name]["steps"], stats)
    return {name: json.dumps(content, indent=2).encode() for name, content in files.items()} | state_files


def make_mixture_files(spec: PolicySpec, binding: Binding, stats: Stats, *, dtype: str | None) -> dict[str, bytes]:
    """Those of every dataset of several robots, a folder each: LeRobot's processors hold one robot's statistics."""
    return {
        f"{dataset_folder(number)}/{name}": data
        for number, part in enumerate(binding.parts)
        for name, data in make_policy_files(spec, part, stats_of(stats, binding, number), dtype=dtype).items()
    }


def dataset_folder(number: int) -> str:
    return f"dataset_{number}"


def _make_config(spec: PolicySpec, config: dict[str, Any], binding: Binding, dtype: str | None) -> dict[str, Any]:
    inputs = {key: one for key, one in (config.get("input_features") or {}).items() if one["type"] != "STATE"}
    inputs[STATE] = {"type": "STATE", "shape": [binding.state_dim]}
    made = {
        "input_features": inputs,
        "output_features": {ACTION: {"type": "ACTION", "shape": [binding.action_dim]}},
        "device": None,  # whatever the machine has that loads it
        "pretrained_path": None,
    }
    if dtype is not None:
        made["dtype"] = dtype
    is_relative = spec.relative_exclude is not None
    if "action_feature_names" in config or is_relative:
        made["action_feature_names"] = list(binding.action_names)
    if "use_relative_actions" in config or is_relative:
        made["use_relative_actions"] = is_relative
    if spec.relative_exclude is not None:
        made["relative_exclude_joints"] = list(spec.relative_exclude)
    off = {name: False for name in ("gradient_checkpointing", "compile_model") if name in config}
    return config | made | off


def _fill_steps(spec: PolicySpec, steps: list[dict[str, Any]], config: dict[str, Any], binding: Binding) -> None:
    for step in steps:
        settings = step.setdefault("config", {})
        match step.get("registry_name"):
            case "rename_observations_processor":
                settings["rename_map"] = rename_map(binding)
            case "normalizer_processor":
                settings["features"] = config["input_features"] | config["output_features"]
                settings["norm_map"] = dict(spec.normalisation)
            case "unnormalizer_processor":
                settings["features"] = config["output_features"]
                settings["norm_map"] = dict(spec.normalisation)
            case "tokenizer_processor":
                settings["tokenizer_name"] = tokenizer_name(settings.get("tokenizer_name") or "")
            case processors.RELATIVE_STEP | processors.ABSOLUTE_STEP as name:
                settings["enabled"] = spec.relative_exclude is not None
                if name == processors.RELATIVE_STEP and spec.relative_exclude is not None:
                    settings["exclude_joints"] = list(spec.relative_exclude)
                    settings["action_names"] = list(binding.action_names)
            case "device_processor":
                settings["device"] = "cpu"  # loads everywhere; LeRobot's programs replace it by their own device


def _ensure_relative(file: str, steps: list[dict[str, Any]]) -> None:
    """Bases of before LeRobot had relative actions lack its steps, which stand beside the normaliser's."""
    step, after = (processors.RELATIVE_STEP, 0) if file == PREPROCESSOR else (processors.ABSOLUTE_STEP, 1)
    names = [one.get("registry_name") for one in steps]
    if step not in names and NORMALISER[file] in names:
        steps.insert(names.index(NORMALISER[file]) + after, {"registry_name": step, "config": {}})


def tokenizer_name(name: str) -> str:
    """A hub repository's name as it is; for a folder, that of the tokenizer which an export carries."""
    return name if is_hub_name(name) and not Path(name).is_dir() else TOKENIZER_FOLDER


def _put_stats(spec: PolicySpec, file: str, steps: list[dict[str, Any]], stats: Stats) -> dict[str, bytes]:
    """Name the statistics' file in the step that normalises; returns that file."""
    if not stats:
        return {}
    _require_step(spec, file, NORMALISER[file])
    found = [one.get("registry_name") for one in steps].index(NORMALISER[file])
    step = steps[found]
    step["state_file"] = f"{file.removesuffix('.json')}_step_{found}_{NORMALISER[file]}.safetensors"
    flat = {f"{key}.{name}": values.astype(np.float32) for key, of in stats.items() for name, values in of.items()}
    return {step["state_file"]: save(flat)}


def rename_map(binding: Binding) -> dict[str, str]:
    """Datasets' and robots' names of observations -> the policy's, where they differ; the first dataset's go first."""
    names: dict[str, str] = {}
    for ours, theirs in (*binding.cameras, *binding.also):
        names.setdefault(ours, theirs)
    return {ours: theirs for ours, theirs in names.items() if ours != theirs}


def _require_step(spec: PolicySpec, file: str, name: str) -> int:
    """The place of a step; without it what is learnt here could not be exported."""
    for place, step in enumerate(_read(spec, file)["steps"]):
        if step.get("registry_name") == name:
            return place
    raise ValueError(
        f"policy '{spec.folder}': {file} has no step '{name}'; use a base that LeRobot's processors were saved with"
    )


@dataclass(frozen=True)
class TrainedOn:
    """What the small files say of the data that a policy was trained on."""

    dims: Mapping[str, int]
    """Of state and action, where they are told."""
    action_names: tuple[str, ...] | None
    rename_map: Mapping[str, str]
    """Datasets' names of observations -> the policy's."""
    stats: Stats
    """Those that its normalisation uses."""


def read_trained_on(folder: Path, spec: PolicySpec, schema: Schema) -> TrainedOn:
    """Out of a LeRobot folder, ours or others', or of `POLICY_FOLDER` in a checkpoint; `spec` is the policy's."""
    where = f"policy '{folder}'"
    config = checked_config(_content(folder, CONFIG), schema, f"{where}: {CONFIG}")
    steps = checked_steps(_content(folder, PREPROCESSOR), schema, f"{where}: {PREPROCESSOR}")
    told = {STATE: config.get("input_features") or {}, ACTION: config.get("output_features") or {}}
    dims = {
        key: int(features[key]["shape"][0]) for key, features in told.items() if (features.get(key) or {}).get("shape")
    }
    names = config.get("action_feature_names")
    renamed = [step["config"].get("rename_map") for step in steps if "rename_map" in step["config"]]
    stats = _read_stats(folder, steps, spec)
    dims |= {key: next(iter(of.values())).size for key, of in stats.items() if key in told}
    return TrainedOn(dims, tuple(names) if names else None, (renamed or [None])[0] or {}, stats)


def _read_stats(folder: Path, steps: list[dict[str, Any]], spec: PolicySpec) -> Stats:
    """Of the step that normalises, which may hold more than are used."""
    needed = stats_needed(spec, spec.cameras)
    files = checked_state_files(step for step in steps if step["registry_name"] == NORMALISER[PREPROCESSOR])
    stored: dict[str, np.ndarray] = {}
    for file in files:
        try:
            stored |= load(read_file(folder, file, max_bytes=MAX_STATS_BYTES))
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(
                f"policy '{folder}': its statistics, {file}, are not readable ({error}); fetch it anew"
            ) from None
    wanted = {(key, name): f"{key}.{name}" for key, names in needed.items() for name in names}
    all_used = spec.fixed_inputs  # others do without cameras that their robot lacks
    is_used = {
        key: all_used or key in (STATE, ACTION) or f"{key}.{names[0]}" in stored for key, names in needed.items()
    }
    for (key, _), name in wanted.items():
        if is_used[key] and (name not in stored or not np.isfinite(stored[name]).all()):
            raise ValueError(
                f"policy '{folder}': {PREPROCESSOR} brings no statistics '{name}', so what it was trained to see is not known; give a "
                f"folder of a policy that was trained, as `vlatune export` and `lerobot-train` write it, not of a base model"
            )
    return {key: {name: stored[f"{key}.{name}"] for name in names} for key, names in needed.items() if is_used[key]}


def _content(folder: Path, name: str) -> Any:
    where = f"policy '{folder}': {name}"
    try:
        return _parsed(read_file(folder, name), where)
    except OSError as error:
        raise ValueError(
            f"{where} is not readable ({error.strerror}); give a LeRobot pretrained_model folder"
        ) from None


def read_policy_files(checkpoint: Path, schema: Schema, *, dataset: int | None = None) -> dict[str, bytes]:
    """File name -> content, out of a checkpoint: only files that were written there, and only what LeRobot may load."""
    folder = checkpoint / POLICY_FOLDER
    folder = folder if dataset is None else folder / dataset_folder(dataset)
    files = {name: read_file(folder, name) for name in (CONFIG, *PROCESSORS)}
    content = {name: _parsed(data, f"checkpoint '{checkpoint}': {name}") for name, data in files.items()}
    config = checked_config(content[CONFIG], schema, f"checkpoint '{checkpoint}': {CONFIG}")
    files[CONFIG] = json.dumps(config, indent=2).encode()
    for name in PROCESSORS:
        steps = checked_steps(content[name], schema, f"checkpoint '{checkpoint}': {name}")
        for file in checked_state_files(steps):
            files[file] = read_file(folder, file, max_bytes=MAX_STATS_BYTES)
    return files


def _read(spec: PolicySpec, name: str) -> dict[str, Any]:
    where = f"policy '{spec.folder}': {name}"
    try:
        content = _parsed(read_file(spec.folder, name), where)
    except OSError as error:
        raise ValueError(
            f"{where} is not readable ({error}); --policy.path must be a LeRobot pretrained_model folder"
        ) from None
    schema = get_adapter(spec.type).schema
    if name == CONFIG:
        return checked_config(content, schema, where) | dict(spec.overrides)
    return content | {"steps": checked_steps(content, schema, where)}


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable JSON ({error}); fetch it anew") from None
