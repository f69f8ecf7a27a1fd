"""Locate a policy's folder in LeRobot's layout, read its validated JSON, and hash its weights.

The hash samples each tensor instead of reading all bytes. Does not import torch.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from vlatune.config.fields import violation
from vlatune.policies.processors import CONFIG, PREPROCESSOR, PROCESSORS, Schema, checked_config, checked_steps
from vlatune.registry import get_policy_info
from vlatune.storage.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, open_file, parse_json, read_file
from vlatune.storage.hub import fetch
from vlatune.storage.paths import require_base

REPOSITORY_FILES = ("*.json", "*.safetensors", "tokenizer*")
TOKENIZER = "tokenizer.json"

if TYPE_CHECKING:
    from vlatune.policies.base import Fit


def resolve_folder(path: str, revision: str | None) -> Path:
    """Return a local folder, or download `owner/name` to the hub's cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    require_base(path)
    return fetch(
        path, lambda hub: hub.snapshot_download(path, revision=revision, allow_patterns=list(REPOSITORY_FILES))
    )


def fetch_file(repository: str, name: str) -> Path:
    return fetch(repository, lambda hub: hub.hf_hub_download(repository, name))


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


def with_defaults(config: Mapping[str, Any], options: Any, normalisation: Mapping[str, str]) -> dict[str, Any]:
    """Fill omitted fields with LeRobot's defaults; lists become tuples, as in flags."""
    defaults = dataclasses.asdict(options) | {"normalization_mapping": normalisation}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
    return defaults | {name: value for name, value in given.items() if value is not None or name not in defaults}


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


def read_steps(folder: Path, schema: Schema) -> dict[str, list[dict[str, Any]]]:
    """Read and validate the processor steps by file; only the preprocessor is required."""
    found = [name for name in PROCESSORS if name == PREPROCESSOR or (folder / name).exists()]
    return {name: checked_steps(read_object(folder, name), schema, f"policy '{folder}': {name}") for name in found}


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object from the folder."""
    where, most = f"policy '{folder}': {name}", MAX_TOKENIZER_BYTES if name == TOKENIZER else MAX_JSON_BYTES
    try:
        data = read_file(folder, name, max_bytes=most)
    except FileNotFoundError as error:
        raise ValueError(
            f"policy '{folder}': no {name} in it; --policy.path must be a LeRobot pretrained_model folder"
        ) from error
    value = parse_json(data, where)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not readable JSON (it holds a {type(value).__name__}, expected an object)")
    return value


SAMPLED_BYTES = 4096
"""Bytes hashed at the start of each tensor, enough to tell trained models of one shape apart."""
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
        for begin, end in _offsets(header, path):
            file.seek(8 + length + begin)
            yield file.read(min(end - begin, SAMPLED_BYTES))


def _offsets(header: bytes, path: Path) -> list[tuple[int, int]]:
    """Return the byte range of every tensor in the header of a safetensors file."""
    where, remedy = f"policy '{path.parent}': {path.name} is damaged (its header", "download the base model again"
    tensors = parse_json(header, where, remedy=remedy)
    entries = [one for name, one in tensors.items() if name != "__metadata__"] if isinstance(tensors, dict) else [None]
    offsets = [one.get("data_offsets") if isinstance(one, dict) else None for one in entries]
    found = [(one[0], one[1]) for one in offsets if isinstance(one, list) and [*map(type, one)] == [int, int]]
    if len(found) < len(offsets) or not all(0 <= begin <= end < 2**62 for begin, end in found):
        raise ValueError(f"{where} has no offsets of tensors); {remedy}")
    return found
