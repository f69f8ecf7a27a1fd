"""Folders and hub repositories: the one place that may touch the network, and only for a name the user gave.

The token comes from the environment (HF_TOKEN or a stored login) inside huggingface_hub and is never passed
on, printed or stored. HF_HUB_OFFLINE is honoured by the library.
"""

from pathlib import Path
from typing import Any

REPOSITORY_FILES = ("*.json", "*.safetensors", "tokenizer*")


def resolve_folder(path: str, revision: str | None) -> Path:
    """A local folder as it is; `owner/name` as a snapshot in the hub's cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ValueError(f"--policy.path={path}: there is no such folder, and it is not a hub repository (owner/name)")
    return _fetch(
        path, lambda hub: hub.snapshot_download(path, revision=revision, allow_patterns=list(REPOSITORY_FILES))
    )


def fetch_dataset(repository: str, revision: str | None) -> Path:
    """A dataset repository as a snapshot in the hub's cache."""
    return _fetch(repository, lambda hub: hub.snapshot_download(repository, repo_type="dataset", revision=revision))


def fetch_file(repository: str, name: str) -> Path:
    return _fetch(repository, lambda hub: hub.hf_hub_download(repository, name))


def _fetch(repository: str, call: Any) -> Path:
    import huggingface_hub

    try:
        return Path(call(huggingface_hub))
    except Exception as error:  # the library raises many kinds; each means: this repository cannot be had now
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"hub repository '{repository}' cannot be fetched ({type(error).__name__}: {reason}); check the name, the network "
            f"and HF_TOKEN (gated repositories need one), or give a local folder"
        ) from error
