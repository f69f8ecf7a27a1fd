"""Locate a policy's folder in LeRobot's layout, read its validated JSON, and hash its weights.

The hash samples each tensor instead of reading all bytes. Does not import torch.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from vlatune.batch import ACTION, STATE
from vlatune.config.fields import violation
from vlatune.policies.processors import CONFIG, PREPROCESSOR, PROCESSORS, Schema, checked_config, checked_steps, is_size
from vlatune.registry import get_policy_info
from vlatune.storage.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, open_file, parse_json, read_file
from vlatune.storage.hub import fetch
from vlatune.storage.paths import is_local, local_path, require_base
from vlatune.storage.root import Root
from vlatune.storage.url_folder import fetch_folder

REPOSITORY_FILES = ("*.json", "*.safetensors", "tokenizer*")
TOKENIZER = "tokenizer.json"

if TYPE_CHECKING:
    from vlatune.policies.base import Fit


def resolve_folder(path: str, revision: str | None, on_chunk: Callable[[], object] = lambda: None) -> Path:
    """Return a local folder, or download a URL to our cache, or `owner/name` to the hub's."""
    if not is_local(path):
        try:
            return fetch_folder(Root(path, has_checksums=False), REPOSITORY_FILES, on_chunk)
        except (ValueError, RuntimeError) as error:
            raise type(error)(f"--policy.path: {str(error).removeprefix('dataset ')}") from None
    folder = local_path(path)
    if folder.is_dir():
        return folder.resolve()
    require_base(path)
    return fetch(
        path, lambda hub: hub.snapshot_download(path, revision=revision, allow_patterns=list(REPOSITORY_FILES))
    )


