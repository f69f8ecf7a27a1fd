"""Config and processor files of a LeRobot `pretrained_model` folder, adapted to the dataset.

They are the base model's JSON with the dataset's dims, statistics and camera names. Every
checkpoint stores them, so that it can be exported without the dataset. They contain only what
processors.py allows, and no local paths.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vlatune.batch import ACTION, STATE
from vlatune.console import printable
from vlatune.policies import processors
from vlatune.policies.base import Binding, PolicySpec, SelectedDims, Stats
from vlatune.policies.base_folder import read_config, read_object, read_processor
from vlatune.policies.normalisation import relative_dims, stats_needed, stats_of
from vlatune.policies.processors import (
    CONFIG,
    MAX_CHARS,
    POSTPROCESSOR,
    PREPROCESSOR,
    PROCESSORS,
    Schema,
    checked_state_files,
    is_count,
    is_hub_name,
    is_size,
    is_text,
)
from vlatune.policies.tokenizer import MAX_LENGTH
from vlatune.registry import get_adapter
from vlatune.storage.files import read_file
from vlatune.storage.json_types import checked

POLICY_FOLDER = "policy"
"""Folder of these files in a checkpoint."""
NORMALISER = {PREPROCESSOR: "normalizer_processor", POSTPROCESSOR: "unnormalizer_processor"}
TOKENIZER_FOLDER = "tokenizer"
VLATUNE_FILE = "vlatune.json"
"""File of an export with what config.json cannot store: names and selected dims of state and
action, and --dataset.action_fps."""
MIN_FPS, MAX_FPS = 1e-3, 1e6
MAX_STATS_BYTES = 64 << 20


def make_policy_files(spec: PolicySpec, binding: Binding, stats: Stats, *, dtype: str | None) -> dict[str, bytes]:
    """Map file names to contents for the exported folder, without weights and tokenizer."""
    folder, schema = Path(spec.folder), get_adapter(spec.type).schema
    config = _make_config(spec, read_config(folder, schema) | dict(spec.overrides), binding, dtype)
    files = {CONFIG: _to_json(config)}
    for name in PROCESSORS:
        steps = read_processor(folder, name, schema)
        if name == PREPROCESSOR and rename_map(binding):
            _require_step(spec, name, steps, "rename_observations_processor")
        for step in steps:
            step.pop("state_file", None)  # the base's own statistics are not exported
        if spec.relative_exclude is not None:
            _ensure_relative(name, steps)
        _fill_steps(spec, steps, config, binding)
        files |= _put_stats(spec, name, steps, stats)
        files[name] = _processor_file(name, steps)
    return files


def make_mixture_files(spec: PolicySpec, binding: Binding, stats: Stats, *, dtype: str | None) -> dict[str, bytes]:
    """Return the files of every dataset, a folder each: LeRobot's processors serve one robot."""
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
        "device": None,  # chosen by the machine that loads it
        "pretrained_path": None,
    }
    if dtype is not None and "dtype" in config:
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
                if MAX_LENGTH in spec.overrides:
                    settings["max_length"] = spec.overrides[MAX_LENGTH]
            case processors.RELATIVE_STEP | processors.ABSOLUTE_STEP as name:
                settings["enabled"] = spec.relative_exclude is not None
                if name == processors.RELATIVE_STEP and spec.relative_exclude is not None:
                    settings["exclude_joints"] = list(spec.relative_exclude)
                    settings["action_names"] = list(binding.action_names)
            case "device_processor":
                settings["device"] = "cpu"  # loads everywhere; LeRobot's programs override it


def _ensure_relative(file: str, steps: list[dict[str, Any]]) -> None:
    """Add the relative-action steps, which base models of older LeRobot versions lack."""
    step, after = (processors.RELATIVE_STEP, 0) if file == PREPROCESSOR else (processors.ABSOLUTE_STEP, 1)
    names = [one.get("registry_name") for one in steps]
    if step not in names and NORMALISER[file] in names:
        steps.insert(names.index(NORMALISER[file]) + after, {"registry_name": step, "config": {}})


def tokenizer_name(name: str) -> str:
    """Keep the name of a hub repository; for a folder, return the tokenizer folder of an export."""
    return name if is_hub_name(name) and not Path(name).is_dir() else TOKENIZER_FOLDER


