"""A policy's folder in LeRobot's layout: where it is, and its JSON as far as it may be believed; and a short hash that
tells one base model's weights from another's, without reading all of them. No torch.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from vlatune.dataset.storage.hub import fetch
from vlatune.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, open_file, parse_json, read_file
from vlatune.policies.processors import CONFIG, PREPROCESSOR, PROCESSORS, Schema, checked_config, checked_steps
from vlatune.policies.registry import find_override

REPOSITORY_FILES = ("*.json", "*.safetensors", "tokenizer*")
TOKENIZER = "tokenizer.json"


def resolve_folder(path: str, revision: str | None) -> Path:
    """A local folder as it is; `owner/name` as a snapshot in the hub's cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(f"--policy.path={path}: there is no such folder, and it is not a hub repository (owner/name)")
    return fetch(
        path, lambda hub: hub.snapshot_download(path, revision=revision, allow_patterns=list(REPOSITORY_FILES))
    )


def fetch_file(repository: str, name: str) -> Path:
    return fetch(repository, lambda hub: hub.hf_hub_download(repository, name))


def read_config(folder: Path, schema: Schema, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json, with the fields that such a policy has, and a run's own values laid over it."""
    config = checked_config(read_object(folder, CONFIG), schema, f"policy '{folder}': {CONFIG}")
    return config | _allowed(folder, config, schema.type, overrides) if overrides else config


def _allowed(folder: Path, config: Mapping[str, Any], type_name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides as JSON has them, if the base's weights allow them."""
    plain = json.loads(json.dumps(overrides))
    for name, value in plain.items():
        override = find_override(type_name, name)
        stored = config.get(name, json.loads(json.dumps(override.default)))
        if override.with_base == "same" and value != stored:
            raise ValueError(
                f"--policy.{name}={value}: the weights of the base model '{folder}' are made for {stored} ({CONFIG}); leave "
                f"the flag out, or take a base that was made with {value}"
            )
    return plain


def read_steps(folder: Path, schema: Schema) -> dict[str, list[dict[str, Any]]]:
    """The processors' steps, checked, by file; only the preprocessor has to be there."""
    found = [name for name in PROCESSORS if name == PREPROCESSOR or (folder / name).exists()]
    return {name: checked_steps(read_object(folder, name), schema, f"policy '{folder}': {name}") for name in found}


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder."""
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
"""Of the beginning of each tensor: two models of one shape differ there in every tensor that was trained apart."""
MAX_HEADER_BYTES = 100_000_000


def base_weights(folder: Path) -> str:
    """Names, shapes and places of all tensors, and the first bytes of each."""
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
            offsets = [one["data_offsets"] for name, one in json.loads(header).items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"policy '{path.parent}': {path.name} is damaged (no header); fetch the base model anew"
            ) from None
        yield from _tensor_starts(file, 8 + length, offsets)


def _tensor_starts(file: IO[bytes], data_begin: int, offsets: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    for begin, end in offsets:
        file.seek(data_begin + begin)
        yield file.read(min(end - begin, SAMPLED_BYTES))
