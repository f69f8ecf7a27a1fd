"""A policy's folder in LeRobot's layout: where it is, and its JSON as far as it may be believed. No torch."""

from pathlib import Path
from typing import Any

from vlatune.dataset.storage.hub import fetch
from vlatune.files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, parse_json, read_file
from vlatune.policies.processors import CONFIG, PREPROCESSOR, PROCESSORS, Schema, checked_config, checked_steps

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


def read_config(folder: Path, schema: Schema) -> dict[str, Any]:
    """config.json, with the fields that such a policy has."""
    return checked_config(read_object(folder, CONFIG), schema, f"policy '{folder}': {CONFIG}")


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
