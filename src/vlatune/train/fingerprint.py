"""Short hashes of what a run is made of, kept in its checkpoints: config, dataset, base model, versions."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from vlatune.config import RunConfig, to_json
from vlatune.train.setup import Setup

PACKAGES = ("vlatune", "torch", "lerobot", "transformers", "ray", "numpy", "av")


def fingerprints(config: RunConfig, setup: Setup) -> dict[str, str]:
    return {
        "config": _hash(json.dumps(to_json(config), sort_keys=True).encode()),
        "dataset": _hash("".join(meta.root.url + str(meta.episodes.length.tolist()) for meta in setup.metas).encode()),
        "base": _hash(_weights_header(Path(setup.policy.folder))),
        **{f"version.{name}": version(name) for name in PACKAGES},
    }


def _weights_header(folder: Path) -> bytes:
    """Names, shapes and offsets of all tensors, and the size: cheap, and another model has others."""
    found = sorted(folder.glob("*.safetensors"))
    parts = []
    for path in found:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            parts.append(f"{path.name} {path.stat().st_size}".encode() + file.read(min(length, 10_000_000)))
    return b"".join(parts)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