def read_config(folder: Path, schema: Schema, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read and validate config.json, with the run's overrides applied."""
    config = checked_config(read_object(folder, CONFIG), schema, f"policy '{folder}': {CONFIG}")
    return config | _allowed(folder, config, schema.type, overrides) if overrides else config


def _allowed(folder: Path, config: Mapping[str, Any], type_name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides as JSON types; raise if the base model's weights do not allow one."""
    plain = json.loads(json.dumps(overrides))
    info = get_policy_info(type_name)
    for name, value in plain.items():
        option = info.option(name)
        stored = config.get(name, json.loads(json.dumps(option.default)))
        if option.metadata["with_base"] == "same" and value != stored:
            raise ValueError(
                f"--policy.{name}={value}: the weights of the base model '{folder}' require {stored} ({CONFIG}); remove the flag, or use "
                f"another base model"
            )
    return plain


def option_defaults(options: type, normalisation: Mapping[str, str]) -> dict[str, Any]:
    """Return LeRobot's default of every option and of the normalisation."""
    return dataclasses.asdict(options()) | {"normalization_mapping": normalisation}


def with_defaults(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fill fields that are omitted or null with LeRobot's defaults; lists become tuples, as in flags."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    return {**defaults, **{name: value for name, value in given.items() if value is not None or name not in defaults}}


def check_options(config: Mapping[str, Any], options: type, where: str) -> None:
    """Raise if an option in a config.json is outside its limits or not one of its choices."""
    types = get_type_hints(options)
    for field in dataclasses.fields(options):
        value, choices = config[field.name], get_args(types[field.name])
        if get_origin(types[field.name]) is Literal and value not in choices:
            raise ValueError(f"{where}: {field.name} is {str(value)[:80]}, expected {', '.join(map(str, choices))}")
        if problem := violation(field, value):
            raise ValueError(f"{where}: {field.name} is {value}: {problem}")


def one_image_size(fit: "Fit", title: str, remedy: str) -> tuple[int, int]:
    """Return the recorded height and width of all cameras; raise if they differ."""
    if len(set(fit.recorded_hw)) != 1:
        sizes = ", ".join(f"{name} {hw[0]} x {hw[1]}" for name, hw in zip(fit.cameras, fit.recorded_hw, strict=True))
        raise ValueError(f"{title} needs cameras with one image size, but these differ: {sizes}; {remedy}")
    return fit.recorded_hw[0]


class Features(NamedTuple):
    """Inputs and outputs of a policy that takes images of one size."""

    cameras: tuple[str, ...]
    image_hw: tuple[int, int]
    state_dim: int
    action_dim: int


def make_features(fit: "Fit", image_hw: tuple[int, int]) -> dict[str, Any]:
    """Return the features in the config.json of a new model."""
    images = {camera: {"type": "VISUAL", "shape": [3, *image_hw]} for camera in fit.cameras}
    return {
        "input_features": images | {STATE: {"type": "STATE", "shape": [fit.state_dim]}},
        "output_features": {ACTION: {"type": "ACTION", "shape": [fit.action_dim]}},
    }


def read_features(config: Mapping[str, Any], where: str) -> Features:
    """Return the features of a validated config.json; raise if they are not cameras, state and action."""
    inputs, outputs = config.get("input_features") or {}, config.get("output_features") or {}
    cameras = {name: one["shape"] for name, one in inputs.items() if one["type"] == "VISUAL"}
    if not cameras or inputs.keys() != {*cameras, STATE} or [*outputs] != [ACTION]:
        raise ValueError(
            f"{where}: {CONFIG}: the features are {', '.join((*inputs, *outputs)) or 'none'}, expected cameras, '{STATE}' and "
            f"'{ACTION}'; use another base model"
        )
    vectors = [inputs[STATE]["shape"], outputs[ACTION]["shape"]]
    hw = next(iter(cameras.values()))[1:]
    is_valid = all(shape == [3, *hw] for shape in cameras.values()) and [*map(len, vectors)] == [1, 1] and len(hw) == 2
    if not is_valid or not all(is_size(side) for shape in (hw, *vectors) for side in shape):
        raise ValueError(
            f"{where}: {CONFIG}: the features have the shapes {[*cameras.values(), *vectors]}, expected colour images of one size "
            f"and vectors; use another base model"
        )
    visual = config["normalization_mapping"].get("VISUAL", "IDENTITY")
    if visual not in ("MEAN_STD", "IDENTITY"):
        raise ValueError(f"{where}: images are normalised by {visual}, expected MEAN_STD or IDENTITY")
    return Features(tuple(cameras), (int(hw[0]), int(hw[1])), int(vectors[0][0]), int(vectors[1][0]))


def read_steps(folder: Path, schema: Schema) -> dict[str, list[dict[str, Any]]]:
    """Read and validate the processor steps by file; only the preprocessor is required."""
    found = [name for name in PROCESSORS if name == PREPROCESSOR or (folder / name).exists()]
    return {name: read_processor(folder, name, schema) for name in found}


def read_processor(folder: Path, name: str, schema: Schema) -> list[dict[str, Any]]:
    """Read and validate the steps of a processor file."""
    return checked_steps(read_object(folder, name), schema, f"policy '{folder}': {name}")


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from the folder."""
    where, most = f"policy '{folder}': {name}", MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_JSON_BYTES
    try:
        data = read_file(folder, name, max_bytes=most)
    except FileNotFoundError as error:
        raise ValueError(f"policy '{folder}': no {name} in it; expected a LeRobot pretrained_model folder") from error
    value = parse_json(data, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not readable JSON (it holds a {type(value).__name__}, expected an object)")
    return value


SAMPLED_BYTES = 4096
"""Bytes hashed at the start of each tensor, enough to distinguish trained models of one shape."""
MAX_HEADER_BYTES = 100_000_000


def base_weights(folder: Path) -> str:
    """Hash the names, shapes and offsets of all tensors, and the first bytes of each."""
    return short_hash(part for path in sorted(folder.glob("model*.safetensors")) for part in _parts(path))


def short_hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _parts(path: Path) -> Iterator[bytes]:
    with open_file(path.parent, path.name) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, MAX_HEADER_BYTES))
        yield header
        try:
            tensors = [one for name, one in json.loads(header).items() if name != "__metadata__"]
            offsets = [(int(begin), int(end)) for begin, end in (one["data_offsets"] for one in tensors)]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"policy '{path.parent}': {path.name} is damaged; download the base model again"
            ) from error
        for begin, end in offsets:
            file.seek(8 + length + max(0, begin))
            yield file.read(max(0, min(end - begin, SAMPLED_BYTES)))