def _put_stats(spec: PolicySpec, file: str, steps: list[dict[str, Any]], stats: Stats) -> dict[str, bytes]:
    """Store the statistics' file name in the normalisation step, and return the file."""
    if not stats:
        return {}
    found = _require_step(spec, file, steps, NORMALISER[file])
    step = steps[found]
    step["state_file"] = f"{file.removesuffix('.json')}_step_{found}_{NORMALISER[file]}.safetensors"
    flat = {f"{key}.{name}": values.astype(np.float32) for key, of in stats.items() for name, values in of.items()}
    return {step["state_file"]: save(flat)}


def rename_map(binding: Binding) -> dict[str, str]:
    """Map observation names of datasets to the policy's, if different; the first dataset wins."""
    names: dict[str, str] = {}
    for ours, theirs in (*binding.cameras, *binding.also):
        names.setdefault(ours, theirs)
    return {ours: theirs for ours, theirs in names.items() if ours != theirs}


def _require_step(spec: PolicySpec, file: str, steps: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return the index of a step; raise if it is missing, because an export needs it."""
    for index, step in enumerate(steps):
        if step.get("registry_name") == name:
            return index
    raise ValueError(
        f"policy '{spec.folder}': {file} has no step '{name}'; use a base that LeRobot's processors were saved with"
    )


@dataclass(frozen=True)
class TrainedOn:
    """Facts about the training data in a policy's files."""

    dims: Mapping[str, int]
    """Dims of state and action, if recorded."""
    action_names: tuple[str, ...] | None
    rename_map: Mapping[str, str]
    """Maps observation names of datasets to the policy's."""
    stats: Stats
    """Statistics that its normalisation uses."""
    selected: tuple[SelectedDims, ...] = ()
    """Vectors of which only some recorded dims were used."""
    is_relative: tuple[bool, ...] = ()
    """Whether each action dim, up to the policy's maximum, is relative; empty if none is."""
    action_fps: float | None = None
    """The --dataset.action_fps of its training."""


def read_trained_on(folder: Path, spec: PolicySpec, schema: Schema) -> TrainedOn:
    """Read a LeRobot folder, or `POLICY_FOLDER` of a checkpoint."""
    config, steps = read_config(folder, schema), read_processor(folder, PREPROCESSOR, schema)
    features_of = {STATE: config.get("input_features") or {}, ACTION: config.get("output_features") or {}}
    dims = {
        key: int(features[key]["shape"][0])
        for key, features in features_of.items()
        if (features.get(key) or {}).get("shape")
    }
    names = config.get("action_feature_names")
    renamed = [step["config"].get("rename_map") for step in steps if "rename_map" in step["config"]]
    stats = _read_stats(folder, steps, spec)
    dims |= {key: next(iter(of.values())).size for key, of in stats.items() if key in features_of}
    record = _read_record(folder)
    vectors = record.get("vectors", {})
    names = names or (vectors[ACTION]["names"] if ACTION in vectors else None)
    return TrainedOn(
        dims,
        tuple(names) if names else None,
        (renamed or [None])[0] or {},
        stats,
        is_relative=_read_relative(steps, spec, names or ()),
        action_fps=record.get("action_fps"),
        selected=tuple(
            SelectedDims(key, one["selected_dims"], one["recorded_dims"])
            for key, one in vectors.items()
            if "selected_dims" in one and "recorded_dims" in one
        ),
    )


class VectorRecord(TypedDict):
    names: tuple[str, ...]
    selected_dims: NotRequired[tuple[int, ...]]
    recorded_dims: NotRequired[int]
    """The number of dims in the recording, of which `selected_dims` were used."""


class ExportRecord(TypedDict, total=False):
    """Content of `VLATUNE_FILE`."""

    vectors: dict[str, VectorRecord]
    """Keys are `observation.state` and `action`."""
    action_fps: float


def make_record_file(binding: Binding, action_fps: float | None) -> bytes:
    """Return the content of `VLATUNE_FILE`."""
    names = {STATE: binding.state_names, ACTION: binding.action_names}
    vectors: dict[str, dict[str, Any]] = {
        key: {"names": [printable(one)[:MAX_CHARS] for one in each]} for key, each in names.items()
    }
    for key, dims, recorded in binding.selected:
        vectors[key] |= {"selected_dims": list(dims), "recorded_dims": recorded}
    return _to_json({"vectors": vectors} | ({} if action_fps is None else {"action_fps": action_fps}))


def _read_record(folder: Path) -> ExportRecord:
    if not (folder / VLATUNE_FILE).exists():
        return {}
    where = f"policy '{folder}': {VLATUNE_FILE}"
    record: ExportRecord = checked(read_object(folder, VLATUNE_FILE), ExportRecord, where)
    rate, vectors = record.get("action_fps", 1.0), record.get("vectors", {})
    dims_fit = all(
        is_size(one.get("recorded_dims", 1)) and all(map(is_count, one.get("selected_dims", ())))
        for one in vectors.values()
    )
    names_fit = all(map(is_text, (name for one in vectors.values() for name in one["names"])))
    if not (vectors.keys() <= {STATE, ACTION} and dims_fit and names_fit and MIN_FPS <= rate <= MAX_FPS):
        raise ValueError(f"{where}: names, dims or action_fps are not as `vlatune export` writes them; export it again")
    return record


def _read_relative(steps: list[dict[str, Any]], spec: PolicySpec, names: Sequence[str]) -> tuple[bool, ...]:
    """Return which action dims are relative, by the names stored in LeRobot's step.

    As in LeRobot, a dim without a name is relative. `names` are used for a folder without the step.
    """
    if spec.relative_exclude is None:
        return ()
    stored = next((step["config"] for step in steps if step["registry_name"] == processors.RELATIVE_STEP), None)
    step = {"action_names": names, "exclude_joints": spec.relative_exclude} if stored is None else stored
    named = relative_dims(step.get("action_names") or (), step.get("exclude_joints") or ())
    return named + (True,) * (spec.max_action_dim - len(named))


def _read_stats(folder: Path, steps: list[dict[str, Any]], spec: PolicySpec) -> Stats:
    """Read the statistics that the policy uses from the normalisation step."""
    stored: dict[str, np.ndarray] = {}
    for file in checked_state_files(step for step in steps if step["registry_name"] == NORMALISER[PREPROCESSOR]):
        stored |= _load_stats(folder, file)
    stats: dict[str, dict[str, np.ndarray]] = {}
    for key, names in stats_needed(spec, spec.cameras).items():
        if not spec.fixed_inputs and key not in (STATE, ACTION) and f"{key}.{names[0]}" not in stored:
            continue  # the policy allows missing cameras
        for name in (f"{key}.{name}" for name in names):
            if name not in stored or not np.isfinite(stored[name]).all():
                raise ValueError(
                    f"policy '{folder}': {PREPROCESSOR} has no statistics '{name}'; give the folder of a trained policy, as "
                    f"`vlatune export` and `lerobot-train` write it, not a base model"
                )
        stats[key] = {name: stored[f"{key}.{name}"] for name in names}
    return stats


def read_policy_files(checkpoint: Path, schema: Schema, *, dataset: int | None = None) -> dict[str, bytes]:
    """Map file names to contents of a checkpoint's policy files, validated for LeRobot."""
    folder = checkpoint / POLICY_FOLDER
    folder = folder if dataset is None else folder / dataset_folder(dataset)
    files = {CONFIG: _to_json(read_config(folder, schema))}
    for name in PROCESSORS:
        steps = read_processor(folder, name, schema)
        files[name] = _processor_file(name, steps)
        for file in checked_state_files(steps):
            stats = _load_stats(folder, file)
            for key, values in stats.items():
                if values.dtype.kind != "f" or not np.isfinite(values).all():
                    raise ValueError(
                        f"policy '{folder}': {file}: '{key[:80]}' is not of finite floats; restore it, or remove the checkpoint"
                    )
            files[file] = save(stats)
    return files


def _load_stats(folder: Path, file: str) -> dict[str, np.ndarray]:
    try:
        return load(read_file(folder, file, max_bytes=MAX_STATS_BYTES))
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(
            f"policy '{folder}': {file} is missing or damaged ({error}); restore it, or download it again"
        ) from None


def _processor_file(name: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    return _to_json({"name": name.removesuffix(".json"), "steps": steps})


def _to_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()
