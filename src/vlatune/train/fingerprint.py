"""Fingerprints of dataset, base model and versions as short hashes, stored in checkpoints.

They are cheap to compute: file sizes for videos, and the first bytes of every weight. They identify
inputs; they do not verify file integrity.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np

from vlatune.data.meta.dataset_meta import DatasetMeta
from vlatune.policies.base_folder import base_weights, short_hash
from vlatune.random_streams import MIXED_ORDER_VERSION, ORDER_VERSION
from vlatune.run_setup import Setup
from vlatune.storage.files import MAX_TOKENIZER_BYTES, read_file
from vlatune.storage.remote_retry import retried

PACKAGES = ("vlatune", "torch", "lerobot", "transformers", "tokenizers", "peft", "numpy", "av", "ray")
VERSIONS = "versions."


def fingerprints(setup: Setup) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, meta in enumerate(setup.metas):
        found[f"dataset.{number}.meta"] = short_hash(_meta_parts(meta))
        found[f"dataset.{number}.files"] = short_hash(_file_sizes(meta))
    training = setup.training
    found["dataset.selection"] = short_hash(
        np.asarray(one, dtype=np.int64).tobytes() for one in (training.dataset, training.position, training.length)
    )
    if computed := list(_computed_stats(setup)):
        found["dataset.statistics"] = short_hash(computed)
    found["base.weights"] = base_weights(Path(setup.policy.folder))
    for name, file in setup.adapter.base_files(setup.policy).items():
        found[f"base.{name}"] = short_hash([read_file(file.parent, file.name, max_bytes=MAX_TOKENIZER_BYTES)])
    found[f"{VERSIONS}order"] = str(MIXED_ORDER_VERSION if setup.order.mixture else ORDER_VERSION)
    return found | {f"{VERSIONS}{name}": version(name) for name in PACKAGES}


def versions_in(found: Mapping[str, str]) -> dict[str, str]:
    """Return package -> version from the fingerprints."""
    return {name.removeprefix(VERSIONS): one for name, one in found.items() if name.startswith(VERSIONS)}


def _computed_stats(setup: Setup) -> Iterator[bytes]:
    """Yield the normalisation statistics that are not part of the dataset's meta/."""
    meta = setup.metas[0]
    for key, stats in setup.stats.items():
        own = meta.stats.get(meta.own(key), {})
        for name, values in stats.items():
            if values is not own.get(name):
                yield f"{key} {name}".encode() + np.asarray(values, dtype=np.float64).tobytes()


def _meta_parts(meta: DatasetMeta) -> Iterator[bytes]:
    """Yield what determines frames and scales, independent of the dataset's location."""
    features = {name: [one.dtype, one.shape, one.names] for name, one in meta.features.items()}
    stats = {key: {name: values.tolist() for name, values in of.items()} for key, of in meta.stats.items()}
    plain = [meta.version, meta.fps, features, meta.tasks, stats, meta.templates]
    yield json.dumps(plain, sort_keys=True, default=dict).encode()
    for column in (meta.episodes.index, meta.episodes.length, meta.episodes.from_row):
        yield column.tobytes()


def _file_sizes(meta: DatasetMeta) -> Iterator[bytes]:
    """Yield name and size of every data and video file."""
    for folder in ("data", "videos"):
        for name, size in sorted(_sizes_below(meta, folder).items()):
            yield f"{name} {size}\n".encode()


def _sizes_below(meta: DatasetMeta, folder: str) -> dict[str, int]:
    top = meta.root.join(folder)
    if meta.root.is_local:
        files = (path for path in Path(top).rglob("*") if path.is_file())
        return {path.relative_to(top).as_posix(): path.stat().st_size for path in files}
    fs = meta.root.filesystem()
    listed = retried(lambda: fs.find(top, detail=True), f"'{meta.root.url}/{folder}'")
    return {name.removeprefix(top): int(info["size"]) for name, info in listed.items()}
